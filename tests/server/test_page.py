"""The page in a real browser, on a model that runs."""

import json
import math
import re
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import specbeam
from specbeam.options.options import Options
from specbeam.recording.events import event_line, events
from specbeam.server.limits import Access
from specbeam.server.page import HEADERS
from tests.conftest import reference_model
from tests.server.conftest import assert_is_drawn, given_costs, nodes_of, said_by, serving
from tests.server.test_life import gate, wait_for

PAGE = Path(specbeam.__file__).parent / "page"
AXE = Path(sys.prefix) / "npm/node_modules/axe-core/axe.min.js"
"""Where ``make .venv/npm`` puts it."""
MAX_SCRIPT_BYTES = 150_000
TOO_MANY = "List should have at most 1000 items after validation, not 1001"
PROMPT = "ab ab ab ab"
BEAMS = {"num_beams": 4, "num_draft_tokens": 3, "draft_width": 3}
REAL = "smollm2-135m-instruct"
on_a_real_model_too = pytest.mark.parametrize("lm", ["tiny", REAL], indirect=True)


@pytest.fixture(scope="module")
def lm(request, chat_lm):
    """The served model: a tiny one, or the one that a test asks for."""
    name = getattr(request, "param", "tiny")
    return chat_lm if name == "tiny" else specbeam.load(reference_model(name), backend="cpu")


@pytest.fixture(scope="module", autouse=True)
def costs():
    """The page and the test run the same search, so both have the same costs."""
    with given_costs():
        yield


@pytest.fixture(scope="module")
def served(served, chat_lm, lm):
    """A server of this model."""
    if lm is chat_lm:
        yield served
    else:
        with serving({REAL: lm}) as running:
            yield running


@pytest.fixture
def tab(browser, served):
    """A tab that may log nothing, and may ask no other host for anything."""
    context = browser.new_context(reduced_motion="reduce", viewport={"width": 1400, "height": 900})
    tab, hosts = context.new_page(), set()
    said = said_by(tab)
    tab.on("request", lambda request: hosts.add(request.url.split("/")[2]))
    yield tab
    context.close()
    assert [text for text in said if "400 (Bad Request)" not in text and "401 (Unauthorized)" not in text] == []
    assert all(host.startswith("127.0.0.1:") for host in hosts)


def show(tab, served, view="tree", **form):
    """Open a view with a prompt and options in the link."""
    form = {"prompt": PROMPT, "as": "raw", "draft": "ngram", "max_tokens": 12, **form}
    tab.goto(f"{served.url}/#" + "&".join(f"{name}={value}" for name, value in {"view": view, **form}.items()))
    tab.locator("option[value=suffix]").wait_for(state="attached")


def grow(tab, recording=None):
    """Grow a tree, or the one of a recording."""
    tab.get_by_label("Speed").select_option("Infinity")
    if recording is None:
        tab.get_by_role("button", name="Grow the tree").click()
    else:
        file = {"name": "run.jsonl", "mimeType": "application/jsonl", "buffer": recording.encode()}
        tab.locator("input[type=file]").set_input_files(file)
    tab.get_by_role("button", name="Replay", exact=True).wait_for()


def saved(tab):
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Save", exact=True).click()
    return Path(download.value.path()).read_text(encoding="utf-8")


def pill(tab, node):
    return tab.locator(f".pill[data-node='{node}']")


def trace_of(lm, **how):
    """The run that the page shows, from ``generate``."""
    how = {"max_new_tokens": 12, "draft": "ngram", **how}
    return specbeam.generate(lm, PROMPT, raw=True, **how, trace=True, top_logprobs=10)


def beams_of(rounds, *lists):
    """By node: the beams of all steps, and the entries of further lists of the rounds."""
    places = [place for one in rounds for place in (*one["steps"], *(one[name] for name in lists))]
    return {entry["node"]: entry for place in places for entry in place}


def path_to(node, beams):
    """The nodes from the prompt to this one."""
    return [*path_to(beams[node]["after"], beams), node] if node in beams else []


@pytest.fixture
def rounds(tab, served, lm):
    """The rounds of the beams that the tab shows."""
    show(tab, served, **BEAMS)
    grow(tab)
    tab.get_by_role("button", name="Fit").click()
    return trace_of(lm, **BEAMS).trace


@on_a_real_model_too
def test_the_tree_has_every_node_and_score_of_the_trace(tab, served, lm):
    show(tab, served, **BEAMS)
    grow(tab)
    text = trace_of(lm, **BEAMS)
    drafted = {token["node"] for one in text.trace for token in one["drafted"]}
    beams = beams_of(text.trace)
    assert nodes_of(tab, ".accepted") == drafted & {*beams}
    assert nodes_of(tab, ".rejected") == drafted - {*beams}
    beams = beams_of(text.trace, "ended")
    best = path_to(max(nodes_of(tab, ".best")), beams)
    assert nodes_of(tab, ".best") == {*best}
    assert [beams[node]["token_id"] for node in best] == text.token_ids
    assert_is_drawn(tab, text.trace)
    assert tab.locator(".as-text").inner_text().count("(accepted)") == text.stats.accepted
    assert text.stats.accepted > 0 or lm.source != REAL  # the tiny one repeats nothing


def test_a_token_under_the_pointer_tells_its_numbers(tab, rounds):
    beam = rounds[-1]["steps"][-1][1]
    pill(tab, beam["node"]).hover()
    tip = tab.locator(".tip")
    shown = tip.inner_text()
    assert f"log-probability\n{beam['log_prob']:.4f}" in shown
    assert f"score of the path\n{beam['score']:.4f}" in shown
    (likeliest,) = [row["tokens"] for one in rounds for row in one["likeliest"] if row["after"] == beam["after"]]
    shares = [math.exp(token["log_prob"]) for token in likeliest]
    assert tip.locator("meter").evaluate_all("(all) => all.map((one) => one.value)")[:10] == pytest.approx(shares)
    percent = re.search(r"([\d.]+) %", tip.locator(".likeliest li").first.inner_text())
    assert float(percent[1]) == pytest.approx(100 * shares[0], abs=0.5)
    tab.mouse.move(5, 5)
    assert tip.count() == 0


