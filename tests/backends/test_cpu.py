"""The native kernels: against NumPy and the gguf package, and bit for bit against themselves in other batches.

test_conformance.py tests what all backends have in common.
"""

import ctypes
import hashlib
import importlib
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import platformdirs
import pytest
import torch
from filelock import FileLock
from gguf import GGMLQuantizationType as Type
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import assume, given
from hypothesis import strategies as st

import specbeam
from specbeam import SpecbeamError
from specbeam.backends.contract import TreeBatch
from specbeam.backends.cpu import CpuBackend, _pack_segments, weights
from specbeam.backends.cpu.library import address, choose_isa, find, library
from specbeam.backends.cpu.model import bytes_of_sequence, new_model
from specbeam.backends.torch import TorchBackend
from specbeam.cache.slots import Slots
from specbeam.checkpoints import open_checkpoint, parts
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parameters import parameters
from specbeam.checkpoints.parts.attention import Attention
from specbeam.checkpoints.parts.experts import Experts
from specbeam.checkpoints.parts.mlp import MLP, SharedExpert
from specbeam.checkpoints.parts.part import Part
from specbeam.checkpoints.parts.per_layer_embedding import PerLayerEmbedding
from specbeam.checkpoints.parts.short_convolution import ShortConvolution
from specbeam.checkpoints.rope import Rope
from specbeam.core.tree import Tree
from specbeam.models.model import LanguageModel
from tests.backends.test_conformance import FAMILIES
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model

ISAS = [isa for isa in ("avx512", "avxvnni", "avx2", "neon", "portable") if library().specbeam_isa(isa.encode())]
ALIKE = [
    isa for isa in ISAS if isa != "portable" or platform.machine() in ("aarch64", "arm64")
]  # x86 then fuses nothing
KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
F32, Q8, Q4_MIN = 0, 1, 6


def room(size):
    return np.zeros(size, np.uint8)


def pack(kind, raw, rows, columns, order=None):
    form = library().specbeam_format_of(int(kind))
    out = room(library().specbeam_matrix_bytes(form, rows, columns))
    assert pack_status(kind, raw, rows, columns, out, order) == 0
    return form, out


def pack_status(kind, raw, rows, columns, out, order=None, tiles=None, size=None):
    """What packing returns, which writes all tiles of 16 rows unless it is given other sizes."""
    at = None if order is None else order.ctypes.data
    sizes = raw.size if size is None else size, rows, columns, at, 0, -(-rows // 16) if tiles is None else tiles
    return library().specbeam_pack(int(kind), raw.ctypes.data, *sizes, out.ctypes.data)


def quantize(form, values):
    out = room(library().specbeam_matrix_bytes(form, *values.shape))
    assert library().specbeam_quantize(form, values.ctypes.data, *values.shape, out.ctypes.data) == 0
    return out


def unpack(form, packed, rows, columns):
    weight = library().specbeam_weight
    at = packed.ctypes.data
    return np.array([[weight(form, rows, columns, at, r, c) for c in range(columns)] for r in range(rows)], np.float32)


def multiply(form, packed, rows, columns, x, isa="", threads=1):
    out = np.zeros((len(x), rows), np.float32)
    x = np.ascontiguousarray(x, np.float32)
    status = library(choose_isa(isa)).specbeam_multiply(
        threads, form, rows, columns, packed.ctypes.data, x.ctypes.data, len(x), out.ctypes.data
    )
    assert status == 0
    return out


def random_blocks(kind, rows, columns, seed=0):
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 60, (rows, columns // block * size), dtype=np.uint8)  # small bytes make no infinite scales


def activations_as_quantized(x):
    """Activations [n, columns] rounded as the kernels do it: int8 in groups of 32 with a scale."""
    steps, scale = steps_of_activations(x)
    return (np.rint(steps) * scale).reshape(len(x), -1)[:, : x.shape[1]].astype(np.float64)


def may_be_rounded_both_ways(x):
    """Whether an activation is so near the middle between two int8 that the last bit of a division decides."""
    steps, _ = steps_of_activations(x)
    return bool((np.abs(np.abs(steps - np.rint(steps)) - 0.5) < 1e-4).any())


def steps_of_activations(x):
    """Activations [n, columns] in groups of 32, divided by the scales of the groups, and these scales."""
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % 32))).reshape(len(x), -1, 32)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    return np.where(scale > 0, groups / np.where(scale > 0, scale, 1), 0), scale


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_keep_the_values_of_blocks(kind):
    kind, rows, columns = Type[kind], 21, 512
    raw = random_blocks(kind, rows, columns)
    for order in (None, np.random.default_rng(1).permutation(rows)):
        kept = unpack(*pack(kind, raw, rows, columns, order), rows, columns)
        np.testing.assert_array_equal(kept, quants.dequantize(raw, kind)[np.arange(rows) if order is None else order])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_multiply_as_numpy_does(kind, isa):
    kind, rows, columns = Type[kind], 37, 512
    raw = random_blocks(kind, rows, columns)
    form, packed = pack(kind, raw, rows, columns)
    x = np.random.default_rng(2).standard_normal((11, columns)).astype(np.float32)
    expected = activations_as_quantized(x) @ quants.dequantize(raw, kind).astype(np.float64).T
    got = multiply(form, packed, rows, columns, x, isa)
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


@given(st.integers(1, 40), st.integers(1, 100), st.sampled_from([F32, Q8, Q4_MIN]), st.integers(1, 20), st.data())
def test_kernels_give_a_row_the_same_bits_in_any_batch(rows, columns, form, n, data):
    """Other rows and the number of threads change no bit. The shapes include some that fill no vector."""
    rng = np.random.default_rng(rows * columns)
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    packed = quantize(form, values)
    x = rng.standard_normal((n, columns)).astype(np.float32)
    assume(form == F32 or not may_be_rounded_both_ways(x))
    for isa in ISAS:
        whole = multiply(form, packed, rows, columns, x, isa)
        some = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=n))
        np.testing.assert_array_equal(multiply(form, packed, rows, columns, x[some], isa, threads=2), whole[some])
    for isa in {"avxvnni", "avx2"} & {*ISAS} if "avx512" in ISAS else ():
        widest = multiply(form, packed, rows, columns, x, "avx512")
        np.testing.assert_array_equal(multiply(form, packed, rows, columns, x, isa), widest)
    kept = unpack(form, packed, rows, columns).astype(np.float64)
    exact = (x if form == F32 else activations_as_quantized(x)) @ kept.T
    assert np.abs(whole - exact).max() < 1e-5 * max(np.abs(exact).max(), 1)


