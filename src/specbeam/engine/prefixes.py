"""Prefixes kept between requests: caches of ended requests, for requests whose prompts begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Backend, Cache


@dataclass(frozen=True, eq=False)
class Prefix:
    """A text whose keys and values lie in a cache.

    Attributes:
        backend: the backend of the cache.
        tokens: the text's token ids, int64 [n].
        slots: where the tokens' keys and values lie, int64 [n].
        held: the number of slots that the cache holds. The others hold nothing of use.
    """

    backend: Backend[Any]
    cache: Cache
    tokens: NDArray[np.int64]
    slots: NDArray[np.int64]
    held: int

    def common(self, tokens: NDArray[np.int64]) -> int:
        """How many of the first tokens are the same. Texts are compared by token ids, int64 [n]."""
        shorter = min(len(self.tokens), len(tokens))
        different = np.flatnonzero(self.tokens[:shorter] != tokens[:shorter])
        return int(different[0]) if len(different) else shorter

    @property
    def bytes(self) -> int:
        """Bytes that the cache holds."""
        return self.held * self.backend.slot_bytes


class Prefixes:
    """The caches of the engine's last requests. A request whose prompt begins like one of them takes it over.

    The engine keeps and takes them in one thread. Engines that are short of memory may drop them from other threads:
    each statement that changes ``_kept`` is one operation of a dictionary.

    Args:
        most: keep the caches of at most this many requests.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: dict[int, list[Prefix]] = {}  # in the order of keeping. The target's prefix comes first.
        self._numbers = count()

    def keep(self, prefixes: list[Prefix]) -> None:
        """Keep the prefixes of a request that has ended, of the target first. The oldest make room for them."""
        if self.most and len(prefixes[0].tokens):
            while len(self._kept) >= self.most and self.drop_oldest():
                pass
            self._kept[next(self._numbers)] = prefixes

    def take(self, prompt: Sequence[int]) -> list[Prefix]:
        """Hand out the prefixes whose text on the target shares most with the prompt; none without a common token.

        Args:
            prompt: token ids.
        """
        tokens = np.asarray(prompt, dtype=np.int64)
        common = {number: prefixes[0].common(tokens) for number, prefixes in list(self._kept.items())}
        longest = max(common, key=lambda number: common[number], default=None)
        if longest is None or not common[longest]:
            return []
        return self._kept.pop(longest, [])

    @property
    def bytes(self) -> int:
        """Bytes that the kept caches hold."""
        return sum(prefix.bytes for prefixes in list(self._kept.values()) for prefix in prefixes)

    def drop_oldest(self) -> bool:
        """Free the caches that were kept first. Returns whether there were any."""
        oldest = next(iter(list(self._kept)), None)
        return oldest is not None and bool(self._kept.pop(oldest, True))
