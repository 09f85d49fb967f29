"""The bodies of requests while they come: large ones on the disk, and all of them together within a limit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from tempfile import SpooledTemporaryFile

from starlette.types import Message, Receive

from specbeam.server.errors import Refusal
from specbeam.server.streams import ClientGone

MAX_BODY_SECONDS = 60.0
"""A client has this time to send its body."""
MAX_BYTES_IN_MEMORY = 1 << 20
"""A larger body is in a file without a name."""


class Bodies:
    """The bodies of all requests that have no answer yet.

    A body that would exceed the limit takes the place of the body that has waited longest for its next bytes. So
    clients that stop in the middle of their bodies do not keep others out.

    Attributes:
        held_bytes: of all bodies.
    """

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._coming: dict[Body, None] = {}  # the one that has waited longest comes first

    def grow(self, body: Body, num_bytes: int) -> None:
        """Take in bytes of a body.

        Raises:
            Refusal: the other bodies hold all of the room, and have come whole.
        """
        self._coming.pop(body, None)
        self._coming[body] = None
        body.held_bytes += num_bytes
        self.held_bytes += num_bytes
        while self.held_bytes > self._max_bytes:
            slowest = next(iter(self._coming))
            self.drop(slowest)
            if slowest is body:
                raise no_room()
            slowest.refuse()

    def is_whole(self, body: Body) -> None:
        self._coming.pop(body, None)

    def drop(self, body: Body) -> None:
        """Give back the room of a body."""
        self._coming.pop(body, None)
        self.held_bytes -= body.held_bytes
        body.held_bytes = 0


class Body:
    """The body of a request. A context manager that drops it.

    Args:
        bodies: the bodies that share the room.
    """

    def __init__(self, bodies: Bodies) -> None:
        self.held_bytes = 0
        self._bodies = bodies
        self._file = SpooledTemporaryFile(MAX_BYTES_IN_MEMORY)  # noqa: SIM115
        self._patience = asyncio.timeout(None)
        self._is_refused = False

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.drop(self)
        self._file.close()

    def refuse(self) -> None:
        """End the wait for further bytes, for lack of room."""
        self._is_refused = True
        self._patience.reschedule(asyncio.get_running_loop().time())

    async def whole(self, receive: Receive, check_size: Callable[[int], None]) -> Receive:
        """Wait for all of the body. Returns what gives it to an application, in pieces.

        Args:
            check_size: raises Refusal for a body of that size.

        Raises:
            Refusal: it is too large or too slow, or there is no room for it.
            ClientGone: the client went away before its end.
        """
        has_more = True
        try:
            async with self._patience as patience:
                patience.reschedule(asyncio.get_running_loop().time() + MAX_BODY_SECONDS)
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    check_size(self.held_bytes + len(piece))
                    self._bodies.grow(self, len(piece))
                    self._file.write(piece)
                    has_more = message.get("more_body", False)
        except TimeoutError:
            if self._is_refused:
                raise no_room() from None
            problem = f"the body did not come within {MAX_BODY_SECONDS:.0f} seconds"
            raise Refusal(problem, None, "body_too_slow", 408) from None
        except OSError as error:
            raise Refusal(f"the server cannot keep this body: {error.strerror}", None, "body_not_kept", 503) from error
        self._bodies.is_whole(self)
        return self._again(receive)

    def _again(self, receive: Receive) -> Receive:
        """Receives the body, and then what comes after it."""
        self._file.seek(0)
        left = [self.held_bytes]

        async def again() -> Message:
            if not left:
                return await receive()
            piece = self._file.read(MAX_BYTES_IN_MEMORY)
            if not (rest := left.pop() - len(piece)):
                return {"type": "http.request", "body": piece, "more_body": False}
            left.append(rest)
            return {"type": "http.request", "body": piece, "more_body": True}

        return again


def no_room() -> Refusal:
    return Refusal("the server has no room for this body beside others: try again later", None, "bodies_full", 503)