@pytest.mark.parametrize(("form", "bits"), [(Q8, 8), (2, 6), (3, 6), (4, 6), (5, 6), (Q4_MIN, 4), (7, 4)])
def test_kernels_add_the_largest_products_without_overflow(form, bits):
    """Weights and activations are the largest ones, of any sign: all sums of 16 bits are at their bounds."""
    rows, columns = 16, 512
    rng = np.random.default_rng(4)
    packed = np.full(library().specbeam_matrix_bytes(form, rows, columns), 0x2C, np.uint8)  # the scales: about 0.07
    for fill in (255, 0, rng.choice(np.array([0, 255], np.uint8), rows * columns * bits // 8)):
        packed[: rows * columns * bits // 8] = fill
        x = np.concatenate([[[127] * columns, [-127] * columns], rng.choice([-127, 127], (7, columns))])
        expected = x @ unpack(form, packed, rows, columns).astype(np.float64).T
        got = [multiply(form, packed, rows, columns, x, isa) for isa in ISAS]
        for out in got:
            assert np.abs(out - expected).max() <= 1e-5 * np.abs(expected).max()
        for out in got[1 : len(ISAS) - 1]:  # all but the portable kernels
            np.testing.assert_array_equal(out, got[0])


@pytest.mark.parametrize("form", [F32, Q8, Q4_MIN])
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_multiply_many_rows_in_sweeps(form, isa):
    rng = np.random.default_rng(3)
    rows, columns, n = 20, 4100, 150
    packed = quantize(form, rng.standard_normal((rows, columns)).astype(np.float32))
    x = rng.standard_normal((n, columns)).astype(np.float32)
    whole = multiply(form, packed, rows, columns, x, isa, threads=2)
    for first in range(0, n, 50):
        few = multiply(form, packed, rows, columns, x[first : first + 50], isa)
        np.testing.assert_array_equal(few, whole[first : first + 50])


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_K"])
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_give_a_row_the_same_bits_with_any_number_of_rows_and_blocks(kind, isa):
    """Enough blocks that some are multiplied two at a time, and tiles that share their rows."""
    rows, columns, numbers = 16 * 16 + 3, 256, (*range(1, 28), 57, 64, 65)
    form, packed = pack(Type[kind], random_blocks(Type[kind], rows, columns), rows, columns)
    x = np.random.default_rng(3).standard_normal((max(numbers), columns)).astype(np.float32)
    alone = np.concatenate([multiply(form, packed, rows, columns, row, isa) for row in x[:, None]])
    for n in numbers:
        np.testing.assert_array_equal(multiply(form, packed, rows, columns, x[:n], isa), alone[:n])


def test_kernels_quantize_near_the_values():
    values = np.random.default_rng(0).standard_normal((64, 320)).astype(np.float32)
    values[3] = 0  # nothing to scale
    values[4] = 7  # no spread
    for form, most in ((F32, 0), (Q8, 0.012), (Q4_MIN, 0.09)):
        kept = unpack(form, quantize(form, values), *values.shape)
        error = np.sqrt(np.mean((kept - values) ** 2, axis=1))
        assert error.max() <= most
        assert np.abs(kept[3]).max() == 0
        np.testing.assert_allclose(kept[4], 7, rtol=1e-3)
    # The search of int4 beats plain rounding between minimum and maximum.
    groups = values.reshape(-1, 32)
    low, step = groups.min(1, keepdims=True), np.ptp(groups, axis=1, keepdims=True) / 15
    plain = np.rint((groups - low) / np.where(step > 0, step, 1)) * step + low
    assert np.mean((kept - values) ** 2) < 0.9 * np.mean((plain - groups) ** 2)


def test_kernels_refuse_sizes_that_do_not_fit_and_numbers_that_overflow():
    raw, out, native = random_blocks(Type.Q8_0, 4, 64), room(1 << 16), library()
    assert pack_status(8, raw, 4, 64, out) == 0
    assert pack_status(8, raw, 4, 64, out, size=raw.size - 1) == pack_status(8, raw, 4, 60, out) == -1
    assert pack_status(8, raw, 4, 64, out, order=np.array([0, 1, 2, 4])) == -1
    assert pack_status(8, raw, 4, 64, out, tiles=2) == pack_status(99, raw, 4, 64, out) == -1
    assert native.specbeam_matrix_bytes(99, 4, 64) == native.specbeam_matrix_bytes(Q8, 0, 64) == -1
    for form in range(8):
        for rows, columns in ((2**62, 2**62), (2**60, 64), (2**31, 1), (1, -32), (-1, -1)):
            assert native.specbeam_matrix_bytes(form, rows, columns) < 0
    assert pack_status(Type.Q4_K, raw, 4, 32, out, size=0) == -1  # not whole blocks
    assert pack_status(Type.Q8_0, raw, 1, -32, out, size=-34) == -1
    at, to = raw.ctypes.data, out.ctypes.data
    assert native.specbeam_quantize(F32, at, 2**62, 4, to) == -1
    assert native.specbeam_multiply(1 << 30, F32, 1, 1, at, at, 1, to) == -1


# Whole models


def loaded(folder, quantize="int8", threads=1, isa=""):
    checkpoint = open_checkpoint(Path(folder))
    backend = CpuBackend(checkpoint, quantize, threads, isa)
    return LanguageModel(
        str(folder), backend, checkpoint.tokenizer, checkpoint.eos_token_ids, checkpoint.generation_defaults
    )


@pytest.fixture(scope="module")
def folder(save):
    return save(random_model("llama", hidden_size=64, num_hidden_layers=2, vocab_size=259))


PROMPTS = [[1, 2, 3, 1, 2, 3], [7] * 40, [*range(20, 90)]]

loaded_once = cache(loaded)


@given(st.lists(st.integers(0, 9), max_size=12))
def test_logits_are_the_same_bits_whichever_nodes_want_them(folder, wanted):
    """The last layer computes only the keys and values of the other nodes. Later nodes see those."""
    lm = loaded_once(folder)
    trees = [Tree([*range(30, 36)]), Tree([*range(50, 54)])]
    children = [tree.add([tree.tip] * 2, [7, 8]) for tree in trees]

    def logits(*wanted):
        places = [Slots(tree, lm.backend) for tree in trees]
        first = [
            slots.tree_batch(slots.prepare(slots.tree.prefix), np.array(those, np.int64))
            for slots, those in zip(places, wanted, strict=True)
        ]
        found = lm.backend.forward(first)
        for slots in places:
            slots.evaluated(slots.tree.prefix)
        below = lm.backend.forward(
            [one.tree_batch(two, np.arange(2)) for one, two in zip(places, children, strict=True)]
        )
        for slots in places:
            slots.close()
        return found, below

    every, below = logits(np.arange(6), np.arange(4))
    some, below_some = logits([n for n in wanted if n < 6], [n - 6 for n in wanted if n >= 6])
    np.testing.assert_array_equal(some, every[sorted(wanted, key=lambda n: n >= 6)])
    np.testing.assert_array_equal(below_some, below)


FORMATS = ("int8", "float32", "int4")
EVERY_FORMAT = {"gpt_neox", "gemma2", "gemma3", "phi3, longrope", "lfm2", "qwen3_5"}
"""They have all kinds of norms, activations, caps, rotations and parts among them."""


@pytest.mark.parametrize("family", FAMILIES)
def test_instruction_sets_give_the_same_bits(save, family):
    """Logits of a long prompt, and beams with their scores. The last prompt takes two splits of attention."""
    architecture, changes = FAMILIES[family]
    folder = save(random_model(architecture, **changes, max_position_embeddings=512))
    tokens = np.random.default_rng(1).integers(0, 256, 300)
    for quantize in FORMATS if family in EVERY_FORMAT else FORMATS[:1]:
        found = {}
        for isa in ALIKE:
            lm = loaded(folder, quantize, isa=isa)
            beams = specbeam.generate(lm, PROMPTS[2], num_beams=3, num_return_sequences=3, max_new_tokens=6).sequences
            lm.backend.reserve(len(tokens))
            logits = lm.backend.forward([of_one_sequence(tokens, np.arange(len(tokens)))])
            found[isa] = [(s.token_ids, s.log_probs, s.score) for s in beams], logits.tobytes()
        for isa in ALIKE:
            assert found[isa] == found[ALIKE[0]], (isa, quantize)


def test_threads_and_instruction_sets(folder, monkeypatch):
    for quantize, limit in (("int8", 1e-2), ("float32", 1e-3)):  # a last bit can turn the rounding to int8
        scores = {}
        for isa in ISAS:
            lms = [loaded(folder, quantize, threads, isa) for threads in (1, 2, 3)]
            found = [specbeam.generate(lm, PROMPTS[2], max_new_tokens=5, num_beams=2).sequences[0] for lm in lms]
            (scores[isa],) = {sequence.score for sequence in found}
        assert max(scores.values()) - min(scores.values()) < limit
    monkeypatch.setenv("SPECBEAM_THREADS", "3")
    assert loaded(folder, threads=None).backend.threads == 3
    monkeypatch.setenv("SPECBEAM_THREADS", "many")
    with pytest.raises(SpecbeamError, match="SPECBEAM_THREADS='many'"):
        loaded(folder, threads=None)


def log_probs_of_all(folder, tokens, quantize, isa=""):
    """The log-probabilities after each token of a sequence, [n, vocab]."""
    backend = loaded(folder, quantize, isa=isa).backend
    backend.reserve(len(tokens))
    return torch.from_numpy(backend.forward([of_one_sequence(tokens, np.arange(len(tokens)))])).log_softmax(-1)


def of_one_sequence(tokens, slots, wanted=None):
    """The part of a pass over the tokens of one sequence from its beginning."""
    at = np.arange(len(tokens))
    return TreeBatch(tokens, at, slots, slots, np.empty((len(at), 0), np.int64), at if wanted is None else at[wanted])


def test_int8_is_near_float32(folder):
    """Of random weights, activations, keys and values, which are hard to round."""
    tokens = np.random.default_rng(0).integers(0, 256, 60)
    exact, near = (log_probs_of_all(folder, tokens, quantize) for quantize in ("float32", "int8"))
    assert (near - exact).square().mean() < 0.02 * exact.var()


@pytest.mark.parametrize("isa", ISAS)
def test_attention_to_equal_values_returns_them_at_any_length(folder, isa):
    """A sequence repeats one token, so all its values are equal, and so are all its logits."""
    found = log_probs_of_all(folder, np.full(300, 7), "int8", isa)
    assert (found - found[0]).square().mean() < 1e-4 * found.var()


def test_a_quantized_file_keeps_its_values(tmp_path):
    model = random_model("llama", hidden_size=64, intermediate_size=96)
    path = write_gguf(tmp_path / "m.gguf", model, Type.Q4_1)
    kept, exact = specbeam.load(path, backend="cpu"), specbeam.load(path, backend="torch", dtype="float32")
    assert kept.backend.quantize == "keep"
    for prompt in PROMPTS:  # quantized activations make a small difference
        a, b = (specbeam.generate(lm, prompt, max_new_tokens=1, num_beams=4).sequences[0] for lm in (kept, exact))
        assert a.score == pytest.approx(b.score, abs=0.3)


def test_wrong_arguments_are_named(folder):
    for how, says in (
        ({"dtype": "float32", "quantize": "int8", "device": "cpu"}, "contradicts quantize='int8'"),
        ({"quantize": "int3"}, "quantize='int3' is not allowed"),
        ({"quantize": "keep"}, "is not quantized: give int8"),
        ({"quantize": "int8", "backend": "torch"}, "is for the cpu backend"),
        ({"threads": 2, "dtype": "bfloat16"}, "threads=2 is for the cpu backend, and this is the torch backend"),
        ({"threads": 0}, "threads=0 is not allowed"),
        ({"dtype": "bfloat16", "backend": "cpu"}, "no dtype='bfloat16'"),
        ({"device": "meta", "backend": "cpu"}, "meta"),
    ):
        with pytest.raises(SpecbeamError, match=says):
            specbeam.load(folder, **how)
    with pytest.raises(SpecbeamError, match="isa='sse9'"):
        loaded(folder, isa="sse9")


@pytest.fixture
def module():
    """The module that loads the library, as if it had not."""
    module = importlib.import_module("specbeam.backends.cpu.library")
    module.library.cache_clear()
    yield module
    module.library.cache_clear()


def test_without_kernels_torch_serves_and_says_so(folder, module, monkeypatch, caplog):
    monkeypatch.setattr(module, "find", lambda isa: None)
    assert specbeam.load(folder).backend.name == "torch"
    assert "no C++ compiler was found" in caplog.text
    with pytest.raises(SpecbeamError, match="native CPU kernels were not built"):
        specbeam.load(folder, backend="cpu")


def test_a_pass_with_wrong_indices_is_refused(folder):
    """Native code checks all indices, so wrong ones do not make it read other memory."""
    backend = loaded(folder).backend

    def segment(**changes):
        fields = {"tokens": [1, 2], "positions": [0, 1], "slots": [0, 1], "prefix": [0], "wanted": [1]}
        arrays = {name: np.array(value) for name, value in (fields | {"suffixes": [[0], [1]]}).items()}
        return TreeBatch(**(arrays | changes))

    backend.reserve(8)
    assert backend.forward([segment()]).shape == (1, 259)
    wrong = {
        **{"tokens": [[1, 259], [-1, 2]], "positions": [[0, 2], [0, -1]], "prefix": [[7], [-1]], "wanted": [[2]]},
        **{"slots": [[0, 2], [0, -1], [0, 2**40]], "suffixes": [[[0], [0]], [[0], [2**40]], [[0, 1]]]},
    }
    for changes in [{name: np.array(value)} for name, values in wrong.items() for value in values] + [{"vocab": 0}]:
        with pytest.raises(RuntimeError, match="a pass was refused"):
            backend.forward([segment(**changes)])
    once = segment()
    with pytest.raises(RuntimeError, match="two nodes have the same slot"):
        backend.forward([once, once])
    one, at, prefix = np.arange(1), np.array([2]), np.arange(3)
    with pytest.raises(RuntimeError, match="empty"):  # a refused pass leaves nothing behind that another could read
        backend.forward([TreeBatch(one + 1, at, at, prefix, np.empty((1, 0), np.int64), one)])


@pytest.mark.parametrize("quantize", ["int8", "float32"])
def test_slots_change_no_bit(folder, quantize):
    """Keys lie in panels of 16 slots, and a sequence may take any slots: in runs anywhere, apart, or in any order."""
    length, rng = 90, np.random.default_rng(0)
    at = np.arange(length)
    places = {
        "one run": at,
        "not from the start of a panel": at + 5,
        "every third slot": 3 * at,
        "any order": rng.permutation(length),
        "runs in any order": 28 * rng.permutation(10)[at // 9] + at % 9 + at // 9,
        "short runs": at + at // 3,
    }
    for isa in ISAS:
        backend = loaded(folder, quantize, isa=isa).backend
        backend.reserve(3 * length)
        logits = {}
        for name, slots in places.items():
            backend.forward([of_one_sequence(at[:-3], slots[:-3], [0])])
            suffixes = np.tile(slots[-3:], (3, 1))
            logits[name] = backend.forward([TreeBatch(at[-3:], at[-3:], slots[-3:], slots[:-3], suffixes, at[:3])])
            np.testing.assert_array_equal(logits[name], logits["one run"], err_msg=name)


@pytest.mark.parametrize("quantize", ["int8", "float32"])
def test_a_prefix_may_lack_slots_that_no_layer_sees(save, quantize):
    """Slots before all windows may go to other sequences. No layer may see a position without a slot."""
    window, length = 5, 300
    folder = save(random_model("mistral", sliding_window=window, max_position_embeddings=512))
    for isa in ISAS:
        backend = loaded(folder, quantize, isa=isa).backend
        backend.reserve(2 * length)
        at = np.arange(length)

        def last(prefix, first=length - 2, backend=backend, at=at):
            """Logits of the nodes from ``first`` on: of nodes on the shared prefix, and of one with a suffix."""
            nodes = at[first:]
            suffixes = np.array([[length - 1]] * len(nodes))
            return backend.forward([TreeBatch(nodes % 250, nodes, nodes, prefix[:-1], suffixes, nodes - first)])

        backend.forward([of_one_sequence(at % 250, at, [-1])])
        expected = last(at)
        unseen = length - 2 + 1 - window
        backend.forward([of_one_sequence(at[:unseen] % 7, at[:unseen], [-1])])  # another sequence takes the slots
        without = np.where(at < unseen, -1, at)
        np.testing.assert_array_equal(last(without), expected)
        for prefix, first in ((np.where(at <= unseen, -1, at), length - 2), (without, length - 3)):
            with pytest.raises(RuntimeError, match="a node sees a slot that is empty"):
                last(prefix, first)
    full = loaded(save(random_model("gemma2", sliding_window=window)), quantize).backend
    full.reserve(9)
    at = np.arange(9)
    full.forward([of_one_sequence(at, at)])
    with pytest.raises(RuntimeError, match="a node sees a slot that is empty"):  # one layer has no window
        full.forward([TreeBatch(at[8:], at[8:], at[8:], np.where(at < 1, -1, at), np.empty((1, 0), np.int64), at[:1])])


# Models that no family makes


def new_config(size, **changes):
    """A native model with all sizes the same, without parts, and why it was refused."""
    structure, made = library().structures["ModelConfig"], ctypes.c_void_p()
    names = ("vocab_size", "hidden_size", "num_layers", "context_length")
    fields = dict.fromkeys(structure.types, 0) | dict.fromkeys(names, size) | changes
    return made, library().specbeam_model_new(structure.pack([fields]), None, 1, ctypes.byref(made))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 0}, "a size is not between"),
        ({"num_layers": 2**31 - 1}, "too many layers"),
        ({"integer_cache": 2}, "not one of those of Flag"),
        ({"norm": -1}, "not one of those of NormKind"),
        ({"bands": -1}, "the frames of audio"),
        ({"bands": 2**62}, "the frames of audio"),
        ({"per_layer_size": -1}, "the embeddings of the layers are too large"),
        ({"per_layer_size": 2**28}, "the embeddings of the layers are too large"),
        ({"per_layer_size": 8, "bands": 8}, "the layers of an encoder have no embeddings"),
        ({"norm_eps": float("nan")}, "not finite"),
        ({"logits_softcap": -1.0}, "negative"),
    ],
)
def test_kernels_refuse_a_configuration(changes, says):
    made, refusal = new_config(8, **changes)
    assert made.value is None
    assert says in refusal.decode()


