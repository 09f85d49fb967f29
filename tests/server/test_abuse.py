"""Many clients at once. Half of them leave, others send nonsense, or read and write slowly. The rest notice nothing."""

import asyncio
import contextlib
import http.client
import json
import random
import re
import socket
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from specbeam.engine import engine_thread
from specbeam.server import app, serving, tokenizing
from specbeam.server.call import BatchingWindow
from specbeam.server.limits import Limits
from specbeam.server.middleware import Bodies, Body, Middleware
from tests.server.conftest import serving_alone

KINDS = ("leaves",) * 10 + ("nonsense", "huge") + ("slow reader", "slow writer") * 2 + ("good",) * 4
PROMPTS = [f"Client {number} says " + "a" * number for number in range(8)]


def request_of(body, length=None):
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


async def exchange(port, kind, number, chance):
    """The part of one client. Returns the answer that it gets, or None if it leaves."""
    stream = kind == "slow reader" or (kind == "leaves" and chance.random() < 0.7)
    body = json.dumps({"prompt": PROMPTS[number % 8], "max_tokens": 20, "temperature": 0, "stream": stream}).encode()
    whole = request_of(body)
    parts, patience = [whole], chance.randrange(1500) if kind == "leaves" else 1 << 30  # bytes
    if kind == "nonsense":
        parts = [chance.choice([b"\x16\x03\x01" * 9, b"GET\r\n\r\n", request_of(b"{" * 99), request_of(body[:-9])])]
    elif kind == "huge":
        parts = [request_of(b"", 10**12) if number % 2 else request_of(b'{"prompt": "' + b"a" * 90_000)]
    elif kind == "slow writer":
        parts = [whole[:9], whole[9:-3], whole[-3:-1], whole[-1:]]
    elif kind == "leaves" and chance.random() < 0.2:
        parts, patience = [whole[: chance.randrange(len(whole))]], 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        answer = b""
        while len(answer) < patience and (data := await reader.read(64 if stream else 1 << 16)):
            answer += data
            await asyncio.sleep(0)
        return None if kind == "leaves" else answer
    except ConnectionError:  # the server closed it, because of nonsense
        return b""
    finally:
        writer.close()


async def crowd(port, clients, texts):
    """All clients at once. Every answer is a right one or a clear refusal."""
    chance = random.Random(clients)
    kinds = [chance.choice(KINDS) for _ in range(clients)]
    answers = asyncio.gather(*(exchange(port, kind, number, chance) for number, kind in enumerate(kinds)))
    while not answers.done():  # the server answers all the time
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
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
        frames = [line[6:] for line in rest.split(b"\n") if line.startswith(b"data: {")] or [rest]
        assert "".join(json.loads(frame)["choices"][0]["text"] for frame in frames) == texts[number % 8]
        outcomes["right"] += 1
    return outcomes


def texts_alone(server):
    """The answers to the prompts, one after the other."""
    return [server.choices(prompt=prompt, max_tokens=20, temperature=0)[0]["text"] for prompt in PROMPTS]


def in_use(server):
    """Live and waiting requests, and slots of the cache, as the server reports them."""
    names = ("live_requests", "waiting_requests", "cache_tokens")
    return sum(server.metrics()[f'specbeam_{name}{{model="tiny"}}'] for name in names)


@pytest.mark.parametrize("waiting", [16, 2000])
def test_a_crowd(start, chat_lm, waiting):
    limits = Limits(max_requests=8, max_waiting=waiting, max_body_bytes=50_000)
    with start({"tiny": chat_lm}, limits=limits) as server:
        texts = texts_alone(server)
        outcomes = asyncio.run(crowd(server.port, 120, texts))
        assert outcomes["right"] >= (1 if waiting == 16 else 30)  # of the few taken, many leave
        assert outcomes["refused"] > 0
        while in_use(server):  # by clients that left
            pass
        assert texts_alone(server) == texts


PROBE = """
import httpx, sys
print("begun", flush=True)
while True:
    httpx.get(sys.argv[1] + "/health", timeout=1, trust_env=False, verify=False).raise_for_status()
"""
"""Another client in a process of its own, which ends with an error if /health takes more than a second."""


