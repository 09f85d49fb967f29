"""Passes that a backend runs by itself have the bits of single passes."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam.backends.contract import TreeBatch
from specbeam.core.selection import Edit, NextBeams, Noise, SelectionRequest
from tests.backends.test_cpu import of_one_sequence
from tests.calls import warpers
from tests.conftest import examples, head_of, random_model
from tests.core.test_selection import assert_equal_bits

VOCAB = 259
PROMPT_TOKENS = 20
ROOM = 200  # slots for each search
SEARCHES = 3
GO_ON = np.zeros(1, np.int32)


@pytest.fixture(scope="module")
def backends(save):
    """With and without windows, with one thread and two. In the last model, pairs of tokens are equally likely."""
    twins = random_model("llama")
    for token in range(60, 100, 2):
        head_of(twins)[token + 1] = head_of(twins)[token]
    models = random_model("llama"), random_model("mistral", sliding_window=8), twins
    folders = [save(model) for model in models]
    made = [specbeam.load(folder, backend="cpu", threads=n).backend for folder in folders for n in (1, 2)]
    for backend in made:
        backend.reserve((SEARCHES + SEARCHES * MOST_BEAMS) * ROOM)
    return made


class Search:
    """One sequence, or the beams of a search: their tokens, and how they go on."""

    def __init__(self, number, given):
        self.given = given
        self.sequences = [given["prompt"] + [token] for token in given["last"][: given["beams"] or 1]]
        self.scores = np.array(given["scores"][: len(self.sequences)], np.float32)
        self.slots = number * ROOM + (7 * np.arange(ROOM) % ROOM)  # in any order
        self.prefix = self.slots[: PROMPT_TOKENS - (0 if given["beams"] > 1 else -1)]

    @property
    def beams(self):
        limits = self.given["best_above"], self.given["all_above"]
        return NextBeams(self.scores.copy(), *limits) if self.given["beams"] else None

    def request(self):
        """The selection request at the ends of its sequences."""
        n, noise = len(self.sequences), None
        if self.given["seed"] is not None and not self.given["beams"]:
            at = np.array([[self.given["stream"]], [len(self.sequences[0])]], np.uint32)
            noise = Noise(self.given["seed"], *at)
        banned = np.array(self.given["banned"], np.int32)
        ban = Edit("ban", np.repeat(np.arange(n, dtype=np.int32), len(banned)), np.tile(banned, n))
        if self.given["beams"]:
            return SelectionRequest(edits=(ban,), top=2 * n + 1, normalize=True)
        return SelectionRequest(edits=(ban,), noise=noise, warpers=warpers(**self.given["warpers"]))

    def prompt(self):
        """The part of a pass over the prompt."""
        return of_one_sequence(np.array(self.given["prompt"]), self.slots[:PROMPT_TOKENS], [])

    def ahead(self, passes):
        """The part of a pass over its last tokens, and of the passes that follow."""
        n = len(self.sequences)
        own = self.slots[PROMPT_TOKENS:][: n * passes]
        suffixes = own[:n, None] if self.given["beams"] > 1 else np.empty((n, 0), np.int64)
        tokens = np.array([sequence[-1] for sequence in self.sequences])
        at = np.full(n, PROMPT_TOKENS)
        return TreeBatch(tokens, at, own[:n], self.prefix, suffixes, np.arange(n), ahead=own[n:])

    def go_on(self, selection, ends):
        """Take a selection. Returns whether the next pass may follow without a look at it."""
        if not self.given["beams"]:
            token = int(selection.tokens[0, 0])
            self.sequences = [[*self.sequences[0], token]]
            return token not in ends
        n, top = len(self.sequences), selection.tokens.shape[1]
        sums = {(beam, place): self.scores[beam] + selection.scores[beam, place] for beam, place in np.ndindex(n, top)}
        best = sorted(sums, key=sums.get, reverse=True)[:n]  # stable: ties go to the first beam, and its first token
        tokens = [int(selection.tokens[where]) for where in best]
        self.sequences = [[*self.sequences[beam], token] for (beam, _), token in zip(best, tokens, strict=True)]
        self.scores = np.array([sums[where] for where in best], np.float32)
        enough = self.scores[0] > self.given["best_above"] and self.scores[-1] > self.given["all_above"]
        return bool(enough) and not {*tokens} & {*ends}


WARPERS = st.sampled_from([{}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 20}, {"min_p": 0.1}, {"typical_p": 0.9}])
TOKEN = st.integers(0, VOCAB - 1)
MOST_BEAMS = 16
SEARCH = st.fixed_dictionaries(
    {
        "prompt": st.lists(TOKEN, min_size=PROMPT_TOKENS, max_size=PROMPT_TOKENS),
        "beams": st.sampled_from([0, 0, 1, 2, 4, 4, 8, MOST_BEAMS]),
        "last": st.lists(TOKEN, min_size=MOST_BEAMS, max_size=MOST_BEAMS, unique=True),
        "scores": st.lists(st.floats(-9, 0, width=32), min_size=MOST_BEAMS, max_size=MOST_BEAMS),
        "best_above": st.sampled_from([-math.inf, -math.inf, -5.0, -10.0]),
        "all_above": st.sampled_from([-math.inf, -math.inf, -10.0, -20.0]),
        "seed": st.none() | st.integers(0, 2**64 - 1),
        "stream": st.integers(0, 3),
        "banned": st.lists(TOKEN, max_size=3),
        "warpers": WARPERS,
    }
)


@settings(max_examples=examples(5))
@given(
    st.lists(SEARCH, min_size=1, max_size=SEARCHES), st.integers(1, 9), st.integers(0, 5), st.sets(TOKEN, max_size=2)
)
def test_passes_ahead_have_the_bits_of_single_passes(backends, given, passes, which, ends):
    """Each node of the single passes is evaluated with its whole sequence, in slots of its own."""
    backend, searches = backends[which], [Search(number, one) for number, one in enumerate(given)]
    backend.forward([search.prompt() for search in searches])
    segments = [search.ahead(passes) for search in searches]
    requests, beams = [search.request() for search in searches], [search.beams for search in searches]
    selections = backend.forward_ahead(segments, requests, beams, passes, ends, GO_ON)
    found = [selection.passes(len(search.sequences)) for selection, search in zip(selections, searches, strict=True)]
    by_pass = list(zip(*found, strict=True))
    done = len(selections[0].tokens) // len(searches[0].sequences)
    assert len(by_pass) == done
    for number, together in enumerate(by_pass):
        logits, asked = whole_sequences(backend, [one for search in searches for one in search.sequences]), []
        for search in searches:
            first = asked[-1][0].stop if asked else 0
            asked.append((slice(first, first + len(search.sequences)), search.request()))
        goes_on = True
        for selection, single, search in zip(together, backend.choose(logits, asked), searches, strict=True):
            assert_equal_bits(selection, single)
            goes_on &= search.go_on(single, ends)
        if number == done - 1:
            np.testing.assert_array_equal(np.concatenate([one.logits for one in together]), logits)
        by_torch = any("typical_p" in search.given["warpers"] and not search.given["beams"] for search in searches)
        assert goes_on == (number < done - 1) or done == passes or by_torch


def whole_sequences(backend, sequences):
    """The logits at the ends of sequences."""
    segments = [
        of_one_sequence(np.array(tokens), number * ROOM + np.arange(len(tokens)), [-1])
        for number, tokens in enumerate(sequences, SEARCHES)
    ]
    return backend.forward(segments)


def test_the_pass_in_which_something_comes_up_is_the_last(backends):
    segments = [root(0, [1], 7), root(ROOM, [2], 7)]
    free, barred = SelectionRequest(), SelectionRequest(allowed=np.zeros((1, -(-VOCAB // 8)), np.uint8))

    def passes(requests, ends=(), halt=0):
        halt = np.array([halt], np.int32)
        return {len(one.tokens) for one in backends[0].forward_ahead(segments, requests, [None] * 2, 8, ends, halt)}

    assert passes([free, free]) == {8}
    assert passes([free, free], halt=1) == {1}
    assert passes([free, barred]) == {1}  # no token is allowed
    assert passes([free, free], ends=range(VOCAB)) == {1}


def root(slot, tokens, ahead):
    """First tokens of sequences, in slots from a slot on, and slots for this many nodes to come."""
    n, slots = len(tokens), slot + np.arange(len(tokens) + ahead)
    suffixes = np.empty((1, 0), np.int64) if n == 1 else slots[:n, None]
    prefix = slots[:1] if n == 1 else slots[:0]
    return TreeBatch(
        np.array(tokens), np.zeros(n, np.int64), slots[:n], prefix, suffixes, np.arange(n), ahead=slots[n:]
    )


def test_passes_ahead_check_their_arguments(backends):
    backend, one, two = backends[0], root(0, [1], 7), root(0, [1, 2], 14)
    about_two = SelectionRequest(top=3, normalize=True)
    beams = NextBeams(np.zeros(2, np.float32), -math.inf, -math.inf)
    backend.forward_ahead([one, root(ROOM, [1, 2], 14)], [SelectionRequest(), about_two], [None, beams], 8, [], GO_ON)
    for segment, request, own, message in (
        (replace(one, ahead=one.ahead[:6]), SelectionRequest(), None, "lacks slots of the nodes to come"),
        (replace(one, suffixes=np.zeros((1, 1), np.int64)), SelectionRequest(), None, "at the end of its prefix"),
        (replace(one, prefix=np.arange(2)), SelectionRequest(), None, "at the end of its prefix"),
        (one, SelectionRequest(top=2), None, "neither about one token of one node"),
        (replace(one, slots=one.slots + 1), SelectionRequest(), None, "does not see its own slot|empty"),
        (replace(one, ahead=np.zeros(7, np.int64)), SelectionRequest(), None, "another position"),
        (replace(one, ahead=one.ahead + 2**40), SelectionRequest(), None, "not in the cache"),
        (two, about_two, None, "neither about one token of one node"),
        (two, SelectionRequest(top=2, normalize=True), beams, "more tokens than there are beams"),
        (two, about_two, NextBeams(np.zeros(3, np.float32), 0, 0), "no scores, or too many"),
        (replace(two, positions=np.array([0, 1])), about_two, beams, "at the end of its prefix or of its suffix"),
        (replace(two, ahead=np.full(14, 5)), about_two, beams, "same slot|another position"),
        (replace(two, ahead=-two.ahead), about_two, beams, "not in the cache"),
        (replace(two, suffixes=two.suffixes[::-1]), about_two, beams, "does not see its own slot"),
    ):
        with pytest.raises(RuntimeError, match=message):
            backend.forward_ahead([segment], [request], [own], 8, [], GO_ON)
    for requests in ([], [about_two, about_two]):
        with pytest.raises((RuntimeError, ValueError)):
            backend.forward_ahead([two], requests, [beams], 8, [], GO_ON)


def test_beams_whose_scores_are_no_numbers_do_not_go_ahead(backends):
    for scores in ([math.nan, 0], [-math.inf, -math.inf], [0, math.nan]):
        beams = NextBeams(np.array(scores, np.float32), -math.inf, -math.inf)
        request = SelectionRequest(top=3, normalize=True)
        (selection,) = backends[0].forward_ahead([root(0, [1, 2], 14)], [request], [beams], 8, [], GO_ON)
        assert len(selection.tokens) == 2


def test_scores_and_slots_may_have_any_precision(backends):
    """Native code reads float32 and int64. A strategy of the caller may give others."""
    found = []
    for kind, whole in ((np.float32, np.int64), (np.float16, np.int32), (np.float64, np.int16)):
        segment, request = root(0, [1, 2], 14), SelectionRequest(top=3, normalize=True)
        beams = NextBeams(np.array([0, 1, -2.5, 1], kind)[::2], -math.inf, -math.inf)
        segment = replace(segment, ahead=segment.ahead.astype(whole))
        (selection,) = backends[0].forward_ahead([segment], [request], [beams], 8, [], GO_ON)
        found.append(selection.tokens.tolist())
    assert len(found[0]) == 16
    assert found[0] == found[1] == found[2]
