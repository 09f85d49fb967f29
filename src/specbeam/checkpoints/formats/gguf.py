"""Checkpoints in GGUF, llama.cpp's format: one file with weights, tokenizer and chat template."""

from __future__ import annotations

import logging
import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.checkpoint import DTYPES, Checkpoint, Facts, Table, left_out
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.families import GGUF_ARCHITECTURES
from specbeam.checkpoints.files import PART, Extent, check_fetched, refusing
from specbeam.checkpoints.formats.folder_experts import pieces
from specbeam.checkpoints.formats.gguf_config import DIVISORS, KINDS_OF_MODELS, check_transformers, config_from_gguf
from specbeam.checkpoints.formats.gguf_types import MIXTURES, TYPES, GGMLType, dequantize
from specbeam.checkpoints.heads import check_head, gguf_modules, mtp_config
from specbeam.checkpoints.tokenizers.gguf_tokenizer import tokenizer_from_gguf
from specbeam.checkpoints.tokenizers.gguf_vocabulary import ID_KEYS, GGUFVocabulary, vocabulary_from_gguf
from specbeam.errors import SpecbeamError
from specbeam.options.generation_defaults import GenerationDefaults

logger = logging.getLogger("specbeam")

SCALARS = {
    **{0: ("uint8", "<B"), 1: ("int8", "<b"), 2: ("uint16", "<H"), 3: ("int16", "<h"), 4: ("uint32", "<I")},
    **{5: ("int32", "<i"), 6: ("float32", "<f"), 7: ("bool", "<?"), 10: ("uint64", "<Q"), 11: ("int64", "<q")},
    12: ("float64", "<d"),
}
"""The name of a value's type, and how struct reads it, by the number of the type in the file."""
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4
"""Of a tensor, as in llama.cpp. To multiply thousands of sizes takes minutes."""

OF_IK_LLAMA = {
    **dict(enumerate(("Q6_0", "IQ1_BN", "IQ2_BN", "Q8_K64", "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K"), 133)),
    **dict(enumerate(("IQ4_KS", "IQ2_KS", "IQ4_KSS"), 144)),
    **dict(enumerate(("IQ5_KS", "IQ2_KT", "IQ3_KT", "IQ4_KT", "IQ3_KS", "IQ2_KL", "IQ1_KT"), 152)),
}
OTHER_TYPES = {
    **{4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"},
    36: "IQ4_NL_4_4, or I2_S of BitNet",
    **{number: f"{name} of ik_llama.cpp" for number, name in OF_IK_LLAMA.items()},
}
"""Types of tensors that llama.cpp had once, or that forks of it have."""

SAMPLING: dict[str, tuple[str, type, Callable[[float], bool]]] = {
    "temperature": ("general.sampling.temp", float, lambda x: x > 0),
    "top_k": ("general.sampling.top_k", int, lambda x: x > 0),
    "top_p": ("general.sampling.top_p", float, lambda x: 0 < x < 1),
    "min_p": ("general.sampling.min_p", float, lambda x: 0 < x < 1),
}
"""The keys with recommended sampling options, their types, and a test whether a value changes anything."""
PENALTY = "general.sampling.penalty_repeat"
"""llama.cpp's penalty looks at the last tokens, and ours at the whole text. So only chat and the server take it."""

INTEGERS = tuple(name for name, _ in SCALARS.values() if "int" in name)
FLOATS = ("float32", "float64")
KINDS: dict[str, tuple[str, ...]] = {
    **{key: FLOATS if kind is float else INTEGERS for key, kind, _ in SAMPLING.values()},
    PENALTY: FLOATS,
    **dict.fromkeys(("general.architecture", "general.name", "general.type"), ("string",)),
    **dict.fromkeys(("tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre"), ("string",)),
    **dict.fromkeys((f"tokenizer.ggml.add_{x}" for x in ("bos_token", "eos_token", "space_prefix")), ("bool",)),
    **dict.fromkeys(("general.alignment", *ID_KEYS), ("uint32",)),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), ("[string]",)),
    **dict.fromkeys(("tokenizer.ggml.token_type", "tokenizer.ggml.suppress_tokens"), ("[int32]", "[uint32]")),
    "tokenizer.ggml.scores": ("[float32]", "[int32]"),
}
"""The types that the values of keys may have. :data:`KINDS_OF_MODELS` and architectures have the keys of models."""


