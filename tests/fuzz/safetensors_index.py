"""model.safetensors.index.json of a folder."""

import shutil

from tests.conftest import byte_tokenizer, random_model
from tests.fuzz.json_mutator import mutate_json as mutate
from tests.fuzz.toys import SIZES, load_and_generate, room

__all__ = ["mutate", "run", "seeds"]
INDEX = "model.safetensors.index.json"


def seeds() -> list[bytes]:
    folder = room() / "index"
    shutil.rmtree(folder, ignore_errors=True)
    random_model("llama", **SIZES).save_pretrained(folder, max_shard_size="20KB")
    byte_tokenizer().save_pretrained(folder)
    return [(folder / INDEX).read_bytes()]


def run(data: bytes) -> None:
    folder = room() / "index"
    (folder / INDEX).write_bytes(data)
    load_and_generate(folder)
