"""Small descriptions of constraints whose compilation may take all memory or time, drawn at random.

Run as a program it makes constraints of those on standard input, one in a line of JSON, with limits: 300 MB for all,
and 2 seconds of processor time for each. It writes a line for each: why it is refused, or null.
"""

import json
import random
import sys

LEAVES = [
    {"const": "a"},
    {"enum": ["a", "b", "c", None, 1, {"a": 1}, [1]]},
    {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "maxLength": 100_000},
    {"type": "integer", "multipleOf": 9973},
    {"type": "number", "minimum": 0.1, "maximum": 12345.678},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]},
    {"type": "array", "items": {"type": "string"}, "maxItems": 50},
    {"type": ["string", "null", "object"]},
    {},
]


def bomb(draw: random.Random) -> dict:
    """A description as :func:`specbeam.structured.grammar.output_spec_of` reads it."""
    kind = draw.choice(["json_schema"] * 6 + ["regex", "grammar", "grammar"])
    if kind == "json_schema":
        return {kind: {"schema": draw.choice([_fan, _fan, _fan, _numbers, _patterns, _nested])(draw)}}
    if kind == "regex":
        return {kind: {"pattern": _expression(draw)}}
    return {kind: {"source": draw.choice([_lark, _gbnf])(draw)}}


def _fan(draw: random.Random) -> dict:
    """References that fan out under keywords that combine schemas, level by level."""
    levels, width = draw.randint(2, 14), draw.randint(2, 10)
    keywords = draw.sample(["allOf", "anyOf", "oneOf", "properties", "not", "if", "dependentSchemas", "items"], 2)
    reference = draw.choice(["$ref"] * 4 + ["$dynamicRef"])
    leaves = [draw.choice(LEAVES) for _ in range(draw.randint(1, 3))]
    definitions = {f"l{levels}": draw.choice(leaves)}
    for level in range(levels):
        below = {reference: f"#/$defs/l{level + 1}"}
        parts = [dict(below) | draw.choice([{}, {}, draw.choice(leaves)]) for _ in range(width)]
        made = {
            "allOf": {"allOf": parts},
            "anyOf": {"anyOf": parts},
            "oneOf": {"oneOf": parts},
            "properties": {"type": "object", "properties": {f"k{i}": one for i, one in enumerate(parts)}},
            "not": {"not": {"not": below}, "allOf": parts},
            "if": {"if": below, "then": below, "else": {"allOf": parts}},
            "dependentSchemas": {"dependentSchemas": {f"k{i}": one for i, one in enumerate(parts)}},
            "items": {"type": "array", "prefixItems": parts, "items": below},
        }[draw.choices([keywords[0], keywords[1], "allOf"], [3, 1, 2])[0]]
        definitions[f"l{level}"] = {"allOf": [made, draw.choice(leaves)]} if draw.random() < 0.3 else made
    return {"$ref": "#/$defs/l0", "$defs": definitions}


def _numbers(draw: random.Random) -> dict:
    """Numbers as large as a keyword takes them."""
    large = 10 ** draw.randint(3, 12)
    return draw.choice(
        [
            {"type": "array", "items": draw.choice(LEAVES), "minItems": large},
            {"type": "array", "items": draw.choice(LEAVES), "maxItems": large},
            {"type": "string", "minLength": large, "maxLength": 2 * large},
            {"type": "string", "maxLength": large, "pattern": "^(ab|ba)*$"},
            {"type": "integer", "multipleOf": large + 7},
            {"type": "number", "multipleOf": 1 / large},
            {"allOf": [{"type": "integer", "multipleOf": n} for n in draw.sample(range(2, 200), 30)]},
            {"type": "object", "minProperties": large, "maxProperties": 2 * large},
            {"type": "object", "maxProperties": draw.randint(5, 500), "properties": {f"k{i}": {} for i in range(90)}},
            {"enum": ["x" * 90 + str(i) for i in range(draw.randint(1, 9000))]},
            {"enum": [[[i % 7] * 9] * 9 for i in range(draw.randint(1, 300))]},
        ]
    )


