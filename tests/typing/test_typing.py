"""Type checkers see the public interface as it is: two of them read examples, and object to the marked lines alone."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import specbeam
from specbeam import Options
from specbeam.keywords import OptionKeywords
from tests.conftest import needs_torch

HERE = Path(__file__).parent
EXAMPLES = HERE / "examples.py"
SOURCES = str(Path(specbeam.__file__).parents[1])
LINES = EXAMPLES.read_text(encoding="utf-8").splitlines()
MARKED = {number for number, line in enumerate(LINES, 1) if line.endswith("# error")}


def run(*command):
    variables = {**os.environ, "PYTHONPATH": SOURCES, "MYPYPATH": f"{HERE / 'stubs'}{os.pathsep}{SOURCES}"}
    return subprocess.run([sys.executable, "-m", *command], cwd=HERE, env=variables, capture_output=True, text=True)


def test_mypy_objects_to_the_marked_lines_alone(tmp_path):
    ran = run("mypy", "--strict", "--config-file=", "--follow-imports=silent", f"--cache-dir={tmp_path}", EXAMPLES.name)
    lines = re.findall(rf"^{re.escape(EXAMPLES.name)}:(\d+): error", ran.stdout, re.MULTILINE)
    assert {int(line) for line in lines} == MARKED, ran.stdout + ran.stderr


@needs_torch
def test_pyright_objects_to_the_marked_lines_alone():
    ran = run("basedpyright", "--level", "error", "--pythonpath", sys.executable, "--outputjson", EXAMPLES.name)
    found = json.loads(ran.stdout)["generalDiagnostics"]
    assert {one["range"]["start"]["line"] + 1 for one in found} == MARKED, found


def test_the_keywords_are_the_options():
    """Names and types. Options that accept several forms are Any there, since they store one form."""
    options, keywords = get_type_hints(Options), get_type_hints(OptionKeywords)
    assert [*keywords] == [*options]
    assert [name for name in options if options[name] not in (Any, keywords[name])] == []
