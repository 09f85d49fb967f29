"""User-defined drafters: they change no text, whatever they propose, and their mistakes are named."""

import random

import numpy as np
import pytest

import specbeam
from specbeam import SpecbeamError
from specbeam.drafting.lookup import Lookup
from tests.conftest import EOS, head_of, needs_torch, random_model, run_alone

PROMPT = [5, 6, 7, 5, 6, 7, 5]
METHODS = {
    "greedy": {},
    "greedy with processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 5},
    "sampling": {"do_sample": True, "temperature": 1.2, "top_k": 20, "seed": 7},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True, "seed": 7},
}
SIZES = [{}, {"num_draft_tokens": 5}, {"num_draft_tokens": 3, "draft_width": 3}]


def noise(tokens, lm):
    """Up to three random chains, some empty, some long, some with the token that ends a text."""
    draw = random.Random(len(tokens))
    return [[draw.randrange(lm.backend.vocab_size) for _ in range(draw.randrange(9))] for _ in range(draw.randrange(4))]


def adversary(tokens, lm):
    """The token that ends a text, repetitions, and changes to the list of tokens that it was given."""
    last = tokens[-1]
    tokens.clear()
    return [[last] * 40, [EOS, EOS], [0], []]


@pytest.fixture(scope="module")
def sure(save):
    """A model that repeats itself, so that some of its tokens can be foreseen."""
    model = random_model("llama", initializer_range=0.1)
    head_of(model)[:] *= 40
    return specbeam.load(save(model), backend="cpu", quantize="float32", threads=1)


def oracle(sequence):
    """Knows the text, and two wrong ones."""
    return lambda tokens, lm: [[3], sequence[len(tokens) :], [4, 4]]


class Copying(Lookup):
    """A drafter with all that ours have."""

    looks_up = True

    def __init__(self, tree, chains, controller, lm):
        super().__init__(tree, chains, controller)


class WithoutYield(Copying):
    def propose(self, tips, scores):
        return self.chains.draft(tips[:1], [[[9, 9]]], 1)


def results_of(result):
    return [(one.token_ids, one.text, one.score, one.finish_reason) for one in result.sequences]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_no_drafter_changes_a_text(sure, method, sizes):
    options = METHODS[method] | {"max_new_tokens": 12}
    plain = specbeam.generate(sure, PROMPT, options)
    known = oracle(PROMPT + plain.token_ids)
    for draft in (noise, adversary, known, Copying, WithoutYield):
        drafted = specbeam.generate(sure, PROMPT, options, draft=draft, **sizes)
        assert results_of(drafted) == results_of(plain)
        assert drafted.stats.drafted > 0 or not sizes or draft is Copying
        assert drafted.receipt == plain.receipt


def test_a_good_drafter_saves_passes(lm):
    options = {"max_new_tokens": 30, "min_new_tokens": 30}
    plain = specbeam.generate(lm, PROMPT, options)
    known = oracle(PROMPT + plain.token_ids)
    alone = specbeam.generate(lm, PROMPT, options, draft=lambda *given: known(*given)[1], num_draft_tokens=10)
    assert alone.stats.target_passes <= 4
    third = specbeam.generate(lm, PROMPT, options, draft=known, num_draft_tokens=10, draft_width=1)
    assert third.stats.target_passes > 10  # only its first list is taken
    second = specbeam.generate(lm, PROMPT, options, draft=known, num_draft_tokens=10, draft_width=2)
    assert second.stats.target_passes <= 4


def test_the_function_gets_the_tokens_so_far_and_the_model(lm):
    seen = []

    def watch(tokens, given):
        assert given is lm
        seen.append(tokens)
        return []

    new = specbeam.generate(lm, PROMPT, draft=watch, num_draft_tokens=2, max_new_tokens=4, min_new_tokens=4).token_ids
    assert seen == [PROMPT + new[:length] for length in range(4)]


@pytest.mark.parametrize("found", [np.array([9, 9]), [np.int64(9)], (9, 9), [(9,), np.array([8])], [], [[]]])
def test_numbers_may_come_in_any_kind_of_list(lm, found):
    plain = specbeam.generate(lm, PROMPT, max_new_tokens=4)
    drafted = specbeam.generate(lm, PROMPT, draft=lambda *_: found, num_draft_tokens=2, max_new_tokens=4)
    assert drafted.token_ids == plain.token_ids


def raising(tokens, lm):
    return {}["missing"]


