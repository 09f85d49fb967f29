"""Checkpoints as CTranslate2 converts them: a folder with model.bin, a vocabulary, and perhaps a tokenizer.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.checkpoint import Checkpoint, Facts
from specbeam.checkpoints.code import refusing
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.families import CTRANSLATE2_ARCHITECTURES
from specbeam.checkpoints.files import MODEL, check_links, read_json
from specbeam.checkpoints.fingerprint import Extent
from specbeam.checkpoints.formats.ctranslate2_file import read_model_file
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


class CTranslate2Checkpoint(Checkpoint):
    """A folder with a ``model.bin`` of version 6. Whole numbers count as the float weights that they stand for.

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
        own = CTRANSLATE2_ARCHITECTURES.get(self._file.spec)
        if own is None:
            raise SpecbeamError(
                f"{path} is a {shown(self._file.spec)} of CTranslate2, which is not supported: supported are "
                f"{', '.join(CTRANSLATE2_ARCHITECTURES)}"
            )
        if self._file.revision != own.ctranslate2_revision:
            raise SpecbeamError(
                f"{path} is a {self._file.spec} of revision {self._file.revision}, and only revision "
                f"{own.ctranslate2_revision} is supported: convert the model again"
            )
        for name, number in self._file.numbers.items():
            if name not in own.ctranslate2_numbers or own.ctranslate2_numbers[name] not in (None, number):
                raise SpecbeamError(f"{path}: {shown(name)} = {number:g} in {MODEL} is not supported")
        for name, one in self._file.variables.items():
            if one.is_whole and one.scales is None and name not in own.ctranslate2_ignored:
                raise SpecbeamError(f"{path}: {shown(name)} of {MODEL} holds whole numbers, but has no scale")
        self._own = own

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
        with refusing(f"{self.path}: {MODEL} does not describe a {self._own.name} model"):
            keys = self._own.keys_of_ctranslate2(self._shape, self._file.numbers, self.shapes)
        keys |= {"model_type": self._own.name, "tie_word_embeddings": self._head in self._file.aliases}
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
        return self._own.ctranslate2_tensors

    def sources(self, name: str) -> list[str]:
        return [self._stored(source) for source in super().sources(name)]

    def _stored(self, name: str) -> str:
        """A name of a parameter as the file has it."""
        module, _, kind = name.rpartition(".")
        end = next((theirs for ours, theirs in NAMES.items() if name.endswith(ours)), None)
        own = f"{module}/{kind}" if end is None else module[: -len(end.partition("/")[0])] + end
        return self._file.aliases.get(own, own)

    def shape(self, source: str) -> tuple[int, ...]:
        shape = self.shapes[source]
        return (shape[0], shape[1] * shape[2]) if self._has_filters(source) else shape

    def _has_filters(self, source: str) -> bool:
        return self.architecture.stores_filters(source.replace("/", ".")) and len(self.shapes[source]) == 3

    def read_stored(self, source: str, start: int, stop: int) -> NDArray[np.float32]:
        rows = self._file.variables[source].rows(start, stop)
        if self._has_filters(source):  # [out, in, frames] to [out, frames * in]
            return rows.swapaxes(1, 2).reshape(stop - start, -1)
        return rows

    def order(self, source: str) -> None:
        return None

    def place(self, source: str) -> tuple[Path, str]:
        return self.path / MODEL, source

    @property
    def extents(self) -> list[tuple[Path, list[Extent]]]:
        return [(self.path / MODEL, self._file.extents)]

    @property
    def ignored(self) -> tuple[str, ...]:
        return self._own.ctranslate2_ignored

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
        own = tokenizer_from_folder(self.path, {}, {})
        if own is None:
            raise SpecbeamError(f"{self.path} has no tokenizer that can be loaded: fetch its tokenizer.json again")
        return own

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        if END in self.vocabulary:
            return frozenset([self.vocabulary.index(END)])
        found = None if self.tokenizer is None else self.tokenizer.get_vocab().get(END)
        return frozenset() if found is None else frozenset([found])

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        settings = {ours: self._settings.get(theirs) for theirs, ours in SETTINGS.items()}
        return GenerationDefaults({name: ids for name, ids in settings.items() if ids}, "config.json")
