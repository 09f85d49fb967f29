"""Replicas of the server on Ray: the answers of one plain server, also while a replica is killed."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import openai
import psutil
import pytest

import specbeam
from tests.conftest import in_thorough_mode
from tests.server.conftest import TIMEOUT_SECONDS, on_cpu, serving_alone
from tests.server.test_life import connect, count, total

pytest.importorskip("ray.serve")
KEY = "secret"
HEADERS = {"authorization": f"Bearer {KEY}"}
LIVE = 'specbeam_live_requests{model="tiny"}'
LONG = {"max_tokens": 600, "temperature": 0, "ignore_eos": True}
HI = [{"role": "user", "content": "Hi"}]


def family(cluster):
    """The processes that a server has started."""
    return psutil.Process(cluster.process.pid).children(recursive=True)


def wait_for(cluster, condition):
    while not condition():
        assert cluster.process.poll() is None


@contextlib.contextmanager
def on_ray(model, *options):
    """A server with two replicas. In a process of its own, for Ray changes the one it is used in."""
    how = ["--launcher", "ray", "--replicas", "2", "--model", f"tiny={model}", "--backend", "cpu", "--dtype", "float32"]
    with serving_alone(*how, *options, SPECBEAM_API_KEY=KEY) as cluster:
        assert cluster.http.get("/health").json() == {"status": "ok", "replicas": 2}
        yield cluster
        processes = family(cluster)
        cluster.process.send_signal(signal.SIGTERM)
        assert cluster.process.wait(TIMEOUT_SECONDS) == 0
        assert not psutil.wait_procs(processes, timeout=TIMEOUT_SECONDS)[1]
        cluster.http.close()
    assert cluster.log[0].startswith("specbeam: tiny at http://127.0.0.1:")
    assert cluster.log[2].startswith("specbeam: in each replica, the KV cache of tiny holds up to ")


@pytest.fixture(scope="module")
def long_lm(tiny):
    """A model that takes a while for a text: its context is long."""
    return on_cpu(tiny("llama", chat=True, max_position_embeddings=4096)[1])


@pytest.fixture(scope="module")
def cluster(long_lm, draft_lm):
    with on_ray(long_lm.source, "--draft", f"small={draft_lm.source}") as running:
        yield running


def test_ids_and_messages_are_treated_as_by_one_server(cluster):
    for path, fields in (("/v1/completions", {"prompt": "a"}), ("/v1/completions", {}), ("/v1/none", {})):
        response = cluster.http.post(path, json=fields, headers={"x-request-id": "mine"})
        assert response.headers.get_list("x-request-id") == ["mine"]
    fields = {"messages": [{"role": "user", "content": "<eos><bos>"}], "max_tokens": 1, "return_token_ids": True}
    ids = cluster.post("/v1/chat/completions", **fields).json()["prompt_token_ids"]
    assert [i for i in ids if i >= 256] == [256]


def test_answers_are_those_of_one_server(cluster, start, long_lm, draft_lm):
    requests = [
        {"temperature": 0, "draft": "small"},
        {"seed": 3, "n": 2, "logprobs": 2},
        {"num_beams": 3, "n": 3, "draft": "ngram", "logprobs": 1, "return_token_ids": True},
        {"temperature": 0, "echo": True, "logprobs": 1, "stop": ["e"]},
        {"prompt": ["one", "two"], "temperature": 0},
        {"top_p": 7},
        {"prompt": "a" * 5000},
    ]
    with start({"tiny": long_lm}, {"small": draft_lm}, default_draft="small") as plain:
        for fields in requests:
            fields = {"prompt": "The same text", "max_tokens": 24} | fields
            expected, answer = (one.post("/v1/completions", **fields) for one in (plain, cluster))
            assert answer.status_code == expected.status_code
            for name in ("object", "model", "choices", "error"):  # others depend on the time or on earlier requests
                assert answer.json().get(name) == expected.json().get(name)
        for path in ("/v1/nothing", "/openapi.json"):
            assert cluster.http.get(path).json() == plain.http.get(path).json()
        how = {"model": "tiny", "messages": HI, "max_tokens": 9, "seed": 1}
        whole = plain.client().chat.completions.create(**how).choices[0].message.content
        frames = cluster.client().chat.completions.create(**how, stream=True)
        assert "".join(frame.choices[0].delta.content or "" for frame in frames) == whole
        response = cluster.client().responses.create(model="tiny", input="Hi", temperature=0, max_output_tokens=9)
        assert response.output_text == specbeam.generate(long_lm, HI, max_new_tokens=9).text


def test_the_front_keeps_strangers_out(cluster):
    wrong = {"authorization": ("Bearer x", 401), "host": ("evil.example", 403), "origin": ("https://evil.example", 403)}
    for name, (value, status) in wrong.items():
        response = cluster.http.post("/v1/completions", headers={name: value}, json={"prompt": "a"})
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_a_conversation_goes_to_the_replica_that_knows_it(cluster):
    conversations = [[{"role": "user", "content": f"{number} asks: " + "word " * 40}] for number in range(6)]
    for messages in conversations:
        cluster.post("/v1/chat/completions", messages=messages, max_tokens=1)
    for messages in conversations:
        messages += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "more"}]
        usage = cluster.post("/v1/chat/completions", messages=messages, max_tokens=1).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 200


def test_a_busy_replica_does_not_get_more_of_its_conversation(monkeypatch):
    """Up to 4 requests more than the other replica has stay with the prefix. The next one goes to the other replica."""
    from ray.serve.request_router import RequestRouter

    from specbeam.server.replicas import ForwardedRequest, PrefixRouter, blocks_of

    monkeypatch.setattr(RequestRouter, "on_send_request", lambda *_: None)  # counts on its own, for Ray
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    replicas = [SimpleNamespace(replica_id=name) for name in "ab"]
    body = json.dumps({"prompt": "busy " * 60}).encode()
    request = SimpleNamespace(args=[ForwardedRequest({}, body, blocks_of(body))])

    def send():
        first = asyncio.run(router.choose_replicas(replicas, request))[0][0].replica_id
        router.on_send_request(first)
        router.on_request_routed(request, first, None)
        return first

    sent = [send() for _ in range(6)]
    assert sent == [sent[0]] * 5 + [sent[5]]
    assert sent[5] != sent[0]
    for _ in range(3):
        router.on_request_completed(sent[0], "")
    assert [send() for _ in range(3)] == [sent[5]] * 3  # it has the prefix now


JOIN = """
import sys, ray
try:
    ray.init(sys.argv[1], log_to_driver=False)
