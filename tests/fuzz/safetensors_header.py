"""model.safetensors of a folder."""

import random
import shutil
import struct

from tests.fuzz.json_mutator import mutate_json
from tests.fuzz.toys import load_and_generate, model_folder, room

SHARE_OF_BYTE_MUTATIONS = 0.3


def seeds() -> list[bytes]:
    return [(model_folder() / "model.safetensors").read_bytes()]


def run(data: bytes) -> None:
    folder = room() / "header"
    if not folder.exists():
        shutil.copytree(model_folder(), folder)
    (folder / "model.safetensors").write_bytes(data)
    load_and_generate(folder)


def mutate(data: bytes, longest: int, seed: int) -> bytes | None:
    """A file with a changed header. None if bytes are to be changed instead."""
    if len(data) < 8 or random.Random(seed).random() < SHARE_OF_BYTE_MUTATIONS:
        return None
    (length,) = struct.unpack("<Q", data[:8])
    header = mutate_json(data[8 : 8 + length], longest, seed)
    if header is None:
        return None
    header += b" " * (-len(header) % 8)
    return (struct.pack("<Q", len(header)) + header + data[8 + length :])[:longest]
