"""The memory that the requests of an engine may hold."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakSet

from specbeam.backends.contract import Backend
from specbeam.engine.prefixes import Prefixes
from specbeam.engine.request_state import RequestState
from specbeam.errors import SpecbeamError

LOGITS_COPIES = 6
"""A strategy works on its logits in this many times their memory, the logits included."""
LOGITS_SHARE, LOGITS_SHARE_ON_GPU = 1 / 2, 1 / 8
"""Logits may take memory beside the caches, up to this share of the memory for caches. On a GPU little else is free."""


class Memory:
    """The memory for caches and logits of one engine's requests.

    Without a limit of its own, an engine shares the backend's memory for caches with all such engines of the process.

    Args:
        max_cache_tokens, max_kept_prefixes: as for :class:`specbeam.Engine`.

    Attributes:
        cache_bytes: the most that the caches of this engine may hold.
        held: bytes that the caches of this engine's requests hold. Other engines read it from their threads.
        prefixes: kept caches. They take only memory that no request needs.
    """

    def __init__(self, backend: Backend[Any], max_cache_tokens: int | None, max_kept_prefixes: int) -> None:
        self.held = 0
        self.prefixes = Prefixes(max_kept_prefixes)
        self._slot_bytes = backend.slot_bytes
        self._row_bytes = 4 * backend.vocab_size
        for_caches = backend.memory_for_caches()
        self._logits_bytes = for_caches * (LOGITS_SHARE_ON_GPU if backend.device.type == "cuda" else LOGITS_SHARE)
        self._sharing: WeakSet[Memory] | None = None
        if max_cache_tokens is None:
            self.cache_bytes = max(for_caches, backend.slot_bytes)
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

    def drop_kept(self, room: int = 0) -> bool:
        """Drop kept prefixes, of this engine first, until the others fit into this many bytes.

        Returns:
            Whether any was dropped.
        """
        stores = [self.prefixes]
        if self._sharing is not None:
            with _sharing_lock:
                stores += [one.prefixes for one in self._sharing if one is not self]
        dropped = False
        for store in stores:
            while sum(one.bytes for one in stores) > max(room, 0) and store.drop_oldest():
                dropped = True
        return dropped

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
                f"prompt and max_new_tokens need {slots} cache slots, the engine has {self.cache_tokens}: ask for "
                "fewer new tokens or raise max_cache_tokens"
            )
        if not self.holds_logits([request.most_rows]):
            needed = LOGITS_COPIES * request.most_rows * self._row_bytes
            raise SpecbeamError(
                f"beams, samples and guesses need {needed / 1e9:.1f} GB for the logits of {request.most_rows} nodes. "
                f"There are {self._logits_bytes / 1e9:.1f} GB: ask for fewer beams or samples, or for shorter drafts"
            )

    def too_small_for(self, request: RequestState) -> SpecbeamError:
        """The error of a request that outgrows the memory though it is alone."""
        return SpecbeamError(
            f"the texts of this request need more than the engine's {self.cache_tokens} cache slots: ask for fewer "
            "beams or new tokens, or raise max_cache_tokens"
        )


_sharing: dict[str, WeakSet[Memory]] = {}  # by device
_sharing_lock = Lock()
