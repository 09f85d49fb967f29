"""Grammars: against languages that are listed, the validator jsonschema, and what must be refused."""

import gzip
import itertools
import json
import pickle
import random
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import specbeam
from specbeam import Choice, Engine, Grammar, JsonSchema, Regex, SpecbeamError, TokenTrie
from specbeam.engine import CostTable
from specbeam.structured import grammar, json_schema, trials
from tests.conftest import run_alone

SCHEMAS = Path(__file__).parents[3] / "shared/data/json_schemas.jsonl.gz"
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan", "Al"]}, "old": {"type": "boolean"}},
    "required": ["name"],
    "additionalProperties": False,
}
PEOPLE = [{"name": name} | old for name in ("Ada", "Alan", "Al") for old in ({}, {"old": True}, {"old": False})]


def dumped(value):
    return json.dumps(value, ensure_ascii=False)


def words(pattern, alphabet, longest):
    """The words of a regular language up to a length, by Python's own engine."""
    texts = ("".join(letters) for n in range(1, longest + 1) for letters in itertools.product(alphabet, repeat=n))
    return [text for text in texts if re.fullmatch(pattern, text)]


SUM = "start: NUM (OP NUM)? \nNUM: /[12]{1,2}/\nOP: /[+-]/"
SUM_IN_GBNF = 'root ::= num (op num)?\nnum ::= [12] [12]?\nop ::= "+" | "-"'
FINITE = {
    "an expression": (Regex("a(b|cc)?d{1,2}|(bc){1,2}"), words("a(b|cc)?d{1,2}|(bc){1,2}", "abcd", 5)),
    "Lark": (Grammar(SUM), words("[12]{1,2}([+-][12]{1,2})?", "12+-", 5)),
    "GBNF": (Grammar(SUM_IN_GBNF), words("[12]{1,2}([+-][12]{1,2})?", "12+-", 5)),
    "a schema": (JsonSchema(PERSON), [*map(dumped, PEOPLE)]),
    "a choice": (Choice(["red", "green", "red"]), ["red", "green"]),
}
METHODS = [{}, {"num_beams": 4, "num_return_sequences": 4}, {"do_sample": True, "seed": 3}]
METHODS += [{"num_beams": 16, "num_return_sequences": 16}, {"num_beams": 3, "do_sample": True, "seed": 5}]


@pytest.mark.parametrize("draft", [None, "ngram", pytest.param("suffix", marks=pytest.mark.thorough), "model"])
@pytest.mark.parametrize("name", FINITE)
def test_a_finite_language_gives_what_a_list_of_its_words_gives(tiny, name, draft):
    description, listed = FINITE[name]
    _, lm = tiny("llama")
    if draft == "model":
        draft = tiny("llama", seed=3)[1]
    for method in METHODS:
        options = {"max_new_tokens": 40, **method}
        expected = run_alone(lm, "a b c", options | {"constraint": TokenTrie(listed, lm)}, draft)
        found = run_alone(lm, "a b c", options | {"constraint": description}, draft)
        assert found.sequences == expected.sequences
        assert all(one.is_complete for one in found.sequences)


BEAMS = [{"num_beams": beams, "num_return_sequences": beams} for beams in (2, 4, 8, 16, 40)]
GROUPS = {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5}


