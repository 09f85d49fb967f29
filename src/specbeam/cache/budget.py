"""How much memory the requests of an engine may take: for slots, and for logits."""

from __future__ import annotations

from threading import Lock
from weakref import WeakSet

from specbeam.backends import devices
from specbeam.backends.contract import Backend, token_bytes
from specbeam.cache.pool import EngineCache
from specbeam.errors import SpecbeamError, TooManyNodes

LOGITS_COPIES = 6
"""A strategy works on its logits in this many times their memory, the logits included."""
LOGITS_SHARE, LOGITS_SHARE_ON_GPU = 1 / 2, 1 / 8
"""Logits may take memory beside the caches, up to this share of the memory for caches. On a GPU little else is free."""


class Budget:
    """The memory for caches and logits of one engine's requests.

    Without a limit of its own, an engine shares the backend's memory for caches with all such engines of the process.

    Args:
        max_batch_tokens, max_cache_tokens: as for :class:`specbeam.Engine`.

    Attributes:
        cache_bytes: the maximum that the slots and rows of this engine's requests may take.
        source_bytes: bytes that encoders' outputs take, and scores of attention to them.
        target: the part of the target's pool that this engine owns.
    """

    def __init__(self, backend: Backend, max_batch_tokens: int, max_cache_tokens: int | None) -> None:
        self.max_batch_tokens = max_batch_tokens
        self.source_bytes = 0
        self.target = EngineCache(backend)
        self._caches = {backend: self.target}
        self._row_bytes = 4 * backend.vocab_size
        for_caches = backend.memory_for_caches()
        on_gpu = devices.kind(backend.device) == "cuda"
        self._logits_bytes = for_caches * (LOGITS_SHARE_ON_GPU if on_gpu else LOGITS_SHARE)
        self._sharing: WeakSet[Budget] = WeakSet()
        self._origin = ""  # of the limit, for messages
        if max_cache_tokens is None:
            self.cache_bytes = max(for_caches, token_bytes(backend))
            self._origin = f" ({self.cache_bytes / 1e9:.3g} GB, by default a part of the memory that was free)"
            with _sharing_lock:
                self._sharing = _sharing.setdefault(backend.device, WeakSet())
                self._sharing.add(self)
        else:
            self.cache_bytes = max_cache_tokens * token_bytes(backend)

    @property
    def cache_tokens(self) -> int:
        """The maximum number of tokens of which the caches of this engine may hold everything."""
        return self.cache_bytes // self.target.token_bytes

    @property
    def capacity(self) -> int:
        """Bytes that the caches of this engine may hold beside the caches of other engines' requests."""
        return self.cache_bytes - sum(other.held for other in self._others())

    @property
    def held(self) -> int:
        """Bytes that this engine's requests hold. Other engines read it from their threads."""
        return sum(cache.used_bytes for cache in list(self._caches.values())) + self.source_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of cached prefixes that no request holds, on the target and on draft models."""
        return sum(cache.kept_bytes for cache in list(self._caches.values()))

    def _others(self) -> list[Budget]:
        with _sharing_lock:
            return [other for other in self._sharing if other is not self]

    def cache_of(self, backend: Backend) -> EngineCache:
        """The part of a backend's pool that this engine owns."""
        if backend not in self._caches:
            self._caches[backend] = EngineCache(backend)
        return self._caches[backend]

    def clear(self) -> None:
        """Free all slots of this engine: its requests have failed."""
        for cache in self._caches.values():
            cache.clear()

    def evict(self, max_bytes: int = 0) -> bool:
        """Evict prefixes that no request holds, of this engine first, until the others fit into this many bytes.

        Returns:
            Whether any was evicted.
        """
        caches = [cache for other in (self, *self._others()) for cache in list(other._caches.values())]
        too_much = sum(cache.kept_bytes for cache in caches) - max(max_bytes, 0)
        evicted = False
        for cache in caches:
            if too_much <= 0:
                break
            size = cache.evict(too_much)
            too_much -= size
            evicted |= size > 0
        return evicted

    @property
    def max_rows(self) -> int:
        """The maximum number of rows of logits for which a request that is alone has memory."""
        return int(self._logits_bytes / (LOGITS_COPIES * self._row_bytes))

    def holds_logits(self, rows: list[int]) -> bool:
        """Whether there is memory for logits, with this many rows for each request. One request works at a time."""
        copied_rows = sum(rows) + (LOGITS_COPIES - 1) * max(rows)
        return copied_rows * self._row_bytes <= self._logits_bytes

    def holds(self, size: int) -> bool:
        """Whether the memory holds this many further bytes, for a request that is alone."""
        return self.held + size <= self.cache_bytes

    def check(self, min_bytes: int, max_rows: int) -> None:
        """Refuse a request that could not end well, were it alone.

        Args:
            min_bytes: of one sequence of full length.
            max_rows: the maximum number of rows of logits at once.

        Raises:
            SpecbeamError: says what it needs, and what there is.
        """
        if min_bytes > self.cache_bytes:
            slots = -(-min_bytes // self.target.token_bytes)
            raise SpecbeamError(
                f"prompt and max_new_tokens need {slots} cache slots, the engine has {self.cache_tokens}"
                f"{self._origin}: ask for fewer new tokens or raise max_cache_tokens",
                option=("max_new_tokens", "max_cache_tokens"),
            )
        if not self.holds_logits([max_rows]):
            needed = LOGITS_COPIES * max_rows * self._row_bytes
            raise SpecbeamError(
                f"beams, samples and draft tokens need {needed / 1e9:.1f} GB for the logits of {max_rows} nodes. "
                f"There are {self._logits_bytes / 1e9:.1f} GB: ask for fewer beams or samples, or for shorter drafts"
            )

    @property
    def too_small(self) -> TooManyNodes:
        """The error of a request that outgrows the memory though it is alone."""
        return TooManyNodes(
            f"the sequences of this request need more than the engine's {self.cache_tokens} cache slots{self._origin}: "
            "ask for fewer beams or new tokens, or raise max_cache_tokens",
            option="max_cache_tokens",
        )

    def lost(self, own_bytes: int) -> SpecbeamError:
        """The error of a request that is alone and holds this many bytes, although more are counted as held."""
        slots = (self.held - own_bytes) // self.target.token_bytes
        return SpecbeamError(
            f"{slots} of the engine's {self.cache_tokens} cache slots are held by no request, and the others do not "
            "suffice: make a new Engine, and please report this error of specbeam"
        )


_sharing: dict[str, WeakSet[Budget]] = {}  # by device
_sharing_lock = Lock()
