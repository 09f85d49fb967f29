"""Clients that go away, full queues, errors, and the end of a server."""

import contextlib
import gc
import http.client
import json
import re
import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import pytest

import specbeam
from specbeam.server.limits import Access, Limits
from specbeam.server.models import default_caches

LONG = {"prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
BEAMS = {"num_beams": 4, "temperature": None}
LOCAL = ["localhost", "localhost:8000", "[::1]:8000", "127.0.0.1"]
NAMES = ["llm.example", "LLM.example:443", "10.0.0.1", "localhost"]
STRANGERS = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "x.llm.example", "10.0.0.2", ""]


@contextlib.contextmanager
def gate(engine):
    """Holds an engine in the middle of a pass. ``release`` lets it take some more, and the end of the block all."""
    reached, passes = threading.Event(), threading.Semaphore(0)

    def wait(ids, scores):
        reached.set()
        assert passes.acquire(timeout=60)
        return scores

    request = engine.submit([65], {"max_new_tokens": 100, "logits_processor": wait})
    try:
        assert reached.wait(60)
        yield passes
    finally:
        request.cancel()
        passes.release(200)
        request.result(60)


def connect(server, path="/v1/completions", headers=(), **fields):
    """A request by a client that can go away."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(fields), {"content-type": "application/json", **dict(headers)})
    return connection


def wait_for(server, condition):
    """Until it holds. Between two looks the server answers, whatever its engine does."""
    while not condition():
        assert server.http.get("/health").status_code in (200, 503)


def count(server, outcome, path="/v1/completions"):
    """The requests that ended so."""
    return server.metrics().get(f'specbeam_requests_total{{endpoint="{path}",outcome="{outcome}"}}', 0)


def total(server, name):
    """A number of the model. It is missing until there was a request."""
    return server.metrics().get(f'specbeam_{name}_total{{model="tiny"}}', 0)


@pytest.mark.parametrize(
    ("path", "how", "texts"),
    [
        ("/v1/completions", {}, 1),
        ("/v1/completions", {"stream": True}, 1),
        ("/v1/completions", {"n": 3, "temperature": 1}, 3),
        ("/v1/completions", BEAMS | {"n": 2, "stream": True}, 1),
        ("/rounds/completions", BEAMS | {"stream": True}, 1),
    ],
)
def test_a_client_that_goes_away_frees_its_place_before_the_next_pass(served, log, path, how, texts):
    engine = served.engine
    cancelled, tokens = count(served, "cancelled", path), total(served, "prompt_tokens")
    with gate(engine):
        connection = connect(served, path, **LONG | how)
        if how.get("stream"):
            assert connection.getresponse().status == 200  # the stream has begun
        wait_for(served, lambda: engine.live + engine.waiting == 1 + texts)
        connection.close()
        wait_for(served, lambda: count(served, "cancelled", path) == cancelled + 1)
    assert "new_tokens=0" in log.next("cancelled")  # once the engine has ended its texts
    assert served.choices(prompt="a", max_tokens=1)
    assert engine.live == engine.waiting == 0
    assert total(served, "prompt_tokens") == tokens + 3 * texts + 1  # counted when they ended
    assert count(served, "cancelled", path) == cancelled + 1
    assert engine.cache_tokens == 0


def test_the_log_has_the_tokens_of_a_client_that_went_away(served, log):
    cancelled, tokens = count(served, "cancelled"), total(served, "generation_tokens")
    connection = connect(served, **LONG | {"temperature": 1, "seed": 1}, n=3, stream=True)
    assert connection.getresponse().readline().startswith(b"data: ")
    with gate(served.engine):
        connection.close()
        wait_for(served, lambda: count(served, "cancelled") == cancelled + 1)
    (new_tokens,) = re.findall(r"new_tokens=(\d+)", log.next("cancelled"))
    assert int(new_tokens) > 0
    assert total(served, "generation_tokens") == tokens + int(new_tokens)


def test_a_server_that_has_ended_leaves_no_engine(start, chat_lm):
    """Its texts would count as memory of the process, and its model would stay in memory."""
    with start({"tiny": chat_lm}) as server:
        for path in ("/health", "/metrics", "/tokenizer_info", "/v1/models", "/v1/models/tiny", "/openapi.json"):
            assert server.http.get(path).status_code == 200
        assert server.post("/tokenize", prompt="a").status_code == 200
        assert server.post("/v1/completions", prompt="a", max_tokens=2).status_code == 200
        engine = weakref.ref(server.engine)
    del server
    gc.collect()
    assert engine() is None


def test_a_full_queue_is_429_and_the_others_are_answered(start, chat_lm):
    with start({"tiny": chat_lm}, limits=Limits(max_requests=1, max_waiting=2)) as server:
        with gate(server.engine):
            waiting = [connect(server, **LONG) for _ in range(2)]
            wait_for(server, lambda: server.engine.waiting == 2)
            with pytest.raises(openai.RateLimitError) as refused:
                server.client().completions.create(model="tiny", prompt="a")
            assert refused.value.response.headers["retry-after"] == "1"
            assert refused.value.code == "queue_full"
            assert server.http.get("/health").status_code == 200
        answers = [json.load(connection.getresponse()) for connection in waiting]
        expected = specbeam.generate(chat_lm, "abc", raw=True, max_new_tokens=200, eos_token_id=()).text
        assert [answer["choices"][0]["text"] for answer in answers] == [expected] * 2
        assert count(server, "queue_full") == 1
        assert server.refused("/v1/completions", prompt=["a"] * 4)["param"] == "prompt"  # it could never fit


def test_texts_are_the_same_under_load(served):
    """Requests of many kinds at once, and each alone."""
    kinds = [
        {"temperature": 0},
        {"seed": 3},
        {"num_beams": 3, "n": 3},
        {"seed": 9, "draft": "small", "num_draft_tokens": 4},
        {"num_beams": 4, "draft": "ngram"},
        {"temperature": 0, "echo": True},
    ]
    how = {"max_tokens": 24, "logprobs": 2, "return_token_ids": True}
    requests = [{"prompt": "The same " + "text " * number, **how, **kind} for number, kind in enumerate(kinds)]
    alone = [served.choices(**request) for request in requests]
    with ThreadPoolExecutor(12) as clients:
        together = clients.map(lambda fields: served.choices(**fields), requests * 2)
    assert [*together] == alone * 2


def test_a_request_that_fails_fails_alone(served, chat_lm, monkeypatch):
    everything = {str(token): -100.0 for token in range(chat_lm.backend.vocab_size)}
    assert served.post("/v1/completions", prompt="a", logit_bias=everything, max_tokens=2).status_code == 200
    backend = type(chat_lm.backend)
    choose = backend.choose

    def fail(self, logits, requests):
        if any(("temperature", 0.123) in request.warpers for _, request in requests):
            raise RuntimeError("in /home/secret")
        return choose(self, logits, requests)

    monkeypatch.delattr(backend, "forward_ahead", raising=False)  # it chooses, too
    monkeypatch.setattr(backend, "choose", fail)
    for stream in (False, True):
        response = served.post("/v1/completions", prompt="abc", temperature=0.123, stream=stream)
        assert "secret" not in response.text
        assert '"internal_error"' in response.text
        assert response.status_code == (200 if stream else 500)
    assert served.post("/v1/completions", prompt="a").status_code == 200


@pytest.mark.parametrize("grace", [None, 0])
def test_a_server_that_stops_finishes_its_requests(start, chat_lm, grace):
    expected = specbeam.generate(chat_lm, "abc", raw=True, max_new_tokens=200, eos_token_id=()).text
    with start({"tiny": chat_lm}, grace=grace) as server:
        with gate(server.engine):
            whole, stream = (connect(server, **LONG, stream=stream) for stream in (False, True))
            wait_for(server, lambda: server.engine.live + server.engine.waiting == 3)
            server.server.stop()
            wait_for(server, lambda: server.http.get("/health").status_code == 503)
            response = server.post("/v1/completions", prompt="a")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "stopping")
            assert response.headers["retry-after"] == "1"
        answer = json.load(whole.getresponse())
        *frames, end, rest = stream.getresponse().read().split(b"\n\n")
        assert (end, rest) == (b"data: [DONE]", b"")
        choice = answer["choices"][0]
        text = "".join(json.loads(frame[6:])["choices"][0]["text"] for frame in frames)
        if grace is None:
            assert choice["text"] == text == expected
        else:
            assert choice["finish_reason"] == "length"
            assert answer["specbeam"]["finish_reasons"] == ["cancelled"]
            assert expected.startswith(choice["text"])
            assert expected.startswith(text)
    assert not server.server.started or server.server.should_exit


def test_an_engine_that_an_error_ended_is_not_healthy(start, chat_lm):
    with start({"tiny": chat_lm}) as server:
        server.engine.stop(0)
        assert not server.engine.is_running
        assert server.http.get("/health").status_code == 503
        server.engine.start()
        assert server.http.get("/health").status_code == 200


def test_a_request_has_a_time_limit(start, chat_lm):
    with start({"tiny": chat_lm}, limits=Limits(timeout=0.0)) as server:
        answer = server.post("/v1/completions", **LONG).json()
        assert answer["specbeam"]["finish_reasons"] == ["timeout"]


def test_api_keys(start, chat_lm):
    with start({"tiny": chat_lm}, access=Access(api_keys=("secret", "schlüssel"))) as server:
        wrong = ["Bearer wrong", "Bearer", "secret", "Basic secret", "Bearer secret schlüssel", "Bearer secrét"]
        for headers in ({}, *({"authorization": value.encode("latin-1")} for value in wrong)):
            response = server.http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert server.http.get("/metrics").status_code == 401
        assert server.http.get("/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert server.client("secret").models.list().data[0].id == "tiny"
        for value in ("bearer secret", "BEARER  secret", "Bearer schlüssel"):
            assert server.http.get("/v1/models", headers={"authorization": value.encode()}).status_code == 200


@pytest.mark.parametrize(
    ("access", "known", "unknown"),
    [
        (Access(), LOCAL, STRANGERS),
        (Access(allowed_hosts=("llm.example", "10.0.0.1")), NAMES, STRANGERS),
        (Access(allowed_hosts=("llm.example", "10.0.0.1"), is_local=False), NAMES, STRANGERS),
        (Access(is_local=False), ["any.example"], []),
    ],
)
def test_a_server_answers_no_other_hosts_and_no_pages_of_other_sites(start, chat_lm, access, known, unknown):
    with start({"tiny": chat_lm}, access=access) as server:
        for host in known:
            for headers in ({"host": host}, {"origin": f"https://{host}"}):
                response = server.http.get("/v1/models", headers=headers)
                assert response.status_code == 200
                assert "access-control-allow-origin" not in response.headers
        for host in unknown:
            named = f"to the host {host.removesuffix(':8000')!r}" if host else "without a host"
            for header, value, shown in (("host", host, named), ("origin", f"http://{host}", repr(f"http://{host}"))):
                response = server.http.get("/v1/models", headers={header: value})
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (403, f"{header}_not_allowed")
                assert shown in error["message"]
                assert "--allowed-host" in error["message"]


def test_files_of_the_page_go_to_pages_of_any_name(served):
    """Plain proxy_pass: the host is this machine's, and browsers name the proxy as the scripts' origin."""
    for path in ("/", "/page/app.js"):
        assert served.http.get(path, headers={"origin": "https://llm.example"}).status_code == 200
        assert served.http.get(path, headers={"host": "evil.example"}).status_code == 403


def test_cors_where_it_is_given(start, chat_lm):
    origin = "https://chat.example"
    with start({"tiny": chat_lm}, access=Access(cors_origins=(origin,))) as server:
        asked = {"origin": origin, "access-control-request-method": "POST"}
        assert server.http.options("/v1/completions", headers=asked).headers["access-control-allow-origin"] == origin
        response = server.http.get("/v1/models", headers={"origin": origin})
        assert response.headers["access-control-allow-origin"] == origin
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        for other in ("https://evil.example", "null"):
            assert server.http.get("/v1/models", headers={"origin": other}).status_code == 403


def test_the_log_has_one_line_per_request_and_no_prompts(served, log):
    served.post("/v1/completions", model="tiny", prompt="my secret", max_tokens=3, temperature=0)
    line = log.next("/v1/completions 200 finished")
    assert "model=tiny prompt_tokens=9 new_tokens=3" in line
    served.post("/v1/completions", prompt="my secret", foo=1)
    assert log.lines.get(timeout=60).startswith("POST /v1/completions 400 refused")
    for path in ("/etc/passwd", "/a%0Ab%20c?d=e"):
        response = served.http.get(path)
        assert log.lines.get(timeout=60).startswith(f"GET {path.partition('?')[0]} 404 refused")
        assert response.json()["error"]["message"].startswith(f"there is nothing at {response.url.path}: ")
    served.http.get("/" + "a" * 5000)
    assert len(log.lines.get(timeout=60)) < 400
    assert log.lines.empty()
    assert "secret" not in line


def test_texts_that_are_kept_have_a_limit_and_are_counted(start, chat_lm, draft_lm):
    model = '{model="tiny"}'
    with start({"tiny": chat_lm}, {"small": draft_lm}) as server:
        prompts = [f"{number:04d} " * 10 for number in range(200)]
        for begin in range(0, len(prompts), 100):
            server.post("/v1/completions", prompt=prompts[begin : begin + 100], max_tokens=1, temperature=0)
        numbers = server.metrics()
        limit = numbers["specbeam_max_cache_tokens" + model]
        assert limit == server.engine.max_cache_tokens == 256 + 32 * 256
        assert numbers["specbeam_cache_tokens" + model] == 0
        assert 0.9 * limit < numbers["specbeam_kept_tokens" + model] <= limit < sum(map(len, prompts))
        slot_bytes = chat_lm.backend.slot_bytes
        assert numbers["specbeam_kept_bytes" + model] == numbers["specbeam_kept_tokens" + model] * slot_bytes
        drafted = {"draft": "small", "num_draft_tokens": 3}  # a number, for "auto" may not draft
        server.post("/v1/completions", prompt="abcdefgh", max_tokens=9, temperature=0, ignore_eos=True, **drafted)
        numbers = server.metrics()
        assert numbers["specbeam_kept_tokens" + model] * slot_bytes < numbers["specbeam_kept_bytes" + model]
        assert numbers["specbeam_kept_bytes" + model] <= limit * slot_bytes


def on_machine(memory, slot_bytes, context_length):
    """The sizes of a model and a machine."""
    backend = SimpleNamespace(
        memory_for_caches=lambda: memory, slot_bytes=slot_bytes, lifetimes=(), context_length=context_length
    )
    return SimpleNamespace(backend=backend)


def test_the_default_cache_fits_the_model():
    """It does not grow with the machine. 8,192 is the context of SmolLM2, and 2,048 a typical request."""
    for memory in (10**10, 10**12):
        small = on_machine(memory, 23_040, 8192)
        for most, at_once in (({}, 32), ({"max_requests": 100}, 100), ({"max_requests": 1, "max_beams": 4}, 4)):
            assert default_caches({"a": small}, Limits(**most), 1) == {"a": 8192 + at_once * 2048}
        assert default_caches({"a": on_machine(memory, 23_040, 256)}, Limits(), 1) == {"a": 256 + 32 * 256}
    large = on_machine(10**9, 100_000, 8192)
    assert default_caches({"a": large}, Limits(), 1) == {"a": 10_000}
    assert default_caches({"a": large, "b": on_machine(10**9, 400_000, 256)}, Limits(), 1) == {"a": 2000, "b": 2000}
    assert default_caches({"a": large}, Limits(), 4) == {"a": 2500}


def test_requests_have_ids(served, log, monkeypatch):
    def asked(path="/v1/models", **how):
        response = served.http.request(how.pop("method", "GET"), path, **how)
        assert f" id={response.headers['x-request-id']}" in log.next(path)
        return response.headers["x-request-id"]

    for given in ("a", "req-1_2.3:4/5+6=", "a" * 128, "0123456789abcdef" * 2):
        assert asked(headers={"x-request-id": given}) == given
    made = [asked(headers={"x-request-id": given}) for given in ("", "a b", "a" * 129, "é".encode(), "a;b", 'a"')]
    made += [asked(), asked("/none"), asked("/v1/completions", method="POST", json=LONG | {"stream": True})]
    made += [asked("/v1/completions", method="POST", json={}), asked("/v1/models", headers={"host": "evil"})]
    assert len({*made}) == len(made)
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in made)
    monkeypatch.setattr("specbeam.server.app.tokenizer_info", lambda _: 1 / 0)
    assert asked("/tokenizer_info")
    answer = served.client(default_headers={"x-request-id": "mine"}).models.list()
    assert answer._request_id == "mine"


def raw_answer(server, request):
    """The head and the body of the answer to these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(request)
        with client.makefile("rb") as answer:
            head, _, body = answer.read().partition(b"\r\n\r\n")
    return head.decode().lower(), body


