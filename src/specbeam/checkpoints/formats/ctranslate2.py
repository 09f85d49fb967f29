"""Checkpoints as CTranslate2 converts them: a folder with model.bin, a vocabulary, and perhaps a tokenizer.json."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.checkpoint import Checkpoint, Facts, as_matrix, matrix_shape
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.families import CTRANSLATE2_ARCHITECTURES
from specbeam.checkpoints.files import MODEL, Extent, check_fetched, check_links, read_json, refusing
from specbeam.checkpoints.formats.folder_config import check_counts, config_from_hugging_face
from specbeam.checkpoints.tokenizers.folder_tokenizer import tokenizer_from_folder
from specbeam.errors import SpecbeamError, shown
from specbeam.options.generation_defaults import GenerationDefaults

NAMES = {"layer_norm.weight": "layer_norm/gamma", "layer_norm.bias": "layer_norm/beta"}
NAMES |= {"position_encodings.weight": "position_encodings/encodings"}
"""How its names of parameters end, by how ours would."""
END = "<|endoftext|>"
SETTINGS = {"suppress_ids": "suppress_tokens", "suppress_ids_begin": "begin_suppress_tokens"}
SETTINGS |= {"alignment_heads": "alignment_heads"}
"""Our names of the generation settings in its config.json."""
VERSION = 6
"""The version of model.bin that is read. Since 2021 it has aliases, and names the kind of model."""
TYPES: list[tuple[np.dtype[Any], str]] = [
    *((np.dtype("<f4"), "F32"), (np.dtype("i1"), "I8"), (np.dtype("<i2"), "I16"), (np.dtype("<i4"), "I32")),
    *((np.dtype("<f2"), "F16"), (np.dtype("<u2"), "BF16")),
]
"""How NumPy reads the numbers of each type, and its name, by the number of the type in the file."""
MAX_VARIABLES, MAX_RANK = 1 << 16, 4
"""Far more than any model has. To read millions of names takes minutes."""
SCALE = "_scale"
"""What the name of a quantized variable's scales ends with."""


