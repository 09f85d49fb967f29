"""The files of tokenizers that are read without transformers: as in tokenizer_files, and the three older files.

A tokenizer.model is a text in the JSON object, with a character for each byte.
"""

import json
from typing import Any
from unittest.mock import patch

from specbeam.system.extras import are_installed
from tests.fuzz import tokenizer_files
from tests.fuzz.json_mutator import mutate_json as mutate

__all__ = ["mutate", "run", "seeds"]
OTHERS = {"vocab": "vocab.json", "added": "added_tokens.json", "merges": "merges.txt", "model": "tokenizer.model"}


def seeds() -> list[bytes]:
    made = [json.loads(seed) for seed in tokenizer_files.seeds()]
    config: dict[str, Any] = {"add_bos_token": True, "bos_token": "<s>", "add_eos_token": True, "eos_token": "</s>"}
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", "T", "h", "e", "Th", "The", "\u0120"])}
    merges = "#version: 0.2\nT h\nTh e\n"
    for kind in ("GPT2Tokenizer", "Qwen2Tokenizer", "GPTNeoXTokenizer"):
        other = {"vocab": vocabulary, "merges": merges, "added": {"<late>": 8}}
        made.append({"config": config | {"tokenizer_class": kind}, **other})
    pieces = b"".join(
        b"\x0a" + bytes([len(piece) + 4, 10, len(piece)]) + piece + bytes([24, 3 if piece in (b"<s>", b"</s>") else 1])
        for piece in (b"<unk>", b"<s>", b"</s>", b"T", b"h", b"e", b"Th", b"The", "▁".encode(), b"<0x0A>")
    )
    model = (pieces + bytes([18, 5, 24, 2, 152, 2, 1])).decode("latin-1")
    for kind in ("LlamaTokenizer", "GemmaTokenizer", "PreTrainedTokenizerFast"):
        made.append({"config": config | {"tokenizer_class": kind}, "model": model})
    return [json.dumps(document).encode() for document in made]


def run(data: bytes) -> None:
    def hidden(*packages: str) -> bool:
        return "transformers" not in packages and are_installed(*packages)

    with (
        patch("specbeam.system.extras.are_installed", hidden),
        patch("specbeam.checkpoints.tokenizers.folder_tokenizer.are_installed", hidden),
        patch.object(tokenizer_files, "write", write),
    ):
        tokenizer_files.run(data)


def write(folder: Any, data: bytes) -> None:
    for name in OTHERS.values():
        (folder / name).unlink(missing_ok=True)
    _write(folder, data)
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    for key in OTHERS.keys() & (document if isinstance(document, dict) else {}):
        value = document[key]
        if key == "model" and isinstance(value, str):
            content = value.encode("latin-1", "replace")
        elif key == "merges" and isinstance(value, str):
            content = value.encode(errors="surrogatepass")
        else:
            content = json.dumps(value).encode()
        (folder / OTHERS[key]).write_bytes(content)


_write = tokenizer_files.write