def yielding(tokens, lm):
    yield 9


class Forgetful(Copying):
    def propose(self, tips, scores):
        return [9]


class Wild(Copying):
    def propose(self, tips, scores):
        self.tree.draft(tips[:1], np.array([70_000]))
        return super().propose(tips, scores)


class Blind:
    def __init__(self, tree, chains, controller, lm):
        pass

    def propose(self, tips, scores):
        raise AssertionError


FILE = r"tests.drafting.test_custom:\S+ \(.*test_custom.py, line \d+\)"


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (raising, rf"the drafter {FILE} failed: KeyError: 'missing' \(.*test_custom.py, line \d+\)"),
        (yielding, rf"the drafter {FILE} returned the generator <.*>: return a list of token ids, \[\] for none"),
        (lambda tokens, lm: None, rf"{FILE} returned None: return a list of token ids"),
        (lambda tokens, lm: "the", rf"{FILE} returned the str 'the': return a list of token ids"),
        (lambda tokens, lm: ["the"], rf"{FILE} proposed the str 'the': return integers, the ids of tokens"),
        (lambda tokens, lm: [1.0], rf"{FILE} proposed the float 1.0: return integers"),
        (lambda tokens, lm: [[True]], rf"{FILE} proposed the bool True: return integers"),
        (lambda tokens, lm: [259], rf"{FILE} proposed the token 259, and the vocabulary has 259: .* 0 to 258"),
        (lambda tokens, lm: [[3], [-1]], rf"{FILE} proposed the token -1, and the vocabulary has 259"),
        (Forgetful, r"the drafter tests.drafting.test_custom:Forgetful proposed the list \[9\]: return DraftTokens"),
        (Wild, r"Wild proposed the token 70000, and the vocabulary has 259: draft with chains.draft"),
    ],
)
def test_a_mistake_ends_its_request_alone_and_is_named(lm, draft, says):
    engine = specbeam.Engine(lm)
    bad = engine.submit(PROMPT, {"num_draft_tokens": 2, "max_new_tokens": 5}, draft=draft)
    good = engine.submit([1], {"max_new_tokens": 5})
    engine.run()
    with pytest.raises(SpecbeamError, match=says):
        bad.result()
    assert good.result().token_ids == run_alone(lm, [1], {"max_new_tokens": 5}).token_ids
    assert engine.submit([1], {"max_new_tokens": 5}) is not None  # it takes further requests


def test_the_error_has_the_traceback_of_the_drafter(lm):
    with pytest.raises(SpecbeamError) as caught:
        specbeam.generate(lm, PROMPT, draft=raising, num_draft_tokens=2)
    assert 'return {}["missing"]' in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (
            lambda tokens: [],
            rf"the drafter {FILE} takes \(tokens\), but it is called with the token ids so far and the",
        ),
        (int, r"the drafter builtins:int is a class without the method propose"),
        (Blind, r"the drafter tests.drafting.test_custom:Blind has no attribute tree"),
        (
            "no_such_module:draft",
            r"'no_such_module:draft': there is no module 'no_such_module' on Python's path",
        ),
    ],
)
def test_what_is_no_drafter_is_refused_before_the_first_pass(lm, draft, says):
    with pytest.raises(SpecbeamError, match=says):
        specbeam.Engine(lm).submit(PROMPT, draft=draft)


@needs_torch
def test_a_model_of_transformers_is_no_function(tiny):
    model, lm = tiny("llama")
    with pytest.raises(SpecbeamError, match=r"draft is a LlamaForCausalLM, and no loaded model: .*specbeam\.hf\.wrap"):
        specbeam.generate(lm, PROMPT, draft=model)


def test_a_name_stands_for_the_function(lm):
    with pytest.raises(SpecbeamError, match=rf"{FILE} failed"):
        specbeam.generate(lm, PROMPT, draft="tests.drafting.test_custom:raising", num_draft_tokens=2)


def test_an_entry_point_stands_for_the_function_unless_a_model_has_its_name(lm, monkeypatch, tmp_path):
    from tests.test_plugins import declare

    declare(monkeypatch, ("mine", "tests.drafting.test_custom:raising"))
    with pytest.raises(SpecbeamError, match=rf"{FILE} failed"):
        specbeam.generate(lm, PROMPT, draft="mine", num_draft_tokens=2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(SpecbeamError, match=r"draft='mine' is an entry point and a model: .* or \./mine"):
        specbeam.generate(lm, PROMPT, draft="mine")
