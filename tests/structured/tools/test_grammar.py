"""Grammars of tool calls: what they allow is read as valid calls, in every format, and what they forbid."""

import json
import random

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

import specbeam
from specbeam import JsonSchema
from specbeam.structured.grammar import GrammarConstraint
from specbeam.structured.tools import format_of
from specbeam.structured.tools.grammar import Tool, ToolGrammar
from specbeam.structured.tools.reader import Reader
from tests.conftest import BOS, EOS, byte_tokenizer, random_model
from tests.structured.tools.templates import TEMPLATES, TOKENS

WHOLE = {"type": "integer", "minimum": 7}
SCHEMAS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome", '<tool_call>"']}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "weather_2": {  # with a definition of its own, and a name that another one begins
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}},
    },
    "note": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "short": {"type": "string", "pattern": "^[a-c]+$", "maxLength": 3},
            "maybe": {
                "anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}, {"type": "integer", "minimum": 7}]
            },
            "kind": {"enum": ["null", None, 1, "1"]},
            "tags": {"type": "array", "prefixItems": [{"const": "a"}], "items": {"type": "string"}, "maxItems": 2},
            "of": {
                "type": "object",
                "properties": {
                    "x": {"type": "number"},
                    "of": {"$ref": "#/properties/of"},
                    "y": {"type": ["boolean", "null"]},
                },
                "required": ["x"],
                "additionalProperties": {"type": "integer"},
            },
        },
        "required": ["maybe", "short"],
        "additionalProperties": {"type": "array", "maxItems": 1},
    },
}
TOOLS = [Tool(name, JsonSchema(schema)) for name, schema in SCHEMAS.items()]


class Model:
    """What grammars need of a model: a tokenizer of bytes, with the tokens of a format, and others."""

    def __init__(self, save, tokens):
        tokenizer = byte_tokenizer()
        if tokens:
            tokenizer.add_tokens([AddedToken(text, special=special) for text, special in tokens.items()])
        self.lm = specbeam.load(save(random_model("llama", vocab_size=259 + len(tokens)), tokenizer), backend="cpu")
        tokens = self.lm.tokenizer.added_tokens_decoder
        self.added = {one.content: i for i, one in tokens.items()}
        self.shown = [i for i, one in tokens.items() if not one.special]

    def constraint(self, name, tools=None, **how):
        how = {"is_required": False, "max_calls": 3, "added": self.added, "shown": self.shown} | how
        return GrammarConstraint(ToolGrammar(format_of(TEMPLATES[name]), tools or TOOLS, **how), self.lm)

    def ids(self, text):
        return self.lm.tokenizer(text, add_special_tokens=False).input_ids

    def allows(self, constraint, text):
        """Whether a text may be written, and be all."""
        state = constraint.start
        for token in self.ids(text):
            if (state := constraint.advance(state, token)) is None:
                return False
        return constraint.complete(state)


THINKING = {"<think>": False, "</think>": False}


@pytest.fixture(scope="module")
def model(save):
    made = {}

    def model(tokens):
        key = (*sorted(tokens.items()),)
        if key not in made:
            made[key] = Model(save, tokens)
        return made[key]

    return model


ENDS = {"qwen3-coder": "\n</parameter>\n", "gemma": '<|"|>'}
"""Of strings that no single character ends."""


def walk(model, constraint, rng, pushed=(), end=()):
    """A random text that a constraint allows. Where a part of an end is written, it mostly goes on."""
    state, tokens, size = constraint.start, [], model.lm.backend.vocab_size
    while not constraint.complete(state) or (len(tokens) < 400 and rng.random() < 0.7):
        allowed = np.flatnonzero(np.unpackbits(constraint.mask(state, size), bitorder="little")[:size])
        if not len(allowed):
            break
        # Openings, ends of strings and the like come up more often than a random byte.
        likely = [token for token in allowed.tolist() if token > EOS or token in pushed]
        begun = next(size for size in range(len(end), -1, -1) if tokens[len(tokens) - size :] == [*end[:size]])
        if begun < len(end) and end[begun] in allowed and rng.random() < (0.95 if begun else 0.1):
            likely = [end[begun]]
        tokens.append(rng.choice(likely if likely and rng.random() < (0.95 if end else 0.5) else allowed.tolist()))
        assert tokens[-1] not in (BOS, EOS) or tokens[-1] == BOS
        state = constraint.advance(state, tokens[-1])
        assert len(tokens) < 4000
    assert constraint.complete(state)
    return model.lm.decode_token(tokens)


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_whatever_is_allowed_is_read_as_valid_calls(model, name, with_tokens):
    one, rng = model(TOKENS.get(name, {}) if with_tokens else {}), random.Random(5)
    pushed = one.ids(',}]"')
    for is_required, max_calls in ((True, 3), (True, 1), (False, 2)):
        constraint = one.constraint(name, is_required=is_required, max_calls=max_calls)
        read = 0
        for _ in range(12):
            text = walk(one, constraint, rng, pushed, one.ids(ENDS.get(name, "")))
            reader = Reader(format_of(TEMPLATES[name]), [*SCHEMAS], 9, schemas=SCHEMAS)
            reader.push(text, is_last=True)
            assert is_required <= len(reader.calls) <= max_calls, text
            assert not (is_required and reader.content), text
            read += len(reader.calls)
            for call in reader.calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        assert read or not with_tokens or not is_required


