"""The differential run: a case gives the same line each time, and a changed line is found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import draw_case, write_models

DIFFERENTIAL = Path(__file__).parent.parent / "bench/differential.py"


def differential(*arguments):
    run = subprocess.run([sys.executable, DIFFERENTIAL, *arguments], capture_output=True, text=True, timeout=300)
    return run.returncode, run.stdout, run.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The same 20 cases, recorded in one run, and in two runs. The first of these was stopped."""
    folder = tmp_path_factory.mktemp("recorded")
    write_models(models := folder / "models")
    cases = ["record", "--cases", "20", "--seed", "2", "--models", str(models)]
    one, two = folder / "one.jsonl", folder / "two.jsonl"
    status, out, errors = differential(*cases, "--out", str(one))
    assert status == 0, errors
    assert "method beams" in out
    whole = one.read_text().splitlines(keepends=True)
    two.write_text("".join(whole[:8]) + whole[8][:50])  # it was stopped within a line
    status, _, errors = differential(*cases, "--out", str(two))
    assert status == 0, errors
    return one, two


def test_a_case_gives_the_same_line_twice(recorded):
    one, two = recorded
    assert one.read_text() == two.read_text()
    assert len(one.read_text().splitlines()) == 21
    assert differential("compare", str(one), str(two))[:2] == (0, "20 of 20 cases are equal\n")


def test_a_difference_is_one_readable_line(recorded, tmp_path):
    one, _ = recorded
    head, *lines = one.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"score"' in line)
    line = json.loads(lines[number])
    outcome = next(o for o in line["outcome"] if "score" in o.get("sequences", [{}])[0])
    outcome["sequences"][0]["score"] = (-1.5).hex()
    lines[number] = json.dumps(line)
    (changed := tmp_path / "changed.jsonl").write_text("\n".join([head, *lines, ""]))
    status, out, _ = differential("compare", str(one), str(changed))
    difference, summary = out.splitlines()
    assert (status, summary) == (1, "19 of 20 cases are equal")
    assert difference.startswith(f"case 2 {number}: ")
    assert "score was " in difference
    assert difference.endswith("is -1.5 (-0x1.8000000000000p+0)")


def test_cases_are_plain_data_of_every_kind():
    cases = [draw_case(0, index) for index in range(300)]
    assert json.loads(json.dumps(cases)) == cases
    requests = [one for case in cases for one in case["requests"]]
    assert {one["kind"] for one in requests} == {"greedy", "sample", "samples", "beams", "drawn", "groups"}
    assert {limit for one in requests for limit in one.get("limit", ())} == {"trie", "walk", "prefix", "processor"}
    drafts = {(one["draft"] or "none").split(" of ")[0] for one in requests}
    assert drafts == {"none", "ngram", "suffix", "automaton", "sibling", "itself", "other vocabulary"}