PARTS = {
    "attention": {
        **{"norm": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "scale": 1, "rope": -1},
        "shares_keys_of": -1,
    },
    "cross_attention": {"norm": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "scale": 1},
    "mlp": {"norm": 1, "intermediate_size": 8},
    "short_convolution": {"norm": 1, "kernel_size": 3},
    "experts": {"norm": 1, "num_experts": 8, "experts_per_token": 2, "intermediate_size": 8},
    "shared_expert": {"norm": 1, "intermediate_size": 8},
}


def add_part(model, layer, name, count=None, **changes):
    """Why a native model refuses a part, or None."""
    values = PARTS.get(name, {}) | changes
    numbers = np.array([values.get(field, 0) for field in library().fields_of(name) or ()], np.float64)
    count = len(numbers) if count is None else count
    refusal = library().specbeam_model_part(model, 0, layer, name.encode(), numbers.ctypes.data, count)
    return refusal and refusal.decode()


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("unknown", {}, "there is no such part"),
        ("mlp", {"layer": 8}, "there is no such layer"),
        ("mlp", {"layer": -1}, "there is no such layer"),
        ("mlp", {"count": 5}, "a number is wrong"),
        ("mlp", {"count": -1}, "a number is wrong"),
        ("mlp", {"gated": 2}, "a number is wrong"),
        ("mlp", {"activation": 4}, "a number is wrong"),
        ("mlp", {"intermediate_size": 8.5}, "a number is wrong"),
        ("mlp", {"intermediate_size": 2**31}, "a number is wrong"),
        ("mlp", {"intermediate_size": 2**31 - 1}, "the width of an MLP is wrong"),
        ("mlp", {"parallel": 1}, "reads the input of another"),
        ("attention", {"scale": float("nan")}, "a number is wrong"),
        ("attention", {"scale": float("inf")}, "a number is wrong"),
        ("attention", {"softcap": -1.0}, "a number is wrong"),
        ("attention", {"num_kv_heads": 3}, "not a multiple"),
        ("attention", {"num_heads": 0}, "below 1"),
        ("attention", {"num_heads": 2**20, "head_dim": 2**20}, "too wide"),
        ("attention", {"window": -1}, "a window is negative"),
        ("attention", {"rope": 0}, "a rotation is missing"),
        ("attention", {"qk_norm": 4}, "a number is wrong"),
        ("mlp", {"output_scale": -1.0}, "a number is wrong"),
        ("attention", {"query_growth": -1.0}, "a number is wrong"),
        ("attention", {"query_growth": 0.1}, "the period in which queries grow is below 1"),
        ("attention", {"shares_keys_of": 0}, "reads keys of a layer that has none"),
        ("attention", {"layer": 1, "shares_keys_of": 0}, "reads keys of a layer that has none"),
        ("attention", {"shares_keys_of": 2**31 - 1}, "reads keys of a layer that has none"),
        ("per_layer_embedding", {"size": 4}, "embeddings of another size"),
        ("cross_attention", {}, "there is no encoder"),
        ("short_convolution", {"kernel_size": 0}, "the filter of a convolution"),
        ("experts", {"num_experts": 0}, "the number of experts"),
        ("experts", {"num_experts": 4097}, "the number of experts"),
        ("experts", {"experts_per_token": 9}, "more experts than there are"),
        ("experts", {"experts_per_token": 0}, "more experts than there are"),
        ("experts", {"intermediate_size": 2**28}, "the width of an expert"),
        ("experts", {"scoring": 2}, "a number is wrong"),
        ("experts", {"own_norms": 1}, "normed twice"),
        ("experts", {"router_scale": -1.0}, "a number is wrong"),
        ("shared_expert", {"intermediate_size": 0}, "the width of an MLP"),
        ("shared_expert", {"parallel": 1}, "reads the input of another"),
        ("shared_expert", {"joint_norm": 1}, "is normed with the output of another"),
        ("short_convolution", {"kernel_size": 17}, "the filter of a convolution"),
    ],
)
def test_kernels_refuse_a_part(name, changes, says):
    model, _ = new_config(8)
    assert says in add_part(model, **{"layer": 0, "name": name} | changes)
    library().specbeam_model_delete(model)


