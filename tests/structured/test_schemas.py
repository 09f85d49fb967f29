"""JSON schemas that are rewritten before llguidance reads them, against the validator jsonschema."""

import itertools
import json
from typing import Literal

import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbeam import JsonSchema, SpecbeamError
from tests.conftest import examples
from tests.structured.test_gbnf import allows


def written(value):
    return json.dumps(value, ensure_ascii=False)


def tagged(value, **more):
    return {
        "type": "object",
        "properties": {"kind": value, **more},
        "required": ["kind"],
        "additionalProperties": False,
    }


VALUES = [None, True, 0, 1, 2, "a", "b", [], ["a"], ["a", "b"], ["b", "a"], ["a", "a"], {"kind": "a"}, {"kind": "b"}]
VALUES += [{"kind": "a", "x": 1}, {"kind": "b", "x": 1}, {"kind": 1}, {}, [1, "a"], [True, False], [True, True]]
DEFINITIONS = {
    "text": {"type": "string"},
    "number": {"$ref": "#/$defs/integer"},
    "integer": {"type": "integer"},
    "a": tagged({"const": "a"}, x={"type": "integer"}),
    "b": {"allOf": [{"$ref": "#/$defs/either"}], "properties": {"kind": {"enum": ["b"]}}},
    "either": tagged({"type": "string"}, x={"type": "integer"}),
    "number kind": tagged({"$ref": "#/$defs/integer"}),
}
DISJOINT = [
    ["text", "number"],
    ["a", "b", "number kind", "text"],
    ["number kind", "b"],
]


@pytest.mark.parametrize("names", DISJOINT)
@pytest.mark.parametrize("beside", [{}, {"anyOf": [{"type": "string"}, {"type": ["object", "number"]}]}])
def test_one_of_alternatives_that_are_disjoint_through_references(names, beside):
    alternatives = [{"$ref": f"#/$defs/{name}".replace(" ", "%20")} for name in names]
    schema = {"oneOf": alternatives, "$defs": DEFINITIONS, **beside}
    valid = jsonschema.Draft202012Validator(schema)
    expected = {written(value) for value in VALUES if valid.is_valid(value)}
    assert allows(JsonSchema(schema), map(written, VALUES)) == expected
    assert len(expected) >= 2


