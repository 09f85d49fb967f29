"""Answers of a form: ``response_format``, ``text.format`` and ``structured_outputs``, as clients ask for them."""

import json
import re
from typing import Literal

import jsonschema
import pydantic
import pytest

import specbeam
from specbeam import JsonSchema
from specbeam.structured import grammar
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, of_transformers, random_model
from tests.server.conftest import serving
from tests.server.test_chat import CHAT, HI, MESSAGES

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


IN_PROMPT = "Answer in JSON. Here is the JSON schema that you must adhere to:\n<schema>\n%s\n</schema>"


@pytest.fixture(scope="module")
def long_lm(save):
    return specbeam.load(
        save(random_model("llama", max_position_embeddings=2048), byte_tokenizer(CHAT_TEMPLATE)), backend="cpu"
    )


@pytest.fixture(scope="module")
def long(long_lm):
    with serving({"tiny": long_lm}) as running:
        yield running


def prompt_of(running, path=CHAT, **fields):
    """The prompt of a request, as text."""
    made = running.post(path, **{"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True} | fields).json()
    return running.post("/detokenize", tokens=made["prompt_token_ids"]).json()["prompt"]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_schema_in_the_prompt(long, long_lm, system):
    """Behind the system message or before the user's first, as transformers renders it, at every door."""
    said = IN_PROMPT % json.dumps(SCHEMA)
    asked = [*system, {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}, HI]
    changed = {"content": f"Be brief.\n\n{said}" if system else f"{said}\n\nHi"}
    expected, plain = (
        of_transformers(long_lm.tokenizer).apply_chat_template(given, tokenize=False, add_generation_prompt=True)
        for given in ([asked[0] | changed, *asked[1:]], asked)
    )
    for form in (
        {"response_format": FORMAT},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ):
        assert prompt_of(long, messages=asked, **form, schema_in_prompt=True) == expected
        assert prompt_of(long, messages=asked, **form) == plain
    fields = {"input": asked, "text": {"format": {"type": "json_schema", **NAMED}}, "max_output_tokens": 1}
    for text, how in ((expected, {"schema_in_prompt": True}), (plain, {})):
        usage = long.post("/v1/responses", **fields, **how).json()["usage"]
        assert usage["input_tokens"] == len(long_lm.tokenizer(text, add_special_tokens=False).input_ids)


def test_a_schema_beside_a_message_of_parts(long):
    said, parts = IN_PROMPT % json.dumps(SCHEMA), [{"type": "text", "text": "Hi"}]
    for messages in ([HI | {"content": parts}], [HI | {"content": parts, "role": "system"}, HI]):
        assert prompt_of(long, messages=messages, response_format=FORMAT, schema_in_prompt=True).count(said) == 1


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (CHAT, {}, "schema_in_prompt: there is no JSON schema. Give one in response_format"),
        (CHAT, {"response_format": {"type": "json_object"}}, "schema_in_prompt: there is no JSON schema. "),
        (CHAT, {"structured_outputs": {"regex": "a"}}, "schema_in_prompt: there is no JSON schema. "),
        ("/v1/responses", {}, "schema_in_prompt: there is no JSON schema. Give one in text"),
        ("/v1/completions", {"response_format": FORMAT}, "schema_in_prompt is not supported"),
    ],
)
def test_a_prompt_without_a_schema_or_a_template(served, path, fields, says):
    asked = {CHAT: {"messages": MESSAGES}, "/v1/responses": {"input": "Hi"}, "/v1/completions": {"prompt": "a"}}[path]
    error = served.refused(path, **asked, **fields, schema_in_prompt=True)
    assert (error["param"], error["message"][: len(says)]) == ("schema_in_prompt", says)


def test_schemas_in_prompts_by_default(long_lm):
    with serving({"tiny": long_lm}, schema_in_prompt=True) as running:
        said, asked = IN_PROMPT % json.dumps(SCHEMA), {"response_format": FORMAT}
        assert said in prompt_of(running, **asked)
        assert said not in prompt_of(running, **asked, schema_in_prompt=False)
        assert "schema" not in prompt_of(running)
        assert running.choices("/v1/completions", prompt="a", **asked)[0]["text"]


def test_a_schema_that_no_message_names_is_hinted_at_once(chat_lm, log):
    with serving({"tiny": chat_lm}) as running:
        named = [{"role": "user", "content": "Give name and age"}]
        running.choices(CHAT, messages=named, response_format=FORMAT, max_tokens=1)
        running.choices(CHAT, messages=MESSAGES, response_format=FORMAT, max_tokens=1, schema_in_prompt=False)
        for _ in range(2):
            running.choices(CHAT, messages=MESSAGES, response_format=FORMAT, max_tokens=1)
        running.choices(CHAT, messages=MESSAGES, max_tokens=2)
    (hint,) = [line for line in log.lines.queue if "schema" in line]
    assert hint.startswith("the prompt does not name 'name' of the answer's JSON schema")


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
