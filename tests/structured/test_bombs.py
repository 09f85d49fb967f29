"""The compilation of any description ends within limits, and with its request."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from specbeam import JsonSchema, SpecbeamError
from specbeam.structured import trials
from specbeam.system import child_processes
from tests.structured import bombs

MOST_BOMBS = 100


def fan(levels, keyword, leaf):
    """Ten references to the next level on each level."""
    parts = [{keyword: [{"$ref": f"#/$defs/l{level + 1}"}] * 10} for level in range(levels)]
    return {"$ref": "#/$defs/l0", "$defs": {f"l{i}": one for i, one in enumerate([*parts, leaf])}}


FANS = [
    {"json_schema": {"schema": fan(levels, keyword, leaf)}}
    for levels, keyword, leaf in ((7, "allOf", {"const": "a"}), (12, "allOf", {"const": "a"}), (12, "anyOf", {}))
]


def test_bombs_end_in_bounded_time_and_memory():
    number = min(MOST_BOMBS, settings().max_examples)
    drawn = [*FANS, *(bombs.bomb(random.Random(seed)) for seed in range(number))]
    lines = "".join(json.dumps(one) + "\n" for one in drawn)
    done = subprocess.run(
        [sys.executable, bombs.__file__], input=lines, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    said = [*map(json.loads, done.stdout.splitlines())]
    assert (len(said), done.returncode) == (len(drawn), 0), (drawn[len(said) : len(said) + 1], done.stderr)
    assert all(one is None or (one.startswith("the ") and len(one) <= 600) for one in said)
    assert {one for one in said[: len(FANS)] if one} >= {
        "the JSON schema takes too much memory to compile: use fewer or smaller parts"
    }


def test_a_compilation_that_nobody_waits_for_never_starts(monkeypatch):
    asked = []
    monkeypatch.setattr(trials._worker, "_running", lambda: asked.append(1))
    with child_processes.wanted_while(lambda: False), pytest.raises(SpecbeamError, match="nobody waits"):
        JsonSchema({"const": "a text that no other test compiles"})
    assert not asked


def test_a_compilation_ends_with_its_request(tmp_path):
    program = tmp_path / "never.py"
    program.write_text("import sys\nsys.stdin.read()")
    worker, looks = child_processes.Worker(str(program)), iter([True, True])
    with child_processes.wanted_while(lambda: next(looks, False)), pytest.raises(SpecbeamError, match="nobody waits"):
        worker.ask(b"a task without an end\n")
    assert worker._process is None
    worker.end()
