"""Constraints: the trie against sets of outputs, and constrained decoding against transformers and brute force."""

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, SpecbeamError, TokenTrie
from tests.conftest import beams_of_transformers, needs_torch

OUTPUTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=30)
DRAFTS = [None, "ngram", "suffix", "model"]
SMALL = {"vocab_size": 8, "eos_token_id": 7, "bos_token_id": 0, "initializer_range": 0.25}


@given(OUTPUTS, st.lists(st.integers(0, 6), max_size=5))
def test_a_trie_allows_what_its_outputs_begin_with(outputs, text):
    trie = TokenTrie(outputs)
    state = trie.start
    for i, token in enumerate(text):
        begins = [o for o in outputs if o[: i + 1] == text[: i + 1]]
        state = trie.advance(state, token)
        assert (state is not None) == bool(begins)
        if not begins:
            return
        for vocab_size in (3, 6, 20):
            bits = np.unpackbits(trie.mask(state, vocab_size), count=vocab_size, bitorder="little")
            below = {o[i + 1] for o in begins if len(o) > i + 1}
            assert np.flatnonzero(bits).tolist() == sorted(token for token in below if token < vocab_size)
        assert trie.complete(state) == (text[: i + 1] in outputs)


def test_a_trie_of_many_outputs_is_compact():
    table = np.random.default_rng(0).integers(0, 256, (200_000, 5))
    trie = TokenTrie(table)
    assert 200_000 < len(trie) < 800_000
    assert len(pickle.dumps(trie)) < 10 * len(trie)  # bytes per node
    for row in table[:1000].tolist():
        state = trie.start
        for token in row:
            state = trie.advance(state, token)
        assert trie.complete(state)


NO_LISTS = [[], [[]], [[1], []], [1, 2], ["12", "34"], b"ab", np.zeros((0, 3), int)]
NO_TOKENS = [[[1, -2]], [["a"]], [[1.5, 2]], [[True]], [[2**40, 1]], np.array([[2**40, 1]])]


@pytest.mark.parametrize("outputs", NO_LISTS + NO_TOKENS)
def test_values_that_are_not_outputs_are_refused(outputs):
    with pytest.raises(SpecbeamError, match="TokenTrie"):
        TokenTrie(outputs)


CITIES = ["Paris", "Rome", "Rome-Ostia", "Lima"]


def test_texts_become_outputs_by_the_models_tokenizer(tiny):
    _, lm = tiny("llama")
    for tokenizer in (lm, lm.tokenizer):
        options = {"constraint": TokenTrie(CITIES, tokenizer), "num_beams": 4, "num_return_sequences": 4}
        sequences = specbeam.generate(lm, "Name a city: ", **options).sequences
        assert {s.text for s in sequences} == {*CITIES}
    assert repr(TokenTrie([" Paris"], lm)) == repr(TokenTrie([list(b" Paris")]))


@needs_torch
def test_texts_without_a_tokenizer_say_what_to_give(tiny):
    with pytest.raises(SpecbeamError, match=r"needs the model, for its tokenizer: TokenTrie\(\['Paris', ...\], lm\)"):
        TokenTrie(["Paris"])
    with pytest.raises(SpecbeamError, match=r"not of one text: give \['Paris'\]"):
        TokenTrie("Paris")
    model, _ = tiny("llama")
    with pytest.raises(SpecbeamError, match="has no tokenizer"):
        TokenTrie(["Paris"], specbeam.hf.wrap(model))
    with pytest.raises(SpecbeamError, match="TokenTrie"):
        TokenTrie(["Paris", [3]], tiny("llama")[1])


