"""How a model samples where nobody says how: its checkpoint, else its publisher, else specbeam."""

from types import SimpleNamespace

import pytest

import specbeam
from specbeam import SpecbeamError
from specbeam.models.sampling_defaults import FALLBACK, RECOMMENDED, SamplingDefaults, sampling_defaults
from specbeam.options.generation_defaults import GenerationDefaults
from specbeam.options.options import Options
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model


def of(settings=None, names=(), *, own=None, when_sampling=None, encoder=False):
    """The defaults of a model with these generation settings and names."""
    says = GenerationDefaults(settings, when_sampling=when_sampling)
    backend = SimpleNamespace(start_token_ids=[0] if encoder else None)
    return sampling_defaults(SimpleNamespace(generation_defaults=says, names=names, backend=backend), own)


SMOLLM2 = ("Smollm2 135M 8k Lc100K Mix1 Ep2", "llama")
FILE = "as the model's generation_config.json says"


@pytest.mark.parametrize(
    ("settings", "found", "origin"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9}, FILE),
        ({"top_k": 64, "top_p": 0.95}, {"temperature": 1.0, "top_k": 64, "top_p": 0.95}, FILE),
        ({"do_sample": True, "temperature": 1.0}, {"temperature": 1.0}, FILE),
        ({"do_sample": False, "top_p": 0.9}, {}, FILE),
        ({"temperature": 0.000001, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}, FILE),
        *(
            (
                silent,
                {"temperature": 0.2, "top_p": 0.9, "frequency_penalty": 0.3},
                "as the publisher of SmolLM2 recommends",
            )
            for silent in ({}, {"do_sample": True}, {"temperature": 1.0, "top_p": 1.0}, {"max_new_tokens": 9})
        ),
    ],
)
def test_the_checkpoint_comes_before_the_publisher(settings, found, origin):
    defaults = of(settings, SMOLLM2)
    assert defaults.settings == found
    assert defaults.origin.startswith(origin)


def test_a_penalty_of_the_checkpoint_comes_before_ours():
    assert of({"repetition_penalty": 1.3}).settings == FALLBACK.settings | {"repetition_penalty": 1.3}
    gguf = of({"top_p": 0.8}, when_sampling={"repetition_penalty": 1.05}).settings
    assert gguf == {"temperature": 1.0, "top_p": 0.8, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen2.5 Coder 0.5B Instruct AWQ", "Qwen2.5-Coder"),
        ("qwen2.5-coder-1.5b-instruct", "Qwen2.5-Coder"),
        ("Qwen2.5-1.5B-Instruct", "Qwen2.5"),
        ("Qwen2.5 7B Instruct", "Qwen2.5"),
        ("Qwen2.5-7B", None),
        ("Qwen3-0.6B", "Qwen3"),
        ("qwen3", "Qwen3"),
        ("Qwen3-4B-Instruct-2507", "Qwen3 Instruct"),
        ("Qwen3-Coder-30B-A3B-Instruct", "Qwen3-Coder"),
        ("Qwen3.5-9B", None),
        ("SmolLM2-1.7B-Instruct", "SmolLM2"),
        ("SmolLM3-3B", "SmolLM3"),
        ("gemma-3-1b-it", "Gemma 3"),
        ("gemma3", "Gemma 3"),
        ("gemma-2-2b-it", None),
        ("Llama-3.2-1B-Instruct", "Llama 3"),
        ("Meta Llama 3.1 8B Instruct", "Llama 3"),
        ("Llama-3.2-1B", None),
        ("TinyLlama-1.1B-Chat", None),
        ("HY-MT1.5-1.8B", "Hy-MT"),
        ("Hunyuan-MT-7B", "Hy-MT"),
        ("Mistral-Nemo-Instruct-2407", "Mistral Nemo"),
        ("Mistral-7B-Instruct-v0.3", None),
        ("Phi-4-mini-instruct", None),
        ("DeepSeek-R1-Distill-Qwen-1.5B", "DeepSeek-R1"),
        ("Gemma 4 E2B It", "Gemma 4"),
        ("gpt-oss-20b", "gpt-oss"),
        ("gpt_oss", "gpt-oss"),
        ("LFM2.5-8B-A1B", "LFM2.5 with experts"),
        ("LFM2.5-350M", "LFM2.5"),
        ("LFM2.5-1.2B-Thinking", None),
        ("LFM2-1.2B", "LFM2"),
        ("Ministral-3-3B-Instruct-2512", "Ministral 3 Instruct"),
        ("Ministral-3-3B-Reasoning-2512", None),
    ],
)
def test_publishers_are_known_by_the_names_of_their_models(name, family):
    defaults = of(names=("", "model", name))
    assert defaults == FALLBACK if family is None else f"publisher of {family} rec" in defaults.origin


