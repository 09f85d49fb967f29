"""Checkpoints in Hugging Face's layout: a folder with config.json, safetensors files and a tokenizer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specbeam.checkpoints.checkpoint import Checkpoint, Facts
from specbeam.checkpoints.code import check_tokenizer, refusing
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.files import VOCABULARIES, WEIGHTS, check_links, read_json, weight_map
from specbeam.checkpoints.fingerprint import Extent
from specbeam.checkpoints.folder_config import check_counts, config_from_hugging_face
from specbeam.errors import SpecbeamError, Unsupported

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class FolderCheckpoint(Checkpoint):
    """A folder as ``save_pretrained`` writes it, with one safetensors file or several with an index.

    Raises:
        SpecbeamError: a file is missing, truncated or not what its name says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        check_links(path)
        if not (path / "config.json").is_file():
            raise SpecbeamError(f"{path} has no config.json: give a folder as transformers saves models")
        self._config = read_json(path, "config.json")
        named = weight_map(path)
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: Counter[str] = Counter()
        for file in sorted(set(named.values())) or [path / WEIGHTS]:
            if not file.is_file():
                raise SpecbeamError(
                    f"{path} has no {file.relative_to(path)}: only models saved as safetensors can be loaded"
                )
            try:
                with safe_open(file, "pt") as tensors:
                    for tensor in tensors.keys():  # noqa: SIM118  (not a dictionary)
                        described = tensors.get_slice(tensor)
                        self._files[tensor] = file
                        self._shapes[tensor] = tuple(described.get_shape())
                        self._dtypes[described.get_dtype()] += prod(self._shapes[tensor])
            except (SafetensorError, OSError) as error:
                raise SpecbeamError(f"{file} is damaged or not a safetensors file ({error}): fetch it again") from error
        lost = sorted(set(named) - set(self._shapes))
        if lost:
            raise SpecbeamError(f"{path}: the index names tensor {lost[0]}, but its file does not have it")
        if not self._shapes:
            raise SpecbeamError(f"{path} holds no tensors")
        check_counts(self._config, self._shapes)

    @property
    def facts(self) -> Facts:
        return Facts(
            architecture=str(self._config.get("model_type", "unknown")),
            parameters=sum(map(prod, self._shapes.values())),
            context=number if isinstance(number := self._config.get("max_position_embeddings"), int) else None,
            quantization=self._quantized() or self.dtype,
            size=sum(file.stat().st_size for file in set(self._files.values())),
            license=self._license(),
        )

    def _quantized(self) -> str | None:
        how = self._config.get("quantization_config")
        return str(how.get("quant_method", "a method it does not name")) if isinstance(how, dict) else None

    def _license(self) -> str | None:
        """The license the model card names in its YAML head."""
        card = self.path / "README.md"
        if not card.is_file():
            return None
        head = card.read_text(encoding="utf-8", errors="replace").split("---")
        found = re.search(r"^license:[\s-]*(\S.*)$", head[1], re.MULTILINE) if len(head) > 2 else None
        return found[1].strip().strip("\"'") if found else None

    @cached_property
    def config(self) -> Config:
        if quantized := self._quantized():
            raise Unsupported(f"{self.path} is quantized with {quantized}: load an unquantized folder or a GGUF file")
        return config_from_hugging_face(self._config, self._shapes)

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        described = read_json(self.path, "tokenizer_config.json")
        bytes_are_tokens = described.get("tokenizer_class") == "ByT5Tokenizer"
        if not bytes_are_tokens and not any(next(self.path.glob(name), None) for name in VOCABULARIES):
            return None  # transformers would make an empty one for some architectures
        check_tokenizer(self.path, described)
        with refusing(f"{self.path} has no tokenizer that can be loaded"):
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)

    @cached_property
    def _generation_config(self) -> dict[str, Any]:
        return read_json(self.path, "generation_config.json")

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        for config in (self._generation_config, self._config):
            ids = config.get("eos_token_id")
            if ids is not None:
                ids = ids if isinstance(ids, list) else [ids]
                if not all(isinstance(i, int) for i in ids):
                    raise SpecbeamError(
                        f"{self.path}: eos_token_id {ids} of its configuration holds what is no token id"
                    )
                return frozenset(i for i in ids if i >= 0)  # -1 stands for no token
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        return frozenset() if eos is None else frozenset([eos])

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        return {name: value for name, value in self._generation_config.items() if value is not None}

    @property
    def dtype(self) -> str:
        most = self._dtypes.most_common(1)[0][0]
        return DTYPES.get(most, most)

    @property
    def ignored(self) -> tuple[str, ...]:
        # A model with a tied head sometimes stores it once more.
        tied = (self.modules["head"] + ".weight",) if self._config.get("tie_word_embeddings", True) else ()
        return self.architecture.folder_ignored + tied

    @property
    def modules(self) -> Mapping[str, str]:
        return self.architecture.folder_tensors

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def extents(self) -> list[tuple[Path, list[Extent]]]:
        return [(file, _extents(file)) for file in sorted(set(self._files.values()))]

    def sources(self, name: str) -> list[str]:
        # Saved without its head, as the first GPT-2 was, a model's names lack what they begin with.
        found = super().sources(name)
        bare = [source.partition(".")[2] for source in found]
        return bare if found[0] not in self.shapes and bare[0] in self.shapes else found

    def shape(self, source: str) -> tuple[int, ...]:
        shape = self.shapes[source]
        return shape[::-1] if self.architecture.stores_transposed(source) else shape

    def piece_rows(self, source: str, elements: int) -> int:
        if self.architecture.stores_qkv_by_head(source):
            return self.config.head_dim
        return super().piece_rows(source, elements)

    def read(self, source: str, start: int, stop: int) -> Tensor:
        architecture = self.architecture
        if architecture.stores_qkv_by_head(source):  # (heads, 3, head_dim) in the file, (3, heads, head_dim) here
            config = self.config
            part, head = divmod(start // config.head_dim, config.num_heads)
            start, stop = (first := (3 * head + part) * config.head_dim), first + stop - start
        # Open the file for each piece: pages that a mapping has touched count as ours until it is closed.
        with safe_open(self._files[source], "pt") as tensors:
            whole = tensors.get_slice(source)
            transposed = architecture.stores_transposed(source)
            piece: Tensor = whole[:, start:stop].t() if transposed else whole[start:stop]
        if not piece.is_floating_point():
            raise SpecbeamError(f"{self.path}: tensor {source} holds {piece.dtype}: load an unquantized folder")
        if architecture.folder_norm_offset and source.endswith("norm.weight"):
            return piece.float() + architecture.folder_norm_offset
        return piece


def _extents(file: Path) -> list[Extent]:
    """Where the header and the tensors of a safetensors file lie."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    data = 8 + length
    places = (tensor["data_offsets"] for tensor in header.values())
    return [Extent(0, data, whole=True), *(Extent(data + start, end - start) for start, end in places)]
