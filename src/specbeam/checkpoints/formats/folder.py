"""Checkpoints in Hugging Face's layout: a folder with config.json, safetensors files and a tokenizer."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.checkpoint import NUMBERS, Checkpoint, Facts, Table, as_matrix, left_out, matrix_shape
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.families import ARCHITECTURES
from specbeam.checkpoints.families.eagle3 import Eagle3, is_eagle3
from specbeam.checkpoints.files import (
    VOCABULARIES,
    WEIGHTS,
    Extent,
    check_fetched,
    check_links,
    check_tokenizer,
    missing_weights,
    read_json,
    refusing,
    weight_map,
)
from specbeam.checkpoints.formats.adapter import Adapter
from specbeam.checkpoints.formats.composite import TextModel, text_model
from specbeam.checkpoints.formats.folder_config import check_counts, config_from_hugging_face
from specbeam.checkpoints.formats.folder_experts import MXFP4, MXFP4Tensor, Tensor, with_stacked_experts
from specbeam.checkpoints.formats.safetensors_file import (
    INTEGERS,
    Floats,
    StoredTensor,
    are_equal,
    extents_of,
    tensors_of,
)
from specbeam.checkpoints.heads import IN_FOLDER, check_head, folder_modules, mtp_config
from specbeam.checkpoints.parts.part import Parameter
from specbeam.checkpoints.stems import FeatureStem
from specbeam.checkpoints.tokenizers.folder_tokenizer import tokenizer_from_folder
from specbeam.errors import SpecbeamError, Unsupported
from specbeam.options.generation_defaults import FILE, GenerationDefaults, defaults_of_config
from specbeam.system.extras import require
from specbeam.system.numbers import is_integer

logger = logging.getLogger("specbeam")
OF_MODELOPT, OF_AWQ = "hf_quant_config.json", "quant_config.json"
"""Files in which NVIDIA's ModelOpt and AutoAWQ describe a quantization. AutoAWQ's are of 2023."""
MAPS = ("d2t", "t2d")
"""The tensors that say which tokens an EAGLE-3 head has. The first has, for each row of its logits, the token's number
less the row's; the second is true for each token that has a row."""
OF_PROCESSORS = ("processor_config.json", "chat_template.json")
"""Files that may hold the chat template of a processor. The first one that does counts, as in transformers."""


