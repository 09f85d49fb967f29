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
from specbeam.backends.torch.gpu import GpuBackend
from specbeam.backends.torch.kernels import (
    TILE_POSITIONS,
    Ancestors,
    attend,
    attention_bytes,
    nodes_per_block,
    norm,
    product,
    summarize,
)
from specbeam.backends.torch.transformer import ACTIVATIONS
from specbeam.cache.slots import Slots
from specbeam.checkpoints import open_checkpoint
from specbeam.tree import Tree
from tests.backends.test_conformance import FAMILIES, ONE_PER_ARCHITECTURE, evaluate
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
    x, weight, bias, residual = (
        drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(n, 48), (40, 48), (40,), (n, 40)])
    )
    expected = F.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(product(x, weight, bias, residual).float(), expected + residual.float(), **near(dtype))
    assert product(x, weight, dtype=torch.float32).dtype == torch.float32
    for name, activation in ACTIVATIONS.items():
        gate, up = expected.chunk(2, dim=-1)
        got = product(x, weight, bias, None, name, True)
        torch.testing.assert_close(got.float(), activation(gate) * up, atol=near(dtype)["atol"], rtol=1e-2)
        got = product(x, weight, bias, activation=name)
        torch.testing.assert_close(got.float(), activation(expected), **near(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype):
    shapes = (3, 48), (48,), (48,), (3, 48)
    x, weight, bias, residual = (drawn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    rms = F.rms_norm(x.float(), (48,), weight.float(), 1e-5)
    torch.testing.assert_close(norm(x, weight, None, 1e-5).float(), rms, **near(dtype))
    layer = F.layer_norm(x.float(), (48,), weight.float(), bias.float(), 1e-5) + residual.float()
    torch.testing.assert_close(norm(x, weight, bias, 1e-5, residual).float(), layer, **near(dtype))


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap"),
    [(4, 2, 24, None, None), (4, 4, 16, 70, None), (8, 1, 32, None, 5.0), (4, 2, 16, 9, None)],
)
def test_attention_of_trees(heads, kv_heads, head_dim, window, softcap):
    """Nodes on prefixes and beyond them, in slots of any order, in programs of both kinds."""
    rng, group = np.random.default_rng(1), heads // kv_heads
    keys, values = drawn(kv_heads, 400, head_dim, seed=1), drawn(kv_heads, 400, head_dim, seed=2)
    positions, blocks, suffixes, slots, sequences = [], [], [], [], []
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
        each = nodes_per_block(group)
        blocks += [[first + i, min(each, len(own) - i), begin, shared] for i in range(0, len(own), each)]
    blocks.append([0, 0, 0, 0])  # padding
    q = drawn(len(positions), heads, head_dim, seed=3)
    where = Ancestors(int32(positions), int32(blocks), int32(suffixes), int32([*slots, *[0] * 64]), None, True)
    whole, shared = (
        attend(q, keys, values, replace(where, tiles=tiles), head_dim**-0.5, softcap, window) for tiles in (None, 4)
    )
    torch.testing.assert_close(whole, shared, atol=1e-6, rtol=0)
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


@pytest.fixture(scope="module")
def pair(save):
    """A model on the backend that is the reference, and on the one for GPUs."""

    def pair(family, **changes):
        architecture, own = FAMILIES[family]
        folder = save(random_model(architecture, **{"num_hidden_layers": 1} | own | changes))
        lm = specbeam.load(folder, backend="torch", device="cpu", dtype="float32")
        return lm, replace(lm, backend=GpuBackend(open_checkpoint(folder), "cpu", "float32"))

    return pair


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.thorough) if f in ("smollm3", "gemma3") else f for f in ONE_PER_ARCHITECTURE],
)
def test_logits_equal_the_logits_of_the_reference(pair, family):
    expected, got = (evaluate(Slots(Tree([5, 6, 7, 8, 9, 10, 11]), lm.backend), np.arange(7)) for lm in pair(family))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 3}, {"draft": "ngram"}])
def test_texts_equal_the_texts_of_the_reference(pair, options):
    """They go ahead."""
    models = pair("llama", num_hidden_layers=1)
    expected, got = (specbeam.generate(lm, [5, 6, 5, 6], max_new_tokens=5, **options) for lm in models)
    assert got.token_ids == expected.token_ids
    assert got.sequences[0].score == pytest.approx(expected.sequences[0].score, abs=1e-4)


@pytest.mark.parametrize(
    ("gpu", "family"),
    [
        ("H100", "qwen3"),
        *(pytest.param("H100", family, marks=pytest.mark.thorough) for family in ("gpt2", "gemma2")),
        *(pytest.param(gpu, "qwen3", marks=pytest.mark.thorough) for gpu in ("A100", "RTX 4090")),
    ],
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
    command = [sys.executable, "-m", "tests.backends.compiled_kernels", gpu, str(folder)]
    env = own | {"TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = [line.split() for line in run.stdout.splitlines()]
    assert len({name for name, _ in kernels}) == 8
    assert max(int(taken) for name, taken in kernels if "attend" in name) <= attention_bytes(256, 2)
