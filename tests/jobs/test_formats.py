"""Files of rows, read and written a few rows at a time, hold what pyarrow makes of all rows at once."""

import csv
import datetime
import decimal
import io
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam.errors import SpecbeamError
from specbeam.jobs import formats
from specbeam.jobs.formats import open_rows, writer

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TYPES = {"text": "string", "ids": ["int64"]}
ADDED = [{"text": f"t{n}", "ids": [n]} for n in range(10)]

cells = st.recursive(
    st.none() | st.text(max_size=2) | st.integers(-(2**70), 2**70) | st.integers(-3, 3) | st.floats(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(values=st.lists(cells, min_size=1, max_size=10), size=st.integers(1, 4))
def test_cells_have_the_types_that_they_have_all_at_once(tmp_path_factory, values, size):
    folder = tmp_path_factory.mktemp("rows")
    source, output = folder / "in.jsonl", folder / "out.parquet"
    source.write_text("".join(json.dumps({"x": value}) + "\n" for value in values))
    try:
        expected = pa.table({"x": pa.array(values)})
        pq.write_table(expected, io.BytesIO())
    except (pa.ArrowException, ValueError, OverflowError):
        expected = None
    with pytest.MonkeyPatch.context() as patch, open_rows(source) as rows:
        patch.setattr(formats, "ROWS_PER_TABLE", size)
        patch.setattr(formats, "ROW_GROUP_BYTES", 20)
        try:
            write = writer(output, rows, TYPES)
        except SpecbeamError:
            assert expected is None
            return
        assert expected is not None
        write(ADDED[: len(values)])
    written = pq.read_table(output)
    assert written.select(["x"]).schema.equals(expected.schema)
    found, wanted = (repr(table["x"].to_pylist()) for table in (written, expected))
    assert found == wanted  # as texts, because NaN equals nothing
    assert written.select([*TYPES]).to_pylist() == ADDED[: len(values)]


def test_the_columns_of_a_parquet_file_stay_as_they_are(tmp_path, monkeypatch):
    day = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
    table = pa.table(
        {
            "nested": [[{"a": [1, None]}], None, []] * 3,
            "map": pa.array([[("k", 1)], [], None] * 3, pa.map_(pa.string(), pa.int8())),
            "dictionary": pa.array(["x", "y", None] * 3).dictionary_encode(),
            "decimal": [decimal.Decimal("1.10"), None, decimal.Decimal("-2.00")] * 3,
            "time": pa.array([day, None, day] * 3, pa.timestamp("us", "UTC")),
            "far": pa.array([2**62, None, -(2**62)] * 3, pa.timestamp("us", "UTC")),
            "long": pa.array([2**62, None, 1] * 3, pa.duration("s")),
            "fine": pa.array([1, None, 10**9 + 1] * 3, pa.time64("ns")),
            "bytes": [b"\xff", b"", None] * 3,
            "not finite": [float("inf"), None, float("-inf")] * 3,
            "large": pa.array(["a", None, "b"] * 3, pa.large_string()),
            "null": pa.nulls(9),
        }
    ).replace_schema_metadata({"mine": "kept"})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=4)
    monkeypatch.setattr(formats, "ROWS_PER_TABLE", 2)
    monkeypatch.setattr(formats, "ROW_GROUP_BYTES", 100)
    with open_rows(tmp_path / "in.parquet") as rows:
        assert len(rows) == 9
        assert rows.columns == table.column_names
        writer(tmp_path / "out.parquet", rows, TYPES)(ADDED[:9])
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.select(table.column_names).equals(table)
    assert written.schema.metadata[b"mine"] == b"kept"
    assert written.select([*TYPES]).to_pylist() == ADDED[:9]


def test_timestamps_of_spark_do_not_wrap_around(tmp_path):
    forever = pa.table({"until": pa.array([datetime.datetime(9999, 12, 31)], pa.timestamp("us"))})
    pq.write_table(forever, tmp_path / "in.parquet", use_deprecated_int96_timestamps=True)
    with open_rows(tmp_path / "in.parquet") as rows:
        writer(tmp_path / "out.parquet", rows, TYPES)(ADDED[:1])
    assert pq.read_table(tmp_path / "out.parquet").select(["until"]).equals(forever)


def test_columns_of_a_parquet_file_as_json(tmp_path):
    day = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
    columns = {
        "nested": ([{"a": [1, None]}], [{"a": [1, None]}]),
        "large": (2**63 - 1, 2**63 - 1),
        "tiny": (5e-324, 5e-324),
        "day": (day, str(day)),
        "time": (pa.scalar(1_000, pa.time64("ns")), "00:00:00.000001"),
        "decimal": (decimal.Decimal("1.10"), "1.10"),
        "map": (pa.scalar([("k", 1)], pa.map_(pa.string(), pa.int8())), [["k", 1]]),
        'ö"': ("ö\u2028", "ö\u2028"),
    }
    pq.write_table(pa.table({name: pa.array([given]) for name, (given, _) in columns.items()}), tmp_path / "in.parquet")
    with open_rows(tmp_path / "in.parquet") as rows:
        writer(tmp_path / "out.jsonl", rows, TYPES)(ADDED[:1])
    (line,) = (tmp_path / "out.jsonl").read_text("utf-8").split("\n")[:-1]
    assert list(json.loads(line).items()) == [*((name, text) for name, (_, text) in columns.items()), *ADDED[0].items()]


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        (pa.scalar(b"abc"), "JSON has no bytes"),
        (pa.scalar([{"a": b"abc"}]), "JSON has no bytes"),
        (pa.scalar(float("nan")), "not JSON compliant"),
        (pa.scalar([float("inf")]), "not JSON compliant"),
        (pa.scalar(2**62, pa.timestamp("us")), "date value out of range"),
        (pa.scalar(1, pa.time64("ns")), "would lose data"),
    ],
)
def test_what_json_does_not_have_is_refused_by_column(tmp_path, cell, says):
    pq.write_table(pa.table({"prompt": ["a"], "x": pa.array([cell])}), tmp_path / "in.parquet")
    with open_rows(tmp_path / "in.parquet") as rows:
        assert [*rows.cells(["prompt"])] == [{"prompt": "a"}]
        with pytest.raises(SpecbeamError, match=f"the column 'x' of .*{says}.*name OUT .parquet, or leave the column"):
            writer(tmp_path / "out.jsonl", rows, TYPES)
    assert not (tmp_path / "out.jsonl").exists()


