"""The figures of benches: the files that are kept can be read, and two runs can be compared."""

import argparse
import asyncio
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import needs_torch

pytestmark = needs_torch  # the programs import it
BENCH = Path(__file__).parent.parent / "bench"


@pytest.fixture(autouse=True)
def bench(monkeypatch):
    """The programs of bench import each other by their names."""
    monkeypatch.syspath_prepend(str(BENCH))


def figures_of(path):
    from figures import Figures

    return Figures.read(path)


def run_bench(program, *words):
    """Run a program of bench in a process of its own. Returns what it prints."""
    command = [sys.executable, str(BENCH / program), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_index_names_every_program_and_the_pages_with_its_figures():
    rows = re.findall(r"^\| `(\w+\.py)` \|.*\| (.*) \|$", (BENCH / "README.md").read_text(), re.MULTILINE)
    for program, pages in rows:
        for page in re.findall(r"`(.*?)`", pages):
            assert f"bench/{program}" in (BENCH.parent / page).read_text(), f"{page} has no figures of {program}"
    # These have no figures of their own.
    tools = {"compare.py", "chart.py", "random_gguf.py", "serving_vllm.py", "server_clients.py"}
    programs = {path.name for path in BENCH.glob("*.py") if "__main__" in path.read_text()}
    assert programs - tools == {program for program, _ in rows}


def test_kept_files_are_named_after_their_run():
    for path in BENCH.glob("results/*.json"):
        run = figures_of(path)
        assert path.stem.endswith(f"-{run.date}-{run.commit}")
        assert all(figure.min <= figure.value <= figure.max for figure in run.figures)


@pytest.mark.parametrize(
    ("unit", "now", "verdict", "status"),
    [
        ("tokens/s", [80.0, 81.0], "worse", 1),
        ("tokens/s", [120.0, 121.0], "better", 0),
        ("tokens/s", [97.0, 98.0], "noise", 0),
        ("tokens/s", [60.0, 99.5], "noise", 0),  # the ranges overlap
        ("ms", [120.0, 121.0], "worse", 1),
        ("ms", [80.0, 81.0], "better", 0),
    ],
)
def test_a_run_is_worse_if_it_lost_more_than_noise_and_a_file_without_figures_is_refused(
    tmp_path, monkeypatch, capsys, unit, now, verdict, status
):
    import compare
    from figures import Figures

    old = Figures("2026-01-01", "abc", "a machine", "python bench/x.py")
    words = ["compare"]
    for run, samples in ((old, [99.0, 100.0, 101.0]), (replace(old, commit="def", figures=[]), now)):
        run.add("model", "greedy", unit=unit, samples=samples)
        words.append(str(tmp_path / f"{run.commit}.json"))
        run.write(Path(words[-1]))
    monkeypatch.setattr(sys, "argv", words)
    assert compare.main() == status
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"| {verdict} |")
    Path(words[-1]).write_text("[]")
    assert compare.main() == 2
    assert "holds no figures" in capsys.readouterr().err


@pytest.fixture
def programs(tmp_path):
    """Fifteen problems in the format of HumanEval."""
    rows = [
        {"task_id": f"T/{name}", "prompt": f"def {name}(x):\n", "entry_point": name, "test": "def check(f): pass"}
        for name in "abcdefghijklmno"
    ]
    return write_rows(tmp_path / "programs.jsonl", rows)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def asked(*words):
    from prompts import add_prompt_options, kinds

    parser = argparse.ArgumentParser()
    add_prompt_options(parser)
    return kinds(parser.parse_args([*map(str, words)]))


def test_prompts_are_drawn_by_a_seed_ten_of_each_kind(programs):
    drawn = asked("--data", programs)
    problems, chats = drawn["programs, completed"], drawn["programs, asked"]
    assert len(problems) == len({ask.text for ask in problems}) == 10
    for problem, chat in zip(problems, chats, strict=True):
        before = "Complete this Python function. Answer with the whole function.\n\n```python\n"
        assert (problem.raw, chat.raw, chat.text) == (True, False, f"{before}{problem.text}```")
    assert asked("--data", programs) == drawn != asked("--data", programs, "--seed", 1)
    assert asked("--data", programs, "--prompts", 3)["programs, asked"] == chats[:3]  # a shorter run is part of it
    assert {kind: len(some) for kind, some in asked().items()} == {"coding": 10, "prose": 10}


