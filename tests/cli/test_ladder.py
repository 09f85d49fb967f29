"""``specbeam ladder``: the table, the JSON, and the answers to wrong input."""

import json
import signal

import pytest
import torch

import specbeam
from specbeam import ladder
from specbeam.cli import ladder as command


@pytest.fixture
def run(folder, specbeam_command, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", refuse)
    return lambda *words, model=folder: specbeam_command("ladder", *words, "--device", "cpu", "--model", model)


def rows(out):
    """The lines of the table, by the number of the rung."""
    return {line[0]: line for line in out.splitlines() if line[:1].isdigit() and " parts from " not in line}


def test_the_table_has_a_row_per_rung_with_the_reason_of_a_failure(run, folder):
    status, out, err = run("hello", "--max-new-tokens", "4", "--runs", "2")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= command.LINE_WIDTH
    assert lines[0] == "prompt: hello"
    assert lines[1].startswith("cpu, torch backend, float32, ")
    assert lines[1].endswith(", n=2 runs")
    assert " ".join(lines[3].split()) == "rung seconds (min to max) tokens/s speed-up passes compile s GB identical"
    table = rows(out)
    assert [*table] == [str(number) for number in ladder.RUNGS] == ["1", "2", "3", "4", "5"]
    assert table["2"] == "2 no cache, compiled  failed: RuntimeError: no compiler here"
    assert table["4"].endswith("failed: RuntimeError: no compiler here")
    expected = specbeam.generate(specbeam.load(folder, dtype="float32", device="cpu"), "hello", max_new_tokens=4)
    assert table["1"].split()[-5:-3] == ["1.00", str(len(expected.token_ids))]
    assert [table[n].split()[-1] for n in "135"] == ["-", "yes", "yes"]
    assert out.split()[-1] == expected.text.split()[-1]


@pytest.mark.parametrize(
    ("some", "others", "mark"),
    [
        ((1.0, 1.1), (2.0, 2.2), ""),
        ((2.0, 2.2), (1.0, 1.1), ""),
        ((1.0, 2.1), (2.0, 2.2), "~"),
        ((1.0,), (2.0,), "~"),
    ],
)
def test_a_speed_up_that_is_not_settled_is_marked(some, others, mark):
    first = ladder.Rung(1, "cpu", "torch", "float32", token_ids=(1,), seconds=others, passes=1)
    rung = ladder.Rung(3, "cpu", "torch", "float32", token_ids=(1,), seconds=some, passes=1)
    line = command.row(rung, [first, rung])
    assert f" {mark}{first.median / rung.median:.2f} " in line
    assert ("not settled" in " ".join(command.verdict([first, rung]))) == bool(mark)


def test_json_is_one_object_and_nothing_else(run, folder):
    asked = ["--json", "--rungs", "5, 1,2", "--runs", "2", "--max-new-tokens", "3", "--raw"]
    status, out, err = run("hi", *asked)
    assert (status, err) == (0, "")
    got = json.loads(out, parse_constant=pytest.fail)
    assert list(got) == ["model", "prompt", "torch", "rungs"]
    assert (got["model"], got["prompt"]) == (folder, "hi")
    first, compiled, engine = got["rungs"]
    expected = specbeam.generate(specbeam.load(folder, dtype="float32", device="cpu"), "hi", raw=True, max_new_tokens=3)
    assert [rung["number"] for rung in got["rungs"]] == [1, 2, 5]
    assert [rung["name"] for rung in got["rungs"]] == ["no cache", "no cache, compiled", "engine"]
    for rung in (first, engine):
        assert rung["token_ids"] == expected.token_ids
        assert (rung["text"], rung["prompt_tokens"], rung["passes"]) == (expected.text, 2, 3)
        assert len(rung["seconds"]) == 2
        assert rung["failure"] is None
    assert (first["identical"], engine["identical"]) == (None, True)
    assert (compiled["failure"], compiled["token_ids"]) == ("RuntimeError: no compiler here", [])


def test_a_difference_is_reported_and_fails_unless_rounding_can_do_it(run, monkeypatch):
    def wrong(model, reader, cache, prompt, length):
        yield from range(length - len(prompt))

    monkeypatch.setattr(ladder, "kv_cache", wrong)
    arguments = ("hi", "--rungs", "1,3", "--runs", "1", "--max-new-tokens", "3")
    status, out, _ = run(*arguments)
    assert status == 1
    assert rows(out)["3"].endswith(" differs")
    assert "\n3 KV cache parts from 1 no cache at new token 0, where the two tokens' logits lie " in out
    assert ": rounding does not do that\n" in out
    monkeypatch.setitem(ladder.NEAR_TIE, "float32", 1e9)
    status, out, _ = run(*arguments)
    assert status == 0
    assert rows(out)["3"].endswith(" near-tie")
    assert "rounding can do that" in out


def test_if_no_rung_works_it_fails(run):
    """Without a prompt it uses its own."""
    status, out, _ = run("--rungs", "2,4", "--runs", "1", "--max-new-tokens", "3")
    assert status == 1
    assert out.startswith(f"prompt: {command.DEFAULT_PROMPT}\n")
    assert [*rows(out)] == ["2", "4"]


def test_a_device_that_cannot_load_the_model_has_rows_too(run, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("1 TB")

    monkeypatch.setattr(command, "load_model", full)
    status, out, err = run("hi", "--rungs", "1,3")
    assert (status, err) == (1, "")
    assert [line.split("failed: ")[1] for line in rows(out).values()] == ["out of memory"] * 2


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_ctrl_c_keeps_the_finished_rungs(run, monkeypatch, form):
    def endless(*_):
        signal.raise_signal(signal.SIGINT)
        while True:
            yield 1

    monkeypatch.setattr(ladder, "kv_cache", endless)
    status, out, err = run("hi", "--rungs", "1,3", "--runs", "1", "--max-new-tokens", "3", *form)
    assert status == 130
    left = "1 of 2 rungs are finished; for the others give --device cpu --rungs 3"
    assert err == f"specbeam: interrupted: {left}\n"
    if form:
        assert [rung["number"] for rung in json.loads(out)["rungs"]] == [1]
    else:
        assert [*rows(out)] == ["1"]