@pytest.mark.thorough
def test_a_thousand_clients_leave_nothing_behind(chat_lm):
    """Texts, slots, connections and memory of the process, and /health within a second."""
    how = ["--backend", "cpu", "--dtype", "float32"]
    how += ["--max-requests", "8", "--max-waiting", "2000", "--max-body-bytes", "50000"]
    with serving_alone("--model", f"tiny={chat_lm.source}", *how) as server:
        texts = texts_alone(server)
        process = psutil.Process(server.process.pid)
        files, sizes = process.num_fds(), []
        command = [sys.executable, "-c", PROBE, server.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as probe:
            assert probe.stdout.readline() == "begun\n"
            for _ in range(4):
                outcomes = asyncio.run(crowd(server.port, 1000, texts))
                assert outcomes["right"] >= 250
                while in_use(server):
                    pass
                sizes.append(process.memory_info().rss)
            assert probe.poll() is None
            probe.terminate()
        assert texts_alone(server) == texts
        assert sizes[-1] < sizes[0] + 20 * 2**20  # the first crowd makes buffers that stay
        while process.num_fds() > files:  # the last connections are about to close
            assert in_use(server) == 0
        assert "Traceback" not in "".join(server.log)


async def arrived(size):
    """The acts of the requests of a crowd. Each request comes a turn of the event loop after the one before."""
    window, done = BatchingWindow(), []

    async def request(number):
        for _ in range(number):
            await asyncio.sleep(0)
        done.append("comes")
        await window.wait()
        done.append("goes on")

    await asyncio.gather(*map(request, range(size)))
    return done


def test_requests_that_come_one_after_the_other_go_on_together(monkeypatch):
    monkeypatch.setattr(engine_thread, "MAX_WINDOW_SECONDS", 60)
    assert asyncio.run(arrived(8)) == ["comes"] * 8 + ["goes on"] * 8


def test_requests_that_never_end_to_come_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(engine_thread, "MAX_WINDOW_SECONDS", 0)
    assert asyncio.run(arrived(100)).index("goes on") < 100


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
        requests = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1_000_000
        with pytest.raises(ConnectionError):  # before, neither side takes any more
            client.sendall(requests)


def test_requests_that_wait_for_an_earlier_answer_take_little_memory(served):
    get, last = head_of("Host: localhost"), head_of("Host: localhost", "Connection: close")
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall(get * 3000 + last)
        served.http.get("/health")
        assert all(len(one.pipeline) < 1000 for one in served.server.server_state.connections)
        with client.makefile("rb") as answers:
            assert answers.read().count(b"HTTP/1.1 200 OK") == 3001


def answer_to(served, *parts):
    """The status and the message of the answer to parts of a request, each sent once the server has read those before.

    The connection stays open: the server waits for nothing more.
    """
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            client.sendall(part)
            served.http.get("/health")  # so the part before has been read
        with client.makefile("rb") as answer:
            status = int(answer.readline().split()[1])
            length = [int(line.split(b":")[1]) for line in iter(answer.readline, b"\r\n") if b"content-length" in line]
            return status, json.loads(answer.read(*length)).get("error", {}).get("message")


def head_of(*headers, target="/health", method="GET"):
    return "\r\n".join([f"{method} {target} HTTP/1.1", *headers, "", ""]).encode("latin-1")


def chunked(*parts):
    """A request whose body comes in chunks, which the parts are or begin."""
    headers = ("Host: localhost", "Content-Type: application/json", "Transfer-Encoding: chunked")
    return [head_of(*headers, target="/tokenize", method="POST") + parts[0], *parts[1:]]


def test_a_head_above_the_limit_is_refused_however_it_comes(served, monkeypatch):
    monkeypatch.setattr(serving, "MAX_HEAD_BYTES", 1000)
    for size in (999, 1000, 1001, 5000):
        head = head_of("Host: localhost", "X: " + "a" * size)
        head = head.replace(b"a" * (len(head) - size), b"", 1)
        assert len(head) == size
        for parts in ([head], [head[:500], head[500:]], [head[:-1], head[-1:]]):
            status, says = answer_to(served, *parts)
            assert status == (400 if size > 1000 else 200)
            assert says is None or "the head of the request is too large: send at most 1000 bytes" in says
    # Space is no part of a header's value.
    assert answer_to(served, head_of("Host:" + " " * 1000 + "localhost"))[0] == 400


def test_what_is_beside_the_data_of_chunks_is_limited(served, monkeypatch):
    monkeypatch.setattr(serving, "MAX_HEAD_BYTES", 1000)
    body = b'{"prompt": "' + b"a" * 3000 + b'"}'
    ones = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    assert answer_to(served, *chunked(ones + b"0\r\n\r\n"))[0] == 200
    begun = b"%x\r\n%s\r\n" % (len(body), body)
    for rest in (
        b"0\r\nX: " + b"a" * 1000,
        b"0;" + b"a" * 1000,
        b"1;" + b"a" * 1000,
        b"0\r\n" + b"A: b\r\n" * 200,
    ):
        status, says = answer_to(served, *chunked(begun + rest))
        assert (status, "around its chunks" in says) == (400, True)


def test_a_body_before_the_next_head_is_no_part_of_it(served, monkeypatch):
    monkeypatch.setattr(serving, "MAX_HEAD_BYTES", 1000)
    body = json.dumps({"prompt": "a" * 5000}).encode()
    headers = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
    first = head_of(*headers, target="/tokenize", method="POST") + body
    too_large = chunked(b"3d0901\r\n")[0].replace(b"Host", b"Connection: close\r\nHost")
    for second, status in ((head_of("Host: localhost", "Connection: close"), b"200"), (too_large, b"413")):
        for size in (9, len(second)):
            with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
                client.sendall(first + second[:size])
                served.http.get("/health")
                client.sendall(second[size:])
                with client.makefile("rb") as answers:
                    assert re.findall(rb"HTTP/1.1 (\d+)", answers.read()) == [b"200", status]


@pytest.mark.parametrize(
    "parts",
    [
        [b"3d0901\r\n"],  # one more than the limit
        [b"3D0901;name=value\r\n{"],
        [b"000003d", b"0901\r", b"\n"],
        [b"1\r\n{\r\n3d0900\r\n"],
        [b"1\r\n{\r", b"\n5\r\n a\nb ", b"\r\n3d08fb\r\n"],
        [b"ffffffffffffffff\r\n"],
    ],
)
def test_a_chunk_that_is_too_large_is_not_waited_for(served, parts):
    assert answer_to(served, *chunked(*parts)) == (413, "the body is larger than this server's limit of 4000000 bytes")


NO_HOSTS = [
    *("evil.com@localhost", "localhost@evil.com", "a:b@localhost", "localhost:", "localhost:x", "localhost:70000"),
    *("localhost:80:80", "localhost/", "localhost/@evil.com", "localhost?", "localhost#", "local host", "localhost,a"),
    *(
        "[::1",
        "::1",
        "[::1]a",
        "[localhost]",
        "http://localhost",
        "//localhost",
        "local%68ost",
        "localhost\\@a",
        "\xf6",
    ),
]


@pytest.mark.parametrize("host", NO_HOSTS)
def test_a_host_with_anything_more_than_a_port_is_refused(served, host):
    status, says = answer_to(served, head_of(f"Host: {host}"))
    assert (status, says.endswith("is not of the form NAME or NAME:PORT: send that")) == (400, True)
    status, says = answer_to(served, head_of("Host: localhost", f"Origin: http://{host}", target="/v1/models"))
    assert (status, "does not answer pages of" in says) == (403, True)


@pytest.mark.parametrize(
    ("status", "headers", "target"),
    [
        (200, ["Host: LocalHost:1"], "/health"),
        (200, ["Host: [::1]:8000", "Origin: https://[::1]:1"], "/v1/models"),
        (200, ["Host: localhost"], "http://localhost:8000/health"),
        (200, ["Host: evil.com"], "HTTP://127.0.0.1/health"),  # RFC 9112: the host of the target counts
        (403, ["Host: localhost"], "http://evil.com/health"),
        (403, ["Host: localhost"], "https://localhost.evil.com:80/health"),
        (400, ["Host: localhost"], "http://localhost@evil.com/health"),
        (400, ["Host: localhost"], "http://evil.com@localhost/health"),
        (400, ["Host: localhost"], "evil.com:443"),
        (400, [], "http://localhost/health"),
        (400, ["Host: localhost", "Host: evil.com"], "/health"),
        (400, ["Host: localhost", "Origin: http://localhost", "Origin: http://evil.com"], "/v1/models"),
        (403, ["Host: localhost", "Origin: http://evil.com@localhost"], "/v1/models"),
        (403, ["Host: localhost", "Origin: localhost"], "/v1/models"),
        (415, ["Host: localhost", "Content-Encoding: identity", "Content-Encoding: gzip"], "/v1/models"),
    ],
)
def test_every_header_and_the_target_count(served, status, headers, target):
    assert answer_to(served, head_of(*headers, target=target))[0] == status


def test_long_texts_take_turns_and_hold_up_no_short_one(served, monkeypatch):
    """Of more long bodies than may begin at once, two are tokenized at a time."""
    monkeypatch.setattr(app, "LONG_BODY_BYTES", 10_000)
    tokenize, begun, go = tokenizing.token_ids, threading.Semaphore(0), threading.Event()

    def waiting(*given, **how):
        begun.release()
        go.wait()
        return tokenize(*given, **how)

    monkeypatch.setattr(tokenizing, "token_ids", waiting)
    with ThreadPoolExecutor(12) as clients:
        long = [clients.submit(served.post, "/tokenize", prompt="a" * 11_000) for _ in range(12)]
        for _ in range(app.MAX_LONG_BODIES):
            assert begun.acquire(timeout=60)
        short = served.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hi"}], max_tokens=1)
        assert short.status_code == 200
        assert not begun.acquire(blocking=False)
        go.set()
        assert [answer.result().json()["count"] for answer in long] == [11_000] * 12


def test_bodies_that_stop_keep_no_others_out(start, chat_lm):
    """There is room for two of these bodies. The one that has waited longest for its next bytes makes room."""
    limits = Limits(max_body_bytes=900_000, max_audio_bytes=900_000, max_bodies_bytes=2_000_000)
    body = json.dumps({"prompt": "a", "max_tokens": 1, "user": "a" * 800_000}).encode()
    with start({"tiny": chat_lm}, limits=limits) as server, contextlib.ExitStack() as stack:
        layer = server.server._app.middleware_stack
        while not isinstance(layer, Middleware):
            layer = layer.app
        bodies = layer._bodies
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(6)]
        for number, client in enumerate(clients):
            client.sendall(request_of(body)[:-10])
            if number >= 2:
                answer = clients[number - 2].makefile("rb").read()
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 1" in answer
                assert b"bodies_full" in answer
            while bodies.held_bytes != min(number + 1, 2) * (len(body) - 10):
                server.http.get("/health")
        assert server.post("/v1/completions", **json.loads(body)).status_code == 200
        assert b"bodies_full" in clients[-2].makefile("rb").read()
        clients[-1].sendall(body[-10:])
        assert clients[-1].recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        while bodies.held_bytes:
            server.http.get("/health")


def test_audio_is_refused_before_it_comes_where_nothing_transcribes(served):
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port)) as client:
        client.putrequest("POST", "/v1/audio/transcriptions")
        client.putheader("Content-Length", "20000000")
        client.endheaders()  # and nothing of the body
        assert b"no model of this server transcribes audio" in client.getresponse().read()


def test_large_bodies_are_on_the_disk():
    size, piece = 24_000_000, 1 << 16

    async def bodies_that_stop(number):
        bodies, has_stopped = Bodies(10 * size), []

        async def wait_for(body):
            async def receive():
                if body.held_bytes >= size:
                    has_stopped.append(body)
                    await asyncio.Future()
                return {"type": "http.request", "body": bytes(piece), "more_body": True}

            with body:
                await body.complete(receive, lambda _: None)

        tasks = [asyncio.ensure_future(wait_for(Body(bodies))) for _ in range(number)]
        while len(has_stopped) < number:
            await asyncio.sleep(0)
        held = bodies.held_bytes
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return held, bodies.held_bytes

    tracemalloc.start()
    held, left = asyncio.run(bodies_that_stop(9))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held >= 9 * size
    assert left == 0
    assert peak < size
