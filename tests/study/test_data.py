"""Data sets: every format gives the same rows, samples are drawn by category, and what is wrong is named."""

import gzip
import json
import sys
from functools import partial

import httpx
import huggingface_hub
import pandas
import pyarrow.parquet
import pytest

from specbeam.errors import SpecbeamError
from specbeam.study.composition import compose
from specbeam.study.config import Columns, Data, check
from specbeam.study.data import read_rows

TABLE = [
    {"question": "One?", "answer": "1", "kind": "a"},
    {"question": "Two?\nReally?", "answer": "2", "kind": "b"},
    {"question": "Three, ü?", "answer": "3", "kind": "a"},
]
COLUMNS = Columns(prompt="question", reference="answer", category="kind")


def write(path, rows):
    if path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    elif path.suffix in (".csv", ".tsv"):
        pandas.DataFrame(rows).to_csv(path, index=False, sep="," if path.suffix == ".csv" else "\t")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def read(source, prompts=(), seed=0, **data):
    return read_rows(Data(source=source and str(source), **data), [*prompts], seed)


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet"])
def test_tables_are_read_alike(tmp_path, ending):
    rows = read(write(tmp_path / f"table.{ending}", TABLE), columns=COLUMNS, template="Q: {prompt} ({kind})")
    assert [row.turns for row in rows] == [[f"Q: {row['question']} ({row['kind']})"] for row in TABLE]
    assert [row.references for row in rows] == [["1"], ["2"], ["3"]]
    assert [row.category for row in rows] == ["a", "b", "a"]


def test_usual_names_of_columns_are_found(tmp_path):
    rows = read(write(tmp_path / "t.jsonl", TABLE), ["first"])
    assert [row.turns[0] for row in rows] == ["first", "One?", "Two?\nReally?", "Three, ü?"]
    assert rows[1].references == ["1"]


def test_nested_columns(tmp_path):
    source = write(tmp_path / "t.jsonl", [{"translation": {"en": "good morning", "de": "guten Morgen"}}])
    (row,) = read(source, columns=Columns(prompt="translation.en", reference="translation.de"))
    assert (row.turns, row.references) == (["good morning"], ["guten Morgen"])


def test_a_line_of_text_is_a_prompt(tmp_path):
    (tmp_path / "p.txt").write_text("one\r\n\ntwo\u2028still two\n", newline="")
    assert [row.turns[0] for row in read(tmp_path / "p.txt")] == ["one", "two\u2028still two"]


def test_spec_bench_has_turns_and_categories(tmp_path):
    both = {"turns": ["q", "and?"], "reference": ["r1", "r2"]}
    source = write(tmp_path / "q.jsonl", [{"question_id": i, "category": "abc"[i % 3], **both} for i in range(30)])
    rows = read(source, seed=3, per_category=2)
    assert sorted(row.category for row in rows) == [*"aabbcc"]
    assert all(row.turns[1] == "and?" and row.references == ["r2"] for row in rows)
    assert read(source, seed=3, per_category=2) == rows != read(source, seed=4, per_category=2)
    ids = [int(row.id) for row in rows]
    assert ids == sorted(ids)
    some = read(source, categories=["b"], limit=4, turns=1)
    assert [(row.category, len(row.turns), row.references) for row in some] == [("b", 1, ["r1"])] * 4


def test_human_eval_has_problems(tmp_path):
    row = {"task_id": "T/0", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): ..."}
    (found,) = read(write(tmp_path / "h.jsonl.gz", [row]))
    assert "```python\ndef f():\n```" in found.turns[0]
    assert found.problem == {key: row[key] for key in ("prompt", "test", "entry_point")}


def test_rows_are_told_apart(tmp_path):
    source = write(tmp_path / "t.jsonl", [{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}])
    assert len({row.id for row in read(source, columns=Columns(id="id"))}) == 2


def named(**columns):
    return {"columns": Columns(**columns)}


MISTYPED = r"^data.columns.prompt=questoin: \S+ row 1 has no such column: did you mean 'question'\? there are "
NO_CATEGORY = r"^data.categories=x: \S+ has no such category: there are a, b$"


