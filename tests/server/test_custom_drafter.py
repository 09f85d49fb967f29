"""Drafters of the operator's own: clients name them as the operator did, and can name no module."""

import pytest

from specbeam.cli.serve import _make_models
from tests.server.conftest import serving

calls = []


def propose(tokens, lm):
    calls.append(tokens)
    return [9, 9]


def broken(tokens, lm):
    return tokens.nothing


@pytest.fixture(scope="module")
def server(lm):
    with serving({"tiny": lm}, {"mine": propose, "broken": broken}) as running:
        yield running


def ask(server, **more):
    sizes = {"num_draft_tokens": 2} if "draft" in more else {}
    asked = {"model": "tiny", "prompt": "hi", "max_tokens": 6, "temperature": 0, **sizes, **more}
    return server.http.post("/v1/completions", json=asked)


def test_a_request_drafts_with_it_by_its_name(server):
    plain, drafted = ask(server).json(), ask(server, draft="mine").json()
    assert drafted["choices"][0]["text"] == plain["choices"][0]["text"]
    assert len(calls) > 0


def test_its_errors_are_the_servers_and_show_no_file(server, caplog):
    answer = ask(server, draft="broken")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert "test_custom_drafter" not in answer.text
    assert "test_custom_drafter.py" in caplog.text
    assert ask(server).status_code == 200


def test_a_client_cannot_name_a_module(server):
    for name in ("tests.server.test_custom_drafter:propose", "this:s", "propose"):
        answer = ask(server, draft=name)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "draft_not_found")


def test_the_command_takes_it_from_the_current_directory(folder, tmp_path, monkeypatch):
    (tmp_path / "own_served.py").write_text("def propose(tokens, lm):\n    return []\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    models = _make_models({"device": "cpu"}, [("tiny", str(folder))], [("mine", "own_served:propose")])
    assert models.get("tiny").drafts["mine"].__module__ == "own_served"
