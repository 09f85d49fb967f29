"""The differential run: a case gives the same line each time, and a changed line is found."""

import argparse
import json
import math
import subprocess
import sys

from tests import differential
from tests.cases import draw_case, write_models
from tests.conftest import needs_torch


def record(out, models, cases=10):
    """Record cases in this process."""
    how = {"cases": cases, "seed": 2, "first": 0, "model": None, "seconds": math.inf}
    return differential.run_record(argparse.Namespace(out=str(out), models=models, **how))


def compare(old, new, capfd):
    capfd.readouterr()
    status = differential.run_compare(argparse.Namespace(old=old, new=new))
    return status, capfd.readouterr().out.splitlines()


@needs_torch
def test_a_case_gives_the_same_line_in_another_process_and_a_difference_is_one_line(tmp_path, capfd):
    write_models(models := tmp_path / "models")
    one, two, changed = (tmp_path / f"{name}.jsonl" for name in ("one", "two", "changed"))
    options = ["--cases", "10", "--seed", "2", "--models", str(models), "--out", str(one)]
    command = [sys.executable, "-m", "tests.differential", "record", *options]
    done = subprocess.run(command, cwd=differential.ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "method beams" in done.stdout
    whole = one.read_text().splitlines(keepends=True)
    two.write_text("".join(whole[:8]) + whole[8][:50])  # a run that was stopped within a line goes on
    assert record(two, models) == 0
    assert two.read_text() == one.read_text()
    assert len(whole) == 11
    assert compare(one, two, capfd) == (0, ["10 of 10 cases are equal"])

    head, *lines = one.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"score"' in line)
    line = json.loads(lines[number])
    outcome = next(o for o in line["outcome"] if "score" in o.get("sequences", [{}])[0])
    outcome["sequences"][0]["score"] = (-1.5).hex()
    lines[number] = json.dumps(line)
    changed.write_text("\n".join([head, *lines, ""]))
    status, (difference, summary) = compare(one, changed, capfd)
    assert (status, summary) == (1, "9 of 10 cases are equal")
    assert difference.startswith(f"case 2 {number}: ")
    assert "score was " in difference
    assert difference.endswith("is -1.5 (-0x1.8000000000000p+0)")


def test_cases_are_plain_data_of_every_kind():
    cases = [draw_case(0, index) for index in range(300)]
    assert json.loads(json.dumps(cases)) == cases
    requests = [one for case in cases for one in case["requests"]]
    assert {one["kind"] for one in requests} == {"greedy", "sample", "samples", "beams", "drawn", "groups"}
    assert {how for one in requests if (how := one.get("fails"))} == {"interrupt", "error", "not finite"}
    assert any("goes_on" in one for one in requests)
    limits = {limit for one in requests for limit in one.get("limit", ())}
    assert limits == {"trie", "walk", "few", "prefix", "processor"}
    drafts = {(one["draft"] or "none").split(" of ")[0] for one in requests}
    assert drafts == {"none", "ngram", "suffix", "automaton", "sibling", "itself", "other vocabulary"}
