"""A checkpoint is data. Refused are files for which transformers would run code or read files elsewhere.

Libraries that read a checkpoint's files may raise anything. :func:`refusing` makes one line of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specbeam.checkpoints.files import file_inside
from specbeam.errors import SpecbeamError

NEEDS_CODE = "needs code of its own (auto_map), and a checkpoint's code is never run"
TOKENIZER_FILES = ("fast_tokenizer_files", "gguf_file", "vocab", "merges")
"""The keys of tokenizer_config.json whose files transformers opens wherever they are."""


def check_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse what ``trust_remote_code=False`` lets pass: the code of a part of the model, and files elsewhere.

    Args:
        config: the content of config.json.

    Raises:
        SpecbeamError: transformers would run code of the folder, or read a file outside it.
    """
    if any("auto_map" in part for value in config.values() for part in dictionaries(value)):
        raise SpecbeamError(f"{folder}: a part of the model {NEEDS_CODE}")
    if config.get("transformers_weights") is not None:
        raise SpecbeamError(f"{folder}: config.json names a file of weights (transformers_weights): remove that key")
    if (folder / "adapter_config.json").exists():
        raise SpecbeamError(
            f"{folder} holds an adapter (adapter_config.json), for which transformers would load another model"
        )


def check_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises SpecbeamError if a tokenizer_config.json names files outside the folder."""
    for key in TOKENIZER_FILES:
        names = config.get(key)
        for name in names if isinstance(names, list) else [names]:
            if isinstance(name, str):
                file_inside(folder, name, f"{key} of tokenizer_config.json")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn any error of a library, raised by a checkpoint's files, into one line. It begins with ``what``.

    Raises:
        SpecbeamError: in place of the error.
    """
    try:
        yield
    except SpecbeamError:
        raise
    except BaseException as error:
        # A panic of Rust code is no Exception, because Python programs should not go on after it. These may.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise SpecbeamError(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    if "trust_remote_code" in str(error):
        return f"it {NEEDS_CODE}"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """All dictionaries in a value that was read from JSON."""
    rest = [value]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            yield part
            rest += part.values()
        elif isinstance(part, list):
            rest += part
