"""The memory that the requests of an engine may hold."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakSet

from specbeam.backends.contract import Backend
from specbeam.engine.store import EngineCache, store_of
from specbeam.errors import SpecbeamError, TooManyNodes

if TYPE_CHECKING:
    from specbeam.engine.request_state import RequestState

LOGITS_COPIES = 6
"""A strategy works on its logits in this many times their memory, the logits included."""
LOGITS_SHARE, LOGITS_SHARE_ON_GPU = 1 / 2, 1 / 8
"""Logits may take memory beside the caches, up to this share of the memory for caches. On a GPU little else is free."""


class Memory:
    """The memory for caches and logits of one engine's requests.

    Without a limit of its own, an engine shares the backend's memory for caches with all such engines of the process.

    Args:
        max_batch_tokens, max_cache_tokens: as for :class:`specbeam.Engine`.

    Attributes:
        cache_bytes: the most that the keys and values of this engine's requests may take.
        source_bytes: bytes that encoders' outputs take.
    """

    def __init__(self, backend: Backend, max_batch_tokens: int, max_cache_tokens: int | None) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.source_bytes = 0
        self._target = EngineCache(store_of(backend))
        self._caches = {backend: self._target}
        self._slot_bytes = backend.slot_bytes
        self._row_bytes = 4 * backend.vocab_size
        for_caches = backend.memory_for_caches()
        self._logits_bytes = for_caches * (LOGITS_SHARE_ON_GPU if backend.device.type == "cuda" else LOGITS_SHARE)
        self._sharing: WeakSet[Memory] | None = None
        self._origin = ""  # of the limit, for messages
        if max_cache_tokens is None:
            self.cache_bytes = max(for_caches, backend.slot_bytes)
            self._origin = f" ({self.cache_bytes / 1e9:.3g} GB, by default a part of the memory that was free)"
            with _sharing_lock:
                self._sharing = _sharing.setdefault(str(backend.device), WeakSet())
                self._sharing.add(self)
        else:
            self.cache_bytes = max_cache_tokens * backend.slot_bytes

    @property
    def cache_tokens(self) -> int:
        """The most slots that the caches of this engine may hold."""
        return self.cache_bytes // self._slot_bytes

    @property
    def room(self) -> int:
        """Bytes that the caches of this engine may hold beside the caches of other engines' requests."""
        if self._sharing is None:
            return self.cache_bytes
        with _sharing_lock:
            return self.cache_bytes - sum(one.held for one in self._sharing if one is not self)

    def cache_of(self, backend: Backend) -> EngineCache:
        """The part of a backend's store that this engine holds."""
        if backend not in self._caches:
            self._caches[backend] = EngineCache(store_of(backend))
        return self._caches[backend]

    @property
    def used_slots(self) -> int:
        """Slots of the target that this engine's requests hold."""
        return self._target.used

    @property
    def kept_slots(self) -> int:
        """Slots of the target that keep texts for later requests."""
        return self._target.kept

    @property
    def kept_bytes(self) -> int:
        """Bytes that keep texts for later requests, on the target and on draft models."""
        return sum(cache.kept * backend.slot_bytes for backend, cache in list(self._caches.items()))

    @property
    def held(self) -> int:
        """Bytes that this engine's requests hold. Other engines read it from their threads."""
        slots = sum(cache.used * backend.slot_bytes for backend, cache in list(self._caches.items()))
        return slots + self.source_bytes

    def clear(self) -> None:
        """Give up all slots of this engine: its requests have failed."""
        for cache in self._caches.values():
            cache.clear()

    def drop_kept(self, room: int = 0) -> bool:
        """Forget texts that no request holds, of this engine first, until the others fit into this many bytes.

        Returns:
            Whether any was forgotten.
        """
        sharing = [self]
        if self._sharing is not None:
            with _sharing_lock:
                sharing += [one for one in self._sharing if one is not self]
        caches = [pair for one in sharing for pair in list(one._caches.items())]
        too_much = sum(cache.kept * backend.slot_bytes for backend, cache in caches) - max(room, 0)
        dropped = False
        for backend, cache in caches:
            if too_much <= 0:
                break
            slots = cache.drop_kept(-(-too_much // backend.slot_bytes))
            too_much -= slots * backend.slot_bytes
            dropped |= slots > 0
        return dropped

    @property
    def most_rows(self) -> int:
        """The most rows of logits for which a request that is alone has memory."""
        return int(self._logits_bytes / (LOGITS_COPIES * self._row_bytes))

    def holds_logits(self, rows: list[int]) -> bool:
        """Whether there is memory for logits, with this many rows for each request. One request works at a time."""
        copied_rows = sum(rows) + (LOGITS_COPIES - 1) * max(rows)
        return copied_rows * self._row_bytes <= self._logits_bytes

    def check(self, request: RequestState) -> None:
        """Refuse a request that could not end well, were it alone.

        Raises:
            SpecbeamError: says what it needs, and what there is.
        """
        if request.least_bytes > self.cache_bytes:
            slots = -(-request.least_bytes // self._slot_bytes)
            raise SpecbeamError(
                f"prompt and max_new_tokens need {slots} cache slots, the engine has {self.cache_tokens}"
                f"{self._origin}: ask for fewer new tokens or raise max_cache_tokens"
            )
        if not self.holds_logits([request.most_rows]):
            needed = LOGITS_COPIES * request.most_rows * self._row_bytes
            raise SpecbeamError(
                f"beams, samples and guesses need {needed / 1e9:.1f} GB for the logits of {request.most_rows} nodes. "
                f"There are {self._logits_bytes / 1e9:.1f} GB: ask for fewer beams or samples, or for shorter drafts"
            )

    @property
    def too_small(self) -> TooManyNodes:
        """The error of a request that outgrows the memory though it is alone."""
        return TooManyNodes(
            f"the texts of this request need more than the engine's {self.cache_tokens} cache slots{self._origin}: "
            "ask for fewer beams or new tokens, or raise max_cache_tokens"
        )


_sharing: dict[str, WeakSet[Memory]] = {}  # by device
_sharing_lock = Lock()
