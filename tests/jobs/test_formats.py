"""Files of rows, read and written a few rows at a time, hold what pyarrow makes of all rows at once."""

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
    assert written.select(["x"]).equals(expected) or repr(written["x"]) == repr(expected["x"])  # NaN
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
            "bytes": [b"\xff", b"", None] * 3,
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
        writer(tmp_path / "out.jsonl", rows, TYPES)(ADDED[:9])
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.select(table.column_names).equals(table)
    assert written.schema.metadata[b"mine"] == b"kept"
    assert written.select([*TYPES]).to_pylist() == ADDED[:9]
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [{name: line[name] for name in TYPES} for line in lines] == ADDED[:9]
    assert lines[0]["nested"] == [{"a": [1, None]}]


@pytest.mark.parametrize("at", range(0, 700, 50))
def test_a_damaged_parquet_file_is_no_traceback(tmp_path, at):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"prompt": [f"row {n}" for n in range(9)]}), path)
    whole = bytearray(path.read_bytes())
    start = min(at, len(whole) - 8)
    whole[start : start + 8] = b"\xff" * 8
    path.write_bytes(whole)
    with suppress(SpecbeamError), open_rows(path) as rows:
        assert len([*rows]) == len(rows)  # the damage was in a part that nobody needs


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