def test_categories_can_be_one_kind(tmp_path):
    categories = ["writing", "rag", "roleplay"] * 8
    rows = [{"question_id": i, "category": name, "turns": [f"{name} {i}"]} for i, name in enumerate(categories)]
    path = write_rows(tmp_path / "questions.jsonl", rows)
    drawn = asked("--data", path, "--categories", "writing+roleplay", "rag")
    assert {kind: len(some) for kind, some in drawn.items()} == {"writing+roleplay": 10, "rag": 8}
    assert {ask.text.split()[0] for ask in drawn["writing+roleplay"]} == {"writing", "roleplay"}


def test_lazy_beams_are_measured_prompt_by_prompt(programs, tmp_path, monkeypatch, capsys):
    import lazy
    from toy import write_model

    found = tmp_path / "found.json"
    words = ["lazy", str(write_model(tmp_path / "model", vocab_size=600, context=600)), "--data", str(programs)]
    words += ["--draft", "ngram", "--num-beams", "2", "--tokens", "4", "--json", str(found)]
    ratios = iter([0.5, 1.0, 1.0, 2.0, 2.0, 2.0, 1.0, 4.0])  # the first is slow, and is run five times more
    take_turns = lazy.take_turns

    def timed(lm, ask, options, methods, repeats, first):
        """A prompt, where methods are as much faster than plain beams as a list says."""
        seconds, results = take_turns(lm, ask, options, methods, repeats, first)
        if "share_prefix" in options and not ask.raw:
            ratio = next(ratios)
            seconds = {name: [1.0 if name == "plain" else 1 / ratio] for name in seconds}
        return seconds, results

    words += ["--prompts", "3"]
    monkeypatch.setattr(lazy, "take_turns", timed)
    monkeypatch.setattr(sys, "argv", words)
    assert lazy.main() == 0
    kept = {figure.name: figure for figure in figures_of(found).figures}
    ratio = kept["programs, asked / 2 beams / with ngram"]
    assert (ratio.min, ratio.value, ratio.max) == (1.0, 1.5, 4.0)  # 1.5 is the median of six
    assert kept["programs, asked / 2 beams / with ngram / share"].value == 1.0
    methods = ("plain", "lazy", "needed", "oracle with ngram")
    assert {f"programs, completed / 2 beams / {method}" for method in methods} <= {*kept}
    assert "programs, asked, 2 beams, 3 prompts, same texts" in capsys.readouterr().out

    def wrong(*given, **how):
        seconds, results = take_turns(*given, **how)
        empty = {name: replace(one, sequences=[]) for name, one in results.items()}
        return seconds, empty | {"plain": results["plain"]}

    monkeypatch.setattr(lazy, "take_turns", wrong)
    for more, count in ((["--minutes", "1e-6"], 1), (["--skip", "1", "--ends"], 2)):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        assert lazy.main() == 1
        out = capsys.readouterr().out
        assert f"programs, asked, 2 beams, {count} prompts, DIFFERENT texts of {count} prompts" in out
        assert ("1 prompts of each kind were measured, no more" in out) == ("--minutes" in more)
        assert ("oracle" in out) == ("--ends" not in more)


def test_texts_that_a_batch_or_a_draft_changes_are_counted(programs, tmp_path, monkeypatch, capsys):
    import same_text
    from toy import write_model

    calls = []

    def other(given):
        """An engine whose batches change the third text, and whose end token is 9."""

        def run(method, way, prompts):
            calls.append((way, [*prompts]))
            return [[7 if way == "batch of 8" and number == 2 else 8, 9, number] for number in prompts]

        return "1.0", run, {9}

    def run(*words):
        words = ["same_text", model, "--data", str(programs), "--work", str(tmp_path / "work"), *words]
        monkeypatch.setattr(sys, "argv", words)
        same_text.main()

    model = str(write_model(tmp_path / "model", vocab_size=600, context=600))
    monkeypatch.setitem(same_text.ENGINES, "llama.cpp", other)
    run("--engines", "specbeam, int8", "--prompts", "9", "--tokens", "4")
    run("--engines", "llama.cpp", "--prompts", "8", "--ways", "alone", "--methods", "greedy")
    run("--engines", "llama.cpp", "--prompts", "10", "--minutes", "0")  # there is no time for more
    run("--engines", "llama.cpp", "--prompts", "10")
    greedy_and_sampled = sorted([number] for number in [*range(10)] * 2)  # nothing twice
    assert sorted(numbers for way, numbers in calls if way == "alone") == greedy_and_sampled
    assert [numbers for way, numbers in calls if way == "batch of 8"] == [[*range(8)]] * 2 + [[8, 9]] * 2
    run("--json", str(tmp_path / "found.json"))
    rows = capsys.readouterr().out.splitlines()
    assert "| specbeam, int8 | " + " | ".join(["0 of 9"] * 6) + " |" in rows
    assert "| llama.cpp | 1 of 10 | 0 of 10 | 1 of 10 | 0 of 10 | (none) | (none) |" in rows
    found = figures_of(tmp_path / "found.json")
    assert found.settings["llama.cpp"] == "1.0"
    assert found.missing["model / llama.cpp / 4 beams / lookups"] == "(none)"
    changed = {(figure.value, figure.unit) for figure in found.figures if "llama" in figure.name}
    assert changed == {(0, "changed of 10 texts"), (1, "changed of 10 texts")}