A = '{"name": "weather", "arguments": {"city": "Paris"}}'
B = '{"name": "weather_2", "arguments": {"at": [true, false]}}'
WRONG = '{"name": "weather", "arguments": {"city": "Oslo"}}'
UNKNOWN = '{"name": "other", "arguments": {}}'


CODER = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
GLM = 'weather\n{"city": "Paris"}'


def marked(*calls):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


FORMAT = JsonSchema({"enum": [1, {"a": 2}]})
PATTERN = JsonSchema({"type": "object", "properties": {"name": {"type": "string", "pattern": "^[^x]*$"}}})
ALLOWED = {
    "hermes": [
        ({}, ["Hello", "Hello <tool", "\n4", "{4", marked(A), marked(A, B), f"Well.\n{marked(B)}", UNKNOWN,
              f"see {UNKNOWN}"], ["", " \n", "{\n", "[]", marked(WRONG), marked(UNKNOWN), "<tool_call>", f"{marked(A)} and", marked(A, A, A, A), WRONG, f"so: {WRONG}"]),  # noqa: E501
        ({}, [A, f"So:\n```json\n{A}\n```", A.replace(" ", "\n  "), f"{A}; {B}", f"```\n{A}```\n```json\n{B}\n```"],
             [f"{A} and", f"{A}{B}{A}{B}"]),
        ({"max_calls": 1}, [marked(B), A], [marked(A, B), f"{A}\n{B}"]),
        ({"is_required": True}, [marked(A), marked(A, B), A, f"```json\n{A}\n```"],
             ["", "Hello", f" {marked(A)}", f"Hi {A}", f"{marked(A)}\n", WRONG]),
        ({"is_required": True, "max_calls": 1}, [marked(A)], [A, marked(A, B)]),
        ({"content": FORMAT}, ["1", '{"a": 2}', marked(A), A],
             ["2", "Hello", "", f"1{marked(A)}", '{"a":2}', WRONG, f" {A}", f"```json\n{A}", f"{A}\n{A}"]),
        ({"content": JsonSchema({"type": "object"})},
             [A, B, '{"name": "weather"}', '{"name": "weather", "a": {"arguments": {}}}', '{"name": "Ann", "age": 1}'],
             [WRONG, UNKNOWN, '{"name": "weather", "arguments": {"city": ""}}', "1"]),
        ({"content": PATTERN}, [A, '{"name": "y", "b": 1}'], [WRONG, '{"name": "weather", "arguments": 1}']),
        ({"max_calls": 0}, ["Hello", "\n-4", f"see {UNKNOWN}"],
             ["", A, marked(A), f"Hello {A}", UNKNOWN, f"```json\n{A}\n```"]),
        ({"max_calls": 0, "content": FORMAT}, ["1", '{"a": 2}'], ["", "Hello", A, marked(A)]),
    ],
    "llama": [
        ({}, ["Hi", A.replace("arguments", "parameters"), A],
             [A.replace("arguments", "parameters") * 2, WRONG, WRONG.replace("arguments", "parameters")]),
        ({"is_required": True}, [A.replace("arguments", "parameters")], ["Hi", A]),
        ({"content": JsonSchema({"type": "object"})}, [A.replace("arguments", "parameters"), '{"name": "weather"}'],
             [A, WRONG.replace("arguments", "parameters"), "Hi"]),
    ],
    "qwen3-coder": [
        ({}, [CODER, f"Well.\n{CODER}", f"<tool_call>\n{CODER}\n</tool_call>", f"{CODER}\n</tool_call>",
              f"{CODER}\n</tool_call>\n<tool_call>\n{CODER}\n</tool_call>", "A <function=other> and"],
             [CODER.replace("Paris", "Oslo"), f"so {CODER.replace('Paris', 'Oslo')}", "see <function=weather>",
              f"{CODER} and", f"<tool_call>\n{CODER}"]),
        ({"is_required": True}, [CODER, f"<tool_call>\n{CODER}\n</tool_call>"], ["Hi", f"Hi {CODER}"]),
        ({"content": FORMAT}, ["1", CODER], ["2", f"1{CODER}"]),
        ({"max_calls": 0}, ["Hello"], [CODER, f"Hello {CODER}"]),
    ],
    "glm": [
        ({}, [GLM, "\nHello", "Hello", "weather", "weather is nice", "weather_2", "other\n{",
              f"{GLM}<|assistant|>{GLM}", f"\nI look.<|assistant|>{GLM}", f"It says\n{GLM}"],
             ["", "weather\n", "weather\nis nice", GLM.replace("Paris", "Oslo"), f"{GLM} and", "\nweather\n{"]),
        ({"max_calls": 1}, [GLM], [f"{GLM}<|assistant|>{GLM}"]),
        ({"is_required": True}, [GLM], ["Hello", f"\n{GLM}", f"<|assistant|>{GLM}"]),
        ({"content": FORMAT}, ["1", GLM], ["2", f"1{GLM}"]),
        ({"max_calls": 0}, ["Hello"], [GLM]),
    ],
    "functools": [
        ({}, ["func", "functools", f"functools[{A}, {B}]", f"Hi functools[{A}]"],
             [f"functools[{WRONG}]", "functools["]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("with_tokens", [True, False])
@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed(model, name, with_tokens):
    one = model(TOKENS.get(name, {}) if with_tokens else {})
    for how, allowed, forbidden in ALLOWED[name]:
        constraint = one.constraint(name, **how)
        assert [text for text in allowed if not one.allows(constraint, text)] == []
        assert [text for text in forbidden if one.allows(constraint, text)] == []


def test_other_tokens_may_stand_in_a_text(model):
    one = model({"<tool_call>": False, "</tool_call>": False, "<other>": True, "<word>": False})
    constraint = one.constraint("hermes")
    assert one.allows(constraint, f"a<word>b {marked(A)}")
    assert one.allows(constraint, "<word>")
    assert one.allows(one.constraint("hermes", max_calls=0), "a<word>b")
    assert not one.allows(constraint, "a<other>")  # it is special: no text shows it
    assert not one.allows(constraint, "a<eos>")
    assert not one.allows(constraint, marked(A.replace("Paris", "<other>")))


def spelled(model, text):
    """The tokens of a text, none of them an added one."""
    return [token for byte in text for token in model.ids(byte)]


def test_what_begins_a_call_does_so_in_other_tokens_too(model):
    """Otherwise the reader would see calls that the grammar does not."""
    for name in ("hermes", "listed", "named", "phi"):
        one = model(TOKENS[name])
        constraint, marker = one.constraint(name), format_of(TEMPLATES[name]).marker
        state = constraint.start
        for token in spelled(one, f"so {marker[:-1]}"):
            state = constraint.advance(state, token)
        (last,) = one.ids(marker[-1])
        assert constraint.advance(state, last) is None


def test_many_tools_with_long_names(model):
    """llguidance's lexer looks for all names at once."""
    one, rng = model(TOKENS["hermes"]), random.Random(3)
    names = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz_", k=64)) for _ in range(128)]
    tools = [Tool(name, JsonSchema(SCHEMAS["weather"])) for name in names]
    how = {"is_required": False, "max_calls": 3, "added": one.added, "shown": one.shown}
    constraint = GrammarConstraint(ToolGrammar(format_of(TEMPLATES["hermes"]), tools, **how), one.lm)
    assert one.allows(constraint, "Look: " + A.replace("weather", names[7]))
    assert not one.allows(constraint, "Look: " + WRONG.replace("weather", names[9]))


def test_forced_text_is_forced(model):
    """All of a call that the grammar determines is one token after another, without a choice."""
    one = model(TOKENS["hermes"])
    constraint = one.constraint("hermes", TOOLS[:2], is_required=True, max_calls=1)
    state, size = constraint.start, one.lm.backend.vocab_size
    for token in one.ids('<tool_call>\n{"name": "weather'):
        (only,) = np.flatnonzero(np.unpackbits(constraint.mask(state, size), bitorder="little"))
        assert only == token
        state = constraint.advance(state, token)