@pytest.mark.parametrize("draft", [None, "ngram", "suffix", "model", "another vocabulary", "own"])
@pytest.mark.parametrize(
    "method",
    [
        {},
        *BEAMS[::4],
        METHODS[2],
        METHODS[4],
        GROUPS,
        *(pytest.param(b, marks=pytest.mark.thorough) for b in BEAMS[1:4]),
    ],
)
def test_forced_tokens_are_drafts_and_change_no_bit(tiny, monkeypatch, method, draft):
    _, lm = tiny("llama")
    if draft == "model":
        draft = tiny("llama", seed=3)[1]
    elif draft == "own":
        draft = lambda token_ids, lm: token_ids[-5:]  # noqa: E731
    elif draft is not None and " " in draft:
        draft = tiny("llama", seed=3, vocab_size=257, eos_token_id=256)[1]
    schema = {
        "type": "object",
        "properties": {"a long name": {"type": "boolean"}, "another name": {"enum": ["one", "two"]}},
        "required": ["a long name", "another name"],
        "additionalProperties": False,
    }
    options = {"max_new_tokens": 60, "constraint": JsonSchema(schema), **method}
    costs = CostTable(lambda nodes: 1e-3 + 1e-5 * nodes)  # then the numbers of passes are the same in every run
    found = run_alone(lm, "a b c", options, draft, costs=lambda backend, ahead=False: costs)
    monkeypatch.setattr("specbeam.decoding.strategies.with_forced_tokens", lambda _, drafter: drafter)
    plain = run_alone(lm, "a b c", options, draft, costs=lambda backend, ahead=False: costs)
    assert found.sequences == plain.sequences
    assert found.stats.target_passes <= plain.stats.target_passes
    if draft is None and method.get("num_beams", 1) < 32:  # more beams share the tokens of a pass
        assert found.stats.target_passes < 0.5 * plain.stats.target_passes


def test_requests_with_one_description_go_together(tiny):
    _, lm = tiny("llama")
    description, listed = FINITE["a schema"]
    engine = Engine(lm, max_requests=20)
    both = {"description": description, "compiled": description.compile(lm)}
    requests = [
        engine.submit("a b c", {"constraint": one, "temperature": 2.0, "seed": seed, "max_new_tokens": 40})
        for one in both.values()
        for seed in range(10)
    ]
    engine.run()
    texts = [request.result().text for request in requests]
    assert texts[:10] == texts[10:]
    assert {*texts} <= {*listed}
    assert len({*texts}) > 3


@pytest.mark.parametrize("whitespace", [False, True])
def test_a_text_that_is_cut_is_not_complete(tiny, whitespace):
    _, lm = tiny("llama")
    schema = JsonSchema(PERSON, whitespace=whitespace)
    cut = run_alone(lm, "a", {"constraint": schema, "max_new_tokens": 9}).sequences[0]
    assert (cut.finish_reason, cut.is_complete, len(cut.text)) == ("length", False, 9)
    if not whitespace:
        stopped = run_alone(lm, "a", {"constraint": schema, "stop_strings": ['"name'], "max_new_tokens": 40})
        assert (stopped.text, stopped.finish_reason, stopped.sequences[0].is_complete) == ("{", "stop", False)
    whole = run_alone(lm, "a", {"constraint": Regex("[ab]{4}"), "max_new_tokens": 4}).sequences[0]
    assert (whole.finish_reason, whole.is_complete) == ("length", True)
    assert run_alone(lm, "a", {"max_new_tokens": 4}).sequences[0].is_complete is None
    assert whole.to_dict()["is_complete"] is True


def walked(lm, constraint, text):
    """Whether the mask allows each token of a text, and the text may end after the last one."""
    state = constraint.start
    for token in lm.tokenizer.encode(text, add_special_tokens=False):
        mask = constraint.mask(state, 259)
        allowed = bool(mask[token // 8] >> token % 8 & 1)
        state = constraint.advance(state, token)
        assert allowed == (state is not None)
        if not allowed:
            return False
    return constraint.complete(state)


@pytest.mark.skipif(not SCHEMAS.is_file(), reason="needs the schemas of ../shared")
def test_schemas_of_applications_let_no_invalid_instance_through(tiny):
    """50 of 1,000 schemas, with their instances: keys in the schema's order, by tokens of one byte."""
    _, lm = tiny("llama")
    with gzip.open(SCHEMAS) as file:
        cases = [*map(json.loads, file)]
    taken, valid, allowed = 0, 0, 0
    for case in random.Random(0).sample(cases, 50):
        try:
            constraint = JsonSchema(case["schema"]).compile(lm)
        except SpecbeamError:
            continue
        taken += 1
        for test in case["tests"]:
            found = walked(lm, constraint, dumped(test["data"]))
            if not test["valid"]:
                assert not found, (case["name"], test["data"])
            valid += test["valid"]
            allowed += test["valid"] and found
    assert taken >= 40
    assert allowed > 0.5 * valid  # others have their keys in another order


@pytest.mark.parametrize("schema", [{"type": ["object", "array", "string"]}, {"type": "array", "items": PERSON}])
def test_a_state_is_that_of_a_parser_of_its_own(tiny, schema):
    """Whatever its siblings are, and also within forced tokens, of which a parser here reads one after another."""
    _, lm = tiny("llama")
    constraint, draw = JsonSchema(schema).compile(lm), random.Random(1)
    states, paths = [constraint.start], [[]]
    for _ in range(150):  # a tree of sequences
        at = draw.choice([draw.randrange(len(states)), len(states) - 1])
        bits = np.unpackbits(constraint.mask(states[at], 259), count=259, bitorder="little")
        if not bits.any():
            continue
        token = draw.choice(np.flatnonzero(bits).tolist())
        states.append(constraint.advance(states[at], token))
        paths.append([*paths[at], token])
    text, tokenizer = constraint.spec.text, grammar._tokenizer_of(lm)
    for state, path in zip(states, paths, strict=True):
        matcher = grammar._llguidance().LLMatcher(tokenizer, text)
        for token in path:
            matcher.consume_token(token)
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), count=259, bitorder="little")
        mask[[*lm.eos_token_ids]] = 0
        np.testing.assert_array_equal(np.packbits(mask, bitorder="little"), constraint.mask(state, 259))
        assert constraint.complete(state) == matcher.is_accepting()
    assert schema == {"type": ["object", "array", "string"]} or any(state.index for state in states)


