"""model.bin of a folder of CTranslate2: names, shapes, types and numbers."""

import random
import re
from functools import cache
from typing import Any

import numpy as np

import specbeam
from specbeam.checkpoints import open_checkpoint
from tests.checkpoints.test_ctranslate2 import TYPES, model_bin, variables
from tests.fuzz.toys import room

NAME = re.compile(rb"(?:en|de)coder/[\w/]+\0")
HEAD_BYTES = 18
"""Of a variable after its name, at most: rank, shape, type and size."""
SMALL: dict[str, Any] = {
    **{"encoder_layers": 1, "decoder_layers": 1, "d_model": 16, "max_source_positions": 4, "max_target_positions": 16},
    **{"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1},
    **{"bos_token_id": 2, "decoder_start_token_id": 2},
}


@cache
def seeds() -> list[bytes]:
    from tests.backends.test_whisper import random_whisper

    model = random_whisper(**SMALL)
    return [model_bin(variables(model, kind)) for kind in TYPES]


def run(data: bytes) -> None:
    folder = room() / "ctranslate2"
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(data)
    (folder / "vocabulary.txt").write_text("<|startoftranscript|>\n<|endoftext|>\n")
    _ = open_checkpoint(folder).facts
    lm = specbeam.load(folder, backend="cpu", quantize=("float32", "int8", "int4")[len(data) % 3])
    engine = specbeam.Engine(lm)
    shape = lm.backend.features_shape
    assert shape is not None
    request = engine.submit([0], {"max_new_tokens": 2, "num_beams": 2}, features=np.ones(shape, np.float32))
    engine.run()
    assert request.result().text == ""


def mutate(data: bytes, longest: int, seed: int) -> bytes | None:
    """A file with another name, or with another byte behind one. None if bytes are to be changed anywhere."""
    draw, names = random.Random(seed), [*NAME.finditer(data)]
    if not names or draw.random() < 0.2:
        return None
    one, other = draw.choice(names), draw.choice(names)
    if draw.random() < 0.3:
        data = data[: one.start() - 2] + len(other[0]).to_bytes(2, "little") + other[0] + data[one.end() :]
    else:
        at = min(one.end() + draw.randrange(HEAD_BYTES), len(data) - 1)
        data = data[:at] + bytes([draw.choice([0, 1, 2, 4, 5, 8, 16, 255, draw.randrange(256)])]) + data[at + 1 :]
    return data[:longest]