def _patterns(draw: random.Random) -> dict:
    """Expressions that meet, or that tell keys apart."""
    expressions = [_expression(draw) for _ in range(draw.randint(1, 9))]
    return draw.choice(
        [
            {"allOf": [{"type": "string", "pattern": one} for one in expressions]},
            {"type": "object", "patternProperties": {one: draw.choice(LEAVES) for one in expressions}},
            {
                "type": "object",
                "properties": {"a" * n: {} for n in range(1, 200)},
                "patternProperties": {f"^{one}$": {} for one in expressions},
            },
            {"type": "object", "propertyNames": {"pattern": expressions[0]}},
        ]
    )


def _nested(draw: random.Random) -> dict:
    """Schemas within each other."""
    schema = draw.choice(LEAVES)
    for _ in range(draw.choice([20, 60, 120, 400])):
        if len(json.dumps(schema)) > 5_000:
            break
        schema = draw.choice(
            [
                {"items": schema},
                {"anyOf": [schema, {"type": "null"}]},
                {"properties": {"a": schema, "b": schema}} if draw.random() < 0.1 else {"properties": {"a": schema}},
                {"allOf": [schema, draw.choice(LEAVES)]},
            ]
        )
    return schema


def _expression(draw: random.Random) -> str:
    inner = draw.choice(["a", "[ab]", "(a|b)*a", "(a?|b)", ".", r"\w", r"\p{L}", "(ab|a)"])
    for _ in range(draw.randint(1, 4)):
        least = draw.choice([0, 1, 9, 50])
        inner = f"({inner}{draw.choice(['', 'b', '.*'])}){{{least},{draw.choice([60, 99, 999, 10_000])}}}"
    return inner + draw.choice(["", "c", "(a|b){99}", ".*x.{12}"])


def _lark(draw: random.Random) -> str:
    width = draw.randint(2, 40)
    return draw.choice(
        [
            f"start: A\nA: /{_expression(draw)}/ & ~/(?s:.*){_expression(draw)}(?s:.*)/",
            "start: r0\n" + "\n".join(f"r{i}: " + f"r{i + 1} " * width for i in range(12)) + '\nr12: "a"?',
            "start: r0\n" + "\n".join(f"r{i}: (r{i + 1}){{0,{width * 99}}}" for i in range(6)) + '\nr6: "a"',
            "start: T0\n" + "\n".join(f"T{i}: " + f"T{i + 1} " * width for i in range(9)) + '\nT9: "a"',
            "start: T0\n" + "\n".join(f"T{i}: (T{i + 1}){{1,{width * 9}}}" for i in range(6)) + '\nT6: "a" | "ab"',
            "start: " + "(" * 20_000 + '"a"' + ")" * 20_000,
            "start: a\na: " + " | ".join(f'a a "{i}"' for i in range(width)) + ' | ""',
        ]
    )


def _gbnf(draw: random.Random) -> str:
    width = draw.randint(2, 40)
    return draw.choice(
        [
            "root ::= r0\n" + "\n".join(f"r{i} ::= " + f"r{i + 1} " * width for i in range(12)) + '\nr12 ::= "a"?',
            "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}{{0,{width * 99}}}" for i in range(6)) + '\nr6 ::= "a"',
            "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,
            "root ::= " + "(" * 200 + '"a"' + "){2}" * 200,
            "root ::= [ab]{1," + "9" * draw.randint(2, 5000) + "}",
            "root ::= " + "".join(f'"{i}"' for i in range(9000)),
            "root ::= " + " | ".join(f'"{i}" root' for i in range(5000)),
            'root ::= root root | root? | "a"*',
        ]
    )


def main() -> None:
    import resource
    import signal

    from llguidance import LLMatcher, LLTokenizer

    from specbeam.errors import SpecbeamError
    from specbeam.structured.grammar import output_spec_of
    from specbeam.structured.trials import limits
    from specbeam.system import child_processes

    most = child_processes.memory_of_this_process() + (300 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, 2)
        said = None
        try:
            made = output_spec_of(json.loads(line))
            LLMatcher(
                tokenizer, made.text, log_level=0, limits=limits(made.lexer_fuel, made.max_symbols)
            ).compute_bitmask()
        except SpecbeamError as error:
            said = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
