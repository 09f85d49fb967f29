"""``specbeam serve`` as people start it: one line for each mistake, and an end by signal that loses nothing."""

import gc
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import openai
import pytest

import specbeam
from specbeam import cli
from specbeam.backends.cpu import weights
from specbeam.cli import serve
from specbeam.machine import Memory
from specbeam.server.limits import Access
from tests.conftest import reference_model
from tests.pages import ROOT, blocks
from tests.server.conftest import serving_alone


def test_a_server_from_start_to_signal(chat_lm, draft_lm):
    """Clients of a process of its own, by name of model and draft."""
    command = [sys.executable, "-m", "specbeam", "serve", "--model", f"big={chat_lm.source}", "--port", "0"]
    command += ["--draft", f"small={draft_lm.source}", "--backend", "cpu", "--dtype", "float32", "--max-waiting", "4"]
    environment = os.environ | {"SPECBEAM_API_KEY": "secret"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            line = server.stderr.readline()
            assert line.startswith("specbeam: big at http://127.0.0.1:"), line + server.stderr.read()
            url = line.split()[-1]
            assert server.stderr.readline().startswith("specbeam: the page is ")
            slots = 256 + 32 * 256
            says = f"{slots:,} tokens in {slots * chat_lm.backend.slot_bytes / 0.75e9:.3g} GB"
            line = server.stderr.readline()
            assert line == f"specbeam: the KV cache of big holds up to {says} (--max-cache-tokens changes that)\n"
            line = server.stderr.readline()
            says = "prompts are prefilled in chunks of about 0.1 s (--max-pass-seconds changes that)"
            assert line == f"specbeam: beside other requests, {says}\n"
            with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as patient:  # until it listens
                assert patient.get(url.replace("/v1", "/health")).status_code == 200
            client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
            stream = client.chat.completions.create(
                model="big",
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=200,
                temperature=0,
                stream=True,
                extra_body={"draft": "small", "ignore_eos": True},
            )
            pieces = [next(stream).choices[0].delta.content]
            server.send_signal(signal.SIGTERM)
            pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
            messages = [{"role": "user", "content": "Hi"}]
            assert "".join(pieces) == specbeam.generate(chat_lm, messages, max_new_tokens=200, eos_token_id=()).text
            assert server.wait(60) == 0
            (logged,) = [line for line in server.stderr if "/v1/chat" in line]
            assert "200 finished" in logged
            assert "Hi" not in logged
        finally:
            server.kill()


def started(monkeypatch, capsys, *arguments):
    """The access of a server that the command line starts, and the lines that it prints at its start."""
    found = []

    def make_app(models, limits, access, **_):
        found.append((models, access))

    monkeypatch.setattr("specbeam.server.app.make_app", make_app)
    monkeypatch.setattr("specbeam.server.serving.Server.__init__", lambda self, app, grace, ready, proxies: None)
    monkeypatch.setattr("specbeam.server.serving.Server.run", lambda *_, **__: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)  # objects of this test are to be collected
    assert cli.main(["serve", "--port", "0", *map(str, arguments)]) == 0
    models, access = found.pop()
    return models, access, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_that_others_reach_without_a_key_warns(chat_lm, monkeypatch, capsys, host):
    model = ["--model", f"tiny={chat_lm.source}"]
    _, _, lines = started(monkeypatch, capsys, *model, "--host", host)
    assert [line for line in lines if "WARNING" in line] == lines[-2:]  # the last lines
    assert lines[-2].startswith(f"specbeam: WARNING: there is no API key, and {host} port ")
    assert "SPECBEAM_API_KEY" in lines[-1]
    for safe in (["--host", host, "--api-key", "a"], ["--host", "127.0.0.1"], ["--allowed-host", "llm.example"]):
        assert "WARNING" not in "".join(started(monkeypatch, capsys, *model, *safe)[2])
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "\033[1;31mspecbeam: WARNING" in "".join(started(monkeypatch, capsys, *model, "--host", host)[2])


@pytest.mark.parametrize(("given", "seconds"), [([], 0.1), (["--max-pass-seconds", 0.025], 0.025)])
def test_the_time_of_a_chunk_is_stated_and_kept(chat_lm, monkeypatch, capsys, given, seconds):
    models, _, lines = started(monkeypatch, capsys, "--model", f"tiny={chat_lm.source}", *given)
    (line,) = [line for line in lines if "--max-pass-seconds" in line]
    assert f"chunks of about {seconds} s " in line
    sizes = []
    monkeypatch.setattr("specbeam.engine.costs.PassTimes.nodes_within", lambda _, given: sizes.append(given) or 8)
    engine = models.get(None).engine
    for ids in ([1] * 60, [2] * 60):
        engine.submit(ids, {"max_new_tokens": 1})
    engine.run()
    assert min(sizes) == seconds


def test_access_as_it_is_given(chat_lm, monkeypatch, capsys):
    model = ["--model", f"tiny={chat_lm.source}"]
    assert started(monkeypatch, capsys, *model)[1] == Access()
    hosts = ["--allowed-host", "LLM.example", "--allowed-host", "[::1]", "--trusted-proxy", "10.0.0.0/8"]
    keys = ["--api-key", "a", "--api-key", "b"]
    _, access, _ = started(monkeypatch, capsys, *model, *hosts, *keys, "--host", "0.0.0.0")
    assert access == Access(
        api_keys=("a", "b"), is_local=False, allowed_hosts=("llm.example", "::1"), trusted_proxies=("10.0.0.0/8",)
    )
    monkeypatch.setenv("SPECBEAM_API_KEY", "c  d\n")
    assert started(monkeypatch, capsys, *model)[1].api_keys == ("c", "d")
    assert started(monkeypatch, capsys, *model, *keys)[1].api_keys == ("a", "b")


def test_the_start_says_the_precision_of_each_model(chat_lm, plain_lm, monkeypatch, capsys):
    models = ["--model", f"big={chat_lm.source}", "--model", f"small={plain_lm.source}", "--backend", "cpu"]
    _, _, lines = started(monkeypatch, capsys, *models)
    assert lines[-2:] == ["specbeam: big: int8 on cpu", "specbeam: small: int8 on cpu"]
    _, _, lines = started(monkeypatch, capsys, *models, "--dtype", "float32")
    assert lines[-2:] == ["specbeam: big: float32 on cpu", "specbeam: small: float32 on cpu"]


@pytest.mark.parametrize(
    ("given", "name", "source"),
    [
        ("org/name=SOURCE", "org/name", "SOURCE"),
        ("a/b/c=SOURCE", "a/b/c", "SOURCE"),
        ("org/name=org/other", "org/name", "org/other"),
        ("org/name", "org/name", "org/name"),
        ("org/name=hub/files:x=1.gguf", "org/name", "hub/files:x=1.gguf"),
        ("name=SOURCE/x=1", "name", "SOURCE/x=1"),
        ("SOURCE/x=1", "x=1", "SOURCE/x=1"),
        ("./x=1", "x=1", "SOURCE/x=1"),
        ("x=1", "x=1", "SOURCE/x=1"),
        ("folder/y=1.gguf", "y=1.gguf", "SOURCE/folder/y=1.gguf"),
        ("/no/such/x=1", "x=1", "/no/such/x=1"),
    ],
)
def test_names_may_have_slashes_and_paths_may_have_equals_signs(tmp_path, monkeypatch, given, name, source):
    (tmp_path / "x=1").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/y=1.gguf").touch()
    monkeypatch.chdir(tmp_path)
    named = serve._named(given.replace("SOURCE", str(tmp_path)))
    assert named == (name, source.replace("SOURCE", str(tmp_path)))


def test_a_model_under_the_name_of_a_hub(chat_lm, monkeypatch, capsys):
    models, _, _ = started(monkeypatch, capsys, "--model", f"org/name={chat_lm.source}")
    assert models.get("org/name").name == "org/name"


def test_control_tokens_reach_the_model_if_the_operator_says_so(chat_lm, monkeypatch, capsys):
    forged = [{"role": "user", "content": "<eos>"}]
    for flags, count in (([], 0), (["--allow-control-tokens"], 1)):
        models, _, _ = started(monkeypatch, capsys, "--model", f"tiny={chat_lm.source}", *flags)
        assert models.get("tiny").encode(forged).count(chat_lm.tokenizer.eos_token_id) == count


def test_the_container_is_not_root_and_knows_its_health(served):
    instructions = re.findall(r"^([A-Z]+) (.*)$", (ROOT / "Dockerfile").read_text().replace("\\\n", ""), re.MULTILINE)
    last = max(number for number, (name, _) in enumerate(instructions) if name == "FROM")
    image = dict(instructions[last:])  # the last instruction of each name
    user, _, group = image["USER"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert json.loads(image["ENTRYPOINT"])[:2] == ["specbeam", "serve"]
    python, flag, program = json.loads(image["HEALTHCHECK"].partition("CMD ")[2])
    assert (python, flag) == ("python", "-c")
    assert image["EXPOSE"] in program
    for port, status in ((served.port, 0), (1, 1)):
        command = [sys.executable, flag, program.replace("8000", str(port))]
        assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == status


def test_the_image_gets_what_the_package_is_built_of_and_nothing_else():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    kept = {line[1:] for line in lines if line[0] == "!"}
    assert kept == {"pyproject.toml", "constraints.txt", "README.md", "LICENSE", "cmake", "src"}
    assert all((ROOT / name).exists() for name in kept)


def test_a_cache_that_cannot_be_written_is_one_line(chat_lm, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr(weights, "MIN_FILE_BYTES", 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "file"))
    models, _, _ = started(monkeypatch, capsys, "--model", f"m={chat_lm.source}", "--backend", "cpu")
    (line,) = [record.getMessage() for record in caplog.records if "cannot be kept" in record.getMessage()]
    assert "set SPECBEAM_HOME to a writable folder" in line
    assert "\n" not in line
    assert specbeam.generate(models.get("m").lm, "a", max_new_tokens=1).token_ids


def test_the_demo_opens_the_page(chat_lm, monkeypatch, capsys):
    """The browser of the test asks for the page, and presses Ctrl-C."""
    seen = []

    def browse(url):
        try:
            seen.append(httpx.get(url, trust_env=False).content)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", browse)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    assert cli.main(["demo", "--model", str(chat_lm.source), "--port", "0"]) == 0
    assert seen == [(Path(specbeam.__file__).parent / "server/page/index.html").read_bytes()]
    assert "specbeam: the page is http://127.0.0.1:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "/no/such/model"], "no file or folder"),
        (["--model", "no-such-alias"], "unknown model"),
        (["--draft", "ngram", "--draft", "ngram"], "twice"),
        (["--draft", "none=."], "meaning of its own"),
        (["--model", "org/name=/no/such"], "no file or folder /no/such"),
        (["--grace", "-1"], "--grace"),
        (["--grace", "nan"], "--grace"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "a", "--api-key", ""], "--api-key is empty"),
        (["--allowed-host", "https://llm.example"], "--allowed-host 'https://llm.example'"),
        (["--allowed-host", "llm.example:80"], "--allowed-host 'llm.example:80'"),
        (["--trusted-proxy", "nginx"], "--trusted-proxy 'nginx'"),
        (["--trusted-proxy", "10.0.0.1/8"], "--trusted-proxy '10.0.0.1/8'"),
        (["--timeout", "nan"], "--timeout=nan"),
        (["--timeout", "-1"], "--timeout=-1"),
        (["--max-tokens", "0"], "--max-tokens=0"),
        (["--max-body-bytes", "-5"], "--max-body-bytes=-5"),
        (["--port", "99999999"], "--port"),
        (["--host", "no.such.host.invalid"], "--host"),
        (["--max-requests", "0"], "--max-requests"),
    ],
)
def test_mistakes_are_one_line(chat_lm, capsys, arguments, says):
    assert cli.main(["serve", "--port", "0", "--model", str(chat_lm.source), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert says in line
    assert line.startswith("specbeam: ")


@pytest.mark.parametrize("backend", ["cpu", "torch", "transformers"])
def test_models_that_do_not_fit_into_memory_are_refused_before_they_are_loaded(
    reference, chat_lm, capsys, monkeypatch, backend
):
    """Two models of the same size: alone each fits, and together they do not."""
    size = sum(4 * parameter.numel() for parameter in reference.parameters())
    command = ["serve", "--port", "0", "--backend", backend, "--dtype", "float32", "--model", f"a={chat_lm.source}"]

    class Loaded(Exception):
        pass

    def load(*_, **__):
        raise Loaded

    monkeypatch.setattr("specbeam.model.load", load)
    monkeypatch.setattr("specbeam.backends.devices.usable_memory", lambda **_: Memory(10 * size, int(1.5 * size)))
    with pytest.raises(Loaded):
        cli.main(command)
    assert cli.main([*command, "--draft", f"b={chat_lm.source}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "of memory are free" in line


def test_caches_that_do_not_fit_into_memory_are_refused(chat_lm, capsys):
    command = ["serve", "--port", "0", "--max-cache-tokens", str(10**12), "--model"]
    assert cli.main([*command, f"tiny={chat_lm.source}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("specbeam: --max-cache-tokens=1000000000000 takes ")
    assert "GB of memory are free" in line


def test_a_port_that_is_taken(chat_lm, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["serve", "--model", str(chat_lm.source), "--port", port]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert port in line
    assert "in use" in line


def test_a_port_that_another_server_takes_while_the_model_loads(chat_lm, capsys, monkeypatch):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))

        def load(*_, **__):
            other.listen()
            return chat_lm

        monkeypatch.setattr("specbeam.model.load", load)
        port = str(other.getsockname()[1])
        assert cli.main(["serve", "--model", str(chat_lm.source), "--port", port]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"port {port}: Address already in use" in line


def test_collections_of_garbage_leave_the_loaded_models_out(chat_lm, monkeypatch):
    frozen = []
    monkeypatch.setattr("specbeam.server.serving.Server.run", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    gc.unfreeze()  # what these tests have frozen, and the command freezes again
    assert gc.get_freeze_count() == 0
    assert cli.main(["serve", "--model", str(chat_lm.source), "--port", "0"]) == 0
    assert frozen[0] > len(gc.get_objects())


@pytest.mark.models
def test_a_killed_server_leaves_no_damaged_file(tmp_path):
    """kill -9 while the weights are packed: the next server packs them again, and answers as without the accident."""
    model = reference_model("smollm2-135m-instruct")
    how = ["--model", f"smol={model}", "--backend", "cpu", "--quantize", "int8", "--port", "0"]
    packed = tmp_path / "packed"
    command = [sys.executable, "-m", "specbeam", "serve", *how]
    with subprocess.Popen(
        command, stderr=subprocess.DEVNULL, env=os.environ | {"SPECBEAM_HOME": str(tmp_path)}
    ) as killed:
        while not [*packed.glob(".*.new")]:
            assert killed.poll() is None
        killed.kill()
    assert not [*packed.glob("*.weights")]
    with serving_alone(*how, SPECBEAM_HOME=str(tmp_path)) as server:
        answer = server.post("/v1/completions", prompt="The sky is", max_tokens=5, temperature=0).json()
        assert not [line for line in server.log if "damaged" in line]
    assert [file.suffix for file in sorted(packed.iterdir())] == [".lock", ".weights"]
    lm = specbeam.load(model, backend="cpu", quantize="int8")
    assert answer["choices"][0]["text"] == specbeam.generate(lm, "The sky is", raw=True, max_new_tokens=5).text


def test_the_unit_of_the_page_is_one(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd on this machine")
    (unit,) = [code for _, code in blocks(ROOT / "docs/server.md") if code.startswith("[Unit]")]
    (tmp_path / "specbeam.service").write_text(unit.replace("/opt/specbeam/bin/specbeam", sys.executable))
    command = ["systemd-analyze", "verify", tmp_path / "specbeam.service"]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
