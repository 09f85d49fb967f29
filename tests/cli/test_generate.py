"""``specbeam generate``: its output, and its answers to wrong input."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest

import specbeam
from specbeam.backends.cpu import CpuBackend
from specbeam.cli import main
from tests.conftest import EOS, random_model


@pytest.fixture
def run(folder, specbeam_command):
    return lambda *arguments, model=folder: specbeam_command("generate", *arguments, "--model", model)


def test_json_is_the_result_and_nothing_else(run, model):
    status, out, err = run("hi", "--json", "--max-new-tokens", "9", "--show-prompt")
    assert status == 0
    assert len(out.splitlines()) == 1
    got, expected = json.loads(out), specbeam.generate(model, "hi", max_new_tokens=9)
    assert set(got) == {"text", "token_ids", "sequences", "finish_reason", "stats"}
    assert (got["text"], got["token_ids"], got["finish_reason"]) == (expected.text, expected.token_ids, "length")
    assert got["sequences"] == [
        {"text": expected.text, "token_ids": expected.token_ids, "score": pytest.approx(expected.sequences[0].score)}
    ]
    assert got["stats"]["new_tokens"] == 9
    assert "<bos>user: hi\nassistant: " in err


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_text_goes_to_standard_output_and_statistics_to_standard_error(run, model, stream):
    status, out, err = run("hi", "--max_new_tokens", "9", stream)
    assert (status, out) == (0, specbeam.generate(model, "hi", max_new_tokens=9).text + "\n")
    assert "9 tokens" in err


def test_every_option_reaches_the_engine(run, model):
    options = {
        "max_new_tokens": 30,
        "min_new_tokens": 3,
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "seed": 5,
        "stop_strings": ["e"],
        "eos_token_id": [EOS, 7],
    }
    arguments = ["--do-sample", "--system", "Be brief.", "--raw", "--json"]
    for name, value in options.items():
        for one in value if isinstance(value, list) else [value]:
            arguments += [f"--{name.replace('_', '-')}", str(one)]
    _, out, _ = run("hi", *arguments)
    expected = specbeam.generate(model, "hi", system="Be brief.", raw=True, do_sample=True, **options)
    assert json.loads(out)["token_ids"] == expected.token_ids


def test_the_prompt_can_be_shown(run):
    _, out, _ = run("hi", "--show-prompt", "--system", "S", "--max-new-tokens", "1")
    assert out.startswith("<bos>system: S\n<bos>user: hi\nassistant: \n")


def test_a_dash_reads_standard_input(run, monkeypatch):
    _, expected, _ = run("two\nlines", "--json", "--max-new-tokens", "5")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"two\nlines\n")))
    _, out, _ = run("-", "--json", "--max-new-tokens", "5")
    assert json.loads(out)["token_ids"] == json.loads(expected)["token_ids"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", "one\n\ntwo\nthree\n"),
        (
            "p.jsonl",
            '"one"\n{"prompt": "two"}\n{"id": 3, "messages": [{"role": "user", "content": "three"}]}\n',
        ),
    ],
)
def test_a_file_of_prompts_gives_one_line_per_prompt(run, model, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    status, out, _ = run("--prompts", str(tmp_path / name), "--json", "--max-new-tokens", "6")
    assert status == 0
    expected = specbeam.generate(model, ["one", "two", "three"], max_new_tokens=6)
    assert [json.loads(line)["token_ids"] for line in out.splitlines()] == [r.token_ids for r in expected]
    _, out, _ = run("--prompts", str(tmp_path / name), "--max-new-tokens", "6")
    assert out == "".join(r.text + "\n" for r in expected)


def test_beams_are_printed_best_first(run, model):
    beams = ["--num-beams", "3", "--num-return-sequences", "2", "--length-penalty", "0.5", "--early-stopping", "never"]
    _, out, _ = run("hi", "--json", "--max-new-tokens", "8", *beams)
    options = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": "never"}
    expected = specbeam.generate(model, "hi", max_new_tokens=8, **options)
    got = json.loads(out)["sequences"]
    assert [s["token_ids"] for s in got] == [s.token_ids for s in expected.sequences]
    assert [s["score"] for s in got] == pytest.approx([s.score for s in expected.sequences])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give one of PROMPT"),
        (("hi", "--num-beams", "2", "--num-return-sequences", "3"), "num_return_sequences=3 is not allowed"),
        (("hi", "--early-stopping", "maybe"), "early_stopping='maybe' is not allowed"),
        (("hi", "--prompts", "x.txt"), "give one of PROMPT"),
        (("",), "the prompt is empty"),
        (("hi", "--temperature", "-1"), "temperature=-1.0 is not allowed"),
        (("hi", "--top-p", "1.5"), "top_p=1.5 is not allowed"),
        (("hi", "--max-new-tokens", "0"), "max_new_tokens=0 is not allowed"),
        (("hi", "--max-new-tokens", "many"), "invalid int value: 'many'"),
        (("hi", "--max-tokens", "5"), "unrecognized arguments: --max-tokens"),
        (("hi", "--backend", "gpu"), "unknown backend 'gpu'"),
        (("hi", "--dtype", "int1"), "unknown dtype 'int1'"),
        (("hi", "--device", "cuda:77"), "device 'cuda:77' cannot be used"),
        (("x" * 300, "--raw"), "the prompt has 300 tokens"),
        (("--prompts", "/not/there.txt"), "/not/there.txt cannot be read: No such file"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run, arguments, says):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", b"\n\n", "holds no prompts"),
        ("p.txt", b"caf\xe9", "not UTF-8"),
        ("p.txt", b"good\n" + b"x" * 3000, "line 2: the prompt has"),
        ("p.jsonl", b'"good"\n{"prompt"', "line 2 is not JSON"),
        ("p.jsonl", b'{"question": "x"}', 'neither "prompt" nor "messages", but \'question\''),
        ("p.jsonl", b"3", "not int"),
        ("p.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("p.jsonl", b'"\\ud800"', "half a surrogate"),
    ],
)
def test_a_bad_file_of_prompts_names_the_line(run, tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    status, out, err = run("--prompts", str(tmp_path / name))
    assert (status, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1


def test_only_newlines_end_a_line_and_a_byte_order_mark_is_no_text(run, tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n')
    status, out, _ = run("--prompts", str(tmp_path / "p.jsonl"), "--json", "--max-new-tokens", "4", "--raw")
    assert status == 0
    assert json.loads(out)["stats"]["prompt_tokens"] == 5


def test_a_prompt_that_fails_does_not_take_the_others_along(run, tmp_path, monkeypatch):
    (tmp_path / "p.txt").write_text(f"one\n{'x' * 80}\ntwo\n")
    forward = CpuBackend.forward

    def failing(self, segments):
        if any(len(s.tokens) > 60 for s in segments):
            raise RuntimeError("it broke")
        return forward(self, segments)

    monkeypatch.setattr(CpuBackend, "forward", failing)
    status, out, err = run("--prompts", str(tmp_path / "p.txt"), "--json", "--max-new-tokens", "4")
    assert status == 1
    assert len(out.splitlines()) == 2
    assert err.splitlines() == [f"specbeam: {tmp_path}/p.txt line 2 failed: RuntimeError: it broke"]


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


@pytest.mark.parametrize("model", ["nothing-like-it", "/not/there", "not-there.gguf", "~no-such-user/x"])
def test_a_bad_model_is_one_line_and_status_2(run, model):
    status, out, err = run("hi", model=model)
    assert (status, out) == (2, "")
    assert model in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [(), ("nonsense",), ("models",), ("models", "show")])
def test_wrong_commands(specbeam_command, arguments):
    assert specbeam_command(*arguments)[0] == 2


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == specbeam.__version__


@pytest.fixture(scope="module")
def endless(save):
    """The arguments for a text that takes hours."""
    folder = save(random_model("llama", max_position_embeddings=100_000))
    return ["generate", "hi", "--max-new-tokens", "90000", "--min-new-tokens", "90000", "--model", str(folder)]


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_keeps_the_partial_text(endless):
    process = subprocess.Popen(
        [sys.executable, "-m", "specbeam", *endless], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(2)  # it has begun
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"interrupted" in err
    assert b"cancelled" in err
    assert out.endswith(b"\n")


def test_ctrl_c_keeps_the_partial_result(endless, capsys, monkeypatch):
    forward, passes = CpuBackend.forward, []

    def interrupted(self, segments):
        passes.append(segments)
        if len(passes) == 5:
            signal.raise_signal(signal.SIGINT)
        return forward(self, segments)

    monkeypatch.setattr(CpuBackend, "forward", interrupted)
    assert main([*endless, "--json"]) == 130
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["finish_reason"] == "cancelled"
    assert len(result["token_ids"]) == 4
    assert err == "specbeam: interrupted\n"


def test_a_reader_that_goes_away_is_no_crash(folder):
    command = f"{sys.executable} -m specbeam generate hi --model {folder} --max-new-tokens 200 | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stdout
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("draft", ["ngram", "suffix", "model"])
@pytest.mark.parametrize("beams", ["1", "3"])
def test_a_draft_changes_the_numbers_only(run, folder, draft, beams):
    drafting = ("--draft", folder if draft == "model" else draft, "--num-draft-tokens", "4", "--draft-width", "auto")
    plain = run("hi hi hi", "--num-beams", beams, "--max-new-tokens", "20")
    status, out, err = run("hi hi hi", "--num-beams", beams, "--max-new-tokens", "20", *drafting)
    assert (status, out) == plain[:2]
    assert "steps per target pass" in err or draft != "model"


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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--draft-corpus", "x"), "--draft-corpus goes with --draft suffix"),
        (("--num-draft-tokens", "3"), "num_draft_tokens=3 has no effect without a draft"),
        (("--draft", "ngram", "--draft-width", "wide"), "invalid number value: 'wide'"),
        (("--draft", "nowhere"), "nowhere"),
        (("--num-beams", "4", "--num-beam-groups", "3"), "num_beam_groups=3"),
    ],
)
def test_wrong_drafts_are_refused_in_one_line(run, arguments, says):
    status, out, err = run("hi", *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert len(err.splitlines()) == 1
