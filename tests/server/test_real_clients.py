"""Programs that nobody here wrote use the server, on SmolLM2. Texts are the engine's."""

import contextlib
import io
import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import specbeam
from specbeam.server.limits import Limits
from tests.conftest import reference_model
from tests.pages import ROOT, blocks, commands, program
from tests.server.conftest import Lines, serving

pytestmark = pytest.mark.models
NAME = "smollm2-135m-instruct"
PAGE = ROOT / "docs/server.md"
NODE_MODULES = Path(sys.prefix) / "npm/node_modules"
"""Where ``make .venv/npm`` puts OpenAI's client for JavaScript."""
MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def smollm2():
    return specbeam.load(reference_model(NAME), backend="cpu")


@pytest.fixture(scope="module")
def real(smollm2):
    """The server, which ends texts after 64 tokens."""
    errors = Lines(logging.ERROR)
    logging.getLogger().addHandler(errors)
    with serving({NAME: smollm2}, limits=Limits(max_tokens=64)) as running:
        yield running
    logging.getLogger().removeHandler(errors)
    assert errors.lines.empty()


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


def test_openai_for_javascript(real, smollm2, node):
    answers = json.loads(node((Path(__file__).parent / "clients.mjs").read_text(), f"{real.url}/v1", NAME))
    (chat,) = specbeam.generate(smollm2, MESSAGES, max_new_tokens=12).sequences
    how = {"max_new_tokens": 6, "num_beams": 4, "num_return_sequences": 3}
    beams = specbeam.generate(smollm2, "The sky is", raw=True, **how).sequences
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


def printed_by(code, variables):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, variables)
    return printed.getvalue()


def test_the_page_for_python(real, smollm2):
    printed = printed_by(program(PAGE).replace("127.0.0.1:8000", f"127.0.0.1:{real.port}"), {})
    assert printed.startswith(specbeam.generate(smollm2, MESSAGES, max_new_tokens=32).text)


def test_the_page_for_javascript(real, smollm2, node):
    beams = specbeam.generate(
        smollm2, "The opposite of hot is", raw=True, max_new_tokens=16, num_beams=4, num_return_sequences=3
    )
    printed = node(of_page(real, "text", "// npm install openai"))
    assert [float(score) for score in re.findall(r"-\d+\.\d+", printed)] == [beam.score for beam in beams.sequences]


def test_the_page_for_langchain(real, smollm2):
    variables = {}
    printed = printed_by(of_page(real, "text", "# pip install langchain-openai"), variables)
    text = specbeam.generate(smollm2, MESSAGES, max_new_tokens=64).text
    assert printed == text + "\n"
    assert "".join(part.content for part in variables["chat"].stream("Name three colours.")) == text
