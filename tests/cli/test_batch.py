"""The command for many rows: its files, how it goes on where it was interrupted, and how it says no."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tracemalloc
from functools import partial

import pytest

import specbeam
from specbeam.cli import batch
from specbeam.cli.rows import BATCHES_PER_JOB
from specbeam.jobs import formats
from specbeam.jobs.finished import FinishedRows
from tests.conftest import random_model
from tests.jobs.faults import crashes

pytest.importorskip("pyarrow")
import pyarrow as pa
import pyarrow.parquet as pq

PROMPTS = ["hi", "hello hello", "x", "why is the sky blue?", "one\ntwo", "ö", 'a, "b"', "3", "0", "last"]
NOT_FETCHED = "not/there"
"""A hub id. It is not looked up before a model is loaded."""
PART = "out.jsonl.partial.jsonl"
NEW = ["text", "finish_reason", "new_tokens", "seconds", "error"]


@pytest.fixture
def run(folder, specbeam_command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specbeam.jobs.progress.SECONDS_PER_LINE", float("inf"))  # on a slow machine, too

    def run(*arguments, model=folder):
        status, out, err = specbeam_command("batch", *map(str, arguments), "--model", model)
        assert out == ""
        return status, re.sub(r"^\[.*\]\n", "", err, flags=re.MULTILINE)  # without the summary

    return run


@pytest.fixture
def ten(run, tmp_path):
    """Runs the command from in.jsonl, which has ten rows, into out.jsonl: three jobs, of short texts."""
    write(tmp_path / "in.jsonl", numbered())
    few = ("--batch-size", 1, "--max-new-tokens", 2)
    return lambda *more, **model: run("in.jsonl", "out.jsonl", *few, *more, **model)


@pytest.fixture
def before_jobs(monkeypatch):
    """Calls a function before the first of the answers that are kept together."""
    generate = batch.generate

    def acting(act, *how):
        for number, answer in enumerate(generate(*how)):
            if number % (BATCHES_PER_JOB * how[4].batch_size) == 0:
                act()
            yield answer

    return lambda act: monkeypatch.setattr(batch, "generate", partial(acting, act))


@pytest.fixture
def interrupted(ten, before_jobs):
    """A run of ten rows that is stopped after its first job."""

    def interrupted(*more, command=ten, **model):
        jobs = iter([1])

        def stop():
            if next(jobs, None) is None:
                raise KeyboardInterrupt

        before_jobs(stop)
        status, err = command(*more, **model)
        before_jobs(lambda: None)
        assert status == 130
        assert err.startswith(f"specbeam: interrupted: {BATCHES_PER_JOB} of ")
        assert err.endswith(".partial.jsonl. The same command goes on from there\n")

    return interrupted


def assert_finished(folder):
    """Nothing but the input and all of its rows."""
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "out.jsonl"]
    rows = read(folder / "out.jsonl")
    assert [(row["prompt"], row["error"]) for row in rows] == [(prompt, None) for prompt in PROMPTS]


def write(path, rows, **parquet):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, **parquet)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader()
            writer.writerows(rows)


def read(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def numbered(prompts=PROMPTS):
    return [{"id": f"{number:03}", "prompt": prompt} for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("source", "into"), [("in.parquet", "out.jsonl"), ("in.jsonl", "out.parquet"), ("in.csv", "out.jsonl")]
)
def test_each_row_has_what_generate_gives_in_the_order_of_the_input(run, model, tmp_path, source, into):
    write(tmp_path / source, numbered())
    assert run(source, into, "--max-new-tokens", 9, "--batch-size", 2) == (0, "")
    rows = read(tmp_path / into)
    assert [{"id": row["id"], "prompt": row["prompt"]} for row in rows] == numbered()
    assert list(rows[0]) == ["id", "prompt", *NEW]
    for row, expected in zip(rows, specbeam.generate(model, PROMPTS, max_new_tokens=9), strict=True):
        assert row["text"] == expected.text
        assert (row["finish_reason"], row["new_tokens"]) == (expected.finish_reason, expected.stats.new_tokens)
        assert 0 < row["seconds"] < 60
        assert row["error"] is None
    assert [path.name for path in sorted(tmp_path.iterdir())] == sorted([source, into])


@pytest.mark.parametrize("into", ["out.jsonl", "out.parquet"])
def test_rows_say_whether_they_satisfy_a_constraint(run, tmp_path, into):
    write(tmp_path / "in.jsonl", numbered(["hi", "hello"]))
    several = ("--num-beams", 3, "--num-return-sequences", 2) if into == "out.parquet" else ()
    assert run("in.jsonl", into, "--regex", "[ab]{4}|c{9}", "--max-new-tokens", 5, *several) == (0, "")
    rows = read(tmp_path / into)
    assert [name for name in rows[0] if name in NEW or name == "is_complete"].index("is_complete") == 2
    for row in rows:
        assert row["is_complete"] == bool(re.fullmatch("[ab]{4}", row["text"]))
        for one in row.get("sequences", []):
            assert one["is_complete"] == bool(re.fullmatch("[ab]{4}", one["text"]))


def test_options_drafts_and_messages(run, model, tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    write(tmp_path / "in.jsonl", [{"messages": messages, "n": [1]}, {"messages": [104, 105], "extra": {"a": None}}])
    options = ["--num-beams", 3, "--max-new-tokens", 8, "--draft", "ngram", "--tokens"]
    assert run("in.jsonl", "out.jsonl", *options) == (0, "")
    rows = read(tmp_path / "out.jsonl")
    expected = specbeam.generate(model, [messages, [104, 105]], num_beams=3, max_new_tokens=8)
    assert [row["token_ids"] for row in rows] == [result.token_ids for result in expected]
    for row, own in zip(rows, ("n", "extra"), strict=True):
        assert [name for name in row if name not in NEW] == ["messages", own, "token_ids"]


def test_the_column_is_found_or_named(run, tmp_path):
    few = ("--max-new-tokens", 2)
    write(tmp_path / "a.jsonl", [{"text": "hi", "n": 1}])
    says = "specbeam: a.jsonl has a column text, so the new text is in the column generated_text\n"
    assert run("a.jsonl", "a.out.jsonl", *few) == (0, says)
    (row,) = read(tmp_path / "a.out.jsonl")
    assert row["text"] == "hi"  # the input's stays
    assert list(row) == ["text", "n", "generated_text", *NEW[1:]]
    write(tmp_path / "b.jsonl", [{"question": "hi", "max_new_tokens": 1}])
    kept = "the column max_new_tokens of b.jsonl is kept as data: options come from the command line, for all rows"
    assert run("b.jsonl", "b.out.parquet", "--column", "question", *few) == (0, f"specbeam: {kept}\n")
    (row,) = read(tmp_path / "b.out.parquet")
    assert (row["max_new_tokens"], row["new_tokens"]) == (1, 2)


@pytest.mark.parametrize(("source", "into"), [("in.csv", "out.parquet"), ("in.jsonl", "out.jsonl")])
def test_a_row_may_have_several_texts(run, model, tmp_path, source, into):
    write(tmp_path / source, numbered(["hi", "", "x"]))
    assert run(source, into, "--num-beams", 3, "--num-return-sequences", 2, "--max-new-tokens", 4)[0] == 1
    good, empty, other = read(tmp_path / into)
    assert list(good) == ["id", "prompt", "text", "sequences", *NEW[1:]]
    assert empty["sequences"] is None
    assert empty["error"] is not None
    for row in (good, other):
        expected = specbeam.generate(model, row["prompt"], num_beams=3, num_return_sequences=2, max_new_tokens=4)
        assert row["text"] == expected.text
        assert row["sequences"] == expected.to_dict()["sequences"]


def test_a_column_that_is_not_used_need_not_be_for_python(run, interrupted, tmp_path):
    far = pa.array([2**62] * len(PROMPTS), pa.timestamp("us"))
    table = pa.table({"prompt": PROMPTS, "far": far, "bytes": [b"\xff"] * len(PROMPTS)})
    pq.write_table(table, tmp_path / "in.parquet")
    few = ("in.parquet", "out.parquet", "--batch-size", 1, "--max-new-tokens", 2)
    interrupted(*few, command=run)
    assert run(*few) == (0, "")
    assert pq.read_table(tmp_path / "out.parquet").select(table.column_names).equals(table)
    refused = "specbeam: the column 'far' of in.parquet cannot be"
    says = f"{refused} in a .jsonl or .csv file (date value out of range): name OUT .parquet, or leave the column out\n"
    assert run("in.parquet", "out.jsonl", model=NOT_FETCHED) == (2, says)
    says = f"{refused} used: date value out of range\n"
    assert run("in.parquet", "other.parquet", "--column", "far", model=NOT_FETCHED) == (2, says)


def test_the_last_line_sums_up(specbeam_command, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [*numbered(), {"prompt": ""}])
    three = ("--max-new-tokens", "3", "--min-new-tokens", "3")
    status, _, err = specbeam_command("batch", "in.jsonl", "out.jsonl", *three, "--model", folder)
    assert status == 1
    summary = r"\[11 rows, 1 failed, 30 tokens, [\d.,]+ tokens/s, [\d.]+ s, in out\.jsonl\]"
    assert re.fullmatch(summary, err.splitlines()[-1])


@pytest.mark.parametrize("into", ["out.parquet", "out.jsonl"])
def test_a_row_that_fails_is_a_row_and_status_1(run, tmp_path, into):
    write(tmp_path / "in.jsonl", [{"prompt": "hi"}, {"n": 1}, {"prompt": ""}, {"prompt": "x" * 300}])
    status, err = run("in.jsonl", into, "--max-new-tokens", 3)
    assert status == 1
    assert err == "specbeam: 3 of 4 rows failed, first row 2: the row has no prompt\n"
    good, *bad = read(tmp_path / into)
    assert good["error"] is None
    for row, says in zip(bad, ["has no prompt", "prompt is empty", "prompt has 3"], strict=True):
        assert says in row["error"]
    assert {(row["text"], row["finish_reason"], row["new_tokens"], row["seconds"]) for row in bad} == {(None,) * 4}


@pytest.mark.parametrize("power", [False, True])
def test_whenever_the_process_ends_the_same_command_goes_on(run, model, tmp_path, monkeypatch, power):
    """The process ends, or the machine loses power, at each operation on the disk in turn."""
    monkeypatch.setattr(batch, "load_model", lambda *_, **__: model)
    write(tmp_path / "in.jsonl", numbered())

    def finish(name):
        three = ("--max-new-tokens", 3, "--min-new-tokens", 3, "--batch-size", 1)
        assert run("in.jsonl", f"{name}.jsonl", *three) == (0, "")

    finish("whole")
    whole = without_seconds(read(tmp_path / "whole.jsonl"))
    for crashed_at in crashes(finish, power):
        output, part = tmp_path / f"{crashed_at}.jsonl", tmp_path / f"{crashed_at}.jsonl.partial.jsonl"
        if not part.exists():  # all of it is there
            assert without_seconds(read(output)) == whole
            continue
        lines = part.read_bytes().split(b"\n")[1:-1]
        finish(crashed_at)
        assert not part.exists()
        rows = read(output)
        kept = {row["row"]: row["seconds"] for row in map(json.loads, lines)}
        assert {number: rows[number]["seconds"] for number in kept} == kept  # not generated a second time
        assert without_seconds(rows) == whole
    assert crashed_at >= 2 + 3 * 2 + 3  # the fingerprint, three jobs, and the output


def without_seconds(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_every_option_that_may_change_an_answer_belongs_to_a_run(ten, interrupted, tmp_path):
    peft = pytest.importorskip("peft")
    interrupted()
    before = (tmp_path / PART).read_bytes()
    assert before.count(b"\n") == 1 + BATCHES_PER_JOB
    tuned = peft.get_peft_model(random_model("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    tuned.save_pretrained(tmp_path / "adapter")
    changes = ["--max-new-tokens 5", "--tokens", "--raw", "--column id", "--adapter adapter", "--system Short."]
    for wrong in [*changes, "--draft ngram", "--quantize int4"]:
        status, err = ten(*wrong.split())
        assert status == 2, wrong
        assert err.startswith(f"specbeam: {PART} is of another run")
        assert err.endswith("or delete that file to begin anew\n")
    assert (tmp_path / PART).read_bytes() == before
    shutil.rmtree(tmp_path / "adapter")
    assert ten("--batch-size", 3, "--threads", 1) == (0, "")  # these make no difference
    assert_finished(tmp_path)


SOURCES = "m/model.safetensors m/config.json m/tokenizer.json m/chat_template.jinja d/model.safetensors c.txt"


@pytest.mark.parametrize("changed", SOURCES.split())
def test_a_source_of_the_same_name_with_another_content_is_another_run(ten, interrupted, tmp_path, folder, changed):
    """Of the model, of a draft model, and of a corpus."""
    for name in ("m", "d"):
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / "c.txt").write_text("hello hello\n")
    drafts = {"d": ["--draft", "./d"], "c": ["--draft", "suffix", "--draft-corpus", "c.txt"]}
    more = drafts.get(changed[0], [])
    interrupted(*more, model="./m")
    before = (tmp_path / changed).read_bytes()
    other = before[:-2] + bytes([before[-2] ^ 1]) + before[-1:]
    (tmp_path / changed).write_bytes(before + b"\n" if changed.endswith(("json", "jinja")) else other)
    status, err = ten(*more, model="./m")
    assert (status, f"{PART} is of another run (" in err) == (2, True)
    (tmp_path / changed).write_bytes(before)
    assert ten(*more, model="./m") == (0, "")


NO_ANSWERS = [{"row": [1, 2]}, {"row": 99}, {"row": -1}, {"row": True}, {"row": 9, "text": "x"}, {"row": 9, "error": 1}]
NO_BEGIN = ["", '{"fing', "\0" * 100, '{"row": 1}\n', "[]\n", '{"fingerprint": "x"}\n{"row']


@pytest.mark.parametrize(
    ("begun", "damage"),
    [*((True, json.dumps(row) + "\n") for row in NO_ANSWERS), *((False, text) for text in NO_BEGIN)],
)
def test_a_line_that_is_no_answer_is_made_again(ten, interrupted, tmp_path, begun, damage):
    """The fuzzer found that such a line in the partial output gave a traceback."""
    if begun:
        interrupted()
    with (tmp_path / PART).open("a") as file:
        file.write(damage)
    assert ten() == (0, "")
    assert_finished(tmp_path)


def test_what_is_finished_is_not_loaded_a_model_for(run, tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl", numbered(PROMPTS[:BATCHES_PER_JOB]))
    arguments = ("in.jsonl", "out.parquet", "--batch-size", 1, "--max-new-tokens", 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        status, err = run(*arguments)
    assert status == 1
    assert err.startswith("specbeam: cannot write the output: No space left on device; 4 finished rows stay in out.par")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.parquet.partial.jsonl"]
    monkeypatch.setattr(batch, "load_model", None)
    assert run(*arguments) == (0, "")
    assert [row["error"] for row in read(tmp_path / "out.parquet")] == [None] * 4


def full(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(("writes", "stays"), [(0, []), (2, [PART])])
def test_a_full_disk_is_one_line_and_what_is_finished_stays(ten, tmp_path, monkeypatch, writes, stays):
    """It is full from the start, or after the first line and the first job."""
    calls, fsync = iter([1] * writes), os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: fsync(file) if next(calls, None) else full())
        failed = ten()
    says = f"; 4 finished rows stay in {PART}, and the same command goes on from there" if stays else ""
    assert failed == (1, f"specbeam: cannot write the output: No space left on device{says}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", *stays]
    assert ten() == (0, "")
    assert_finished(tmp_path)


ROW = '{"prompt": "x", "n": 1}'
TWICE = pa.BufferOutputStream()
pq.write_table(pa.Table.from_arrays([pa.array(["x"])] * 3, names=["prompt", "n", "n"]), TWICE)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "says"),
    [
        (
            "in.jsonl",
            '{"prompt": "x"}',
            ["out.txt"],
            "out.txt has an unknown ending: name it .parquet, .jsonl, .csv, .tsv",
        ),
        ("in.jsonl", '{"prompt": "x"}', ["no/out.jsonl"], "no/out.jsonl cannot be written: there is no folder no"),
        ("in.jsonl", '{"prompt": "x"}', ["in.jsonl"], "in.jsonl is there already: delete it, or name another"),
        ("in.txt", "x", ["out.jsonl"], "in.txt has an unknown ending: name it .parquet, .jsonl, .csv, .tsv"),
        ("other.jsonl", "", ["out.jsonl"], "in.jsonl cannot be read: No such file or directory"),
        ("in.jsonl", "", ["out.jsonl"], "in.jsonl has no rows"),
        ("in.jsonl", '{"prompt": "x"}\n{"pro', ["out.jsonl"], "in.jsonl is damaged: line 2 is not JSON"),
        ("in.jsonl", '{"prompt": "x"}\n"x"', ["out.jsonl"], "in.jsonl is damaged: line 2 is no JSON object"),
        ("in.jsonl", '{"prompt": "x"}\n[\0]\n', ["out.jsonl"], "in.jsonl is damaged: line 2 is not JSON"),
        ("in.jsonl", '{"prompt": "x"}\n' * 300 + "{", ["out.jsonl"], "in.jsonl is damaged: line 301 is not JSON"),
        ("in.jsonl", '{"prompt": "x"}\n{"n": 1, "n": 1}', ["out.jsonl"], "line 2 is not JSON: the key 'n' is there"),
        ("in.jsonl", '{"a": [{"n": 1, "n": 2}]}', ["out.jsonl"], "line 1 is not JSON: the key 'n' is there twice"),
        ("in.jsonl", '{"prompt": "x", "n": 1e400}', ["out.jsonl"], "line 1 is not JSON: the number 1e400 is too large"),
        ("in.csv", 'prompt\nx\n"y', ["out.jsonl"], "in.csv is damaged: line 3: unexpected end of data"),
        ("in.csv", b"prompt\nx\n\xff\n", ["out.jsonl"], "line 3 is not UTF-8 text (byte 9)"),
        ("in.jsonl", '{"prompt": "x", "\\ud83d": 1}\n', ["out.parquet"], "cannot be in a .parquet file ('utf-8' codec"),
        ("in.jsonl", '{"prompt": "x", "n": {}}\n', ["out.parquet"], "in.jsonl cannot become a .parquet file"),
        ("in.jsonl", f"{ROW}\n" * 256 + '{"n": "a"}', ["out.parquet"], "Field n has incompatible types"),
        ("in.jsonl", f'{{"prompt": "", "n": {3**35}}}\n' * 300 + '{"n": 1.5}', ["out.parquet"], "'n' cannot be in"),
        ("out.jsonl.partial.jsonl", ROW, ["out.jsonl"], "is where out.jsonl keeps its finished rows: name another"),
        ("in.jsonl", b"\xff", ["out.jsonl"], "line 1 is not UTF-8 text (byte 0)"),
        ("in.parquet", "PAR1 but no more", ["out.jsonl"], "in.parquet"),
        ("in.csv", "a,prompt\n1\n", ["out.jsonl"], "in.csv is damaged: line 2 has 1 cells, but there are 2 columns"),
        ("in.parquet", TWICE.getvalue().to_pybytes(), ["out.jsonl"], "is damaged: two columns are called 'n'"),
        ("in.csv", "a,a\n1,2\n", ["out.jsonl"], "in.csv is damaged: two columns are called 'a'"),
        ("in.csv", "promt,b\nx,y\n", ["out.jsonl"], "in.csv has the columns promt, b: say with --column which one"),
        ("in.csv", "text,messages\nx,y\n", ["out.jsonl"], "say with --column which one has the prompts"),
        ("in.csv", "prompt\nx\n", ["out.jsonl", "--column", "promt"], "unknown column 'promt': did you mean 'prompt'?"),
        ("in.csv", "prompt,text,generated_text\n1,2,3\n", ["out.jsonl"], "has the columns text and generated_text"),
        ("in.jsonl", '{"prompt": "x", "n": 1}\n{"n": "a"}', ["out.parquet"], "column 'n' cannot be in a .parquet file"),
        ("in.csv", "prompt\nx\n", ["out.jsonl", "--max-new-tokens", "0"], "--max-new-tokens=0 is not allowed"),
        ("in.csv", "prompt\nx\n", ["out.jsonl", "--batch-size", "0"], "--batch-size 0 is not allowed"),
        ("in.csv", "prompt\nx\n", ["out.jsonl", "--limit", "0"], "--limit 0 is not allowed"),
        ("in.jsonl", '{"prompt": "\\ud83d"}', ["out.csv"], "in.jsonl has half a surrogate pair, which is no character"),
        ("in.csv", "prompt\nx\n", ["out.jsonl", "--workers", "2"], "--workers goes with --launcher ray"),
        ("in.csv", "prompt\nx\n", ["out.jsonl", "--draft-corpus", "x"], "--draft-corpus goes with --draft suffix"),
        ("in.csv", "prompt\nx\n", ["out.jsonl", "--num-return-sequences", "2"], "--num-return-sequences=2 is not"),
    ],
)
def test_wrong_input_is_one_line_and_status_2_before_a_model_is_loaded(run, tmp_path, name, content, arguments, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    source = "in.jsonl" if name == "other.jsonl" else name
    before = (tmp_path / name).read_bytes()
    status, err = run(source, *arguments, model=NOT_FETCHED)
    assert status == 2
    assert says in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == before


def test_a_long_row_does_not_hold_up_the_rows_after_it(run, tmp_path, monkeypatch):
    """It has a short prompt and many new tokens. The others nearly fill the context."""
    kept, add = [], FinishedRows.add
    monkeypatch.setattr(FinishedRows, "add", lambda self, rows: add(self, kept.extend(rows) or rows))
    write(tmp_path / "in.jsonl", numbered(["x", *["y" * 253] * 20]))
    assert run("in.jsonl", "out.jsonl", "--batch-size", 2, "--max-new-tokens", 200, "--raw") == (0, "")
    assert (kept[-1]["row"], kept[-1]["new_tokens"]) == (0, 200)
    assert [row["id"] for row in read(tmp_path / "out.jsonl")] == [f"{number:03}" for number in range(21)]


def test_an_error_of_no_row_is_that_of_the_rows_that_had_begun(run, tmp_path, monkeypatch):
    write(tmp_path / "in.jsonl", numbered())
    generate, breaks = batch.generate, iter([1])

    def broken(*how):
        *how, items = how
        if next(breaks, None):
            yield next(generate(*how, items))
            raise RuntimeError("it broke")
        yield from generate(*how, items)

    monkeypatch.setattr(batch, "generate", broken)
    status, err = run("in.jsonl", "out.jsonl", "--batch-size", 2, "--max-new-tokens", 2)
    assert (status, err) == (1, "specbeam: 1 of 10 rows failed, first row 2: RuntimeError: it broke\n")


def test_two_at_once_do_not_write_one_output(ten, before_jobs, tmp_path):
    refusals = []
    before_jobs(lambda: refusals.append(ten(model=NOT_FETCHED)))
    assert ten("--batch-size", 10) == (0, "")
    assert refusals == [(2, "specbeam: another process writes out.jsonl: wait for it, or give another OUT\n")]
    assert_finished(tmp_path)


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_a_killed_process_leaves_no_lock_behind(ten, tmp_path):
    holds = "import sys; from pathlib import Path; from specbeam.jobs.files import locked\n"
    holds += "with locked(Path('.out.jsonl.lock'), Path('out.jsonl'), ''): print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", holds], cwd=tmp_path, **pipes) as process:
        process.stdout.readline()
        status, err = ten(model=NOT_FETCHED)
        assert (status, "another process writes out.jsonl" in err) == (2, True)
        process.kill()
    assert ten() == (0, "")


def echo(*_):
    """A work that needs no model: the answer to a prompt is the prompt."""
    return lambda items: ({**dict.fromkeys(batch.COLUMN_TYPES), "row": row, "text": text} for row, text in items)


@pytest.mark.parametrize(
    ("source", "into"), [("in.parquet", "out.parquet"), ("in.jsonl", "out.jsonl"), ("in.csv", "out.parquet")]
)
def test_memory_does_not_grow_with_the_rows(run, tmp_path, monkeypatch, source, into):
    """Python's memory and pyarrow's, when five times as many rows come that have a kilobyte each."""
    monkeypatch.setattr(batch, "make_work", echo)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(formats, "ROW_GROUP_BYTES", 2**17)
    pool, default = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
    peaks = []
    for number in (300, 300, 1_500):  # the first one loads modules
        rows = [{"prompt": f"{row:01000}"} for row in range(number)]
        # One row group of many pages.
        write(tmp_path / source, rows, use_dictionary=False, data_page_size=2**14, write_batch_size=16)
        tracemalloc.start()
        pa.set_memory_pool(pool)
        try:
            assert run(source, into) == (0, "")
            peaks.append(tracemalloc.get_traced_memory()[1] + pool.max_memory())
        finally:
            pa.set_memory_pool(default)
            tracemalloc.stop()
        assert [row["text"] for row in read(tmp_path / into)] == [f"{row:01000}" for row in range(number)]
        (tmp_path / into).unlink()
    assert peaks[2] - peaks[1] < 1_200 * 100


def test_an_input_that_changes_is_refused_and_what_is_finished_stays(ten, before_jobs, tmp_path):
    source = tmp_path / "in.jsonl"
    before = source.read_bytes()
    before_jobs(lambda: source.write_bytes(before.replace(b"last", b"lost")))
    assert ten() == (2, "specbeam: in.jsonl was changed while it was read: restore it, or begin anew\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", PART]
    assert "is of another run" in ten()[1]
    before_jobs(lambda: None)
    source.write_bytes(before)
    assert ten() == (0, "")
    assert_finished(tmp_path)


@pytest.mark.parametrize(
    ("source", "into", "option", "within"),
    [("in.csv", "out.csv", ";", ";;"), ("in.tsv", "out.tsv", None, "\t\t"), ("in.csv", "out.tsv", r"\t", "\t\t")],
)
def test_cells_are_separated_by_the_delimiter(run, tmp_path, source, into, option, within):
    dialect = {"delimiter": within[0], "lineterminator": "\n"}
    with (tmp_path / source).open("w", newline="") as file:
        csv.writer(file, **dialect).writerows([["id", "prompt"], ["1", f"a, {within} b"]])
    given = [] if option is None else ["--delimiter", option]
    assert run(source, into, "--max-new-tokens", 2, *given) == (0, "")
    with (tmp_path / into).open(newline="") as file:
        (row,) = csv.DictReader(file, **dialect)
    assert (list(row), row["prompt"]) == (["id", "prompt", *NEW], f"a, {within} b")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_a_folder_that_takes_no_file_is_named_with_the_reason(run, tmp_path):
    write(tmp_path / "in.jsonl", numbered())
    status, err = run("in.jsonl", "/proc/x.csv", model=NOT_FETCHED)
    assert (status, err.startswith("specbeam: /proc/x.csv cannot be written: ")) == (2, True)
    assert "another process" not in err


@pytest.mark.skipif(os.name == "nt", reason="named pipes")
def test_rows_may_come_through_a_pipe(run, tmp_path):
    os.mkfifo(tmp_path / "in.jsonl")
    writer = threading.Thread(target=write, args=(tmp_path / "in.jsonl", numbered()))
    writer.start()
    assert run("in.jsonl", "out.jsonl", "--max-new-tokens", 2) == (0, "")
    writer.join()
    assert [row["prompt"] for row in read(tmp_path / "out.jsonl")] == PROMPTS


def test_an_output_that_another_command_made_meanwhile_stays(ten, interrupted, tmp_path):
    interrupted()
    (tmp_path / "out.jsonl").write_text("mine")
    assert ten() == (2, "specbeam: out.jsonl is there already: delete it, or name another\n")
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_a_model_that_is_not_there_is_one_line(ten, tmp_path):
    status, err = ten(model="/not/there")
    assert (status, len(err.splitlines())) == (2, 1)
    assert "/not/there" in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.thorough
def test_on_ray_it_is_the_same(run, model, folder, tmp_path):
    """In a process of its own, for Ray changes the one it is used in."""
    pytest.importorskip("ray")
    write(tmp_path / "in.jsonl", [*numbered(), {"prompt": None}])
    arguments = ["in.jsonl", "out.jsonl", "--max-new-tokens", "9", "--batch-size", "1", "--launcher", "ray"]
    command = [sys.executable, "-m", "specbeam", "batch", *arguments, "--model", folder]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "specbeam: 1 of 11 rows failed, first row 11: the row has no prompt\n"
    *rows, last = read(tmp_path / "out.jsonl")
    assert last["text"] is None
    expected = specbeam.generate(model, PROMPTS, max_new_tokens=9)
    assert [row["text"] for row in rows] == [result.text for result in expected]
    status, err = run("in.jsonl", "no.jsonl", "--launcher", "ray", "--address", "127.0.0.1:1")
    assert status == 2
    assert err.startswith("specbeam: no Ray cluster answers at 127.0.0.1:1")
