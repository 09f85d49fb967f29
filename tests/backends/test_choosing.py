"""Selections in native code: against the reference in PyTorch, and bit for bit in other batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TypicalLogitsWarper

from specbeam.backends.cpu import CpuBackend
from specbeam.backends.cpu.library import library
from specbeam.backends.torch.sampling import select
from specbeam.checkpoints import open_checkpoint
from specbeam.core.selection import Edit, Noise, SelectionRequest
from tests.calls import warpers
from tests.conftest import random_model
from tests.core.test_selection import ARRAYS, assert_equal_bits

ISAS = [isa for isa in ("avx512", "avxvnni", "avx2", "portable") if library().specbeam_isa(isa.encode())]
VOCABS = [1, 7, 40, 513, 5000]


@pytest.fixture(scope="module")
def backends(save):
    """One for each instruction set and number of threads. Their model has no part in it."""
    checkpoint = open_checkpoint(save(random_model("llama", hidden_size=16)))
    made = {("", 1): CpuBackend(checkpoint, threads=1)}
    made |= {(isa, 1): CpuBackend(checkpoint, threads=1, isa=isa) for isa in ISAS}
    return made | {("", threads): CpuBackend(checkpoint, threads=threads) for threads in (2, 5)}


def rows_of(rng, n, vocab, tied):
    """Logits, perhaps with ties, impossible tokens and likely ones."""
    logits = rng.normal(size=(n, vocab)) * rng.choice([0.01, 1, 5])
    logits[:, rng.integers(0, vocab, 3)] += 6
    if tied:
        logits = np.round(logits * 2) / 2
    logits[rng.random((n, vocab)) < rng.choice([0, 0, 0.3, 0.999])] = -np.inf
    logits[:, rng.integers(vocab)] = 1.5
    logits[:, 0] = np.maximum(logits[:, 0], -3)  # some token is possible, wherever a request cuts the vocabulary
    return torch.from_numpy(logits.astype(np.float32))


def request_of(rng, n, vocab, tied, plain=0.6):
    def maybe(value):
        return value if rng.random() > plain else None

    def edit():
        kind, m = str(rng.choice(["add", "repeat", "ban", "set", "raise"])), int(rng.integers(0, 3 * vocab))
        rows, tokens = rng.integers(0, n, m).astype(np.int32), rng.integers(0, vocab + 2, m).astype(np.int32)
        whole, factors = rng.integers(-4, 4, vocab + 2), rng.uniform(0.5, 2, vocab + 2)
        values = {
            "add": whole,
            "repeat": factors,
            "raise": factors,
            "set": whole if tied else rng.normal(size=vocab + 2),
        }
        return Edit(kind, rows, tokens, *([] if kind == "ban" else [values[kind][tokens].astype(np.float32)]))

    fewer = maybe(int(rng.integers(1, vocab + 1)))  # a mask and end tokens may be of the whole vocabulary
    noise = Noise(int(rng.integers(0, 2**64, dtype=np.uint64)), *rng.integers(0, 2**32, (2, n), dtype=np.uint32))
    return SelectionRequest(
        top=int(rng.choice([0, 1, 1, 1, 9, vocab // 3, vocab, vocab + 5])),
        given=maybe(rng.integers(0, fewer or vocab, (n, int(rng.integers(1, 4))))),
        vocab=fewer,
        normalize=bool(rng.random() < 0.4),
        edits=tuple(edit() for _ in range(rng.integers(3))) if rng.random() > plain else (),
        allowed=maybe(np.packbits(rng.random((n, vocab)) < rng.choice([0, 0.01, 0.7]), axis=1, bitorder="little")),
        functions=(lambda scores: scores * 2,) if rng.random() < 0.05 else (),
        one_of=tuple(rng.permutation(vocab + 1)[:3].tolist()) if rng.random() > plain else (),
        together=maybe(tuple(sorted(rng.integers(0, vocab + 3, 2).tolist()))),
        warpers=warpers(
            temperature=maybe(float(rng.uniform(0.1, 3))),
            top_k=maybe(int(rng.integers(1, vocab + 5))),
            top_p=None if tied else maybe(float(rng.uniform(0, 1))),  # transformers keeps any of equal tokens
            min_p=maybe(float(rng.uniform(0, 0.5))),
            typical_p=maybe(float(rng.uniform(0.01, 1))),
        ),
        renormalize=bool(rng.random() < 0.3),
        noise=maybe(noise),
        total=bool(rng.random() < 0.5),
    )


def batch_of(rng, vocab):
    """Logits and selection requests about their rows, some rows with two."""
    sizes = rng.integers(1, 4, int(rng.integers(1, 5)))
    tied = rng.random() < 0.4
    logits = rows_of(rng, int(sizes.sum()), vocab, tied)
    slices = [slice(end - n, end) for n, end in zip(sizes.tolist(), np.cumsum(sizes).tolist(), strict=True)]
    slices += [slices[int(rng.integers(len(slices)))]]
    return logits, [(rows, request_of(rng, rows.stop - rows.start, vocab, tied)) for rows in slices]


def differs(selection, expected):
    """How a selection differs from the reference, None if only rounding does."""
    try:
        for name in ARRAYS:
            got, want = getattr(selection, name), getattr(expected, name)
            assert (got is None) == (want is None), name
            if want is not None:
                tolerance = 0 if name == "tokens" else 1e-6
                np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    except AssertionError as difference:
        return difference
    return None


RANDOM = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@given(RANDOM, st.sampled_from(VOCABS))
def test_selections_are_those_of_the_reference(backends, rng, vocab):
    logits, requests = batch_of(rng, vocab)
    for number, (rows, request) in enumerate(requests):
        kept = tuple(pair for pair in request.warpers if pair[0] != "typical_p")
        requests[number] = rows, replace(request, warpers=kept, renormalize=False)
    before = logits.clone()
    for (rows, request), selection in zip(requests, backends["", 2].choose(logits, requests), strict=True):
        own = logits[rows, : request.vocab]
        np.testing.assert_allclose(selection.normalizers, own.double().logsumexp(-1), atol=2e-6)
        np.testing.assert_array_equal(selection.logits, own)
        differences = []
        for rounding in (0, 1e-5, -1e-5):  # the reference adds up probabilities in float32
            other = [(n, value + rounding if n in ("top_p", "min_p") else value) for n, value in request.warpers]
            expected = select(logits[rows], replace(request, warpers=tuple(other)), selection.normalizers)
            differences.append(differs(selection, expected))
        assert None in differences, differences[0]
    assert torch.equal(logits, before)


@given(RANDOM, st.sampled_from(VOCABS), st.none() | st.floats(0.01, 0.99), st.booleans())
def test_typical_tokens_and_their_log_probs_are_those_of_transformers(backends, rng, vocab, p, is_truncated):
    """In float64, where rounding decides nothing: of tokens that are equally near within 1e-5, any may stay."""
    logits = rows_of(rng, 2, vocab, tied=bool(rng.random() < 0.4))
    before = {"temperature": 1.7, "top_k": 9, "min_p": 0.01} if is_truncated else {}
    request = SelectionRequest(top=vocab, warpers=warpers(**before, typical_p=p), renormalize=True)
    scores = logits.double()
    if is_truncated:
        for warper in (TemperatureLogitsWarper(1.7), TopKLogitsWarper(9), MinPLogitsWarper(0.01)):
            scores = warper(None, scores)
    log_probs = scores.log_softmax(-1)
    distance = (-log_probs - (-log_probs * log_probs.exp()).nansum(-1, keepdim=True)).abs()

    def farthest(mass):
        kept = (TypicalLogitsWarper(mass)(None, scores) if p else scores).isfinite()
        return distance.masked_fill(~kept, 0.0).amax(-1, keepdim=True)

    (selection,) = backends["", 2].choose(logits, [(slice(0, 2), request)])
    by_rank, tokens = torch.from_numpy(selection.scores), torch.from_numpy(selection.tokens)
    found = torch.zeros_like(by_rank).scatter(-1, tokens, by_rank)
    kept = found.isfinite()
    assert kept[distance < farthest((p or 0) - 1e-5) - 1e-5].all()
    assert not kept[distance > farthest((p or 0) + 1e-5) + 1e-5].any()
    expected = scores.masked_fill(~kept, -np.inf).log_softmax(-1).float()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@given(RANDOM, st.sampled_from(VOCABS))
def test_batch_threads_and_instruction_sets_change_no_bit(backends, rng, vocab):
    logits, requests = batch_of(rng, vocab)
    together = backends["", 1].choose(logits, requests)
    for backend in backends.values():
        for selection, other in zip(together, backend.choose(logits, requests), strict=True):
            assert_equal_bits(selection, other)
    for (rows, request), selection in zip(requests, together, strict=True):
        (alone,) = backends["", 5].choose(logits[rows].clone(), [(slice(0, len(logits[rows])), request)])
        assert_equal_bits(selection, alone)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_without_a_distribution_give_a_selection_nevertheless(backends, bad):
    """A row of -inf gives the lowest token ids. Of other rows nothing is promised but distinct tokens."""
    logits = torch.full((3, 5000), bad)
    logits[1, 7:4990:3] = 1.0
    noise = Noise(1, np.arange(3, dtype=np.uint32), np.arange(3, dtype=np.uint32))
    for options in (
        {},
        {"noise": noise},
        {"warpers": warpers(top_k=5)},
        {"warpers": warpers(top_p=0.5), "noise": noise},
        {"warpers": warpers(min_p=0.1)},
    ):
        (selection,) = backends["", 2].choose(logits, [(slice(0, 3), SelectionRequest(top=20, **options, total=True))])
        assert [len({*row} & {*range(5000)}) for row in selection.tokens.tolist()] == [20] * 3
        if bad == -np.inf:
            assert selection.tokens[0].tolist() == [*range(20)]
            assert np.isneginf(selection.scores[0]).all()


NOISE = Noise(1, np.zeros(1, np.uint32), np.zeros(2, np.uint32))


@pytest.mark.parametrize(
    ("rows", "asked", "message"),
    [
        ((1, 4), {}, "rows that the logits lack"),
        ((-1, 1), {}, "rows that the logits lack"),
        ((0, 2), {"vocab": 0, "top": 1}, "a vocabulary that the logits lack"),
        ((0, 1), {"given": np.array([[9]])}, "given token is not in the vocabulary"),
        ((0, 1), {"one_of": (-1,)}, "a token is negative"),
        ((0, 1), {"together": (2, 1)}, "end before they begin"),
        ((0, 1), {"edits": (Edit("ban", np.array([1]), np.array([1])),)}, "a row that its request lacks"),
        ((0, 1), {"warpers": warpers(temperature=0.0)}, "temperature is not a positive number"),
        ((0, 1), {"warpers": warpers(top_k=-3)}, "top_k is negative"),
        ((0, 1), {"warpers": warpers(top_p=1.5)}, "not in"),
        ((0, 2), {"noise": NOISE}, "shape"),
        ((0, 2), {"allowed": np.zeros((2, 1), np.uint8)}, "shape"),
        ((0, 2), {"given": np.zeros((1, 1), np.int64)}, "shape"),
    ],
)
def test_impossible_requests_are_refused(backends, rows, asked, message):
    with pytest.raises(ValueError if message == "shape" else RuntimeError, match=message):
        backends["", 1].choose(torch.zeros(3, 9), [(slice(*rows), SelectionRequest(**asked))])