class CTranslate2Checkpoint(Checkpoint):
    """A folder with a ``model.bin`` of version 6. Integers count as the float weights that they stand for.

    Raises:
        SpecbeamError: a file is damaged, or the model is of another kind.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_links(path)
        self._file = read_model_file(path / MODEL)
        self._settings = read_json(path, "config.json")
        self.shapes = {name: one.shape for name, one in self._file.variables.items()}
        self.weights_by_type = Counter()
        for one in self._file.variables.values():
            self.weights_by_type[one.dtype] += prod(one.shape)
        architecture = CTRANSLATE2_ARCHITECTURES.get(self._file.spec)
        if architecture is None:
            raise SpecbeamError(
                f"{path} is a {shown(self._file.spec)} of CTranslate2, which is not supported: supported are "
                f"{', '.join(CTRANSLATE2_ARCHITECTURES)}"
            )
        if self._file.revision != architecture.ctranslate2_revision:
            raise SpecbeamError(
                f"{path} is a {self._file.spec} of revision {self._file.revision}, and only revision "
                f"{architecture.ctranslate2_revision} is supported: convert the model again"
            )
        for name, number in self._file.numbers.items():
            expected = architecture.ctranslate2_numbers
            if name not in expected or expected[name] not in (None, number):
                raise SpecbeamError(f"{path}: {shown(name)} = {number:g} in {MODEL} is not supported")
        for name, one in self._file.variables.items():
            if one.is_integer and one.scales is None and name not in architecture.ctranslate2_ignored:
                raise SpecbeamError(f"{path}: {shown(name)} of {MODEL} holds integers, but has no scale")
        self._architecture = architecture

    @property
    def facts(self) -> Facts:
        return Facts(
            architecture=self.config.architecture,
            parameters=sum(map(prod, self.shapes.values())),
            context=self.config.context_length,
            quantization=self.dtype,
            size=(self.path / MODEL).stat().st_size,
            license=None,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return self.path.name, self.config.architecture

    @cached_property
    def config(self) -> Config:
        with refusing(f"{self.path}: {MODEL} does not describe a {self._architecture.name} model"):
            keys = self._architecture.keys_of_ctranslate2(self._shape, self._file.numbers, self.shapes)
        keys |= {"model_type": self._architecture.name, "tie_word_embeddings": self._head in self._file.aliases}
        check_counts(keys, self.shapes)
        return config_from_hugging_face(keys, self.shapes)

    def _shape(self, name: str, rank: int) -> tuple[int, ...]:
        shape = self.shapes.get(name, ())
        if len(shape) != rank:
            raise SpecbeamError(f"{self.path}: {MODEL} has no {name} of {rank} dimensions")
        return shape

    @property
    def _head(self) -> str:
        return f"{self.modules['head']}/weight"

    @property
    def modules(self) -> Mapping[str, str]:
        return self._architecture.ctranslate2_tensors

    def sources(self, name: str) -> list[str]:
        return [self._stored(source) for source in super().sources(name)]

    def _stored(self, name: str) -> str:
        """A name of a parameter as the file has it."""
        module, _, kind = name.rpartition(".")
        end = next((theirs for ours, theirs in NAMES.items() if name.endswith(ours)), None)
        name = f"{module}/{kind}" if end is None else module[: -len(end.partition("/")[0])] + end
        return self._file.aliases.get(name, name)

    def shape(self, source: str) -> tuple[int, ...]:
        return matrix_shape(source, self.shapes[source])

    def read_stored(self, source: str, start: int, stop: int) -> NDArray[np.float32]:
        rows = self._file.variables[source].rows(start, stop)
        return as_matrix(self.architecture.folder_values(source.replace("/", "."), rows))

    def order(self, source: str) -> None:
        return None

    def place(self, source: str) -> tuple[Path, str]:
        return self.path / MODEL, source

    @property
    def extents(self) -> list[tuple[Path, list[Extent]]]:
        return [(self.path / MODEL, self._file.extents)]

    @property
    def ignored(self) -> tuple[str, ...]:
        return self._architecture.ctranslate2_ignored

    def check_transformers(self, config: Any) -> None:
        raise SpecbeamError(f"{self.path}: transformers cannot read models of CTranslate2: leave out the backend")

    @cached_property
    def vocabulary(self) -> list[str]:
        """The tokens by their ids; empty if there is no file of them."""
        listed, lines = self.path / "vocabulary.json", self.path / "vocabulary.txt"
        try:
            if listed.is_file():
                tokens = json.loads(listed.read_text(encoding="utf-8"))
            else:
                tokens = lines.read_bytes().decode().removesuffix("\n").split("\n") if lines.is_file() else []
        except (OSError, ValueError, RecursionError) as error:
            raise SpecbeamError(f"{self.path}: its vocabulary cannot be read: {error}") from error
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise SpecbeamError(f"{listed} is no list of tokens")
        if tokens and len(tokens) > self.config.vocab_size:
            raise SpecbeamError(
                f"{self.path}: its vocabulary has {len(tokens)} tokens, but the model {self.config.vocab_size}"
            )
        return tokens

    @cached_property
    def tokenizer(self) -> Any:
        if not (self.path / "tokenizer.json").is_file():
            return None
        tokenizer = tokenizer_from_folder(self.path, {}, {})
        if tokenizer is None:
            raise SpecbeamError(f"{self.path} has no tokenizer that can be loaded: fetch its tokenizer.json again")
        return tokenizer

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        if END in self.vocabulary:
            return frozenset([self.vocabulary.index(END)])
        end = None if self.tokenizer is None else self.tokenizer.get_vocab().get(END)
        return frozenset() if end is None else frozenset([end])

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        settings = {ours: self._settings.get(theirs) for theirs, ours in SETTINGS.items()}
        return GenerationDefaults({name: ids for name, ids in settings.items() if ids}, "config.json")


class Variable(NamedTuple):
    """A variable of a file.

    Attributes:
        dtype: its name in :data:`TYPES`.
        begin: the offset of its first byte in the file.
        scales: of integers: their divisors, one for each row or one for all, float32.
    """

    file: Path
    name: str
    kind: np.dtype[Any]
    dtype: str
    shape: tuple[int, ...]
    begin: int
    scales: NDArray[np.float32] | None = None

    @property
    def is_integer(self) -> bool:
        """Whether it holds integers."""
        return self.kind.kind == "i"

    @property
    def size(self) -> int:
        """In bytes."""
        return prod(self.shape) * self.kind.itemsize

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows ``start`` to ``stop``, float32 [stop - start, ...]."""
        columns = prod(self.shape[1:])
        begin = self.begin + start * columns * self.kind.itemsize
        try:
            stored = np.fromfile(self.file, self.kind, (stop - start) * columns, offset=begin)
            stored = stored.reshape(stop - start, *self.shape[1:])
        except (OSError, ValueError) as error:
            problem = f"{self.file} has changed since it was opened ({error})"
            raise SpecbeamError(f"{problem}: load the model again") from error
        if self.dtype == "BF16":  # the first half of a float32
            return (stored.astype(np.uint32) << 16).view(np.float32)
        values = stored.astype(np.float32)
        if self.scales is None:
            return values
        scales = self.scales if self.scales.size == 1 else self.scales[start:stop]
        with np.errstate(all="ignore"):  # scales that are too small make weights that are refused
            return values / scales.reshape(-1, *[1] * (values.ndim - 1))


class ModelFile(NamedTuple):
    """The header of a file.

    Attributes:
        spec: the kind of model, such as "WhisperSpec".
        revision: of the names that this kind of model has.
        variables: by their names, without the scales of others.
        numbers: variables that are one number, such as ``decoder/num_heads``.
        aliases: the name of a variable, by another name for it.
    """

    spec: str
    revision: int
    variables: Mapping[str, Variable]
    numbers: Mapping[str, float]
    aliases: Mapping[str, str]

    @property
    def extents(self) -> list[Extent]:
        """Where the variables lie. Their names lie between them."""
        return [Extent(one.begin, one.size) for one in self.variables.values()]