SMALL = st.recursive(
    st.one_of(
        st.builds(lambda value: {"const": value}, st.sampled_from([None, True, 1, "a", "b"])),
        st.builds(
            lambda some: {"enum": some}, st.lists(st.sampled_from([None, 0, 1, "a", "b"]), min_size=1, max_size=2)
        ),
        st.builds(lambda name: {"type": name}, st.sampled_from(["null", "boolean", "integer", "string", "array"])),
        st.builds(lambda name: {"$ref": f"#/$defs/{name}"}, st.sampled_from(["text", "number", "a", "either"])),
        st.builds(tagged, st.sampled_from([{"const": "a"}, {"const": "b"}, {"type": "string"}, {"const": 1}])),
    ),
    lambda inner: st.builds(
        lambda name, some: {name: some}, st.sampled_from(["anyOf", "oneOf"]), st.lists(inner, min_size=1, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=examples(2))
@given(alternatives=st.lists(SMALL, min_size=1, max_size=3))
def test_one_of_never_allows_what_two_alternatives_allow(alternatives):
    schema = {"oneOf": alternatives, "$defs": DEFINITIONS}
    valid = jsonschema.Draft202012Validator(schema)
    try:
        description = JsonSchema(schema)
    except SpecbeamError:
        return
    assert allows(description, map(written, VALUES)) == {written(one) for one in VALUES if valid.is_valid(one)}


def test_the_advice_about_one_of_can_be_followed():
    schema = {"oneOf": [tagged({"type": "string"}), tagged({"type": "string"}, x={"type": "integer"})]}
    with pytest.raises(SpecbeamError, match=r"a required property with another const in each.* \(at #/oneOf\)"):
        JsonSchema(schema)
    schema["oneOf"][0]["properties"]["kind"], schema["oneOf"][1]["properties"]["kind"] = {"const": "a"}, {"const": "b"}
    assert allows(JsonSchema(schema), map(written, VALUES)) == {
        '{"kind": "a"}',
        '{"kind": "b"}',
        '{"kind": "b", "x": 1}',
    }


def test_many_alternatives_take_bounded_work():
    some = {str(number): tagged({"const": str(number)}) for number in range(2000)}
    alternatives = [{"$ref": f"#/$defs/{name}"} for name in some]
    with pytest.raises(SpecbeamError, match="/oneOf"):
        JsonSchema({"oneOf": alternatives, "$defs": some})
    assert JsonSchema({"oneOf": alternatives[:100], "$defs": some})


TEXT = {"type": "string"}
IDENTIFIED = [
    ({"a": {"$id": "in.json", "$defs": {"x": TEXT}, "$ref": "#/$defs/x"}}, {}, "a"),
    ({"a": {"$ref": "b.json"}}, {"B": {"$id": "b.json", **TEXT}}, "a"),
    ({"a": {"$ref": "/sub/b.json"}}, {"B": {"$id": "sub/b.json", **TEXT}}, "a"),
    ({"a": {"$ref": "b.json#x"}}, {"B": {"$id": "b.json", "$defs": {"c": {"$anchor": "x", **TEXT}}}}, "a"),
    (
        {"a": {"$ref": "b/c.json"}},
        {"B": {"$id": "b/", "$defs": {"c": {"$id": "c.json", "$ref": "d.json"}, "d": {"$id": "d.json", **TEXT}}}},
        "a",
    ),
    ({"a": {"$ref": "urn:example:b"}}, {"B": {"$id": "urn:example:b", "$defs": {"c": TEXT}, "$ref": "#/$defs/c"}}, "a"),
    (
        {"a": {"$ref": "x.json"}},
        {"a b": {"$id": "x.json", "type": "object", "properties": {"$id": TEXT}, "required": ["$id"]}},
        {"$id": "a"},
    ),
]


@pytest.mark.parametrize(("properties", "definitions", "right"), IDENTIFIED)
def test_identifiers_within_a_schema_are_resolved(properties, definitions, right):
    draft = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$id": "https://example.org/root.json", "$schema": draft, "type": "object", "required": ["a"]}
    schema |= {"properties": properties, "$defs": definitions}
    valid, texts = jsonschema.Draft202012Validator(schema), [{"a": one} for one in ("a", 1, {"$id": "a"}, {"$id": 1})]
    expected = {written(one) for one in texts if valid.is_valid(one)}
    assert written({"a": right}) in expected
    assert len(expected) < 3
    assert allows(JsonSchema(schema), map(written, texts)) == expected


def test_an_identifier_beside_a_reference_is_read_as_its_draft_says():
    other = {"$id": "https://example.org/b/c.json", "type": "integer"}
    beside = {"$id": "b/", "$ref": "c.json"}
    schema = {"$id": "https://example.org/root.json", "definitions": {"here": TEXT | {"$id": "c.json"}, "other": other}}
    schema |= {"type": "object", "properties": {"a": beside}, "required": ["a"]}
    for draft in (jsonschema.Draft202012Validator, jsonschema.Draft7Validator):
        named = schema | {"$schema": draft.META_SCHEMA["$id" if "$id" in draft.META_SCHEMA else "id"]}
        texts = [{"a": 1}, {"a": "a"}]
        expected = {written(one) for one in texts if draft(named).is_valid(one)}
        assert allows(JsonSchema(named), map(written, texts)) == expected
    with pytest.raises(SpecbeamError, match=r"#/properties/a has an \$id beside a \$ref"):
        JsonSchema(schema)


def test_references_to_other_documents_are_still_refused():
    with pytest.raises(SpecbeamError, match="does not fetch"):
        JsonSchema({"$defs": {"a": {"$id": "a.json"}}, "$ref": "https://example.org/b.json"})


class Tags(pydantic.BaseModel):
    some: set[Literal["a", "b", "c"]]
    frozen: frozenset[bool] = frozenset()
    few: pydantic.conset(Literal[1, 2, 3], min_length=1, max_length=2)


def test_sets_of_pydantic_are_enforced():
    def arrays(values):
        return [[*some] for n in range(4) for some in itertools.product(values, repeat=n)]

    for name, values in (("some", "abc"), ("frozen", [True, False]), ("few", [1, 2, 3])):
        schema = Tags.model_json_schema()["properties"][name]
        valid = jsonschema.Draft202012Validator(schema)
        expected = {written(one) for one in arrays(values) if valid.is_valid(one)}
        assert allows(JsonSchema(schema), map(written, arrays(values))) == expected
    tags = [written({"some": some, "few": [2]}) for some in (["b", "a"], ["b", "b"])]
    assert allows(JsonSchema(Tags), tags) == {tags[0]}


def test_unique_items_of_more_values_come_in_order():
    schema = {"type": "array", "items": {"enum": [*"abcdefgh"]}, "uniqueItems": True}
    right = [[], [*"ac"], [*"abcdefgh"]]
    assert allows(JsonSchema(schema), map(written, [*right, ["a", "a"], ["a", "b", "a"]])) == {*map(written, right)}
    with pytest.raises(SpecbeamError, match="# has uniqueItems, which is enforced for items with an enum"):
        JsonSchema({"type": "array", "items": {"type": "string"}, "uniqueItems": True})
    one = JsonSchema({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1})
    assert allows(one, ["[]", '["a"]', '["a","b"]']) == {"[]", '["a"]'}


BOUNDS = [2**53, 2**53 + 1, 2**60, 2**60 + 1, 2**63 - 1025, 2**63 - 1024, 2**63 - 1, 2**63, 2**64 - 1, 10**30]
NEAR = [sign * (bound + more) for bound in [*BOUNDS, 0] for sign in (1, -1) for more in (-1, 0, 1)]
EXACT = {2**53, 2**60, 2**63 - 1024, 2**63 - 1}


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("keyword", ["maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum", "const"])
def test_bounds_beyond_those_of_floats(kind, keyword):
    for bound, sign in itertools.product(BOUNDS, (1, -1)):
        schema = {"type": kind, keyword: sign * bound}
        valid = jsonschema.Draft202012Validator(schema)
        expected = {str(number) for number in NEAR if valid.is_valid(number)}
        is_bound = keyword != "const" and (sign > 0) == keyword.lower().endswith("maximum")
        try:
            found = allows(JsonSchema(schema), map(str, NEAR))
        except SpecbeamError:
            assert not is_bound, schema
            continue
        assert found <= expected, schema
        if is_bound:
            assert {"0", "1", "-1"} <= found
        if kind == "integer" and keyword == "maximum" and sign > 0 and bound in EXACT:
            assert {one for one in expected if int(one) >= 0} == {one for one in found if int(one) >= 0}
