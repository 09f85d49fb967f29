"""The ``transformers`` backend: a model of transformers, as it was loaded.

The nodes of all trees go through the model as one row of tokens with explicit positions. A 4-D attention mask, one
block per tree, states which slots each of the nodes sees. A cache of ours puts keys and values into the slots.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, Cache
from transformers.pytorch_utils import Conv1D

from specbeam.backends.contract import TreeBatch, kept_whole
from specbeam.backends.devices import choose_device, choose_dtype
from specbeam.backends.torch.cache import KeyValues, Seen, index, seen_by
from specbeam.backends.torch.sampling import TensorBackend
from specbeam.backends.torch.tensors import are_finite, to_device
from specbeam.backends.transformers.compat import cache_argument
from specbeam.checkpoints.architecture import scaled_context
from specbeam.checkpoints.files import check_model, read_json, refusing
from specbeam.checkpoints.formats.adapter import Adapter
from specbeam.checkpoints.parameters import not_finite
from specbeam.errors import SpecbeamError

FULL, SLIDING = "full_attention", "sliding_attention"
OWN_ATTENTION = ("codegen", "falcon", "gptj", "stablelm")
"""Models that do not attend through transformers' common interface, but do follow mask and positions."""
UNLIMITED_CONTEXT = 1 << 20
"""Tokens. For models without a context limit, such as models with relative positions."""

_slot_elements: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_checked: WeakSet[Any] = WeakSet()


class LearnedKeyValues(KeyValues):
    """A KV cache that learns the shape of each layer in the first pass. Layers may lie on several devices."""

    def __init__(self) -> None:
        super().__init__((), torch.float32, "cpu")

    @property
    def elements(self) -> int:
        """The elements of keys and values per slot."""
        return sum(t.shape[0] * t.shape[2] for tensors in self._tensors for t in tensors)

    def store(self, part: int, slots: slice | Tensor, *new: Tensor) -> list[Tensor]:
        while len(self._tensors) <= part:
            self._tensors.append([rows.new_empty(rows.shape[1], self.capacity, rows.shape[2]) for rows in new])
        return super().store(part, slots, *new)

    def at(self, slots: NDArray[np.int64]) -> list[tuple[Tensor, Tensor]]:
        """A copy of keys and values of each layer, [kv_heads, n, head_dim] each; zeros at negative slots."""

        def copied(stored: Tensor) -> Tensor:
            index = to_device(slots, stored.device)
            return stored[:, index.clamp(min=0)].masked_fill((index < 0)[:, None], 0)

        return [(copied(keys), copied(values)) for keys, values in self._tensors]


@dataclass(frozen=True, eq=False)
class ReadPrompt:
    """A prompt that was prefilled already, as the source of a tree.

    Attributes:
        layers: keys and values of each layer, [kv_heads, tokens, head_dim] each.
        logits: after its last token, float32 [vocab].
        token_type: of the tokens that follow, for models that tell types of tokens apart.
    """

    layers: list[tuple[Tensor, Tensor]]
    logits: Tensor
    token_type: int | None = None

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[1]


