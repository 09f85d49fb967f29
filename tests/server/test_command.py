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
from types import SimpleNamespace

import httpx
import pytest

import specbeam
from specbeam import cli
from specbeam.backends.cpu import weights
from specbeam.cli import serve
from specbeam.server.limits import Access
from specbeam.system.machine import Memory
from tests.pages import ROOT, blocks
from tests.server.conftest import serving_alone

HI = [{"role": "user", "content": "Hi"}]
HOSTS = ["--allowed-host", "LLM.example", "--allowed-host", "[::1]", "--trusted-proxy", "10.0.0.0/8"]
NAMES = {"allowed_hosts": ("llm.example", "::1"), "trusted_proxies": ("10.0.0.0/8",)}


def test_a_server_from_start_to_signal(chat_lm, draft_lm):
    """A process of its own, and a client of it. The model has a name as on a hub."""
    how = ["--model", f"org/big={chat_lm.source}", "--draft", f"small={draft_lm.source}", "--max-waiting", "4"]
    request = {"model": "org/big", "messages": HI, "max_tokens": 200, "temperature": 0, "stream": True}
    with serving_alone(*how, "--backend", "cpu", "--dtype", "float32", SPECBEAM_API_KEY="secret") as server:
        stream = server.client().chat.completions.create(**request, extra_body={"ignore_eos": True, "draft": "small"})
        pieces = [next(stream).choices[0].delta.content]
        server.process.send_signal(signal.SIGTERM)
        pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
        assert server.process.wait(60) == 0
    assert "".join(pieces) == specbeam.generate(chat_lm, HI, max_new_tokens=200, eos_token_id=()).text
    slots = 256 + 32 * 256
    cache = f"{slots:,} tokens in {slots * chat_lm.backend.slot_bytes / 0.75e9:.3g} GB"
    says = [
        f"org/big at {server.url}/v1",
        f"the page is {server.url}/",
        f"the KV cache of org/big holds up to {cache} (--max-cache-tokens changes that)",
        "beside other requests, prompts are prefilled in chunks of about 0.1 s (--max-pass-seconds changes that)",
    ]
    assert server.log[:4] == [f"specbeam: {line}\n" for line in says]
    (logged,) = [line for line in server.log if "/v1/chat" in line]
    assert "200 finished" in logged
    assert "Hi" not in logged


@pytest.fixture
def started(chat_lm, monkeypatch, capsys):
    """Starts a server on the command line. Returns its models, its access, and the lines that it prints."""
    found = []

    def started(*arguments, models=(f"tiny={chat_lm.source}",)):
        sources = [word for model in models for word in ("--model", model)]
        assert cli.main(["serve", "--port", "0", *sources, *map(str, arguments)]) == 0
        return *found.pop(), capsys.readouterr().err.splitlines()

    monkeypatch.setattr("specbeam.server.app.make_app", lambda *given, **_: found.append((given[0], given[2])))
    monkeypatch.setattr("specbeam.server.serving.Server", lambda *_: SimpleNamespace(run=lambda **_: None))
    monkeypatch.setattr(gc, "freeze", lambda: None)  # objects of this test are to be collected
    return started


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_that_others_reach_without_a_key_warns(started, monkeypatch, host):
    _, _, lines = started("--host", host)
    assert [line for line in lines if "WARNING" in line] == lines[-2:]  # the last lines
    assert lines[-2].startswith(f"specbeam: WARNING: there is no API key, and {host} port ")
    assert "SPECBEAM_API_KEY" in lines[-1]
    assert "WARNING" not in "".join(started("--host", host, "--api-key", "a")[2])
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "\033[1;31mspecbeam: WARNING" in "".join(started("--host", host)[2])