def test_a_rejected_draft_token_tells_what_came_in_its_place(tab, rounds):
    beams, chosen = beams_of(rounds), {}  # by the node before: the best beam that goes on from it
    for beam in beams.values():
        chosen.setdefault(beam["after"], beam)
    rejected = [token for one in rounds for token in one["drafted"] if token["node"] not in beams]
    replaced = next(token for token in rejected if token["after"] in chosen)
    nothing = next(token for token in rejected if token["after"] not in chosen)  # after a rejected one
    about = tab.get_by_label("The token", exact=True)
    pill(tab, replaced["node"]).click()
    assert "rejected draft token" in about.inner_text()
    assert f"came instead\n{chosen[replaced['after']]['text']}" in about.inner_text().replace("\u00a0", " ")
    tab.get_by_role("button", name="Close").click()
    pill(tab, nothing["node"]).click()
    assert "came instead" not in about.inner_text()


def test_what_all_beams_share_is_a_line_of_text(tab, rounds):
    from playwright.sync_api import expect  # the fixture of the browser has found it

    rounds = rounds[:-1]  # the last one makes the whole text final
    phases = sum(1 + bool(one["drafted"]) for one in rounds)
    certain = [node for one in rounds for node in one["certain"]]
    nodes = beams_of(rounds, "drafted", "ended")
    assert certain
    tab.get_by_label("Place in the run").fill(str(phases))
    assert tab.locator(".agreed .certain").text_content() == "".join(one["text"] for one in rounds)
    rest = {node for node in nodes if len(path_to(node, nodes)) >= len(certain)}
    assert rest < {*nodes}
    expect(tab.locator(".pill")).to_have_count(len(rest))
    assert nodes_of(tab) == rest
    tab.get_by_role("button", name="Hide agreed").click()
    expect(tab.locator(".pill")).to_have_count(len(nodes))
    assert nodes_of(tab) == {*nodes}


def test_a_link_holds_the_prompt_and_all_options(tab, served):
    show(tab, served)
    tab.get_by_text("More options").click()
    tab.locator("summary", has_text="JSON schema").click()
    given = {
        "Prompt": "a & b #1\n100 %", "Draft": "suffix", "Beams": "3", "New tokens": "7", "Draft length": "2",
        "Draft width": "5", "Temperature": "0.7", "Top p": "0.9", "Top k": "40", "Seed": "11", "Texts": "2",
        "Length penalty": "1.5", "Repetition penalty": "1.1", "No repeated n-grams": "3", "Stop text": "; ",
        "Only these answers": "é\nab", "JSON schema": '{"enum": [1]}',
    }  # fmt: skip
    for label, value in given.items():
        field = tab.get_by_label(label, exact=True)
        field.select_option(value) if label == "Draft" else field.fill(value)
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.get_by_role("button", name="Copy link").click()
    tab.get_by_role("button", name="Copied ✓").wait_for()
    link = tab.evaluate("navigator.clipboard.readText()")
    other = tab.context.new_page()
    asked = []
    other.on("request", lambda request: asked.append(request.url))
    other.goto(link)
    other.get_by_role("button", name="Grow the tree").wait_for()
    other.locator("option[value=suffix]").wait_for(state="attached")
    assert {label: other.get_by_label(label, exact=True).input_value() for label in given} == given
    assert other.get_by_label("a text to go on from").is_checked()
    assert [url for url in asked if "100" in url] == []  # what is behind "#" stays here
    other.get_by_role("button", name="Chat", exact=True).click()
    assert other.get_by_label("New tokens").input_value() == "512"  # it has settings of its own


def test_a_replay_and_a_reload_give_the_same_picture(tab, served):
    show(tab, served, **BEAMS)
    grow(tab)
    picture, file = tab.locator(".world").inner_html(), saved(tab)
    tab.reload()
    assert tab.get_by_label("Prompt").input_value() == PROMPT
    grow(tab, file)
    assert tab.locator(".world").inner_html() == picture
    grow(tab, '{"event": "other"}')
    assert "no recording of specbeam" in tab.get_by_role("alert").inner_text()


def beam(node, after, text):
    return {"node": node, "after": after, "token_id": ord(text), "text": text, "log_prob": -0.5, "score": -0.5}


def recording(text, *rounds):
    """A run of beams with this text. Of each round, what is not empty."""
    lists = ("evaluated", "drafted", "steps", "ahead", "ended", "dropped", "certain")
    empty = {"event": "round", "text": "", **{name: [] for name in lists}}
    empty["pass"] = {"target_passes": 1, "draft_passes": 0, "nodes": 1, "seconds": 1.0}
    sequence = {"text": text, "token_ids": [*map(ord, text)], "log_prob": 0.0, "score": 0.0, "finish_reason": "length"}
    begin = {"event": "begin", "format": 1, "options": {"num_beams": 2}, "prompt": []}
    end = {"event": "end", "sequences": [sequence], "stats": {"evaluated_beams": 1.0}}
    return "\n".join(map(json.dumps, [begin, *(empty | one for one in rounds), end]))


@pytest.fixture
def lazy(confident, give_costs):
    """A traced run with deferred beams, and its recording."""
    give_costs(lambda nodes: 1 + 0.2 * nodes)
    prompt = [1, 2, 3, 1, 2]
    options = Options(num_beams=16, max_new_tokens=12, length_penalty=0.0, trace=True, top_logprobs=10)
    result = specbeam.generate(confident, prompt, options)
    return result, "\n".join(map(event_line, events(confident, prompt, options, None, result)))


