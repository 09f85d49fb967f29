"""End tokens of a request that are text of its constraint: against a list of the language's words, step by step."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam import Choice, Grammar, JsonSchema, Regex, SpecbeamError, TokenTrie
from tests.conftest import EOS, examples, run_alone
from tests.structured.test_grammar import words

pytest.importorskip("torch")


class Listed:
    """A custom constraint: a list of words, whose states are what has been written."""

    start = ""

    def __init__(self, listed, lm):
        self.listed, self.lm = listed, lm

    def advance(self, state, token):
        after = state + self.lm.decode_token([token])
        return after if any(word.startswith(after) for word in self.listed) else None

    def mask(self, state, vocab_size):
        bits = np.zeros(vocab_size, dtype=bool)
        bits[[i for i in range(256) if self.advance(state, i) is not None]] = True
        return np.packbits(bits, bitorder="little")

    def complete(self, state):
        return state in self.listed


def union(listed):
    return "|".join(map(re.escape, listed))


KINDS = {
    "Regex": lambda listed, lm: Regex(union(listed)),
    "GBNF": lambda listed, lm: Grammar("root ::= " + " | ".join(f'"{word}"' for word in listed)),
    "Choice": lambda listed, lm: Choice(tuple(listed)),
    "TokenTrie": lambda listed, lm: TokenTrie([*listed], lm),
    "custom": Listed,
}
METHODS = [({}, None), ({"do_sample": True, "seed": 3}, None), ({"num_beams": 12, "num_return_sequences": 12}, None)]
METHODS += [({}, "ngram"), ({"num_beams": 12, "num_return_sequences": 12}, "ngram")]
METHODS += [({"num_beams": 3, "num_return_sequences": 3, "do_sample": True, "seed": 5}, None)]


def greedy(model, lm, listed, ends):
    """Greedy search over the words, written out: what it writes, or None where nothing may follow."""
    import torch

    prompt, text = lm.tokenizer("a b c", add_special_tokens=False).input_ids, ""
    prompt = [*prompt]
    ids = {lm.decode_token([i]): i for i in range(128)}
    while True:
        after = {ids[word[len(text)]] for word in listed if word.startswith(text) and len(word) > len(text)}
        after = after | ends if text in listed else after - ends
        if not after:
            return None
        with torch.no_grad():
            scores = model(torch.tensor([prompt])).logits[0, -1].tolist()
        best = max(sorted(after), key=scores.__getitem__)
        if best in ends and text in listed:
            return text
        prompt, text = [*prompt, best], text + lm.decode_token([best])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names_end", [True, False])
@settings(max_examples=examples(0.2))
@given(
    listed=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=8, unique=True),
    letters=st.sets(st.sampled_from("bcz"), max_size=2),
)
def test_a_text_ends_only_where_it_is_complete(tiny, kind, names_end, listed, letters):
    model, lm = tiny("llama")
    lm = lm if names_end else replace(lm, eos_token_ids=frozenset())
    ends = {EOS, *(lm.tokenizer(letter, add_special_tokens=False).input_ids[0] for letter in letters)}
    reachable = {word for word in listed if letters.isdisjoint(word)}
    constraint = KINDS[kind](listed, lm)
    for method, draft in METHODS:
        options = {"constraint": constraint, "max_new_tokens": 8, "eos_token_id": sorted(ends), **method}
        try:
            sequences = run_alone(lm, "a b c", options, draft).sequences
        except SpecbeamError:  # no text is possible
            sequences = ()
        texts = [sequence.text for sequence in sequences]
        assert reachable.issuperset(texts)
        assert all(sequence.is_complete and sequence.finish_reason == "stop" for sequence in sequences)
        if method.get("num_beams") == 12:
            assert {*texts} == reachable
        if not method:
            assert texts == [text for text in [greedy(model, lm, listed, ends)] if text is not None]


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_texts_of_a_schema_are_whole(lm, draft):
    constraint = JsonSchema({"type": "string", "enum": ["ab", "cd", "cde"]})
    (end,) = lm.tokenizer("b", add_special_tokens=False).input_ids
    options = {"constraint": constraint, "num_beams": 4, "num_return_sequences": 4, "eos_token_id": [EOS, end]}
    found = run_alone(lm, "a b c", options | {"max_new_tokens": 9}, draft).sequences
    assert {(one.text, one.is_complete) for one in found} == {('"cd"', True), ('"cde"', True)}


def test_words_are_those_of_the_expression(lm):
    (end,) = lm.tokenizer("b", add_special_tokens=False).input_ids
    options = {"constraint": Regex("[ab]{3,4}c"), "num_beams": 30, "num_return_sequences": 30, "max_new_tokens": 8}
    found = run_alone(lm, "a b c", options | {"eos_token_id": [EOS, end]}).sequences
    assert {one.text for one in found} == {word for word in words("[ab]{3,4}c", "abc", 5) if "b" not in word}
    with pytest.raises(SpecbeamError, match="no text is possible under constraint, eos_token_id"):
        specbeam.generate(lm, "a", raw=True, constraint=Regex("ab"), eos_token_id=[EOS, end])
