"""GGUF files: headers, tokenizers and the shapes of tensors."""

import random
import struct
from typing import Any

from specbeam.checkpoints.formats.gguf import read_header
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import LLAMA3_ROPE, LONGROPE, YARN, random_model
from tests.fuzz.json_mutator import mutated
from tests.fuzz.toys import SIZES, load_and_generate, room

MODELS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("llama", "qwen2", "gpt_neox", "stablelm")),
    ("llama", {"rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 32}}),
    ("llama", {"rope_parameters": YARN}),
    ("gpt2", {"n_inner": None}),
    ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [1.0, 2.0], "long_factor": [2.0, 4.0]}}),
    ("gemma2", {"sliding_window": 5, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}),
]
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64 = 4, 5, 6, 7, 8, 9, 10, 11
SHARE_OF_BYTE_MUTATIONS = 0.3


def seeds() -> list[bytes]:
    file, made = room() / "seed.gguf", []
    for architecture, changes in MODELS:
        write_gguf(file, random_model(architecture, **(SIZES | changes)))
        made.append(file.read_bytes())
    return made


def run(data: bytes) -> None:
    file = room() / "model.gguf"
    file.write_bytes(data)
    load_and_generate(file, backend="cpu" if len(data) % 2 else "torch")


def mutate(data: bytes, longest: int, seed: int) -> bytes | None:
    """A file with a changed header. None if bytes are to be changed instead."""
    draw = random.Random(seed)
    if draw.random() < SHARE_OF_BYTE_MUTATIONS:
        return None
    file = room() / "before.gguf"
    file.write_bytes(data)
    try:
        metadata, tensors = read_header(file)
    except Exception:  # an earlier mutation damaged it
        return None
    start = min((tensor.offset for tensor in tensors.values()), default=len(data))
    document: Any = {
        "metadata": metadata,
        "tensors": [[name, list(t.shape[::-1]), t.type.number, t.offset - start] for name, t in tensors.items()],
    }
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        mutated(document[draw.choice(("metadata", "metadata", "tensors"))], draw)
    try:
        changed = header(document) + data[start:]
    except (struct.error, TypeError, ValueError, OverflowError, AttributeError):
        return None
    return changed if len(changed) <= longest else None


def header(document: Any) -> bytes:
    """The bytes of a GGUF file before its tensors."""
    metadata, tensors = document["metadata"], document["tensors"]
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        kind, encoded = _value(value)
        parts += [_string(key), struct.pack("<I", kind), encoded]
    for name, shape, kind, offset in tensors:
        parts += [_string(name), struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)]
    written = b"".join(parts)
    return written + b"\0" * (-len(written) % 32)


def _string(text: str) -> bytes:
    encoded = text.encode(errors="surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> tuple[int, bytes]:
    if isinstance(value, str):
        return STRING, _string(value)
    if isinstance(value, list):
        kinds, parts = zip(*map(_value, value), strict=True) if value else ((INT32,), ())
        return ARRAY, struct.pack("<IQ", kinds[0], len(value)) + b"".join(parts)
    if isinstance(value, bool):
        return BOOL, struct.pack("<?", value)
    if isinstance(value, float):
        return FLOAT32, struct.pack("<f", value)
    value = int(value)
    for kind, form in ((UINT32, "<I"), (INT32, "<i"), (UINT64, "<Q")):
        try:
            return kind, struct.pack(form, value)
        except struct.error:
            continue
    return INT64, struct.pack("<q", value)