def test_deferred_beams_look_different_and_the_best_text_goes_on_without_them(tab, served, lazy):
    result, lines = lazy
    tab.set_viewport_size({"width": 1400, "height": 1300})  # all rows of 16 beams are in the picture
    show(tab, served)
    grow(tab, lines)
    evaluated = {node for one in result.trace for node in one["evaluated"]}
    steps = [step for one in result.trace for step in one["steps"]]
    deferred = {beam["node"] for step in steps[:-1] for beam in step} - evaluated
    ended = {one["node"] for entry in result.trace for one in entry["ended"]}
    assert nodes_of(tab, ".deferred") == deferred - ended != set()
    possible = 16 * len(steps)
    counts = f"{round(result.stats.evaluated_beams * possible)} of {possible} possible"
    assert counts in tab.locator(".numbers").inner_text()
    assert "deferred beam" in tab.locator(".legend").inner_text()
    tab.get_by_text("The same as text").click()
    tab.locator(".rounds").wait_for()
    assert tab.locator(".as-text").inner_text().count("not evaluated") == len(deferred - ended)
    tab.get_by_role("button", name="Fit").click()
    pill(tab, max(deferred - ended)).click()
    about = tab.get_by_label("The token", exact=True).inner_text()
    assert "deferred beam, number" in about
    assert "evaluated\nno" in about
    assert "deferred beam, not evaluated" in tab.get_by_role("status").first.inner_text()
    tab.keyboard.press("Escape")

    beams = beams_of(result.trace, "ahead")
    done, known, best = 0, set(), {}  # best: by length
    for number, one in enumerate(result.trace, 1):
        done += len(one["steps"])
        known |= {*one["evaluated"]}
        for beam in [step[0] for step in one["steps"]] + one["ahead"]:
            path = path_to(beam["node"], beams)
            best.setdefault(len(path), path)
        if not one["ahead"]:
            continue
        seek(tab, number)
        certain = {node for before in result.trace[:number] for node in before["certain"]}
        open_text = "".join(beams[node]["text"] for node in best[max(best)] if node not in certain)
        assert tab.locator(".agreed .open").text_content() == open_text
        waiting = {beam["node"] for step in steps[:done] for beam in step if beam["node"] not in known | ended}
        assert waiting <= nodes_of(tab, ".deferred") | nodes_of(tab, ".pruned")
        assert nodes_of(tab, ".deferred").isdisjoint(known)
    assert sum(bool(one["ahead"]) for one in result.trace) > 2


def seek(tab, place):
    """Show the first phases of the run. The tree is drawn with the next frame."""
    tab.get_by_label("Place in the run").fill(str(place))
    tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_a_search_that_went_back_draws_the_beams_of_the_step(tab, served):
    """Lazy search goes back where memory is short. The beams that were ahead are dropped, and the step has others."""
    run = recording(
        "ac",
        {"evaluated": [0], "steps": [[beam(1, 0, "a"), beam(2, 0, "b")]]},
        {"evaluated": [1], "ahead": [beam(3, 1, "c")]},
        {"evaluated": [1, 2], "steps": [[beam(4, 1, "d"), beam(5, 1, "c")]], "dropped": [3], "text": "a " * 99},
    )
    show(tab, served)
    grow(tab, run)
    assert nodes_of(tab, ".best") == {1, 5}
    rows = {node: pill(tab, node).bounding_box()["y"] for node in (3, 4, 5)}
    assert rows[4] < rows[5] < rows[3]
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.get_by_text("The same as text").click()
    tab.get_by_text("Certain now").wait_for()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390  # a long text may become final at once
    seek(tab, 2)
    assert nodes_of(tab, ".deferred") == {2}
    assert tab.locator(".agreed .open").text_content() == "ac"


MOVE = """async ([frames, event, nodes]) => {
    const box = document.querySelector(".canvas"), { left, right, top, bottom } = box.getBoundingClientRect();
    const isSeen = (pill) => {
        const it = pill.firstChild.getBoundingClientRect();
        return it.left < right && it.right > left && it.top < bottom && it.bottom > top;
    };
    const seen = () => [...document.querySelectorAll(".world:last-child .pill")].filter(isSeen);
    for (let frame = 0; frame < frames || (seen().length < nodes && frame < frames + 200); frame++) {
        await new Promise(requestAnimationFrame);
        const how = frame < frames ? event : { deltaX: 2 * (frame % 2) - 1 };
        const at = { clientX: left + 500, clientY: top + 200, bubbles: true, cancelable: true };
        box.dispatchEvent(new WheelEvent("wheel", { ...at, ...how }));
    }
    return seen().map((pill) => Number(pill.dataset.node));
}"""
"""Wheel events, one per frame, without a rest. Then small ones, until this many nodes are seen. Returns these."""


def test_a_run_is_saved_as_a_page_of_its_own(tab, served, tmp_path):
    show(tab, served, prompt="</script> $%26 ab", **BEAMS)
    grow(tab)
    text = tab.locator(".agreed").inner_text()
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Save page").click()
    download.value.save_as(tmp_path / "run.html")
    page = tab.context.new_page()
    said = said_by(page)
    page.set_viewport_size({"width": 1400, "height": 900})
    page.goto((tmp_path / "run.html").as_uri())
    page.get_by_label("Speed").select_option("Infinity")
    page.get_by_role("button", name="Replay", exact=True).wait_for()
    assert page.locator(".agreed").inner_text() == text
    assert page.locator(".pill").count() == tab.locator(".pill").count() > 0
    assert page.get_by_role("button", name="Save page").count() == 0
    assert said == []