class Person:
    """As pydantic's models are asked."""

    @staticmethod
    def model_json_schema():
        return PERSON


def test_a_description_is_plain_data():
    same = [JsonSchema(PERSON), JsonSchema(json.dumps(PERSON)), JsonSchema(Person)]
    assert same[0] == same[1] == same[2]
    for description in (same[0], Choice(["a"]), Regex("a+"), Grammar(SUM), JsonSchema(True)):
        assert pickle.loads(pickle.dumps(description)) == description
    with pytest.raises(SpecbeamError, match="constraint="):
        specbeam.Options(constraint=JsonSchema)


def test_annotations_are_left_out_and_everything_else_is_enforced(tiny):
    _, lm = tiny("llama")
    schema = {"type": "array", "items": {"type": "string", "format": "binary"}, "uniqueItems": False, "maxItems": 1}
    constraint = JsonSchema({**schema, "description": "x", "default": [], "title": "t"}).compile(lm)
    assert walked(lm, constraint, '["a"]')
    assert not walked(lm, constraint, '["a","b"]')
    for name, valid in {"date": '"2024-02-29"', "uuid": '"123e4567-e89b-12d3-a456-426614174000"'}.items():
        constraint = JsonSchema({"type": "string", "format": name}).compile(lm)
        assert walked(lm, constraint, valid)
        assert not walked(lm, constraint, '"2024"')
    strings = JsonSchema({"type": "string"}).compile(lm)
    assert walked(lm, strings, r'"\n\"\\"')
    assert not walked(lm, strings, r'"\u0061"')  # it would be a second form of a key
    assert walked(lm, JsonSchema({"type": "object"}, whitespace=True).compile(lm), '{ "a" : 1 }')
    assert not walked(lm, JsonSchema({"type": "object"}).compile(lm), '{ "a" : 1 }')
    assert walked(lm, Regex(r"\d\w\s").compile(lm), "1a ")
    assert walked(lm, Regex(r'/"\(?x\)\\(?i:a)').compile(lm), '/"(x)\\A')
    assert not walked(lm, Regex(r"\d").compile(lm), "\N{ARABIC-INDIC DIGIT ONE}")


