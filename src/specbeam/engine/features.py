"""Features of sound, as a caller gives them for the encoder of a model."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Backend, HearingBackend
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel


class Sound:
    """Features of sound that several requests are about, one after another. The encoder reads them once.

    It keeps the encoder's output, so let go of it after the last request.

    Args:
        features: float32 [bands, frames] (``Engine.submit``).
    """

    def __init__(self, features: NDArray[np.float32]) -> None:
        self.features = features
        self._states: WeakKeyDictionary[Backend, Any] = WeakKeyDictionary()

    def states(self, backend: HearingBackend) -> Any:
        """The encoder's output."""
        if backend not in self._states:
            self._states[backend] = backend.states(self.features)
        return self._states[backend]


def check_features(lm: LanguageModel, features: Any) -> NDArray[np.float32] | Sound | None:
    """A copy of features, float32 [bands, frames], or the given sound; None for a model that reads no sound.

    Raises:
        SpecbeamError: the model reads other features, or none at all.
    """
    expected = lm.backend.features_shape
    if expected is None:
        if features is not None:
            raise SpecbeamError(f"{lm.source} reads no sound: leave out the features")
        return None
    bands, frames = expected
    hint = f"give log-mel features of sound, float32 [{bands}, {frames}]"
    if features is None:
        raise SpecbeamError(f"{lm.source} {described(expected)}, and there are none: {hint}, to Engine.submit")
    sound, features = (features, features.features) if isinstance(features, Sound) else (None, features)
    try:
        found = np.array(features, np.float32)
    except (TypeError, ValueError) as error:
        raise SpecbeamError(f"the features are no array of numbers ({error}): {hint}") from error
    if found.shape != expected:
        raise SpecbeamError(
            f"the features have the shape {[*found.shape]}, but {lm.source} {described(expected)}: {hint}"
        )
    if not np.isfinite(found).all():
        raise SpecbeamError(f"the features hold NaN or infinity: {hint}")
    return found if sound is None else sound


def described(shape: tuple[int, int] | None) -> str:
    """What a model reads, in words."""
    return "reads no sound" if shape is None else f"reads features [{shape[0]}, {shape[1]}] of sound"
