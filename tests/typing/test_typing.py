"""Type checkers see the public interface as it is: they object to the marked lines of some examples alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import specbeam
from specbeam import Options
from specbeam.options import keywords
from specbeam.options.keywords import OptionKeywords
from specbeam.options.surfaces import with_keywords
from tests.conftest import needs_torch

HERE = Path(__file__).parent
EXAMPLES = HERE / "examples.py"
SOURCES = str(Path(specbeam.__file__).parents[1])
LINES = EXAMPLES.read_text(encoding="utf-8").splitlines()
MARK = "  # type: ignore"
MARKED = {number for number, line in enumerate(LINES, 1) if line.endswith(MARK)}


@needs_torch
def test_pyright_objects_to_the_marked_lines_alone(tmp_path):
    examples = tmp_path / EXAMPLES.name
    examples.write_text("\n".join(line.removesuffix(MARK) for line in LINES))
    command = ["basedpyright", "--level", "error", "--pythonpath", sys.executable, "--outputjson", examples.name]
    variables = {**os.environ, "PYTHONPATH": SOURCES}
    ran = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, env=variables, capture_output=True, text=True)
    found = json.loads(ran.stdout)["generalDiagnostics"]
    assert {one["range"]["start"]["line"] + 1 for one in found} == MARKED, found


def test_the_keywords_are_the_options():
    """Names and types. Options that accept several forms are Any there, since they store one form."""
    options, accepted = get_type_hints(Options), get_type_hints(OptionKeywords)
    assert [*accepted] == [*options]
    assert [name for name in options if options[name] not in (Any, accepted[name])] == []


def test_the_keywords_are_as_python_m_specbeam_options_writes_them():
    written = Path(keywords.__file__).read_text(encoding="utf-8")
    assert with_keywords(written) == written
