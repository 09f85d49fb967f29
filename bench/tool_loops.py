"""How loops of tool calls end, over HTTP: with a right answer, another text, an empty one, or never.

    python bench/tool_loops.py MODEL [--json FILE]

A loop sends a task and five tools, makes the calls that come, and gives their results back, until an answer has no
calls, or for 10 answers. The tasks need one to three calls. An answer is right if it has all the texts that the results
make necessary.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from figures import Figures, add_json_option
from machine import describe
from servers import Server

MAX_ANSWERS, MAX_TOKENS = 10, 200
WEATHER = {"paris": "18 degrees, cloudy", "oslo": "4 degrees, rain", "rome": "27 degrees, sunny"}
WEATHER |= {"tokyo": "22 degrees, windy", "cairo": "35 degrees, sunny"}
TIMES = {"paris": "14:05", "oslo": "14:05", "tokyo": "21:05", "new york": "08:05"}
PEOPLE = {"anna berg": "anna.berg@example.com", "tom hill": "t.hill@example.com", "li wei": "li@example.org"}
STOCK = {"a-100": "42", "b-200": "0", "c-300": "7"}
SUMS = {"37*43": "1591", "12*12": "144", "1000-1": "999", "42*3": "126", "3*42": "126"}
TOOLS = {
    "get_weather": ("The current weather in a city.", "city", WEATHER),
    "get_time": ("The local time in a city.", "city", TIMES),
    "calculator": ("Compute an arithmetic expression, such as 3 * (4 + 5).", "expression", SUMS),
    "find_email": ("The e-mail address of a person.", "name", PEOPLE),
    "stock": ("How many pieces of an item are in stock.", "item", STOCK),
}
TASKS = {
    "What is the weather in Paris?": ["18"],
    "What time is it in Tokyo?": ["21:05"],
    "What is 37 * 43?": ["1591"],
    "What is the e-mail address of Anna Berg?": ["anna.berg@example.com"],
    "How many pieces of A-100 are in stock?": ["42"],
    "Do I need an umbrella in Oslo?": ["rain|yes"],
    "Is it warm in Cairo?": ["35|yes"],
    "Is B-200 available?": ["0|no"],
    "What is the weather in Rome, and in Oslo?": ["27", "4"],
    "What time is it in Paris and in New York?": ["14:05", "8:05"],
    "Give me the e-mail addresses of Tom Hill and Li Wei.": ["t.hill@example.com", "li@example.org"],
    "How many pieces of A-100 and of C-300 are in stock?": ["42", "7"],
    "What is the weather in Tokyo, and what time is it there?": ["22", "21:05"],
    "What is 12 * 12, and what is 1000 - 1?": ["144", "999"],
    "Compare the weather in Paris, Rome and Cairo.": ["18", "27", "35"],
    "How many pieces of A-100, B-200 and C-300 are in stock?": ["42", "0", "7"],
    "One piece of A-100 costs 3 euros. What are all the pieces in stock worth?": ["126"],
    "What is the e-mail address of Li Wei, and what is the weather in Rome?": ["li@example.org", "27"],
}
"""The tasks, and what their answers must have: one of the texts between the bars."""


def definition(name: str) -> dict[str, Any]:
    """A tool, in OpenAI's form."""
    description, key, _ = TOOLS[name]
    parameters: dict[str, Any] = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    parameters["additionalProperties"] = False
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def result(call: dict[str, Any]) -> str:
    """What a call gives."""
    _, key, table = TOOLS[call["name"]]
    try:
        value = str(json.loads(call["arguments"])[key]).lower().split(",")[0].strip()
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {error}"
    return table.get(value.replace(" ", "") if table is SUMS else value, f"error: there is no {key} {value}")


def ended(port: int, task: str, texts: list[str]) -> tuple[str, int]:
    """How a loop ends, and with how many answers."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    for number in range(1, MAX_ANSWERS + 1):
        body = {"messages": messages, "tools": [*map(definition, TOOLS)], "max_tokens": MAX_TOKENS, "temperature": 0}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            message = json.load(answer)["choices"][0]["message"]
        messages.append(message)
        for call in message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result(call["function"])})
        if "tool_calls" not in message:
            said = message["content"].lower()
            is_right = all(any(one in said for one in text.split("|")) for text in texts)
            return "right" if is_right else "another text" if said.strip() else "empty", number
    return "endless", MAX_ANSWERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures, found = Figures.of_this_run(), list[tuple[str, int]]()
    command = [sys.executable, "-m", "specbeam", "serve", "--model", f"model={given.model}"]
    server = Server("specbeam", command, "", os.environ)
    try:
        server.start()
        with server.running():
            for task, texts in TASKS.items():
                found.append(ended(server.port, task, texts))
                print(f"{found[-1]}: {task}", file=sys.stderr)
    finally:
        server.end()
    samples = [float(number) for _, number in found]
    figures.add(given.model.stem, "loop", "answers", unit="answers", samples=samples)
    figures.write(given.json)
    print(f"{given.model.stem}, {len(found)} loops: {dict(Counter(end for end, _ in found))}")


if __name__ == "__main__":
    main()
