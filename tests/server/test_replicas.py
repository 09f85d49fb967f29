"""Replicas of the server on Ray: the answers of one plain server, also while a replica is killed."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import openai
import psutil
import pytest

import specbeam
from tests.conftest import in_thorough_mode
from tests.server.conftest import Running
from tests.server.test_life import connect

pytest.importorskip("ray.serve")
KEY = "secret"
TIMEOUT_SECONDS = 120
HEADERS = {"authorization": f"Bearer {KEY}"}
LIVE = 'specbeam_live_requests{model="tiny"}'
LONG = {"max_tokens": 600, "temperature": 0, "ignore_eos": True}


class Cluster(Running):
    """A server process with replicas, and a client of it."""

    timeout = TIMEOUT_SECONDS

    def __init__(self, process, url):
        super().__init__(int(url.rsplit(":", 1)[1]), key=KEY)
        self.process = process

    @property
    def replicas(self):
        """The processes of the replicas."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.name().startswith("ray::ServeRepl")]

    def wait_for(self, condition):
        while not condition():
            assert self.process.poll() is None


@contextlib.contextmanager
def on_ray(model, *options):
    """A server with two replicas. In a process of its own, for Ray changes the one it is used in."""
    command = [sys.executable, "-m", "specbeam", "serve", "--launcher", "ray", "--replicas", "2", "--port", "0"]
    command += ["--model", f"tiny={model}", "--backend", "cpu", "--dtype", "float32", *options]
    environment = os.environ | {"SPECBEAM_API_KEY": KEY}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            line = process.stderr.readline()
            assert line.startswith("specbeam: tiny at http://127.0.0.1:"), line + process.stderr.read()
            process.stderr.readline()
            assert process.stderr.readline().startswith("specbeam: in each replica, the KV cache of tiny holds up to ")
            reader = threading.Thread(target=process.stderr.read)  # a full pipe would stop the server
            reader.start()
            cluster = Cluster(process, line.split()[-1].removesuffix("/v1"))
            cluster.wait(replicas=2)
            yield cluster
            family = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(TIMEOUT_SECONDS) == 0
            assert not psutil.wait_procs(family, timeout=TIMEOUT_SECONDS)[1]
            cluster.http.close()
        finally:
            process.kill()
            reader.join()


@pytest.fixture(scope="module")
def long_lm(tiny):
    """A model that takes a while for a text: its context is long."""
    source = tiny("llama", chat=True, max_position_embeddings=4096)[1].source
    return specbeam.load(source, backend="cpu", dtype="float32")


@pytest.fixture(scope="module")
def cluster(long_lm, draft_lm):
    with on_ray(long_lm.source, "--draft", f"small={draft_lm.source}") as running:
        yield running


def same(answer):
    """The part that depends neither on the time nor on the requests before."""
    return [answer.get(name) for name in ("object", "model", "choices")]