NUMBERS = (str(2**70), "1.10", "1e-400", "-0.0", "0.1000000000000000055511151231257827")


def test_a_line_of_json_stays_as_it_is(tmp_path):
    lines = ["{}", *(f'{{"x":[{number}] ,"y": "\\ud83d\u2028"\t}}' for number in NUMBERS)]
    (tmp_path / "in.jsonl").write_text("\r\n".join(lines), "utf-8", newline="")
    with open_rows(tmp_path / "in.jsonl") as rows:
        writer(tmp_path / "out.jsonl", rows, {"text": "string"})([{"text": "\ud83d"}] * len(rows))
    first, *written = (tmp_path / "out.jsonl").read_text("utf-8").split("\n")[:-1]
    assert first == '{"text": "\\ud83d"}'
    assert written == [line.removesuffix("\t}") + ', "text": "\\ud83d"}' for line in lines[1:]]


def test_a_number_too_large_for_parquet_is_refused(tmp_path):
    (tmp_path / "in.jsonl").write_text(f'{{"x": 1.5}}\n{{"x": {2**70}}}')
    with open_rows(tmp_path / "in.jsonl") as rows, pytest.raises(SpecbeamError, match=r"column 'x' .*name OUT .jsonl"):
        writer(tmp_path / "out.parquet", rows, TYPES)


@pytest.mark.parametrize("number", ["1e400", "-1E+999", "9" * 5_000])
def test_a_number_too_large_for_python_is_refused_by_its_line(tmp_path, number):
    (tmp_path / "in.jsonl").write_text(f'{{"x": 1.5}}\n{{"x": {number}}}')
    with pytest.raises(SpecbeamError, match=r"line 2 is not JSON: (the number -?1[eE].?[49]|Exceeds the limit)"):
        open_rows(tmp_path / "in.jsonl")


