"""nginx in front of the server, with the configuration of docs/proxy.md: TLS, a name, and a path of its own."""

import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess

import httpx
import pytest

from specbeam.server.limits import Access
from tests.pages import ROOT, blocks
from tests.server.conftest import said_by, serving

NAME = "llm.localhost"
"""In place of the page's name. Browsers take names with this end for this machine."""
NGINX = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")  # Debian's folder is not on every user's path


@contextlib.contextmanager
def nginx(folder, configuration, port):
    """nginx with the page's configuration, in front of a server's port, with the certificate in the folder.

    Gives a function that sends it requests, and its own port.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        own = free.getsockname()[1]
    for theirs, ours in {
        "/etc/nginx/llm.example.org.crt": f"{folder}/certificate",
        "/etc/nginx/llm.example.org.key": f"{folder}/key",
        "listen 443 ssl": f"listen 127.0.0.1:{own} ssl",
        "127.0.0.1:8000": f"127.0.0.1:{port}",
        "llm.example.org": NAME,
    }.items():
        assert configuration.count(theirs) == 1
        configuration = configuration.replace(theirs, ours)
    (folder / "server.conf").write_text(configuration)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    http = "access_log off; " + "".join(f"{kind}_temp_path {folder}/{kind}; " for kind in kinds)
    http += f"include {folder}/server.conf;"
    (folder / "nginx.conf").write_text(f"daemon off; pid {folder}/pid; events {{}} http {{ {http} }}")
    user = ["-g", "user root;"] if os.getuid() == 0 else []  # pytest's folders are for their owner only
    command = [NGINX, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log", *user]
    trust = ssl.create_default_context(cafile=folder / "certificate")
    with (
        subprocess.Popen(command) as process,
        httpx.Client(transport=httpx.HTTPTransport(verify=trust), timeout=60) as client,
    ):
        while not (folder / "pid").exists():  # it is written once nginx listens
            assert process.poll() is None

        def ask(path, method="GET", headers=(), **how):
            how |= {"headers": {"host": NAME, **dict(headers)}, "extensions": {"sni_hostname": NAME}}
            return client.request(method, f"https://127.0.0.1:{own}{path}", **how)

        try:
            yield ask, own
        finally:
            process.terminate()


def texts():
    """The page's configuration, and the location that may take the place of the one in it."""
    return [code for _, code in blocks(ROOT / "docs/proxy.md") if "proxy_pass" in code]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of nginx, with a certificate."""
    if NGINX is None or shutil.which("openssl") is None:
        pytest.skip("nginx and openssl are not both installed")
    folder = tmp_path_factory.mktemp("nginx")
    key = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    key += ["-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run([*key, "-keyout", folder / "key", "-out", folder / "certificate"], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module", params=["/", "/llm/"])
def proxied(request, chat_lm, folder):
    """A server behind nginx: a function that sends nginx requests, nginx's port, and the prefix of all paths."""
    whole, location = texts()
    if request.param == "/llm/":
        whole = whole.partition("    location / {")[0] + location + "}\n"
    with (
        serving({"tiny": chat_lm}, access=Access(allowed_hosts=(NAME,))) as server,
        nginx(folder, whole, server.port) as (ask, port),
    ):
        yield ask, port, request.param


def test_requests_pass_through(proxied, log):
    ask, _, prefix = proxied
    assert ask(f"{prefix}health").json() == {"status": "ok"}
    path, completion = f"{prefix}v1/completions", {"prompt": "abc", "max_tokens": 6, "temperature": 0}
    answer = ask(path, "POST", json=completion, headers={"x-forwarded-for": "203.0.113.9, 198.51.100.7"})
    assert answer.status_code == 200
    line = log.next("/v1/completions")
    assert "client=198.51.100.7 " in line  # the last address that is no proxy of this machine
    assert f"id={answer.headers['x-request-id']}" in line
    assert len(answer.headers["x-request-id"]) == 32  # nginx's $request_id
    assert ask(path, "POST", json=completion | {"stream": True}).text.endswith("data: [DONE]\n\n")
    assert ask(path, "POST", content=b" " * 3_500_000).status_code == 400  # nginx takes it
    assert ask(f"{prefix}v1/models", headers={"host": "evil.example"}).status_code == 403
    assert ask(f"{prefix}v1/models", headers={"origin": "https://evil.example"}).status_code == 403
    assert ask(f"{prefix}v1/models", headers={"origin": f"https://{NAME}"}).status_code == 200


@contextlib.contextmanager
def growing(browser, port, prefix="/"):
    """A tab in which a tree begins to grow, and what its console said."""
    with contextlib.closing(browser.new_context(ignore_https_errors=True)) as context:
        tab = context.new_page()
        said = said_by(tab)
        tab.goto(f"https://{NAME}:{port}{prefix}#view=tree&prompt=ab+ab&as=raw&draft=ngram&max_tokens=6")
        tab.get_by_label("Speed").select_option("Infinity")
        tab.get_by_role("button", name="Grow the tree").click()
        yield tab, said


def test_the_page_works_through_it(proxied, browser):
    _, port, prefix = proxied
    with growing(browser, port, prefix) as (tab, said):
        tab.get_by_role("button", name="Replay", exact=True).wait_for()
        assert tab.locator(".pill").count() > 0
        assert said == []
        assert tab.evaluate("fetch('page/replay.html').then((response) => response.status)") == 200


@pytest.mark.parametrize("hosts", [(), (NAME,)])
def test_plain_proxy_pass_shows_the_page(chat_lm, browser, folder, hosts):
    """Without a line about the host, nginx names the address of proxy_pass, and browsers name the page in Origin."""
    plain = re.sub(r"upstream specbeam \{[^}]*\}\n| *proxy_set_header Host [^\n]*\n", "", texts()[0])
    plain = plain.replace("proxy_pass http://specbeam;", "proxy_pass http://127.0.0.1:8000;")
    with (
        serving({"tiny": chat_lm}, access=Access(allowed_hosts=hosts)) as server,
        nginx(folder, plain, server.port) as (_, port),
        growing(browser, port) as (tab, _),
    ):
        replay = tab.get_by_role("button", name="Replay", exact=True)
        (replay if hosts else tab.get_by_text("start it with --allowed-host").first).wait_for()