def test_the_time_of_a_chunk_is_stated_and_kept(started, monkeypatch):
    models, _, lines = started("--max-pass-seconds", 0.025)
    (line,) = [line for line in lines if "--max-pass-seconds" in line]
    assert "chunks of about 0.025 s " in line
    sizes = []
    monkeypatch.setattr("specbeam.engine.costs.PassTimes.nodes_within", lambda _, given: sizes.append(given) or 8)
    engine = models.get(None).engine
    for ids in ([1] * 60, [2] * 60):
        engine.submit(ids, {"max_new_tokens": 1})
    engine.run()
    assert min(sizes) == 0.025


def test_a_lookup_may_have_a_name_of_the_operator(started):
    models, _, _ = started("--draft", "fast=ngram", "--draft", "suffix")
    model = models.get(None)
    assert [model.draft(name) for name in (None, "fast", "ngram", "suffix", "none")] == [*["ngram"] * 3, "suffix", None]


@pytest.mark.parametrize(
    ("given", "variable", "access"),
    [
        ([], "", Access()),
        ([], "c  d\n", Access(api_keys=("c", "d"))),
        (["--api-key", "a"], "c", Access(api_keys=("a",))),
        ([*HOSTS, "--api-key", "a", "--api-key", "b"], "", Access(api_keys=("a", "b"), **NAMES)),
        (["--host", "0.0.0.0"], "a", Access(api_keys=("a",), is_local=False)),
    ],
)
def test_access_as_it_is_given(started, monkeypatch, given, variable, access):
    monkeypatch.setenv("SPECBEAM_API_KEY", variable)
    _, found, lines = started(*given)
    assert found == access
    assert "WARNING" not in "".join(lines)


@pytest.mark.parametrize("more", [[], ["--dtype", "float32"]])
def test_the_start_says_the_precision_of_each_model(started, chat_lm, plain_lm, more):
    models = f"big={chat_lm.source}", f"small={plain_lm.source}"
    _, _, lines = started("--backend", "cpu", *more, models=models)
    assert lines[-2:] == [f"specbeam: {name}: {(more or ['int8'])[-1]} on cpu" for name in ("big", "small")]


@pytest.mark.parametrize(
    ("given", "name", "source"),
    [
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
        ("name=~/x=1", "name", "SOURCE/x=1"),
    ],
)
def test_names_may_have_slashes_and_paths_may_have_equals_signs(tmp_path, monkeypatch, given, name, source):
    (tmp_path / "x=1").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/y=1.gguf").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    named = serve._named(given.replace("SOURCE", str(tmp_path)))
    assert named == (name, source.replace("SOURCE", str(tmp_path)))


@pytest.mark.parametrize(("flags", "count"), [([], 0), (["--allow-control-tokens"], 1)])
def test_control_tokens_reach_the_model_if_the_operator_says_so(started, chat_lm, flags, count):
    ids = started(*flags)[0].get("tiny").encode([{"role": "user", "content": "<eos>"}])
    assert ids.count(chat_lm.tokenizer.eos_token_id) == count


