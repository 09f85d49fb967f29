"""LoRA adapters (Hu et al. 2021) as PEFT saves them, and the changes that they make to their base model.

A weight W [out, in] becomes W + s B A, with A [rank, in] and B [out, rank]. Other tensors may be replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.files import ADAPTER, ADAPTER_WEIGHTS, Extent, check_links, read_json
from specbeam.checkpoints.formats.safetensors_file import Floats, tensors_of
from specbeam.checkpoints.parameters import are_finite, not_finite
from specbeam.errors import SpecbeamError
from specbeam.system.numbers import is_real

PREFIX = "base_model.model."
"""PEFT puts two modules of its own around the base model."""
FACTOR = re.compile(r"(?P<module>.+)\.(lora_[AB]\.weight|lora_embedding_[AB])")
WRAPPED = re.compile(r"\.(modules_to_save|original_module)\.")
"""In the names of tensors that PEFT saves a second time, when the vocabulary has grown."""
PLAIN_NAME = re.compile(r"\^?[\w.-]+")
KEYS = {
    *("peft_type", "lora_alpha", "alpha_pattern", "use_rslora", "base_model_name_or_path", "revision"),
    *("r", "rank_pattern", "fan_in_fan_out", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "modules_to_save", "bias"),  # what these say, names and shapes of the tensors say again
    *("auto_mapping", "inference_mode", "init_lora_weights", "lora_dropout", "megatron_core", "peft_version"),
    *("qalora_group_size", "runtime_config", "task_type"),
}
"""The keys of adapter_config.json that may have a value. Another one may change what is computed."""
NEUTRAL_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights. Others, such as "pissa", change the base model's weights before the training."""


class LowRank(NamedTuple):
    """An update of a weight by two factors.

    Attributes:
        a, b: the names of A and B in the adapter's file.
        scale: s.
        embedding: the factors are for the transposed weight.
    """

    a: str
    b: str
    scale: float
    embedding: bool


