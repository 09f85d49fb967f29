"""A request: the caller's handle of a submitted prompt."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from specbeam.errors import SpecbeamError
from specbeam.results import Piece, Result, Sequence

if TYPE_CHECKING:
    from specbeam.engine.request_state import RequestState


class Request:
    """The handle of a submitted prompt. It keeps alive only what is for the caller, once the request is done.

    Attributes:
        prompt_ids: the prompt's token ids.
        max_length: the most tokens of prompt and text together.
        pieces: streamed pieces of text that nobody has taken yet.
        found: finished sequences that nobody has taken yet, best first. Each comes as soon as it is certain.
        done: there is a result or an error.
    """

    def __init__(
        self, prompt_ids: list[int], max_length: int, state: RequestState, cancellations: deque[RequestState]
    ) -> None:
        self.prompt_ids = prompt_ids
        self.max_length = max_length
        self.pieces: deque[Piece] = deque()
        self.found: deque[Sequence] = deque()
        self.done = False
        self.outcome: Result | Exception | None = None
        self.cancellations = cancellations  # the engine's queue of requests to end
        self._state: RequestState | None = state  # the engine's, until the request is done

    def cancel(self) -> None:
        """End the request before the next pass. Its result is the text so far. May be called from any thread."""
        if (state := self._state) is not None:
            self.cancellations.append(state)

    def result(self) -> Result:
        """The result, once done.

        Raises:
            SpecbeamError: the request is not finished.
            Exception: the error that ended the request.
        """
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome is None:
            raise SpecbeamError("the request is not finished: call Engine.run() or step() until it is done")
        return self.outcome

    @property
    def used_slots(self) -> int:
        """Cache slots in use on the target. A request that waits, is paused or is done uses none."""
        return 0 if (state := self._state) is None else state.used_slots

    def end(self) -> None:
        """Note that there is a result or an error. The engine calls this."""
        self.done = True
        self._state = None
