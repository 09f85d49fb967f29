"""How long a request waits for others that come at the same time, to share its first pass with them.

Otherwise a pass would begin with the first request of a crowd, and the others would wait for its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

MAX_SECONDS = 0.01
"""A request waits no longer than this for further ones."""


def while_others_come(count: Callable[[], int]) -> Iterator[None]:
    """Yield before each pause in which another request may come, until none has come in the last one.

    Args:
        count: the requests that have come so far.
    """
    end, seen = time.monotonic() + MAX_SECONDS, 0
    while (come := count()) > seen and time.monotonic() < end:
        seen = come
        yield