class Adapter:
    """A LoRA adapter on disk, opened: headers are read, tensors are not.

    Attributes:
        path: the folder.
        weights: the file of its tensors.
        tensors, shapes: the tensors of that file, and their shapes.
        updates: for each tensor of the base model that is updated, by its name there, the factors.
        replaced: for each tensor of the base model that is replaced, the name of the new one in the adapter's file.

    Raises:
        SpecbeamError: a damaged file, another kind of adapter than LoRA, or an option that cannot be merged.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.weights = path, path / ADAPTER_WEIGHTS
        check_links(path)
        if not (path / ADAPTER).is_file():
            raise SpecbeamError(f"{path} has no {ADAPTER}: give the folder of a LoRA adapter as PEFT saves it")
        self._config = read_json(path, ADAPTER)
        self._check_config()
        if not self.weights.is_file():
            raise SpecbeamError(
                f"{path} has no {ADAPTER_WEIGHTS}, and pickles (adapter_model.bin) are never opened: save the adapter "
                "with safe_serialization=True"
            )
        self.tensors = tensors_of(self.weights)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, tensor in self.tensors.items()}
        self.updates: dict[str, LowRank] = {}
        self.replaced: dict[str, str] = {}
        for name in self.shapes:
            inner = name.removeprefix(PREFIX)
            if inner == name or (".lora_" in inner and not FACTOR.fullmatch(inner)):
                raise SpecbeamError(
                    f"{path}: the tensor {name} cannot be merged: known are the factors A and B of LoRA"
                )
            if WRAPPED.search(inner) and PREFIX + WRAPPED.sub(".", inner) in self.shapes:
                continue
            if factor := FACTOR.fullmatch(inner):
                self.updates[f"{factor['module']}.weight"] = self._update(factor["module"])
            else:
                self.replaced[inner.replace(".base_layer.", ".")] = name

    def for_tensors(self, name_of: Callable[[str], str | None]) -> Adapter:
        """The same adapter for a model whose tensors have other names.

        Args:
            name_of: the name of a tensor there; None for one that the model leaves out.
        """
        other = copy(self)
        names = {name: new for name in (*self.updates, *self.replaced) if (new := name_of(name)) is not None}
        other.updates = {names[name]: update for name, update in self.updates.items() if name in names}
        other.replaced = {names[name]: new for name, new in self.replaced.items() if name in names}
        return other

    @property
    def base(self) -> str | None:
        """The source of the base model, as the adapter names it."""
        name = self._config.get("base_model_name_or_path")
        return name if name and isinstance(name, str) else None

    @property
    def base_revision(self) -> str | None:
        """The branch, tag or commit of the base model, if that is a hub id."""
        revision = self._config.get("revision")
        return revision if revision and isinstance(revision, str) else None

    @property
    def extents(self) -> list[tuple[Path, list[Extent]]]:
        """Its files, each as a whole."""
        # An adapter is small, and its next training keeps the size: read all of it.
        files = [self.path / ADAPTER, self.weights]
        return [(file, [Extent(0, file.stat().st_size, whole=True)]) for file in files]

    def shape(self, name: str) -> tuple[int, int]:
        """The shape [out, in] of a tensor that is updated."""
        update = self.updates[name]
        rows, columns = self.shapes[update.b][0], self.shapes[update.a][1]
        return (columns, rows) if update.embedding else (rows, columns)

    def vocab_sizes(self, names: Collection[str]) -> list[int]:
        """The number of tokens in each tensor that replaces the embedding or the head."""
        shapes = {name: self.shapes[self.replaced[name]] for name in names if name in self.replaced}
        for name, shape in shapes.items():
            if len(shape) != 2 or not shape[0]:
                raise SpecbeamError(
                    f"{self.path} is damaged: {name} has the shape {list(shape)}, not one row for each token"
                )
        return [tokens for tokens, _ in shapes.values()]

    def replacement(self, name: str) -> Floats:
        """The new tensor in place of one that is replaced, in float32."""
        tensor = self.tensors[self.replaced[name]]
        new = np.reshape(tensor.rows(0, tensor.shape[0] if tensor.shape else 1), tensor.shape)
        if not are_finite(new):
            raise not_finite(self.weights, self.replaced[name])
        return new

    def check(self, shape_of: Callable[[str], Sequence[int] | None], tied: Collection[str]) -> None:
        """Refuse an adapter that does not fit a base model.

        Args:
            shape_of: the shape of a weight of the model, [out, in] for a matrix; None for a name that the model lacks.
            tied: the weights that the model uses in two places.
        """
        for name in [*self.updates, *self.replaced]:
            shape = shape_of(name)
            if shape is None:
                raise SpecbeamError(f"{self.path} changes {name}, which the base model lacks: give its own base model")
            if name in self.updates and tuple(shape) != self.shape(name):
                raise SpecbeamError(
                    f"{self.path} updates {name} as {list(self.shape(name))}, but in the base model it is "
                    f"{list(shape)}: give its own base model"
                )
            if name in self.updates and name in tied:  # PEFT would change it in both places, against its own training
                raise SpecbeamError(
                    f"{self.path} updates {name}, which the base model ties to another weight: such an adapter cannot "
                    "be merged exactly"
                )

    def update(self, name: str, start: int, stop: int) -> Floats:
        """Rows ``start`` to ``stop`` of s B A [out, in] for a tensor that is updated, in float32."""
        update = self.updates[name]
        a, b = self.tensors[update.a], self.tensors[update.b]
        if update.embedding:
            left, right = a.columns(start, stop).T, b.rows(0, b.shape[0]).T
        else:
            left, right = b.rows(start, stop), a.rows(0, a.shape[0])
        for factor, weights in zip((update.a, update.b)[:: 1 if update.embedding else -1], (left, right), strict=True):
            if not are_finite(weights):
                raise not_finite(self.weights, factor)
        # In float64: then the threads and the pieces of the product, and the library of it, do not show in the result.
        product: NDArray[np.float64] = left.astype(np.float64) @ right.astype(np.float64)
        return (update.scale * product).astype(np.float32)

    def _check_config(self) -> None:
        config = self._config
        if config.get("peft_type") != "LORA":
            raise SpecbeamError(f"{self.path} is an adapter of type {config.get('peft_type')}: only LORA can be merged")
        if config.get("init_lora_weights") not in NEUTRAL_STARTS:
            raise SpecbeamError(
                f"{self.path}: init_lora_weights={config['init_lora_weights']!r} has changed the weights of the base "
                "model: convert the adapter to plain LoRA with PEFT (path_initial_model_for_weight_conversion)"
            )
        for key, value in config.items():
            if key not in KEYS and value:
                raise SpecbeamError(
                    f"{self.path}: an adapter with {key}={str(value)[:80]!r} cannot be merged exactly: merge it with "
                    "PEFT (merge_and_unload), and load the merged model"
                )

    def _update(self, module: str) -> LowRank:
        embedding = f"{PREFIX}{module}.lora_embedding_A" in self.shapes
        a, b = (f"{PREFIX}{module}.lora_{f'embedding_{x}' if embedding else f'{x}.weight'}" for x in "AB")
        shapes = [self.shapes.get(name, ()) for name in (a, b)]
        if [len(shape) for shape in shapes] != [2, 2] or not 0 < shapes[0][0] == shapes[1][1]:
            raise SpecbeamError(
                f"{self.path} is damaged: the factors of {module} have the shapes {list(shapes[0])} and "
                f"{list(shapes[1])}, which cannot be multiplied"
            )
        rank, alpha = shapes[0][0], self._alpha(module)
        return LowRank(a, b, alpha / (sqrt(rank) if self._config.get("use_rslora") else rank), embedding)

    def _alpha(self, module: str) -> float:
        """The factor of the scale, by the first key of alpha_pattern that ends the module's name, else lora_alpha."""
        pattern = self._config.get("alpha_pattern") or {}
        if not isinstance(pattern, dict) or not all(PLAIN_NAME.fullmatch(key) for key in pattern):
            raise SpecbeamError(
                f"{self.path}: alpha_pattern={str(pattern)[:80]} holds what is no name of a module: merge the adapter "
                "with PEFT (merge_and_unload)"
            )
        alpha: Any = self._config.get("lora_alpha")
        for key, value in pattern.items():
            if module == key.removeprefix("^") or module.endswith("." + key):
                alpha = value
                break
        if not is_real(alpha) or not isfinite(alpha):
            raise SpecbeamError(f"{self.path}: lora_alpha={alpha!r} for {module} is no number")
        return float(alpha)