def test_sizes_of_a_family_may_differ():
    penalties = [of(names=(f"Qwen2.5 {size} Instruct",)).settings["repetition_penalty"] for size in ("1.5B", "7B")]
    assert penalties == [1.1, 1.05]


def test_every_recommendation_is_allowed_and_names_its_source():
    for one in RECOMMENDED:
        assert Options.of({**one.settings, **one.ours}).samples
        assert one.source


def test_models_with_an_encoder_stay_greedy():
    assert of(encoder=True).settings == {}
    assert str(of(encoder=True)) == "takes the likeliest token (greedy), as models with an encoder do"


@pytest.mark.parametrize(
    ("given", "filled"),
    [
        ({}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}),
        ({"temperature": None, "top_k": 5}, {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1, "top_k": 5}),
        ({"top_p": 1.0}, {"temperature": 0.7, "top_p": 1.0, "repetition_penalty": 1.1}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"do_sample": False}, {"do_sample": False}),
        ({"num_beams": 4}, {"num_beams": 4}),
        ({"num_beams": 1}, {"num_beams": 1, **FALLBACK.settings}),
        ({"num_beams": 4, "temperature": 0.5}, {"num_beams": 4, **FALLBACK.settings, "temperature": 0.5}),
    ],
)
def test_given_options_win_field_by_field(given, filled):
    assert FALLBACK.fill(given) == filled
    assert FALLBACK.fill({}, searches=True) == {}  # by one beam


def test_the_operator_comes_before_the_model():
    mine = of(names=SMOLLM2, own={"temperature": 0.5, "repetition_penalty": 1.2})
    assert mine.settings == {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    assert "as you say, and else as the publisher of SmolLM2" in str(mine)
    for greedy in {"temperature": 0}, {"num_beams": 4}:
        assert mine.fill(greedy) == {"repetition_penalty": 1.2, **greedy}
    assert of(own={"temperature": 0}).fill({"top_p": 0.5}) == {"temperature": 0, "top_p": 0.5}
    with pytest.raises(SpecbeamError, match=r"top_p=2\.0 is not allowed"):
        of(own={"top_p": 2.0})


def test_a_value_of_the_file_that_is_not_allowed_is_named():
    with pytest.raises(
        SpecbeamError, match=r"the model's generation_config\.json: top_p=100\.0 is not allowed: .* file"
    ):
        of({"do_sample": True, "top_p": 100})
    assert of({"do_sample": True, "top_p": 100}, own={"top_p": 0.9}).settings == {"temperature": 1.0, "top_p": 0.9}


def test_generate_stays_greedy(save):
    lm = specbeam.load(save(random_model("llama")))
    assert isinstance(sampling_defaults(lm), SamplingDefaults)
    text = specbeam.generate(lm, [1, 2, 3], max_new_tokens=9)
    assert text.token_ids == specbeam.generate(lm, [1, 2, 3], max_new_tokens=9, do_sample=False).token_ids


def test_a_gguf_file_recommends_and_has_names(tmp_path):
    keys = {"sampling.temp": 0.5, "sampling.penalty_repeat": 1.2, "name": "SmolLM2 9B"}
    lms = []
    for some in (keys, {"name": keys["name"]}, {"basename": "Qwen2.5", "size_label": "7B", "finetune": "Instruct"}, {}):
        path = write_gguf(tmp_path / "m.gguf", random_model("llama"), **{f"general.{k}": v for k, v in some.items()})
        lms.append(specbeam.load(path, dtype="float32"))
    first, *others = map(sampling_defaults, lms)
    assert first.settings == pytest.approx({"temperature": 0.5, "repetition_penalty": 1.2})
    assert first.origin == "as the model's m.gguf says"
    assert ["SmolLM2" in others[0].origin, "Qwen2.5" in others[1].origin] == [True, True]
    assert others[2] == FALLBACK
    assert "repetition_penalty" not in lms[0].generation_defaults  # greedy texts stay as they are