def test_a_movement_without_a_rest_draws_the_nodes_that_come_into_the_window(tab, served):
    beams, steps = 8, 300  # each beam goes on from itself: a node is drawn at its step, in the row of its beam
    lines = [[*range(beams * step + 1, beams * step + beams + 1)] for step in range(steps)]
    letters = [[beam(node, max(0, node - beams), "abcdefgh"[node % beams]) for node in line] for line in lines]
    show(tab, served)
    grow(tab, recording("b" * steps, *({"steps": [line]} for line in letters)))
    scroll = "(box) => { box.scrollTop = 200; box.scrollLeft = 200; return [box.scrollTop, box.scrollLeft]; }"
    assert tab.locator(".canvas").evaluate(scroll) == [0, 0]  # as a search in the page does
    tab.locator("[data-node='1']").wait_for()  # the tree is shown where beams go apart
    width = tab.locator(".canvas").bounding_box()["width"]
    columns = int(width // 92) - 1
    seen = tab.evaluate(MOVE, [20, {"deltaX": 400, "deltaY": 1}, beams * columns])
    first = min(seen)
    assert abs(first - beams * 8000 // 92) < 2 * beams
    assert {*range(first, first + beams * columns)} <= {*seen}
    seen = tab.evaluate(MOVE, [10, {"deltaY": 36}, beams * int(columns / 0.6)])  # to 0.56 of the size
    assert {*range(min(seen), min(seen) + beams * int(columns / 0.6))} <= {*seen}
    assert tab.locator(".pill").count() < beams * steps / 2  # the others are not drawn


def test_keys_go_through_the_tree_and_show_the_likeliest_tokens(tab, served, lm):
    show(tab, served, num_beams=2, draft="none")
    grow(tab)
    text = specbeam.generate(lm, PROMPT, raw=True, max_new_tokens=12, num_beams=2, top_logprobs=10)
    tab.locator(".canvas").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowLeft")
    about = tab.get_by_label("The token", exact=True)
    assert f"{text.sequences[0].log_probs[-2]:.4f}" in about.inner_text()
    assert about.locator(".likeliest li").count() == 10
    assert "Step 11" in tab.get_by_role("status").first.inner_text()
    tab.keyboard.press("Escape")
    assert about.count() == 0


@on_a_real_model_too
def test_a_branch_goes_on_and_its_prefix_is_cached(tab, served, lm):
    show(tab, served, view="branch", num_beams=1, draft="none")
    fill_branch(tab)
    first = specbeam.generate(lm, PROMPT, raw=True, max_new_tokens=12, top_logprobs=10)
    other = [*first.sequences[0].top_logprobs[5]][1]
    prompt = [*lm.tokenizer(PROMPT).input_ids, *first.token_ids[:5], other]
    assert tab.locator(".word").count() == len(specbeam.generate(lm, prompt, max_new_tokens=12).token_ids) > 0
    assert f"{len(prompt) - 1} of {len(prompt)} tokens" in tab.locator(".page .help").inner_text()
    assert tab.locator(".branches li").count() == 2


def test_a_race_ends_with_the_same_text(tab, served):
    show(tab, served, view="race", num_beams=1, max_tokens=24)
    fill_race(tab)
    verdict = tab.locator(".verdict").inner_text()
    passes = [lane.locator(".numbers dd").first.inner_text() for lane in tab.locator(".lane").all()]
    assert f"Same text: all 24 tokens are equal. {passes[1]} passes instead of {passes[0]}." in verdict
    assert passes[0] == "24"
    assert "by the medians of 3 runs" in verdict
    assert re.search(r"[\d.]+ s\n.*, [\d.]+ to [\d.]+ s in 3 runs", upright(tab.locator(".lane").first))
    plain, drafted = (lane.locator(".raced").inner_text() for lane in tab.locator(".lane").all())
    assert plain == drafted
    tab.get_by_role("button", name="Replay both together").click()
    tab.locator(".verdict button:not([disabled])").wait_for()


def test_a_race_of_greedy_search_and_beams_tells_where_the_texts_differ(tab, served, lm):
    show(tab, served, view="race", num_beams=4)
    tab.get_by_label("greedy against beams").check()
    fill_race(tab)
    greedy, beams = (trace_of(lm, num_beams=count).sequences[0] for count in (1, 4))
    place = next(i for i, pair in enumerate(zip(greedy.token_ids, beams.token_ids, strict=True), 1) if len({*pair}) > 1)
    verdict = f"from token {place} on. Log-probabilities: greedy {greedy.log_prob:.3f}, beams {beams.log_prob:.3f}."
    assert verdict in tab.locator(".verdict").inner_text()


def test_the_text_goes_on_from_a_token_of_a_beam_that_lost(tab, rounds, lm):
    nodes = beams_of(rounds)
    lost = rounds[-1]["steps"][-1][-1]["node"]
    path = [nodes[node]["token_id"] for node in path_to(lost, nodes)]
    pill(tab, lost).click()
    tab.get_by_role("button", name="Go on after this token").click()
    tab.get_by_text("were cached").wait_for()
    text = specbeam.generate(lm, [*lm.tokenizer(PROMPT).input_ids, *path], num_beams=4, max_new_tokens=12).text
    assert tab.locator(".branches .snippet").last.text_content() == text


@on_a_real_model_too
def test_a_chat_streams_stops_and_shows_how_an_answer_was_made(tab, served, lm):
    show(tab, served, view="chat", draft="none", max_tokens=50, temperature=0)
    tab.get_by_label("Message", exact=True).fill("Hi")
    with gate(served.engine) as passes:
        tab.keyboard.press("Enter")
        wait_for(served, lambda: served.engine.live + served.engine.waiting == 2)
        passes.release(6)
        said = tab.locator(".assistant .said")
        said.filter(has_text=re.compile(r"\S")).wait_for()
        streamed = said.text_content()
        tab.get_by_role("button", name="Stop").click()
        tab.get_by_role("button", name="Regenerate").wait_for()
    answer = specbeam.generate(lm, "Hi", max_new_tokens=50).text
    assert answer.startswith(streamed)
    assert streamed != answer
    tab.get_by_label("New tokens").fill("8")
    tab.get_by_role("button", name="Regenerate").click()
    tab.get_by_text("8 tokens in 8 passes").wait_for()
    assert said.text_content() == specbeam.generate(lm, "Hi", max_new_tokens=8).text
    assert "The limit of 8 new tokens cut it here." in tab.locator(".assistant").inner_text()
    tab.get_by_role("button", name="How was this made?").click()
    tab.locator(".messages .pill").first.wait_for()
    tab.get_by_role("button", name="Edit").click()
    tab.get_by_label("Message", exact=True).fill("Ho")
    tab.get_by_role("button", name="Send again").click()
    tab.get_by_text("8 tokens in 8 passes").wait_for()
    assert tab.locator(".messages .said").first.inner_text() == "Ho"


def test_tokens_that_a_constraint_masks_are_greyed(tab, served, lm):
    choices = ["abc", "abd", "xyz"]
    show(tab, served, num_beams=3, draft="none", structured_outputs="%0A".join([*choices, ""]))
    grow(tab)
    _, *rounds, last = map(json.loads, saved(tab).splitlines())
    trie = specbeam.TokenTrie(choices, lm)
    here = specbeam.generate(lm, PROMPT, raw=True, num_beams=3, max_new_tokens=12, constraint=trie)
    assert last["sequences"][0]["text"] == here.text
    rows = {row["after"]: row["tokens"] for one in rounds for row in one["likeliest"]}
    beams = [*beams_of(rounds).values()]
    impossible = {beam["node"] for beam in beams if beam["score"] <= -9999}  # they fill up the beams of a step
    masked = {f"masked-{after}" for after in {*rows} - impossible if rows[after][0]["masked"]}
    assert {pill.get_attribute("data-node") for pill in tab.locator(".pill.masked").all()} == masked != set()
    tab.locator(".pill:not(.masked)").first.click()
    about = tab.get_by_label("The token", exact=True)
    first = rows[beams[0]["after"]]
    assert about.locator(".likeliest .masked").count() == sum(token["masked"] for token in first) > 0
    assert about.locator(".masked button").first.inner_text().endswith("masked by the constraint")
    tab.get_by_text("The same as text").click()
    words = f"“{first[0]['text']}” {100 * np.exp(first[0]['log_prob']):.0f} %"
    assert f"Masked by the constraint: {words}" in tab.locator(".rounds li").first.inner_text()


@pytest.mark.parametrize(
    ("field", "value", "label", "says"),
    [
        ("num_beams", 50, "Beams", "num_beams=50 is more than this server's limit of 32"),
        ("structured_outputs", "a%0A" * 1001, "Only these answers", f"structured_outputs.choice: {TOO_MANY}"),
        (
            "schema",
            '{"uniqueItems": true}',
            "JSON schema",
            "the JSON schema cannot be enforced: # has uniqueItems, which is enforced for items with an enum of at "
            "most 10 values, and with maxItems 1: list the values, or leave uniqueItems out and remove what is "
            "repeated yourself",
        ),
    ],
)
def test_a_refusal_stands_beside_its_field(tab, served, field, value, label, says):
    show(tab, served, **{field: value})
    tab.get_by_role("button", name="Grow the tree").click()
    tab.get_by_role("alert").wait_for()
    field = tab.get_by_label(label)
    assert field.get_attribute("aria-invalid") == "true"
    assert tab.locator(f"#{field.get_attribute('aria-describedby')}").inner_text() == says


def test_many_tabs_get_their_texts(browser, served, lm):
    """A browser has 6 connections to a host."""
    context = browser.new_context(reduced_motion="reduce", viewport={"width": 400, "height": 300})
    tabs = {f"tab {i} tab {i}": context.new_page() for i in range(7)}
    for prompt, tab in tabs.items():
        show(tab, served, prompt=prompt, num_beams=2)
        tab.get_by_label("Speed").select_option("Infinity")
    for tab in tabs.values():
        tab.get_by_role("button", name="Grow the tree").dispatch_event("click")
    for prompt, tab in tabs.items():
        tab.get_by_role("button", name="Replay", exact=True).wait_for()
        alone = specbeam.generate(lm, prompt, raw=True, num_beams=2, max_new_tokens=12)
        assert tab.locator(".agreed .certain").text_content() == alone.text
    context.close()


@pytest.mark.parametrize("lm", [REAL], indirect=True)
@pytest.mark.parametrize(
    ("example", "what"),
    [
        ("Beams with a draft", "accepted"),
        ("One text with a draft", "accepted"),
        ("A draft that does not help", "pruned"),
        ("Beams disagree", "pruned"),
        ("A wide search", "live"),
        ("Beams that wait", "deferred"),
        ("Only these answers", "masked"),
        ("JSON by a schema", "accepted"),
        ("A drawn text", "best"),
    ],
)
def test_an_example_shows_what_it_is_about_and_ends(tab, served, example, what):
    tab.goto(served.url)
    button = tab.get_by_role("button", name=example)
    button.click()
    tab.locator(f".pill.{what}").first.wait_for()
    tab.get_by_label("Speed").select_option("Infinity")
    tab.get_by_text("Done:").wait_for()
    assert tab.locator(".cut").count() == 0  # it does not end in the middle of a sentence
    if stated := re.search(r"(\d+) (passes )?instead of (\d+)", button.inner_text()):
        assert tab.locator(".numbers dd").first.inner_text() == stated[1]
        tab.get_by_label("Draft", exact=True).select_option("none")
        tab.get_by_role("button", name="Grow the tree").click()
        tab.get_by_text(f"in {stated[3]} passes").wait_for()


def test_the_page_asks_for_the_key(browser, start, plain_lm):
    with start({"tiny": plain_lm}, access=Access(api_keys=("secret",))) as running:
        tab = browser.new_page()
        tab.goto(running.url)
        answers = {"wrong": tab.get_by_text("The key was wrong."), "secret": tab.locator("option[value=tiny]")}
        for key, answer in answers.items():
            tab.get_by_label("API key").fill(key)
            tab.get_by_role("button", name="Use this key").click()
            answer.wait_for(state="attached")
        tab.close()


def upright(locator):
    """The text of name and value pairs, whose value stands above its name."""
    return "\n".join(reversed(locator.locator(".numbers > div").all_inner_texts()[-1].split("\n")))


TOUR = [*map(json.loads, (PAGE / "tour.jsonl").read_text(encoding="utf-8").splitlines())]


@pytest.fixture
def opened(browser, served):
    """A page that was just opened, with motion, and a clock that stands still."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    tab = context.new_page()
    said = said_by(tab)
    tab.clock.install(time=0)
    tab.clock.pause_at(1000)
    tab.goto(served.url)
    needed = tab.get_by_text("The search begins with 3 beams."), tab.locator("option[value=suffix]")
    while not all(one.count() for one in needed):
        tab.clock.run_for(10)
    yield tab
    context.close()
    assert said == []


def test_an_empty_page_begins_with_a_recorded_run_and_then_it_is_the_users_turn(opened):
    line, term = opened.locator(".narration .line"), opened.locator(".narration .term")
    assert "A beam is one of" in term.inner_text()
    assert "A pass is one run" in term.inner_text()
    lines, terms, seconds = set(), set(), 0.0
    while "Your turn" not in line.inner_text():
        lines.add(line.inner_text())
        terms.add(term.inner_text())
        opened.clock.run_for(500)
        seconds += 0.5
    assert 18 < seconds < 25
    assert len(terms) == 2
    assert any(one.startswith("A draft proposes") for one in terms)
    proposed = [len(one["drafted"]) for one in TOUR if one["event"] == "round" and one["drafted"]]
    assert all(any(f"The draft proposed {count} token" in one for one in lines) for count in proposed)
    passes = TOUR[-1]["stats"]["target_passes"]
    assert f"in {passes} passes. Without a draft it takes {TOUR[0]['plain_passes']}" in line.inner_text()
    assert opened.get_by_label("Prompt", exact=True).evaluate("(one) => one === document.activeElement")


def test_the_recorded_run_can_be_paused_and_skipped_and_disturbs_nobody(opened):
    line = opened.locator(".narration .line")
    opened.clock.run_for(7000)
    opened.locator(".narration").get_by_role("button", name="Pause").click()
    opened.clock.run_for(100)
    before = line.inner_text()
    opened.clock.run_for(20_000)
    assert line.inner_text() == before
    opened.get_by_label("Beams").focus()
    opened.get_by_role("button", name="Skip").dispatch_event("click")
    opened.get_by_text("Your turn").wait_for()
    assert opened.get_by_label("Beams").evaluate("(one) => one === document.activeElement")
    opened.get_by_label("Prompt", exact=True).fill("ab")
    opened.get_by_role("button", name="Grow the tree").click()
    opened.clock.run_for(1000)
    assert opened.get_by_text("Your turn").count() == 0


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
def test_without_motion_the_recorded_run_is_a_finished_tree_and_a_list(browser, served, width, height):
    tab = browser.new_page(viewport={"width": width, "height": height}, reduced_motion="reduce")
    tab.goto(served.url)
    tab.get_by_text("Your turn").wait_for()
    assert tab.locator(".told li").count() == sum(one["event"] == "round" for one in TOUR) + 1
    assert tab.locator(".pill.best").count() > 0
    button = tab.get_by_role("button", name="Grow the tree").bounding_box()
    canvas = tab.locator(".canvas").bounding_box()
    assert canvas["y"] + canvas["height"] < height
    assert width < 1000 or button["y"] + button["height"] < height
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()


CONTRASTS = """() => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const of = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => sum + share * linear(rgb[i] / 255), 0);
    const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const card = parts(getComputedStyle(document.querySelector(".stage")).backgroundColor);
    const over = (top, below, share) => top.slice(0, 3).map((c, i) => share * c + (1 - share) * below[i]);
    return [...document.querySelectorAll(".pill")].map((pill) => {
        const [rect, text] = ["rect", "text"].map((name) => getComputedStyle(pill.querySelector(name)));
        const behind = rect.fill === "none" ? card : over(parts(rect.fill), card, Number(rect.fillOpacity));
        const ink = over(parts(text.fill), behind, Number(text.fillOpacity) * Number(text.opacity));
        const [a, b] = [of(ink), of(behind)].sort((x, y) => y - x);
        return [pill.getAttribute("class"), (a + 0.05) / (b + 0.05)];
    });
}"""
"""The class of each token in the picture, and the contrast of its text."""


def test_each_kind_of_token_has_contrast(tab, served, lazy):
    tab.goto(served.url)
    tab.get_by_text("Your turn").wait_for()
    files = [None, lazy[1], "masked"]
    seen = set()
    for what in files:
        if what == "masked":
            show(tab, served, num_beams=3, draft="none", structured_outputs="abc%0Aabd%0Axyz")
            grow(tab)
        elif what is not None:
            grow(tab, what)
        most = int(tab.get_by_label("Place in the run").get_attribute("max"))
        for place in {most, most // 2, most // 2 + 1}:
            tab.get_by_label("Place in the run").fill(str(place))
            tab.wait_for_function("(at) => document.querySelector('.player [type=range]').value == at", arg=str(place))
            for scheme in ("light", "dark"):
                tab.emulate_media(color_scheme=scheme)
                found = tab.evaluate(CONTRASTS)
                seen |= {word for kinds, _ in found for word in kinds.split()}
                assert [one for one in found if one[1] < 4.5] == [], scheme
    assert seen >= {"best", "accepted", "rejected", "drafted", "past", "pruned", "deferred", "masked", "live"}


KEPT = """(all) => all.map((one) => [...one.childNodes].filter(({ nodeName }) => !["DEL", "SMALL"].includes(nodeName))
    .map((part) => part.textContent).join(""))"""
"""The texts of hypotheses, without what they lack."""


def ascii_of(text):
    """Without characters of which a token has a part."""
    return re.sub("[^!-~]", "", text)


def test_hypotheses_are_ranked_and_what_differs_is_marked(tab, served, lm):
    for n in (4, 1):  # hypotheses that are returned, or only searched
        show(tab, served, num_beams=4, draft="none", n=n)
        grow(tab)
        how = {"num_beams": 4, "max_new_tokens": 12, "num_return_sequences": 4}
        sequences = specbeam.generate(lm, PROMPT, raw=True, **how).sequences
        rows = tab.locator(".hypotheses li")
        assert rows.locator(".score").all_inner_texts() == [f"{one.score:.3f}" for one in sequences]
        assert rows.locator("mark").count() > 0
        assert rows.first.locator("mark").count() == 0
        texts = rows.locator("p").evaluate_all(KEPT)
        assert [*map(ascii_of, texts)] == [ascii_of(one.text) for one in sequences]


def test_the_chat_has_settings_of_its_own(tab, served):
    from playwright.sync_api import TimeoutError

    asked = []
    tab.on("request", lambda request: asked.append(request) if "/rounds/" in request.url else None)
    show(tab, served, temperature=0.9, seed=3, max_tokens=5, num_beams=1)
    grow(tab)
    tab.get_by_role("button", name="Chat", exact=True).click()
    tab.get_by_label("Message", exact=True).fill("Hi")
    tab.keyboard.press("Enter")
    tab.get_by_role("button", name="Stop").or_(tab.get_by_role("button", name="Regenerate")).wait_for()
    tree, chat = [request.post_data_json for request in asked]
    assert (tree["temperature"], tree["seed"], tree["max_tokens"]) == (0.9, 3, 5)
    assert chat.keys() & {"temperature", "top_p", "top_k", "repetition_penalty", "seed", "num_beams"} == set()
    assert chat["max_tokens"] == 512
    with suppress(TimeoutError):  # the answer may end before the click
        tab.get_by_role("button", name="Stop").click(timeout=1000)
    tab.get_by_label("Temperature").fill("0.5")
    tab.get_by_label("New tokens").fill("4")
    tab.get_by_role("button", name="Regenerate").click()
    tab.get_by_text("The limit of 4 new tokens cut it here.").wait_for()
    assert asked[-1].post_data_json["temperature"] == 0.5
    tab.get_by_role("button", name="Tree", exact=True).click()
    assert tab.get_by_label("New tokens").input_value() == "5"


def test_the_chat_template_is_hidden(tab, served, lm):
    show(tab, served, num_beams=1, **{"as": "chat"})
    grow(tab)
    assert tab.locator(".agreed .prompt").text_content() == f"{PROMPT}\n"
    tab.get_by_text("The same as text").click()
    tab.locator(".rounds").wait_for()
    whole = lm.decode(trace_of_chat(lm).inputs["prompt_ids"], skip_special_tokens=False)
    assert whole in tab.locator(".as-text").text_content()


def trace_of_chat(lm):
    return specbeam.generate(lm, PROMPT, max_new_tokens=12, draft="ngram", trace=True)


def in_window(tab, locator):
    """Whether each of some elements is in the picture."""
    inside = """(all) => {
        const box = document.querySelector(".canvas").getBoundingClientRect();
        const isIn = (at) => at.left > box.left - 2 && at.right < box.right + 2
            && at.top > box.top - 2 && at.bottom < box.bottom + 2;
        return all.map((one) => isIn(one.getBoundingClientRect()));
    }"""
    return locator.evaluate_all(inside)


def test_fit_keeps_words_that_one_can_read(tab, served):
    tab.goto(served.url)
    tab.get_by_text("Your turn").wait_for()
    assert not all(in_window(tab, tab.locator(".pill.best")))
    tab.get_by_role("button", name="Fit").click()
    best = tab.locator(".pill.best")
    assert best.count() == len(TOUR[-1]["sequences"][0]["token_ids"])
    assert all(in_window(tab, best))
    letters = "(one) => parseFloat(getComputedStyle(one.querySelector('text')).fontSize)"
    assert best.first.evaluate(letters) >= 11
    words = best.locator("text:nth-child(2)").all_text_contents()
    assert "coffee" in words
    where = best.nth(15).bounding_box()  # a token of the second line
    tab.mouse.move(where["x"] + 20, where["y"] + 8)
    assert words[15] in tab.locator(".tip .token").inner_text()
    tab.locator(".canvas").focus()
    tab.keyboard.press("0")  # all in one line, too small for words: the words of the text are below
    tab.locator(".word-of-text").first.wait_for()
    text = " ".join(tab.locator(".word-of-text").all_text_contents()).replace("\u00a0", " ")
    assert text.replace(" ", "") == TOUR[-1]["sequences"][0]["text"].replace(" ", "")
    assert all(in_window(tab, tab.locator(".word-of-text")))


def test_a_run_ends_where_beams_went_apart_and_not_at_its_tail(tab, served):
    steps, apart = 60, 20  # two beams from one token on, and one before and after
    lines, nodes = [], [0]
    for step in range(1, steps + 1):
        count = 2 if apart <= step < apart + 3 else 1
        after = nodes
        nodes = [2 * step + i for i in range(count)]
        lines.append([beam(node, after[min(i, len(after) - 1)], "bc"[i]) for i, node in enumerate(nodes)])
    show(tab, served)
    grow(tab, recording("b" * steps, *({"steps": [line]} for line in lines)))
    assert all(in_window(tab, pill(tab, 2 * apart + 1)))
    assert not any(in_window(tab, pill(tab, 2 * steps)))


def test_keys_drive_a_presentation(tab, served):
    tab.goto(served.url)
    tab.get_by_text("Your turn").wait_for()
    tab.keyboard.press("Escape")  # leave the prompt
    tab.keyboard.press("?")
    keys = tab.get_by_role("dialog", name="Keys")
    assert "large type on the full screen" in keys.inner_text()
    tab.keyboard.press("Escape")
    size = "() => parseFloat(getComputedStyle(document.querySelector('.narration .line')).fontSize)"
    small = tab.evaluate(size)
    tab.keyboard.press("p")
    tab.locator(".presenting").wait_for()
    assert tab.evaluate(size) > 1.4 * small
    assert not tab.get_by_label("Prompt", exact=True).is_visible()
    place = tab.get_by_label("Place in the run")
    most = int(place.get_attribute("max"))
    tab.keyboard.press("ArrowLeft")
    assert int(place.input_value()) == most - 1
    tab.keyboard.press("ArrowRight")
    assert int(place.input_value()) == most
    tab.keyboard.press("p")
    assert tab.locator(".presenting").count() == 0
    tab.get_by_label("Prompt", exact=True).fill("p?")  # typing is no key
    assert tab.locator(".presenting").count() == 0


def fill_tree(tab):
    """A tree with masked tokens, draft tokens, and the details of a token."""
    tab.get_by_label("Only these answers").fill("abc\nabd\nxyz")
    grow(tab)
    tab.locator(".pill.masked").first.click()
    tab.get_by_label("The token", exact=True).wait_for()


def fill_race(tab):
    tab.get_by_role("button", name="Race", exact=True).last.click()
    tab.locator(".verdict").wait_for()


def fill_branch(tab):
    """A text, a branch of it in place of token 5, and the likeliest tokens of a place."""
    tab.get_by_role("button", name="Write").click()
    tab.locator(".word:not([disabled])").nth(5).click()
    tab.locator(".likeliest button").nth(1).click()
    tab.get_by_text("were cached").wait_for()
    tab.locator(".word:not([disabled])").nth(1).click()


def fill_chat(tab):
    tab.get_by_label("Message", exact=True).fill("Hi")
    tab.keyboard.press("Enter")
    tab.get_by_role("button", name="How was this made?").click()
    tab.locator(".messages .pill").first.wait_for()


@pytest.mark.parametrize("width", [pytest.param(1400, marks=pytest.mark.thorough), 390])
def test_axe_finds_no_serious_fault(browser, served, width):
    if not AXE.is_file():
        pytest.skip("axe-core is not on this machine: make .venv/npm")
    tab = browser.new_page(viewport={"width": width, "height": 844}, bypass_csp=True, reduced_motion="reduce")
    fill = {"tree": fill_tree, "race": fill_race, "branch": fill_branch, "chat": fill_chat}
    for view, act in fill.items():
        show(tab, served, view=view, **BEAMS)
        tab.evaluate(AXE.read_text(encoding="utf-8"))
        for do in (lambda _: None, act):
            do(tab)
            tab.evaluate("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            for scheme in ("light", "dark"):
                tab.emulate_media(color_scheme=scheme)
                found = tab.evaluate("async () => (await axe.run()).violations")
                bad = [one for one in found if one["impact"] in ("serious", "critical")]
                assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in bad] == [], (view, scheme)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.close()


def test_the_first_picture_waits_for_no_request_but_its_own_files(browser, served):
    tab, paths = browser.new_page(), []
    tab.route("**/v1/models", lambda route: paths.append("/held"))  # without an answer
    tab.on("response", lambda response: paths.append(response.url.removeprefix(served.url)))
    tab.goto(served.url)
    tab.locator(".canvas").wait_for()
    tab.wait_for_function("performance.getEntriesByName('first-contentful-paint').length == 1")  # a frame later
    assert {path.split("/")[1] for path in paths} == {"", "page", "held"}
    tab.close()


def test_the_files_are_small_and_served_with_a_policy(served):
    scripts = [*PAGE.rglob("*.js")]
    assert sum(file.stat().st_size for file in scripts) <= MAX_SCRIPT_BYTES
    for file in PAGE.rglob("*.*"):
        name = file.relative_to(PAGE).as_posix()
        answer = served.http.get("/" if name == "index.html" else f"/page/{name}")
        assert answer.content == file.read_bytes()
        assert HEADERS.items() <= dict(answer.headers).items()
    assert "http" not in (PAGE / "index.html").read_text()
    assert served.http.get("/page/../app.py").status_code == 404
    assert "/" not in served.http.get("/openapi.json").json()["paths"]


def test_thoughts_are_folded_above_the_answer(tab, served):
    """Events as the server of a model that thinks sends them."""
    sent = [{"event": "answer", "reasoning": "Two and two.", "content": ""}]
    sent += [{"event": "answer", "reasoning": "", "content": "Four."}]
    ended = {"text": "<think>Two and two.</think>Four.", "finish_reason": "stop", "token_ids": [], "score": 0}
    stats = {"new_tokens": 3, "target_passes": 3, "draft_passes": 0, "drafted": 0, "accepted": 0, "seconds": 1.0}
    begun = {"event": "begin", "format": 1, "model": "tiny", "draft": "none", "options": {}, "prompt": []}
    every = [begun, *sent, {"event": "end", "sequences": [ended | {"log_prob": 0}], "stats": stats}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in every)
    tab.route("**/rounds/chat", lambda route: route.fulfill(content_type="text/event-stream", body=body))
    tab.goto(f"{served.url}/#view=chat")
    tab.locator("#message").fill("What is two and two?")
    tab.get_by_role("button", name="Send", exact=True).click()
    tab.get_by_text("Four.", exact=True).wait_for()
    thoughts = tab.get_by_text("Two and two.", exact=True)
    assert not thoughts.is_visible()
    tab.locator("details.thoughts summary").click()
    assert thoughts.is_visible()
    assert "<think>" not in tab.locator(".messages").inner_text()