NODE = {"type": "object", "properties": {"v": {}, "n": {"$ref": "#/$defs/a"}}, "required": ["v", "n"]}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [  # as zod and pydantic write records, and what is never there
        ({"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, '{"a": 1}', '{"a": "b"}'),
        (
            {"propertyNames": {"$ref": "#/$defs/x"}, "$defs": {"x": {"enum": ["a", "b"], "title": "x"}}},
            '{"b": 1}',
            '{"c": 1}',
        ),
        ({"propertyNames": {"const": "a"}, "additionalProperties": {"type": "integer"}}, '{"a": 1}', '{"a": "b"}'),
        ({"properties": {"a": {"not": {}}, "b": {"anyOf": [{"not": True}, {"const": 1}]}}}, '{"b": 1}', '{"a": 1}'),
        ({"properties": {"not": {}}, "required": ["not"]}, '{"not": 1}', "{}"),
        # a node that needs a next one: there is none
        ({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": NODE}}, "{}", '{"a": {"v": 1}}'),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}, "$defs": {"a": NODE}}, '{"a": {"v": 1}}', '"a"'),
        (
            {"properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
            '{"next": {"next": null}}',
            '{"next": {}}',
        ),
    ],
)
def test_what_validators_of_other_languages_write(tiny, schema, valid, invalid):
    schema = {"type": "object", **schema}
    constraint = JsonSchema(schema).compile(tiny("llama")[1])
    for text, is_valid in ((valid, True), (invalid, False)):
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) == is_valid
        assert walked(tiny("llama")[1], constraint, text) == is_valid


def test_a_part_that_never_ends_is_never_begun(tiny):
    _, lm = tiny("llama")
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}, "v": {}}, "$defs": {"a": NODE}}
    constraint = JsonSchema(schema).compile(lm)
    for text, is_begun in (('{"a"', False), ('{"v"', True)):
        state = constraint.start
        for token in lm.tokenizer.encode(text, add_special_tokens=False):
            assert state is not None
            state = constraint.advance(state, token)
        assert (state is not None) == is_begun


EXCLUDED = {
    '[^"]': '"',
    r"[^\\]": "\\",
    '[^<>"]': '"',
    r"[^\\/]": "\\",
    r'[^-"]': '"',
    r'[^"\n]': '"',
    r'[^\w"]': '"',
    r'(a|[^"])': '"',
}


@pytest.mark.parametrize("pattern", EXCLUDED)
def test_a_set_of_characters_keeps_out_what_it_excludes(tiny, pattern):
    """llguidance alone lets quotes and backslashes through, as their escapes."""
    _, lm = tiny("llama")
    texts = {
        text: re.fullmatch(pattern, text, re.ASCII) is not None
        for text in ("!", "-", "\\", '"', "/", "a", "\n", "ä", "]")
    }
    assert texts[EXCLUDED[pattern]] is False
    values = JsonSchema({"type": "string", "pattern": f"^{pattern}$"}).compile(lm)
    keys = JsonSchema({"patternProperties": {f"^{pattern}$": {}}, "type": "object", "additionalProperties": False})
    keys = keys.compile(lm)
    for text, matches in texts.items():
        assert walked(lm, values, dumped(text)) == matches
        assert walked(lm, keys, dumped({text: 1})) == matches


def test_a_pattern_without_lookahead_has_the_same_texts():
    """As zod writes an email address."""
    for pattern, same in json_schema.WITHOUT_LOOKAHEAD.items():
        draw, seen = random.Random(2), set()
        for _ in range(20_000):
            text = "".join(draw.choices("a.-+'@", k=draw.randrange(4))) + draw.choice(["a", "'", ".", ""])
            text += (
                draw.choice(["@", ""]) + "".join(draw.choices("a.-@", k=draw.randrange(3))) + draw.choice([".ab", "."])
            )
            matches = re.search(pattern, text) is not None
            assert (re.search(same, text) is not None) == matches, text
            seen.add((matches, text))
        assert sum(matches for matches, _ in seen) > 50
        JsonSchema({"type": "string", "format": "email", "pattern": pattern})


CONTROLLED = [
    r"a\x01b", r"a[\x01]b", r"a[\x01-\x01]b", r"a[\x01-\x02]?b", r"a[^\x02-\U0010ffff]b", r"(a\u000bb|c)",
    r"a\vb|c", r"a\x7fb", r"a\x7f{2}b", r"a[\x7f]?b", r"a\x01*b|\x41", r"[\x00-\x1f]", r"[\x00-\x7f]",
    r"[^\x20-\x7e]", r"a[\s\S]b",
]  # fmt: skip