@example([[0], [0, 0, 0], [0, 3, 0], [0, 3], [3, 0], [2]], 6, None, 1.0, True, 8)
@example([[0], [0, 0, 0], [1, 0, 0], [2], [0, 0]], 4, None, 1.0, True, 8)
@given(
    outputs=OUTPUTS,
    num_beams=st.integers(1, 6),
    draft=st.sampled_from(DRAFTS),
    length_penalty=st.sampled_from([0.0, 1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    vocab_size=st.sampled_from([8, 20_000]),  # a vocabulary of 20,000 is searched in blocks
)
def test_beams_in_a_trie_are_those_of_transformers(
    tiny, outputs, num_beams, draft, length_penalty, early_stopping, vocab_size
):
    changes = SMALL | {"vocab_size": vocab_size}
    model, lm = tiny("llama", **changes)
    if draft == "model":
        draft = tiny("llama", seed=3, **changes)[1]
    prompt = [1, 2, 3, 1, 2]

    def allowed(_, ids):
        text = ids[len(prompt) :].tolist()
        begins = [o for o in outputs if o[: len(text)] == text]
        return sorted({7 if len(o) == len(text) else o[len(text)] for o in begins}) or [7]

    options = {"max_new_tokens": 6, "num_beams": num_beams, "num_return_sequences": num_beams}
    if num_beams > 1:
        options |= {"length_penalty": length_penalty, "early_stopping": early_stopping}
    expected, scores = beams_of_transformers(model, prompt, prefix_allowed_tokens_fn=allowed, **options)
    found = zip(expected, scores or [0.0], strict=True)
    expected = [tokens[: tokens.index(7) + 1] for tokens, score in found if score > -1e6]
    for how in ({"constraint": TokenTrie(outputs)}, {"prefix_allowed_tokens_fn": allowed}):
        result = specbeam.generate(lm, prompt, draft=draft, **options, **how)
        got = [s.token_ids for s in result.sequences]
        if early_stopping is not True or num_beams == 1:
            assert got == expected
        elif len({*map(tuple, outputs)}) <= num_beams:
            # transformers may have stopped early for sequences outside the trie; we return all outputs of the trie
            assert sorted(got) == sorted([*text, 7] for text in {*map(tuple, outputs)})
            assert [s.score for s in result.sequences] == sorted((s.score for s in result.sequences), reverse=True)
        elif len(expected) == num_beams:
            assert got == expected
        assert all(s.token_ids[:-1] in outputs for s in result.sequences)


@pytest.mark.parametrize("draft", DRAFTS)
def test_samples_in_a_trie_stay_in_it(tiny, draft):
    _, lm = tiny("llama", **SMALL)
    if draft == "model":
        draft = tiny("llama", seed=3, **SMALL)[1]
    outputs = [list(text) for text in itertools.product((1, 4, 5), repeat=3)]
    engine, options = Engine(lm, max_requests=40), {"constraint": TokenTrie(outputs), "temperature": 2.0}
    requests = [engine.submit([1, 4, 5, 1], options | {"seed": seed}, draft=draft) for seed in range(40)]
    engine.run()
    texts = {tuple(request.result().token_ids[:-1]) for request in requests}
    assert texts <= set(map(tuple, outputs))
    assert len(texts) > 5


def test_drafts_the_constraint_forbids_cost_nothing(tiny):
    """A lookup that finds only forbidden tokens proposes none."""
    _, lm = tiny("llama", **SMALL)
    outputs = [[*one] for one in itertools.product((3, 6), (6, 4), (5, 4))]  # in the prompt 1 was followed by 2
    options = {"constraint": TokenTrie(outputs), "draft": "ngram", "num_draft_tokens": 4}
    result = specbeam.generate(lm, [1, 2, 3, 1, 2, 3, 1], **options)
    assert result.stats.drafted == 0
    assert result.token_ids[:-1] in outputs


def test_a_constraint_that_leaves_nothing_says_so(tiny):
    _, lm = tiny("llama", **SMALL)
    trie = TokenTrie([[5, 5, 5]])
    plain = {"min_new_tokens": 6, "max_new_tokens": 8}
    drawn = {"temperature": 1.0, "num_return_sequences": 2}
    for options in (plain, plain | drawn, plain | {"draft": "ngram"}, {"num_beams": 3, "min_new_tokens": 6}):
        with pytest.raises(SpecbeamError, match="no text is possible under constraint, min_"):
            specbeam.generate(lm, [1], constraint=trie, **options)
    with pytest.raises(SpecbeamError, match="returned no tokens"):
        specbeam.generate(lm, [1], prefix_allowed_tokens_fn=lambda _, ids: [])
    with pytest.raises(SpecbeamError, match="needs a token that ends the text"):
        specbeam.generate(lm, [1], constraint=trie, eos_token_id=[])
    with pytest.raises(SpecbeamError, match="constraint="):
        specbeam.generate(lm, [1], constraint=[[1, 2]])


class Masked(TokenTrie):
    """A constraint whose masks are wrong."""

    def __init__(self, mask):
        super().__init__([[3, 4]])
        self.wrong = mask

    def mask(self, state, vocab_size):
        return self.wrong


MASKS = [Masked(mask) for mask in ([1, 2], np.ones(2, dtype=bool), np.zeros(2, dtype=np.uint8))]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        *(({"constraint": mask}, r"the mask of Masked is .* needs uint8") for mask in MASKS),
        ({"prefix_allowed_tokens_fn": lambda _, ids: None}, "returned None"),
        *(({"prefix_allowed_tokens_fn": lambda *_, n=n: [n]}, "give token ids below") for n in (-1, 999, 1.5)),
        ({"logits_processor": lambda ids, scores: None}, "logits_processor returned"),
        ({"logits_processor": lambda ids, scores: scores[0]}, "logits_processor returned"),
        ({"logits_processor": lambda ids, scores: scores * float("nan")}, "NaN"),
        ({"constraint": TokenTrie}, "constraint="),
        ({"length_penalty": 150.0, "num_beams": 2}, "length_penalty"),
    ],
)
def test_wrong_results_of_the_callers_functions_are_refused_in_one_line(lm, options, says):
    with pytest.raises(SpecbeamError, match=says) as raised:
        specbeam.generate(lm, [1, 2], max_new_tokens=3, **options)
    assert "\n" not in str(raised.value)