class TransformersBackend(TensorBackend):
    """A loaded model of transformers. It is not changed, and may be used otherwise between passes.

    Args:
        model: in evaluation mode, with attention of the kind "sdpa" or "eager".

    Raises:
        SpecbeamError: a model that cannot be evaluated at the nodes of a tree.
    """

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self.model = model
        self._parameters = inspect.signature(model.forward).parameters
        self._cache_argument = cache_argument(model.forward)
        config = model.config.get_text_config()
        self._eager = config._attn_implementation == "eager"
        layer_types = set(getattr(config, "layer_types", None) or ())
        self._check(config, layer_types)
        self._window: int | None = None if layer_types == {FULL} else getattr(config, "sliding_window", None)
        self._mixed = len(layer_types) > 1
        self.device = str(model.get_input_embeddings().weight.device)
        self.dtype: torch.dtype = model.dtype
        self.precision = str(self.dtype).removeprefix("torch.")
        self.vocab_size: int = getattr(model.get_output_embeddings(), "out_features", config.vocab_size)
        self.context_length = _context_length(config)
        self._store = LearnedKeyValues()
        self._one_pass = Lock()  # the KV cache may move when it grows
        size = self._measure_slot() * self.dtype.itemsize
        self.slot_bytes, self.lifetimes = kept_whole(size, None if self._mixed else self._window)

    @abstractmethod
    def _obstacle(self, config: Any, layer_types: set[str]) -> str | None:
        """Why the model cannot be evaluated at the nodes of a tree, if there is one."""

    @abstractmethod
    def _run(self, segments: list[TreeBatch], views: list[Seen], keep: Tensor) -> Tensor:
        """Logits [w, vocab] at the nodes to keep, int64 [w].

        Args:
            views: the slots that the nodes of each segment see.
        """

    def _check(self, config: Any, layer_types: set[str]) -> None:
        model = self.model
        if reason := self._obstacle(config, layer_types):
            raise SpecbeamError(f"{type(model).__name__} cannot be evaluated at the nodes of a tree: {reason}")
        attention = model.config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise SpecbeamError(f'{attention} takes no mask of a tree: load the model with attn_implementation="sdpa"')
        if model.training:
            raise SpecbeamError("the model is in training mode, where dropout makes it random: call model.eval() first")

    @torch.no_grad()  # inference_mode would leave tensors in the user's model that cannot be trained with
    def forward(self, segments: list[TreeBatch]) -> Tensor:
        segments = [s.in_rows() for s in segments]
        starts = np.cumsum([0, *(len(s.tokens) for s in segments)])
        wanted = np.concatenate([start + s.wanted for start, s in zip(starts, segments, strict=False)])
        views = [seen_by(s) for s in segments]
        with self._one_pass:
            return self._run(segments, views, to_device(wanted, self.device)).float()

    def reserve(self, slots: int, rows: Sequence[int] = ()) -> None:
        with self._one_pass:
            self._store.reserve(*rows or (slots,))

    def keys_and_values(self, slots: NDArray[np.int64]) -> list[tuple[Tensor, Tensor]]:
        """A copy of each layer's keys and values in slots, [kv_heads, n, head_dim] each; zeros at negative slots."""
        with self._one_pass:
            return self._store.at(slots)

    def _row(self, parts: list[NDArray[np.int64]]) -> Tensor:
        return to_device(np.concatenate(parts)[None], self.device)

    def _masks(self, segments: list[TreeBatch], views: list[Seen]) -> Tensor | dict[str, Tensor]:
        """The slots that the nodes see: one mask, or one per kind of layer if there are several kinds."""
        shape = sum(len(s.tokens) for s in segments), sum(len(seen.slots) for seen in views)
        full, near = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        row = column = 0
        for s, seen in zip(segments, views, strict=True):
            block = slice(row, row + len(s.tokens)), slice(column, column + len(seen.slots))
            for mask, window in ((full, None), (near, self._window)):
                visible = seen.near(s.positions, window)
                mask[block] = True if visible is None else visible
            row, column = block[0].stop, block[1].stop
        if self._mixed:
            return {FULL: self._mask(full), SLIDING: self._mask(near)}
        return self._mask(full if self._window is None else near)

    def _mask(self, visible: NDArray[np.bool_]) -> Tensor:
        mask = to_device(visible[None, None], self.device)
        if not self._eager:
            return mask
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, torch.finfo(self.dtype).min)

    def _measure_slot(self) -> int:
        """The elements per slot, measured by a pass over one token: configurations do not give them. Once per model."""
        if self.model not in _slot_elements:
            zero = np.zeros(1, dtype=np.int64)
            self.reserve(1)
            try:
                nothing = np.empty((1, 0), dtype=np.int64)
                self.forward([TreeBatch(zero, zero, zero, zero, nothing, zero, source=self._source_to_measure())])
            except Exception as error:  # the values of a configuration are first used here
                name, reason = type(self.model).__name__, " ".join(str(error).split())
                raise SpecbeamError(f"{name} cannot run with its configuration: {reason[:200]}") from error
            if not self._store.elements:
                raise SpecbeamError(f"{type(self.model).__name__} keeps no keys and values of the tokens it has seen")
            _slot_elements[self.model] = self._store.elements
        return _slot_elements[self.model]

    def _source_to_measure(self) -> Any:
        return None


