"""Answers of a form: ``response_format``, ``text.format`` and ``structured_outputs``, as clients ask for them."""

import json
import re
from typing import Literal

import jsonschema
import pydantic
import pytest

import specbeam
from specbeam import JsonSchema
from specbeam.constraints import grammar
from tests.server.test_chat import CHAT, MESSAGES

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
NAMED = {"name": "person", "schema": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {**NAMED, "strict": True}}


class Person(pydantic.BaseModel):
    name: Literal["Ada", "Alan"]
    age: int = pydantic.Field(ge=0, le=99)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3, "n": 3}, {"n": 2, "seed": 1}, {"num_beams": 2, "draft": "ngram"}])
def test_a_schema_holds_for_every_method(served, chat_lm, how):
    fields = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "response_format": FORMAT, **how}
    if "seed" in how:
        fields["temperature"] = 1.5
    choices = served.choices(CHAT, **fields)
    for choice in choices:
        assert Person.model_validate_json(choice["message"]["content"])
        assert (choice["finish_reason"], choice["is_complete"]) == ("stop", True)
    loose = served.choices(CHAT, **fields | {"response_format": {"type": "json_schema", "json_schema": NAMED}})
    assert [one["message"]["content"] for one in loose] == [one["message"]["content"] for one in choices]
    if "seed" not in how:
        options = {"constraint": JsonSchema(SCHEMA), "max_new_tokens": 40, "num_beams": how.get("num_beams", 1)}
        result = specbeam.generate(chat_lm, MESSAGES, options, num_return_sequences=how.get("n", 1))
        assert [one["message"]["content"] for one in choices] == [one.text for one in result.sequences]


@pytest.mark.parametrize(
    "schema",
    [
        {"const": None},
        {"type": "object", "properties": {"a": {"const": None}}, "required": ["a"], "additionalProperties": False},
        {"enum": [{"a": None, "b": [None, {"c": None}]}]},
    ],
)
def test_null_in_a_schema_is_a_value(served, schema):
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for form in ({"response_format": named}, {"structured_outputs": {"json": schema}}):
        (choice,) = served.choices(CHAT, messages=MESSAGES, max_tokens=60, seed=1, **form)
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)
        assert choice["is_complete"]
    flat = {"type": "json_schema", "name": "a", "schema": schema}
    answer = served.post("/v1/responses", input="a", max_output_tokens=60, text={"format": flat}).json()
    jsonschema.validate(json.loads(answer["output"][0]["content"][0]["text"]), schema)
    assert answer["text"]["format"] == flat


@pytest.mark.parametrize("how", [{}, {"num_beams": 3, "n": 3}, {"temperature": 1.5, "seed": 2, "n": 3}])
def test_a_stop_token_ends_no_text_where_it_is_not_complete(served, chat_lm, how):
    ids = chat_lm.tokenizer("b!", add_special_tokens=False).input_ids
    form = {"structured_outputs": {"regex": "[ab]{3,4}c"}, "stop_token_ids": ids}
    for choice in served.choices(prompt="a", max_tokens=12, **{"temperature": 0, **form, **how}):
        assert (choice["text"] in ("aaac", "aaaac"), choice["is_complete"]) == (True, True)


def test_fewer_choices_than_asked_for_are_said(served):
    fields = {"prompt": "a", "max_tokens": 12, "temperature": 0, "num_beams": 4, "n": 4}
    for expression, number in (("ab|b", 2), ("[ab]{2}", 4)):
        answer = served.post("/v1/completions", **fields, structured_outputs={"regex": expression}).json()
        assert len({choice["text"] for choice in answer["choices"]}) == number
        assert answer["specbeam"].get("missing_choices", "").startswith("2: there are no more") == (number == 2)


def test_openais_client_parses_an_answer(served):
    client = served.client()
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    parsed = client.chat.completions.parse(**asked, response_format=Person).choices[0].message.parsed
    assert isinstance(parsed, Person)
    with client.chat.completions.stream(**asked, response_format=Person) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    answer = client.responses.parse(model="tiny", input="Hi", text_format=Person, temperature=0, max_output_tokens=40)
    assert isinstance(answer.output_parsed, Person)
    assert (answer.text.format.type, answer.status) == ("json_schema", "completed")


