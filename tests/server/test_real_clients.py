"""Programs that nobody here wrote use the server, on SmolLM2. Texts are the engine's."""

import json
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import pydantic
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


def run_node(folder, text, *arguments):
    """Run a program for Node.js where OpenAI's client is installed. Returns what it prints."""
    if not (NODE_MODULES / "openai").is_dir() or not shutil.which("node"):
        pytest.skip("OpenAI's client for JavaScript is not on this machine: make .venv/npm")
    (folder / "node_modules").symlink_to(NODE_MODULES)
    (folder / "program.mjs").write_text(text)
    command = ["node", folder / "program.mjs", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_openai_for_javascript(real, smollm2, tmp_path):
    code = (Path(__file__).parent / "clients.mjs").read_text()
    answers = json.loads(run_node(tmp_path, code, f"{real.url}/v1", NAME))
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


def of_page(real, beginning):
    """The block of the page that begins so, for this server."""
    (found,) = [code for _, code in blocks(PAGE) if code.startswith(beginning)]
    return found.replace("127.0.0.1:8000", f"127.0.0.1:{real.port}")


def test_the_page_for_curl(real, smollm2):
    (command,) = commands(of_page(real, "curl"))
    answer = json.loads(subprocess.run([*command, "--silent"], capture_output=True, check=True).stdout)
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    assert answer["choices"][0]["message"]["content"] == specbeam.generate(smollm2, messages, max_new_tokens=32).text


def test_the_page_for_python(real, smollm2, capsys):
    exec(program(PAGE).replace("127.0.0.1:8000", f"127.0.0.1:{real.port}"), {})
    assert capsys.readouterr().out.startswith(specbeam.generate(smollm2, MESSAGES, max_new_tokens=32).text)


def test_the_page_for_javascript(real, smollm2, tmp_path):
    how = {"max_new_tokens": 16, "num_beams": 4, "num_return_sequences": 3}
    beams = specbeam.generate(smollm2, "The opposite of hot is", raw=True, **how).sequences
    printed = run_node(tmp_path, of_page(real, "// npm install openai"))
    assert [float(score) for score in re.findall(r"-\d+\.\d+", printed)] == [beam.score for beam in beams]


def test_the_page_for_langchain(real, smollm2, capsys):
    variables = {}
    exec(of_page(real, "# pip install langchain-openai"), variables)
    text = specbeam.generate(smollm2, MESSAGES, max_new_tokens=64).text
    assert capsys.readouterr().out == text + "\n"
    assert "".join(part.content for part in variables["chat"].stream("Name three colours.")) == text
    structured = variables["chat"].with_structured_output(City, method="json_schema")
    assert isinstance(structured.invoke("Write JSON about Paris, with the keys name and capital."), City)


class City(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    capital: bool


def test_the_page_for_structured_answers(real, capsys):
    variables = {"client": openai.OpenAI(base_url=f"http://127.0.0.1:{real.port}/v1", api_key="none")}
    exec(of_page(real, "# pip install pydantic"), variables)
    assert re.fullmatch(r"name='.*' capital=(True|False)\n", capsys.readouterr().out)
