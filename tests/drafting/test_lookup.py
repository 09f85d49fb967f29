"""Lookups against brute force over the sequence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam import SpecbeamError
from specbeam.drafting.ngram import MAX_MATCH_TOKENS, continuations, occurrences
from specbeam.drafting.suffix import SuffixAutomaton

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def starts(part, text):
    return [i for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


@given(TEXTS, st.integers(1, 4), st.integers(1, 5))
def test_ngram_continuations_are_what_followed(text, width, depth):
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
        match = automaton.follow(match, token)
        assert match[1] == max([n for n in range(i + 1) if starts(other[i - n : i], text)])


@given(TEXTS)
def test_the_longest_suffix_that_occurred_before_is_known_as_the_sequence_grows(text):
    automaton = SuffixAutomaton()
    for i, token in enumerate(text, 1):
        automaton.extend([token])
        so_far = text[:i]
        assert automaton.repeated[1] == max(n for n in range(i) if starts(so_far[i - n :], so_far[:-1]))


def test_a_repetitive_sequence_takes_no_more_than_linear_time():
    automaton = SuffixAutomaton()
    automaton.extend([7] * 20_000)  # seconds; minutes if every context were counted
    assert automaton.repeated[1] == 19_999


def test_earlier_texts_are_drafted_from(lm):
    options = {"max_new_tokens": 30, "min_new_tokens": 30}
    plain = specbeam.generate(lm, [9, 8, 7], **options)
    corpus = specbeam.suffix_automaton(lm, [[5, 5, 5], [9, 8, 7, *plain.token_ids]])
    again = specbeam.generate(lm, [9, 8, 7], draft=corpus, num_draft_tokens=10, draft_width=1, **options)
    assert again.token_ids == plain.token_ids
    assert again.stats.target_passes <= 4
    beams = specbeam.generate(lm, [9, 8, 7], draft=corpus, num_beams=3, **options)
    assert beams.token_ids == specbeam.generate(lm, [9, 8, 7], num_beams=3, **options).token_ids


@pytest.mark.parametrize("texts", [[], "one text", [[]], [3], None, 5])
def test_what_is_no_corpus_is_refused(lm, texts):
    with pytest.raises(SpecbeamError, match=r"text|prompt"):
        specbeam.suffix_automaton(lm, texts)


@pytest.mark.parametrize(("banned", "drafted"), [([9], [8, 5, 6]), ([8], []), ([8, 5], [8]), ([7, 8, 5, 6], [8, 5])])
def test_a_lookup_ends_before_a_token_that_may_not_follow(lm, banned, drafted):
    how = {"num_draft_tokens": 3, "bad_words_ids": [banned], "max_new_tokens": 5, "trace": True}
    result = specbeam.generate(lm, [5, 6, 7, 8, 5, 6, 7], draft="ngram", **how)
    assert [draft_token["token_id"] for draft_token in result.trace[0]["drafted"]] == drafted