except Exception as error:
    print("refused:", error)
else:
    print("joined")
"""


@pytest.mark.thorough
def test_a_stranger_cannot_join_the_cluster(cluster, tmp_path):
    """Nor with the token that Ray keeps in the home folder."""
    (gcs,) = [child for child in family(cluster) if child.name() == "gcs_server"]
    (port,) = {one.laddr.port for one in gcs.net_connections("tcp") if one.status == "LISTEN"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for more in ({"HOME": str(tmp_path)}, {}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        command = [sys.executable, "-c", JOIN, f"127.0.0.1:{port}"]
        found = subprocess.run(command, capture_output=True, text=True, env=environment | more, check=False)
        assert "joined" not in found.stdout
        assert "refused" in found.stdout


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(cluster, stream):
    before = total(cluster, "prompt_tokens")
    connection = connect(cluster, prompt="abc", stream=stream, **LONG | {"max_tokens": 4000}, headers=HEADERS)
    wait_for(cluster, lambda: cluster.metrics().get(LIVE) == 1)
    connection.close()
    wait_for(cluster, lambda: cluster.metrics()[LIVE] == 0)
    wait_for(cluster, lambda: total(cluster, "prompt_tokens") > before)
    assert total(cluster, "prompt_tokens") == before + 3
    assert count(cluster, "cancelled") >= 1
    assert cluster.metrics()['specbeam_cache_tokens{model="tiny"}'] == 0


def test_a_replica_is_killed_under_load(cluster, long_lm):
    prompts, tokens = [f"text number {number}" for number in range(8)], 1500  # all texts are to be live at once
    results = specbeam.generate(long_lm, prompts, raw=True, max_new_tokens=tokens, eos_token_id=())
    expected = [result.text for result in results]
    how = {"model": "tiny", "stream": True, "max_tokens": tokens, "temperature": 0, "extra_body": {"ignore_eos": True}}
    client, died = cluster.client(), []
    streams = [client.completions.create(prompt=prompt, **how) for prompt in prompts[:4]]
    pieces = [[next(stream).choices[0].text] for stream in streams]  # all of them have begun
    with ThreadPoolExecutor(4) as clients:
        how = LONG | {"max_tokens": tokens}
        whole = [clients.submit(cluster.choices, prompt=prompt, **how) for prompt in prompts[4:]]
        wait_for(cluster, lambda: cluster.metrics()[LIVE] == 8)
        next(one for one in family(cluster) if one.name().startswith("ray::ServeRepl")).kill()
        for number, stream in enumerate(streams):
            try:
                pieces[number] += [frame.choices[0].text for frame in stream]
            except openai.APIError as error:
                died.append(error.code)
                assert expected[number].startswith("".join(pieces[number]))
            else:
                assert "".join(pieces[number]) == expected[number]
    assert 0 < len(died) < 4
    assert {*died} == {"replica_died"}
    assert [choices.result()[0]["text"] for choices in whole] == expected[4:]  # given to the other
    if in_thorough_mode():  # it loads PyTorch
        wait_for(cluster, lambda: cluster.http.get("/health").json().get("replicas") == 2)
    assert count(cluster, "failed") == len(died)


@pytest.mark.thorough
def test_a_full_server_that_stops(long_lm):
    long = LONG | {"max_tokens": 3000, "stream": True}
    expected = specbeam.generate(long_lm, "abc", raw=True, max_new_tokens=3000, eos_token_id=()).text
    with on_ray(long_lm.source, "--max-requests", "1", "--max-waiting", "1") as cluster:
        connections = [connect(cluster, headers=HEADERS, prompt="abc", **long) for _ in range(8)]
        wait_for(cluster, lambda: cluster.metrics().get(LIVE) == 2)
        cluster.process.send_signal(signal.SIGTERM)
        wait_for(cluster, lambda: cluster.http.get("/health").status_code == 503)
        assert cluster.post("/v1/completions", prompt="a").json()["error"]["code"] == "stopping"
        answers = [connection.getresponse() for connection in connections]
        for answer in answers:
            if answer.status == 200:
                frames = [json.loads(frame[6:]) for frame in answer.read().decode().split("\n\n") if "{" in frame]
                assert "".join(frame["choices"][0]["text"] for frame in frames) == expected
            else:
                assert (answer.status, answer.getheader("retry-after")) in ((429, "1"), (503, "1"))
        assert 2 <= sum(answer.status == 200 for answer in answers) <= 4
