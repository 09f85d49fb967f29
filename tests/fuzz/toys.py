"""The toy model of the harnesses, and the folder for their files."""

import io
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import specbeam
from specbeam.checkpoints import open_checkpoint
from specbeam.cli import main
from specbeam.errors import BAD_INPUT, FAILED
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, random_model

SIZES = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 64},
}
_room = tempfile.TemporaryDirectory()  # removed at exit


def room() -> Path:
    """A folder for files, empty at first."""
    return Path(_room.name)


@cache
def model_folder() -> Path:
    """The folder of a toy model with a chat template."""
    folder = room() / "toy"
    random_model("llama", **SIZES).save_pretrained(folder)
    byte_tokenizer(CHAT_TEMPLATE).save_pretrained(folder)
    return folder


@cache
def toy() -> Any:
    """The toy model, loaded."""
    return specbeam.load(model_folder(), quantize="float32")


def load_and_generate(source: Path, **how: Any) -> Any:
    """Read the facts of a model, load it, prefill a prompt and generate two tokens. Returns the model."""
    _ = open_checkpoint(source).facts
    lm = specbeam.load(source, **how)
    result = specbeam.generate(lm, [0] if lm.tokenizer is None else "Hi", max_new_tokens=2)
    assert isinstance(result.text, str)
    return lm


def command(*words: str) -> int:
    """A command of specbeam. Wrong input has to give one line, and rows that fail have to give one line each."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as stop:
            status = stop.code
    lines = err.getvalue().splitlines()
    assert status in (0, FAILED, BAD_INPUT), status
    assert "Traceback" not in err.getvalue(), err.getvalue()
    assert status != BAD_INPUT or (len(lines) == 1 and lines[0].startswith("specbeam")), err.getvalue()
    assert status == 0 or lines
    return status
