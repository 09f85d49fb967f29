"""``specbeam generate``: its output, and its answers to wrong input."""

import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import specbeam
from specbeam.checkpoints.sources.registry import ALIASES
from specbeam.cli import main
from tests.cli.conftest import flags, press_ctrl_c_in
from tests.conftest import EOS, random_model


@pytest.fixture
def run(folder, specbeam_command):
    return lambda *arguments, model=folder: specbeam_command("generate", *arguments, "--model", model)


def test_json_is_the_result_and_nothing_else(run, model):
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": "never"}
    options |= {"max_new_tokens": 9, "top_logprobs": 2}
    status, out, err = run("hi", "--json", "--show-prompt", *flags(**options))
    assert status == 0
    assert len(out.splitlines()) == 1
    got, expected = json.loads(out), json.loads(json.dumps(specbeam.generate(model, "hi", **options).to_dict()))
    assert got.pop("stats")["new_tokens"] == expected.pop("stats")["new_tokens"]
    assert got == expected
    assert got.keys() == {"text", "token_ids", "sequences", "finish_reason", "receipt", "inputs"}
    names = {"text", "token_ids", "log_prob", "score", "finish_reason", "log_probs", "top_logprobs"}
    assert [one.keys() for one in got["sequences"]] == [names, names]
    assert "<bos>user: hi\nassistant: " in err


@pytest.mark.parametrize(
    ("flag", "content", "pattern"),
    [
        (
            "--json-schema",
            '{"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"]}',
            '{"a": (1|23).*',
        ),
        ("--grammar", 'start: "x" /[0-9]{2}/', "x[0-9]{2}"),
        ("--grammar", 'root ::= "x" [0-9] [0-9]', "x[0-9]{2}"),
        ("--regex", "[ab]{3}", "[ab]{3}"),
        ("--choice", "red", "red"),
        ("--labels", "red\n\n green\r\n", "red| green"),
    ],
)
def test_a_text_satisfies_its_constraint(run, tmp_path, flag, content, pattern):
    file = tmp_path / "constraint"
    file.write_text(content)
    given = content if flag in ("--regex", "--choice") else str(file)
    for more in ((), ("--num-beams", "3", "--draft", "ngram")):
        status, out, _ = run("hi", "--json", "--max-new-tokens", "40", flag, given, *more)
        (sequence,) = json.loads(out)["sequences"]
        assert status == 0
        assert re.fullmatch(pattern, sequence["text"])
        assert sequence["is_complete"] or flag == "--json-schema"  # other keys may go on


def test_a_text_that_is_cut_before_it_satisfies_its_constraint_is_called_so(run):
    says = "[the text is cut before it satisfies its constraint: raise --max-new-tokens, or bound its parts]"
    assert says in run("hi", "--max-new-tokens", "5", "--regex", "[ab]{6}")[2]
    assert says not in run("hi", "--max-new-tokens", "6", "--regex", "[ab]{6}")[2]


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_text_goes_to_standard_output_and_statistics_to_standard_error(run, model, stream):
    status, out, err = run("hi", "--max_new_tokens", "9", stream)
    assert (status, out) == (0, specbeam.generate(model, "hi", max_new_tokens=9).text + "\n")
    assert "9 tokens" in err
    assert "int8 on cpu, length]" in err


def test_a_draft_that_was_not_used_is_said(run):
    _, _, err = run("hi", "--max-new-tokens", "1", "--draft", "ngram")
    assert err.splitlines()[1].startswith("[draft proposed no tokens: ")


def test_every_option_reaches_the_engine(run, model):
    options = {"max_new_tokens": 30, "min_new_tokens": 3, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01}
    options |= {"repetition_penalty": 1.2, "typical_p": 0.95, "no_repeat_ngram_size": 4, "frequency_penalty": 0.5}
    options |= {"presence_penalty": 0.25, "seed": 5, "stop_strings": ["e"], "eos_token_id": [EOS, 7]}
    arguments = ["--logit-bias", "104=-inf", "--logit-bias", "105=2", "--bad-words-ids", "101,102", "--bad-words-ids=9"]
    arguments += ["--do-sample", "--system", "Be brief.", "--raw", "--json", *flags(**options)]
    _, out, _ = run("hi", *arguments)
    options |= {"logit_bias": {104: -math.inf, 105: 2.0}, "bad_words_ids": [[101, 102], [9]]}
    expected = specbeam.generate(model, "hi", system="Be brief.", raw=True, do_sample=True, **options)
    assert json.loads(out)["token_ids"] == expected.token_ids