@pytest.mark.parametrize("pattern", CONTROLLED)
def test_no_control_character_is_left_out_of_a_text(tiny, pattern):
    """llguidance alone takes "ab" for a text with one between a and b."""
    _, lm = tiny("llama")
    texts = {
        text: re.fullmatch(pattern, text) is not None
        for text in ("ab", "c", "A", "a\tb", "abb", "\n", "\t", '"', "\\", "~", "ä", 'a"b')
    }
    for schema, form in (
        ({"pattern": f"^(?:{pattern})$"}, lambda text: text),
        (
            {"patternProperties": {f"^(?:{pattern})$": {}}, "additionalProperties": False, "minProperties": 1},
            lambda text: {text: 1},
        ),
    ):
        if any(texts.values()):
            constraint = JsonSchema({"type": ["string", "object"], **schema}).compile(lm)
            assert {text: walked(lm, constraint, dumped(form(text))) for text in texts} == texts
        elif "pattern" in schema:
            with pytest.raises(SpecbeamError, match=r"\(at #/pattern\)$"):
                JsonSchema({"type": "string", **schema})


PIECES = [
    *("a", '"', r"\\", r"\n", r"\x01", r"\x0a", r"\x22", r"\u0001", r"\x7f", r"\x41", r"\D", r"\W", r"\s", r"\S"),
    *(r"[\x00-\x1f]", '[^"]', r"[^\\]", r"[^\x00-\x1f]", r"[\s\S]", r"[^\d\"]", r"[\x01a]", r"[\x01]", "[-a]", "[^-a]"),
    *("[!-~]", r"[\w.-]", r"[^\x01]", r"[\n-\x7f]", "[é-ü]", "[^é]", r"[\]a]", r"\.", ".", "é"),
]  # fmt: skip
LETTERS = ["a", '"', "\\", "\n", "é", "-", "A", "1", " ", "."]


def random_pattern(draw, levels):
    kind, below = draw.random(), levels - 1
    if not levels or kind < 0.4:
        return draw.choice(PIECES)
    if kind < 0.6:
        return random_pattern(draw, below) + random_pattern(draw, below)
    if kind < 0.8:
        return f"(?:{random_pattern(draw, below)}|{random_pattern(draw, below)})"
    return f"(?:{random_pattern(draw, below)}){draw.choice(['?', '*', '+', '{2}', '{0,2}'])}"


def test_patterns_match_as_in_python():
    """Random ones, on all texts of up to two letters, by tokens of one byte."""
    draw = random.Random(4)
    texts = ["", *LETTERS, *map("".join, itertools.product(LETTERS, repeat=2))]
    written = {text: [*dumped(text).encode()] for text in texts}
    for _ in range(60):
        pattern = f"^(?:{random_pattern(draw, 3)})$"
        matching = {text for text in texts if re.fullmatch(pattern[1:-1], text, re.ASCII)}
        try:
            description = JsonSchema({"type": "string", "pattern": pattern})
        except SpecbeamError:
            assert not matching, pattern
            continue
        llguidance = grammar._llguidance()
        limits = trials.limits(description.lexer_fuel, description.max_symbols)
        start = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), description.text, limits=limits)
        for text, tokens in written.items():
            matcher = start.deep_copy()
            allowed = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            assert allowed == (text in matching), (pattern, text)


@pytest.mark.parametrize(
    "source", ['start: A B\nA: /a+/\nB: "ab"', 'start: A B\nA: /a*/\nB: "a"', 'start: S S "a"\nS: / +/']
)
def test_terminals_that_eat_each_other_do_not_hang(tiny, source):
    _, lm = tiny("llama")
    result = run_alone(lm, "a b c", {"constraint": Grammar(source), "max_new_tokens": 20}).sequences[0]
    assert re.fullmatch("[ab ]{1,20}", result.text)
    assert result.finish_reason in ("stop", "length")


def test_texts_of_control_tokens_are_texts(lm):
    for description in (JsonSchema({"const": "<eos>x"}), Regex("<eos>x"), Grammar('start: "<eos>x"')):
        result = run_alone(lm, "a b c", {"constraint": description, "max_new_tokens": 20}).sequences[0]
        assert result.text.strip('"') == "<eos>x"
        assert result.is_complete
        assert len(result.token_ids) > 6


def deep(levels):
    return {"type": "array", "items": deep(levels - 1)} if levels else {}


