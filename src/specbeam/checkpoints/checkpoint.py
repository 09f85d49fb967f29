"""The common base of all kinds of checkpoints: facts, a configuration, a tokenizer, and tensors read in pieces."""

from __future__ import annotations

import difflib
import hashlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, tensor_names
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.families import ARCHITECTURES
from specbeam.checkpoints.files import Extent, fingerprint, refusing
from specbeam.checkpoints.formats.adapter import Adapter
from specbeam.checkpoints.parameters import parts_by_parameter
from specbeam.checkpoints.parts.part import Parameter, Part
from specbeam.errors import SpecbeamError
from specbeam.options.generation_defaults import GenerationDefaults
from specbeam.system.machine import usable_processors

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I16": "int16", "I8": "int8"}
"""Names of dtypes in PyTorch, by the names in safetensors and GGUF files."""
TEXT_FILES = (".json", ".jinja", ".txt", ".model")
"""Endings of a folder's files that hold its configuration, its tokenizer and its chat template."""
BYTES_AT_ONCE = 1 << 22
"""Of a table, for its digest."""
FILTERS = re.compile(r"conv\w*[./]weight$")
"""Ends of the names of tensors with the filters of a convolution."""
NUMBERS = {"F32": 0, "F16": 1, "BF16": 30}
"""llama.cpp's numbers of the types of single numbers, by their names."""
Piece = tuple[int, Callable[[], object]]
"""How many weights to read, and the function that reads them."""