def test_the_prompt_can_be_shown(run):
    _, out, _ = run("hi", "--show-prompt", "--system", "S", "--max-new-tokens", "1")
    assert out.startswith("<bos>system: S\n<bos>user: hi\nassistant: \n")


@pytest.mark.parametrize(
    ("given", "read", "prompts"),
    [(["-"], b"two\nlines\n", ["two\nlines"]), (["--prompts", "-"], b"one\n\n{two}\n", ["one", "{two}"])],
)
def test_a_dash_reads_standard_input(run, model, monkeypatch, given, read, prompts):
    """As one prompt, or as one in each line."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(read)))
    _, out, _ = run(*given, "--json", "--max-new-tokens", "5")
    expected = specbeam.generate(model, prompts, max_new_tokens=5)
    assert [json.loads(line)["token_ids"] for line in out.splitlines()] == [one.token_ids for one in expected]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", "one\n\ntwo\nthree\n"),
        ("p.jsonl", '"one"\n{"prompt": "two"}\n{"id": 3, "messages": [{"role": "user", "content": "three"}]}\n'),
    ],
)
def test_a_file_of_prompts_gives_one_line_per_prompt(run, model, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    prompts = ["one", "two", "three"]
    status, out, _ = run("--prompts", str(tmp_path / name), "--json", "--max-new-tokens", "6")
    assert status == 0
    expected = specbeam.generate(model, prompts, max_new_tokens=6)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["token_ids"] for row in rows] == [result.token_ids for result in expected]
    three = ("three", None) if name == "p.txt" else ([{"role": "user", "content": "three"}], 3)
    assert [(row["prompt"], row.get("id")) for row in rows] == [("one", None), ("two", None), three]
    assert [row["index"] for row in rows] == [0, 1, 2]
    _, out, _ = run("--prompts", str(tmp_path / name), "--max-new-tokens", "6")
    assert out == "\n".join(f"[prompt {n + 1} of 3: {prompts[n]}]\n{expected[n].text}\n" for n in range(3))


def test_a_line_may_have_options_of_its_own(run, model, tmp_path):
    own = [
        {},
        {"max_new_tokens": 3},
        {"temperature": 0.9, "seed": 7},
        {"num_beams": 3, "num_return_sequences": 2, "system": "Be brief."},
    ]
    no_options = {"category": "greeting", "choices": ["a"], "topic": 1, "num_beam_groups": None}
    lines = [json.dumps({"prompt": "hi"} | no_options | options) for options in own]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    status, out, _ = run("--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "6", "--json")
    assert status == 0
    for line, options in zip(out.splitlines(), own, strict=True):
        expected = specbeam.generate(model, "hi", **{"max_new_tokens": 6} | options)
        assert [s["token_ids"] for s in json.loads(line)["sequences"]] == [s.token_ids for s in expected.sequences]


def test_several_texts_are_numbered_and_have_their_scores(run, model):
    options = {"max_new_tokens": 6, "num_beams": 3, "num_return_sequences": 3}
    blocks = [
        f"[{number} of 3, score {s.score:.4f}, log-prob {s.log_prob:.3f}, {s.finish_reason}]\n{s.text}\n"
        for number, s in enumerate(specbeam.generate(model, "hi", **options).sequences, 1)
    ]
    assert run("hi", *flags(**options))[:2] == (0, "\n".join(blocks))
    options = {"max_new_tokens": 6, "temperature": 1.5, "seed": 1, "num_return_sequences": 2}
    _, out, _ = run("hi", *flags(**options))
    first, second = specbeam.generate(model, "hi", **options).sequences  # their scores are their log-probabilities
    assert out.startswith(f"[1 of 2, log-prob {first.log_prob:.3f}, {first.finish_reason}]\n{first.text}\n\n[2 of 2, ")
    assert out.endswith(f"\n{second.text}\n")


@pytest.mark.parametrize("name", ["texts.txt", "texts.jsonl", "texts"])
def test_the_output_can_be_a_file(run, tmp_path, name):
    (tmp_path / "p.txt").write_text("one\nö\n")
    arguments = ("--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "6", *(["--json"] * (name == "texts")))
    _, expected, _ = run(*arguments, *(["--json"] * (name == "texts.jsonl")))
    (tmp_path / name).write_text("of an earlier run")
    status, out, err = run(*arguments, "--output", str(tmp_path / name))
    assert (status, out) == (0, "")
    assert err == f"[2 prompts, 0 failed, in {tmp_path / name}]\n"
    written = (tmp_path / name).read_bytes().decode()  # carriage returns stay
    if name == "texts.txt":
        assert written == expected
    else:
        rows, in_terminal = ([json.loads(line) for line in lines.splitlines()] for lines in (written, expected))
        assert [row["prompt"] for row in rows] == ["one", "ö"]
        assert [row["token_ids"] for row in rows] == [row["token_ids"] for row in in_terminal]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["p.txt", name])


@pytest.mark.parametrize("before", [None, "of an earlier run"])
@pytest.mark.parametrize("broken", [True, False])
def test_an_output_stays_as_it_was_if_it_is_not_finished(run, tmp_path, before_passes, before, broken):
    """Each prompt fails, or Ctrl-C is pressed after the first text."""
    before_passes(fail if broken else press_ctrl_c_in(4))
    prompts, output = tmp_path / "p.jsonl", tmp_path / "out.txt"
    prompts.write_text('{"prompt": "hi", "max_new_tokens": 1}\n"hi"\n')
    if before is not None:
        output.write_text(before)
    status, out, err = run("--prompts", str(prompts), "--output", str(output))
    why = f"no prompt was finished, so {output} was" if broken else f"interrupted: {output} was"
    assert (status, out) == (1 if broken else 130, "")
    *failures, last = err.splitlines()
    assert (last, len(failures)) == (f"specbeam: {why} not written", 2 if broken else 0)
    assert (output.read_text() if output.exists() else None) == before
    assert {*tmp_path.iterdir()} <= {output, prompts}


def fail(*_):
    raise RuntimeError("it broke")


@pytest.mark.skipif(os.name == "nt", reason="devices and pipes")
def test_a_device_or_a_pipe_may_be_the_output(run, model):
    assert run("hi", "--max-new-tokens", "2", "--output", os.devnull)[:2] == (0, "")
    assert not os.path.isfile(os.devnull)
    reading, writing = os.pipe()
    assert run("hi", "--max-new-tokens", "2", "--output", f"/dev/fd/{writing}")[:2] == (0, "")
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        assert pipe.read() == specbeam.generate(model, "hi", max_new_tokens=2).text + "\n"


def test_only_newlines_end_a_line_and_a_byte_order_mark_is_no_text(run, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n')
    status, out, _ = run("--prompts", str(tmp_path / "p.jsonl"), "--json", "--max-new-tokens", "4", "--raw")
    assert status == 0
    assert json.loads(out)["stats"]["prompt_tokens"] == 5


@pytest.mark.parametrize("as_json", [False, True])
def test_a_terminal_that_lacks_characters_is_no_crash(run, model, terminal, as_json):
    expected = specbeam.generate(model, "é", max_new_tokens=40, temperature=1.5, seed=1).text
    assert not expected.isascii()
    screen = terminal(encoding="ascii")
    form = ["--json"] if as_json else []
    status, _, _ = run("é", "--max-new-tokens", "40", "--temperature", "1.5", "--seed", "1", *form)
    assert status == 0
    if as_json:
        assert json.loads(screen.text())["text"] == expected
    else:
        assert screen.text() == "".join(c if c.isascii() else "?" for c in expected) + "\n"


@pytest.mark.parametrize("words", [(), ("generate",), ("models", "show")])
def test_help_is_a_command_too(specbeam_command, words):
    status, out, _ = specbeam_command("help", *words)
    assert (status, out) == specbeam_command(*words, "--help")[:2]
    assert out.startswith(f"usage: {' '.join(['specbeam', *words])} [")


SLOW_MODULES = {"torch", "numpy", "transformers", "pyarrow"}


COMMANDS = [
    ["--help"],
    ["generate", "--help"],
    ["generate", "--prompts", "/not/there.txt"],
    ["generate", "hi", "--model", "/not/there"],
    ["generate", "hi", "--draft", "foo"],
    ["batch", "/not/there.jsonl", "out.jsonl"],
    ["tokens", "hi", "--model", "not-there.gguf"],
]
RUN = """
import json, sys
from specbeam.cli import main
for command in json.loads(sys.argv[1]):
    try: status = main(command)
    except SystemExit as stop: status = stop.code
    print("ended", status, *sys.modules)