class CausalBackend(TransformersBackend):
    """A loaded ``AutoModelForCausalLM``."""

    def _obstacle(self, config: Any, layer_types: set[str]) -> str | None:
        model = self.model
        if model._is_stateful:
            return "it keeps a running state instead of keys and values of each token"
        if foreign := layer_types - {FULL, SLIDING}:
            return f"it has layers of kind {min(foreign)}"
        if lacking := {"attention_mask", "position_ids", self._cache_argument} - set(self._parameters):
            return f"it takes no {min(lacking)}"
        follows = model._supports_attention_backend or config.model_type in OWN_ATTENTION
        if getattr(config, "alibi", False) or not follows:
            return "its attention does not follow the mask and the positions it is given"
        return None

    def forward(self, segments: list[TreeBatch]) -> Tensor:
        segments = [s.in_rows() for s in segments]
        if not isinstance(segments[0].source, ReadPrompt):
            return super().forward(segments)
        rest = []
        for s in segments:
            with self._one_pass:
                self._copy_read(s)
            is_new = s.positions >= s.source.length
            wanted = (np.cumsum(is_new) - 1)[s.wanted[is_new[s.wanted]]]
            nodes = {name: getattr(s, name)[is_new] for name in ("tokens", "positions", "slots", "suffixes")}
            rest.append(replace(s, wanted=wanted, **nodes))
        none = torch.empty(0, self.vocab_size, device=self.device)
        new = super().forward(some) if (some := [s for s in rest if len(s.tokens)]) else none
        logits, at = [none], 0
        for s, segment_rest in zip(segments, rest, strict=True):
            end = at + len(segment_rest.wanted)
            if len(segment_rest.wanted) < len(s.wanted):  # the last token of the prompt: nobody asks about earlier ones
                logits.append(s.source.logits[None])
            logits.append(new[at:end])
            at = end
        return torch.cat(logits)

    def _copy_read(self, segment: TreeBatch) -> None:
        """Store the keys and values of the nodes that were prefilled before."""
        is_read = segment.positions < segment.source.length
        if is_read.any():
            slots, positions = torch.from_numpy(segment.slots[is_read]), torch.from_numpy(segment.positions[is_read])
            for layer, (keys, values) in enumerate(segment.source.layers):
                there, at = slots.to(keys.device), positions.to(keys.device)
                own, others = keys[:, at].transpose(0, 1), values[:, at].transpose(0, 1)
                self._store.store(layer, there, own, others)

    def _run(self, segments: list[TreeBatch], views: list[Seen], keep: Tensor) -> Tensor:
        inputs: dict[str, Any] = {
            "input_ids": self._row([s.tokens for s in segments]),
            "position_ids": self._row([s.positions for s in segments]),
            "attention_mask": self._masks(segments, views),
            self._cache_argument: PassCache(self._store, segments, views),
            "use_cache": True,
        }
        if segments[0].source is not None and segments[0].source.token_type is not None:  # then all have one
            inputs["token_type_ids"] = self._row([np.full(len(s.tokens), s.source.token_type) for s in segments])
        if "cache_position" in self._parameters:
            inputs["cache_position"] = inputs["position_ids"][0]
        if "logits_to_keep" in self._parameters:
            return self.model(**inputs, logits_to_keep=keep).logits[0]
        return self.model(**inputs).logits[0][keep]


class PassCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """The slots that the trees of a pass see, tree after tree, as a cache of transformers."""

    def __init__(self, store: KeyValues, segments: Sequence[TreeBatch], views: Sequence[Seen]) -> None:
        super().__init__(layers=[])
        self._store = store
        self._new = np.concatenate([s.slots for s in segments])
        self._all = np.concatenate([seen.slots for seen in views])
        self._device: torch.device | None = None  # of the latest layer: several devices may share a model
        self._length = len(self._all) - len(self._new)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [1, kv_heads, nodes, head_dim], and return the keys and values of all slots."""
        if key_states.device != self._device:
            self._device = key_states.device
            self._slots, self._seen = to_device(self._new, self._device), index(self._all, self._device)
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        keys, values = self._store.store(layer_idx, self._slots, k, v)
        return keys[None, :, self._seen], values[None, :, self._seen]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in use before this pass."""
        return self._length


