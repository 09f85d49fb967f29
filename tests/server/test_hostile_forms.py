"""Forms that cannot be enforced, sent by hostile clients: each is refused at once, and nothing is generated for it.

Meanwhile another client gets its stream.
"""

import json
import threading
import time

import pytest

from specbeam.structured import grammar
from tests.server.test_chat import CHAT, MESSAGES

MAX_SECONDS = 2.0
"""Of the processor."""
HOW = {"prompt": "Beside them", "max_tokens": 60, "min_tokens": 60, "temperature": 0}


def within(schema):
    """A schema that has another one deep within."""
    return {"type": "object", "properties": {"seed": {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}}}}


SCHEMAS = {  # by words of the message: schemas, and the keyword that is the place
    "has x-guidance": [({"x-guidance": {"lenient": True}}, "")],
    "Unimplemented keys": [
        *(({keyword: {"type": "string"}}, f"/{keyword}") for keyword in ("not", "if", "contains")),
    ],
    "oneOf has alternatives": [({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "/oneOf")],
    "look-around": [({"type": "string", "pattern": "(?<=a)b"}, "/pattern")],
    "does not fetch": [({"$ref": url}, "/$ref") for url in ("https://example.org/a.json", "file:///etc/passwd")],
    "does not exist": [({"$ref": "#/$defs/none"}, "/$ref")],
    "has uniqueItems, which is enforced for": [({"type": "array", "uniqueItems": True}, "")],
    "has minProperties 3": [({"type": "object", "required": ["a"], "minProperties": 3}, "")],
    "control character": [
        ({"const": "\u0001"}, "/const"),
        ({"enum": ["a", {"b": "\u001f"}]}, "/enum"),
        ({"type": "string", "pattern": "a\u0002"}, "/pattern"),
        ({"properties": {"a\u0003": {}}}, "/properties"),
        ({"type": "object", "required": ["a\u0003"]}, "/required"),
    ],
}
WHOLE = {  # messages about the whole schema
    "no text satisfies": [
        {"$ref": "#"},
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#"}}, "required": ["a", "b"]},
    ],
    "Regex is empty": [{"type": "string", "pattern": f"a{one}b"} for one in ("\\x02", "[\\x7f]")],
    "Unsatisfiable": [{"allOf": [{"type": "string"}, {"type": "null"}]}],
    "least common multiple is over 10,000": [
        {"type": "integer", "multipleOf": 999983},
        {"properties": {"a": {"multipleOf": 9973}, "b": {"multipleOf": 9967}}},
    ],
    "1,000,000 are allowed": [{"enum": [f"{number:0100}" for number in range(11_000)]}],
    "asks for 200,000 characters": [{"type": "string", "pattern": "a{200000}"}],
    "25 patterns together": [{"allOf": [{"type": "string", "pattern": f"a{number}b"} for number in range(25)]}],
    "8,000 combinations": [{"allOf": [{"anyOf": [{"minimum": number} for number in range(20)]}] * 3}],
    "recursion limit": [json.loads('{"items":' * 400 + "{}" + "}" * 400)],
    "begin with the same": [{"type": "array", "items": {"const": "x" * 9_000}, "minItems": 2}],
}
REFUSED_SCHEMAS = [
    (within(schema), says, f"#/properties/seed/items/anyOf/1{keyword}")
    for says, some in SCHEMAS.items()
    for schema, keyword in some
]
REFUSED_SCHEMAS += [(schema, says, "") for says, some in WHOLE.items() for schema in some]
OTHERS = {
    "it begins with {": [("grammar", ' {"grammars": [{"json_schema": {}}]}')],
    "it has %json": [("grammar", 'start: %json {"x-guidance": {"lenient": true}}')],
    "it has %llguidance": [("grammar", '%llguidance {"no_forcing": false}\nstart: "a"')],
    "65,536 are allowed": [("grammar", "start: " + '"a" ' * 20_000), ("regex", "a" * 70_000)],
    "look-around": [("regex", "(?=a)a")],
    "no text satisfies": [("grammar", "start: start /a/"), ("regex", r"[^\s\S]")],
    "asks for 1,000,000 characters": [("regex", "a{1000000}")],
}


@pytest.fixture(scope="module")
def beside(served):
    """A client that streams while the tests of this module run. At the end all its texts are right."""
    expected = served.choices(**HOW)[0]["text"]
    stopped, texts = threading.Event(), []

    def stream():
        while not stopped.is_set():
            chunks = served.client().completions.create(
                model="tiny",
                stream=True,
                extra_body={"min_tokens": 60},
                **{k: v for k, v in HOW.items() if k[:3] != "min"},
            )
            texts.append("".join(chunk.choices[0].text for chunk in chunks))

    thread = threading.Thread(target=stream)
    thread.start()
    yield texts
    stopped.set()
    thread.join()
    assert {*texts} == {expected}


@pytest.fixture
def refused(served, beside):
    """Sends a request that must be refused, and returns what the refusal says."""

    def refused(path, param, **fields):
        start = time.process_time()
        error = served.refused(path, **fields)
        assert time.process_time() - start < MAX_SECONDS
        assert error["param"] == param
        assert len(error["message"]) <= 600
        return error["message"]

    return refused


@pytest.mark.parametrize(("schema", "says", "place"), REFUSED_SCHEMAS)
def test_a_schema_is_refused_with_its_place(refused, schema, says, place):
    named = {"name": "a", "schema": schema}
    messages = {
        refused(
            CHAT, "response_format", messages=MESSAGES, response_format={"type": "json_schema", "json_schema": named}
        ),
        refused("/v1/responses", "text", input="Hi", text={"format": {"type": "json_schema", **named}}),
        refused("/v1/completions", "structured_outputs", prompt="a", structured_outputs={"json": schema}, num_beams=2),
    }
    (message,) = messages
    assert says in message
    assert f" {place} " in f"{message.replace('(at ', ' ').replace(')', ' ')} " or not place


@pytest.mark.parametrize(("kind", "given", "says"), [(*one, says) for says, some in OTHERS.items() for one in some])
def test_a_grammar_is_refused(refused, kind, given, says):
    assert says in refused("/v1/completions", "structured_outputs", prompt="a", structured_outputs={kind: given})


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_that_is_reached_while_generating_ends_only_its_request(served, beside, monkeypatch, stream):
    limits = grammar._llguidance().LLParserLimits(max_items_in_row=40, verbose_errors=False)
    monkeypatch.setattr(grammar, "limits", lambda *_: limits)
    form = {"grammar": "start: a\na: /b/ | a a | a a a"}
    response = served.post(
        "/v1/completions", prompt="a", structured_outputs=form, max_tokens=60, min_tokens=60, stream=stream
    )
    frames = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    assert response.status_code == (200 if stream else 400)
    error = json.loads(frames[-1] if stream else response.text)["error"]
    assert error["param"] == "structured_outputs"
    assert error["message"].startswith("the grammar has reached a limit of its parser")