REFUSED = [
    *((JsonSchema, schema) for schema in ("{", "3", [1], False, {"type": "strange"}, {"enum": []}, {"pattern": "("})),
    *((JsonSchema, {keyword: {"type": "string"}}) for keyword in ("not", "if", "contains")),
    (JsonSchema, {"propertyNames": {"minLength": 2}}),
    (JsonSchema, {"propertyNames": {"enum": ["a"]}, "properties": {"b": {}}}),
    (JsonSchema, {"not": {}}),
    (JsonSchema, {"type": "array", "uniqueItems": True}),
    (JsonSchema, {"oneOf": [{"type": "number"}, {"type": "integer"}]}),
    (JsonSchema, {"$ref": "https://example.org/other.json"}),
    (JsonSchema, {"$ref": "#/$defs/none"}),
    (JsonSchema, {"type": "string", "pattern": "(?=a)b"}),
    (JsonSchema, {"properties": {"a": {"x-guidance": {"lenient": True}}}}),
    (JsonSchema, {"type": "object", "required": ["a"], "minProperties": 3}),
    (JsonSchema, {"anyOf": [{"enum": ["a\u0001"]}]}),
    (JsonSchema, {"const": {"a\u0001": 1}}),
    (JsonSchema, {"properties": {"a\u0001": {}}}),
    (JsonSchema, {"type": "object", "required": ["a\u0001"]}),
    *((JsonSchema, {"type": "string", "pattern": one}) for one in ("[a\u0001]", "a\u007fb", r"a\x01b", r"a[\v]")),
    *((JsonSchema, one) for one in ({"const": "a\u007fb"}, {"enum": [["\u007f"]]}, {"properties": {"\u007f": {}}})),
    (JsonSchema, {"$ref": "#/x/y", "x": {"y": {"type": "object", "minProperties": 3}}}),
    (JsonSchema, {"$ref": "#/x", "x": {"multipleOf": 999983}}),
    (JsonSchema, {"allOf": [{"multipleOf": 1999}, {"multipleOf": 1997}]}),
    (JsonSchema, {"multipleOf": 9999.9999}),
    (JsonSchema, {"type": "object", "required": ["a", "a"], "minProperties": 3}),
    (JsonSchema, {"prefixItems": [{"type": "string"}], "items": [{"type": "integer"}]}),
    (JsonSchema, {"allOf": [{"$id": "https://example.org/x", "$ref": "other.json"}]}),
    *((JsonSchema, f'{{"const": {number}}}') for number in ("9007199254740993", "1e400", "NaN", "1" + "0" * 30)),
    (JsonSchema, {"items": {"enum": [[{"a": 2**60 + 1}]]}}),
    (JsonSchema, {"minimum": 2**63}),
    *((JsonSchema, {name: "\ud800"}) for name in ("const", "title", "pattern")),
    *((JsonSchema, {"pattern": one}) for one in ("[[:cntrl:]]", "\0")),
    *((JsonSchema, {"pattern": one}) for one in ("[^]a]", "(?x) a", "[a&&b]")),
    (JsonSchema, {"type": "integer", "multipleOf": 999983}),
    (JsonSchema, {"type": "number", "maximum": float("nan")}),
    (JsonSchema, {"description": "x" * 10**6}),
    (JsonSchema, {"const": {"a": "x" * 10_000}}),
    (JsonSchema, {"enum": ["x", "x" * 10_000]}),
    (JsonSchema, {"pattern": "^a|(?:b{200}[c-d]?){100}$"}),
    # These would take minutes.
    (JsonSchema, {"allOf": [{"type": "string", "pattern": f"a{number}b"} for number in range(25)]}),
    (
        JsonSchema,
        {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}", "type": "string", "pattern": f"a{i}b"} for i in range(25)},
        },
    ),
    (JsonSchema, {"allOf": [{"anyOf": [{"pattern": f"^a{j}?.*b{i}"} for j in range(8)]} for i in range(6)]}),
    (JsonSchema, {"properties": {f"k{number}": {} for number in range(30_000)}}),
    (JsonSchema, deep(400)),
    *((Regex, pattern) for pattern in ("(", "(?=a)", "(?<!a)b", r"(a)\1", 3, "a" * 70_000, "\ud800", "(?x)a # b")),
    *((Regex, pattern) for pattern in ("a{20000}", "x|(y{200}){200}")),
    *((Grammar, source) for source in ("", "{", '{"grammars": []}', "start: none", "a: /b/", "x ::= (", 3, None)),
    (Grammar, 'start: %json { "type": "object" }'),
    (Grammar, '%llguidance { "no_forcing": false }\nstart: "a"'),
    (Grammar, "\ud800"),
    *((Choice, texts) for texts in ([], [""], ["a", 3], "")),
    (Grammar, f"start: /a/\n{'// x' * 20_000}"),
]


