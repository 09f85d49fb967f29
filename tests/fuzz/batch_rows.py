"""IN and OUT.partial.jsonl of ``specbeam batch``. The first byte says which of the two it is, and the ending."""

import io
import json
from unittest.mock import patch

import pyarrow
import pyarrow.parquet

from tests.fuzz.toys import command, model_folder, room, toy

ENDINGS = (".jsonl", ".csv", ".parquet")
ROWS = [
    {"prompt": "Hi", "id": 1},
    {"prompt": [1, 2, 3], "id": 2.5},
    {"prompt": [{"role": "user", "content": "é"}], "id": None},
    {"prompt": None, "text": "x", "error": 1},
]


def seeds() -> list[bytes]:
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["Hi", "é", None], "n": [1, 2, 3]}), table)
    lines = "\n".join(map(json.dumps, ROWS)).encode()
    return [
        b"\0" + lines,
        b"\0" + lines.replace(b"prompt", b"messages"),
        b"\1" + b'prompt,id\nHi,1\n"a ""quoted""\nline",2\n',
        b"\2" + table.getvalue(),
        b"\3" + _partial(),
        b"\4" + lines,
    ]


def _partial() -> bytes:
    """The journal of a run that was interrupted."""
    answer = {"row": 0, "text": "x", "finish_reason": "stop", "new_tokens": 1, "seconds": 0.1, "error": None}
    return b"\n".join(json.dumps(line).encode() for line in ({"fingerprint": "same"}, answer)) + b"\n"


def run(data: bytes) -> None:
    which, content = data[:1], data[1:]
    for file in room().glob("batch*"):
        file.unlink()
    kind = which[0] if which else 0
    ending = ENDINGS[kind] if kind < 3 else ".jsonl"
    output = room() / f"batch-out{'.parquet' if kind == 4 else '.jsonl'}"
    source = room() / f"batch-in{ending}"
    if kind == 3:
        source.write_text('{"prompt": "Hi"}\n{"prompt": "Ho"}\n')
        (room() / f"{output.name}.partial.jsonl").write_bytes(content)
    else:
        source.write_bytes(content)
    loaded_once = patch("specbeam.cli.batch.load_model", lambda *_, **__: toy())
    same_input = patch("specbeam.cli.rows.fingerprint", lambda *_, **__: "same")  # of the run that was interrupted
    with loaded_once, same_input:
        command("batch", str(source), str(output), "--model", str(model_folder()), "--max-new-tokens", "1")
