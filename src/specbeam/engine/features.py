"""Features of audio, as a caller gives them for the encoder of a model."""

from __future__ import annotations

import math
import time
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import AudioEncoder, Backend
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel


class AudioFeatures:
    """Features of audio that several requests are about, one after another, or a model and its draft.

    Each encoder reads them once, and models whose encoders are equal share its output. A distilled Whisper has the
    encoder of its teacher.

    It keeps the encoder's output, so let go of it after the last request.

    Args:
        features: float32 [mel bins, frames] (``Engine.submit``).
    """

    def __init__(self, features: NDArray[np.float32]) -> None:
        self.features = features
        self._states: WeakKeyDictionary[Backend, Any] = WeakKeyDictionary()
        self._begun: WeakKeyDictionary[Backend, tuple[Any, int]] = WeakKeyDictionary()  # and how many layers have run

    def states(self, backend: AudioEncoder, seconds: float = math.inf) -> Any:
        """The encoder's output. None if it takes longer than this: another call goes on where this one ends.

        At least one layer of the encoder runs, and others as long as the time suffices for one like the latest.
        """
        if backend not in self._states:
            shared = [states for other, states in self._states.items() if have_equal_encoders(backend, other)]
            states = shared[0] if shared else self._encode(backend, seconds)
            if states is None:
                return None
            self._states[backend] = states
        return self._states[backend]

    def _encode(self, backend: AudioEncoder, seconds: float) -> Any:
        if seconds == math.inf and backend not in self._begun:
            return backend.states(self.features)
        states, layer = self._begun.pop(backend, (None, 0))
        began_at = now = time.perf_counter()
        while layer < backend.encoder_layers:
            states, layer = backend.states_after(self.features, range(layer, layer + 1), states), layer + 1
            before, now = now, time.perf_counter()
            if layer < backend.encoder_layers and 2 * now - before - began_at > seconds:
                self._begun[backend] = states, layer
                return None
        return states

    def unread_positions(self, draft: Backend, target: Backend) -> int:
        """The positions that the encoder of a draft has to read: none if it has read them, or the target's is equal."""
        if draft in self._states or have_equal_encoders(draft, target):
            return 0
        return cast(AudioEncoder, draft).states_shape[0]


def have_equal_encoders(one: Backend, other: Backend) -> bool:
    """Whether the encoders of two backends give equal states for the same audio.

    They do if the kernels, the shapes and all bytes of the weights are equal. Shapes are compared first, because a
    digest of the weights takes time. It is computed once per model.
    """
    if one is other:
        return True
    if type(one) is not type(other) or one.device != other.device:
        return False
    first, second = cast(AudioEncoder, one), cast(AudioEncoder, other)
    return first.states_shape == second.states_shape and first.encoder_digest == second.encoder_digest


def check_features(lm: LanguageModel, features: Any) -> AudioFeatures | None:
    """A copy of features, float32 [mel bins, frames], or the given ones; None for a model that reads no audio."""
    expected = lm.backend.features_shape
    if expected is None:
        if features is not None:
            raise SpecbeamError(f"{lm.source} reads no sound: leave out the features")
        return None
    mel_bins, frames = expected
    hint = f"give log-mel features of sound, float32 [{mel_bins}, {frames}]"
    if features is None:
        raise SpecbeamError(f"{lm.source} {described(expected)}, and there are none: {hint}, to Engine.submit")
    shared, features = (features, features.features) if isinstance(features, AudioFeatures) else (None, features)
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
    return AudioFeatures(array) if shared is None else shared


def described(shape: tuple[int, int] | None) -> str:
    """What a model reads, in words."""
    return "reads no sound" if shape is None else f"reads features [{shape[0]}, {shape[1]}] of sound"