def test_kernels_refuse_parts_that_do_not_fit_together():
    model, _ = new_config(8)
    for name in ("attention", "mlp"):
        assert add_part(model, 0, name) is None
        assert "two parts of one kind" in add_part(model, 0, name)
    assert add_part(model, 1, "attention") is add_part(model, 1, "mlp", parallel=1) is None
    assert "what two parts before it read" in add_part(model, 1, "short_convolution", parallel=1)
    assert add_part(model, 1, "short_convolution", parallel=1, norm=0) is None
    assert add_part(model, 3, "experts", sum_scale=1) is None
    assert "ends with a norm or a scale" in add_part(model, 3, "shared_expert", parallel=1, norm=0, joint_norm=1)
    assert library().specbeam_cache_reserve(model, 1, 0) is None
    assert add_part(model, 2, "mlp") is None  # it keeps nothing
    assert "memory was reserved before" in add_part(model, 2, "attention")
    library().specbeam_model_delete(model)


def kinds_of_parts():
    """The classes of parts that layers may have."""
    for module in pkgutil.iter_modules(parts.__path__, f"{parts.__name__}."):
        importlib.import_module(module.name)
    waiting = [Part]
    for kind in waiting:
        waiting += kind.__subclasses__()
    return [kind for kind in waiting if "name" in vars(kind)]


@pytest.mark.parametrize("kind", kinds_of_parts())
def test_kernels_have_the_numbers_of_each_part(kind):
    """Biases are not among them: the kernels see that they are there."""
    own = {field.name for field in fields(kind) if not field.name.endswith("bias")}
    assert set(library().fields_of(kind.name)) == own


@dataclass(frozen=True, kw_only=True)
class Unknown(Part):
    """A part that no backend has."""

    name = "unknown"


def test_a_part_without_kernels_is_refused():
    config = Config("tiny", 8, 8, ((Unknown(),),), 8, 1e-5)
    with pytest.raises(SpecbeamError, match="the native CPU kernels have no unknown: reinstall specbeam, or use"):
        bytes_of_sequence(library(), config, False, 1)


