"""JSON by a schema: is all of it valid, and does a draft change a bit?

    python bench/structured_exact.py SCHEMAS.jsonl.gz [--suite FOLDER] [--model MODEL] [--schemas 500] [--seed 0]
                                     [--tokens 96] [--json FILE]

SCHEMAS has a name, a schema and its instances (``tests``) in each line. The first table is about these: how many valid
and invalid ones a schema's grammar lets through, written with keys in the schema's order. With --suite the official
test suite is there, too: FOLDER is ``json/tests`` of jsonschema's source distribution.

With --model the second table is about texts by schemas that a seed draws: greedy, sampled and with 4 beams, each with
lookups and without. Whatever is complete is validated by jsonschema, whose numbers are decimal here: of binary ones it
rounds ``multipleOf``. Texts, scores and ends must not depend on the draft. The program stops at the first invalid text.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, cast

import jsonschema
from figures import Figures, add_json_option
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer
from machine import describe

import specbeam
from specbeam import Engine, JsonSchema, SpecbeamError
from specbeam.structured.trials import limits

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 1},
    "4 beams": {"num_beams": 4, "num_return_sequences": 4},
}
DRAFTS = ("draft2020-12", "draft7")
AT_ONCE = 16
Case = tuple[Any, list[dict[str, Any]]]
"""A schema, and instances with whether they are valid."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schemas_file", type=Path, metavar="SCHEMAS")
    parser.add_argument("--suite", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=96)
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    with gzip.open(given.schemas_file) as lines:
        rows = [*map(json.loads, lines)]
    print("\n| instances of | schemas | taken | invalid ones let through | valid ones let through |")
    print("| --- | --- | --- | --- | --- |")
    sets = {given.schemas_file.stem: [(row["schema"], row["tests"]) for row in rows]}
    sets |= {draft: [*suite(given.suite / draft)] for draft in DRAFTS if given.suite is not None}
    for name, cases in sets.items():
        counts = instances(cases)
        for what, number in counts.items():
            figures.add(name, "instances", what, unit="count", samples=[float(number)])
        print(
            f"| {name} | {len(cases):,} | {counts['taken']:,} | {counts['let through']} of {counts['invalid']:,} | "
            f"{counts['allowed']:,} of {counts['valid']:,} |",
            flush=True,
        )
    if given.model is not None:
        lm = specbeam.load(given.model)
        drawn = random.Random(given.seed).sample([row["schema"] for row in rows], given.schemas)
        print(f"\n{given.model.stem}, {len(drawn)} schemas, at most {given.tokens} new tokens\n")
        print("| method | refused | texts | valid | cut | invalid | other bits with ngram |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for method, options in METHODS.items():
            found = texts(lm, drawn, {"max_new_tokens": given.tokens, **options})
            for what, number in found.items():
                figures.add(given.model.stem, method, what, unit="count", samples=[float(number)])
            print(f"| {method} | {' | '.join(f'{number:,}' for number in found.values())} |", flush=True)
    figures.write(given.json)


def suite(folder: Path) -> Iterator[Case]:
    """The cases of the official suite. Schemas that are true or false allow anything or nothing."""
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield group["schema"], group["tests"]


def instances(cases: Iterable[Case]) -> Counter[str]:
    """How many instances the grammars of schemas let through."""
    counts = Counter(dict.fromkeys(("taken", "invalid", "let through", "valid", "allowed"), 0))
    for schema, tests in cases:
        try:
            description = JsonSchema(schema)
        except SpecbeamError:
            continue
        counts["taken"] += 1
        for test in tests:
            is_allowed = allows(description, ordered(test["data"], schema, schema))
            counts["valid" if test["valid"] else "invalid"] += 1
            counts["allowed" if test["valid"] else "let through"] += is_allowed
            if is_allowed and not test["valid"]:
                print(f"let through: {json.dumps(test['data'])} by {json.dumps(schema)[:200]}")
    return counts


def allows(description: JsonSchema, value: Any) -> bool:
    """Whether a value may be written, in tokens of one byte."""
    limited = limits(description.lexer_fuel, description.max_symbols)
    matcher = LLMatcher(LLTokenizer("byte"), description.text, log_level=0, limits=limited)
    written = [*json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")]
    return bool(matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting())


def ordered(value: Any, schema: Any, root: Any) -> Any:
    """A value whose keys are in the order of its schema's properties, as far as these are plain to see."""
    parts = [*parts_of(schema, root)]
    if isinstance(value, dict):
        properties: dict[str, list[Any]] = {}
        others = [part["additionalProperties"] for part in parts if "additionalProperties" in part]
        for part in parts:
            for name, one in (part.get("properties") or {}).items():
                properties.setdefault(name, []).append(one)
        for name in [name for part in parts for name in part.get("required") or ()]:
            properties.setdefault(name, others)
        names = [name for name in properties if name in value] + [name for name in value if name not in properties]
        return {name: ordered(value[name], {"allOf": properties.get(name, others)}, root) for name in names}
    if isinstance(value, list):
        items = [
            part[name] for part in parts for name in ("items", "additionalItems") if isinstance(part.get(name), dict)
        ]
        lists = [part[name] for part in parts for name in ("prefixItems", "items") if isinstance(part.get(name), list)]
        return [
            ordered(one, {"allOf": [some[i] for some in lists if i < len(some)] or items}, root)
            for i, one in enumerate(value)
        ]
    return value


def parts_of(schema: Any, root: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The schemas that a schema is made of, on the same level."""
    if not isinstance(schema, dict) or depth > 20:
        return
    yield schema
    target = root if str(schema.get("$ref", "")).startswith("#") else None
    for name in str(schema.get("$ref", "")).split("/")[1:]:
        target = (target or {}).get(name) if isinstance(target, dict) else None
    for part in [target, *(one for name in ("allOf", "anyOf", "oneOf") for one in schema.get(name) or ())]:
        yield from parts_of(part, root, depth + 1)


def texts(lm: specbeam.LanguageModel, schemas: list[Any], options: dict[str, Any]) -> dict[str, int]:
    """How many texts by schemas are valid, and how many change with lookups."""
    taken, counts = list[JsonSchema](), Counter[str]()
    for schema in schemas:
        try:
            taken.append(JsonSchema(schema))
        except SpecbeamError:
            counts["refused"] += 1
    for at in range(0, len(taken), AT_ONCE):
        some = taken[at : at + AT_ONCE]
        plain, drafted = (results(lm, some, options, draft) for draft in (None, "ngram"))
        counts["other"] += sum(a.sequences != b.sequences for a, b in zip(plain, drafted, strict=True))
        for description, result in zip(some, plain, strict=True):
            for sequence in result.sequences:
                counts["texts"] += 1
                if not sequence.is_complete:
                    counts["cut"] += 1
                elif is_valid(sequence.text, description.schema):
                    counts["valid"] += 1
                else:
                    raise SystemExit(f"invalid: {sequence.text}\nby {json.dumps(description.schema)}")
    return {name: counts[name] for name in ("refused", "texts", "valid", "cut", "invalid", "other")}


def results(
    lm: specbeam.LanguageModel, some: list[JsonSchema], options: dict[str, Any], draft: str | None
) -> list[specbeam.Result]:
    """The results of requests that run at once."""
    engine = Engine(lm, max_requests=len(some))
    requests = [
        engine.submit(
            f"Write a JSON object for this schema: {json.dumps(one.schema)[:400]}",
            {**options, "constraint": one},
            draft=draft,
        )
        for one in some
    ]
    engine.run()
    return [request.result() for request in requests]


def is_valid(text: str, schema: Any) -> bool:
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return bool(
        exact_validator(validator_for(exact, jsonschema.Draft202012Validator))(exact).is_valid(
            json.loads(text, parse_float=Decimal)
        )
    )


@cache
def exact_validator(kind: Any) -> Any:
    """A validator to which decimal numbers are numbers."""

    def is_number(_: Any, value: Any) -> bool:
        return isinstance(value, int | Decimal) and not isinstance(value, bool)

    def is_integer(_: Any, value: Any) -> bool:
        return is_number(_, value) and value == int(value)

    checker = kind.TYPE_CHECKER.redefine_many({"number": is_number, "integer": is_integer})
    return cast(Any, jsonschema.validators.extend(kind, type_checker=checker))


if __name__ == "__main__":
    main()
