"""Programs that nobody here wrote use ``specbeam serve``, a process of its own, on SmolLM2. Texts are the engine's."""

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

import specbeam
from tests.conftest import reference_model
from tests.pages import ROOT, blocks, commands, program
from tests.server.conftest import serving_alone

pytestmark = pytest.mark.models
NAME = "smollm2-135m-instruct"
PAGE = ROOT / "docs/server.md"
NODE_MODULES = Path(sys.prefix) / "npm/node_modules"
"""Where ``make .venv/npm`` puts OpenAI's client for JavaScript."""
MESSAGES = [{"role": "user", "content": "Name three colours."}]
CHAT = {"model": NAME, "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
BEAMS = {"model": NAME, "prompt": "The sky is", "max_tokens": 6, "n": 3}
MORE = {"num_beams": 4, "draft": "ngram"}


@pytest.fixture(scope="module")
def smollm2():
    return specbeam.load(reference_model(NAME), backend="cpu")


@pytest.fixture(scope="module")
def real(smollm2):
    """The server, which ends texts after 64 tokens."""
    source = f"{NAME}={smollm2.source}"
    with serving_alone("--model", source, "--backend", "cpu", "--max-tokens", 64) as running:
        yield running
        assert "Traceback" not in "".join(running.log)


@pytest.fixture(scope="module")
def expected(smollm2):
    """The answers to CHAT and BEAMS in this process."""
    chat = specbeam.generate(smollm2, MESSAGES, max_new_tokens=12)
    beams = specbeam.generate(smollm2, BEAMS["prompt"], raw=True, max_new_tokens=6, num_beams=4, num_return_sequences=3)
    return chat.sequences[0], beams.sequences


def test_openai_for_python(real, expected):
    chat, beams = expected
    client = real.client()
    (choice,) = client.chat.completions.create(**CHAT, logprobs=True).choices
    assert choice.message.content == chat.text
    assert [entry.logprob for entry in choice.logprobs.content] == chat.log_probs
    chunks = client.chat.completions.create(**CHAT, stream=True)
    assert "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices) == chat.text
    choices = client.completions.create(**BEAMS, logprobs=0, extra_body=MORE).choices
    assert [(one.text, one.score) for one in choices] == [(beam.text, beam.score) for beam in beams]
    assert [one.logprobs.token_logprobs for one in choices] == [beam.log_probs for beam in beams]
    response = client.responses.create(model=NAME, input=MESSAGES, max_output_tokens=12, temperature=0)
    assert (response.output_text, response.status) == (chat.text, "incomplete")
    with client.responses.stream(model=NAME, input=MESSAGES, max_output_tokens=12, temperature=0) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


@pytest.mark.parametrize(
    ("path", "fields", "kind"),
    [
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 1, "seed": 1}, "chat"),
        ("chat/completions", CHAT | {"n": 2, **MORE, "stream_options": {"include_usage": True}}, "chat"),
        ("completions", BEAMS | MORE | {"logprobs": 2, "return_token_ids": True}, "text"),
        ("completions", BEAMS | {"n": 1, "temperature": 0, "stream_options": {"include_usage": True}}, "text"),
        ("responses", {"input": "Hi", "max_output_tokens": 6, "include": ["message.output_text.logprobs"]}, "events"),
    ],
)
def test_frames_of_streams_are_those_of_openai(real, path, fields, kind):
    """Each frame alone, by the types of OpenAI's client, which lets wrong ones pass."""
    types = {"chat": ChatCompletionChunk, "text": Completion, "events": ResponseStreamEvent}
    frame_type = TypeAdapter(types[kind])
    response = real.post(f"/v1/{path}", **fields, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *frames, last = re.findall(r"^data: (.*)\n\n", response.text, re.MULTILINE)
    if kind == "events":
        frames.append(last)
    else:
        assert last == "[DONE]"
    assert len(frames) > 1  # the pieces of several passes may come together
    for frame in frames:
        if kind == "text":  # OpenAI's own frames have null here until the last one, and its type has no null
            frame = frame.replace('"finish_reason":null', '"finish_reason":"stop"')
        frame_type.validate_json(frame, strict=True)


@pytest.fixture
def node(tmp_path):
    """Runs a program for Node.js where OpenAI's client is installed. Returns what it prints."""
    if not (NODE_MODULES / "openai").is_dir() or not shutil.which("node"):
        pytest.skip("OpenAI's client for JavaScript is not on this machine: make .venv/npm")

    def node(text, *arguments):
        (tmp_path / "node_modules").symlink_to(NODE_MODULES)
        (tmp_path / "program.mjs").write_text(text)
        command = ["node", tmp_path / "program.mjs", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return node


def test_openai_for_javascript(real, expected, node):
    chat, beams = expected
    answers = json.loads(node((Path(__file__).parent / "clients.mjs").read_text(), f"{real.url}/v1", NAME))
    assert answers == {
        "models": [NAME],
        **dict.fromkeys(("chat", "chatStream", "response", "responseStream"), chat.text),
        "logProbs": chat.log_probs,
        "beams": [[beam.score, beam.text] for beam in beams],
        "refusal": [True, "tools"],
    }


# The page


def of_page(real, language, beginning):
    """The block of the page that begins so, for this server."""
    (found,) = [code for kind, code in blocks(PAGE) if kind == language and code.startswith(beginning)]
    return found.replace("127.0.0.1:8000", f"127.0.0.1:{real.port}")


def test_the_page_for_curl(real, smollm2):
    code = of_page(real, "sh", "curl")
    (command,) = commands(code)
    answer = json.loads(subprocess.run([*command, "--silent"], capture_output=True, check=True).stdout)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    assert answer["choices"][0]["message"]["content"] == specbeam.generate(smollm2, messages, max_new_tokens=32).text


def test_the_page_for_python(real, smollm2):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program(PAGE).replace("127.0.0.1:8000", f"127.0.0.1:{real.port}"), {})
    assert printed.getvalue().startswith(specbeam.generate(smollm2, MESSAGES, max_new_tokens=32).text)


def test_the_page_for_javascript(real, smollm2, node):
    beams = specbeam.generate(
        smollm2, "The opposite of hot is", raw=True, max_new_tokens=16, num_beams=4, num_return_sequences=3
    )
    printed = node(of_page(real, "text", "// npm install openai"))
    assert [float(score) for score in re.findall(r"-\d+\.\d+", printed)] == [beam.score for beam in beams.sequences]


def test_the_page_for_langchain(real, smollm2):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        variables = {}
        exec(of_page(real, "text", "# pip install langchain-openai"), variables)
    text = specbeam.generate(smollm2, MESSAGES, max_new_tokens=64).text
    assert printed.getvalue() == text + "\n"
    assert "".join(part.content for part in variables["chat"].stream("Name three colours.")) == text


def test_the_page_for_the_evaluation_harness(real, smollm2, tmp_path):
    """The same numbers as in this process: log-likelihoods to 1e-6, and the same texts."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from specbeam.lm_eval import SpecbeamLM
    from tests.integrations.test_lm_eval import DOCUMENTS, TASKS, Dataset

    code = of_page(real, "text", "lm_eval")
    arguments = re.search(r"--model_args (\S+)", code)[1].replace("NAME", NAME)

    def evaluate(model, **how):
        data = {"test_split": "test", "custom_dataset": lambda **_: {"test": Dataset.from_list(DOCUMENTS)}}
        return simple_evaluate(
            model=model,
            tasks=[task | data for task in TASKS.values()],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
            **how,
        )["samples"]

    remote, local = evaluate("local-completions", model_args=arguments), evaluate(SpecbeamLM(smollm2))
    for task in TASKS:
        answers, expected = ([sample["filtered_resps"] for sample in of[task]] for of in (remote, local))
        if task == "tiny_generate":
            assert answers == expected
        else:
            np.testing.assert_allclose(np.array(answers, float), np.array(expected, float), rtol=0, atol=1e-6)
