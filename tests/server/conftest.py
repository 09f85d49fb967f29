"""Servers: in a thread of the test's process on tiny models, and in a process of their own on any model."""

import contextlib
import logging
import os
import queue
import re
import subprocess
import sys
import threading

import httpx
import openai
import pytest

import specbeam
from specbeam.engine.costs import nominal_cost
from specbeam.server.app import make_app
from specbeam.server.limits import Access, Limits
from specbeam.server.models import Models
from specbeam.server.serving import Server, listen
from tests.conftest import table_of_costs

TIMEOUT_SECONDS = 120


class Running:
    """A server that runs, and requests to it. ``server`` and ``engine`` are of one in a thread of this process."""

    def __init__(self, port, server=None, engine=None, key=None):
        self.server, self.port, self.engine, self.key = server, port, engine, key
        self.url = f"http://127.0.0.1:{port}"
        headers = {"authorization": f"Bearer {key}"} if key else {}
        transport = httpx.HTTPTransport(verify=False, retries=10)  # certificates load slowly, and it may not listen yet
        how = {"timeout": TIMEOUT_SECONDS, "transport": transport, "trust_env": False}
        self.http = httpx.Client(base_url=self.url, headers=headers, **how)

    def client(self, key=None, **how):
        """OpenAI's client."""
        how |= {"api_key": key or self.key or "none", "max_retries": 0, "timeout": TIMEOUT_SECONDS}
        return openai.OpenAI(base_url=f"{self.url}/v1", **how)

    def metrics(self):
        """The numbers of ``/metrics``, by name."""
        lines = self.http.get("/metrics").text.splitlines()
        return {name: float(number) for name, number in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def post(self, path, **fields):
        return self.http.post(path, json=fields)

    def choices(self, path="/v1/completions", **fields):
        return self.post(path, **fields).json()["choices"]

    def tokens(self, **fields):
        return self.post("/tokenize", **fields).json()["tokens"]

    def refused(self, path, status=400, **fields):
        """The error of a request that must be refused."""
        response = self.post(path, **fields)
        assert response.status_code == status, response.text
        return response.json()["error"]


@contextlib.contextmanager
def serving(lms, drafts=None, default_draft="none", limits=None, access=None, grace=None, **how):
    limits, access = limits or Limits(), access or Access()
    models = Models(lms, drafts, default_draft, limits, **how)
    bound = listen("127.0.0.1", 0)
    server = Server(make_app(models, limits, access), grace, trusted_proxies=access.trusted_proxies)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    running = Running(bound.getsockname()[1], server, models.get(None).engine)
    try:
        assert running.http.get("/health").json() == {"status": "ok"}
        yield running
    finally:
        running.http.close()
        server.stop()
        thread.join()


@contextlib.contextmanager
def serving_alone(*arguments, **environment):
    """``specbeam serve`` in a process of its own. ``log`` has the lines of its standard error so far."""
    command = [sys.executable, "-m", "specbeam", "serve", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | environment) as process:
        try:
            log = []
            for line in process.stderr:
                log.append(line)
                if found := re.search(r" at http://127.0.0.1:(\d+)/v1$", line):
                    break
            else:
                pytest.fail("".join(log))
            reading = threading.Thread(target=lambda: log.extend(process.stderr))  # else it would fill the pipe
            reading.start()
            running = Running(int(found[1]), key=environment.get("SPECBEAM_API_KEY"))
            running.process, running.log = process, log
            yield running
        finally:
            process.kill()
            reading.join()


def said_by(tab):
    """What the console of a tab says, as it comes."""
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    return said


def nodes_of(tab, kind=""):
    """The numbers of the nodes that a tab draws, or of the nodes of a kind such as ".best"."""
    return {*tab.locator(f".pill{kind}").evaluate_all("(all) => all.map((one) => Number(one.dataset.node))")}


def assert_is_drawn(tab, trace):
    """The tab has the nodes of a trace, and the scores as text."""
    drafted = {token["node"] for one in trace for token in one["drafted"]}
    beams = {beam["node"]: beam["score"] for one in trace for step in one["steps"] for beam in step}
    ended = {one["node"] for entry in trace for one in entry["ended"]}
    assert nodes_of(tab) == drafted | {*beams} | ended
    tab.get_by_text("The same as text").click()
    tab.locator(".rounds").wait_for()
    shown = tab.locator(".as-text").inner_text()
    assert all(f"score {score:.3f}" in shown for score in beams.values())


@pytest.fixture(scope="session")
def start():
    return serving


def on_cpu(lm):
    """The model on the cpu backend, whose numbers do not depend on the requests beside it."""
    return specbeam.load(lm.source, backend="cpu", dtype="float32")


@pytest.fixture(scope="session")
def chat_lm(tiny):
    return on_cpu(tiny("llama", chat=True)[1])


@pytest.fixture(scope="session")
def draft_lm(tiny):
    return on_cpu(tiny("llama", chat=True, seed=1, num_hidden_layers=1)[1])


@pytest.fixture(scope="session")
def plain_lm(tiny):
    """A model without a chat template."""
    return on_cpu(tiny("gpt2")[1])


@pytest.fixture(scope="session")
def reference(tiny):
    """The served model, as the reference implementation runs it."""
    return tiny("llama", chat=True)[0]


@pytest.fixture(scope="session")
def served(chat_lm, plain_lm, draft_lm):
    """A server with a chat model, a model without a chat template, and a draft, whose passes have given costs."""
    with contextlib.ExitStack() as stack:
        with given_costs():
            running = stack.enter_context(serving({"tiny": chat_lm, "plain": plain_lm}, {"small": draft_lm}))
        yield running


@contextlib.contextmanager
def given_costs():
    """Engines that begin meanwhile expect these costs. Measured ones would change what beams and drafts they choose."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specbeam.engine.engine.pass_times", table_of_costs(lambda nodes: 1e-3 * nominal_cost(nodes)))
        yield


class Lines(logging.Handler):
    """The lines of the log as they come."""

    def __init__(self, level=logging.NOTSET):
        super().__init__(level)
        self.lines = queue.Queue()

    def emit(self, record):
        self.lines.put(record.getMessage())

    def next(self, part):
        """The next line that has this part."""
        while part not in (line := self.lines.get(timeout=60)):
            pass
        return line


@pytest.fixture
def log():
    lines, logger = Lines(), logging.getLogger("specbeam.server")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(lines)
