"""Prefixes kept between requests: caches of ended requests, for requests whose prompts begin alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Backend, Cache

MIN_COMMON_SHARE = 0.5
"""A cache is taken over if at least this share of its text is common. Prompts of one chat template all begin alike."""


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
    """The caches of the engine's last requests. A request whose prompt goes on with one of their texts takes it over.

    The rest of the cache's text is lost then. So a request that shares only the beginning of a text leaves it to
    others: several conversations can take turns. The oldest of ``most`` texts goes in any case when a request ends.

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

    def take(self, prompt: Sequence[int], fits: Callable[[Prefix], bool]) -> list[Prefix]:
        """Hand out the prefixes whose text on the target shares most with the prompt.

        Args:
            prompt: token ids. The last one is evaluated in any case, for its logits.
            fits: whether a request may hold the cache of a prefix on the target.

        Returns:
            The prefixes of one request, of the target first. None without a common token, and none if too little is
            common (:data:`MIN_COMMON_SHARE`), except of the oldest of ``most`` texts.
        """
        tokens = np.asarray(prompt[:-1], dtype=np.int64)
        kept = list(self._kept.items())
        is_full = len(kept) >= self.most
        common: dict[int, int] = {}
        for place, (number, (prefix, *_)) in enumerate(kept):
            shared = prefix.common(tokens)
            goes_anyway = is_full and place == 0
            if shared and fits(prefix) and (goes_anyway or shared >= MIN_COMMON_SHARE * len(prefix.tokens)):
                common[number] = shared
        longest = max(common, key=lambda number: common[number], default=None)
        return [] if longest is None else self._kept.pop(longest, [])

    @property
    def bytes(self) -> int:
        """Bytes that the kept caches hold."""
        return sum(prefix.bytes for prefixes in list(self._kept.values()) for prefix in prefixes)

    def drop_oldest(self) -> bool:
        """Free the caches that were kept first. Returns whether there were any."""
        oldest = next(iter(list(self._kept)), None)
        return oldest is not None and bool(self._kept.pop(oldest, True))