@pytest.mark.parametrize(
    ("data", "content", "message"),
    [
        (named(prompt="questoin"), TABLE, MISTYPED + "question, answer, kind$"),
        (named(reference="zzz"), TABLE, "row 1 has no such column: there are question, answer, kind$"),
        (
            named(prompt="said.in.eng"),
            [{"said": {"in": {"en": "a", "de": "b"}}}],
            "row 1 has no such column: did you mean 'said.in.en'. there are said.in.en, said.in.de$",
        ),
        (named(prompt="sad.en"), [{"said": {"en": "a"}}], "row 1 has no such column: .*there are said$"),
        (named(prompt="said.en"), [{"said": "a"}], "row 1 has no such column: .*there are said$"),
        (named(prompt="said.en"), [{"said": {"en": "a"}}, {"said": None}], "row 2 has no text in the column 'said.en'"),
        ({}, [{"prompt": "a"}, {"prompt": " "}], "row 2 has no text in the column 'prompt'"),
        ({}, [{"prompt": "a"}, {"prompt": None}], "row 2 has no text"),
        ({}, [{"prompt": "a", "answer": ["b", ""]}], "row 1 has no text in the column 'answer'"),
        ({}, [{"prompt": "a", "answer": 2}], "row 1 has 2 in the column 'answer', where a text belongs"),
        (named(reference="answer"), [{"prompt": "a", "answer": None}], "row 1 has nothing in the column"),
        ({}, [{"said": "a"}], "data.columns.prompt is missing: it is one of said"),
        ({}, [], "has no rows"),
        ({}, [3], "line 1 is no JSON object"),
        ({"categories": ["x"], "columns": COLUMNS}, TABLE, NO_CATEGORY),
        ({"template": "{promt}"}, TABLE, "data.template does not fit"),
        ({"format": "spec_bench"}, TABLE, "has no turns"),
        ({"format": "human_eval"}, TABLE, "row 1 has no text in the column 'prompt'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, data, content, message):
    with pytest.raises(SpecbeamError, match=message):
        read(write(tmp_path / "t.jsonl", content), **data)


def test_a_hub_without_an_answer_is_asked_for_a_data_set_once(tmp_path, monkeypatch, caplog):
    """huggingface_hub would ask five more times, with a line for each."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def silent(self, *names, **how):
        asked.append(names or how)
        raise httpx.ConnectError("no such host")

    for name in ("dataset_info", "model_info", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, silent)
    monkeypatch.setattr(huggingface_hub, "dataset_info", partial(silent, None))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    says = r"^the data set org/set cannot be loaded \(it is not in the local cache, and no hub answers: no such host\)"
    with pytest.raises(SpecbeamError, match=says):
        read("org/set")
    assert (asked, caplog.records) == ([("org/set",)], [])
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_packaged_data_set_of_the_hub_names_the_extra_that_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    asked = check(compose(["data=cnn_dailymail"])).data
    says = r"data.source=abisee/cnn_dailymail is no file here, .* package datasets: pip install 'specbeam\[study\]'"
    with pytest.raises(SpecbeamError, match=says):
        read_rows(asked, [], 0)


DAMAGED_GZIP = bytearray(gzip.compress(b'{"prompt": "Hi"}\n' * 9, mtime=0))
DAMAGED_GZIP[12] ^= 0xFF
FAR = pyarrow.table({"prompt": ["a"], "day": pyarrow.array([2**62], pyarrow.timestamp("us"))})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt"', "line 2 is not JSON"),
        ("b.jsonl", b"\xff\xfe\x00", "not UTF-8"),
        ("c.parquet", b"nothing", "is damaged"),
        ("d.docx", b"nothing", "is not a"),
        ("e.jsonl.gz", b"nothing", "cannot be read"),
        ("missing.jsonl", None, "there is no such file"),
        (
            "far.parquet",
            FAR,
            "column 'day' of .* cannot be used: date value out of range",
        ),  # Python does not have this date
        # The fuzzer found these.
        ("a.csv", b'q,a\n"x" y,1\n', "is damaged: line 2: "),
        ("b.csv", b"q,a\nx,1,2\n", "line 2 has 3 cells, but there are 2 columns"),
        ("c.csv", b"q,a\nx\n", "line 2 has 1 cells, but there are 2 columns"),
        ("d.jsonl.gz", bytes(DAMAGED_GZIP), "cannot be read"),
        ("e.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("f.json", b"[" * 100_000, "is not JSON"),
        ("g.json", b"\xff", r"^\S+/g.json is not UTF-8 text"),
    ],
)
def test_unreadable_files_are_one_line(tmp_path, name, content, message):
    if content is FAR:
        pyarrow.parquet.write_table(FAR, tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SpecbeamError, match=message):
        read(tmp_path / name)


def test_a_cell_of_a_csv_file_may_be_long(tmp_path):
    long = "x" * 200_000  # Python's own limit is 131,072
    (tmp_path / "a.csv").write_text(f"question\n{long}\n")
    assert [row.turns for row in read(tmp_path / "a.csv")] == [[long]]


def test_half_of_a_surrogate_pair_is_refused_before_work_is_lost(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"prompt": "\\ud83d"}\n')
    for source, prompts in ((tmp_path / "t.jsonl", []), (None, ["\udcff"])):
        with pytest.raises(SpecbeamError, match="1 has half a surrogate pair"):
            read(source, prompts)
