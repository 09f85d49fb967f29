"""A wrong value of an option is refused at each surface that has the option, with the option's name there."""

import argparse
import re
from types import SimpleNamespace

import pytest

from specbeam import Options, SpecbeamError
from specbeam.cli.arguments import OFFERED, add_generation_to, options_of
from specbeam.models.sampling_defaults import FALLBACK
from specbeam.options.declared import OBJECTS, OPTIONS, Kind
from specbeam.options.names import nearest_name
from specbeam.options.surfaces import page_script, table
from specbeam.server.completions import CompletionRequest
from specbeam.server.errors import Refusal, validated
from specbeam.server.limits import Limits
from specbeam.speech import Settings
from specbeam.study import config

WRONG = {
    Kind.FLAG: ["yes"],
    Kind.STOPPING: ["always"],
    Kind.BIASES: [{"x": 1.0}, {"3": 1e9}],
    Kind.WORDS: [[["x"]], [[-1]]],
    Kind.TOKENS: [[-1], ["x"]],
    Kind.TEXTS: ["", 5],
}
"""Values that options of a kind without a range do not have."""
OTHER_RANGES = {"top_k": [-1], "seed": [-1, 2**63], "max_new_tokens": [0]}
"""What is allowed over HTTP alone: vLLM's word for all tokens, OpenAI's negative seeds, and texts that are scored."""
MODEL = SimpleNamespace(lm=SimpleNamespace(eos_token_ids=frozenset([0])), sampling=FALLBACK, draft=lambda name: None)


def wrong_values(option):
    if option.range is None:
        return WRONG.get(option.kind, [3])
    low, high = option.range.low, option.range.high
    below = low if option.range.exclusive else -1 if option.range.or_zero else low - 1
    above = [high + 1] if isinstance(high, int) else [2 * high]
    return ["x", True, below, *above]


CASES = [(name, value) for name, option in OPTIONS.items() for value in wrong_values(option)]


@pytest.mark.parametrize(("name", "value"), CASES)
def test_in_python(name, value):
    with pytest.raises(SpecbeamError, match=f"^{name}="):
        Options(**{name: value})


TYPED = {
    Kind.FLAG: lambda value: [],
    Kind.BIASES: lambda value: ["=".join(map(str, pair)) for pair in value.items()],
    Kind.WORDS: lambda value: [",".join(map(str, word)) for word in value],
    Kind.TOKENS: lambda value: value,
}
"""How values are typed: flags have none. Other kinds are typed as they are."""


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, value in CASES if OPTIONS[name] in OFFERED])
def test_on_the_command_line(name, value, capsys):
    option = OPTIONS[name]
    parser = argparse.ArgumentParser()
    add_generation_to(parser)
    typed = [f"{option.flag}={one}" for one in TYPED.get(option.kind, lambda value: [value])(value)]
    if not typed or value == 5:
        pytest.skip("nothing wrong can be typed")
    with pytest.raises((SpecbeamError, SystemExit)) as refused:
        options_of(parser.parse_args(typed))
    says = f"{refused.value} {capsys.readouterr().err}"
    assert f"argument {option.flag}" in says or says.startswith(f"{name}=")


@pytest.mark.parametrize(("name", "value"), [case for case in CASES if OPTIONS[case[0]].http_name is not None])
def test_over_http(name, value):
    field = OPTIONS[name].http_name
    if value in OTHER_RANGES.get(name, ()):
        validated(CompletionRequest, {"prompt": "a", field: value})
        return
    with pytest.raises(Refusal) as refused:
        validated(CompletionRequest, {"prompt": "a", field: value}).plan(MODEL, Limits(), "max_tokens", 16, None)
    assert refused.value.param == field


ANOTHER = {
    **{Kind.INTEGER: 2, Kind.SIZE: 2, Kind.NUMBER: 0.5, Kind.STOPPING: True},
    **{Kind.BIASES: {"5": 1.0}, Kind.TOKENS: [3], Kind.TEXTS: ["x"]},
}
"""A value that is not the default, by the kind of the option."""
BEAMS, GROUPS = {"num_beams": 4, "temperature": 0}, {"num_beam_groups": 2, "diversity_penalty": 0.5}
BESIDE = {"beams": BEAMS, "several": BEAMS, "sampling": {"temperature": 0.7}}


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.http_name is not None])
def test_each_field_of_http_sets_its_option(name):
    option = OPTIONS[name]
    value = ANOTHER.get(option.kind, not option.unset)
    fields = {field: of for need in option.needs for field, of in BESIDE.get(need, {}).items()}
    fields |= GROUPS if name in GROUPS else {}
    request = validated(CompletionRequest, {"prompt": "a", "max_tokens": 9, **fields, option.http_name: value})
    found = getattr(request.plan(MODEL, Limits(), "max_tokens", 16, None).options, name)
    expected = {Kind.BIASES: {5: 1.0}, Kind.TOKENS: (0, 3), Kind.TEXTS: ("x",)}.get(option.kind, value)
    assert found == expected


def test_the_schema_of_http_has_the_ranges():
    fields = CompletionRequest.model_json_schema()["properties"]
    ranges = {name: OPTIONS[name].range for name in ("length_penalty", "repetition_penalty", "draft_width", "top_p")}
    for name, numbers in ranges.items():
        shown, *_ = fields[name]["anyOf"]
        assert shown["exclusiveMinimum" if numbers.exclusive else "minimum"] == numbers.low
        assert shown["maximum"] == numbers.high


@pytest.mark.parametrize(("name", "value"), [case for case in CASES if OPTIONS[case[0]].speech])
def test_in_transcription(name, value):
    with pytest.raises(SpecbeamError, match=f"^{name}="):
        Settings(**{name: value})


@pytest.mark.parametrize(("name", "value"), [case for case in CASES if case[0] in config.DECODE_KEYS])
def test_in_a_study(name, value):
    with pytest.raises(SpecbeamError, match=rf"\b{name}="):
        config.check({"prompts": ["a"], "decode": {"mode": [*config.MODES], name: value}})


def test_the_page_and_the_documentation_have_the_options():
    script, shown = page_script(), table()
    in_page = [option for option in OPTIONS.values() if option.page is not None]
    assert re.findall(r'"name": "(\w+)"', script) == [option.http_name for option in in_page]
    assert [name for name in OPTIONS if f"`{name}`" not in shown] == []


def test_what_is_an_object_has_no_other_surface_than_python():
    for name in OBJECTS:
        option = OPTIONS[name]
        assert (option.http_name, option.metavar, option.page) == (None, None, None)


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.others])
def test_other_names_lead_to_the_option(name):
    for other in OPTIONS[name].others:
        meant = nearest_name(other, [*OPTIONS])
        assert meant is not None
        assert other in OPTIONS[meant].others or other in OPTIONS
