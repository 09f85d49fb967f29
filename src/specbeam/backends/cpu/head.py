"""Draft heads of the ``cpu`` backend: views of their target's native model, with one layer and a cache of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import TreeBatch, logits_wanted
from specbeam.backends.cpu import CpuBackend
from specbeam.backends.cpu.weights import Weights
from specbeam.checkpoints.checkpoint import Checkpoint
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.stems import FeatureStem
from specbeam.errors import SpecbeamError

FLOAT32_BYTES = 4


class CpuHead(CpuBackend):
    """A head that reads hidden states of its target, and shares the target's threads, embedding and mostly its head.

    From now on passes of the target write these hidden states of each node into a slot. The slots that they had before
    hold zeros.

    Args:
        checkpoint: of the head (``Checkpoint.is_head``).
        quantize: as for :class:`CpuBackend`.
        target: the model that it drafts for.

    Raises:
        SpecbeamError: as there. Also if the head is for another model.
    """

    target: CpuBackend

    def __init__(self, checkpoint: Checkpoint, quantize: str, target: CpuBackend) -> None:
        config, stem = checkpoint.config, checkpoint.config.stem
        assert isinstance(stem, FeatureStem)
        self.target, self._tokens = target, checkpoint.head_tokens
        check_target(checkpoint, stem, target._config)
        super().__init__(checkpoint, quantize, 1, target._isa)
        self.threads = target.threads
        self._one_pass = target._one_pass
        self.context_length = min(self.context_length, target.context_length)
        # What it keeps of a node, and what the target keeps of one for it.
        self.slot_bytes += FLOAT32_BYTES * (config.hidden_size + stem.feature_size)

    def _fill(self, config: Config) -> None:
        assert isinstance(config.stem, FeatureStem)
        layers = np.array(config.stem.layers_of(self.target._config.num_layers), np.int64)
        with self.target._one_pass:
            wrong = self._library.specbeam_head_of(self._model, self.target._model, layers.ctypes.data, len(layers))
        if not wrong and (tokens := self._tokens) is not None:
            wrong = self._library.specbeam_head_tokens(self._model, tokens.ctypes.data, len(tokens))
        if wrong:
            raise RuntimeError(f"a draft head was refused: {wrong.decode()}")
        super()._fill(config)

    def _shared(self, config: Config) -> dict[str, tuple[Weights, str]]:
        assert isinstance(config.stem, FeatureStem)
        theirs, tied = self.target._weights, self.target._config.tied_head
        embedding = {} if config.stem.own_embedding else {"embedding.weight": (theirs, "embedding.weight")}
        head = {"head.weight": (theirs, "embedding.weight" if tied else "head.weight")} if config.tied_head else {}
        return embedding | head

    def forward(self, segments: list[TreeBatch]) -> NDArray[np.float32]:
        later = [after_first(segment) for segment in segments]
        some = [segment for segment in later if len(segment.tokens)]
        found = super().forward(some) if some else np.empty((0, 0), np.float32)
        has_no_parent = np.concatenate([segment.positions[segment.wanted] == 0 for segment in segments])
        if not has_no_parent.any():
            return found
        logits = np.full((len(has_no_parent), logits_wanted(segments, self.vocab_size)), -np.inf, np.float32)
        logits[~has_no_parent, : found.shape[1]] = found
        return logits


def after_first(segment: TreeBatch) -> TreeBatch:
    """A segment without the root of its tree. The sequences of a head begin with their second token."""
    first = int(len(segment.positions) > 0 and segment.positions[0] == 0)
    return replace(
        segment,
        tokens=segment.tokens[first:],
        positions=segment.positions[first:] - 1,
        slots=segment.slots[first:],
        prefix=segment.prefix[1:],
        suffixes=segment.suffixes[first:],
        wanted=segment.wanted[segment.wanted >= first] - first,
        features=None if segment.features is None else segment.features[first:],
    )


def check_target(checkpoint: Checkpoint, stem: FeatureStem, target: Config) -> None:
    """Raises SpecbeamError if a head is for a model of another shape than its target has."""
    config, layers = checkpoint.config, stem.layers_of(target.num_layers)
    hidden = stem.feature_size // len(layers)
    if target.encoder is not None:
        raise SpecbeamError(f"{checkpoint.path} is a draft head, and models with an encoder have none")
    if hidden != target.hidden_size or not (stem.own_embedding or config.hidden_size == target.hidden_size):
        other = hidden if hidden != target.hidden_size else config.hidden_size
        raise SpecbeamError(
            f"the draft head {checkpoint.path} is for a model with hidden_size = {other}, but the model has "
            f"{target.hidden_size}: give the head of this model"
        )
    if config.vocab_size != target.vocab_size:
        raise SpecbeamError(
            f"the draft head {checkpoint.path} is for a model with {config.vocab_size} tokens, but the model has "
            f"{target.vocab_size}: give the head of this model"
        )
    if not all(0 <= layer <= target.num_layers + 1 for layer in layers):
        raise SpecbeamError(
            f"the draft head {checkpoint.path} reads hidden states before the layers {', '.join(map(str, layers))}, "
            f"but the model has {target.num_layers} layers: give the head of this model"
        )
