"""The clients of ``bench/server.py``, in a process of their own.

Each line of standard input is ``{"port": N, "path": "/v1/...", "bodies": [...]}``: one client for each body. All begin
at once. The line of output that answers it is ``{"seconds": until the last one had its answer, "answers": [...]}``.
An answer has ``status``, ``text``, ``finish_reason``, and ``times``: the seconds from its request to frames with text.
Its ``body`` has all that came, if the status is not 200 or a stream has no end. A client only notes what it receives,
and when. Frames are read once all clients have their answers. A server that takes no requests, or does not end its
answers, gives ``{"error": why}``.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from bisect import bisect_right
from functools import partial
from itertools import accumulate
from typing import Any

import uvloop

FRAME = re.compile(rb"^data: (\{.*\})\r?$", re.MULTILINE)

MAX_SECONDS = 240
"""A run that takes longer has gone wrong."""


class Client(asyncio.Protocol):
    """Sends one request, and notes each block of bytes that comes until the server closes the connection."""

    def __init__(self, request: bytes) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._sent = 0.0
        self._blocks: list[tuple[float, bytes]] = []

    def connection_made(self, transport: Any) -> None:
        self._sent = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._blocks.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(None)

    def answer(self) -> dict[str, Any]:
        """The status and the text that came, and the time of each frame with text."""
        received = b"".join(block for _, block in self._blocks)
        ends = [*accumulate(len(block) for _, block in self._blocks)]
        times, texts, finish_reason, is_stream = [], [], None, False
        for found in FRAME.finditer(received):
            is_stream = True
            choices = json.loads(found[1]).get("choices", [])
            text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
            finish_reason = choices[0].get("finish_reason") if choices else finish_reason
            if text:
                texts.append(text)
                times.append(self._blocks[bisect_right(ends, found.start())][0] - self._sent)
        status = received.split(b" ", 2)[1].decode() if received else "none"
        whole = status == "200" and (finish_reason is not None or not is_stream)
        body = "" if whole else received.decode(errors="replace")
        return {"status": status, "text": "".join(texts), "times": times, "finish_reason": finish_reason, "body": body}


async def ask_all(port: int, path: str, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    """One client for each body. All begin at once."""
    requests = [request(path, json.dumps(body).encode()) for body in bodies]
    loop = asyncio.get_running_loop()
    start = time.perf_counter()
    try:
        async with asyncio.timeout(MAX_SECONDS):
            made = await asyncio.gather(
                *(loop.create_connection(partial(Client, each), "127.0.0.1", port) for each in requests)
            )
            clients = [client for _, client in made]
            await asyncio.gather(*(client.closed for client in clients))
    except TimeoutError:
        return {"error": f"no end after {MAX_SECONDS} s"}
    except OSError as error:
        return {"error": f"no connection: {error}"}
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "answers": [client.answer() for client in clients]}


def request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(uvloop.run(ask_all(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