class FolderCheckpoint(Checkpoint):
    """A folder as ``save_pretrained`` writes it, with one safetensors file or several with an index.

    Args:
        adapter: is merged into the weights as they are read.

    Raises:
        SpecbeamError: a file is missing, truncated or not what its name says.
    """

    def __init__(self, path: Path, adapter: Adapter | None = None) -> None:
        self.path, self.adapter = path, adapter
        check_links(path)
        if not (path / "config.json").is_file():
            raise SpecbeamError(f"{path} has no config.json: fetch it, or give a folder as transformers saves models")
        self._config = read_json(path, "config.json")
        self.is_head = is_eagle3(self._config)
        if self.is_head:
            self._config["model_type"] = Eagle3.name
        named = weight_map(path)
        stored: dict[str, StoredTensor] = {}
        self.weights_by_type = Counter()
        self._weights = sorted(set(named.values())) or [path / WEIGHTS]
        for file in self._weights:
            if not file.is_file():
                raise missing_weights(path, file)
            for name, tensor in tensors_of(file).items():
                stored[name] = tensor
        lost = sorted(set(named) - set(stored))
        if lost:
            raise SpecbeamError(f"{path}: the index names tensor {lost[0]}, but its file does not have it")
        if not stored:
            raise SpecbeamError(f"{path} holds no tensors")
        architecture = ARCHITECTURES.get(str(text_model(self._config, stored).config.get("model_type")))
        self._of_mtp: dict[str, Tensor] = {
            name: stored.pop(name) for name in [*stored] if name.startswith(IN_FOLDER) and not self.is_head
        }
        maps = [stored.pop(name, None) for name in MAPS] if self.is_head else [None]
        self._token_map = maps[0]
        self._tensors: dict[str, Tensor] = {**stored}
        if architecture is not None:
            with refusing(f"{path} cannot be read"):
                self._tensors = with_stacked_experts(stored, architecture)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        check_counts(self._config, self.shapes)
        self._text = text_model(self._config, self.shapes)
        for name in self._text.passed_over:
            del self._tensors[name], self.shapes[name]
        for one in self._tensors.values():
            self.weights_by_type[one.dtype] += prod(one.shape)
        self._changes = None if adapter is None else adapter.for_tensors(self._text.name)
        architecture = ARCHITECTURES.get(str(self._text.config.get("model_type")))
        self._zeros = left_out(self.shapes, () if architecture is None else architecture.folder_zeros)
        self.shapes |= self._zeros

    @cached_property
    def mtp(self) -> FolderCheckpoint | None:
        if not self._of_mtp:
            return None
        check_head(self._of_mtp)
        head, shapes = copy(self), {name: tensor.shape for name, tensor in self._of_mtp.items()}
        for name in ("parts", "_updates"):
            vars(head).pop(name, None)
        own = {"config": mtp_config(self.config), "modules": folder_modules(self.modules)}
        vars(head).update(own, is_head=True, _tensors=self._of_mtp, shapes=shapes, _zeros={}, _of_mtp={})
        head.adapter, head._changes, head._text = None, None, TextModel(self._text.config)
        return head

    @property
    def head_tokens(self) -> NDArray[np.int64] | None:
        if self.config.head_size is None:
            return None
        vocab_size, count, offsets = self.config.vocab_size, self.config.head_size, self._token_map
        if offsets is None or offsets.shape != (count,) or offsets.dtype not in INTEGERS:
            raise SpecbeamError(f"{self.path} has no tensor {MAPS[0]} with the tokens of its {count} rows of logits")
        tokens = np.arange(count) + offsets.integers()
        if wrong := np.flatnonzero((tokens < 0) | (tokens >= vocab_size)).tolist():
            raise SpecbeamError(
                f"{self.path}: {MAPS[0]} maps row {wrong[0]} of the logits to token {tokens[wrong[0]]}, but the "
                f"vocabulary has {vocab_size} tokens"
            )
        if (np.diff(tokens) <= 0).any():
            raise SpecbeamError(f"{self.path}: {MAPS[0]} does not map rows of the logits to ascending tokens")
        return tokens

    def _stored(self, name: str) -> str:
        """The name of a tensor in the files. Saved without its head, as the first GPT-2 was, a model's lack a part."""
        name = self._text.names.get(name, name)
        bare = name.partition(".")[2]
        return bare if name not in self.shapes and bare in self.shapes else name

    def _stored_tensor(self, name: str) -> StoredTensor:
        """A tensor that is no expert's."""
        tensor = self._tensors[name]
        assert isinstance(tensor, StoredTensor)
        return tensor

    @property
    def facts(self) -> Facts:
        return Facts(
            architecture=str(self._text.config.get("model_type", "unknown")),
            parameters=sum(prod(shape) for name, shape in self.shapes.items() if name not in self._zeros),
            context=self._context(self._text.config.get("max_position_embeddings")),
            quantization=quantization_of(self.path, self._config, self._dtypes) or self.dtype,
            size=sum(file.stat().st_size for file, _ in self.extents),
            license=self._license(),
            passed_over=tuple(self._text.parts_passed_over),
        )

    @property
    def _dtypes(self) -> dict[str, str]:
        return {name: tensor.dtype for name, tensor in self._tensors.items()}

    def _license(self) -> str | None:
        """The license the model card names in its YAML head."""
        card = self.path / "README.md"
        if not card.is_file():
            return None
        head = card.read_text(encoding="utf-8", errors="replace").split("---")
        license = re.search(r"^license:[\s-]*(\S.*)$", head[1], re.MULTILINE) if len(head) > 2 else None
        return license[1].strip().strip("\"'") if license else None

    @property
    def names(self) -> tuple[str, ...]:
        return str(self._config.get("_name_or_path", "")), self.path.name, self.facts.architecture

    @cached_property
    def config(self) -> Config:
        if MXFP4.name not in self.weights_by_type:  # which the kernels multiply as they are
            check_not_quantized(self.path, self._config, self._dtypes)
        config = config_from_hugging_face(self._text.config, self._text.names or self.shapes)
        if isinstance(config.stem, FeatureStem):
            own_embedding = f"{Eagle3.folder_tensors['embedding']}.weight" in self.shapes
            return replace(config, stem=replace(config.stem, own_embedding=own_embedding))
        if config.tied_head:
            config = self._tied_or_not(config)
        return config if self._changes is None else self._take_replaced(config, self._changes)

    def _embedding_and_head(self, config: Config) -> list[str]:
        names = ARCHITECTURES[config.architecture].folder_tensors
        return [f"{names['embedding']}.weight", f"{names['head']}.weight"]

    def _tied_or_not(self, config: Config) -> Config:
        """The configuration of a model whose config.json ties the head to the embedding, as transformers 5 takes it.

        If only one of them is stored, it is both. If both are stored and differ, they stay two.
        """
        embedding, head = map(self._stored, self._embedding_and_head(config))
        if embedding not in self.shapes and head in self.shapes:
            self._tensors[embedding], self.shapes[embedding] = self._tensors.pop(head), self.shapes.pop(head)
        if head not in self.shapes or are_equal(self._stored_tensor(embedding), self._stored_tensor(head)):
            return config
        logger.warning(
            "%s: config.json ties %s to the embedding, but the folder stores another one, which is used, as in "
            'transformers. "tie_word_embeddings": false in config.json says so without a warning',
            *(self.path, head),
        )
        return replace(config, tied_head=False)

    def _take_replaced(self, config: Config, adapter: Adapter) -> Config:
        """Find the tensors that an adapter replaces in its file. Returns the configuration that it then has."""
        both = self._embedding_and_head(config)
        self._tied = both if config.tied_head else []
        vocab_sizes = adapter.vocab_sizes(both)
        embedding, head = map(self._stored, both)
        if vocab_sizes and config.tied_head and embedding in self.shapes:  # from now on the two are different
            self._tensors[head], self.shapes[head] = self._tensors[embedding], self.shapes[embedding]
        for name, new in adapter.replaced.items():
            stored = self._stored(name)
            self._tensors[stored], self.shapes[stored] = adapter.tensors[new], adapter.shapes[new]
        return replace(config, tied_head=False, vocab_size=vocab_sizes[0]) if vocab_sizes else config

    def check_transformers(self, config: Any) -> None:
        """Such a folder is transformers' own form, unless it is quantized and does not say so in transformers' way."""
        with suppress(Unsupported):
            check_not_quantized(self.path, self._config, self._dtypes)

    @cached_property
    def tokenizer(self) -> Any:
        # An adapter that adds tokens has a tokenizer of its own.
        folder = self.path if self.adapter is None or not _vocabulary(self.adapter.path) else self.adapter.path
        tokenizer = self._tokenizer(folder)
        if tokenizer is not None and (template := _template_of_processor(folder)) is not None:
            tokenizer.chat_template = template
        return tokenizer

    def _tokenizer(self, folder: Path) -> Any:
        described = read_json(folder, "tokenizer_config.json")
        if vocabulary := _vocabulary(folder):
            check_fetched(vocabulary)
        elif described.get("tokenizer_class") != "ByT5Tokenizer":
            return None  # transformers would make an empty one for some architectures
        check_tokenizer(folder, described)
        config = self._config if folder == self.path else read_json(folder, "config.json")
        tokenizer = tokenizer_from_folder(folder, config, described)
        if tokenizer is not None:
            return tokenizer
        require(f"the tokenizer of {folder}", "transformers")
        from transformers import AutoTokenizer

        with refusing(f"{folder} has no tokenizer that can be loaded"):
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        if (self.path / FILE).is_file():
            return GenerationDefaults(read_json(self.path, FILE))
        return defaults_of_config(self._config)

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        for config in (self.generation_defaults, self._config, self._text.config):
            ids = config.get("eos_token_id")
            if ids is not None:
                ids = ids if isinstance(ids, list) else [ids]
                if not all(map(is_integer, ids)):
                    raise SpecbeamError(
                        f"{self.path}: eos_token_id {ids} of its configuration holds what is no token id"
                    )
                ends = frozenset(i for i in ids if i >= 0)  # -1 stands for no token
                return ends if (self.path / FILE).is_file() else ends | self._turn_ends
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset([eos])

    @property
    def _turn_ends(self) -> frozenset[int]:
        """The token that ends a turn, where config.json leaves it out."""
        architecture = ARCHITECTURES.get(str(self._text.config.get("model_type")))
        if self.tokenizer is None or architecture is None or architecture.turn_end is None:
            return frozenset()
        token = self.tokenizer.get_vocab().get(architecture.turn_end)
        return frozenset() if token is None else frozenset([token])

    @property
    def ignored(self) -> tuple[str, ...]:
        # A model with a tied head sometimes stores it once more.
        tied = (self.modules["head"] + ".weight",) if self.config.tied_head and not self.is_head else ()
        return self.architecture.folder_ignored + tied

    @cached_property
    def modules(self) -> Mapping[str, str]:
        return self.architecture.folder_tensors

    @property
    def extents(self) -> list[tuple[Path, list[Extent]]]:
        extents = [(file, extents_of(file)) for file in self._weights]
        return extents if self.adapter is None else extents + self.adapter.extents

    def sources(self, name: str) -> list[str]:
        return [self._stored(source) for source in super().sources(name)]

    def check_tensors(self, parameters: Mapping[str, Parameter]) -> None:
        if self._changes is not None:
            known = {source for name in parameters for source in self.sources(name)} & set(self.shapes)
            self._changes.check(
                lambda name: self.shape(stored) if (stored := self._stored(name)) in known else None, self._tied
            )
        super().check_tensors(parameters)

    def on_extra_tensors(self, problem: str) -> None:
        logger.warning("%s. They are left out, as in transformers", problem)

    @cached_property
    def _updates(self) -> dict[str, str]:
        """For each tensor that an adapter updates, by its name in the files, its name in the adapter."""
        return {} if self._changes is None else {self._stored(name): name for name in self._changes.updates}

    def place(self, source: str) -> tuple[Path, str]:
        return self._tensors[source].file, self._tensors[source].name

    def shape(self, source: str) -> tuple[int, ...]:
        shape = matrix_shape(source, self.shapes[source])
        return shape[::-1] if self.architecture.stores_transposed(source) else shape

    def order(self, source: str) -> NDArray[np.int64] | None:
        return self.architecture.folder_rows(source, self.parts.get(source))

    def table(self, source: str) -> Table | None:
        tensor = self._stored_tensor(source)
        if source in self._updates or tensor.dtype not in NUMBERS:
            return None
        size = prod(tensor.shape) * (4 if tensor.dtype == "F32" else 2)
        return Table(tensor.file, NUMBERS[tensor.dtype], tensor.shape, tensor.begin, size)

    def blocks(self, source: str) -> int | None:
        return MXFP4.number if isinstance(self._tensors.get(source), MXFP4Tensor) else None

    def raw(self, source: str, start: int, stop: int) -> NDArray[np.uint8]:
        tensor = self._tensors[source]
        assert isinstance(tensor, MXFP4Tensor)
        return tensor.raw(start, stop).ravel()

    def read_stored(self, source: str, start: int, stop: int) -> Floats:
        if source in self._zeros:
            return np.zeros(stop - start, np.float32)
        tensor = self._tensors[source]
        transposed = self.architecture.stores_transposed(source)
        piece = self._stored_tensor(source).columns(start, stop).T if transposed else tensor.rows(start, stop)
        piece = as_matrix(self.architecture.folder_values(source, piece))
        if self._changes is not None and source in self._updates:
            piece = piece + self._changes.update(self._updates[source], start, stop)
        return piece


