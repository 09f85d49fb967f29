"""Lookups against brute force over the sequence."""

from collections import Counter
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam import SpecbeamError
from specbeam.core.tree import Tree
from specbeam.drafting.lookup import (
    MAX_MATCH_TOKENS,
    Lookup,
    SuffixAutomaton,
    below,
    continuations,
    latest_first,
    likeliest,
    occurrences,
)
from tests.conftest import byte_tokenizer, random_model

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def starts(part, text):
    return [i for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


@given(TEXTS, st.integers(1, 4), st.integers(1, 5))
def test_continuations_are_what_followed_at_the_latest_places(text, width, depth):
    places, _ = occurrences(np.array(text[:-1]), np.array(text))
    followed = [text[end : end + depth] for end in reversed(places.tolist())]
    unique = [one for i, one in enumerate(followed) if one not in followed[:i]]
    assert continuations(np.array(text), places, width, depth) == unique[:width]


@given(TEXTS, TEXTS)
def test_occurrences_in_another_text_are_those_of_the_longest_suffix(text, tokens):
    places, matched = occurrences(np.array(text), np.array(tokens))
    lengths = [n for n in range(1, min(MAX_MATCH_TOKENS, len(tokens)) + 1) if starts(tokens[-n:], text)]
    assert matched == max(lengths, default=0)
    assert places.tolist() == [i + matched for i in starts(tokens[-matched:], text) if matched]


@given(TEXTS, TEXTS)
def test_the_automaton_knows_every_part_and_how_often_it_came(text, other):
    automaton = SuffixAutomaton()
    automaton.extend(text)
    for i in range(len(text)):
        for j in range(i + 1, len(text) + 1):
            state = 0
            for token in text[i:j]:
                state = automaton.next[state][token]
            assert automaton.count[state] == len(starts(text[i:j], text))
    # Of another sequence it always knows the longest suffix that occurs in its own.
    match = (0, 0)
    for i, token in enumerate(other, 1):
        match = automaton.follow(match, [token])
        assert match[1] == max([n for n in range(i + 1) if starts(other[i - n : i], text)])
    assert automaton.follow((0, 0), other) == match


@given(TEXTS, st.integers(1, 3), st.integers(1, 5))
def test_the_likeliest_chains_are_those_that_followed_most_often(text, width, depth):
    places, matched = occurrences(np.array(text[:-1]), np.array(text))
    found = likeliest(partial(below, np.array(text)), latest_first(places), matched, width, depth)
    counts = Counter(tuple(text[end : end + n]) for end in places.tolist() for n in range(1, depth + 1))
    assert bool(found) == bool(matched)
    assert len({*map(tuple, found)}) == len(found) <= width * depth
    for chain in map(tuple, found):
        assert counts[chain] > 0
        assert len(chain) <= depth
        assert len(chain) == 1 or list(chain[:-1]) in found  # a part of it is likelier
    if found:  # equally frequent tokens are ranked by their latest match
        first = [text[end] for end in reversed(places.tolist())]
        assert found[0] == [max(dict.fromkeys(first), key=first.count)]


@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_a_lookup_finds_the_tokens_of_a_branch_too(draft):
    """Beams share no more than the prompt: what repeats is below it."""
    tree, found = Tree([1, 9]), []
    chains, controller = Mock(), Mock(shape=lambda num_tips, matched: (1, 3))
    chains.draft = lambda tips, below, width: found.append((tips.tolist(), [of_tip[-1] for of_tip in below]))
    lookup = Lookup(tree, chains, controller, latest=draft == "ngram")
    tips = []
    for branch in ([3, 4, 5, 3], [2, 6, 7, 2]):
        node = 1
        for token in branch:
            (node,) = tree.add([node], [token], [-1.0]).tolist()
        tips.append(node)
    tree.keep(tips)
    with pytest.raises(StopIteration):
        next(lookup.propose(np.array(tips[::-1]), np.zeros(2)))
    assert found == [(tips[::-1], [[6, 7, 2], [4, 5, 3]])]


def test_a_repetitive_sequence_takes_no_more_than_linear_time():
    automaton = SuffixAutomaton()
    automaton.extend([7] * 20_000)  # seconds; minutes if every context were counted
    assert automaton.follow((0, 0), [7] * 30_000)[1] == 20_000


def test_earlier_texts_are_drafted_from(lm):
    options = {"max_new_tokens": 30, "min_new_tokens": 30}
    plain = specbeam.generate(lm, [9, 8, 7], **options)
    corpus = specbeam.suffix_automaton(lm, [[5, 5, 5], [9, 8, 7, *plain.token_ids]])
    again = specbeam.generate(lm, [9, 8, 7], draft=corpus, num_draft_tokens=10, draft_width=1, **options)
    assert again.token_ids == plain.token_ids
    assert again.stats.target_passes <= 4
    beams = specbeam.generate(lm, [9, 8, 7], draft=corpus, num_beams=3, **options)
    assert beams.token_ids == specbeam.generate(lm, [9, 8, 7], num_beams=3, **options).token_ids


def test_texts_in_tokens_of_another_vocabulary_are_refused(lm, save):
    other = specbeam.load(save(random_model("llama", vocab_size=40), byte_tokenizer(vocab_size=40)), quantize="float32")
    automaton = specbeam.suffix_automaton(other, [[5, 6, 7]])
    with pytest.raises(SpecbeamError, match=f"in the tokens of {other.source}, and {lm.source} has other tokens"):
        specbeam.generate(lm, [5, 6], draft=automaton)


@pytest.mark.parametrize("texts", [[], "one text", [[]], [3], None, 5])
def test_what_is_no_corpus_is_refused(lm, texts):
    with pytest.raises(SpecbeamError, match=r"text|prompt"):
        specbeam.suffix_automaton(lm, texts)


@pytest.mark.parametrize(("banned", "drafted"), [([9], [8, 5, 6]), ([8], []), ([8, 5], [8]), ([7, 8, 5, 6], [8, 5])])
def test_a_lookup_ends_before_a_token_that_may_not_follow(lm, banned, drafted):
    how = {"num_draft_tokens": 3, "bad_words_ids": [banned], "max_new_tokens": 5, "trace": True}
    result = specbeam.generate(lm, [5, 6, 7, 8, 5, 6, 7], draft="ngram", **how)
    assert [draft_token["token_id"] for draft_token in result.trace[0]["drafted"]] == drafted
