"""Rules of grammars for arguments that are no JSON, from the JSON Schema of a tool, in the syntax of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from specbeam.errors import SpecbeamError
from specbeam.structured import JsonSchema
from specbeam.structured.json_schema import FORMATS, NotEnforceable, check_flags, check_length, target_of
from specbeam.structured.tools.syntax import BARE_KEY, TAGGED, Notation, Syntax, Tagged, listed, type_of, types_of

BY_TYPE = {
    "array": ("items", "maxItems", "minItems", "prefixItems"),
    "integer": ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"),
    "object": ("additionalProperties", "properties", "required"),
    "string": ("maxLength", "minLength", "pattern"),
}
BY_TYPE["number"] = BY_TYPE["integer"]
"""The keywords about values of a type that are enforced."""
KEYWORDS = frozenset(
    (
        *("$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "allOf", "anyOf", "const", "contains"),
        *("dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "format", "if", "maxContains"),
        *("maxProperties", "minContains", "minProperties", "not", "oneOf", "patternProperties", "propertyNames"),
        *("then", "type", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
        *(name for names in BY_TYPE.values() for name in names),
    )
)
"""All that say something about a value. Others are annotations."""
NUMBERS = {
    "integer": "/-?(0|[1-9][0-9]{0,15})/",
    "number": r"/-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,16})?([eE][-+]?[0-9]{1,3})?/",
}
IDENTIFIER = "[A-Za-z_][A-Za-z0-9_]{0,63}"
"""The name of an argument that no schema names."""
ODD = re.compile(r"""[\s=:,<>(){}\[\]'"]|\A\Z""")
"""What no name of an argument may have where it is not quoted."""
QUOTED = (r'"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"', r"'([^'\\\x00-\x1f\x7f]|\\['\\bfnrt])*'")
"""Strings of Python."""
LOOKS_TYPED = {
    "null": r"null|None",
    "boolean": r"true|false|True|False",
    **dict.fromkeys(("integer", "number"), r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"),
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}
"""Texts that may be read as values of a type."""
Member = tuple[str, bool]
"""The rule of a member, and whether it is required."""


class Part(JsonSchema):
    """A part of a schema that was checked, and whose patterns are llguidance's."""

    def _check(self) -> None:
        pass

    def _read(self, given: Any) -> Any:
        return given


class SchemaRules:
    """The rules of one tool's arguments.

    Args:
        schema: of the arguments, which are an object.
        prefix: of the names of all rules.
        literal: makes the symbol of a text, in which control tokens are tokens.
        added: the texts of control tokens.

    Attributes:
        lines: the rules in Lark. The rule of all arguments is named as the prefix.
        grammars: other grammars that the rules name.

    Raises:
        NotEnforceable: the schema has something that these rules cannot say.
    """

    def __init__(
        self,
        syntax: Syntax,
        schema: JsonSchema,
        prefix: str,
        literal: Callable[[str], str] = json.dumps,
        added: Sequence[str] = (),
    ) -> None:
        self._root = schema.schema
        self._prefix, self._literal, self._added = prefix, literal, added
        self.lines: list[str] = []
        self.grammars: list[Any] = []
        self._named: dict[str, str] = {}  # rules by the references that lead to them
        self._tagged = syntax if isinstance(syntax, Tagged) else TAGGED
        self._notation: Notation | None = syntax if isinstance(syntax, Notation) else None
        try:
            self.lines.append(f"{prefix}: {self._arguments()}")
        except RecursionError:
            raise NotEnforceable("it is nested too deeply") from None

    def _arguments(self) -> str:
        """The symbols of all arguments."""
        schema = self._resolved(self._root)
        if values := [one for one in listed(schema) or () if isinstance(one, dict)]:
            raise NotEnforceable(f"#/{'enum' if len(values) > 1 else 'const'} lists objects of arguments")
        self._check_keywords(schema, ("type", *BY_TYPE["object"]), "#")
        if odd := [
            name for name in (*(schema.get("properties") or ()), *(schema.get("required") or ())) if ODD.search(name)
        ]:
            raise NotEnforceable(f"#/properties has {json.dumps(odd[0])}, which can be a name in JSON only")
        if self._notation is None:
            return self._members_of(schema, "#", self._tagged_member, self._tagged_other(), "")
        own = self._notation

        def member(key: str, value: Any, place: str) -> str:
            return f"{json.dumps(key + own.assign)} {self._value(value, place)}"

        def other(names: Sequence[str], value: Any, place: str) -> str:
            name = self._terminal(self._except(f"/{IDENTIFIER}/", names))
            return f"{name} {self._literal(own.assign)} {self._value(value, place)}"

        members = self._members_of(schema, "#", member, other, own.item)
        return f"{self._literal(own.first)} {members} {self._literal(own.last)}"

    def _tagged_member(self, key: str, schema: Any, place: str) -> str:
        """An argument between tags."""
        return f"{json.dumps(self._tagged.begin + key + self._tagged.named)} {self._text_of(schema, place)}"

    def _tagged_other(self) -> Callable[[Sequence[str], Any, str], str]:
        def other(names: Sequence[str], schema: Any, place: str) -> str:
            own, name = self._tagged, self._terminal(self._except(f"/{IDENTIFIER}/", names))
            return f"{self._literal(own.begin)} {name} {self._literal(own.named)} {self._text_of(schema, place)}"

        return other

    def _text_of(self, schema: Any, place: str) -> str:
        """A value as a text between tags, with the tag behind it."""
        if allows_all(schema):
            return self._raw({}, place, self._tagged.end, self._tagged.end.strip(), ())
        ways, texts = [], []
        types = types_of(schema, self._root)
        looks = [LOOKS_TYPED[kind] for kind in sorted(types - {"string"})]
        for one in self._branches(schema, place):
            values = listed(one)
            if values is not None:
                shown = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
                if wrong := [text for text in shown if self._tagged.end.strip() in text]:
                    raise NotEnforceable(f"{place} lists {json.dumps(wrong[0])}, which has the end of an argument")
                ways.append(f"({' | '.join(map(json.dumps, shown))}) {self._literal(self._tagged.end)}")
            elif one["type"] == "string":
                texts.append(one)
            elif one["type"] in ("boolean", "null"):
                words = ["true", "True", "false", "False"] if one["type"] == "boolean" else ["null", "None"]
                ways.append(f"({' | '.join(map(json.dumps, words))}) {self._literal(self._tagged.end)}")
            else:
                ways.append(f"{self._json(one)} {self._literal(self._tagged.end)}")
        ways += [self._raw(one, place, self._tagged.end, self._tagged.end.strip(), looks) for one in texts]
        return self._rule(" | ".join(ways))

    def _value(self, schema: Any, place: str) -> str:
        """A value in the notation, as a rule."""
        assert self._notation is not None
        is_reference = isinstance(schema, dict) and isinstance(schema.get("$ref"), str)
        if not is_reference and not allows_all(schema):
            return self._rule(" | ".join(self._way(one, place) for one in self._branches(schema, place)))
        reference = schema["$ref"] if is_reference else ""  # of which there may be one within itself
        if reference not in self._named:
            self._named[reference] = name = f"{self._prefix}_ref_{len(self._named)}"
            ways = " | ".join(self._way(one, place) for one in self._branches(schema, place))
            self.lines.append(f"{name}: {ways}")
        return self._named[reference]

    def _way(self, schema: dict[str, Any], place: str) -> str:
        """A value of one type, or one of some values."""
        own = self._notation
        assert own is not None
        if (values := listed(schema)) is not None:
            if own.quote is not None and any(own.quote in text for text in _texts(values)):
                raise NotEnforceable(f"{place} lists a text with {own.quote}")
            written = [own.value(value) for value in values]
            written += [f"'{value}'" for value in values if own.quote is None and _is_plain(value)]
            return " | ".join(map(self._quoted, written))
        kind = schema["type"]
        limits = {name: value for name, value in schema.items() if name in BY_TYPE.get(kind, ())}
        if kind in ("boolean", "null"):
            return " | ".join(map(self._literal, own.words[:2] if kind == "boolean" else own.words[2:]))
        if kind in NUMBERS:
            return self._json(schema) if limits else self._terminal(NUMBERS[kind])
        if kind == "string":
            if own.quote is not None:
                return f"{self._literal(own.quote)} {self._raw(schema, place, own.quote, own.quote, ())}"
            return self._json(schema) if limits else " | ".join(self._terminal(f"/{one}/") for one in QUOTED)
        return self._array(schema, place) if kind == "array" else self._object(schema, place)

    def _array(self, schema: Mapping[str, Any], place: str) -> str:
        own = self._notation
        assert own is not None
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        first = [self._value(one, f"{place}/prefixItems") for one in schema.get("prefixItems") or ()][:most]
        others = schema.get("items", True)
        if others is False and least > len(first):
            raise NotEnforceable(f"{place} needs more items than it allows")
        between = self._literal(own.item)
        items = ""
        if others is not False and (most is None or most > len(first)):
            more = self._value(others, f"{place}/items")
            begun = len(first) or 1
            bounds = f"{{{max(0, least - begun)},{'' if most is None else most - begun}}}"
            repeated = "" if most == begun else f"({between} {more}){bounds}"
            items = f"{'' if first else more} {repeated}"
            items = items if first or least else f"({items})?"
        for number in reversed(range(len(first))):
            items = f"{between if number else ''} {first[number]} {items}"
            items = items if number < least else f"({items})?"
        return f"{self._literal('[')} {items} {self._literal(']')}"

    def _object(self, schema: Mapping[str, Any], place: str) -> str:
        own = self._notation
        assert own is not None

        def member(key: str, value: Any, where: str) -> str:
            return f"{self._quoted(own.named(key) + own.key)} {self._value(value, where)}"

        def other(names: Sequence[str], value: Any, where: str) -> str:
            key = BARE_KEY if own.quote is not None else QUOTED[0]
            name = self._terminal(self._except(f"/{key}/", [own.named(name) for name in names]))
            return f"{name} {self._literal(own.key)} {self._value(value, where)}"

        members = self._members_of(schema, place, member, other, own.item)
        return f"{self._literal('{')} {members} {self._literal('}')}"

    def _members_of(
        self,
        schema: Mapping[str, Any],
        place: str,
        member: Callable[[str, Any, str], str],
        other: Callable[[Sequence[str], Any, str], str],
        separator: str,
    ) -> str:
        """The members of an object, in the order of the schema's properties."""
        properties, required = dict(schema.get("properties") or {}), [*(schema.get("required") or ())]
        others = schema.get("additionalProperties", True)
        properties |= {name: others for name in required if name not in properties}
        if missing := [name for name in required if properties[name] is False]:
            raise NotEnforceable(f"{place} requires {missing[0]}, and does not allow it")
        members = [
            (self._rule(member(name, value, f"{place}/properties/{name}")), name in required)
            for name, value in properties.items()
            if value is not False
        ]
        rest = "" if others is False else self._rule(other([*properties], others, f"{place}/additionalProperties"))
        return self._sequence(members, rest, separator)

    def _sequence(self, members: Sequence[Member], other: str, separator: str) -> str:
        """Members in their order, with a separator between them."""
        if not separator:
            listed_members = [name if is_required else f"{name}?" for name, is_required in members]
            return " ".join([*listed_members, f"{other}*" if other else ""]) or '""'
        between = self._literal(separator)
        behind = f"({between} {other})*" if other else '""'
        first = f"({other} {behind})?" if other else '""'
        for name, is_required in reversed(members):
            after = self._rule(behind)
            first = f"{name} {after}" if is_required else f"{name} {after} | {self._rule(first)}"
            behind = f"{between} {name} {after}" if is_required else f"({between} {name})? {after}"
        return self._rule(first)

    def _branches(self, schema: Any, place: str) -> Iterator[dict[str, Any]]:
        """Schemas that together allow what a schema does, each of one type or of some values."""
        schema = self._resolved(schema)
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(parts := schema.get(name), list):
                beside = [one for one in schema if one in KEYWORDS and one != name]
                if beside or (name == "allOf" and len(parts) > 1):
                    raise NotEnforceable(f"{place} has {name}{f' beside {beside[0]}' if beside else ''}")
                for one in parts:
                    yield from self._branches(one, place)
                return
        kind = schema.get("type")
        kinds = sorted(types_of({}, {}) - {"integer"}) if kind is None else [kind] if isinstance(kind, str) else kind
        if (values := listed(schema)) is not None:
            self._check_keywords(schema, ("type", "enum", "const"), place)
            allowed = {*kinds} | ({"integer"} if "number" in kinds else set())
            yield {"enum": [value for value in values if type_of(value) in allowed]}
            return
        for one in kinds:
            known = ("type", *(keyword for other in kinds for keyword in BY_TYPE.get(other, ())))
            self._check_keywords(schema, known, place)
            yield {"type": one} | {name: value for name, value in schema.items() if name in BY_TYPE.get(one, ())}

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """A schema without a reference at its top."""
        for _ in range(100):
            if not isinstance(schema, dict):
                break
            if not isinstance(reference := schema.get("$ref"), str):
                return schema
            self._check_keywords(schema, ("$ref",), reference)
            schema = target_of(self._root, reference)
        if schema is False:
            raise NotEnforceable("a part of it allows nothing")
        return {}

    def _check_keywords(self, schema: Mapping[str, Any], known: Sequence[str], place: str) -> None:
        """Refuse keywords that would not be enforced."""
        for name in schema:
            if name == "format" and schema[name] not in FORMATS:
                continue
            if name in KEYWORDS and name not in known:
                raise NotEnforceable(f"{place} has {name}, which is enforced in JSON only")

    def _raw(self, schema: Mapping[str, Any], place: str, end: str, forbidden: str, looks: Sequence[str]) -> str:
        """A text without quotation marks, and its end.

        Args:
            forbidden: a text that it cannot have.
            looks: regular expressions for texts that would be read as other values.
        """
        least, most, pattern = schema.get("minLength", 0), schema.get("maxLength"), schema.get("pattern")
        parts = [f"/(?s:.){{{least},{'' if most is None else most}}}/"]
        parts += [f"/{_anchored(pattern, place)}/"] if pattern is not None else []
        parts += [f"~/(?s:.*){_escaped(forbidden)}(?s:.*)/"]
        parts += [rf"~/\s*({'|'.join(looks)})\s*/"] if looks else []
        text = " & ".join(f"({part})" for part in parts)
        if end in self._added:
            is_optional = least == 0 and pattern is None
            name = self._terminal(f"{text} & /(?s:.+)/")
            return f"{name}{'?' if is_optional else ''} {self._literal(end)}"
        terminal = self._terminal(f"({text}) {json.dumps(end)}")
        name = f"{self._prefix}_text_{len(self.lines)}"
        self.lines.append(f"{name}[lazy]: {terminal}")
        return name

    def _json(self, schema: Any) -> str:
        """A value of JSON, as a grammar of its own. The root of its references is a definition there."""
        name = f"{self._prefix}_json_{len(self.grammars)}"
        whole = _with_root(schema) | ({"$defs": {"root": _with_root(self._root)}} if _has_reference(schema) else {})
        try:
            self.grammars.append(Part(whole).rule(name))
        except SpecbeamError as error:
            raise NotEnforceable(str(error)) from error
        return f"@{name}"

    def _quoted(self, text: str) -> str:
        """A text in which the quotation marks of the notation alone are control tokens."""
        quote = self._notation and self._notation.quote
        if not quote:
            return json.dumps(text)
        return f" {self._literal(quote)} ".join(json.dumps(part) if part else "" for part in text.split(quote))

    def _except(self, terminal: str, names: Sequence[str]) -> str:
        """A terminal without some texts."""
        return f"{terminal} & ~/({'|'.join(map(_escaped, names))})/" if names else terminal

    def _terminal(self, expression: str) -> str:
        name = f"{self._prefix.upper()}_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _rule(self, expression: str) -> str:
        """The name of a rule."""
        name = f"{self._prefix}_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name


def allows_all(schema: Any) -> bool:
    """Whether a schema allows any value."""
    return schema is True or (isinstance(schema, dict) and KEYWORDS.isdisjoint(schema))


def check(syntax: Syntax, schema: JsonSchema) -> None:
    """Refuse a schema of arguments that cannot be enforced in a syntax.

    Raises:
        SpecbeamError: names the place.
    """
    if not isinstance(syntax, Tagged | Notation):
        return
    try:
        SchemaRules(syntax, schema, "arguments")
    except NotEnforceable as error:
        raise SpecbeamError(str(error)) from error


def _anchored(pattern: str, place: str) -> str:
    """A regular expression for whole texts, from one that may match a part of a text."""
    from llguidance import regex_to_lark

    check_flags(pattern, place)
    check_length(pattern, place)
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    body = pattern[1 if begins else 0 : -1 if ends else None]
    plain = re.sub(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", "", body, flags=re.DOTALL)
    if "^" in plain or "$" in plain or ("|" in plain and (begins or ends) and "(" not in body):
        raise NotEnforceable(f"{place} has a pattern with anchors within it, which is enforced in JSON only")
    made = regex_to_lark(body, "dws")
    return f"{'' if begins else '(?s:.*)'}({made}){'' if ends else '(?s:.*)'}"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _has_reference(value: Any) -> bool:
    """Whether a schema has a reference."""
    if isinstance(value, list):
        return any(map(_has_reference, value))
    return isinstance(value, dict) and (isinstance(value.get("$ref"), str) or any(map(_has_reference, value.values())))


def _with_root(value: Any) -> Any:
    """A schema whose references are to a root among its definitions."""
    if isinstance(value, list):
        return [*map(_with_root, value)]
    if not isinstance(value, dict):
        return value
    made = {name: _with_root(one) for name, one in value.items() if name != "$id"}
    if isinstance(reference := value.get("$ref"), str) and reference.startswith("#"):
        made["$ref"] = f"#/$defs/root{reference[1:]}"
    return made


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(one)


def _is_plain(value: Any) -> bool:
    """Whether a value is a text that Python's single quotation marks can hold as it is."""
    return isinstance(value, str) and "'" not in value and json.dumps(value, ensure_ascii=False)[1:-1] == value