def _vocabulary(folder: Path) -> Path | None:
    """The first file of a folder that holds the vocabulary of a tokenizer."""
    return next((file for name in VOCABULARIES for file in folder.glob(name) if file.is_file()), None)


def _template_of_processor(folder: Path) -> Any:
    """The chat template that a folder has for a processor of text and images or audio; None if it has none.

    transformers 4 writes it into files of their own, and its processors do not look at the tokenizer's template.
    """
    for name in OF_PROCESSORS:
        if (template := read_json(folder, name).get("chat_template")) is not None:
            if not isinstance(template, str):
                raise SpecbeamError(f"{folder / name}: its chat_template is no text")
            return template
    return None


def quantization_of(folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> str | None:
    """The name of a folder's quantization; None for weights that are not quantized.

    Args:
        config: the content of config.json.
        dtypes: of the tensors, by their names.
    """
    how = config.get("quantization_config") or config.get("compression_config")
    if isinstance(how, dict) and (name := _stated(how)):
        return name
    if isinstance(config.get("quantization"), dict):
        return "MLX"
    by_modelopt = read_json(folder, OF_MODELOPT).get("quantization")
    if isinstance(by_modelopt, dict) and (name := _stated(by_modelopt)):
        return name
    if name := _by_tensors(folder, dtypes):
        return name
    return None if config.get("quantization_config") is None else "a method it does not name"


def check_not_quantized(folder: Path, config: Mapping[str, Any], dtypes: Mapping[str, str]) -> None:
    """Refuse a quantized folder. Arguments as for :func:`quantization_of`."""
    if name := quantization_of(folder, config, dtypes):
        how = config.get("quantization_config")
        is_described = isinstance(how, dict) and ("quant_method" in how or _loads_in_bits(how))
        kind = Unsupported if is_described else SpecbeamError
        raise kind(f"{folder} is quantized with {name}: load an unquantized folder or a GGUF file")


def _stated(how: Mapping[str, Any]) -> str | None:
    """The method that a description names, or that has its keys."""
    detail = how.get("quant_algo") or how.get("format")
    if method := how.get("quant_method"):
        return f"{method} ({detail})" if detail else str(method)
    if _loads_in_bits(how):
        return "bitsandbytes"
    if detail:
        return str(detail)
    return "MLX" if {"bits", "group_size"} <= how.keys() else None


def _loads_in_bits(how: Mapping[str, Any]) -> bool:
    return bool(how.get("load_in_4bit") or how.get("load_in_8bit"))


def _by_tensors(folder: Path, dtypes: Mapping[str, str]) -> str | None:
    """The method whose tensors lie beside the weights, or in place of them."""
    ends = {name.rpartition(".")[2] for name in dtypes}
    if "qweight" in ends:
        return "AWQ" if (folder / OF_AWQ).is_file() else "GPTQ"
    if {"scales", "biases"} <= ends:
        return "MLX"
    if ends & {"absmax", "SCB"}:
        return "bitsandbytes"
    if "weight_packed" in ends:
        return "compressed-tensors"
    if "weight_scale_2" in ends:
        return "NVFP4"
    if ends & {"weight_scale", "weight_scale_inv", "scale_weight"}:
        return "fp8 and scales" if any(kind.startswith("F8") for kind in dtypes.values()) else "int8 and scales"
    return None
