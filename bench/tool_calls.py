"""The share of tool calls that are right, and the passes that they take, over HTTP.

    python bench/tool_calls.py MODEL FOLDER [--calls 50] [--seed 0] [--json FILE]

FOLDER is the data of the Berkeley Function Calling Leaderboard, in the package bfcl-eval (``bfcl_eval/data``). A seed
draws questions of its categories simple, multiple and parallel, in equal parts. Their types become JSON Schema, and the
dots of their names underscores, as its programs do for OpenAI's models. An answer is right if its calls are the
expected ones in any order: each has the function's name, all required arguments, and only values that the data lists.
Texts are compared as the leaderboard does: without case, spaces and some punctuation. "Named" gives the name of the
first function that is expected, so an answer has one call. Methods with "ngram" draft by lookups.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

from figures import Figures, add_json_option
from machine import describe
from servers import Server

CATEGORIES = ("simple_python", "multiple", "parallel")
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
METHODS: dict[str, dict[str, Any]] = {
    "auto, greedy": {},
    "auto, 4 beams": {"num_beams": 4},
    "required, greedy": {"tool_choice": "required"},
    "required, 4 beams": {"tool_choice": "required", "num_beams": 4},
    "required, one call": {"tool_choice": "required", "parallel_tool_calls": False},
    "named, greedy": {"tool_choice": "named"},
}
METHODS |= {f"{name}, ngram": {**how, "draft": "ngram"} for name, how in METHODS.items() if "num_beams" not in how}
MAX_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    drawn = questions(given.folder, given.calls, given.seed)
    command = [sys.executable, "-m", "specbeam", "serve", "--model", f"model={given.model}"]
    server = Server("specbeam", command, "", os.environ)
    right: dict[str, list[float]] = {method: [] for method in given.methods}
    steps: dict[str, list[float]] = {method: [] for method in given.methods}
    try:
        server.start()
        with server.running():
            for number, (category, question) in enumerate(drawn):
                for method in right:
                    answer = asked(server.port, question, METHODS[method])
                    calls = answer["choices"][0]["message"].get("tool_calls", [])
                    right[method].append(float(is_right(calls, question)))
                    tokens = answer["usage"]["completion_tokens"]
                    steps[method].append(tokens / answer["specbeam"]["target_passes"])
                so_far = ", ".join(f"{method}: {sum(found):.0f}" for method, found in right.items())
                print(f"{number + 1} of {len(drawn)} ({category}); right so far: {so_far}", file=sys.stderr)
    finally:
        server.end()
    print(f"{given.model.stem}, {len(drawn)} questions\n")
    print("| method | " + " | ".join(CATEGORIES) + " | all | tokens per pass |")
    print("| --- |" + " --- |" * (len(CATEGORIES) + 2))
    for method, found in right.items():
        parts = [[one for one, (name, _) in zip(found, drawn, strict=True) if name == part] for part in CATEGORIES]
        cells = [f"{sum(part):.0f} of {len(part)}" for part in [*parts, found]]
        rate = figures.add(given.model.stem, method, "tokens per pass", unit="tokens/pass", samples=steps[method])
        figures.add(given.model.stem, method, "right", unit="share", samples=found, value=sum(found) / len(found))
        print(f"| {method} | {' | '.join(cells)} | {rate.value:.2f} ({rate.min:.2f} to {rate.max:.2f}) |")
    figures.write(given.json)


def questions(folder: Path, number: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Questions of each category in equal parts, with the answers that are right, in an order drawn by the seed."""
    rng, found = random.Random(seed), []
    for place, category in enumerate(CATEGORIES):
        asked, right = (
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            for path in (folder / f"BFCL_v4_{category}.json", folder / "possible_answer" / f"BFCL_v4_{category}.json")
        )
        share = (number + len(CATEGORIES) - 1 - place) // len(CATEGORIES)
        pairs = zip(asked, right, strict=True)
        found += [(category, question | answer) for question, answer in rng.sample([*pairs], share)]
    rng.shuffle(found)
    return found


def asked(port: int, question: dict[str, Any], how: dict[str, Any]) -> Any:
    """The server's answer to a question."""
    tools = [
        {"type": "function", "function": one | {"name": named(one["name"]), "parameters": schema(one["parameters"])}}
        for one in question["function"]
    ]
    if how.get("tool_choice") == "named":
        name = named(next(iter(question["ground_truth"][0])))
        how = how | {"tool_choice": {"type": "function", "function": {"name": name}}}
    (messages,) = question["question"]
    body = {"messages": messages, "tools": tools, "max_tokens": MAX_TOKENS, "temperature": 0, **how}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def named(name: str) -> str:
    return name.replace(".", "_")


def schema(given: Any) -> Any:
    """A description of the data's as JSON Schema."""
    if not isinstance(given, dict):
        return given
    made = {name: schema(value) for name, value in given.items()}
    if isinstance(kind := given.get("type"), str):
        made["type"] = TYPES.get(kind, kind)
        if kind == "any":
            del made["type"]
    return made


def is_right(calls: list[dict[str, Any]], question: dict[str, Any]) -> bool:
    """Whether calls are the expected ones, in any order."""
    required = {named(one["name"]): one["parameters"].get("required", []) for one in question["function"]}
    left = [*question["ground_truth"]]
    for call in calls:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            return False
        for expected in left:
            ((name, values),) = expected.items()
            if named(name) == function["name"] and agrees(arguments, values, required[function["name"]]):
                left.remove(expected)
                break
        else:
            return False
    return not left


def agrees(arguments: dict[str, Any], expected: dict[str, list[Any]], required: list[str]) -> bool:
    """Whether arguments have only values that are listed, and lack only what may be left out."""
    if any(name not in expected or plain(value) not in map(plain, expected[name]) for name, value in arguments.items()):
        return False
    left_out = expected.keys() - arguments.keys()
    return not left_out & {*required} and all("" in expected[name] for name in left_out)


def plain(value: Any) -> Any:
    """A value as it is compared."""
    if isinstance(value, str):
        return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"')
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value


if __name__ == "__main__":
    main()