"""


def test_help_and_missing_files_need_no_slow_imports(tmp_path):
    """NumPy alone, which checks of options import, takes a tenth of a second."""
    run = [sys.executable, "-c", RUN, json.dumps(COMMANDS)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path)
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ended ")]
    for command, (status, *modules) in zip(COMMANDS, ends, strict=True):
        assert int(status) == (0 if "--help" in command else 2), done.stderr
        assert {*modules} & SLOW_MODULES <= (set() if "--help" in command else {"numpy"})


COMPLETE = """
import json, os, sys
from specbeam.cli import main
for line, file in json.loads(sys.argv[1]).items():
    if not os.fork():
        os.environ |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_STDOUT_FILENAME": file}
        os._exit(main([]) or 1)
    assert os.wait()[1] == 0
"""
COMPLETIONS = {
    "specbeam gen": {"generate"},
    "specbeam generate hi --draft ": {"ngram", "suffix", "mtp", *ALIASES},
    "specbeam batch --model g": {"gemma3-270m", "gemma3-1b-it", "gemma3-4b-it"},
    "specbeam models show g": {"gemma3-270m", "gemma3-1b-it", "gemma3-4b-it"},
    "specbeam generate --backend t": {"torch", "transformers"},
    "specbeam generate --quantize int": {"int8", "int4"},
    "specbeam batch --num-beam": {"--num-beams", "--num-beam-groups"},
    "specbeam help ladd": {"ladder"},
}


@pytest.mark.skipif(os.name == "nt", reason="fork")
def test_the_shell_completes(tmp_path):
    """As argcomplete's script for bash asks, each line in a process of its own."""
    pytest.importorskip("argcomplete")
    files = {line: str(tmp_path / f"{number}") for number, line in enumerate(COMPLETIONS)}
    how = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    command = [sys.executable, "-c", COMPLETE, json.dumps(files)]
    done = subprocess.run(command, env=os.environ | how, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line, expected in COMPLETIONS.items():
        assert {word.strip() for word in Path(files[line]).read_text().split("\n")} == expected, line


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == specbeam.__version__


@pytest.fixture(scope="module")
def endless(save):
    """The arguments for a text that takes hours."""
    folder = save(random_model("llama", max_position_embeddings=100_000))
    return ["generate", "hi", "--max-new-tokens", "90000", "--min-new-tokens", "90000", "--model", str(folder)]


def test_ctrl_c_keeps_the_partial_text(endless, terminal, capsys):
    screen = terminal(interrupt_at="")  # as soon as anything is shown
    assert main([*endless, "--stream"]) == 130
    assert screen.text().endswith("\n")
    err = capsys.readouterr().err
    assert "interrupted" in err
    assert "cancelled" in err


def test_ctrl_c_keeps_the_partial_result(endless, capsys, before_passes):
    before_passes(press_ctrl_c_in(5))
    assert main([*endless, "--json"]) == 130
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["finish_reason"] == "cancelled"
    assert len(result["token_ids"]) == 5  # the pass is ended first
    assert err == "specbeam: interrupted\n"


@pytest.mark.parametrize("beams", ["1", "3"])
def test_a_draft_changes_the_numbers_only(run, folder, beams):
    asked = ("hi hi hi", "--num-beams", beams, "--max-new-tokens", "20")
    plain = run(*asked)[:2]
    for draft in ("ngram", "suffix", folder):
        status, out, err = run(*asked, "--draft", draft, "--num-draft-tokens", "4", "--draft-width", "auto")
        assert (status, out) == plain
        assert "steps per target pass" in err or draft != folder


def test_a_corpus_is_a_source_of_drafts(run, model, tmp_path):
    text = specbeam.generate(model, "hi", max_new_tokens=20).token_ids
    corpus = tmp_path / "earlier.jsonl"
    corpus.write_text(json.dumps(text) + "\n")
    drafting = ("--draft", "suffix", "--draft-corpus", str(corpus), "--num-draft-tokens", "8")
    status, out, _ = run("hi", "--max-new-tokens", "20", "--json", *drafting)
    assert status == 0
    assert json.loads(out)["token_ids"] == text
    assert json.loads(out)["stats"]["target_passes"] < 15


def test_the_trace_has_every_round(run):
    status, out, _ = run("hi hi", "--max-new-tokens", "12", "--draft", "ngram", "--trace", "--no-stream")
    assert status == 0
    assert "round   1  " in out
    status, out, _ = run("hi hi", "--max-new-tokens", "12", "--num-beams", "2", "--trace", "--json")
    assert len(json.loads(out)["trace"]) == 12


def test_a_recording_has_a_line_for_each_round(run, tmp_path):
    file = tmp_path / "run.jsonl"
    how = ("hi hi", "--max-new-tokens", "12", "--num-beams", "2", "--draft", "ngram")
    status, out, _ = run(*how, "--record", str(file))
    assert status == 0
    assert "round" not in out
    first, *rounds, last = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    assert (first["event"], first["draft"], first["options"]["num_beams"]) == ("begin", "ngram", 2)
    assert last["sequences"][0]["text"] == out.removesuffix("\n")
    assert len(rounds) == last["stats"]["target_passes"]
    assert all(len(row["tokens"]) == 10 for one in rounds for row in one["likeliest"])
    assert [*tmp_path.iterdir()] == [file]
