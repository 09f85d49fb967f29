"""The kernels for GPUs where there is none: in Triton's interpreter they compute right, and for an H100 they compile.

tests/backends/test_gpu.py runs them on a GPU. That no bit depends on the way can be seen only there.
"""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("test_gpu.py runs the kernels themselves", allow_module_level=True)

import specbeam
from specbeam import Engine
from specbeam.backends.torch.gpu import GpuBackend
from specbeam.backends.torch.kernels import (
    MAX_NODES_IN_PARTS,
    TILE_POSITIONS,
    Addend,
    Ancestors,
    add_and_norm,
    attend,
    gumbel,
    highest,
    partial_products,
    parts_of,
    product,
    summarize,
)
from specbeam.backends.torch.parts.mlp import ACTIVATIONS
from specbeam.backends.torch.sampling import gumbel as plain_gumbel
from specbeam.backends.torch.sampling import highest as by_sorting
from specbeam.cache.slots import Slots
from specbeam.checkpoints import open_checkpoint
from specbeam.core.tree import Tree
from tests.backends.test_conformance import FAMILIES, WITH_KERNELS, evaluate
from tests.conftest import random_model

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of padding are whatever they are
DTYPES = [torch.float32, torch.float16]  # the interpreter has no products of bfloat16


def near(dtype):
    return {"atol": 1e-5 if dtype == torch.float32 else 3e-2, "rtol": 0}


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 20, 70])
def test_products(n, dtype):
    x, weight, bias = (drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(n, 48), (40, 48), (40,)]))
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(product(x, weight, bias).float(), expected, **near(dtype))
    assert product(x, weight, dtype=torch.float32).dtype == torch.float32
    for name, activation in ACTIVATIONS.items():
        gate, up = expected.chunk(2, dim=-1)
        got = product(x, weight, bias, name, True)
        torch.testing.assert_close(got.float(), activation(gate) * up, atol=near(dtype)["atol"], rtol=1e-2)
        got = product(x, weight, bias, activation=name)
        torch.testing.assert_close(got.float(), activation(expected), atol=near(dtype)["atol"], rtol=1e-2)


@pytest.mark.parametrize("columns", [48, 1100, 2100])
def test_products_in_parts(columns):
    """The parts that many nodes add up in their programs are the parts of few nodes, added up in order."""
    weight, x = drawn(40, columns), drawn(MAX_NODES_IN_PARTS + 1, columns, seed=1)
    few, many = partial_products(x[:2], weight), partial_products(x, weight)
    assert (len(few), len(many)) == (parts_of(40, columns), 1)
    assert torch.equal(sum(few[1:], few[0]), many[0, :2])
    torch.testing.assert_close(many[0], x @ weight.T, atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype):
    shapes = (3, 48), (48,), (48,), (48,), (48,)
    x, weight, bias, post_weight, post_bias = (drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    parts = drawn(2, 3, 48, seed=9)
    added = parts[0] + parts[1] + bias.float()
    for own, post in ((None, None), (bias, post_bias)):

        def normed(values, weight, bias, is_layer=own is not None):
            if is_layer:
                return F.layer_norm(values, (48,), weight.float(), bias.float(), 1e-5)
            return F.rms_norm(values, (48,), weight.float(), 1e-5)

        for addend, expected in (
            (None, x.float()),
            (Addend(parts, bias, None), x.float() + added),
            (Addend(parts, bias, (post_weight, post)), x.float() + normed(added, post_weight, post_bias)),
        ):
            total, got = add_and_norm(x, addend, (weight, own), 1e-5)
            torch.testing.assert_close(total.float(), expected, **near(dtype))
            torch.testing.assert_close(got.float(), normed(total.float(), weight, bias), **near(dtype))
            total, got = add_and_norm(x, addend, None, 1e-5)
            torch.testing.assert_close(got.float(), expected, **near(dtype))


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap"),
    [
        (2, 1, 24, None, 5.0),
        (4, 2, 16, 9, None),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in ((4, 2, 24, None, None), (4, 4, 16, 70, None))),
        pytest.param(8, 1, 32, None, 5.0, marks=pytest.mark.thorough),
    ],
)
def test_attention_of_trees(heads, kv_heads, head_dim, window, softcap):
    """Nodes on prefixes and beyond them, in slots of any order, in programs of both kinds and with tiles of queries."""
    rng, group = np.random.default_rng(1), heads // kv_heads
    keys, values = drawn(kv_heads, 400, head_dim, seed=1), drawn(kv_heads, 400, head_dim, seed=2)
    positions, ends, suffixes, slots, sequences = [], [], [], [], []
    for length, own in ((130, [3, 1, 0, 70]), (200, [0, 0, 0]), (10, [2, 2]), (1, [0])):
        prefix, begin, first = rng.permutation(400)[:length].tolist(), len(slots), len(positions)
        slots += prefix
        for number, more in enumerate(own):
            suffix = rng.permutation(400)[:more].tolist()
            positions.append(length + more - 1 if more else length - 1 - number)
            sequences.append([*prefix[: positions[-1] + 1], *suffix])
            suffixes.append(len(slots))
            slots += suffix
        shared = length if any(own) else -(-length // TILE_POSITIONS) * TILE_POSITIONS
        ends.append((first, len(own), begin, shared))
    q = drawn(len(positions), heads, head_dim, seed=3)

    def attended(queries, tiles):
        each = queries // group
        blocks = [[first + i, min(each, own - i), *more] for first, own, *more in ends for i in range(0, own, each)]
        padded = int32([*blocks, [0, 0, 0, 0]])
        where = Ancestors(int32(positions), padded, int32(suffixes), int32([*slots, *[0] * 64]), tiles, True, queries)
        return attend(q, keys, values, where, head_dim**-0.5, softcap, window)

    whole = attended(16, None)
    for queries, tiles in ((16, 4), (64, 4)):
        torch.testing.assert_close(attended(queries, tiles), whole, atol=1e-6, rtol=0)
    for row, query, sequence in zip(whole, q, sequences, strict=True):
        seen = sequence[-window:] if window else sequence
        k, v = (stored[:, seen].repeat_interleave(group, 0) for stored in (keys, values))
        scores = torch.einsum("hd,hsd->hs", query, k) * head_dim**-0.5
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        torch.testing.assert_close(row, torch.einsum("hs,hsd->hd", scores.softmax(-1), v).flatten())


def test_summaries_of_logits():
    logits = drawn(4, 9000)
    logits[0, 77] = logits[0, 8000] = 9.0  # of equals the first
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    normalizers, tokens = summarize(logits)
    torch.testing.assert_close(normalizers, logits.logsumexp(-1), equal_nan=True)
    assert tokens[[0, 3]].tolist() == [77, int(logits[3].argmax())]


@pytest.mark.parametrize(("size", "k"), [(9000, 2), (9000, 9), (300, 40), (40, 40), (9000, 300)])
def test_highest_scores(size, k):
    """Of equals the lower first, also among impossible ones."""
    scores = drawn(3, size).round(decimals=1)
    scores[0, 5:] = -torch.inf
    scores[1, ::2] = -0.0
    assert torch.equal(highest(scores, k), by_sorting(scores, k))


def test_noise():
    seeds, streams = np.array([3, 2**64 - 1, 5], np.uint64), np.array([0, 7, 2**32 - 1], np.uint32)
    for vocab in (6, 2050):
        expected = plain_gumbel(seeds, streams, streams + np.uint32(9), vocab)
        got = gumbel(seeds, streams, streams + np.uint32(9), vocab, "cpu")
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)


