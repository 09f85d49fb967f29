"""Replays in a real browser: pages that are opened as files, without a server, a model or a network."""

import json
from pathlib import Path

import pytest

import specbeam
from specbeam.cli import main
from tests.cli.conftest import flags
from tests.conftest import needs_torch
from tests.server.conftest import assert_is_drawn, on_cpu, said_by

PROMPT = "ab ab </script><img src=x onerror=alert(1)> ab"
BEAMS = {"num_beams": 4, "num_draft_tokens": 3, "draft_width": 3, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def lm(tiny):
    return on_cpu(tiny("llama", chat=True)[1])


@pytest.fixture
def tab(browser):
    """A tab that may log nothing, and may ask no host for anything."""
    context = browser.new_context(reduced_motion="reduce", viewport={"width": 1400, "height": 900})
    tab, asked = context.new_page(), []
    said = said_by(tab)
    tab.on("request", lambda request: asked.append(request.url))
    yield tab
    context.close()
    assert said == []
    assert {url.partition(":")[0] for url in asked} <= {"file", "data", "blob"}


def check_replay(tab, result):
    """The page shows the nodes, the scores and the text of a result that was made with ``trace=True``."""
    tab.get_by_label("Speed").select_option("Infinity")
    tab.get_by_role("button", name="Replay", exact=True).wait_for()
    assert tab.locator(".agreed .certain").text_content() == result.text
    assert_is_drawn(tab, result.trace)


def test_a_recording_is_a_page(lm, tab, tmp_path, capsys):
    file = tmp_path / "run #1.html"
    how = [f"--model={lm.source}", "--backend=cpu", "--dtype=float32", "--draft=ngram", f"--record={file}"]
    assert main(["generate", PROMPT, *how, *flags(**BEAMS)]) == 0
    result = specbeam.generate(lm, PROMPT, draft="ngram", trace=True, **BEAMS)
    tab.goto(file.as_uri())
    check_replay(tab, result)
    assert PROMPT in tab.locator(".agreed .prompt").text_content()
    assert "4 beams, draft ngram" in tab.locator(".about").inner_text()
    tab.locator(".pill").first.click()
    about = tab.get_by_label("The token", exact=True)
    assert about.locator(".likeliest li").count() == 10
    assert about.get_by_role("button").all_inner_texts() == ["✕"]  # without a model, nothing goes on from a token
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Save", exact=True).click()
    *_, end = map(json.loads, Path(download.value.path()).read_text(encoding="utf-8").splitlines())
    assert end["sequences"][0]["token_ids"] == result.token_ids


@needs_torch
def test_a_report_links_a_replay_of_each_method(lm, tab, tmp_path, no_plots):
    pytest.importorskip("hydra")
    pytest.importorskip("matplotlib")
    methods = "methods={a/b: {mode: greedy}, beams: {mode: speculative-beam, num_draft_tokens: 3, draft_width: 3}}"
    data = tmp_path / "prompts.txt"
    data.write_text(f"{PROMPT}\nanother\n")
    how = [f"target_model={lm.source}", "load.backend=cpu", "load.dtype=float32", "decode.max_new_tokens=12"]
    assert main(["study", *how, methods, f"data.source={data}", f"output={tmp_path / 'run'}"]) == 0
    lines = (tmp_path / "run" / "generations.jsonl").read_text(encoding="utf-8").splitlines()
    records = {record["key"]: record for record in map(json.loads, lines)}
    recorded = (tmp_path / "run" / "recordings.jsonl").read_text(encoding="utf-8").splitlines()
    keys = {"a/b|line 1|0|0", "beams|line 1|0|0", "beams|line 2|0|0"}  # replays, and samples with drafts
    assert {json.loads(line)["key"] for line in recorded} == keys
    for method, options in {"a/b": {}, "beams": {"draft": "ngram", **BEAMS}}.items():
        tab.goto((tmp_path / "run" / "report.html").as_uri())
        tab.get_by_role("link", name=method, exact=True).click()
        result = specbeam.generate(lm, PROMPT, trace=True, **{"max_new_tokens": 12, **options})
        check_replay(tab, result)
        assert records[f"{method}|line 1|0|0"]["text"] == result.text