LAYER = re.compile(r"blk\.(\d+)\.")
OUTPUT_GATE, GATE_AND_UP = ".ffn_gate_inp_shexp.weight", ".ffn_gate_up_exps.weight"
VECTORS = ("_exps.bias", ".ssm_a", ".ssm_d", ".ssm_norm.weight")
"""Ends of the names of tensors. Vectors may have further dimensions."""


class TensorInfo(NamedTuple):
    """Where a tensor lies in the file.

    Attributes:
        offset: from the start of the file.
        stride: the bytes from an expert's matrix to the next one's; None if each begins where the one before ends.
    """

    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    row_bytes: int
    stride: int | None = None

    @property
    def bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes

    def places(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """The offset and the number of bytes of each piece that rows start to stop lie in."""
        if self.stride is None:
            yield self.offset + start * self.row_bytes, (stop - start) * self.row_bytes
            return
        for expert, first, last in pieces(self.shape[1], start, stop):
            yield self.offset + expert * self.stride + first * self.row_bytes, (last - first) * self.row_bytes


class GGUFCheckpoint(Checkpoint):
    """A GGUF file of version 2 or 3. Weights are dequantized as they are read.

    Raises:
        SpecbeamError: the file is truncated, damaged, or not a GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.metadata, stored = read_header(path)
        except OSError as error:
            raise SpecbeamError(f"{path} cannot be read: {error.strerror}") from error
        except SpecbeamError:
            raise
        except Exception as error:  # anything may follow from wrong bytes
            raise SpecbeamError(f"{path} is damaged: its header cannot be read ({error}). Fetch it again") from error
        self._tensors = dict(_with_halves(stored))
        self.shapes = {name: _shape(name, tensor.shape) for name, tensor in self._tensors.items()}
        architecture = GGUF_ARCHITECTURES.get(str(self.metadata.get("general.architecture")))
        self._zeros = left_out(self.shapes, () if architecture is None else architecture.gguf_zeros)
        self.shapes |= self._zeros
        self.weights_by_type = Counter()
        size = path.stat().st_size
        for name, tensor in stored.items():
            self.weights_by_type[tensor.type.name] += prod(tensor.shape)
            end = tensor.offset + tensor.bytes
            if end > size:
                raise SpecbeamError(
                    f"{path} is truncated: tensor {name} ends at byte {end:,}, the file at {size:,}. Fetch it again"
                )
        self._extents = [Extent(t.offset, t.bytes) for t in stored.values()]
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise _split(path)

    @property
    def facts(self) -> Facts:
        architecture = str(self.metadata.get("general.architecture", "unknown"))
        return Facts(
            architecture=architecture,
            parameters=sum(prod(tensor.shape) for tensor in self._tensors.values()),
            context=self._context(self.metadata.get(f"{architecture}.context_length")),
            quantization=self._file_type() or self.dtype,
            size=self.path.stat().st_size,
            license=name if isinstance(name := self.metadata.get("general.license"), str) else None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        def get(*keys: str) -> str:
            return " ".join(str(self.metadata[f"general.{key}"]) for key in keys if f"general.{key}" in self.metadata)

        return get("name"), get("basename", "size_label", "finetune"), self.path.stem, get("architecture")

    def _file_type(self) -> str | None:
        """The mixture of types with which llama.cpp made the file, such as "Q4_K_M"."""
        number = self.metadata.get("general.file_type")
        return MIXTURES[number] if isinstance(number, int) and 0 <= number < len(MIXTURES) else None

    @cached_property
    def config(self) -> Config:
        divisors = {
            name: tuple(self.read_stored(name, 0, self.shapes[name][0]).ravel().tolist())
            for name in DIVISORS
            if name in self._tensors
        }
        return config_from_gguf(self.metadata, self.shapes, divisors)

    def sources(self, name: str) -> list[str]:
        """The tensors of a parameter. Query, key and value may be one tensor, as llama.cpp has them for all models."""
        sources = super().sources(name)
        stacked = sources[0].replace(".attn_q.", ".attn_qkv.")
        return [stacked] if len(sources) > 1 and sources[0] not in self.shapes and stacked in self.shapes else sources

    def check_transformers(self, config: Any) -> None:
        check_transformers(self.metadata, self.shapes, config, lambda: self.config)

    @cached_property
    def vocabulary(self) -> GGUFVocabulary:
        """The tokens of the file. Raises SpecbeamError if they contradict each other."""
        with refusing(f"{self.path}: its tokenizer is damaged"):
            return vocabulary_from_gguf(self.metadata, self.path)

    @cached_property
    def tokenizer(self) -> Any:
        if not self.vocabulary.tokens:
            if self.vocabulary.kind in (None, "none", "no_vocab"):
                return None
            raise SpecbeamError(f"{self.path} has a tokenizer without tokens (tokenizer.ggml.tokens). Fetch it again")
        with refusing(f"{self.path}: its tokenizer is damaged"):
            return tokenizer_from_gguf(self.metadata, self.vocabulary)

    def tokens_beyond(self, vocab_size: int) -> list[tuple[int, str]]:
        return [*enumerate(self.vocabulary.tokens[vocab_size:], vocab_size)]  # to ask for all tokens takes long

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self.vocabulary.eos_token_ids

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        taken = {key: name for name, (key, _, changes) in SAMPLING.items() if changes(self.metadata.get(key, 0))}
        settings = {name: self.metadata[key] for key, name in taken.items()}
        known = {PENALTY, *(key for key, *_ in SAMPLING.values())}
        penalty = self.metadata.get(PENALTY, 1.0)
        if others := sorted(key for key in self.metadata if key.startswith("general.sampling.") and key not in known):
            logger.warning("%s recommends options that specbeam lacks: %s", self.path, ", ".join(others))
        suppressed = [i for i in self.metadata.get("tokenizer.ggml.suppress_tokens", []) if i >= 0]
        return GenerationDefaults(
            settings | {"suppress_tokens": suppressed or None},
            self.path.name,
            {} if penalty == 1 else {"repetition_penalty": penalty},
        )

    @property
    def ignored(self) -> tuple[str, ...]:
        depth = self.config.num_layers  # the layers behind it are for multi-token prediction
        later = tuple(name for name in self.shapes if (layer := LAYER.match(name)) and int(layer[1]) >= depth)
        return DIVISORS + self.architecture.gguf_ignored + later

    @cached_property
    def modules(self) -> Mapping[str, str]:
        return self.architecture.gguf_tensors

    @cached_property
    def mtp(self) -> GGUFCheckpoint | None:
        block = self.config.num_layers
        own = {name: shape for name, shape in self.shapes.items() if name.startswith(f"blk.{block}.")}
        if not own:
            return None
        check_head(self.shapes, block)
        head = copy(self)
        vars(head).pop("parts", None)
        vars(head).update(
            config=mtp_config(self.config),
            modules=gguf_modules(self.modules, block),
            shapes=own,
            is_head=True,
        )
        return head

    @property
    def extents(self) -> list[tuple[Path, list[Extent]]]:
        header = min((t.start for t in self._extents), default=self.path.stat().st_size)
        return [(self.path, [Extent(0, header, whole=True), *self._extents])]

    def blocks(self, source: str) -> int | None:
        if source in self._zeros:
            return None
        kind = self._tensors[source].type
        return None if kind.name in DTYPES else kind.number

    def raw(self, source: str, start: int, stop: int) -> NDArray[np.uint8]:
        places = self._tensors[source].places(start, stop)
        found = [np.memmap(self.path, np.uint8, "r", offset, (size,)) for offset, size in places]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def table(self, source: str) -> Table | None:
        tensor = self._tensors[source]
        return Table(self.path, tensor.type.number, tensor.shape, tensor.offset, tensor.bytes)

    def order(self, source: str) -> NDArray[np.int64] | None:
        return self.architecture.gguf_rows(source, self.parts.get(source))

    def read_stored(self, source: str, start: int, stop: int) -> NDArray[np.float32]:
        if source in self._zeros:
            return np.zeros(stop - start, np.float32)
        tensor = self._tensors[source]
        vector = len(self.shapes[source]) == 1  # a row of the file is many of ours
        first, last = (0, prod(tensor.shape[:-1])) if vector else (start, stop)
        places = tensor.places(first, last)
        found = [np.fromfile(self.path, np.uint8, size, offset=offset) for offset, size in places]
        raw = (found[0] if len(found) == 1 else np.concatenate(found)).reshape(last - first, tensor.row_bytes)
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                values = dequantize(raw, tensor.type).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise SpecbeamError(
                f"{self.path}: tensor {source} is of type {tensor.type.name}, which cannot be dequantized"
            ) from error
        return values.ravel()[start:stop] if vector else values.reshape(last - first, tensor.shape[-1])


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor as it is read: the biases of all experts are one vector, and a gate is a matrix."""
    if name.endswith(OUTPUT_GATE) and len(shape) == 1:
        return 1, *shape
    return (prod(shape),) if name.endswith(VECTORS) else shape


def _with_halves(stored: Mapping[str, TensorInfo]) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors of a file. Gate and up of experts in one tensor are two, as in other files."""
    for name, tensor in stored.items():
        if not name.endswith(GATE_AND_UP) or len(tensor.shape) != 3 or tensor.shape[1] % 2:
            yield name, tensor
            continue
        experts, rows, columns = tensor.shape
        half, stride = (experts, rows // 2, columns), rows * tensor.row_bytes
        for i, part in enumerate(("gate", "up")):
            offset = tensor.offset + i * stride // 2
            own = tensor._replace(shape=half, offset=offset, stride=stride)
            yield name.replace("gate_up", part), own


def _split(path: Path) -> SpecbeamError:
    """The error for one part of a split model. It names the parts that are not there."""
    if part := PART.search(path.name):
        names = [f"{path.name[: part.start()]}-{i:05}-of-{part[1]}.gguf" for i in range(1, min(int(part[1]), 999) + 1)]
        if lost := [name for name in names if not (path.parent / name).is_file()]:
            return SpecbeamError(
                f"{path} is one part of a split model, and {len(lost)} of its {len(names)} parts are not there, among "
                f"them {lost[0]}: fetch them, and join all parts with llama-gguf-split --merge"
            )
    return SpecbeamError(f"{path} is one part of a split model: join the parts with llama-gguf-split --merge")


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The metadata and the tensors of a GGUF file.

    gguf's own reader makes a NumPy array of every string: 8 s for a vocabulary of 150,000 tokens. This takes a
    fraction of a second. Errors of struct and of decoding pass through to the caller.
    """
    check_fetched(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise SpecbeamError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(path, data)


def _read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    data.seek(4)
    size = len(data)

    def scalar(kind: str) -> Any:
        return struct.unpack(kind, data.read(struct.calcsize(kind)))[0]

    def string() -> str:
        length = scalar("<Q")
        if len(content := data.read(length)) < length:
            raise ValueError("a string ends beyond the file")
        return content.decode("utf-8", errors="replace")

    def strings(count: int) -> list[str]:  # a vocabulary has 262,144, so this is one loop without calls of ours
        begin, length_at, texts = data.tell(), struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            end = begin + 8 + length_at(data, begin)[0]
            if end > size:
                raise ValueError("a string ends beyond the file")
            texts.append(data[begin + 8 : end].decode("utf-8", "replace"))
            begin = end
        data.seek(begin)
        return texts

    def value(kind: int) -> tuple[str, Any]:
        """The name of the type, and the value. llama.cpp has no arrays of arrays."""
        if kind == STRING:
            return "string", string()
        if kind != ARRAY:
            name, form = SCALARS[kind]
            return name, scalar(form)
        inner, length = scalar("<I"), scalar("<Q")
        if inner == STRING:
            return "[string]", strings(length)
        name, form = SCALARS[inner]
        entries = f"<{length}{form[1]}"
        return f"[{name}]", list(struct.unpack(entries, data.read(struct.calcsize(entries))))

    version = scalar("<I")
    if version not in (2, 3):
        raise SpecbeamError(f"{path} is GGUF version {version}: versions 2 and 3, little-endian, can be read")
    tensor_count, key_count = scalar("<Q"), scalar("<Q")
    metadata, kinds = {}, {}
    for _ in range(key_count):
        key = string()
        if key in metadata:
            raise SpecbeamError(f"{path} is damaged: it has the key {key} twice")
        kinds[key], metadata[key] = value(scalar("<I"))
    _check_kinds(path, metadata, kinds)
    described = []
    for _ in range(tensor_count):
        name = string()
        if (dimensions := scalar("<I")) > MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(scalar("<Q") for _ in range(dimensions))[::-1]
        described.append((name, shape, _type(path, name, scalar("<I")), scalar("<Q")))
    alignment = metadata.get("general.alignment", 32)
    if alignment < 1 or alignment & (alignment - 1):
        raise SpecbeamError(f"{path} is damaged: its tensors are aligned to {alignment} bytes, which is no power of 2")
    start = -(-data.tell() // alignment) * alignment
    tensors, end = {}, 0
    for name, shape, kind, offset in described:
        if name in tensors:
            raise SpecbeamError(f"{path} is damaged: it has the tensor {name} twice")
        if not shape or shape[-1] % kind.size:
            raise SpecbeamError(f"{path} is damaged: tensor {name} of type {kind.name} has shape {list(shape)}")
        if len(shape) == 1 and kind.name != "F32":
            raise SpecbeamError(f"{path} is damaged: {name} is a vector of type {kind.name}, and not F32")
        if offset != end:
            raise SpecbeamError(
                f"{path} is damaged: tensor {name} begins at byte {offset:,} of the data, and not at {end:,}, after "
                "the one before it. Fetch it again"
            )
        tensors[name] = TensorInfo(shape, kind, start + offset, shape[-1] // kind.size * kind.bytes)
        end += -(-tensors[name].bytes // alignment) * alignment
    return metadata, tensors


def _check_kinds(path: Path, metadata: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Refuse values of other types than llama.cpp takes. An empty array may have any."""
    name = str(metadata.get("general.architecture"))
    of_models = KINDS_OF_MODELS | (GGUF_ARCHITECTURES[name].gguf_keys if name in GGUF_ARCHITECTURES else {})
    for key, kind in kinds.items():
        allowed = KINDS.get(key) or of_models.get(key.removeprefix(f"{name}."))
        if allowed and kind not in allowed and not (kind.startswith("[") and metadata[key] == []):
            raise SpecbeamError(
                f"{path} is damaged: its key {key} has a value of a wrong type, {kind} and not {' or '.join(allowed)}. "
                "Fetch it again"
            )


def _type(path: Path, tensor: str, number: int) -> GGMLType:
    if number not in TYPES:
        name = f" ({OTHER_TYPES[number]})" if number in OTHER_TYPES else ""
        raise SpecbeamError(
            f"{path}: tensor {tensor} is of type {number}{name}, which is not supported: quantize the model again to a "
            "type that llama.cpp has"
        )
    return TYPES[number]
