"""Selections: against transformers' processors, published known answers, and each row alone."""

import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specbeam.backends.torch import sampling
from specbeam.backends.torch.sampling import choose, gumbel, highest, philox, select
from specbeam.core.selection import Edit, Noise, SelectionRequest
from tests.calls import warpers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_the_generator_gives_the_known_answers_of_random123(counter, key, expected, device):
    got = philox(*([torch.tensor([int(word, 16)], device=device) for word in text.split()] for text in (counter, key)))
    assert [f"{int(word):x}" for word in got] == expected.split()


def test_noise_is_of_its_seed_stream_position_and_token_alone():
    """A row has the words of the documented counters, whatever the other rows and the vocabulary are."""
    seeds, streams, positions = np.array([2**64 - 1, 5], np.uint64), np.array([3, 2**32 - 1]), np.array([7, 2**32 - 1])
    got = gumbel(seeds, streams.astype(np.uint32), positions.astype(np.uint32), 10)
    for row, seed, stream, position in zip(got, seeds.tolist(), streams.tolist(), positions.tolist(), strict=True):
        for token, value in enumerate(row.tolist()):
            counter = [torch.tensor([word]) for word in (token // 4, position, stream, 0)]
            word = philox(counter, [torch.tensor([seed & 0xFFFFFFFF]), torch.tensor([seed >> 32])])[token % 4]
            assert value == pytest.approx(-np.log(-np.log((int(word) + 0.5) / 2**32)), rel=1e-12)
    longer = gumbel(seeds[1:], streams[1:].astype(np.uint32), positions[1:].astype(np.uint32), 1003)
    assert torch.equal(longer[:, :10], got[1:])


def test_noise_follows_the_gumbel_distribution():
    noise = gumbel(np.full(20, 9, np.uint64), np.arange(20, dtype=np.uint32), np.arange(20, dtype=np.uint32), 1000)
    assert kstest(noise.flatten().numpy(), "gumbel_r").pvalue > 1e-3


SCORES = st.integers(0, 2**31).map(lambda seed: np.random.default_rng(seed))


def random_request(rng, n, vocab, kind):
    """A request with all that a backend must understand. Requests of one kind differ in arrays only."""

    def edit(name):
        m = int(rng.integers(0, 9))
        rows, tokens = rng.integers(0, n, m).astype(np.int32), rng.integers(0, vocab + 3, m).astype(np.int32)
        _, once = np.unique(rows * (vocab + 3) + tokens, return_index=True)
        values = {"add": rng.normal(size=len(once)), "repeat": np.full(len(once), 1.3)}
        values = {**values, "ban": np.empty(0), "set": values["add"], "raise": values["repeat"]}[name]
        return Edit(name, rows[once], tokens[once], values.astype(np.float32))

    options = np.random.default_rng(kind)
    allowed = rng.random((n, vocab)) < 0.8 if options.random() < 0.5 else None
    drawn = options.random() < 0.5
    noise = Noise(int(rng.integers(0, 2**63)), *(rng.integers(0, 2**32, n).astype(np.uint32) for _ in range(2)))
    return SelectionRequest(
        top=int(options.integers(0, min(vocab, 6))),
        given=rng.integers(0, vocab, (n, 2)) if options.random() < 0.3 else None,
        vocab=vocab if options.random() < 0.3 else None,
        normalize=bool(options.random() < 0.5),
        edits=tuple(edit(name) for name in ("add", "repeat", "ban", "set", "raise") if options.random() < 0.5),
        allowed=None if allowed is None else np.packbits(allowed, axis=-1, bitorder="little"),
        one_of=(0, 1) if options.random() < 0.3 else (),
        together=(vocab // 2, vocab) if options.random() < 0.3 else None,
        warpers=warpers(
            temperature=1.7 if drawn else None,
            top_k=5 if options.random() < 0.3 else None,
            top_p=0.8 if options.random() < 0.3 else None,
            min_p=0.1 if options.random() < 0.3 else None,
            typical_p=0.8 if options.random() < 0.2 else None,
        ),
        noise=noise if drawn else None,
        total=bool(options.random() < 0.3),
    )


ARRAYS = ("tokens", "log_probs", "scores", "normalizers", "noise", "given", "totals")


def assert_equal_bits(one, other):
    """Compare the arrays of two selections."""
    for name in ARRAYS:
        a, b = getattr(one, name), getattr(other, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a.dtype, a.shape) == (b.dtype, b.shape), name
            np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"), err_msg=name)


@given(SCORES, st.sampled_from([3, 40, 3000]), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_requests_together_select_as_each_alone(rng, vocab, kinds):
    sizes = rng.integers(1, 4, len(kinds))
    logits = torch.from_numpy(rng.normal(size=(sizes.sum(), vocab)).astype(np.float32)) * 3
    ends = np.cumsum(sizes).tolist()
    rows = [slice(end - size, end) for end, size in zip(ends, sizes.tolist(), strict=True)]
    requests = [random_request(rng, int(n), vocab, kind + 10 * vocab) for n, kind in zip(sizes, kinds, strict=True)]
    before = logits.clone()
    together = choose(logits, [*zip(rows, requests, strict=True)])
    for one, at, request in zip(together, rows, requests, strict=True):
        alone = select(logits[at], request)
        assert_equal_bits(one, alone)
        assert torch.equal(one.logits, alone.logits)
    assert torch.equal(logits, before)


@given(SCORES, st.sampled_from([2, 40, 3000]))
def test_a_selection_has_the_models_own_log_probs(rng, vocab):
    logits = torch.from_numpy(rng.normal(size=(3, vocab)).astype(np.float32)) * 3
    given_tokens = rng.integers(0, vocab, (3, 4))
    edit = Edit("ban", np.array([0], np.int32), np.array([1], np.int32))
    selection = select(
        logits, SelectionRequest(top=2, given=given_tokens, edits=(edit,), warpers=warpers(temperature=0.7))
    )
    expected = logits.log_softmax(-1).numpy()
    np.testing.assert_allclose(selection.log_probs, np.take_along_axis(expected, selection.tokens, -1), atol=1e-5)
    np.testing.assert_allclose(selection.given, np.take_along_axis(expected, given_tokens, -1), atol=1e-5)
    np.testing.assert_allclose(selection.normalizers, logits.logsumexp(-1), atol=1e-5)


@given(SCORES, st.floats(0.05, 5), st.integers(1, 50), *[st.floats(0.01, 0.99)] * 3, st.floats(0.1, 5))
def test_scores_are_changed_as_transformers_changes_them(rng, temperature, k, top_p, min_p, typical_p, penalty):
    vocab = int(rng.integers(2, 40))
    logits = torch.from_numpy(rng.normal(size=(2, vocab)).astype(np.float32)) * 5
    ids = rng.integers(0, vocab, (2, int(rng.integers(1, 20))))
    rows = np.repeat(np.arange(2, dtype=np.int32), ids.shape[1])
    edit = Edit("repeat", rows, ids.ravel().astype(np.int32), np.full(ids.size, penalty, np.float32))
    values = {"temperature": temperature, "top_k": k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p}
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(ids), logits.clone())
    kinds = TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper
    for kind, value in zip(kinds, values.values(), strict=True):
        expected = kind(value)(None, expected)
    selection = select(logits, SelectionRequest(top=vocab, edits=(edit,), warpers=warpers(**values)))
    assert [sorted(row) for row in selection.tokens.tolist()] == [[*range(vocab)]] * 2
    np.testing.assert_allclose(selection.scores, np.take_along_axis(expected.numpy(), selection.tokens, -1), rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@given(
    n=st.sampled_from([1, 100, 2048, 5000, 70_001]),
    k=st.integers(1, 40),
    masked=st.sampled_from([0.0, 0.5, 0.9999]),
    tied=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_highest_are_those_of_a_stable_sort(device, n, k, masked, tied, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn((2, n), generator=generator)
    if tied:
        scores = scores.bfloat16().float()
    scores[torch.rand(scores.shape, generator=generator) < masked] = float("-inf")
    expected = np.argsort(-scores.numpy(), axis=-1, kind="stable")[:, :k]
    assert highest(scores.to(device), min(k, n)).tolist() == expected.tolist()


def test_the_likeliest_draws_without_replacement_have_their_exact_odds():
    """Two draws of one row, against the probabilities of drawing one after the other."""
    p = np.array([0.5, 0.25, 0.15, 0.1])
    n = 20_000
    noise = Noise(3, np.arange(n, dtype=np.uint32), np.full(n, 5, np.uint32))
    logits = torch.from_numpy(np.log(p)).float().expand(n, -1)
    selection = select(logits, SelectionRequest(top=2, noise=noise))
    pairs = {(a, b): p[a] * p[b] / (1 - p[a]) for a in range(4) for b in range(4) if a != b}
    drawn = [tuple(pair) for pair in selection.tokens.tolist()]
    counts = [drawn.count(pair) for pair in pairs]
    assert chisquare(counts, n * np.array([*pairs.values()])).pvalue > 1e-3
    ranks = selection.scores + selection.noise
    assert (ranks[:, 0] >= ranks[:, 1]).all()


def test_scores_of_whole_rows_are_changed_by_a_callers_function():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    selection = select(logits, SelectionRequest(top=3, functions=(lambda scores: -scores,)))
    assert (selection.tokens.tolist(), selection.scores.tolist()) == ([[0, 1, 2]], [[-1.0, -2.0, -3.0]])
    assert logits.tolist() == [[1.0, 2.0, 3.0]]


COMPILERS = (os.environ.get("CXX", "g++"), "clang++")
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler for torch.compile")
INDUCTOR = pytest.param("inductor", marks=(pytest.mark.thorough, needs_compiler))


@pytest.mark.parametrize("compiler", ["eager", INDUCTOR])  # eager: the graph that Dynamo traces runs uncompiled
@pytest.mark.parametrize("kind", ["plain", "all"])
def test_selection_is_one_program_that_chooses_the_same_tokens(compiler, kind):
    """PyTorch compiles it without breaks. The test of the ladder's rungs says the same of a pass."""
    rng, n, vocab = np.random.default_rng(1), 3, 3000
    ids = np.arange(n, dtype=np.uint32)
    rows, tokens, tenths = ids.astype(np.int32), np.array([5, 6, vocab], np.int32), np.full(n, 1.1, np.float32)
    everything = {
        **{"top": 4, "normalize": True, "total": True, "one_of": (0, 1), "noise": Noise(2**64 - 1, ids, ids)},
        "warpers": warpers(temperature=1.5, top_k=2000, top_p=0.95, min_p=1e-4, typical_p=0.95),
        "given": rng.integers(0, vocab, (n, 2)),
        "edits": (Edit("repeat", rows, tokens, tenths), Edit("add", rows, tokens, tenths), Edit("ban", rows, tokens)),
        "allowed": np.packbits(rng.random((n, vocab)) < 0.9, axis=-1, bitorder="little"),
    }
    request = SelectionRequest(**(everything if kind == "all" else {}))
    logits = torch.from_numpy(rng.normal(size=(n, vocab)).astype(np.float32)) * 3
    compiled = torch.compile(sampling._select, fullgraph=True, dynamic=False, backend=compiler)
    with torch.no_grad():
        got = compiled(logits, request, sampling._seeds(request), sampling.PLAIN)
        expected = sampling._select(logits, request, sampling._seeds(request), sampling.PLAIN)
    torch.compiler.reset()
    assert torch.equal(got[0], expected[0])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