def test_an_answer_that_is_cut_is_not_complete(served):
    fields = {"max_tokens": 5, "temperature": 0, "response_format": FORMAT}
    (choice,) = served.choices(CHAT, messages=MESSAGES, **fields)
    assert (choice["finish_reason"], choice["is_complete"]) == ("length", False)
    text = {"format": {"type": "json_schema", **NAMED}}
    answer = served.post("/v1/responses", input="Hi", max_output_tokens=5, text=text).json()
    assert (answer["status"], answer["is_complete"]) == ("incomplete", False)
    assert answer["text"]["format"] == {"type": "json_schema", **NAMED}


@pytest.mark.parametrize(
    ("given", "pattern"),
    [
        ({"regex": "[ab]{3}"}, "[ab]{3}"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
        ({"grammar": 'start: "x" /[0-9]/'}, "x[0-9]"),
        ({"json": {"enum": [12, "a"]}}, '12|"a"'),
        ({"json": json.dumps({"enum": [12, "a"]})}, '12|"a"'),
    ],
)
def test_structured_outputs(served, given, pattern):
    for path, prompt in {"/v1/completions": {"prompt": "a"}, CHAT: {"messages": MESSAGES}}.items():
        for how in ({"temperature": 0}, {"num_beams": 3, "draft": "ngram"}):
            (choice,) = served.choices(path, structured_outputs=given, max_tokens=20, **prompt, **how)
            text = choice.get("text") or choice["message"]["content"]
            assert re.fullmatch(pattern, text)
            assert choice["is_complete"]


def test_any_object(served):
    for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        (choice,) = served.choices("/v1/completions", prompt="a", max_tokens=20, temperature=0, **form)
        assert choice["text"].startswith("{")
        assert choice["is_complete"] == (choice["finish_reason"] == "stop")


@pytest.mark.parametrize("digits", ["1", "10", "01."])
def test_any_json_ends(served, chat_lm, digits):
    """Also of a model that goes on with a number as long as it may."""
    ids = chat_lm.tokenizer(digits, add_special_tokens=False).input_ids
    bias = {str(number): 100 - place for place, number in enumerate(ids)}
    named = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}
    for form in ({"response_format": named}, {"structured_outputs": {"json": {}}}):
        (choice,) = served.choices("/v1/completions", prompt="a", max_tokens=60, temperature=0, logit_bias=bias, **form)
        assert (choice["finish_reason"], choice["is_complete"]) == ("stop", True), choice["text"]
        assert isinstance(json.loads(choice["text"]), int | float)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "response_format: Input tag 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema.json_schema: F"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
            "response_format",
            "the JSON schema cannot be enforced: Unimplemented keys",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#"}}}},
            "response_format",
            "the JSON schema cannot be enforced: no text satisfies it",
        ),
        (
            {"response_format": FORMAT, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "response_format and structured_outputs both give the form",
        ),
        ({"response_format": FORMAT, "ignore_eos": True}, "ignore_eos", "ignore_eos contradicts response_format"),
    ],
)
def test_what_cannot_be_enforced_is_refused(served, fields, param, says):
    error = served.refused(CHAT, messages=MESSAGES, **fields)
    assert error["param"] == param
    assert error["message"].startswith(says)
    assert len(error["message"]) < 700


def test_a_grammar_that_reaches_a_limit_ends_its_request_alone(served, monkeypatch):
    limits = grammar._llguidance().LLParserLimits(max_items_in_row=40, verbose_errors=False)
    monkeypatch.setattr(grammar, "limits", lambda *_: limits)
    ambiguous = {"grammar": "start: a\na: /b/ | a a | a a a"}
    error = served.refused("/v1/completions", prompt="a", structured_outputs=ambiguous, max_tokens=60, min_tokens=60)
    assert error["message"].startswith("the grammar has reached a limit of its parser")
    assert served.choices("/v1/completions", prompt="a", max_tokens=2)
