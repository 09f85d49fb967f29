"""What the encoder of a model reads: once for several requests, and together with other sources."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np

from specbeam.backends.contract import Backend, Encoder, Source
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel


class SharedSource:
    """A source that several requests are about, one after another, or a model and its draft.

    Each encoder reads it once, and models whose encoders are equal share the output. A distilled Whisper has the
    encoder of its teacher.

    It keeps the encoder's output, so let go of it after the last request.

    Args:
        source: token ids, int64 [n], or features of audio, float32 [mel bins, frames] (``Engine.submit``).
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._read: WeakKeyDictionary[Backend, tuple[int, Any]] = WeakKeyDictionary()

    def read(self, encoder: Encoder) -> tuple[int, Any]:
        """How many layers of an encoder have run, and what they gave: after the last one the encoder's output."""
        own = self._read.get(encoder, (0, None))
        if own[0] == encoder.encoder_layers:
            return own
        complete = ((other, read) for other, read in self._read.items() if read[0] == encoder.encoder_layers)
        return next((read for other, read in complete if have_equal_encoders(encoder, other)), own)

    def is_read(self, encoder: Encoder) -> bool:
        """Whether all layers of an encoder have run."""
        return self.read(encoder)[0] == encoder.encoder_layers

    def unread_positions(self, draft: Encoder, target: Backend | None) -> int:
        """The positions that the encoder of a draft has to read.

        Args:
            target: the model whose encoder reads the source. The draft reads none if their encoders are equal.
        """
        if self.is_read(draft) or (target is not None and have_equal_encoders(draft, target)):
            return 0
        return draft.positions(self.source)


def have_equal_encoders(one: Backend, other: Backend) -> bool:
    """Whether the encoders of two backends give equal states for the same source.

    They do if the kernels, the shapes and all bytes of the weights are equal. Sizes are compared first, because a
    digest of the weights takes time. It is computed once per model.
    """
    if one is other:
        return True
    if type(one) is not type(other) or one.device != other.device:
        return False
    first, second = cast(Encoder, one), cast(Encoder, other)
    return first.encoder_size == second.encoder_size and first.encoder_digest == second.encoder_digest


def together(encoder: Encoder, sources: Iterable[SharedSource]) -> list[list[SharedSource]]:
    """Different sources in groups that an encoder reads together: after equally many layers, the longest first.

    Padding at most doubles the positions of a group.
    """
    groups: list[list[SharedSource]] = []
    sizes = {one: (one.read(encoder)[0], encoder.positions(one.source)) for one in sources}
    for one, (layers, positions) in sorted(sizes.items(), key=lambda item: (-item[1][0], -item[1][1])):
        if groups:
            of_group, longest = sizes[groups[-1][0]]
            fits = 2 * positions >= longest and (len(groups[-1]) + 1) * longest <= encoder.encoder_batch
            if layers == of_group and fits:
                groups[-1].append(one)
                continue
        groups.append([one])
    return groups


def encode(encoder: Encoder, group: Sequence[SharedSource], seconds: float) -> None:
    """Let an encoder read some sources :func:`together`. If it takes longer than this, another call goes on.

    At least one layer runs, and others as long as the time suffices for one like the latest.
    """
    begun = [one.read(encoder) for one in group]
    layer, states = begun[0][0], [states for _, states in begun]
    sources, layers = [one.source for one in group], encoder.encoder_layers
    began_at = before = now = time.perf_counter()
    while layer < layers and 2 * now - before - began_at <= seconds:
        part = range(layer, layers if seconds == math.inf else layer + 1)
        states, layer = encoder.encode(sources, part, states if layer else None), part.stop
        before, now = now, time.perf_counter()
    for one, own in zip(group, states, strict=True):
        one._read[encoder] = layer, own


def check_features(lm: LanguageModel, features: Any) -> SharedSource | None:
    """A copy of features, float32 [mel bins, frames], or the given ones; None for a model that reads no audio."""
    expected = lm.backend.features_shape
    if expected is None:
        if features is not None:
            raise SpecbeamError(f"{lm.source} reads no audio: leave out the features")
        return None
    mel_bins, frames = expected
    hint = f"give log-mel features of audio, float32 [{mel_bins}, {frames}]"
    if features is None:
        raise SpecbeamError(f"{lm.source} {described(expected)}, and there are none: {hint}, to Engine.submit")
    shared, features = (features, features.source) if isinstance(features, SharedSource) else (None, features)
    try:
        array = np.array(features, np.float32)
    except (TypeError, ValueError) as error:
        raise SpecbeamError(f"the features are no array of numbers ({error}): {hint}") from error
    if array.shape != expected:
        raise SpecbeamError(
            f"the features have the shape {[*array.shape]}, but {lm.source} {described(expected)}: {hint}"
        )
    if not np.isfinite(array).all():
        raise SpecbeamError(f"the features hold NaN or infinity: {hint}")
    return SharedSource(array) if shared is None else shared


def described(shape: tuple[int, int] | None) -> str:
    """What a model reads, in words."""
    return "reads no audio" if shape is None else f"reads audio features [{shape[0]}, {shape[1]}]"
