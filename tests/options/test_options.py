"""Options: ranges, contradictions, and what a checkpoint may fill in."""

from fractions import Fraction

import numpy as np
import pytest

import specbeam
from specbeam import Options, SpecbeamError
from specbeam.options.generation_defaults import GenerationDefaults

NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE = {
    "max_new_tokens": [0, 2.5, None],
    "min_new_tokens": [-1, 257],  # 256 new tokens are the default limit
    "temperature": [-0.1, NAN, "hot", 1e-39],
    "top_k": [-1],
    "top_p": [0, 1.1],
    "min_p": [1.5],
    "typical_p": [0, 1.1],
    "no_repeat_ngram_size": [-1, 2.5],
    "frequency_penalty": [2.1, None],
    "presence_penalty": [NAN],
    "logit_bias": [
        *([3, 1.0], {"x": 1.0}, {-1: 1.0}, {True: 1.0}, {3: "much"}, {3: INF}, {3: NAN}, {3: 10_001}, {3: -1e9}),
        *({3: 1, "3": 2}, {2**63: 1.0}),
    ],
    "bad_words_ids": [3, [3], ["Paris"], "Paris", [[]], [[-1]], [[1.5]], [b"ab"], [[2**63]]],
    "distinct": ["yes"],
    "repetition_penalty": [0, 1e300, 1e-300],
    "diversity_penalty": [1e300],
    "seed": [-1, True],
    "stop_strings": ["", ["a", 3], 5],
    "eos_token_id": [[-1], 1.5, True],
    "do_sample": ["yes", 0],
    "num_beams": [0, None],
    "num_return_sequences": [3],
    "length_penalty": [INF],
    "early_stopping": ["always", 1],
}
BEAMS = {"num_beams": 2}
BESIDE = {"distinct": BEAMS, "num_return_sequences": BEAMS, "diversity_penalty": BEAMS | {"num_beam_groups": 2}}
"""Options without which others have no effect."""


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, many in OUT_OF_RANGE.items() for value in many])
def test_values_out_of_range_are_refused_by_name_and_value(name, value):
    with pytest.raises(SpecbeamError, match=f"{name}=") as error:
        Options(**{name: value}, **BESIDE.get(name, {}))
    assert "give" in str(error.value)
    assert name in ("stop_strings", "eos_token_id") or repr(value) in str(error.value)


@pytest.mark.parametrize("digits", [400, 5000])  # Python writes out no more than 4300
@pytest.mark.parametrize(
    "name",
    [
        *("max_new_tokens", "temperature", "top_k", "repetition_penalty", "frequency_penalty", "seed", "num_beams"),
        *("length_penalty", "diversity_penalty", "num_draft_tokens", "eos_token_id", "top_logprobs"),
    ],
)
def test_huge_numbers_are_refused_in_a_short_message(name, digits):
    with pytest.raises(SpecbeamError, match=rf"^{name}=.* is not allowed: give .{{1,300}}$"):
        Options(**{name: 10**digits})
    with pytest.raises(SpecbeamError, match=f"^{name}="):
        Options(**{name: -Fraction(10**digits)})


def test_a_bias_may_be_as_large_as_it_ever_counts():
    bias = {0: 10_000, 1: -10_000.0, 2: float("-inf")}
    assert Options(logit_bias=bias).logit_bias == bias


def test_contradictions_are_refused():
    with pytest.raises(SpecbeamError, match=r"^top_p=0.5 has no effect with do_sample=False: leave one out$"):
        Options(do_sample=False, top_p=0.5)
    with pytest.raises(SpecbeamError, match=r"^temperature=0 is greedy and contradicts do_sample=True: leave one out$"):
        Options(do_sample=True, temperature=0)


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
    defaults = GenerationDefaults(
        {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True, "max_length": 5}
    )
    greedy = Options().with_defaults(defaults)
    assert not greedy.samples
    assert (greedy.repetition_penalty, greedy.temperature) == (1.1, None)
    ngrams = GenerationDefaults({"no_repeat_ngram_size": 3, "typical_p": 0.5})
    assert Options().with_defaults(ngrams).no_repeat_ngram_size == 3
    beams = GenerationDefaults({"num_beams": 9, "early_stopping": True, "length_penalty": 2.0})
    filled = [
        Options(num_beams=n, length_penalty=own).with_defaults(beams) for n, own in ((1, None), (2, None), (2, 0.5))
    ]
    assert [(one.num_beams, one.early_stopping, one.length_penalty) for one in filled] == [
        (1, None, None),
        (2, True, 2.0),
        (2, True, 0.5),
    ]
    sampled = Options(do_sample=True, top_k=3).with_defaults(defaults)
    assert (sampled.temperature, sampled.top_k, sampled.repetition_penalty) == (0.7, 3, 1.1)


def test_numbers_may_be_numpys_and_none_means_no_stop_strings():
    options = Options(max_new_tokens=np.int64(5), temperature=np.float32(0.5), eos_token_id=np.int64(3))
    assert (options.max_new_tokens, options.temperature, options.eos_token_id) == (5, 0.5, (3,))
    assert type(options.max_new_tokens) is int
    assert Options(stop_strings=None).stop_strings == ()


def test_a_checkpoints_wrong_value_is_not_blamed_on_the_caller():
    with pytest.raises(SpecbeamError, match=r"generation_config.json: top_k=-1"):
        Options(do_sample=True).with_defaults(GenerationDefaults({"top_k": -1}))
    with pytest.raises(SpecbeamError, match=r"generation_config.json: repetition_penalty="):
        Options().with_defaults(GenerationDefaults({"repetition_penalty": 10**400}))


MEANT = {
    "temperature": ["temprature"],
    "max_new_tokens": ["max_tokens", "n_predict", "max-new-tokens"],  # of OpenAI and vLLM, of llama.cpp
    "num_return_sequences": ["n", "num_return", "num_hypotheses"],  # the last of CTranslate2
    "num_beams": ["beams", "beam_size"],
    "repetition_penalty": ["repeat_penalty"],
    "stop_strings": ["stop"],
    "eos_token_id": ["eos"],
    "top_k": ["sampling_topk"],
    "draft": ["assistant_model"],
}


@pytest.mark.parametrize(("wrong", "meant"), [(wrong, meant) for meant, many in MEANT.items() for wrong in many])
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


def test_a_name_that_resembles_none_gets_the_list_and_an_argument_beside_the_options_is_none():
    for wrong, says in (
        ({"xyzzy": 1}, r"'xyzzy': there are max_new_tokens, .*, draft"),
        ({3: 1}, "unknown option '3'"),
        ({"draft": "ngram"}, "give it beside the options, as in draft='ngram'"),
    ):
        with pytest.raises(SpecbeamError, match=says):
            Options.of(wrong)
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
