"""Checkpoints in GGUF, llama.cpp's format: one file with weights, tokenizer and chat template."""

from __future__ import annotations

import mmap
import struct
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from specbeam.checkpoints.checkpoint import DTYPES, Checkpoint, Facts
from specbeam.checkpoints.code import refusing
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.fingerprint import Extent
from specbeam.checkpoints.gguf_config import DIVISORS, config_from_gguf
from specbeam.checkpoints.gguf_tokenizer import CONTROL, tokenizer_from_gguf
from specbeam.errors import SpecbeamError

SCALAR_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""How struct reads a value, by the number of its type in the file."""
STRING, ARRAY = 8, 9
NO_TOKEN = 2**32 - 1
"""llama.cpp's -1, the id of no token, as a header holds it."""
MAX_DIMENSIONS = 4
"""Of a tensor, as in llama.cpp. To multiply thousands of sizes takes minutes."""
END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|end_of_text|>")
"""Control tokens that end a text, besides the tokens that the file names (the same in llama.cpp)."""
BLOCKS = {kind for kind in GGMLQuantizationType if kind.name not in DTYPES}

KINDS: dict[type, tuple[str, ...]] = {
    str: ("general.architecture", "tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre"),
    bool: ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"),
    int: (
        "general.alignment",
        *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding")),
    ),
}
"""The keys that are read, by the type of their values. gguf_config.py checks the sizes of the model itself."""
KINDS_OF_ENTRIES: dict[type, tuple[str, ...]] = {
    str: ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"),
    int: ("tokenizer.ggml.token_type",),
    float: ("tokenizer.ggml.scores",),
}
"""The keys that are arrays. All entries of an array have one type in the file."""


class TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int  # from the start of the file
    row_bytes: int