def test_clients_note_each_frame_with_text_and_how_the_text_ended():
    """Against a server that is no part of this project, whose frames come in pieces."""
    from server_clients import ask_all

    frames = [
        b'data: {"choices": [{"text": "", "finish_reason": null}]}\n\n',
        b'data: {"choices": [{"text": "one", "finish_reason": null}]}\n\ndata: {"choi',
        b'ces": [{"delta": {"content": " two"}, "finish_reason": "length"}]}\n\n',
        b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n',
    ]

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r")[0])
        asked = json.loads(await reader.readexactly(size))
        writer.write(b"HTTP/1.1 %d .\r\n\r\n" % asked["status"])
        for frame in frames:
            writer.write(frame)
            await writer.drain()
        writer.close()

    async def ask():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await ask_all(port, "/v1/completions", [{"status": 200}, {"status": 200}, {"status": 429}])

    *selections, refused = asyncio.run(ask())["answers"]
    for selection in selections:
        assert (selection["status"], selection["text"], selection["finish_reason"]) == ("200", "one two", "length")
        assert len(selection["times"]) == 2
    assert refused["status"] == "429"
    assert "usage" in refused["body"]


def test_a_server_that_ends_gives_an_error_instead_of_answers():
    from server_clients import ask_all

    async def ask():
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        return await ask_all(port, "/v1/completions", [{}, {}])

    assert "no connection" in asyncio.run(ask())["error"]


DYING_SERVER = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"build_info": "b1"}')

    def do_POST(self):
        print("FarError: the engine has died", flush=True)
        os._exit(1)

HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


@pytest.mark.thorough
def test_a_short_run_of_server_has_every_row(tmp_path):
    import server
    from toy import write_model

    model = write_model(tmp_path / "model", vocab_size=600, context=4200)
    (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}")
    found = tmp_path / "found.json"
    dying = tmp_path / "dying"
    dying.write_text(f"#!{sys.executable}\n{DYING_SERVER}")
    dying.chmod(0o755)
    how = ["--llama-server", dying, "--json", found, "--repeats", 1, "--tokens", 4, "--clients", 1, 8]
    run_bench("server.py", model, *how)
    kept = figures_of(found)
    names = {figure.name.removeprefix("model / ") for figure in kept.figures}
    for name in ("1 greedy / llama.cpp", "8 sampled / llama.cpp"):
        assert "FarError: the engine has died" in kept.missing[f"model / {name}"]
    for method in server.METHODS:
        assert f"share of the engine / 8 {method}" in names
        for clients in (1, 8):
            times = {f"{what}, p{share}" for what in ("first token", "between tokens") for share in (50, 99)}
            assert {f"{clients} {method} / specbeam / {time}" for time in times} <= names
    assert "4 beams / specbeam" in names
    assert "first token of a turn, 2,000 tokens / specbeam / second turn over first" in names


@pytest.mark.thorough
def test_a_short_soak_finds_nothing():
    command = [sys.executable, "-m", "tests.soak", "--minutes", "0.6", "--patience", "100", "--seed", "3"]
    done = subprocess.run(command, cwd=BENCH.parent, capture_output=True, text=True, timeout=400)
    assert "nothing wedged" in done.stdout, done.stdout + done.stderr


@pytest.mark.thorough
def test_a_short_run_of_serving_has_every_row(tmp_path):
    from toy import write_model

    model, found = write_model(tmp_path / "model", vocab_size=600, context=4200), tmp_path / "found.json"
    shown = run_bench("serving.py", model, "--large", model, "--json", found, "--repeats", 1, "--tokens", 4)
    rows = {line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines() if line.startswith("| ")}
    without_vllm = {f"over vLLM, {case}" for case in ("32 greedy", "32 sampled with top_p", "8 x 4 beams")}
    names = {figure.name.replace(" / ", ", ").removeprefix("model, ") for figure in figures_of(found).figures}
    assert names == rows - without_vllm - {"figure", "---"}