def test_ids_and_messages_are_treated_as_by_one_server(cluster):
    for path, fields in (("/v1/completions", {"prompt": "a"}), ("/v1/completions", {}), ("/v1/none", {})):
        response = cluster.http.post(path, json=fields, headers={"x-request-id": "mine"})
        assert response.headers.get_list("x-request-id") == ["mine"]
    messages = [{"role": "user", "content": "<eos><bos>"}]
    answer = cluster.post("/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True).json()
    assert [i for i in answer["prompt_token_ids"] if i >= 256] == [256]


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
            assert same(answer.json()) == same(expected.json())
            assert answer.json().get("error") == expected.json().get("error")
        for path in ("/v1/nothing", "/openapi.json"):
            assert cluster.http.get(path).json() == plain.http.get(path).json()
        messages = [{"role": "user", "content": "Hi"}]
        whole, frames = (
            one.client().chat.completions.create(model="tiny", messages=messages, max_tokens=9, seed=1, stream=stream)
            for one, stream in ((plain, False), (cluster, True))
        )
        assert "".join(frame.choices[0].delta.content or "" for frame in frames) == whole.choices[0].message.content
        response = cluster.client().responses.create(model="tiny", input="Hi", temperature=0, max_output_tokens=9)
        assert response.output_text == specbeam.generate(long_lm, messages, max_new_tokens=9).text


def test_the_front_keeps_strangers_out(cluster):
    for headers, status in (
        ({"authorization": "Bearer wrong"}, 401),
        ({"host": "evil.example"}, 403),
        ({"origin": "https://evil.example"}, 403),
    ):
        response = cluster.http.post("/v1/completions", headers=headers, json={"prompt": "a"})
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

    from specbeam.server.replicas import Asked, PrefixRouter, blocks_of

    monkeypatch.setattr(RequestRouter, "on_send_request", lambda *_: None)  # counts on its own, for Ray
    router = PrefixRouter.__new__(PrefixRouter)
    router.initialize_state()
    replicas = [SimpleNamespace(replica_id=name) for name in "ab"]
    body = json.dumps({"prompt": "busy " * 60}).encode()
    request = SimpleNamespace(args=[Asked({}, body, blocks_of(body))])

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
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    (gcs,) = [child for child in family if child.name() == "gcs_server"]
    (port,) = {one.laddr.port for one in gcs.net_connections("tcp") if one.status == "LISTEN"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for more in ({"HOME": str(tmp_path)}, {}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        command = [sys.executable, "-c", JOIN, f"127.0.0.1:{port}"]
        found = subprocess.run(command, capture_output=True, text=True, env=environment | more, check=False)
        assert "joined" not in found.stdout
        assert "refused" in found.stdout


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_place(cluster, stream):
    read = 'specbeam_prompt_tokens_total{model="tiny"}'
    before = cluster.metrics().get(read, 0)
    connection = connect(cluster, prompt="abc", stream=stream, **LONG | {"max_tokens": 4000}, headers=HEADERS)
    cluster.wait_for(lambda: cluster.metrics().get(LIVE) == 1)
    connection.close()
    cluster.wait_for(lambda: cluster.metrics()[LIVE] == 0)
    cluster.wait_for(lambda: cluster.metrics().get(read, 0) > before)
    assert cluster.metrics()[read] == before + 3
    metrics = cluster.metrics()
    assert metrics['specbeam_requests_total{endpoint="/v1/completions",outcome="cancelled"}'] >= 1
    assert metrics['specbeam_cache_tokens{model="tiny"}'] == 0


def test_a_replica_is_killed_under_load(cluster, long_lm):
    prompts, tokens = [f"text number {number}" for number in range(8)], 1500  # all texts are to be live at once
    expected = [
        result.text for result in specbeam.generate(long_lm, prompts, raw=True, max_new_tokens=tokens, eos_token_id=())
    ]
    client = cluster.client()
    streams = [
        client.completions.create(
            model="tiny", prompt=prompt, stream=True, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
        )
        for prompt in prompts[:4]
    ]
    pieces = [[next(stream).choices[0].text] for stream in streams]  # all of them have begun
    answers = {}

    def ask(number):
        answers[number] = cluster.post("/v1/completions", prompt=prompts[number], **LONG | {"max_tokens": tokens})

    threads = [threading.Thread(target=ask, args=[number]) for number in range(4, 8)]
    for thread in threads:
        thread.start()
    cluster.wait_for(lambda: cluster.metrics()[LIVE] == 8)
    cluster.replicas[0].kill()
    died = []
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
    for thread in threads:
        thread.join()
    assert [answers[number].json()["choices"][0]["text"] for number in range(4, 8)] == expected[
        4:
    ]  # given to the other
    if in_thorough_mode():  # it loads PyTorch
        cluster.wait_for(lambda: cluster.http.get("/health").json().get("replicas") == 2)
    name = 'specbeam_requests_total{endpoint="/v1/completions",outcome="failed"}'
    assert cluster.metrics()[name] == len(died)


@pytest.mark.thorough
def test_a_full_server_that_stops(long_lm):
    long = LONG | {"max_tokens": 3000, "stream": True}
    expected = specbeam.generate(long_lm, "abc", raw=True, max_new_tokens=3000, eos_token_id=()).text
    with on_ray(long_lm.source, "--max-requests", "1", "--max-waiting", "1") as cluster:
        connections = [connect(cluster, headers=HEADERS, prompt="abc", **long) for _ in range(8)]
        cluster.wait_for(lambda: cluster.metrics().get(LIVE) == 2)
        cluster.process.send_signal(signal.SIGTERM)
        cluster.wait_for(lambda: cluster.http.get("/health").status_code == 503)
        assert cluster.post("/v1/completions", prompt="a").json()["error"]["code"] == "stopping"
        answers = [connection.getresponse() for connection in connections]
        for answer in answers:
            if answer.status == 200:
                frames = [json.loads(frame[6:]) for frame in answer.read().decode().split("\n\n") if "{" in frame]
                assert "".join(frame["choices"][0]["text"] for frame in frames) == expected
            else:
                assert (answer.status, answer.getheader("retry-after")) in ((429, "1"), (503, "1"))
        assert 2 <= sum(answer.status == 200 for answer in answers) <= 4