@pytest.mark.parametrize("at", range(0, 700, 50))
def test_a_damaged_parquet_file_is_no_traceback(tmp_path, at):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"row {n}" for n in range(9)]}), path)
    whole = bytearray(path.read_bytes())
    start = min(at, len(whole) - 8)
    whole[start : start + 8] = b"\xff" * 8
    path.write_bytes(whole)
    with suppress(SpecbeamError), open_rows(path) as rows:
        assert len([*rows.cells(["prompt"])]) == len(rows)  # the damage was in a part that nobody needs


def test_the_same_rows_come_each_time_whatever_ends_a_line(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xe2\x80\xa8"}\r\n\r\n{"b": "\\u0000"}')
    with open_rows(path) as rows:
        assert [*rows] == [*rows] == [{"a": "\u2028"}, {"b": "\0"}]
        assert (len(rows), rows.columns) == (2, ["a", "b"])
    path = tmp_path / "in.csv"
    path.write_bytes(b'\xef\xbb\xbfa,b\r1,"2\n\xe2\x80\xa8"\r\n\r\n3,\0\n')
    with open_rows(path) as rows:
        assert [*rows] == [*rows] == [{"a": "1", "b": "2\n\u2028"}, {"a": "3", "b": "\0"}]


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=4)


@given(table=st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(texts, min_size=n, max_size=n), min_size=1)))
def test_a_csv_file_comes_back_from_a_csv_file(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("rows")
    names = [f"column {n}" for n in range(len(table[0]))]
    with (folder / "in.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([names, *table])
    with open_rows(folder / "in.csv") as rows:
        writer(folder / "out.csv", rows, TYPES)([{"text": "t\n\r", "ids": [n]} for n in range(len(table))])
    with open_rows(folder / "out.csv") as written:
        found = [*written]
    assert [list(row) for row in found] == [[*names, *TYPES]] * len(table)
    assert [[row[name] for name in names] for row in found] == table
    assert [(row["text"], row["ids"]) for row in found] == [("t\n\r", f"[{n}]") for n in range(len(table))]


def test_values_of_json_in_a_csv_file(tmp_path):
    rows = [
        '{"a": "x, y", "b": 1.5}',
        '{"b": null, "c": [1e300, {"d": "é"}]}',
        '{"a": true, "b": 98765432109876543210}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(rows), "utf-8")
    with open_rows(tmp_path / "in.jsonl") as source:
        writer(tmp_path / "out.csv", source, {"text": "string"})([{"text": None}] * 3)
    written = (tmp_path / "out.csv").read_text("utf-8").splitlines()
    assert written == ["a,b,c,text", '"x, y",1.5,,', ',,"[1e+300, {""d"": ""é""}]",', "true,98765432109876543210,,"]


@pytest.mark.parametrize("limit", [1, 2, 3, 9])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_a_limit_takes_the_first_rows(tmp_path, monkeypatch, kind, limit):
    monkeypatch.setattr(formats, "ROWS_PER_TABLE", 2)
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"x": list("abc")}), path)
    else:
        path.write_text("x\na\n\nb\nc\n" if kind == "csv" else '{"x": "a"}\n\n{"x": "b"}\n{"x": "c"}\n')
    with open_rows(path, limit) as rows:
        wanted = [*"abc"][:limit]
        assert len(rows) == len(wanted)
        assert [*rows.cells(["x"])] == [{"x": cell} for cell in wanted]
        for kind_of_output in ("csv", "jsonl", "parquet"):
            out = tmp_path / f"out.{kind_of_output}"
            writer(out, rows, {"n": "int64"})([{"n": n} for n in range(len(wanted))])
            with open_rows(out) as written:
                assert [row["x"] for row in written.cells(["x"])] == wanted


def test_rows_after_a_limit_are_not_read(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"x": 1}\nno json\n')
    with open_rows(tmp_path / "in.jsonl", 1) as rows:
        assert [*rows] == [{"x": 1}]