def raw_request(version, hosts=1, path="/v1/completions", **fields):
    method, body = ("POST", json.dumps(fields)) if fields else ("GET", "")
    head = f"{method} {path} HTTP/{version}\r\nConnection: close\r\n" + "Host: localhost\r\n" * hosts
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_the_end_of_a_text_leaves_with_its_last_part(served):
    """Each write is a chunk."""
    how = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "stream": True}
    for path, fields in {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True},
        "/v1/completions": {"prompt": "Hi", "logprobs": 0},
    }.items():
        _, body = raw_answer(served, raw_request("1.1", path=path, **fields, **how))
        (last,) = [chunk for chunk in re.split(rb"\r\n[0-9a-f]+\r\n", body) if b'"finish_reason":"length"' in chunk]
        text, end = [json.loads(line)["choices"][0] for line in re.findall(rb"data: (.*)", last)[-2:]]
        assert text["logprobs"]
        assert text["finish_reason"] is None
        assert end["finish_reason"] == "length"
        assert not end.get("delta", end.get("text"))


def test_http_1_0_has_no_chunks(served):
    fields = {"prompt": "abc", "max_tokens": 5, "temperature": 0}
    text = served.choices(**fields)[0]["text"]
    head, body = raw_answer(served, raw_request("1.0", **fields, stream=True))
    assert "transfer-encoding" not in head
    assert "connection: close" in head
    *frames, end, rest = body.split(b"\n\n")
    assert (end, rest) == (b"data: [DONE]", b"")
    assert "".join(json.loads(frame.removeprefix(b"data: "))["choices"][0]["text"] for frame in frames) == text
    head, body = raw_answer(served, raw_request("1.0", **fields))
    assert f"content-length: {len(body)}\r\n" in head
    assert json.loads(body)["choices"][0]["text"] == text
    assert raw_answer(served, raw_request("1.0", hosts=0, path="/health"))[0].startswith("http/1.1 403")


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (raw_request("1.1", 0, path="/health"), "the request has 0 headers Host: send one"),
        (raw_request("1.1", 2, path="/health"), "the request has 2 headers Host: send one"),
        (b"\x16\x03\x01" * 9, "is not valid HTTP"),
        (b"GET\r\n\r\n", "is not valid HTTP"),
        (b"GET /health HTTP/1.1\r\nHost: " + b"a" * 70_000, "too large: send at most 65536 bytes"),
    ],
)
def test_what_is_no_request_is_answered_as_all_errors_are(served, log, request_, says):
    head, body = raw_answer(served, request_)
    assert head.startswith("http/1.1 400")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]
    (request_id,) = re.findall("x-request-id: ([0-9a-f]{32})", head)
    assert f" id={request_id}" in log.next(" 400 refused ")