def matrix_shape(source: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the parameter that a tensor makes: the filters of a convolution, [out, in, size], are rows."""
    has_filters = len(shape) == 3 and FILTERS.search(source)
    return (shape[0], shape[1] * shape[2]) if has_filters else shape


def as_matrix(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of filters, [rows, in, size], as rows of a matrix. Other rows stay as they are."""
    return rows.reshape(len(rows), rows.shape[1] * rows.shape[2]) if rows.ndim == 3 else rows


def left_out(shapes: Mapping[str, tuple[int, ...]], ends: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of biases that a file leaves out, because they are zeros.

    Args:
        shapes: of the tensors in the file.
        ends: of the names of such biases.
    """
    biases = ((f"{name.removesuffix('.weight')}.bias", shape[:1]) for name, shape in shapes.items())
    return {bias: shape for bias, shape in biases if bias.endswith(ends) and bias not in shapes}


def read_all(pieces: list[Piece], what: str) -> None:
    """Read pieces on all cores, with a progress bar."""
    from tqdm import tqdm

    with (
        ThreadPoolExecutor(usable_processors()) as threads,
        tqdm(total=sum(n for n, _ in pieces), desc=what, unit="", unit_scale=True, leave=False, disable=None) as bar,
    ):
        try:
            done = [threads.submit(read) for _, read in pieces]
            for (weights, _), future in zip(pieces, done, strict=True):
                future.result()
                bar.update(weights)
        except BaseException:  # Ctrl-C too: do not go on reading
            threads.shutdown(cancel_futures=True)
            raise


class Table(NamedTuple):
    """A tensor as it lies in a file. Its rows are read as they are needed, and no memory holds the others.

    Attributes:
        kind: of its numbers or blocks, by llama.cpp's numbers.
        begin: the offset of its first byte.
        size: its bytes.
    """

    file: Path
    kind: int
    shape: tuple[int, ...]
    begin: int
    size: int

    def mapped(self) -> NDArray[np.uint8]:
        """Its bytes. The system reads a page from the disk when it is first used."""
        return np.memmap(self.file, np.uint8, "r", self.begin, (self.size,))

    def digest(self) -> str:
        """Of its bytes, its type and its shape."""
        content, left = hashlib.sha256(f"{self.kind} {self.shape}".encode()), self.size
        with self.file.open("rb") as file:
            file.seek(self.begin)
            while left > 0 and (piece := file.read(min(left, BYTES_AT_ONCE))):
                content.update(piece)
                left -= len(piece)
        return content.hexdigest()


@dataclass(frozen=True)
class Facts:
    """The facts that ``specbeam models show`` prints; None for a fact that the checkpoint does not state.

    Attributes:
        parameters: number of weights.
        context: tokens of the longest text.
        size: bytes on disk.
        passed_over: the parts of a model of text and images or audio that are not read, by the names of their modules.
    """

    architecture: str
    parameters: int
    context: int | None
    quantization: str
    size: int
    license: str | None
    passed_over: tuple[str, ...] = ()


class Checkpoint(ABC):
    """A trained model on disk, opened: headers are read, tensors are not.

    Attributes:
        path: a folder or a file.
        adapter: merged into the weights as they are read, if there is one.
        shapes: the shape of each tensor, as it lies in the file.
        weights_by_type: how many weights have each dtype, by its name in the file.
        is_head: it is no model but a draft head, which reads hidden states of one.
    """

    path: Path
    adapter: Adapter | None = None
    shapes: dict[str, tuple[int, ...]]
    weights_by_type: Counter[str]
    is_head: bool = False

    @property
    @abstractmethod
    def facts(self) -> Facts:
        """The facts in the headers, also for architectures that are not supported."""

    def _context(self, stated: Any) -> int | None:
        """The tokens of the longest text. Of a model that cannot be run it is what the file states.

        Args:
            stated: a value of its metadata.
        """
        try:
            return self.config.context_length
        except SpecbeamError:
            return stated if isinstance(stated, int) else None

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """What the model is called: in its metadata, on the disk, and its architecture."""

    @cached_property
    @abstractmethod
    def config(self) -> Config:
        """The model's configuration. Raises SpecbeamError if it cannot be run."""

    @cached_property
    def mtp(self) -> Checkpoint | None:
        """The model's multi-token prediction head as a checkpoint of its own; None without one.

        Raises:
            SpecbeamError: a head that specbeam cannot run.
        """
        return None

    @property
    def head_tokens(self) -> NDArray[np.int64] | None:
        """The tokens of a draft head that has fewer than its target, ascending, int64 [n]; None for all tokens.

        Raises:
            SpecbeamError: the checkpoint has no such list, or a wrong one.
        """
        return None

    @cached_property
    @abstractmethod
    def tokenizer(self) -> Any:
        """A :class:`specbeam.Tokenizer`, or one of transformers where only that library reads the files.

        It has the chat template if there is one. None if the checkpoint has no vocabulary. Raises SpecbeamError
        for a damaged one.
        """

    @cached_property
    @abstractmethod
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text."""

    @property
    def architecture(self) -> Architecture:
        """The model's architecture. Raises SpecbeamError if specbeam lacks it."""
        return ARCHITECTURES[self.config.architecture]

    @property
    @abstractmethod
    def modules(self) -> Mapping[str, str]:
        """The names of our modules in its files, by our names: see :class:`Architecture`."""

    @property
    def dtype(self) -> str:
        """The dtype of most of the weights, such as "bfloat16" or "Q4_K"."""
        commonest = self.weights_by_type.most_common(1)[0][0] if self.weights_by_type else "unknown"
        return DTYPES.get(commonest, commonest)

    def read(self, source: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start to stop of a tensor, float32, dequantized and in our order. Several threads may call it.

        The matrices of experts lie one below the other.
        """
        order = self.order(source)
        if order is None:
            return self.read_stored(source, start, stop)
        rows = order[start:stop]
        first = int(rows.min())
        return self.read_stored(source, first, int(rows.max()) + 1)[rows - first]

    def rows(self, source: str, numbers: NDArray[np.int64]) -> NDArray[np.float32]:
        """Some rows of a tensor, [n, columns], as :meth:`read` gives them. No other rows are read."""
        return np.concatenate([self.read(source, row, row + 1) for row in numbers.tolist()])

    def table(self, source: str) -> Table | None:
        """A tensor as it lies in its file; None if the model has other values, or the type is unusual."""
        return None

    @abstractmethod
    def read_stored(self, source: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start to stop of a tensor as the file has them, float32, dequantized."""

    @abstractmethod
    def order(self, source: str) -> NDArray[np.int64] | None:
        """For each row of a tensor in our order, the row in the file; None for the same order."""

    @property
    @abstractmethod
    def extents(self) -> list[tuple[Path, list[Extent]]]:
        """Its files of weights, and where in each of them the header and the tensors lie."""

    def fingerprint(self, texts: Collection[str] | None = None) -> str:
        """A digest of all that its texts depend on: the weights in samples, the configuration and tokenizer whole.

        Args:
            texts: the names of the files of a folder that count beside the weights; None for all.
        """
        folders = [path for path in (self.path, self.adapter and self.adapter.path) if path and path.is_dir()]
        files = [file for folder in folders for file in sorted(folder.iterdir()) if file.suffix in TEXT_FILES]
        files = [file for file in files if texts is None or file.name in texts]
        try:
            whole_files = [(file, [Extent(0, file.stat().st_size, whole=True)]) for file in files]
            return fingerprint([*self.extents, *whole_files])
        except OSError as error:
            raise SpecbeamError(f"{error.filename or self.path} cannot be read: {error.strerror}") from error

    @property
    @abstractmethod
    def ignored(self) -> tuple[str, ...]:
        """Ends of the names of tensors that are no parameters. They are not read."""

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """The checkpoint's generation settings, with transformers' names."""
        return GenerationDefaults()

    @property
    def quantized(self) -> bool:
        """Whether matrices are stored in blocks that have scales of their own."""
        return any(self.blocks(source) is not None for source in self.shapes)

    def blocks(self, source: str) -> int | None:
        """The kind of blocks in which a tensor is stored, by llama.cpp's numbers; None for a tensor without blocks."""
        return None

    def raw(self, source: str, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of rows start to stop of a tensor in blocks, in the order of the file, as GGUF files have them."""
        raise NotImplementedError

    def place(self, source: str) -> tuple[Path, str]:
        """The file of a tensor, and its name there."""
        return self.path, source

    def shape(self, source: str) -> tuple[int, ...]:
        """The shape of a tensor, as it is read."""
        return self.shapes[source]

    def sources(self, name: str) -> list[str]:
        """The tensors that make up one of our parameters, stacked along their rows."""
        return tensor_names(name, self.modules)

    @abstractmethod
    def check_transformers(self, config: Any) -> None:
        """Raises SpecbeamError if transformers would run another model than the checkpoint describes.

        Args:
            config: the configuration that transformers makes of it.
        """

    def check_tokenizer(self, vocab_size: int) -> None:
        """Raises SpecbeamError if the tokenizer cannot read, or a text may give it tokens that the model lacks.

        A larger vocabulary of the model is fine: embeddings are padded. Special tokens beyond it are fine too, unless
        the chat template or every text has them. Gemma 3 has such a token for images, and transformers adds some. A
        prompt that spells one out is refused when it comes.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            return
        with refusing(f"{self.path}: its tokenizer is damaged"):
            written = tokenizer("").input_ids
            tokenizer.decode([0])
        beyond = self.tokens_beyond(vocab_size)
        if not beyond:
            return
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        template = str(tokenizer.chat_template)
        for i, token in beyond:
            if i not in special or i in written or token in template:
                raise SpecbeamError(
                    f"{self.path}: the tokenizer's token {token!r} has id {i}, but the model's vocabulary has "
                    f"{vocab_size} tokens: use the tokenizer it was trained with, or resize its embedding"
                )

    def tokens_beyond(self, vocab_size: int) -> list[tuple[int, str]]:
        """The tokens of the tokenizer that a model with a vocabulary of this size lacks, with their ids."""
        return sorted((i, token) for token, i in self.tokenizer.get_vocab().items() if i >= vocab_size)

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The part of a layer that a tensor belongs to, by its name. Other tensors are not there."""
        owners = parts_by_parameter(self.config)
        return {source: part for name, part in owners.items() for source in self.sources(name)}

    def check_tensors(self, parameters: Mapping[str, Parameter]) -> None:
        """Raises SpecbeamError unless the checkpoint has the tensors of these parameters, each in its own shape."""
        used = set()
        for name, parameter in parameters.items():
            (expected, rows), sources = parameter[:2], self.sources(name)
            for source, count in zip(sources, expected[:1] if len(sources) == 1 else rows, strict=True):
                if source not in self.shapes:
                    near = difflib.get_close_matches(source, self.shapes, n=1)
                    hint = f" (the nearest it has is {near[0]})" if near else ""
                    raise SpecbeamError(f"{self.path} has no tensor {source}{hint}")
                if (shape := self.shape(source)) != (count, *expected[1:]):
                    raise SpecbeamError(
                        f"{self.path}: tensor {source} has shape {list(shape)}, but the configuration asks for "
                        f"{[count, *expected[1:]]}"
                    )
                used.add(source)
        if extra := sorted(t for t in self.shapes if t not in used and not t.endswith(self.ignored)):
            self.on_extra_tensors(
                f"{self.path} has {len(extra)} tensors a {self.config.architecture} model does not have: "
                f"{', '.join(extra[:3])}{', ...' if len(extra) > 3 else ''}"
            )

    def on_extra_tensors(self, problem: str) -> None:
        """Refuse tensors that are no parameters, as llama.cpp does, or warn where the format's reference warns."""
        raise SpecbeamError(problem)
