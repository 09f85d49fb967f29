"""The file of ``specbeam generate --prompts``, and of ``--draft-corpus``. The first byte says which, and the ending."""

import json
from unittest.mock import patch

from tests.fuzz.toys import command, model_folder, room, toy

LINES = ["Hi", [1, 2], {"prompt": "é"}, {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt": [256, 3]}]


def seeds() -> list[bytes]:
    lines = "\n".join(map(json.dumps, LINES)).encode()
    return [b"\0Hi\nHo\r\n\n", b"\1" + lines, b"\2one\ntwo", b"\3" + lines]


def run(data: bytes) -> None:
    kind, content = data[0] if data else 0, data[1:]
    file = room() / f"prompts{'.jsonl' if kind % 2 else '.txt'}"
    file.write_bytes(content)
    words = ["--max-new-tokens", "1", "--model", str(model_folder())]
    if kind & 2:
        words += ["Hi", "--draft", "suffix", "--draft-corpus", str(file)]
    else:
        words += ["--prompts", str(file)]
    with patch("specbeam.cli.generate.load_model", lambda *_, **__: toy()):  # loaded once
        command("generate", *words)