def test_the_container_is_not_root_and_knows_its_health(served):
    instructions = re.findall(r"^([A-Z]+) (.*)$", (ROOT / "Dockerfile").read_text().replace("\\\n", ""), re.MULTILINE)
    last = max(number for number, (name, _) in enumerate(instructions) if name == "FROM")
    image = dict(instructions[last:])  # the last instruction of each name
    user, group = map(int, image["USER"].split(":"))
    assert min(user, group) > 0
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
    assert seen == [(Path(specbeam.__file__).parent / "page/index.html").read_bytes()]
    assert "specbeam: the page is http://127.0.0.1:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "no-such-alias"], "unknown model"),
        (["--draft", "ngram", "--draft", "ngram"], "twice"),
        (["--draft", "none=."], "meaning of its own"),
        (["--model", "org/name=/no/such"], "no file or folder /no/such"),
        *((["--grace", seconds], f"--grace {seconds}") for seconds in ("-1.0", "nan")),
        *(([*other, "--api-key", ""], "--api-key is empty") for other in ([], ["--api-key", "a"])),
        *((["--allowed-host", host], f"--allowed-host '{host}'") for host in ("https://llm.example", "llm.example:80")),
        *((["--trusted-proxy", address], f"--trusted-proxy '{address}'") for address in ("nginx", "10.0.0.1/8")),
        *((["--timeout", seconds], f"--timeout={seconds}") for seconds in ("nan", "-1")),
        (["--max-tokens", "0"], "--max-tokens=0"),
        (["--port", "99999999"], "--port"),
        (["--host", "no.such.host.invalid"], "--host"),
        (["--max-cache-tokens", "1000000000000"], "--max-cache-tokens=1000000000000 takes .* GB of memory are free"),
        (["--replicas", "2"], "--launcher ray"),
        (["--launcher", "ray", "--replicas", "0"], "at least 1"),
        (["--launcher", "ray"], re.escape("specbeam[ray]")),
    ],
)
def test_mistakes_are_one_line(chat_lm, capsys, monkeypatch, arguments, says):
    monkeypatch.setitem(sys.modules, "ray", None)  # it is not installed
    assert cli.main(["serve", "--port", "0", "--model", str(chat_lm.source), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert re.search(says, line)
    assert line.startswith("specbeam: ")


@pytest.mark.parametrize("backend", ["cpu", "torch", "transformers"])
def test_models_too_large_for_memory_are_refused_before_they_load(reference, chat_lm, capsys, monkeypatch, backend):
    """Two models of the same size: alone each fits, and together they do not."""
    size = sum(4 * parameter.numel() for parameter in reference.parameters())
    command = ["serve", "--port", "0", "--backend", backend, "--dtype", "float32", "--model", f"a={chat_lm.source}"]
    monkeypatch.setattr("specbeam.models.model.load", lambda *_, **__: 1 / 0)
    monkeypatch.setattr("specbeam.backends.devices.usable_memory", lambda **_: Memory(10 * size, int(1.5 * size)))
    with pytest.raises(ZeroDivisionError):  # it loads
        cli.main(command)
    assert cli.main([*command, "--draft", f"b={chat_lm.source}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "of memory are free" in line


@pytest.mark.parametrize("early", [True, False])
def test_a_port_that_another_server_takes(chat_lm, capsys, monkeypatch, early):
    """Before, or while the model loads."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        if early:
            other.listen()

        def load(*_, **__):
            assert not early
            other.listen()
            return chat_lm

        monkeypatch.setattr("specbeam.models.model.load", load)
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


def test_a_killed_server_leaves_no_damaged_file(started, tmp_path, monkeypatch, caplog):
    """What is on the disk while the weights are packed: the next server packs them again."""
    monkeypatch.setattr(weights, "MIN_FILE_BYTES", 0)
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "home"))
    pack = weights._pack

    def halfway(checkpoint, plan, data):
        pack(checkpoint, plan[: len(plan) // 2], data)
        shutil.copytree(tmp_path / "home", tmp_path / "killed")
        return pack(checkpoint, plan, data)

    monkeypatch.setattr(weights, "_pack", halfway)
    whole, again = started("--backend", "cpu")[0], []
    monkeypatch.setattr(weights, "_pack", lambda *given: again.append(given) or pack(*given))
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "killed"))
    models = started("--backend", "cpu")[0]
    assert len(again) == 1
    assert "damaged" not in caplog.text
    assert [file.suffix for file in sorted((tmp_path / "killed/packed").iterdir())] == [".lock", ".weights"]
    texts = [specbeam.generate(one.get("tiny").lm, HI, max_new_tokens=5).text for one in (whole, models)]
    assert texts[0] == texts[1]


def test_the_unit_of_the_page_is_one(tmp_path):
    if not shutil.which("systemd-analyze"):
        pytest.skip("there is no systemd on this machine")
    (unit,) = [code for _, code in blocks(ROOT / "docs/server.md") if code.startswith("[Unit]")]
    (tmp_path / "specbeam.service").write_text(unit.replace("/opt/specbeam/bin/specbeam", sys.executable))
    command = ["systemd-analyze", "verify", tmp_path / "specbeam.service"]
    assert subprocess.run(command, capture_output=True, check=True).stderr == b""