def test_a_layer_with_two_parts_of_one_kind_is_refused():
    """Their parameters would have the same names."""
    mlp = MLP(intermediate_size=8)
    with pytest.raises(SpecbeamError, match="a layer with two parts of one kind"):
        Config("tiny", 8, 8, ((mlp, mlp),), 8, 1e-5)


HIDDEN, VOCAB = 40, 50
ROPES = Rope(100.0, 8), Rope(1000.0, 12, scale=1.25)
VALUES = {"keys_are_values": True, "qk_norm": "head"}
AFTER = {"norm": False, "output_norm": True}
FEW = {"num_experts": 5, "experts_per_token": 2, "intermediate_size": 24}
LAYERS = {  # each layer has other heads, and not each has an attention and an MLP
    "window": (
        Attention(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=ROPES[0], window=5, output_norm=True),
        MLP(intermediate_size=24, gated=True),
    ),
    "attention alone": (
        Attention(num_heads=3, num_kv_heads=1, head_dim=24, scale=0.3, rope=ROPES[1], softcap=2.0, qk_norm="head"),
    ),
    "growing queries": (
        Attention(num_heads=2, num_kv_heads=1, head_dim=12, scale=0.3, query_growth=0.5, query_growth_period=3),
    ),
    "mlp alone": (MLP(intermediate_size=70, gated=False, activation="gelu_tanh", output_norm=True, bias=True),),
    "convolution": (
        ShortConvolution(kernel_size=3),
        MLP(intermediate_size=24, parallel=True, norm=False, activation="silu"),
    ),
    "all parallel": (
        Attention(num_heads=2, num_kv_heads=2, head_dim=10, scale=0.4, qkv_bias=True, output_bias=True),
        ShortConvolution(kernel_size=4, parallel=True),
        MLP(intermediate_size=24, parallel=True, norm=False),
    ),
    "norms after": (
        Attention(num_heads=4, num_kv_heads=2, head_dim=10, scale=0.3, rope=ROPES[0], qk_norm="all", **AFTER),
        MLP(intermediate_size=24, **AFTER),
    ),
    "norms of sums": (
        Attention(num_heads=2, num_kv_heads=1, head_dim=12, scale=0.3, norm=False, sum_norm=True),
        MLP(intermediate_size=24, gated=False, activation="gelu_tanh", norm=False, sum_norm=True),
    ),
    "parallel without a norm": (
        Attention(num_heads=2, num_kv_heads=1, head_dim=12, scale=0.3, norm=False, sum_norm=True),
        MLP(intermediate_size=24, parallel=True, norm=False, output_norm=True, sum_norm=True),
    ),
    "norms after the rotation, scaled outputs": (
        Attention(
            **{"num_heads": 4, "num_kv_heads": 2, "head_dim": 10, "scale": 0.3, "rope": ROPES[0]},
            **{"qk_norm": "rotated_head", "output_scale": 0.25},
        ),
        MLP(intermediate_size=24, output_norm=True, output_scale=0.5),
    ),
    "no window": (Attention(num_heads=4, num_kv_heads=4, head_dim=8, scale=0.35), MLP(intermediate_size=24)),
    "keys are values": (
        Attention(num_heads=4, num_kv_heads=2, head_dim=12, scale=0.4, rope=ROPES[1], value_norm=True, **VALUES),
        MLP(intermediate_size=24, sum_scale=True),
    ),
    "reads layer 0": (
        Attention(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25, rope=ROPES[0], window=5, shares_keys_of=0),
        MLP(intermediate_size=24),
        PerLayerEmbedding(size=6, norm=False, output_norm=True, sum_scale=True),
    ),
    "reads layer 1": (
        Attention(num_heads=3, num_kv_heads=1, head_dim=24, scale=0.3, qk_norm="all", shares_keys_of=1),
        PerLayerEmbedding(size=6, activation="gelu_tanh"),
    ),
    "experts": (
        Attention(num_heads=2, num_kv_heads=1, head_dim=12, scale=0.3, window=9, sinks=True),
        Experts(**FEW, normalized=True, router_bias=True, bias=True, swiglu_limit=0.8, swiglu_alpha=1.7),
    ),
    "experts by sigmoids": (
        Experts(
            **{"num_experts": 20, "experts_per_token": 3, "intermediate_size": 36, "scoring": "sigmoid"},
            **{"selection_bias": True, "normalized": True, "weight_scale": 1.5, "activation": "gelu_tanh"},
        ),
        MLP(intermediate_size=24, parallel=True, norm=False),
    ),
    "experts and a gated MLP": (
        Attention(num_heads=2, num_kv_heads=1, head_dim=12, scale=0.3),
        Experts(**FEW, normalized=True, router_scale=0.5, expert_scale=True, output_scale=0.7),
        SharedExpert(intermediate_size=28, output_gate=True, output_scale=0.7),
    ),
    "experts and an MLP, normed together": (
        Attention(num_heads=2, num_kv_heads=1, head_dim=12, scale=0.3),
        Experts(**FEW, norm=False, own_norms=True, output_norm=True, output_scale=0.7),
        SharedExpert(intermediate_size=28, norm=True, output_norm=True, joint_norm=True, sum_scale=True),
    ),
    "three parts, normed together": (
        MLP(intermediate_size=24),
        Attention(num_heads=2, num_kv_heads=1, head_dim=12, scale=0.3, parallel=True, joint_norm=True, window=9),
        ShortConvolution(kernel_size=3, parallel=True, norm=False, joint_norm=True, sum_norm=True),
    ),
    "experts of all": (
        Attention(num_heads=2, num_kv_heads=1, head_dim=12, scale=0.3, sinks=True),
        Experts(**FEW, output_norm=True),
    ),
}
ORDERS = {
    "each of its own": [*LAYERS],
    "a convolution last": ["no window", "window", "convolution"],
    "convolutions alone": ["convolution", "mlp alone", "convolution"],
    "windows alone": ["window", "convolution", "mlp alone", "window"],
    "an MLP first and last": ["mlp alone", "window", "mlp alone"],
    "norms after": ["norms after", "norms after", "norms after"],
    "norms of sums": ["norms of sums", "norms of sums", "norms of sums"],
    "parallel without a norm": ["no window", "parallel without a norm", "parallel without a norm"],
    "keys of earlier layers": ["window", "attention alone", "reads layer 1", "reads layer 0", "reads layer 1"],
    "keys are values": ["keys are values", "mlp alone", "keys are values"],
    "experts": ["experts", "experts by sigmoids", "experts of all", "experts"],
    "shared experts": ["experts and a gated MLP", "experts and an MLP, normed together", "experts and a gated MLP"],
    "normed together": ["experts and an MLP, normed together", "no window", "three parts, normed together"],
}


class NativeModel:
    """A native model of a configuration, with random float32 parameters."""

    def __init__(self, config, isa="", threads=1):
        rng = np.random.default_rng(1)
        self.config, self.native = config, library(choose_isa(isa))
        self.model = new_model(self.native, config, threads, False)
        self.parameters = {
            name: (rng.standard_normal(one.shape) / one.shape[-1] ** 0.5).astype(np.float32) + (len(one.shape) == 1)
            for name, one in parameters(config).items()
        }
        self.kept = []
        for name, values in self.parameters.items():
            layer, own = -1, name
            if name.startswith("blocks."):
                _, number, own = name.split(".", 2)
                layer = int(number)
            if values.ndim == 1:
                status = self.native.specbeam_model_vector(
                    self.model, layer, own.encode(), values.ctypes.data, len(values)
                )
            else:
                matrices = values.reshape(-1, *values.shape[-2:])
                self.kept.append(packed := np.concatenate([quantize(F32, one) for one in matrices]))
                status = self.native.specbeam_model_matrix(
                    self.model, layer, own.encode(), F32, *matrices.shape, packed.ctypes.data, packed.size
                )
            assert status == 0, name
        assert self.native.specbeam_model_incomplete(self.model) is None

    def forward(self, *batches, vocab=VOCAB):
        """Logits of the wanted nodes of each batch."""
        starts = np.cumsum([0, *(len(batch.tokens) for batch in batches)])
        wanted = np.concatenate([batch.wanted + start for batch, start in zip(batches, starts, strict=False)])
        logits = np.zeros((len(wanted), vocab), np.float32)
        packed, kept = _pack_segments(self.native, batches)
        refusal = self.native.specbeam_forward(
            self.model, packed, len(batches), address(wanted), len(wanted), vocab, address(logits)
        )
        assert refusal is None, refusal
        del kept
        return logits

    def close(self):
        self.native.specbeam_model_delete(self.model)


