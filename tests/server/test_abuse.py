"""Many clients at once. Some leave, send nonsense, or read and write slowly. The others notice nothing."""

import asyncio
import contextlib
import json
import random
import socket

import pytest

from specbeam.server import serving
from specbeam.server.limits import Limits
from tests.conftest import in_thorough_mode

CLIENTS = 1000 if in_thorough_mode() else 120
KINDS = ("leaves", "leaves", "leaves", "nonsense", "huge", "slow reader", "slow writer", "good", "good", "good")
PROMPTS = [f"Client {number} says " + "a" * number for number in range(8)]


def request_of(body, length=None):
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


async def exchange(port, kind, number, chance):
    """The part of one client. Returns the answer that it gets."""
    fields = {"prompt": PROMPTS[number % 8], "max_tokens": 20, "temperature": 0, "stream": kind == "slow reader"}
    body = json.dumps(fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    try:
        if kind == "nonsense":
            writer.write(
                chance.choice([b"\x16\x03\x01" * 9, b"GET\r\n\r\n", request_of(b"{" * 99), request_of(body[:-9])])
            )
        elif kind == "huge":
            writer.write(request_of(b"", 10**12) if number % 2 else request_of(b'{"prompt": "' + b"a" * 90_000))
        elif kind == "slow writer":
            for byte in (whole := request_of(body))[:-3], whole[-3:-1], whole[-1:]:
                writer.write(byte)
                await asyncio.sleep(0)
        else:
            writer.write(request_of(body))
        if kind == "leaves":
            for _ in range(chance.randrange(20)):
                await asyncio.sleep(0)
            return None
        answer = b""
        while data := await reader.read(64 if kind == "slow reader" else 1 << 16):
            answer += data
            await asyncio.sleep(0)
        return answer
    except ConnectionError:  # the server closed it, because of nonsense
        return b""
    finally:
        writer.close()


async def crowd(server, texts):
    """All clients at once. Every answer is a right one or a clear refusal."""
    chance = random.Random(0)
    kinds = [chance.choice(KINDS) for _ in range(CLIENTS)]
    answers = asyncio.gather(*(exchange(server.port, kind, number, chance) for number, kind in enumerate(kinds)))
    while not answers.done():  # the server answers all the time
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"200 OK" in await asyncio.wait_for(reader.read(), 30)
        writer.close()
    outcomes = {"right": 0, "refused": 0}
    for number, (kind, answer) in enumerate(zip(kinds, await answers, strict=True)):
        if answer is None or (kind in ("nonsense", "huge") and not answer):
            continue
        head, _, rest = answer.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status != 200:
            assert status in ((400, 413, 429) if kind in ("nonsense", "huge") else (429,)), answer
            outcomes["refused"] += 1
            continue
        if kind == "slow reader":
            frames = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: {")]
            text = "".join(choice["text"] for frame in frames for choice in json.loads(frame)["choices"])
        else:
            text = json.loads(rest)["choices"][0]["text"]
        assert text == texts[number % 8]
        outcomes["right"] += 1
    return outcomes


@pytest.mark.parametrize("waiting", [16, 2000])
def test_a_crowd(start, chat_lm, waiting):
    limits = Limits(max_requests=8, max_waiting=waiting, max_body_bytes=50_000)
    with start({"tiny": chat_lm}, limits=limits) as server:
        texts = [
            server.post("/v1/completions", prompt=prompt, max_tokens=20, temperature=0).json()["choices"][0]["text"]
            for prompt in PROMPTS
        ]
        outcomes = asyncio.run(crowd(server, texts))
        assert outcomes["right"] >= (16 if waiting == 16 else CLIENTS // 4)
        assert outcomes["refused"] > 0
        engine = server.models.get(None).engine
        while engine.live or engine.waiting:  # of clients that left
            assert server.http.get("/health").status_code == 200
        assert server.post("/v1/completions", prompt=PROMPTS[0], max_tokens=20, temperature=0).status_code == 200
        assert engine.cache_tokens == 0


@pytest.mark.parametrize("head", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc", request_of(b"{", 9)])
def test_a_request_that_does_not_come_loses_its_connection(served, monkeypatch, head):
    monkeypatch.setattr(serving, "CONNECTION_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(head)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_an_answer_that_is_not_taken_loses_its_connection(served, monkeypatch):
    monkeypatch.setattr(serving, "CONNECTION_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        requests = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100_000
        with pytest.raises(ConnectionError):  # before, neither side takes any more
            client.sendall(requests)


def test_a_head_has_a_limit(served):
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                client.sendall(b"GET /health HTTP/1.1\r\nHost: " + b"a" * 10_000)
        with contextlib.suppress(ConnectionResetError):
            assert b"too large" in client.recv(1000)
    assert served.http.get("/health").status_code == 200
