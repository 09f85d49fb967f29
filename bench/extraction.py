"""The share of fields that a model reads out of texts into JSON of a schema, over HTTP.

    python bench/extraction.py MODEL [--texts 30] [--seed 0] [--json FILE]

A seed draws texts of three kinds, with people, orders and bookings, from tables of sentences and values, so what is
right is known. The question is the one of a client that relies on the server: it names no key. Each text is asked
without the schema in the prompt, and with it (``schema_in_prompt``). A field is right if its value is the expected one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import urllib.request
from pathlib import Path
from typing import Any

from figures import Figures, add_json_option
from machine import describe
from servers import Server

QUESTION = "Extract the information from this text.\n\n"
MAX_TOKENS = 200
NAMES = ("Anna Berg", "Tom Hill", "Li Wei", "Maria Rossi", "John Okafor", "Emma Novak", "Omar Haddad", "Ines Costa")
CITIES = ("Oslo", "Lisbon", "Kyoto", "Nairobi", "Toronto", "Vienna")
JOBS = ("nurse", "teacher", "pilot", "baker", "lawyer", "plumber")
SHOPS = ("Nordlicht GmbH", "Casa Verde", "Blue Harbor Books", "Atlas Tools", "Petit Four", "Kiwi Bikes")
GOODS = ("lamps", "notebooks", "chairs", "bottles", "helmets", "cables")
MONTHS = ("January", "March", "May", "June", "September", "November")
MONTH_NUMBERS = {"January": 1, "March": 3, "May": 5, "June": 6, "September": 9, "November": 11}
CURRENCIES = {"euros": "EUR", "US dollars": "USD", "pounds": "GBP"}
DATE = {"type": "string", "format": "date"}


def person(rng: random.Random) -> tuple[str, Any]:
    """A text about two or three people, and what is right."""
    people = [
        {"name": name, "age": rng.randint(19, 80), "city": rng.choice(CITIES), "job": rng.choice(JOBS)}
        for name in rng.sample(NAMES, rng.randint(2, 3))
    ]
    ways = ("{name} is a {job} of {age} from {city}.", "{name}, {age}, works in {city} as a {job}.")
    return " ".join(rng.choice(ways).format(**one) for one in people), {"users": people}


def order(rng: random.Random) -> tuple[str, Any]:
    month, day, money = rng.choice(MONTHS), rng.randint(1, 28), rng.choice([*CURRENCIES])
    said = {"vendor": rng.choice(SHOPS), "item": rng.choice(GOODS), "quantity": rng.randint(2, 40)}
    total = rng.randint(20, 900) + 0.5
    ways = (
        "On {day} {month} 2025 we bought {quantity} {item} from {vendor} for {total} {money}.",
        "{vendor} sent {quantity} {item}. The bill of {month} {day}, 2025 is about {total} {money}.",
    )
    text = rng.choice(ways).format(**said, day=day, month=month, total=f"{total:.2f}", money=money)
    date = f"2025-{MONTH_NUMBERS[month]:02}-{day:02}"
    return text, {**said, "date": date, "total": total, "currency": CURRENCIES[money]}


def booking(rng: random.Random) -> tuple[str, Any]:
    guests, nights, month = rng.sample(NAMES, 2), rng.randint(2, 9), rng.choice(MONTHS)
    city, day, breakfast = rng.choice(CITIES), rng.randint(1, 28), rng.random() < 0.5
    wish = "Breakfast is included." if breakfast else "They want no breakfast."
    text = f"{guests[0]} and {guests[1]} stay in {city} for {nights} nights from {month} {day}, 2026. {wish}"
    arrival = f"2026-{MONTH_NUMBERS[month]:02}-{day:02}"
    return text, {"guests": guests, "city": city, "arrival": arrival, "nights": nights, "breakfast": breakfast}


def schema(value: Any, name: str = "") -> dict[str, Any]:
    """The schema of a value, as pydantic makes one of a class."""
    if isinstance(value, dict):
        properties = {key: schema(one, key) for key, one in value.items()}
        return {"type": "object", "properties": properties, "required": [*value], "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "items": schema(value[0])}
    if name in ("date", "arrival"):
        return DATE
    if name == "currency":
        return {"enum": [*CURRENCIES.values()]}
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[type(value)]}


def fields(value: Any, place: str = "") -> dict[str, Any]:
    """The plain values by their places."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if pairs is None:
        return {place: value}
    return {name: one for key, part in pairs for name, one in fields(part, f"{place}/{key}").items()}


def extracted(port: int, text: str, of: dict[str, Any], in_prompt: bool) -> dict[str, Any]:
    """The fields that the model reads out of a text; none if the answer was cut."""
    form = {"type": "json_schema", "json_schema": {"name": "extraction", "schema": of}}
    body = {"messages": [{"role": "user", "content": QUESTION + text}], "response_format": form, "temperature": 0}
    body |= {"max_tokens": MAX_TOKENS, "schema_in_prompt": in_prompt}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        (choice,) = json.load(answer)["choices"]
    return fields(json.loads(choice["message"]["content"])) if choice["is_complete"] else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures, rng = Figures.of_this_run(), random.Random(given.seed)
    drawn = [(person, order, booking)[number % 3](rng) for number in range(given.texts)]
    server = Server(
        "specbeam", [sys.executable, "-m", "specbeam", "serve", "--model", f"model={given.model}"], "", os.environ
    )
    shares: dict[bool, list[float]] = {False: [], True: []}
    try:
        server.start()
        with server.running():
            for text, value in drawn:
                expected = fields(value)
                for in_prompt, found in shares.items():
                    made = extracted(server.port, text, schema(value), in_prompt)
                    found.append(sum(made.get(name) == one for name, one in expected.items()) / len(expected))
                    print(f"{in_prompt}: {found[-1]:.2f} of {text}", file=sys.stderr)
    finally:
        server.end()
    print("| schema in the prompt | fields, of each text | texts without a mistake |\n| --- | --- | --- |")
    for in_prompt, found in shares.items():
        name = "yes" if in_prompt else "no"
        share = figures.add(
            given.model.stem, name, "fields", unit="share", samples=found, value=sum(found) / len(found)
        )
        print(f"| {name} | {share.value:.2f} | {sum(one == 1 for one in found)} of {len(found)} |")
    figures.write(given.json)


if __name__ == "__main__":
    main()