def test_the_log_has_the_address_of_the_client(served, start, chat_lm, log):
    def client(server, **headers):
        server.http.get("/v1/models", headers=headers)
        return re.findall(r" client=(\S+) id=", log.next("/v1/models"))[0]

    # A client may begin the chain as it likes. A proxy adds the address it sees to the end.
    chain = {"x-forwarded-for": "203.0.113.9, 198.51.100.7"}
    assert client(served, **chain) == "198.51.100.7"  # of a proxy on this machine
    assert re.fullmatch(r"a\?b\?c\?+", client(served, **{"x-forwarded-for": "a b=c\t\u00e9".encode()}))
    assert client(served) == "127.0.0.1"
    with start({"tiny": chat_lm}, access=Access(trusted_proxies=("10.0.0.0/8",))) as server:
        assert client(server, **chain) == "127.0.0.1"


def test_metrics(start, chat_lm):
    with start({"tiny": chat_lm}) as server:
        request = {"prompt": "abcdefgh", "max_tokens": 5, "temperature": 0, "draft": "ngram", "ignore_eos": True}
        for fields in (request, request, {"prompt": "a", "top_p": 5}):
            server.post("/v1/completions", **fields)
        assert (count(server, "finished"), count(server, "refused")) == (2, 1)
        sums = ("prompt_tokens", "reused_tokens", "generation_tokens")
        assert [total(server, name) for name in sums] == [16, 7, 10]
        numbers, model = server.metrics(), '{model="tiny"}'
        assert numbers[f"specbeam_time_to_first_token_seconds_count{model}"] == 2
        assert numbers[f"specbeam_live_requests{model}"] == 0
        assert {f"specbeam_{name}_total{model}" for name in ("target_passes", "drafted", "accepted")} <= {*numbers}
