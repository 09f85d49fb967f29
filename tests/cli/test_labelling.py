"""``specbeam batch`` as a labeller, its templates and limits, and ``specbeam score``."""

import csv
import json
import math
from itertools import chain

import pytest

import specbeam
from specbeam.api.labels import probabilities
from specbeam.api.scoring import score
from specbeam.cli import batch
from specbeam.models.prompts import encode_answers

REVIEWS = ["It broke, twice.", "Great lamp", 'So "good"\nit is']
TEMPLATE = "Use {{braces}}.\n\nReview {id}: {review}\nSentiment:"
LABELS = ["good", "good enough", "bad"]
NOT_FETCHED = "not/there"


@pytest.fixture
def run(folder, specbeam_command, tmp_path, monkeypatch):
    """Runs a command on the tiny model. Returns its status, its lines in brackets, and its other errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specbeam.jobs.progress.SECONDS_PER_LINE", float("inf"))
    with open("in.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["review", "id"], *([review, number] for number, review in enumerate(REVIEWS))])
    (tmp_path / "t.txt").write_text(TEMPLATE + "\n")

    def run(*arguments, model=folder):
        status, out, err = specbeam_command(*map(str, arguments), "--model", model)
        assert out == ""
        lines = err.splitlines()
        ends = [line for line in lines if line.startswith("[")]
        return status, ends, [line for line in lines if not line.startswith("[")]

    return run


@pytest.fixture
def expected(model):
    prompts = [f"Use {{braces}}.\n\nReview {n}: {review}\nSentiment:" for n, review in enumerate(REVIEWS)]
    return probabilities(model, prompts, LABELS, raw=True)


def rows_of(path):
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            return [*csv.DictReader(file)]
    if path.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("into", ["out.csv", "out.jsonl", "out.parquet"])
def test_each_row_gets_its_label_and_the_probability_of_each(run, expected, tmp_path, into):
    (tmp_path / "labels.txt").write_text("good\n\n good enough\r\nbad")
    status, ends, others = run("batch", "in.csv", into, "--template", "t.txt", "--labels", "labels.txt", "--raw")
    assert (status, others) == (0, [])
    rows = rows_of(tmp_path / into)
    assert list(rows[0]) == ["review", "id", "label", "probability", "probabilities", "error"]
    assert [row["review"] for row in rows] == REVIEWS
    for row, wanted in zip(rows, expected, strict=True):
        found = json.loads(row["probabilities"]) if into == "out.csv" else row["probabilities"]
        assert found == pytest.approx(wanted)
        assert list(found) == LABELS
        assert row["label"] == max(wanted, key=wanted.get)
        assert float(row["probability"]) == found[row["label"]]
    counts = [f"{[row['label'] for row in rows].count(label)} {label}" for label in {row["label"] for row in rows}]
    assert ends[0].startswith("[label: ")
    assert sorted(ends[0][8:-1].split(", ")) == sorted(counts)
    assert ends[1].startswith("[3 rows, 0 failed, ")


def test_labels_are_calibrated_by_the_template_without_a_rows_content(run, model, tmp_path):
    prompts = [f"Use {{braces}}.\n\nReview {n}: {review}\nSentiment:" for n, review in enumerate(REVIEWS)]
    without = [f"Use {{braces}}.\n\nReview {text}: {text}\nSentiment:" for text in ("N/A", "", "[MASK]")]
    given = ["batch", "in.csv", "out.jsonl", "--template", "t.txt", "--choices", ",".join(LABELS), "--raw"]
    assert run(*given, "--calibrate", "--batch-size", 1)[0] == 0
    wanted = probabilities(model, prompts, LABELS, content_free=without, raw=True)
    assert wanted != probabilities(model, prompts, LABELS, raw=True)
    for row, expected in zip(rows_of(tmp_path / "out.jsonl"), wanted, strict=True):
        assert row["probabilities"] == pytest.approx(expected)
        assert row["label"] == max(expected, key=expected.get)
    (tmp_path / "t.txt").write_text("{review}")  # without content, nothing is left of it
    assert run(*given[:2], "alone.jsonl", *given[3:], "--calibrate")[0] == 0
    wanted = probabilities(model, REVIEWS, LABELS, content_free=["N/A", "[MASK]"], raw=True)
    for row, expected in zip(rows_of(tmp_path / "alone.jsonl"), wanted, strict=True):
        assert row["probabilities"] == pytest.approx(expected)


@pytest.mark.parametrize(("option", "hint"), [([], "try --calibrate"), (["--calibrate"], "read some of these rows")])
def test_labels_that_collapse_are_warned_of(run, tmp_path, option, hint):
    (tmp_path / "many.jsonl").write_text('{"review": "x", "id": 1}\n' * 50)
    given = ["many.jsonl", "out.jsonl", "--template", "t.txt", "--choices", "good,bad", "--batch-size", 50]
    status, (counts, _), (line,) = run("batch", *given, *option)
    label = counts.removeprefix("[label: 50 ").removesuffix("]")
    assert (status, label in ("good", "bad")) == (0, True)
    assert line.startswith(f"specbeam: nearly all of 50 rows have one label (50 {label}): ")
    assert line.endswith(hint)


def test_a_column_of_prompts_and_typed_choices(run, model, tmp_path):
    rows = [{"prompt": "x"}, {"prompt": None}, {"prompt": [{"role": "user", "content": "y"}]}, {"prompt": [120]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, _, (failed,) = run("batch", "p.jsonl", "out.jsonl", "--choices", "good, good enough,bad")
    assert (status, failed) == (1, "specbeam: 2 of 4 rows failed, first row 2: the row has no prompt")
    found = rows_of(tmp_path / "out.jsonl")
    for row, wanted in zip(found[::2], probabilities(model, ["x", "y"], LABELS), strict=True):
        assert row["probabilities"] == pytest.approx(wanted)
    assert "give the prompt as text" in found[3]["error"]
    assert found[1]["label"] is None


def test_a_template_makes_prompts_of_generated_texts(run, model, tmp_path):
    run(
        "batch",
        "in.csv",
        "out.csv",
        "--template",
        "t.txt",
        "--max-new-tokens",
        4,
        "--limit",
        2,
        "--stop-strings",
        r"\n",
    )
    prompts = [TEMPLATE.format(id=number, review=review) for number, review in enumerate(REVIEWS[:2])]
    results = specbeam.generate(model, prompts, max_new_tokens=4, stop_strings="\n")
    rows = rows_of(tmp_path / "out.csv")
    assert [row["text"] for row in rows] == [result.text for result in results]
    assert [(row["review"], row["id"]) for row in rows] == [(review, str(n)) for n, review in enumerate(REVIEWS[:2])]


def test_cells_that_are_no_texts_stand_in_prompts_as_json(run, tmp_path, monkeypatch):
    rows = [{"a": 1.5, "b": {"c": [True, "é"]}}, {"a": "x", "b": None}, {"a": 1}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "t.txt").write_bytes(b"{a} {b}\r\n\n")
    answers = {"row": 0, "error": None}
    seen = []
    monkeypatch.setattr(
        batch, "make_work", lambda *_: lambda job: [seen.append(item) or answers | {"row": row} for row, item in job]
    )
    run("batch", "p.jsonl", "out.jsonl", "--template", "t.txt", "--choices", "a,b")
    assert [str(one) for one in seen] == ['1.5 {"c": [true, "é"]}\n', "the row has no b", "the row has no b"]


@pytest.mark.parametrize(
    ("changed", "arguments"),
    [
        ("t.txt", []),
        ("labels.txt", []),
        (None, ["--limit", "2"]),
        (None, ["--choices", "good,bad"]),
        (None, ["--raw"]),
    ],
)
def test_labels_and_templates_belong_to_a_run(run, tmp_path, monkeypatch, changed, arguments):
    (tmp_path / "labels.txt").write_text("good\nbad\n")
    given = ["batch", "in.csv", "out.csv", "--template", "t.txt", "--batch-size", 1]
    given += [] if "--choices" in arguments else ["--labels", "labels.txt"]
    monkeypatch.setattr("specbeam.cli.rows.BATCHES_PER_JOB", 1)
    make_work = batch.make_work

    def stopping(*how):
        work = make_work(*how)
        return lambda items: chain([next(work(items))], interrupt())

    monkeypatch.setattr(batch, "make_work", stopping)
    status, _, (says,) = run(*given, *(arguments if "--choices" in arguments else []))
    assert status == 130
    assert "1 of 3 rows are finished" in says
    monkeypatch.setattr(batch, "make_work", make_work)
    if changed is not None:
        before = (tmp_path / changed).read_text()
        (tmp_path / changed).write_text("{id}" + before if changed == "t.txt" else before + "other\n")
    other = ["--choices", "bad,good"] if "--choices" in arguments else arguments
    status, _, (says,) = run(*given, *other)
    assert (status, "is of another run" in says) == (2, True)
    if changed is not None:
        (tmp_path / changed).write_text(before)
        status, ends, _ = run(*given)
        assert (status, "(1 of them earlier)" in ends[1]) == (0, True)
        assert [row["error"] for row in rows_of(tmp_path / "out.csv")] == [""] * 3


def interrupt():
    raise KeyboardInterrupt
    yield


def test_without_a_terminal_lines_say_how_far_it_is(run, tmp_path, monkeypatch):
    monkeypatch.setattr("specbeam.jobs.progress.SECONDS_PER_LINE", 0)
    _, _, lines = run("batch", "in.csv", "out.csv", "--column", "review", "--max-new-tokens", 2)
    assert [line.partition(",")[0] for line in lines] == [f"specbeam: {n} of 3 rows" for n in (1, 2)]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--choices", "a,b", "--labels", "in.csv"], "--choices and --labels both give the labels: leave one out"),
        (["--choices", "a"], "--choices: the labels are a: give at least 2"),
        (["--choices", "a,,b"], "--choices: the label '' is empty"),
        (["--choices", "a,b,a"], "--choices: the label 'a' is there twice"),
        (["--choices", r"a,\d"], r"\d in 'a,\\d' is no escape"),
        (["--labels", "none.txt"], "none.txt cannot be read"),
        (["--choices", "a,b", "--temperature", "1"], "--temperature is for generated texts, and --choices chooses lab"),
        (["--labels", "in.csv", "--draft", "ngram"], "--draft is for generated texts, and --labels chooses labels"),
        (["--choices", "a,b", "--tokens"], "--tokens is for generated texts"),
        (["--choices", "a,b", "--max-new-tokens", "3"], "--max-new-tokens is for generated texts"),
        (["--template", "t.txt", "--calibrate"], "--calibrate goes with --choices or --labels, and with --template"),
        (["--choices", "a,b", "--calibrate"], "--calibrate goes with --choices or --labels, and with --template"),
        (["--template", "none.txt"], "none.txt cannot be read"),
        (["--template", "t.txt", "--column", "review"], "--column names the prompts, and --template makes them of"),
        (
            ["--template", "reveiw"],
            "has {reveiw}, but in.csv has no such column: did you mean {review}? there are review",
        ),
        (["--template", "id.real"], "has {id.real}, but in.csv has no such column"),
        (["--template", "id!r"], "braces hold the name of a column, and nothing else): write {{ and }} for braces"),
        (["--template", "id:9"], "braces hold the name of a column, and nothing else"),
        (["--template", ""], "braces hold the name of a column, and nothing else"),
        (["--template", "{"], "is no template ("),
    ],
)
def test_what_cannot_be_labelled_is_refused_before_a_model_is_loaded(run, tmp_path, arguments, says):
    if "--template" in arguments and arguments[1] not in ("none.txt", "t.txt"):
        (tmp_path / "own.txt").write_text(f"{{{arguments[1]}}}")
        arguments = ["--template", "own.txt"]
    status, _, lines = run("batch", "in.csv", "out.csv", *arguments, model=NOT_FETCHED)
    assert (status, len(lines)) == (2, 1)
    assert says in lines[0]
    assert not (tmp_path / "out.csv").exists()


def test_a_template_without_a_column_is_refused(run, tmp_path):
    (tmp_path / "t.txt").write_text("Classify this.")
    status, _, (line,) = run("batch", "in.csv", "out.csv", "--template", "t.txt", model=NOT_FETCHED)
    assert (status, "t.txt names no column" in line) == (2, True)


@pytest.fixture
def measured(model):
    """The log-probability of a text and its tokens, after a prompt or none."""

    def measured(prompt, text, raw=False):
        context, (ids,) = encode_answers(model, prompt, [text], raw=raw)
        ((_, log_prob, _),) = score(model, [(context, ids)])
        return log_prob, len(ids)

    return measured


def test_texts_are_scored_alone_and_after_prompts(run, model, measured, tmp_path):
    assert run("score", "in.csv", "alone.csv", "--column", "review")[0] == 0
    rows = rows_of(tmp_path / "alone.csv")
    assert list(rows[0]) == ["review", "id", "log_prob", "perplexity", "tokens", "error"]
    for row, review in zip(rows, REVIEWS, strict=True):
        bytes_of = [*map(int, model.tokenizer(review).input_ids)]
        ((_, log_prob, _),) = score(model, [([model.tokenizer.bos_token_id], bytes_of)])
        assert (float(row["log_prob"]), int(row["tokens"])) == (pytest.approx(log_prob), len(bytes_of))
        assert float(row["perplexity"]) == pytest.approx(math.exp(-log_prob / len(bytes_of)))
    assert run("score", "in.csv", "given.jsonl", "--column", "id", "--given", "review")[0] == 0
    for row, review in zip(rows_of(tmp_path / "given.jsonl"), REVIEWS, strict=True):
        assert (row["log_prob"], row["tokens"]) == (pytest.approx(measured(review, row["id"])[0]), 1)


@pytest.mark.parametrize("name", ["c.jsonl", "c.csv"])
def test_candidates_are_ranked_by_their_log_probability_per_token(run, measured, tmp_path, name):
    texts = ["a longer text", "b", "cc"]
    cell = json.dumps(texts)
    if name == "c.csv":
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([["p", "c"], ["x:", cell], ["x:", "no list"]])
    else:
        beams = json.dumps([{"text": text, "score": 1} for text in texts])
        (tmp_path / name).write_text(f'{{"p": "x:", "c": {beams}}}\n{{"p": "x:", "c": []}}\n')
    status, _, lines = run("score", name, "out.jsonl", "--candidates", "c", "--given", "p", "--raw")
    assert (status, lines) == (1, ["specbeam: 1 of 2 rows failed, first row 2: the row's c is not a list of texts"])
    row, failed = rows_of(tmp_path / "out.jsonl")
    assert list(row) == ["p", "c", "best", "ranked", "error"]
    assert failed["ranked"] is None
    means = {text: log_prob / count for text in texts for log_prob, count in [measured("x:", text, raw=True)]}
    assert [one["text"] for one in row["ranked"]] == sorted(texts, key=means.get, reverse=True)
    assert row["best"] == row["ranked"][0]["text"]
    for one in row["ranked"]:
        assert one["log_prob"] / one["tokens"] == pytest.approx(means[one["text"]])


def test_a_row_that_cannot_be_scored_is_a_row(run, tmp_path, monkeypatch):
    rows = [{"text": "a"}, {"text": None}, {"text": ""}, {"text": "b" * 300}, {"text": "c"}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, _, (line,) = run("score", "t.jsonl", "out.jsonl")
    assert (status, line) == (1, "specbeam: 3 of 5 rows failed, first row 2: the row's text is not a text")
    errors = [row["error"] for row in rows_of(tmp_path / "out.jsonl")]
    assert (errors[0], errors[4]) == (None, None)
    assert "is empty" in errors[2]
    assert "can score at most" in errors[3]


def test_a_failure_in_a_pass_is_that_of_its_row_alone(run, model, before_passes, tmp_path):
    (x,) = model.tokenizer("x").input_ids

    def broken(_, segments):
        if any(x in s.tokens for s in segments):
            raise RuntimeError("it broke")

    before_passes(broken)
    (tmp_path / "t.jsonl").write_text('{"text": "aaa"}\n{"text": "xxx"}\n{"text": "bbb"}\n')
    assert run("score", "t.jsonl", "out.jsonl")[0] == 1
    errors = [row["error"] for row in rows_of(tmp_path / "out.jsonl")]
    assert errors == [None, "RuntimeError: it broke", None]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "in.csv has the columns review, id: say with --column which one has the texts"),
        (["--column", "reviw"], "in.csv: unknown column 'reviw': did you mean 'review'?"),
        (["--candidates", "x"], "in.csv: unknown column 'x'"),
        (["--column", "review", "--given", "x"], "in.csv: unknown column 'x'"),
        (["--column", "review", "--candidates", "id"], "not allowed with argument --column"),
        (["--column", "review", "--system", "x"], "--system goes with --given"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_a_model_is_loaded(run, arguments, says):
    status, _, lines = run("score", "in.csv", "out.csv", *arguments, model=NOT_FETCHED)
    assert (status, len(lines)) == (2, 1)
    assert says in lines[0]
