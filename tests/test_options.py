"""Options: ranges, contradictions, and what a checkpoint may fill in."""

from fractions import Fraction

import numpy as np
import pytest

import specbeam
from specbeam import Options, SpecbeamError


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": None},
        {"min_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 8},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 1.5},
        {"typical_p": 0},
        {"typical_p": 1.1},
        {"no_repeat_ngram_size": -1},
        {"no_repeat_ngram_size": 2.5},
        {"frequency_penalty": 2.1},
        {"frequency_penalty": None},
        {"presence_penalty": float("nan")},
        {"logit_bias": [3, 1.0]},
        {"logit_bias": {"x": 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {3: "much"}},
        {"logit_bias": {3: float("inf")}},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: 10_001}},
        {"logit_bias": {3: -1e9}},
        {"logit_bias": {3: 1, "3": 2}},
        {"logit_bias": {2**63: 1.0}},
        {"bad_words_ids": 3},
        {"bad_words_ids": [3]},
        {"bad_words_ids": ["Paris"]},
        {"bad_words_ids": "Paris"},
        {"bad_words_ids": [[]]},
        {"bad_words_ids": [[-1]]},
        {"bad_words_ids": [[1.5]]},
        {"bad_words_ids": [b"ab"]},
        {"bad_words_ids": [[2**63]]},
        {"distinct": "yes", "num_beams": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"diversity_penalty": 1e300, "num_beams": 2, "num_beam_groups": 2},
        {"seed": -1},
        {"seed": True},
        {"stop_strings": ""},
        {"stop_strings": ["a", 3]},
        {"eos_token_id": [-1]},
        {"eos_token_id": 1.5},
        {"eos_token_id": True},
        {"stop_strings": 5},
        {"do_sample": "yes"},
        {"do_sample": 0},
        {"num_beams": 0},
        {"num_beams": None},
        {"num_return_sequences": 3, "num_beams": 2},
        {"length_penalty": float("inf")},
        {"early_stopping": "always"},
        {"early_stopping": 1},
        {"temperature": 1e-39},
    ],
)
def test_values_out_of_range_are_refused_by_name_and_value(wrong):
    name, value = next(iter(wrong.items()))
    with pytest.raises(SpecbeamError, match=f"{name}=") as error:
        Options(**wrong)
    assert "give" in str(error.value)
    assert name in ("stop_strings", "eos_token_id") or repr(value) in str(error.value)


@pytest.mark.parametrize("digits", [400, 5000])  # Python writes out no more than 4300
@pytest.mark.parametrize(
    "name",
    [
        "max_new_tokens",
        "temperature",
        "top_k",
        "repetition_penalty",
        "frequency_penalty",
        "seed",
        "num_beams",
        "length_penalty",
        "diversity_penalty",
        "num_draft_tokens",
        "eos_token_id",
        "top_logprobs",
    ],
)
def test_huge_numbers_are_refused_in_a_short_message(name, digits):
    with pytest.raises(SpecbeamError, match=rf"^{name}=.* is not allowed: give .{{1,300}}$"):
        Options(**{name: 10**digits})
    with pytest.raises(SpecbeamError, match=f"^{name}="):
        Options(**{name: -Fraction(10**digits)})


def test_a_checkpoints_huge_number_is_refused():
    with pytest.raises(SpecbeamError, match=r"generation_config.json: repetition_penalty="):
        Options().with_defaults({"repetition_penalty": 10**400})


def test_a_bias_may_be_as_large_as_it_ever_counts():
    bias = {0: 10_000, 1: -10_000.0, 2: float("-inf")}
    assert Options(logit_bias=bias).logit_bias == bias


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"do_sample": False, "top_p": 0.5}, "top_p=0.5 has no effect with do_sample=False"),
        ({"do_sample": True, "temperature": 0}, "temperature=0 is greedy and contradicts do_sample=True"),
    ],
)
def test_contradictions_are_refused(wrong, says):
    with pytest.raises(SpecbeamError, match=f"^{says}: leave one out$"):
        Options(**wrong)