def read_model_file(file: Path) -> ModelFile:
    """The header of a ``model.bin``."""
    check_fetched(file)
    try:
        with file.open("rb") as opened:
            return _Reader(file, opened).read()
    except OSError as error:
        raise SpecbeamError(f"{file} cannot be read: {error.strerror}") from error


class _Reader:
    def __init__(self, file: Path, opened: BinaryIO) -> None:
        self.file, self.opened = file, opened
        self.size = opened.seek(0, 2)
        opened.seek(0)

    def read(self) -> ModelFile:
        (version,) = self._numbers("I")
        if version != VERSION:
            raise SpecbeamError(
                f"{self.file} is no model of CTranslate2 of version {VERSION}: it begins with the version {version}. "
                "Convert the model with a newer ct2-transformers-converter"
            )
        spec, (revision, count) = self._text(), self._numbers("II")
        self._demand(count <= MAX_VARIABLES, f"it has {count:,} variables")
        variables: dict[str, Variable] = {}
        for _ in range(count):
            variable = self._variable()
            self._demand(variable.name not in variables, f"it has two variables {shown(variable.name)}")
            variables[variable.name] = variable
        aliases = self._aliases(variables)
        scales = {n: one for n, one in variables.items() if n.endswith(SCALE) and n[: -len(SCALE)] in variables}
        numbers = {name: self._number(one) for name, one in variables.items() if not one.shape}
        tensors = {name: one for name, one in variables.items() if one.shape and name not in scales}
        return ModelFile(
            spec,
            revision,
            {name: self._scaled(one, scales.get(name + SCALE)) for name, one in tensors.items()},
            {name: number for name, number in numbers.items() if name not in scales},
            aliases,
        )

    def _variable(self) -> Variable:
        name, (rank,) = self._text(), self._numbers("B")
        self._demand(rank <= MAX_RANK, f"{shown(name)} has {rank} dimensions")
        shape = self._numbers(f"{rank}I")
        number, size = self._numbers("BI")
        self._demand(number < len(TYPES), f"{shown(name)} has a type of the number {number}")
        kind, dtype = TYPES[number]
        variable = Variable(self.file, name, kind, dtype, shape, self.opened.tell())
        self._demand(
            variable.size == size, f"{shown(name)} has {size:,} bytes, and its shape asks for {variable.size:,}"
        )
        self._demand(size <= self.size - variable.begin, f"it ends within {shown(name)}")
        self.opened.seek(size, 1)
        return variable

    def _aliases(self, variables: Mapping[str, Variable]) -> dict[str, str]:
        (count,) = self._numbers("I")
        self._demand(count <= MAX_VARIABLES, f"it has {count:,} aliases")
        aliases = {self._text(): self._text() for _ in range(count)}
        for alias, name in aliases.items():
            self._demand(name in variables, f"{shown(alias)} stands for {shown(name)}, which it lacks")
            self._demand(alias not in variables, f"{shown(alias)} is a variable, and stands for another one")
        self._demand(self.opened.tell() == self.size, "it goes on after its end")
        return aliases

    def _scaled(self, variable: Variable, scale: Variable | None) -> Variable:
        if scale is None:
            return variable
        self._demand(
            variable.is_integer and scale.kind.kind == "f" and prod(scale.shape) in (1, variable.shape[0]),
            f"{shown(variable.name)} has {prod(scale.shape)} scales and {variable.shape[0]} rows",
        )
        flat = scale._replace(shape=(prod(scale.shape),))
        return variable._replace(scales=flat.rows(0, flat.shape[0]))

    def _number(self, variable: Variable) -> float:
        return float(variable._replace(shape=(1,)).rows(0, 1)[0])

    def _numbers(self, kinds: str) -> tuple[int, ...]:
        layout = struct.Struct(f"<{kinds}")
        return layout.unpack(self._bytes(layout.size))

    def _text(self) -> str:
        """A text after its length. It ends with a zero."""
        (length,) = self._numbers("H")
        text = self._bytes(length)
        self._demand(text.endswith(b"\0"), "a name has no end")
        try:
            return text[:-1].decode()
        except ValueError:
            raise self._damaged("a name is no text") from None

    def _bytes(self, count: int) -> bytes:
        data = self.opened.read(count)
        self._demand(len(data) == count, "it ends within its header")
        return data

    def _demand(self, holds: bool, problem: str) -> None:
        if not holds:
            raise self._damaged(problem)

    def _damaged(self, problem: str) -> SpecbeamError:
        return SpecbeamError(f"{self.file} is damaged or no model of CTranslate2 ({problem}): fetch it again")
