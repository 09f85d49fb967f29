"""The data set of a study. The first byte names the ending, and the second the settings."""

import gzip
import json

from specbeam.study.config import Columns, Data
from specbeam.study.data import read_rows
from tests.fuzz.toys import room

ENDINGS = (".jsonl", ".json", ".csv", ".txt", ".jsonl.gz", ".parquet", "")
SETTINGS = [
    {},
    {"format": "table", "columns": Columns(prompt="q", reference="a", category="c", id="id"), "per_category": 1},
    {"template": "Say {prompt} {id} {a[b]}!", "limit": 2},
    {"format": "spec_bench", "turns": 1, "categories": ["writing"]},
    {"format": "human_eval"},
    {"columns": Columns(prompt="t.en", reference="t.de")},
    {"format": "text"},
]
RECORDS = {
    0: [{"prompt": "Hi", "answer": ["x"]}, {"prompt": "Ho", "answer": "y"}],
    1: [{"q": "Hi", "a": "x", "c": "m", "id": 1}, {"q": "Ho", "a": ["y"], "c": "n", "id": 1}],
    2: [{"text": "Hi", "id": 3, "a": {"b": 1}}],
    3: [{"question_id": 1, "category": "writing", "turns": ["a", "b"], "reference": ["c", "d"]}],
    4: [{"task_id": "t/1", "prompt": "def f():\n", "entry_point": "f", "test": "def check(f): pass"}],
    5: [{"t": {"en": "Hi", "de": "Ha"}}],
}


def seeds() -> list[bytes]:
    made = [b"\3\6Hi\nHo\n", b"\2\1q,a,c,id\nHi,x,m,1\n", b"\6\0Hi"]
    for setting, records in RECORDS.items():
        lines = "\n".join(map(json.dumps, records)).encode()
        made += [bytes([0, setting]) + lines, bytes([1, setting]) + json.dumps(records).encode()]
        made.append(bytes([4, setting]) + gzip.compress(lines))
    return made


def run(data: bytes) -> None:
    ending, settings = ENDINGS[data[0] % len(ENDINGS) if data else 0], SETTINGS[data[1] % 7 if len(data) > 1 else 0]
    file = room() / f"data{ending}"
    file.write_bytes(data[2:])
    read_rows(Data(source=str(file), **settings), ["a prompt"], 0)