@pytest.mark.parametrize(("kind", "given"), REFUSED)
def test_what_cannot_be_enforced_is_refused_before_there_is_a_model(kind, given):
    with pytest.raises(SpecbeamError) as refused:
        kind(given)
    assert len(str(refused.value)) <= 600
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"not": {"items": {"not": {"const": 1}}}}}, "#/properties/not/items/not"),
        ({"anyOf": [{"const": {"if": 1}}, {"if": {}, "then": {}}]}, "#/anyOf/1/if or #/anyOf/1/then"),
        ({"$defs": {"a": {"oneOf": [{}, {"type": "null"}]}}, "$ref": "#/$defs/a"}, "#/$defs/a/oneOf"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}, "c": {"$ref": "#"}}}, "#/properties/a/$ref"),
        ({"properties": {"c": {"$ref": "#"}, "a": {"$ref": "https://example.org/b.json"}}}, "#/properties/a/$ref"),
        ({"items": {"type": "string", "pattern": "(?=a)"}}, "#/items/pattern"),
    ],
)
def test_an_error_of_the_parser_names_the_place(schema, place):
    with pytest.raises(SpecbeamError, match=re.escape(f"(at {place})") + "$"):
        JsonSchema(schema)


ENDLESS = [
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"$ref": "#"}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": ["array", "object"], "allOf": [{"$ref": "#"}]}, "minItems": 3},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1},
    {"anyOf": [{"type": "array", "prefixItems": [{}, {"$ref": "#"}], "minItems": 2}, {"allOf": [{}, {"$ref": "#"}]}]},
    {"$ref": "#/$defs/a", "$defs": {"a": NODE}},
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given"), [*((JsonSchema, schema) for schema in ENDLESS), (Grammar, "start: start /a/")]
)
def test_what_no_text_satisfies_is_refused_before_there_is_a_model(kind, given):
    with pytest.raises(SpecbeamError, match="no text satisfies"):
        kind(given)


def test_a_limit_that_is_reached_ends_that_request_alone(lm, monkeypatch):
    llguidance = grammar._llguidance()
    limits = llguidance.LLParserLimits(max_items_in_row=40, step_max_items=200, verbose_errors=False)
    ambiguous = "start: a\na: /b/ | a a | a a a"
    expected = run_alone(lm, "a b", {"constraint": Regex("[ab]{8}")}).sequences
    monkeypatch.setattr(grammar, "limits", lambda *_: limits)
    engine = Engine(lm)
    failing = engine.submit("a b", {"constraint": Grammar(ambiguous), "min_new_tokens": 60, "max_new_tokens": 100})
    other = engine.submit("a b", {"constraint": Regex("[ab]{8}")})
    engine.run()
    with pytest.raises(SpecbeamError, match=r"the grammar has reached a limit of its parser: [Pp]arser [Ee]rror"):
        failing.result()
    assert other.result().sequences == expected


def test_without_the_package_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(SpecbeamError, match=r"pip install 'specbeam\[structured\]'"):
        Regex("a")


def test_a_real_models_json_is_valid(tiny):
    lm = specbeam.load("smollm2-135m-instruct")
    prompt = "Write a JSON object about the city of Paris."
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
        "additionalProperties": False,
    }
    for method in METHODS[:3]:
        options = {"constraint": JsonSchema(schema), "max_new_tokens": 60, **method}
        plain, drafted = (specbeam.generate(lm, prompt, options, draft=draft) for draft in (None, "ngram"))
        assert plain.sequences == drafted.sequences
        for one in plain.sequences:
            assert one.is_complete
            jsonschema.validate(json.loads(one.text), schema)