@pytest.mark.parametrize(
    ("given", "samples"),
    [
        ({}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0, "top_p": 0.9}, False),
        ({"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "typical_p": 1}, False),
        ({"temperature": 1.0}, True),
        ({"top_k": 5}, True),
        ({"typical_p": 0.9}, True),
        ({"top_k": 0}, False),
        ({"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}, False),
        ({"top_k": 0, "top_p": 0.9}, True),
        ({"do_sample": True}, True),
        ({"do_sample": False, "temperature": 1.0, "top_p": 1.0}, False),
        ({"repetition_penalty": 1.2}, False),
    ],
)
def test_sampling_is_asked_for(given, samples):
    assert Options(**given).samples is samples


def test_a_checkpoint_fills_in_what_was_not_said():
    defaults = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "max_length": 5}
    greedy = Options().with_defaults(defaults)
    assert not greedy.samples
    assert (greedy.repetition_penalty, greedy.temperature) == (1.1, None)
    assert Options().with_defaults({"no_repeat_ngram_size": 3, "typical_p": 0.5}).no_repeat_ngram_size == 3
    sampled = Options(do_sample=True, top_k=3).with_defaults(defaults)
    assert (sampled.temperature, sampled.top_k, sampled.repetition_penalty) == (0.7, 3, 1.1)


def test_numbers_may_be_numpys_and_none_means_no_stop_strings():
    options = Options(
        max_new_tokens=np.int64(5), temperature=np.float32(0.5), eos_token_id=np.int64(3), stop_strings=None
    )
    assert (options.max_new_tokens, options.temperature, options.eos_token_id, options.stop_strings) == (
        5,
        0.5,
        (3,),
        (),
    )
    assert type(options.max_new_tokens) is int


def test_a_checkpoints_wrong_value_is_not_blamed_on_the_caller():
    with pytest.raises(SpecbeamError, match=r"generation_config.json: top_k=-1"):
        Options(do_sample=True).with_defaults({"top_k": -1})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("temprature", "temperature"),
        ("max_tokens", "max_new_tokens"),  # OpenAI, vLLM
        ("n_predict", "max_new_tokens"),  # llama.cpp
        ("max-new-tokens", "max_new_tokens"),
        ("n", "num_return_sequences"),
        ("num_return", "num_return_sequences"),
        ("num_hypotheses", "num_return_sequences"),  # CTranslate2
        ("beams", "num_beams"),
        ("beam_size", "num_beams"),
        ("repeat_penalty", "repetition_penalty"),
        ("stop", "stop_strings"),
        ("eos", "eos_token_id"),
        ("sampling_topk", "top_k"),
        ("assistant_model", "draft"),
    ],
)
def test_an_unknown_name_is_refused_with_the_one_that_was_meant(wrong, meant):
    with pytest.raises(SpecbeamError, match=f"did you mean '{meant}'"):
        Options.of({wrong: 1})
    with pytest.raises(SpecbeamError, match=f"^unknown option '{wrong}': did you mean '{meant}'"):
        Options(**{wrong: 1})


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("torch_dtype", "dtype"),  # transformers
        ("device_map", "device"),
        ("quantization", "quantize"),  # vLLM
        ("n_threads", "threads"),  # llama.cpp
        ("bakend", "backend"),
    ],
)
def test_an_unknown_name_at_load_is_refused_with_the_one_that_was_meant(wrong, meant):
    with pytest.raises(SpecbeamError, match=f"^unknown option '{wrong}': did you mean '{meant}'"):
        specbeam.load("not/there", **{wrong: 1})


def test_a_name_that_resembles_none_gets_the_list():
    with pytest.raises(SpecbeamError, match=r"'xyzzy': there are max_new_tokens, .*, draft"):
        Options.of({"xyzzy": 1})
    with pytest.raises(SpecbeamError, match="unknown option '3'"):
        Options.of({3: 1})


def test_an_argument_beside_the_options_is_no_option():
    with pytest.raises(SpecbeamError, match="give it beside the options, as in draft='ngram'"):
        Options.of({"draft": "ngram"})
    with pytest.raises(SpecbeamError, match="give it beside the options, as in draft='ngram'"):
        Options(draft="ngram")


def test_options_can_be_changed():
    options = Options(num_beams=4, length_penalty=0.5)
    assert Options.of(options) is options
    assert Options.of(options, max_new_tokens=5) == Options(num_beams=4, length_penalty=0.5, max_new_tokens=5)
    assert Options.of({"num_beams": 4}, num_beams=2) == Options(num_beams=2)
    with pytest.raises(SpecbeamError, match=r"length_penalty=0.5 has no effect without beams"):
        Options.of(options, num_beams=1)


def test_the_ids_of_json_are_texts_and_words_may_be_arrays():
    options = Options(logit_bias={"50256": -100, np.int64(3): np.float32(0.5)}, bad_words_ids=[np.array([1, 2]), (3,)])
    assert options.logit_bias == {50256: -100.0, 3: 0.5}
    assert options.bad_words_ids == ((1, 2), (3,))