class GGUFCheckpoint(Checkpoint):
    """A GGUF file of version 2 or 3. Weights are dequantized as they are read.

    Raises:
        SpecbeamError: the file is truncated, damaged, or not a GGUF file.
    """

    ignored = DIVISORS

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.metadata, self._tensors = read_header(path)
        except OSError as error:
            raise SpecbeamError(f"{path} cannot be read: {error.strerror}") from error
        except SpecbeamError:
            raise
        except Exception as error:  # anything may follow from wrong bytes
            raise SpecbeamError(f"{path} is damaged: its header cannot be read. Fetch it again") from error
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.weights_by_type = Counter()
        size = path.stat().st_size
        for name, tensor in self._tensors.items():
            self.weights_by_type[tensor.type.name] += prod(tensor.shape)
            end = tensor.offset + prod(tensor.shape[:-1]) * tensor.row_bytes
            if end > size:
                raise SpecbeamError(
                    f"{path} is truncated: tensor {name} ends at byte {end:,}, the file at {size:,}. Fetch it again"
                )
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise SpecbeamError(f"{path} is one part of a split model: join the parts with llama-gguf-split --merge")

    @property
    def facts(self) -> Facts:
        architecture = str(self.metadata.get("general.architecture", "unknown"))
        return Facts(
            architecture=architecture,
            parameters=sum(map(prod, self.shapes.values())),
            context=number if isinstance(number := self.metadata.get(f"{architecture}.context_length"), int) else None,
            quantization=self._file_type() or self.dtype,
            size=self.path.stat().st_size,
            license=name if isinstance(name := self.metadata.get("general.license"), str) else None,
        )

    def _file_type(self) -> str | None:
        """The mixture of types with which llama.cpp made the file, such as "Q4_K_M"."""
        try:
            return LlamaFileType(self.metadata["general.file_type"]).name.removeprefix("MOSTLY_")
        except (KeyError, ValueError):
            return None

    @cached_property
    def config(self) -> Config:
        divisors = {
            name: tuple(self.read_stored(name, 0, self.shapes[name][0]).flatten().tolist())
            for name in DIVISORS
            if name in self._tensors
        }
        return config_from_gguf(self.metadata, self.shapes, divisors)

    @cached_property
    def tokenizer(self) -> Any:
        if not self.metadata.get("tokenizer.ggml.tokens"):
            return None
        with refusing(f"{self.path}: its tokenizer is damaged"):
            return tokenizer_from_gguf(self.metadata, self.path)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        named = {self.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")}
        tokens = self.metadata.get("tokenizer.ggml.tokens", [])
        types = self.metadata.get("tokenizer.ggml.token_type", [])
        known = {
            i
            for i, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind == CONTROL and token in END_TOKENS
        }
        return frozenset({i for i in named if i is not None and 0 <= i < NO_TOKEN} | known)

    @property
    def modules(self) -> Mapping[str, str]:
        return self.architecture.gguf_tensors

    @property
    def extents(self) -> list[tuple[Path, list[Extent]]]:
        tensors = [Extent(t.offset, prod(t.shape[:-1]) * t.row_bytes) for t in self._tensors.values()]
        header = min((t.start for t in tensors), default=self.path.stat().st_size)
        return [(self.path, [Extent(0, header, whole=True), *tensors])]

    def blocks(self, source: str) -> int | None:
        kind = self._tensors[source].type
        return int(kind) if kind in BLOCKS else None

    def raw(self, source: str) -> NDArray[np.uint8]:
        tensor = self._tensors[source]
        return np.memmap(self.path, np.uint8, "r", tensor.offset, (tensor.shape[0] * tensor.row_bytes,))

    def order(self, source: str) -> NDArray[np.int64] | None:
        if not self.architecture.gguf_interleaves_rope or not (".attn_q." in source or ".attn_k." in source):
            return None
        rows = np.arange(self.shapes[source][0], dtype=np.int64).reshape(-1, self.config.head_dim // 2, 2)
        return rows.swapaxes(1, 2).ravel()  # (pairs, halves) to (halves, pairs) in every head

    def read_stored(self, source: str, start: int, stop: int) -> Tensor:
        tensor = self._tensors[source]
        vector = len(tensor.shape) == 1  # one row of the file, and many of ours
        first, last = (0, 1) if vector else (start, stop)
        count, offset = (last - first) * tensor.row_bytes, tensor.offset + first * tensor.row_bytes
        raw = np.fromfile(self.path, np.uint8, count, offset=offset).reshape(last - first, tensor.row_bytes)
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                values = torch.from_numpy(np.ascontiguousarray(dequantize(raw, tensor.type), dtype=np.float32))
        except NotImplementedError as error:
            raise SpecbeamError(
                f"{self.path}: tensor {source} is of type {tensor.type.name}, which cannot be dequantized"
            ) from error
        return values.flatten()[start:stop] if vector else values.view(last - first, *tensor.shape[1:])


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The metadata and the tensors of a GGUF file.

    gguf's own reader makes a NumPy array of every string: 8 s for a vocabulary of 150,000 tokens. This takes a
    fraction of a second. Errors of struct and of decoding pass through to the caller.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SpecbeamError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(path, data)


def _read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    data.seek(4)

    def scalar(kind: str) -> Any:
        return struct.unpack(kind, data.read(struct.calcsize(kind)))[0]

    def string() -> str:
        length = scalar("<Q")
        if len(content := data.read(length)) < length:
            raise ValueError("a string ends beyond the file")
        return content.decode("utf-8", errors="replace")

    def value(kind: int) -> Any:
        if kind == STRING:
            return string()
        if kind != ARRAY:
            return scalar(SCALAR_FORMATS[kind])
        inner, length = scalar("<I"), scalar("<Q")
        if inner in SCALAR_FORMATS:
            entries = f"<{length}{SCALAR_FORMATS[inner][1]}"
            return list(struct.unpack(entries, data.read(struct.calcsize(entries))))
        return [value(inner) for _ in range(length)]

    version = scalar("<I")
    if version not in (2, 3):
        raise SpecbeamError(f"{path} is GGUF version {version}: versions 2 and 3, little-endian, can be read")
    tensor_count, key_count = scalar("<Q"), scalar("<Q")
    metadata = {}
    for _ in range(key_count):
        key = string()
        metadata[key] = value(scalar("<I"))
    _check_kinds(path, metadata)
    described = []
    for _ in range(tensor_count):
        name = string()
        if (dimensions := scalar("<I")) > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(scalar("<Q") for _ in range(dimensions))[::-1]
        described.append((name, shape, GGMLQuantizationType(scalar("<I")), scalar("<Q")))
    alignment = max(1, metadata.get("general.alignment", 32))
    start = -(-data.tell() // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in described:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise SpecbeamError(f"{path} is damaged: tensor {name} of type {kind.name} has shape {list(shape)}")
        tensors[name] = TensorInfo(shape, kind, start + offset, shape[-1] // block * block_bytes)
    return metadata, tensors


def _check_kinds(path: Path, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        wrong = any(key in keys and type(value) is not kind for kind, keys in KINDS.items())
        for kind, keys in KINDS_OF_ENTRIES.items():
            if key in keys:
                wrong = not isinstance(value, list) or type(value[0] if value else kind()) is not kind
        if wrong:
            raise SpecbeamError(f"{path} is damaged: its key {key} has a value of a wrong type. Fetch it again")
