"""OpenAI's batch files: each line has the answer that the server gives to its body, whatever the other lines are."""

import json
import subprocess
import sys

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

import specbeam
from specbeam.cli import batch_requests
from tests.server.conftest import serving

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1, None, "a"]}}}
BODIES = [
    (CHAT, {"messages": HI, "max_tokens": 5, "temperature": 0}),
    (COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, "seed": 3, "logprobs": 1}),
    (CHAT, {"messages": HI, "max_tokens": 50, "temperature": 0, "response_format": SCHEMA, "stop": None}),
    (RESPONSES, {"input": "Hi", "max_output_tokens": 3, "temperature": 0}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 4, "num_beams": 3, "n": 2}),
    (COMPLETIONS, {"prompt": "a", "mirostat": 2, "foo": 1}),
    (CHAT, {"messages": HI, "model": "gpt-4o"}),
]
TYPES = {CHAT: ChatCompletion, COMPLETIONS: Completion, RESPONSES: Response}


def line(number, url, body, **more):
    return json.dumps({"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body} | more)


LINES = [line(number, url, body) for number, (url, body) in enumerate(BODIES)]
BAD = {
    "{": "line 8 is no request: ",
    "[1]": "line 9 is no request: it is no JSON object",
    '{"custom_id": "a", "custom_id": "b"}': "the key 'custom_id' is there twice",
    line(9, "/v1/embeddings", {}): "url='/v1/embeddings' is not allowed",
    line(10, CHAT, BODIES[0][1], method="GET"): "method='GET' is not allowed: give POST",
    line(11, CHAT, "Hi"): "the body is no JSON object",
    line(12, CHAT, BODIES[0][1] | {"stream": True}): "stream is not supported in a batch",
    '{"url": "/v1/completions", "method": "POST", "body": {"prompt": "a"}}': "custom_id=None is not allowed",
}


def known(body):
    """What is the same for each answer to a body."""
    items = [item | {"id": ""} for item in body.get("output", [])]
    left_out = ("id", "created", "created_at", "specbeam", "metrics", "usage", "model")
    return {name: value for name, value in body.items() if name not in left_out} | ({"output": items} if items else {})


@pytest.fixture
def run(specbeam_command, tmp_path, folder, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*more, lines=(*LINES, *BAD)):
        (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
        status, _, err = specbeam_command("batch", "in.jsonl", "out.jsonl", "--model", folder, *more)
        out = tmp_path / "out.jsonl"
        return status, err, [json.loads(one) for one in out.read_text().splitlines()] if out.exists() else []

    return run


def test_each_line_has_the_answer_of_the_server(run, folder):
    status, err, answers = run("--batch-size", "2")
    assert status == 1
    assert "10 of 15 rows failed" in err
    with serving({"tiny": specbeam.load(folder)}) as server:
        for number, ((url, body), answer) in enumerate(zip(BODIES, answers, strict=False)):
            expected = server.post(url, **body)
            assert (answer["custom_id"], answer["error"]) == (f"request-{number}", None)
            assert answer["response"]["status_code"] == expected.status_code
            if expected.status_code == 200:
                TYPES[url].model_validate(answer["response"]["body"], strict=False)
                assert known(answer["response"]["body"]) == known(expected.json())
            elif expected.status_code == 400:
                assert answer["response"]["body"] == expected.json()
    for says, answer in zip(BAD.values(), answers[len(BODIES) :], strict=True):
        assert answer["response"] is None
        assert answer["error"]["code"] == "invalid_request"
        assert says in answer["error"]["message"]
    assert len({answer["id"] for answer in answers}) == len(answers)


def test_a_killed_batch_goes_on(run, folder, tmp_path):
    """The process is killed when four answers are kept, which stay. The fifth and sixth may end together."""
    lines = [*LINES[:4], *LINES[:2], LINES[4]]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    program = (
        "import os, sys\n"
        "from specbeam import cli\n"
        "from specbeam.cli import batch_requests\n"
        "ask = batch_requests.ask\n"
        "async def killing(app, url, fields):\n"
        "    if url == '/v1/completions' and fields.get('num_beams'): os.kill(os.getpid(), 9)\n"
        "    return await ask(app, url, fields)\n"
        "batch_requests.ask = killing\n"
        "cli.main(sys.argv[1:])\n"
    )
    command = ["batch", "in.jsonl", "out.jsonl", "--model", folder, "--batch-size", "1"]
    process = subprocess.run([sys.executable, "-c", program, *command], cwd=tmp_path, capture_output=True, check=False)
    assert process.returncode == -9, process.stderr
    kept = [json.loads(one) for one in (tmp_path / "out.jsonl.partial.jsonl").read_text().splitlines()[1:]]
    assert len(kept) == 4
    status, err, answers = run("--batch-size", "1", lines=lines)
    assert (status, len(answers)) == (0, 7)
    assert [answers[answer["row"]]["id"] for answer in kept] == [answer["id"] for answer in kept]
    assert "(4 of them earlier)" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "1"], "--temperature is for rows, and each request of in.jsonl has its own: leave it out"),
        (["--max-new-tokens", "5"], "--max-new-tokens is for rows"),
        (["--choices", "a,b"], "--choices is for rows"),
        (["--system", "a"], "--system is for rows"),
    ],
)
def test_options_of_rows_are_refused(run, arguments, says):
    status, err, _ = run(*arguments)
    assert status == 2
    assert says in err


def test_without_the_server_its_extra_is_named(run, monkeypatch):
    monkeypatch.setattr("specbeam.system.extras.are_installed", lambda package: package != "fastapi")
    status, err, _ = run()
    assert status == 2
    assert "needs fastapi: pip install 'specbeam[server]'" in err


def test_a_file_of_rows_is_none_of_requests(tmp_path):
    for name, text, has in (
        ("a.jsonl", '{"prompt": "a"}\n' + LINES[0], False),
        ("b.jsonl", "nonsense\n5\n[{}]\n" + LINES[0], True),
        ("c.csv", LINES[0], False),
        ("d.jsonl", "", False),
    ):
        (tmp_path / name).write_text(text)
        assert batch_requests.has_requests(tmp_path / name) is has
    assert not batch_requests.has_requests(tmp_path / "missing.jsonl")