class Reference:
    """The same model in NumPy, for one sequence as a whole."""

    def __init__(self, config, parameters):
        self.config, self.own = config, {name: values.astype(np.float64) for name, values in parameters.items()}

    def logits(self, tokens):
        x, self.stored = self.own["embedding.weight"][tokens], {}
        if (size := self.config.per_layer_size) is not None:
            projected = (self.product("per_layer_projection", x) / HIDDEN**0.5).reshape(len(x), -1, size)
            table = self.own["per_layer_embedding.weight"][tokens].reshape(projected.shape)
            self.per_layer = (self.norm("per_layer_norm", projected) + table * size**0.5) / 2**0.5
        for number, layer in enumerate(self.config.layers):
            source = normed = start = before = None
            for part in layer:
                name = f"blocks.{number}.{part.name}"
                if not part.parallel:
                    source = normed = x
                if part.norm:
                    normed = self.norm(f"{name}_norm", source)
                made = getattr(self, part.name)(name, part, normed)
                if part.output_norm:
                    made = self.norm(f"blocks.{number}.post_{part.name}_norm", made)
                made = part.output_scale * made
                if part.joint_norm:
                    made = self.norm(f"{name}_joint_norm", before + made)
                else:
                    start = x
                x, before = start + made, made
                if part.sum_norm:
                    x = self.norm(f"{name}_sum_norm", x)
                if part.sum_scale:
                    x = x * self.own[f"{name}_sum_scale.weight"]
        return self.product("head", self.norm("norm", x) if self.config.final_norm else x)

    def norm(self, name, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps) * self.own[f"{name}.weight"]

    def product(self, name, x):
        return x @ self.own[f"{name}.weight"].T + self.own.get(f"{name}.bias", 0)

    def attention(self, name, part, x):
        n = len(x)
        sizes = part.query_size, part.query_size + part.key_size
        if part.shares_keys_of is not None:
            queries = self.turned(f"{name}.q_norm", part, self.product(f"{name}.query", x))
            keys, values = self.stored[f"blocks.{part.shares_keys_of}.attention"]
        else:
            if part.keys_are_values:
                queries, keys = np.split(self.product(f"{name}.query_key", x), sizes[:1], axis=1)
                values = keys
            else:
                queries, keys, values = np.split(self.product(f"{name}.qkv", x), sizes, axis=1)
            values = values.reshape(n, -1, part.head_dim)
            if part.value_norm:
                values = values / np.sqrt((values * values).mean(-1, keepdims=True) + self.config.norm_eps)
            queries = self.turned(f"{name}.q_norm", part, queries)
            keys = self.turned(f"{name}.k_norm", part, keys)
        self.stored[name] = keys, values
        keys, values = (one.repeat(part.num_heads // part.num_kv_heads, axis=1) for one in (keys, values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) * part.scale
        if part.softcap:
            scores = part.softcap * np.tanh(scores / part.softcap)
        back = np.arange(n)[:, None] - np.arange(n)
        scores[:, (back < 0) | (back >= (part.window or n))] = -np.inf
        highest = scores.max(-1, keepdims=True)
        shares, sink = np.exp(scores - highest), 0
        if part.sinks:
            sink = np.exp(self.own[f"{name}.sinks.weight"][:, None, None] - highest)
        shares /= shares.sum(-1, keepdims=True) + sink
        return self.product(f"{name}.output", np.einsum("hqk,khd->qhd", shares, values).reshape(n, -1))

    def turned(self, norm, part, heads):
        """Queries or keys, [n, all features], as normed and rotated heads."""
        heads = self.norm(norm, heads) if part.qk_norm == "all" else heads
        heads = heads.reshape(len(heads), -1, part.head_dim)
        heads = self.norm(norm, heads) if part.qk_norm == "head" else heads
        heads = heads if part.rope is None else rotated(heads, part.rope)
        heads = self.norm(norm, heads) if part.qk_norm == "rotated_head" else heads
        if not part.query_growth or norm.endswith("k_norm"):
            return heads
        growth = 1 + part.query_growth * np.log(1 + np.arange(len(heads)) // part.query_growth_period)
        return heads * growth[:, None, None]

    def per_layer_embedding(self, name, part, x):
        gated = activated(part, self.product(f"{name}.gate", x)) * self.per_layer[:, int(name.split(".")[1])]
        return self.product(f"{name}.projection", gated)

    def mlp(self, name, part, x):
        up = self.product(f"{name}.{'gate_up' if part.gated else 'up'}", x)
        gate, up = np.split(up, 2, axis=1) if part.gated else (up, 1)
        return self.product(f"{name}.down", activated(part, gate) * up)

    def shared_expert(self, name, part, x):
        gate = 1 / (1 + np.exp(-self.product(f"{name}.output_gate", x))) if part.output_gate else 1
        return self.mlp(name, part, x) * gate

    def experts(self, name, part, x):
        logits = self.product(f"{name}.router", self.norm(f"{name}.router_norm", x) if part.own_norms else x)
        logits, x = logits * part.router_scale, self.norm(f"{name}.input_norm", x) if part.own_norms else x
        if part.scoring == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        else:
            scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        ranks = scores + self.own.get(f"{name}.selection_bias.weight", 0)
        out = np.zeros_like(x)
        for row, (own, rank) in enumerate(zip(scores, ranks, strict=True)):
            chosen = np.argsort(-rank)[: part.experts_per_token]
            weights = own[chosen] / own[chosen].sum() if part.normalized else own[chosen]
            weights = weights * self.own[f"{name}.expert_scale.weight"][chosen] if part.expert_scale else weights
            for expert, weight in zip(chosen, weights * part.weight_scale, strict=True):
                gate, up = (self.of_expert(f"{name}.{half}", expert, x[row]) for half in ("gate", "up"))
                out[row] += weight * self.of_expert(f"{name}.down", expert, self.activated(part, gate, up))
        return out

    def of_expert(self, name, expert, x):
        weights = self.own[f"{name}.weight"]
        biases = self.own.get(f"{name}.bias", np.zeros(weights.shape[:2])).reshape(weights.shape[:2])
        return weights[expert] @ x + biases[expert]

    def activated(self, part, gate, up):
        if part.swiglu_limit is not None:
            gate, up = np.minimum(gate, part.swiglu_limit), np.clip(up, -part.swiglu_limit, part.swiglu_limit)
            return (up + 1) * gate / (1 + np.exp(-part.swiglu_alpha * gate))
        return activated(part, gate) * up

    def short_convolution(self, name, part, x):
        before, after, x = np.split(self.product(f"{name}.input", x), 3, axis=1)
        padded = np.pad(before * x, ((part.kernel_size - 1, 0), (0, 0)))
        taps = self.own[f"{name}.filter.weight"].T
        convolved = sum(taps[k] * padded[k : k + len(x)] for k in range(part.kernel_size))
        return self.product(f"{name}.output", after * convolved)


def activated(part, x):
    if part.activation == "silu":
        return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def rotated(heads, rope):
    """Heads [n, heads, head_dim], halves of the first features paired."""
    angles = np.arange(len(heads))[:, None] * np.array(rope.frequencies())
    cos, sin = (f(angles)[:, None] * rope.scale for f in (np.cos, np.sin))
    left, right, rest = np.split(heads, (rope.dim // 2, rope.dim), axis=-1)
    return np.concatenate([left * cos - right * sin, right * cos + left * sin, rest], axis=-1)


def config_of(order):
    """Where the last layer norms the sum, nothing norms it again."""
    layers = tuple(LAYERS[name] for name in order)
    return Config("tiny", VOCAB, HIDDEN, layers, 512, 1e-5, final_norm=not layers[-1][-1].sum_norm)


@pytest.mark.parametrize("order", ORDERS)
def test_layers_of_different_parts_run_as_numpy_does(order):
    """In passes over pieces, whose prefix ends anywhere, and at two branches of a tree."""
    length, config = 300, config_of(ORDERS[order])
    tokens, at = np.random.default_rng(2).integers(0, VOCAB, length), np.arange(length)
    for isa in ISAS:
        one, bits = NativeModel(config, isa, threads=2), []
        assert one.native.specbeam_cache_reserve(one.model, 2 * length, 0) is None
        expected = Reference(config, one.parameters).logits(tokens)
        for slots, step, shared in ((at, length, length), (2 * at, 7, 3), (at[::-1].copy(), 131, 0), (at, 1, length)):
            found = []
            for first in range(0, length, step):
                nodes, last = at[first : first + step], min(first + step, length)
                prefix = slots[: max(first - shared, 0)]
                suffixes = np.tile(slots[len(prefix) : last], (len(nodes), 1))
                batch = TreeBatch(tokens[nodes], nodes, slots[nodes], prefix, suffixes, nodes - first)
                found.append(one.forward(batch))
            bits.append(np.concatenate(found))
            np.testing.assert_array_equal(bits[-1], bits[0])
        assert np.abs(bits[0] - expected).max() < 2e-4 * np.abs(expected).max()
        # Two branches below position 100, and nobody wants the logits of a third node.
        branch = tokens[101:103], np.array([101, 101]), np.array([500, 501]), at[:101], np.array([[500], [501]])
        np.testing.assert_array_equal(one.forward(TreeBatch(*branch, np.array([], int))), np.zeros((0, VOCAB)))
        below = np.array([[500, 510], [501, 511]])
        nodes = TreeBatch(tokens[103:105], np.array([102, 102]), below[:, 1], at[:101], below, np.array([1]))
        own = Reference(config, one.parameters).logits(np.array([*tokens[:101], tokens[102], tokens[104]]))[-1]
        assert np.abs(one.forward(nodes) - own).max() < 2e-4 * np.abs(expected).max()
        one.close()


@pytest.mark.parametrize("order", ORDERS)
def test_the_torch_backend_runs_them_as_numpy_does(order):
    config = config_of(ORDERS[order])
    one = NativeModel(config)
    own = one.parameters
    checkpoint = SimpleNamespace(
        config=config,
        dtype="float32",
        check_tensors=lambda expected: None,
        sources=lambda name: [name],
        shape=lambda name: own[name].shape,
        read=lambda name, start, stop: (np.concatenate(own[name]) if own[name].ndim == 3 else own[name])[start:stop],
        rows=lambda name, numbers: own[name][numbers],
    )
    backend, tokens = TorchBackend(checkpoint, "cpu", "float32"), np.random.default_rng(3).integers(0, VOCAB, 60)
    backend.reserve(len(tokens))
    found = backend.forward([of_one_sequence(tokens, np.arange(len(tokens)))]).numpy()
    expected = Reference(config, own).logits(tokens)
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()
    one.close()


@pytest.mark.parametrize("order", ["windows alone", "convolutions alone"])
def test_slots_that_no_part_reads_may_be_missing(order):
    """The farthest part counts, whether it is an attention or a convolution."""
    config, length = config_of(ORDERS[order]), 40
    at = np.arange(length)
    one = NativeModel(config)
    assert one.native.specbeam_cache_reserve(one.model, length, 0) is None
    expected = one.forward(of_one_sequence(at, at, [-1]))
    unseen = length - config.window
    for missing, is_right in ((unseen, True), (unseen + 1, False)):
        prefix = np.where(at < missing, -1, at)
        batch = TreeBatch(at[-1:], at[-1:], at[-1:], prefix, np.empty((1, 0), np.int64), at[:1])
        if is_right:
            np.testing.assert_array_equal(one.forward(batch), expected)
        else:
            with pytest.raises(AssertionError, match="a node sees a slot that is empty"):
                one.forward(batch)
    one.close()


@pytest.mark.parametrize("order", ORDERS)
def test_a_slot_has_the_bytes_of_all_parts(order):
    """Heads are padded to 16 features. Integers: 2 bytes for a key's, 1 for a value's, and two scales."""
    config = config_of(ORDERS[order])

    def of_part(part, integers):
        if not isinstance(part, Attention):
            return 4 * 48 if isinstance(part, ShortConvolution) else 0
        if part.shares_keys_of is not None:
            return 0
        width = -(-part.head_dim // 16) * 16
        return part.num_kv_heads * (3 * width + 8 if integers else 8 * width)

    for integers in (True, False):
        expected = sum(of_part(part, integers) for part in config.parts)
        assert bytes_of_sequence(library(), config, integers, 1) == expected


# Parameters


def test_kernels_survive_numbers_that_are_not_finite():
    """Numbers without a finite scale must not spoil other rows, nor the sums of their own row."""
    packed = quantize(Q8, np.ones((16, 64), np.float32))
    x = np.ones((5, 64), np.float32)
    x[1, :32], x[2, 3], x[3, 3] = 1e-44, np.inf, np.nan
    for isa in ISAS:
        out = multiply(Q8, packed, 16, 64, x, isa)
        np.testing.assert_allclose(out[[0, 1, 4]], [[64] * 16, [32] * 16, [64] * 16], rtol=1e-2)
        assert not np.isfinite(out[2]).any()


def test_kernels_refuse_parameters_that_are_not_in_the_model():
    native, (model, refusal) = library(), new_config(2)
    assert refusal is None
    for layer in (0, 1):
        assert add_part(model, layer, "attention", qk_norm=1) is add_part(model, layer, "mlp") is None
    size = native.specbeam_matrix_bytes(F32, 2, 2)
    matrix, vector = np.zeros(size, np.uint8), np.zeros(2, np.float32)

    def add_matrix(layer, name):
        return native.specbeam_model_matrix(model, layer, name, F32, 1, 2, 2, matrix.ctypes.data, size)

    def add_vector(layer, name, size=2):
        return native.specbeam_model_vector(model, layer, name, vector.ctypes.data, size)

    assert add_matrix(1, b"mlp.down.weight") == add_matrix(-1, b"head.weight") == 0
    assert add_vector(0, b"mlp.down.bias") == add_vector(1, b"mlp_norm.weight") == add_vector(-1, b"norm.bias") == 0
    assert add_vector(0, b"attention.q_norm.weight") == add_vector(1, b"post_mlp_norm.weight") == 0
    for layer, name in ((2, b"mlp.down.weight"), (-2, b"head.weight"), (-1, b"mlp.down.weight"), (0, b"head.weight")):
        assert add_matrix(layer, name) == -1
    for name in (b"mlp.down.bias", b"mlp.down", b"mlp.experts.weight", b"mlp_norm.weight", b".weight", b"", None):
        assert add_matrix(0, name) == -1
    for name in (
        b"mlp.down.weight",
        b"mlp_norm",
        b"attention.bias",
        b"norm.weight",
        b"cross_attention_norm.weight",
        None,
    ):
        assert add_vector(0, name) == -1
    for name, kind, rows, bytes_of_row in (
        (b"embedding.weight", 0, 2, 8),
        (b"per_layer_embedding.weight", 3, 2, 8),  # 2 columns are no block of Q4_1
        (b"per_layer_embedding.weight", 99, 2, 8),
        (b"per_layer_embedding.weight", 0, 2, 4),
        (b"per_layer_embedding.weight", 0, -2, 8),
    ):
        assert native.specbeam_model_table(model, name, kind, rows, 2, matrix.ctypes.data, rows * bytes_of_row) == -1
    assert add_vector(1, b"mlp_norm.bias", 1) == -1  # as long as the weight, or neither could be trusted
    native.specbeam_model_delete(model)


# The libraries


def needs(*programs):
    """Skips a test where a program is missing."""
    missing = [program for program in programs if not shutil.which(program)]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("own", "other"),
    [
        (b"double top_p;double min_p;", b"double min_p;double top_p;"),
        (b"SILU, GELU, GELU_TANH", b"SILU, GELU_TANH, GELU"),
        (b"matrix_bytes(int32_t, int64_t, int64_t)", b"matrix_bytes(int64_t, int64_t, int32_t)"),
    ],
)
def test_a_library_with_another_interface_is_refused(own, other, module, monkeypatch, tmp_path):
    """Such as one that was built before a field moved."""
    path = find()
    built = path.read_bytes()
    assert built.count(own) == 1
    (tmp_path / path.name).write_bytes(built.replace(own, other))
    monkeypatch.setenv("SPECBEAM_CPU_LIBRARY", str(tmp_path))
    with pytest.raises(SpecbeamError, match=rf"{tmp_path}.* are of another version \(ABI \d+\) .*: reinstall specbeam"):
        module.library()


@needs("c++")
def test_a_library_of_a_release_before_interfaces_were_hashed_is_refused(module, monkeypatch, tmp_path):
    source, built = tmp_path / "old.cpp", tmp_path / find().name
    source.write_text('extern "C" int specbeam_abi_version() { return 15; }')
    run("c++", "-shared", "-fPIC", str(source), "-o", str(built))
    monkeypatch.setenv("SPECBEAM_CPU_LIBRARY", str(tmp_path))
    with pytest.raises(SpecbeamError, match=r"of another version \(ABI 15\) than this specbeam"):
        module.library()


@needs("nm")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the symbols of ELF")
@pytest.mark.parametrize("isa", ISAS)
def test_a_library_exports_the_functions_of_its_interface_alone(isa):
    lines = run("nm", "-D", "--defined-only", str(find(isa))).splitlines()
    assert {line.split()[2] for line in lines} == {
        f"specbeam_{name}" for name in ("abi_version", "interface", *library().functions)
    }
    assert {line.split()[1] for line in lines} == {"T"}  # neither weak nor unique in the process


@needs("nm")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the symbols of ELF")
def test_a_library_takes_no_float32_function_from_the_system():
    """Their last bits differ between versions of the C library. ldexpf and nextafterf are exact."""
    lines = run("nm", "-D", "--undefined-only", str(find(ISAS[0]))).splitlines()
    functions = {line.split()[-1].partition("@")[0] for line in lines}
    assert "log" in functions
    names = ("sin", "cos", "sincos", "tan", "sinh", "cosh", "tanh", "exp", "exp2", "expm1", "log", "log2", "pow", "erf")
    assert not functions & {f"{name}f" for name in names}


@needs("objdump")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks for registers of x86-64")
@pytest.mark.parametrize(("isa", "others"), [("portable", "[yz]mm"), ("avx2", "zmm"), ("avxvnni", "zmm")])
def test_a_library_has_no_instructions_of_wider_sets(isa, others):
    """Inline functions, too: the processor may lack the instructions."""
    code = run("objdump", "--disassemble", "--no-show-raw-insn", str(find(isa)))
    assert "%xmm" in code
    assert not re.search(f"%{others}[0-9]", code)


# Other builds of the libraries


def build_native(name, *settings):
    """The folder of the library built with these settings. It is kept until the sources or the settings change."""
    source = Path(weights.__file__).parent / "native"
    files = sorted(path for path in source.rglob("*") if path.suffix in (".cpp", ".def", ".h", ".map", ".txt"))
    sources = repr([settings, *((path.name, path.read_bytes()) for path in files)])
    key = hashlib.sha256(sources.encode()).hexdigest()[:16]
    builds = platformdirs.user_cache_path("specbeam-test-builds")
    folder = builds / f"{name}-{key}"
    builds.mkdir(parents=True, exist_ok=True)
    with FileLock(builds / f"{name}.lock"):
        if not (folder / "whole").exists():
            for older in builds.glob(f"{name}-*"):
                shutil.rmtree(older)
            run("cmake", "-G", "Ninja", "-S", str(source), "-B", str(folder), *settings)
            run("cmake", "--build", str(folder))
            (folder / "whole").touch()
    return folder


def run_kernel_tests(folder, **env):
    """Run tests with the library in another folder: of selections, passes ahead, and the kernels and models above.

    Addresses are the same in each run: the thread sanitizer needs some for itself.
    """
    files = [__file__, *(str(Path(__file__).with_name(f"test_{name}.py")) for name in ("choosing", "ahead"))]
    command = ["setarch", "-R"] if shutil.which("setarch") else []
    command += [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files]
    command += ["-k", "kernels_ or wrong_indices or near_float32 or test_choosing or test_ahead"]
    env = os.environ | {"SPECBEAM_CPU_LIBRARY": str(folder)} | env
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert "runtime error" not in result.stdout + result.stderr


def build_isa_program(compiler, program):
    source = str(Path(__file__).with_name("isa.cpp"))
    run(compiler, "-std=c++17", "-O1", source, "-o", str(program), "-ldl")
    return str(program)


@pytest.mark.thorough
@needs("cmake", "ninja", "aarch64-linux-gnu-g++", "qemu-aarch64-static")
def test_neon_multiplies_as_portable_does(tmp_path):
    compiler = "aarch64-linux-gnu-g++"
    for_arm = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}"]
    folder, program = build_native("neon", *for_arm), build_isa_program(compiler, tmp_path / "isa")
    run("qemu-aarch64-static", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", program, str(folder), "neon")


@needs("g++", "qemu-x86_64-static")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="runs the installed libraries")
@pytest.mark.parametrize(("processor", "isa"), [("Nehalem", "portable"), ("Haswell", "avx2")])
def test_older_processors_run_their_sets(tmp_path, processor, isa):
    program = build_isa_program("g++", tmp_path / "isa")
    run("qemu-x86_64-static", "-cpu", processor, program, str(find().parent), isa)


@pytest.mark.thorough
@needs("cmake", "ninja", "clang++")
def test_clang_builds_the_kernels_too():
    run_kernel_tests(build_native("clang", "-DCMAKE_CXX_COMPILER=clang++"))


NO_LEAKS = {"ASAN_OPTIONS": "detect_leaks=0"}  # Python itself leaks
# glibc frees the memory of a thread that has ended, and takes no lock that the sanitizer knows.
NO_RACES_OF_GLIBC = {"TSAN_OPTIONS": "exitcode=66 suppressions={tmp_path}/suppressions"}


@pytest.mark.thorough
@needs("cmake", "ninja", "g++", "setarch")
@pytest.mark.skipif(sys.platform != "linux", reason="preloads the sanitizers' libraries")
@pytest.mark.parametrize(
    ("sanitizers", "runtimes", "options"),
    [
        ("address,undefined", ["libasan.so", "libubsan.so"], NO_LEAKS),
        ("thread", ["libtsan.so"], NO_RACES_OF_GLIBC),
    ],
)
def test_the_sanitizers_find_nothing(tmp_path, sanitizers, runtimes, options):
    """The kernel tests pass with the address, undefined-behaviour and thread sanitizers."""
    (tmp_path / "suppressions").write_text("race:_dl_deallocate_tls\n")
    paths = [run("g++", f"-print-file-name={name}").strip() for name in runtimes]
    settings = f"-DSPECBEAM_SANITIZE={sanitizers}", "-DCMAKE_CXX_COMPILER=g++"
    folder = build_native(f"sanitized-{sanitizers.split(',')[0]}", *settings)
    env = {name: value.format(tmp_path=tmp_path) for name, value in options.items()}
    run_kernel_tests(folder, LD_PRELOAD=":".join(paths), **env)
