"""A tokenizer.model of SentencePiece: a protocol buffer with the pieces of a vocabulary and how it was trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specbeam.errors import SpecbeamError

BPE = 2
"""The type of models that merge pairs."""
CONTROL, USER_DEFINED = 3, 4
"""Types of pieces that are read as a whole."""
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
"""How a field is stored."""

Field = tuple[int, int | bytes]


@dataclass(frozen=True)
class SentencePiece:
    """The content of a file, with the format's defaults in place of missing fields.

    Attributes:
        model_type: 1 for unigram models, :data:`BPE`, and others.
        pieces: the tokens by their ids.
        types: of the pieces.
        special: the pieces for bos_token, eos_token and unk_token, as far as the file has them.
        charsmap: how characters are normalized; empty if they stay as they are.
    """

    model_type: int
    pieces: list[str]
    types: list[int]
    byte_fallback: bool
    unk_piece: str
    special: dict[str, str]
    charsmap: bytes


def read_sentencepiece(file: Path) -> SentencePiece:
    """The content of a tokenizer.model."""
    try:
        return _read(file.read_bytes())
    except (OSError, ValueError, IndexError) as error:
        raise SpecbeamError(f"{file} cannot be read as a model of SentencePiece: {error}") from error


def _read(data: bytes) -> SentencePiece:
    pieces: list[str] = []
    types: list[int] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            pieces.append(_text(piece.get(1, b"")))
            types.append(_number(piece.get(3, 1)))
        elif number in (2, 3):
            (trainer if number == 2 else normalizer).update(_fields(_bytes(value)))
    if not pieces:
        raise ValueError("it holds no pieces")
    if len(last := {piece: i for i, piece in enumerate(pieces)}) < len(pieces):
        twice = next(piece for i, piece in enumerate(pieces) if last[piece] != i)
        raise ValueError(f"it holds the piece {twice[:80]!r} twice")
    named = {"unk": (40, 0, 45, b"<unk>"), "bos": (41, 1, 46, b"<s>"), "eos": (42, 2, 47, b"</s>")}
    special = {
        f"{name}_token": _text(trainer.get(text, default) or default)
        for name, (i, default_id, text, default) in named.items()
        if _number(trainer.get(i, default_id)) >= 0
    }
    return SentencePiece(
        model_type=_number(trainer.get(3, 1)),
        pieces=pieces,
        types=types,
        byte_fallback=bool(_number(trainer.get(35, 0))),
        unk_piece=_text(trainer.get(45, b"<unk>")),
        special=special,
        charsmap=_bytes(normalizer.get(2, b"")),
    )


def _fields(data: bytes) -> Iterator[Field]:
    """The fields of a message by their numbers, as they are stored. Numbers of four and eight bytes are bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        how = key & 7
        if how == VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if how == BYTES:
            size, at = _varint(data, at)
        elif how in (EIGHT_BYTES, FOUR_BYTES):
            size = 8 if how == EIGHT_BYTES else 4
        else:
            raise ValueError(f"it has a field of the unknown kind {how}")
        if at + size > end:
            raise ValueError("it ends in the middle of a field")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits per byte, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("it ends in the middle of a field")
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift >= 70:
            raise ValueError("it holds a number of more than 10 bytes")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("it holds a number in place of bytes")
    return value


def _text(value: int | bytes) -> str:
    return _bytes(value).decode()


def _number(value: int | bytes) -> int:
    """A number of 32 bits with a sign."""
    if not isinstance(value, int):
        raise ValueError("it holds bytes in place of a number")
    return (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