def load_model(
    path: Path,
    device: str,
    dtype: str,
    stored_dtype: str,
    adapter: Adapter | None = None,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """A checkpoint as transformers loads it, folder or GGUF file.

    Args:
        stored_dtype: the dtype of its weights.
        adapter: is merged into them.
        check: refuses a configuration of transformers that is not the checkpoint's.

    Raises:
        SpecbeamError: no such device or dtype, tensors are missing or not finite, transformers cannot load it, or the
            adapter is for another model.
    """
    chosen = choose_device(device)
    folder, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    check_model(folder, {} if file else read_json(folder, "config.json"))
    where = {"local_files_only": True, "trust_remote_code": False, **file}
    how = {"dtype": getattr(torch, choose_dtype(dtype, chosen, stored_dtype)), "use_safetensors": True}
    with refusing(f"transformers cannot load {path}"):
        config = AutoConfig.from_pretrained(folder, **where)
        if check is not None:
            check(config)
        config._attn_implementation = None  # a checkpoint may name one, which would be fetched from the hub and run
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        kind = AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else kind
        model, info = kind.from_pretrained(folder, config=config, output_loading_info=True, **where, **how)
    if missing := sorted(info["missing_keys"]):  # transformers would go on with random weights
        raise SpecbeamError(
            f"{path} lacks {len(missing)} tensors of a {type(model).__name__}, among them {missing[0]}: "
            "give a complete checkpoint"
        )
    if adapter is not None:
        _merge(model, adapter)
    check_weights(model, str(path))
    return model.to(chosen).eval()


def check_weights(model: Any, name: str) -> None:
    """Refuse a model of transformers with weights that are not finite. Each model is read once.

    If it is trained later, its logits tell. Buffers are not read, because they may hold masks.
    """
    if model in _checked:
        return
    for tensor, weights in model.named_parameters():
        if weights.is_floating_point() and not weights.is_meta and not are_finite(weights.detach()):
            raise not_finite(name, tensor)
    _checked.add(model)


@torch.no_grad()
def _merge(model: Any, adapter: Adapter) -> None:
    """Change the weights of a model of transformers as an adapter says."""
    _resize(model, adapter)
    weights = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    modules = {name: model.get_submodule(name.rpartition(".")[0]) for name in weights}
    uses = Counter(map(id, weights.values()))

    def matrix(name: str) -> Tensor:
        """The weight, [out, in]."""
        return weights[name].t() if isinstance(modules[name], Conv1D) else weights[name]

    adapter.check(
        lambda name: matrix(name).shape if name in weights else None,
        tied=[name for name, weight in weights.items() if uses[id(weight)] > 1],
    )
    for name in adapter.replaced:
        kind, new = name.rpartition(".")[2], torch.from_numpy(adapter.replacement(name))
        if new.shape != weights[name].shape:
            raise SpecbeamError(
                f"{adapter.path} replaces {name} by {list(new.shape)}, but in the base model it is "
                f"{list(weights[name].shape)}: give its own base model"
            )
        weights[name] = torch.nn.Parameter(new.to(weights[name].dtype), requires_grad=False)
        setattr(modules[name], kind, weights[name])  # not tied any more, if it was
    for name in adapter.updates:
        weight = matrix(name)
        weight.copy_(weight.float() + torch.from_numpy(adapter.update(name, 0, len(weight))))


def _resize(model: Any, adapter: Adapter) -> None:
    """Give a model the vocabulary of an adapter that has an embedding and a head of its own."""
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    both = [
        names[module] for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module in names
    ]
    vocab_sizes = adapter.vocab_sizes(both)
    if len(vocab_sizes) == 2 and vocab_sizes[0] == vocab_sizes[1]:
        model.resize_token_embeddings(vocab_sizes[0], mean_resizing=False)


def context_length_of(config: Any) -> int:
    """Tokens of the longest sequence that transformers' ``generate`` can make. The last one is not evaluated."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope["rope_type"]} if "rope_type" in rope else {of_layer["rope_type"] for of_layer in rope.values()}
    if kinds and not kinds & {"dynamic", "longrope"}:
        return UNLIMITED_CONTEXT
    return _context_length(config) + (not kinds)


def _context_length(config: Any) -> int:
    """Tokens of the longest sequence for which the model was made."""
    stated = getattr(config, "max_position_embeddings", None) or UNLIMITED_CONTEXT
    return scaled_context(getattr(config, "rope_parameters", None) or {}, stated)
