"""Passes that a backend runs by itself have the bits of single passes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam.backends.contract import Segment
from specbeam.selection import Edit, Noise, Wish
from tests.backends.test_choosing import equal
from tests.conftest import random_model

VOCAB = 259
PROMPT_TOKENS = 20
ROOM = 64  # slots for each text
GO_ON = np.zeros(1, np.int32)


@pytest.fixture(scope="module")
def backends(save):
    folders = save(random_model("llama")), save(random_model("mistral", sliding_window=8))
    made = [specbeam.load(folder, backend="cpu", threads=n).backend for folder in folders for n in (1, 2)]
    for backend in made:
        backend.reserve(4 * ROOM)
    return made


def part(text, first, tokens, length):
    """The part of a pass over tokens of a text from a position on, with a trunk of this length."""
    trunk = text * ROOM + (7 * np.arange(ROOM) % ROOM)  # slots in any order
    at = np.arange(first, first + len(tokens))
    return Segment(np.array(tokens), at, trunk[at], trunk[:length], np.empty((len(at), 0), np.int64), at[-1:] - first)


def wish_at(draw, position):
    """A wish, as it is at a position of its text."""
    noise = None if draw["seed"] is None else Noise(draw["seed"], *np.array([[draw["stream"]], [position]], np.uint32))
    tokens = np.array(draw["banned"], np.int32)
    ban = Edit("ban", np.zeros(len(tokens), np.int32), tokens)
    return Wish(edits=(ban,), noise=noise, **draw["warpers"])


WARPERS = st.sampled_from([{}, {"temperature": 0.7}, {"top_p": 0.9, "top_k": 20}, {"min_p": 0.1}, {"typical_p": 0.9}])
TEXT = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(0, VOCAB - 1), min_size=PROMPT_TOKENS, max_size=PROMPT_TOKENS),
        "seed": st.none() | st.integers(0, 2**64 - 1),
        "stream": st.integers(0, 3),
        "banned": st.lists(st.integers(0, VOCAB - 1), max_size=3),
        "warpers": WARPERS,
    }
)


@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 3), st.integers(0, VOCAB - 1))
def test_passes_ahead_have_the_bits_of_single_passes(backends, texts, passes, which, end):
    backend, position = backends[which], PROMPT_TOKENS - 1
    for number, text in enumerate(texts):
        backend.forward([part(number, 0, text["prompt"][:-1], position)])
    length = PROMPT_TOKENS + passes - 1
    segments = [part(number, position, text["prompt"][-1:], length) for number, text in enumerate(texts)]
    answers = backend.forward_ahead(segments, [wish_at(text, position) for text in texts], passes, [end], GO_ON)
    done = len(answers[0].tokens)
    if any("typical_p" in text["warpers"] for text in texts):  # answered by PyTorch
        assert done == 1
    elif done < passes:
        assert end in [answer.tokens[-1, 0] for answer in answers]
    tokens = [text["prompt"][-1] for text in texts]
    for row in range(done):
        at = position + row
        segments = [part(number, at, [token], at + 1) for number, token in enumerate(tokens)]
        asked = [(slice(n, n + 1), wish_at(text, at)) for n, text in enumerate(texts)]
        singles = backend.choose(backend.forward(segments), asked)
        tokens = [int(single.tokens[0, 0]) for single in singles]
        assert row == done - 1 or end not in tokens
        for answer, single in zip(answers, singles, strict=True):
            equal(answer_row(answer, row), single)


def answer_row(answer, row):
    names = ("tokens", "log_probs", "scores", "normalizers", "noise", "totals")
    rows = {name: value[row : row + 1] for name in names if (value := getattr(answer, name)) is not None}
    return dataclasses.replace(answer, **rows)


def test_the_pass_in_which_something_comes_up_is_the_last(backends):
    backend, segments = backends[0], [part(0, 0, [1], 8), part(1, 0, [2], 8)]
    free, barred = Wish(), Wish(allowed=np.zeros((1, -(-VOCAB // 8)), np.uint8))

    def passes(wishes, ends=(), halt=0):
        answers = backend.forward_ahead(segments, wishes, 8, ends, np.array([halt], np.int32))
        return {len(answer.tokens) for answer in answers}

    assert passes([free, free]) == {8}
    assert passes([free, free], halt=1) == {1}
    assert passes([free, barred]) == {1}  # no token is allowed
    assert passes([free, free], ends=range(VOCAB)) == {1}


def test_passes_ahead_check_their_arguments(backends):
    backend, good = backends[0], part(0, 0, [1], 8)
    two_nodes = part(0, 0, [1, 2], 8)
    for segments, wishes, message in (
        ([dataclasses.replace(good, trunk=good.trunk[:7])], [Wish()], "lacks slots of the nodes to come"),
        ([dataclasses.replace(good, branches=np.zeros((1, 1), np.int64))], [Wish()], "one node on its trunk"),
        ([two_nodes], [Wish()], "one node on its trunk"),
        ([good], [Wish(most=2)], "one wish with one token"),
        ([good], [], "one wish with one token"),
        ([dataclasses.replace(good, slots=good.slots + 1)], [Wish()], "does not see its own slot|empty"),
        ([dataclasses.replace(good, trunk=np.zeros(8, np.int64))], [Wish()], "another position"),
    ):
        with pytest.raises(RuntimeError, match=message):
            backend.forward_ahead(segments, wishes, 8, [], GO_ON)