@pytest.fixture(scope="module")
def pair(save):
    """A model on the backend that is the reference, and on the one for GPUs."""

    def pair(family, **changes):
        architecture, own = FAMILIES[family]
        few = {"vocab_size": 70, "eos_token_id": 1, "bos_token_id": 0, "pad_token_id": 1}  # the interpreter is slow
        folder = save(random_model(architecture, **few | {"num_hidden_layers": 1} | own | changes))
        lm = specbeam.load(folder, backend="torch", device="cpu", dtype="float32")
        return lm, replace(lm, backend=GpuBackend(open_checkpoint(folder), "cpu", "float32"))

    return pair


DIFFERENT = ("qwen3", "mistral, sliding window", "gpt2", "stablelm, parallel", "gemma2")
"""Families that have every kind of norm, activation, attention and block among them."""


@pytest.mark.parametrize(
    "family",
    [f if f in DIFFERENT else pytest.param(f, marks=pytest.mark.thorough) for f in WITH_KERNELS],
)
def test_logits_equal_the_logits_of_the_reference(pair, family):
    expected, got = (evaluate(Slots(Tree([5, 6, 7, 8, 9, 10, 11]), lm.backend), np.arange(7)) for lm in pair(family))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, {"draft": "ngram"}])
def test_texts_equal_the_texts_of_the_reference(pair, options):
    """They go ahead. Beams and samples are in the next test."""
    models = pair("llama", num_hidden_layers=1)
    expected, got = (specbeam.generate(lm, [5, 6, 5, 6], max_new_tokens=5, **options) for lm in models)
    assert got.token_ids == expected.token_ids
    assert got.sequences[0].score == pytest.approx(expected.sequences[0].score, abs=1e-4)


@pytest.mark.thorough
def test_requests_go_ahead_together(pair):
    """Sequences and searches, some with suffixes: each as if it were alone."""
    reference, lm = pair("llama")
    kinds = [{}, {"num_beams": 2}, {"do_sample": True, "seed": 3}]
    engine, prompts = Engine(lm), [[5, 6, 7, 8, 9][: 2 + i % 3] for i in range(len(kinds))]
    submitted = [
        engine.submit(p, {"max_new_tokens": 3, "eos_token_id": [], **how})
        for p, how in zip(prompts, kinds, strict=True)
    ]
    engine.run()
    for request, prompt, how in zip(submitted, prompts, kinds, strict=True):
        expected = specbeam.generate(reference, prompt, max_new_tokens=3, eos_token_id=[], **how)
        assert request.result().token_ids == expected.token_ids
        assert request.result().sequences[0].score == pytest.approx(expected.sequences[0].score, abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("gpu", "family"),
    [("H100", "qwen3"), ("H100", "gpt2"), ("H100", "gemma2"), ("A100", "qwen3"), ("RTX 4090", "qwen3")],
)
def test_kernels_compile_for_gpus(save, gpu, family, tmp_path):
    """Their shared memory suffices, also for heads of 256 features."""
    architecture, changes = FAMILIES[family]
    folder = save(
        random_model(
            architecture, **{"num_hidden_layers": 1} | ({} if family == "gpt2" else {"head_dim": 256}) | changes
        )
    )
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.backends.compiled_kernels", gpu, str(folder), "1", "3", "40"]
    env = own | {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert len({line.split()[0] for line in run.stdout.splitlines()}) == 11
