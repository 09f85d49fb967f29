"""A checkpoint's generation settings: each field of transformers has a place, and does what it does there."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import specbeam
from specbeam import SpecbeamError, hf
from specbeam.models.sampling_defaults import FALLBACK
from specbeam.options.declared import SHAPING
from specbeam.options.generation_defaults import (
    APPLIED,
    APPLIED_WHEN_SAMPLING,
    APPLIED_WITH_BEAMS,
    FIELDS,
    NOT_APPLIED,
    NOT_UNDER_A_CONSTRAINT,
    GenerationDefaults,
    defaults_of_config,
)
from specbeam.server.completions import CompletionRequest
from specbeam.server.limits import Limits
from tests.backends.test_encoder_decoder import make
from tests.conftest import EOS, assert_are_beams_of_transformers, beams_of_transformers, head_of, random_model, rewrite

PROMPT = [40, 41, 42, 40, 43, 44, 45]
MANY = [*range(150, 240)]
"""Ninety tokens: a text has some of them on each machine, though rounding differs."""
NEW = 9
BEAMS = {"num_beams": 3, "num_return_sequences": 3}


def test_every_field_of_transformers_has_one_place():
    """A field of a new version of transformers fails here until somebody decides what it does."""
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert theirs - {*FIELDS} == set()
    assert max(Counter(FIELDS).values()) == 1
    assert tuple(SHAPING) == APPLIED_WHEN_SAMPLING


@cache
def model_of(kind):
    """A model that ends its text where it would write the token before its last."""
    model = random_model("llama", seed=2) if kind == "llama" else make("t5, gated", seed=3)
    (text,), _ = beams_of_transformers(model, PROMPT, max_new_tokens=NEW)
    model.generation_config.pad_token_id = EOS
    head_of(model)[EOS] = 1.05 * head_of(model)[text[-3]]
    return model


@cache
def plain_text(kind):
    return beams_of_transformers(model_of(kind), PROMPT, max_new_tokens=NEW)[0][0]


def settings_of(kind):
    a, b, c, d, *_ = plain_text(kind)
    return {
        "min_length": NEW + (len(PROMPT) if kind == "llama" else 1),
        "min_new_tokens": NEW,
        "repetition_penalty": 1.7,
        "encoder_repetition_penalty": 2.5,
        "no_repeat_ngram_size": 1,
        "encoder_no_repeat_ngram_size": 1,
        "bad_words_ids": [[a, b], [c], [EOS]],
        "sequence_bias": [[[7], 5.0], [[EOS], -9.0], [[a, 9], 9.0], [[b], -1.0], [[a, b], -5.0], [[5, a, b], 1.0]],
        "forced_bos_token_id": 77,
        "forced_eos_token_id": [5],
        "exponential_decay_length_penalty": [2, 1.5],
        "suppress_tokens": [a, EOS],
        "begin_suppress_tokens": [a, b],
        "eos_token_id": [EOS, c, d],
        "bos_token_id": 9,
        "decoder_start_token_id": 5,
        "length_penalty": 0.3,
        "early_stopping": True,
        "renormalize_logits": True,
    }


def with_settings(kind, settings):
    model = copy.copy(model_of(kind))
    model.generation_config = copy.deepcopy(model.generation_config)
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


def compare_with_transformers(model, prompt=PROMPT):
    """Greedy text, beams, and drafts. Returns what transformers returned, with the scores of its beams."""
    lm, seen = hf.wrap(model), []
    for how in {}, BEAMS:
        expected, scores = beams_of_transformers(model, prompt, max_new_tokens=NEW, **how)
        for draft in (None, "ngram") if how else (None,):
            result = specbeam.generate(lm, prompt, max_new_tokens=NEW, draft=draft, **how)
            assert_are_beams_of_transformers(result.sequences, expected, scores or [result.sequences[0].score])
        seen.append((expected, scores))
    return seen


@cache
def texts_without(kind, *base, prompt=tuple(PROMPT)):
    model = with_settings(kind, dict(base))
    return [beams_of_transformers(model, [*prompt], max_new_tokens=NEW, **how) for how in ({}, BEAMS)]


OF_ENCODERS = ("bos_token_id", "decoder_start_token_id")
CASES = [(kind, name) for kind in ("llama", "t5") for name in (*APPLIED, *APPLIED_WITH_BEAMS)]
BASE = {
    "renormalize_logits": ("repetition_penalty", 1.7),
    "bos_token_id": ("decoder_start_token_id", None),
}
"""Without these, the settings have no effect."""


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case[0] == "t5" or case[1] not in OF_ENCODERS])
def test_each_applied_setting_does_what_it_does_in_transformers(kind, name):
    base = [BASE[name]] if name in BASE else []
    prompt = {"forced_bos_token_id": PROMPT[:1], "encoder_no_repeat_ngram_size": MANY}.get(name, PROMPT)
    prompt = PROMPT if kind == "t5" else prompt
    found = compare_with_transformers(with_settings(kind, dict([*base, (name, settings_of(kind)[name])])), prompt)
    base += [("bos_token_id", 5)] if name == "bos_token_id" else []
    if name != "early_stopping":  # it rarely changes so short texts
        assert found != texts_without(kind, *base, prompt=tuple(prompt))


TOGETHER = {
    "min_length": 9,
    "repetition_penalty": 1.2,
    "encoder_repetition_penalty": 1.3,
    "encoder_no_repeat_ngram_size": 2,
    "sequence_bias": [[[7], 2.0], [[7, 9], -3.0], [[9], 1.5]],
    "bad_words_ids": [[5], [7, 7]],
    "forced_eos_token_id": EOS,
    "exponential_decay_length_penalty": [3, 1.2],
    "suppress_tokens": [40],
    "begin_suppress_tokens": [7],
    "renormalize_logits": True,
    "length_penalty": 0.5,
}


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_all_settings_together_and_nothing_twice_in_hf_generate(kind):
    model = with_settings(kind, TOGETHER)
    compare_with_transformers(model)
    ids = torch.tensor([PROMPT])
    for how in {}, BEAMS:
        theirs, ours = (
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, **how, **own)
            for own in ({}, {"custom_generate": hf.generate})
        )
        assert theirs.tolist() == ours.tolist()


@pytest.fixture(scope="module")
def load(save):
    """Loads a model on the cpu backend with settings in one of its files."""

    def load(settings, file="generation_config.json", **how):
        folder = save(model_of("llama"))
        if file == "config.json":
            (folder / "generation_config.json").unlink()
        rewrite(folder, file, **settings)
        return specbeam.load(folder, **({"backend": "cpu"} | how))

    return load


FALLING = TOGETHER | {
    "sequence_bias": [[[7], -2.0], [[7, 9], -3.0]],
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
}
"""No score rises under these settings, so beams may be lazy."""


@pytest.mark.parametrize("settings", [TOGETHER, FALLING])
@pytest.mark.parametrize("how", [{}, {"num_beams": 17}, {"num_beams": 3, "do_sample": True, "seed": 3}])
def test_no_bit_differs_with_drafts_in_batches_and_step_by_step(load, how, settings):
    lm = load(settings)
    how |= {"max_new_tokens": NEW}
    prompts = [PROMPT, [5, 6], PROMPT[::-1]]

    def sequences(results):
        return [[(s.token_ids, s.log_probs, s.score) for s in result.sequences] for result in results]

    alone = sequences([specbeam.generate(lm, prompt, **how, trace=True) for prompt in prompts])
    for draft in None, "ngram", lm:
        assert sequences(specbeam.generate(lm, prompts, draft=draft, **how)) == alone


def test_passes_go_ahead_under_static_settings(load, monkeypatch):
    """What a checkpoint suppresses, bans and biases are edits of the same tokens in every pass."""
    static = ("sequence_bias", "bad_words_ids", "suppress_tokens", "encoder_repetition_penalty", "min_length")
    settings = {name: TOGETHER[name] for name in static} | {"begin_suppress_tokens": [9]}
    lm = load(settings | {"sequence_bias": [[[7], 2.0]], "bad_words_ids": [[5], [6]], "min_length": 30})
    calls, forward_ahead = [], lm.backend.forward_ahead

    def recorded(*args):
        selections = forward_ahead(*args)
        calls.append(len(selections[0].tokens))
        return selections

    monkeypatch.setattr(lm.backend, "forward_ahead", recorded)
    ahead = specbeam.generate(lm, PROMPT, max_new_tokens=30, eos_token_id=[EOS])
    assert max(calls) > 1
    assert specbeam.generate(lm, PROMPT, max_new_tokens=30, trace=True).token_ids == ahead.token_ids


def test_an_old_folder_has_its_settings_in_its_configuration(load):
    lm = load(TOGETHER, "config.json", dtype="float32", backend="auto")
    model = AutoModelForCausalLM.from_pretrained(lm.source)
    for how in {}, {"num_beams": 3}:
        (expected,), _ = beams_of_transformers(model, PROMPT, max_new_tokens=NEW, **how)
        found = specbeam.generate(lm, PROMPT, max_new_tokens=NEW, **how).token_ids
        assert found == expected[: len(found)]
        assert found != specbeam.generate(load({}), PROMPT, max_new_tokens=NEW, **how).token_ids


@pytest.mark.parametrize(
    "config",
    [
        {"num_beams": 4, "min_length": 5, "eos_token_id": 2, "vocab_size": 9, "forced_eos_token_id": None},
        {"min_length": 5, "decoder": {"min_length": 7, "no_repeat_ngram_size": 3}, "text_config": {"top_k": 3}},
        {"text_config": {"eos_token_id": [3, 4], "suppress_tokens": [1]}, "repetition_penalty": 1.2},
        {"force_bos_token_to_be_generated": True, "bos_token_id": 0},
        {},
    ],
)
def test_settings_of_a_configuration_are_found_as_in_transformers(config):
    theirs = GenerationConfig.from_model_config(copy.deepcopy(config)).to_dict()
    theirs.pop("transformers_version")  # of this installation
    assert defaults_of_config(config) == {name: theirs[name] for name in FIELDS if theirs.get(name) is not None}


def test_options_of_the_caller_win(load):
    lm = load({"min_length": 30, "bad_words_ids": [[plain_text("llama")[0]]]})
    least = [
        len(specbeam.generate(lm, PROMPT, max_new_tokens=NEW, eos_token_id=[*range(256)], **how).token_ids)
        for how in ({}, {"min_new_tokens": None}, {"min_new_tokens": 0}, {"min_new_tokens": 3})
    ]
    assert least == [NEW, NEW, 1, 4]  # the end token comes after them
    assert specbeam.generate(lm, PROMPT, max_new_tokens=1, bad_words_ids=[]).token_ids == plain_text("llama")[:1]


LABELS = [" stop", " go", "stop", "go", " "]


def forbidding(a):
    """Settings that take labels away. ``a`` gives the token of a letter."""
    return {
        "min_length": 30,
        "min_new_tokens": 8,
        "no_repeat_ngram_size": 1,
        "encoder_no_repeat_ngram_size": 1,
        "bad_words_ids": [[a("s")], [a("g"), a("o")]],
        "forced_bos_token_id": a("o"),
        "forced_eos_token_id": EOS,
        "suppress_tokens": [a("o")],
        "begin_suppress_tokens": [a(" "), EOS],  # as Whisper's checkpoints have it
    }


def test_a_constraint_wins_over_what_only_the_checkpoint_forbids(lm):
    """Of five commands, two came: the others begin with a space."""
    a = lambda letter: lm.tokenizer.encode(letter, add_special_tokens=False)[0]  # noqa: E731
    prompt, how = [a("g"), 5, a("o"), a(" ")], {"num_beams": 5, "num_return_sequences": 5, "max_new_tokens": 5}
    settings = forbidding(a)
    assert settings.keys() == {*NOT_UNDER_A_CONSTRAINT}
    constraint = specbeam.Choice(LABELS)
    plain = specbeam.generate(lm, prompt, constraint=constraint, **how).sequences
    assert sorted(one.text for one in plain) == sorted(LABELS)
    for some in (*({name: value} for name, value in settings.items()), settings):
        own = replace(lm, generation_defaults=GenerationDefaults(some))
        assert specbeam.generate(own, prompt, constraint=constraint, **how).sequences == plain
        assert specbeam.generate(own, prompt, constraint=specbeam.Regex("(so){2}"), max_new_tokens=6).text == "soso"
    biased = {"sequence_bias": [[[a(" ")], -math.inf], [[a("g")], 30.0]]}
    found = specbeam.generate(
        replace(lm, generation_defaults=GenerationDefaults(biased)), prompt, constraint=constraint, **how
    )
    assert sorted(one.text for one in found.sequences) == sorted(LABELS)
    assert found.text == "go"  # other biases hold
    asked = specbeam.generate(own, prompt, constraint=constraint, bad_words_ids=[[a(" ")]], **how).sequences
    assert sorted(one.text for one in asked) == ["go", "stop"]  # what the caller forbids stays forbidden


def test_over_http_min_tokens_0_is_given_and_null_is_not():
    lm = SimpleNamespace(eos_token_ids=frozenset([EOS]))
    served = SimpleNamespace(lm=lm, sampling=FALLBACK, draft=lambda name: None)
    for given, expected in (({}, None), ({"min_tokens": None}, None), ({"min_tokens": 0}, 0), ({"min_tokens": 3}, 3)):
        plan = CompletionRequest(prompt="a", **given).plan(served, Limits(), "max_tokens", 16, None)
        assert plan.options.min_new_tokens == expected


ASKED = {
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "token_healing": True,
    "top_h": 0.4,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": [1],
    "force_words_ids": [[5]],
    "max_time": 2.0,
    "stop_strings": ["x"],
}


def test_a_setting_that_is_not_applied_is_named_once(load, caplog):
    assert ASKED.keys() == NOT_APPLIED.keys()
    for name, value in ASKED.items():
        assert f"asks for {name}={value!r} (" in GenerationDefaults({name: value}).not_applied
    lm = load(ASKED | {"do_sample": True, "num_beams": 4, "use_cache": False})
    specbeam.generate(lm, PROMPT, max_new_tokens=2)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.name == "specbeam"
    assert record.getMessage().startswith(f"{lm.source}: generation_config.json asks for ")
    assert all(f"{name}=" in record.getMessage() for name in ASKED)
    assert "num_beams" not in record.getMessage()
    caplog.clear()
    hf.wrap(with_settings("llama", {"guidance_scale": 1.5}))
    assert "generation_config asks for guidance_scale=1.5" in caplog.text


def test_values_of_old_files_that_ask_for_nothing_are_not_named(load, caplog):
    """transformers 4 wrote its defaults out."""
    written = {**GenerationConfig._get_default_generation_params(), "guidance_scale": 1.0, "token_healing": False}
    load(json.loads(json.dumps(written)) | {"eta_cutoff": 0, "stop_strings": []})
    assert not caplog.records


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("name", "values"),
    {
        "min_length": ["56", 1.5, True, [1]],
        "min_new_tokens": ["56", 10**400],
        "encoder_repetition_penalty": [0, -1.0, "a", float("nan"), 10**400],
        "encoder_no_repeat_ngram_size": [2.5, "a", [2]],
        "sequence_bias": [5, [[5, 1.0]], [[[5], "a"]], [[[], 1.0]], {"5": 1.0}, [[[5], float("inf")]], [[[5.0], 1.0]]],
        "exponential_decay_length_penalty": [5, [5], [1.5, 1.1], [2, "a"], [2, -1.0], [2, float("inf")]],
        "renormalize_logits": ["yes", 1],
        "suppress_tokens": ["a", [None], [[5]]],
        "length_penalty": ["a"],
    }.items(),
)
def test_a_value_that_is_not_allowed_is_refused_with_its_file_key_and_value(load, file, name, values):
    lm = load({}, file)
    for value in values:
        object.__setattr__(lm, "generation_defaults", GenerationDefaults({name: value}, file))
        with pytest.raises(SpecbeamError) as raised:
            specbeam.generate(lm, PROMPT, max_new_tokens=2, num_beams=2)
        assert f"the model's {file}: {name}=" in str(raised.value)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_length": -1, "encoder_no_repeat_ngram_size": -1, "sequence_bias": [], "bad_words_ids": []},
        {"sequence_bias": [[[-5], 1.0], [[9999], 5.0]], "suppress_tokens": [-1, 9999], "min_new_tokens": -3},
        {"exponential_decay_length_penalty": [2**40, 9.0], "encoder_repetition_penalty": 1, "forced_eos_token_id": []},
        {"encoder_no_repeat_ngram_size": 10**9, "suppress_tokens": [9999] * 10**5},
    ],
)
def test_settings_that_can_do_nothing_do_nothing(load, settings):
    lms = load(settings), load({})
    for how in {}, BEAMS:
        results = [specbeam.generate(lm, PROMPT, max_new_tokens=NEW, **how) for lm in lms]
        assert len({str([s.token_ids for s in result.sequences]) for result in results}) == 1


def test_settings_that_leave_no_token_are_named(load):
    for how in {}, BEAMS, {"draft": "ngram"}:
        with pytest.raises(SpecbeamError, match=r"no text is possible under .*the model's config\.json together"):
            specbeam.generate(load({"suppress_tokens": [*range(259)]}, "config.json"), PROMPT, **how)


def test_a_raise_beyond_all_numbers_ends_the_text(load):
    lm = load({"exponential_decay_length_penalty": [1, 9e4]})
    for how in {}, BEAMS:
        assert len(specbeam.generate(lm, [5, 6], max_new_tokens=100, **how).token_ids) < 5
