"""What cannot be done is one line on standard error that says what is wrong, and status 2."""

import os

import pytest

from tests.conftest import needs_torch

MISSING = "not/fetched"
"""A hub id. It is not looked up before a model is loaded, and that is after all arguments were checked."""


@pytest.fixture
def refused(specbeam_command):
    """Runs a command that must be refused. Returns the line that says why."""

    def refused(*arguments):
        status, out, err = specbeam_command(*arguments)
        assert (status, out) == (2, "")
        (line,) = err.splitlines()
        return line

    return refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give a command: generate, "),
        (("nonsense",), "unknown command 'nonsense': give generate, "),
        (("genrate", "hi"), "unknown command 'genrate': did you mean 'generate'?"),
        (("help", "genrate"), "unknown command 'genrate': did you mean 'generate'?"),
        (("models",), "required"),
        (("models", "shwo"), "unknown action 'shwo': did you mean 'show'?"),
        (("models", "show"), "required"),
        (("generate", "hi", "--model", "nothing-like-it"), "nothing-like-it"),
        (("generate", "hi", "--model", "not-there.gguf"), "not-there.gguf"),
        (("generate", "hi", "--model", "~no-such-user/x"), "~no-such-user/x"),
        (("tokens", "hi", "--model", "./nowhere"), "there is no file or folder ./nowhere"),
        pytest.param(("ladder", "hi", "--model", "/not/there"), "/not/there", marks=needs_torch),
    ],
)
def test_commands_and_models_that_are_not_there(refused, arguments, says):
    assert says in refused(*arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate",), "give one of PROMPT"),
        (("generate", "hi", "--prompts", "x.txt"), "give one of PROMPT"),
        (("generate", "hi", "--num-beams", "2", "--num-return-sequences", "3"), "--num-return-sequences=3 is not al"),
        (("generate", "hi", "--early-stopping", "maybe"), "--early-stopping='maybe' is not allowed"),
        (
            ("generate", "hi", "--temperature=0", "--do-sample"),
            "--temperature=0 is greedy and contradicts --do-sample=True",
        ),
        (("generate", "hi", "--num_beams=2", "--num_return_sequences=3"), "specbeam: --num_return_sequences=3 is not"),
        (("transcribe", "x.wav", "--num-return-sequences", "9", "--num-beams=2"), "give at most --num-beams=2"),
        (("generate", "hi", "--temperature", "-1"), "temperature=-1.0 is not allowed"),
        (("generate", "hi", "--max-new-tokens", "0"), "specbeam: --max-new-tokens=0 is not allowed"),
        (("generate", "hi", "--logit-bias", "5"), "argument --logit-bias: invalid ID=X value: '5'"),
        (("generate", "hi", "--bad-words-ids", "x"), "argument --bad-words-ids: invalid list of token ids value: 'x'"),
        (("generate", "hi", "--max-new-tokens", "many"), "invalid int value: 'many'"),
        (("generate", "hi", "--max-tokens", "5"), "unknown option --max-tokens: did you mean --max-new-tokens?"),
        (("transcribe", "x.mp3", "--output_format", "srt"), "unknown option --output-format: did you mean --format?"),
        (("generate", "hi", "--tempature=2"), "unknown option --tempature=2: did you mean --temperature?"),
        (("generate", "hi", "--regex", "("), "argument --regex: the regular expression cannot be enforced"),
        (
            ("generate", "hi", "--json-schema", "not-there.json"),
            "argument --json-schema: not-there.json cannot be read",
        ),
        (("generate", "hi", "--choice", ""), "argument --choice: texts=('',) is not allowed"),
        (("generate", "hi", "--labels", os.devnull), "argument --labels: texts=[] is not allowed"),
        (("chat", "--labels", "no.txt"), "argument --labels: no.txt cannot be read"),
        (("generate", "hi", "--choice", "a", "--regex", "a"), "argument --regex: not allowed with argument --choice"),
        (("generate", "hi", "--grammar", "."), "argument --grammar: . cannot be read"),
        *(
            (
                ("generate", "hi", option, text),
                f"{text!r} is the content of a file, not the name of one: write it to a file",
            )
            for option, text in (("--json-schema", "{}"), ("--grammar", 'root ::= "a"'), ("--grammar", "start: a\n"))
        ),
        (("chat", "--regex", "a", "--json-schema", __file__), "the JSON schema is no JSON"),
        (("batch", "in.jsonl", "out.jsonl", "--regex", "a", "--grammar", __file__), "argument --grammar: "),
        (("batch", "in.csv", "out.csv", "--delimiter", ";;"), "';;' is not allowed: give one character, such as ';'"),
        (("score", "in.csv", "out.csv", "--delimiter", '"'), "is not allowed: give one character"),
        (("batch", "in.jsonl", "out.jsonl", "--delimiter", ";"), "--delimiter is for .csv and .tsv files"),
        (("batch", "in.jsonl", "out.jsonl", "--regex", "a", "--choices", "a,b"), "a constraint is for generated texts"),
        (("generate", "-why"), "unknown option -why: put -- before a text that begins with a dash"),
        (("generate", "hi", "there"), "unexpected arguments: there"),
        (("run", "qwen"), "unknown command 'run': did you mean 'specbeam chat --model MODEL'?"),
        (("pull", "qwen"), "unknown command 'pull': did you mean 'specbeam models pull MODEL'?"),
        (("list",), "unknown command 'list': did you mean 'specbeam models list'?"),
        (("ls",), "unknown command 'ls': did you mean 'specbeam models list'?"),
        (("ps",), "unknown command 'ps': did you mean 'specbeam models list'?"),
        (("show", "qwen"), "unknown command 'show': did you mean 'specbeam models show MODEL'?"),
        (("rm", "qwen"), "unknown command 'rm': did you mean 'specbeam models rm MODEL'?"),
        (("serve", "qwen"), "unexpected arguments: qwen: did you mean --model qwen?"),
        (("generate", "hi", "--backend", "gpu"), "'gpu' is not allowed: give auto, cpu, torch or transformers"),
        (("generate", "hi", "--dtype", "float23"), "argument --dtype: 'float23' is not allowed: give auto, float32, "),
        (("generate", "hi", "--top-logprobs", "2"), "--top-logprobs goes with --json"),
        (("generate", "--prompts", "/not/there.txt"), "/not/there.txt cannot be read: No such file"),
        (("generate", "hi", "--output", "none/x.txt"), "there is no folder"),
        (("generate", "hi", "--output", "."), "it is a folder"),
        (("generate", "hi", "--record", "none/run.jsonl"), "none/run.jsonl cannot be written"),
        (("generate", "hi", "--record", "-"), "name another file"),
        (("generate", "hi", "--record", "run.jsonl", "--output", "run.jsonl"), "name another file"),
        (("generate", "hi", "--draft-corpus", "x"), "--draft-corpus goes with --draft suffix"),
        (("generate", "hi", "--num-draft-tokens", "3"), "--num-draft-tokens=3 has no effect without a draft"),
        (("generate", "hi", "--draft", "ngram", "--draft-width", "wide"), "invalid number value: 'wide'"),
        (
            ("generate", "hi", "--draft", "foo"),
            "--draft foo: give ngram, suffix, mtp, a model or module:name; unknown model 'foo'",
        ),
        (("generate", "hi", "--num-beams", "4", "--num-beam-groups", "3"), "--num-beam-groups=3"),
        (("compare",), "the following arguments are required: PROMPT"),
        (("compare", "hi", "--strategies", "greedy,fast"), "'fast' is no strategy: give some of greedy,speculative,"),
        (("compare", "hi", "--strategies", " , "), "no strategy is named: give some of greedy,"),
        (("compare", "hi", "--temperature", "0.7"), "temperature=0.7 is for sample: add one to --strategies"),
        (("compare", "hi", "--strategies", "beam", "--draft", "ngram"), "draft=ngram is for speculative and"),
        (("compare", "hi", "--strategies", "greedy", "--num-beams", "2"), "--num-beams=2 is for beam and speculative"),
        (("compare", "hi", "--num-beams", "1"), "--num-beams=1 is no beam search"),
        (("compare", "hi", "--do-sample"), "leave out --do-sample"),
        (("compare", "hi", "--draft-corpus", "x.txt"), "--draft-corpus goes with --draft suffix"),
        (("compare", "hi", "--num-draft-tokens", "0"), "specbeam: --num-draft-tokens=0 is not allowed"),
        (("compare", "hi", "--max-new-tokens", "0"), "specbeam: --max-new-tokens=0 is not allowed"),
        (("ladder", "hi", "--rungs", "1,6"), "'6' is no rung: give some of 1,2,3,4,5"),
        (("ladder", "hi", "--rungs", ""), "no rung is named: give some of 1,2,3,4,5"),
        (("ladder", "hi", "--runs", "0"), "--runs 0 is not allowed: give at least 1"),
        (("ladder", "hi", "--runs", "x"), "invalid int value: 'x'"),
        (("ladder", "hi", "--max-new-tokens", "0"), "specbeam: --max-new-tokens=0 is not allowed"),
        (("ladder", "hi", "--num-beams", "2"), "unknown option --num-beams"),
        (("chat", "--num-return-sequences", "2", "--num-beams", "2"), "--num-return-sequences has no use in a chat"),
        (("chat", "--json"), "unknown option --json"),
        (("chat", "--temperature", "-1"), "temperature=-1.0 is not allowed"),
        (("chat", "--num-draft-tokens", "2"), "--num-draft-tokens=2 has no effect without a draft"),
        (("tokens", "hi", "--system", "x"), "--system goes with --chat"),
    ],
)
def test_arguments_are_checked_before_a_model_is_loaded(refused, tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert says in refused(*arguments, "--model", MISSING)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("generate", ""), "the prompt is empty"),
        pytest.param(("generate", "hi", "--device", "cuda:77"), "there is no device 'cuda:77'", marks=needs_torch),
        (("generate", "x" * 300, "--raw"), "the prompt has 300 tokens"),
        (("compare", "good", "x" * 300), "specbeam: prompt 2: the prompt has 3"),
        pytest.param(("ladder", "", "--device", "cpu"), "specbeam: the prompt is empty", marks=needs_torch),
        pytest.param(
            ("ladder", "x" * 300, "--device", "cpu", "--json"), "specbeam: the prompt has 3", marks=needs_torch
        ),
        pytest.param(("ladder", "hi", "--device", "tpu9"), "tpu9", marks=needs_torch),
        (("tokens", ""), "the text is empty"),
        (("tokens", "a\udcff"), "half a surrogate pair"),
    ],
)
def test_what_the_model_cannot_read_or_run(refused, folder, arguments, says):
    assert says in refused(*arguments, "--model", folder)


@pytest.mark.parametrize(
    ("needs", "name", "content", "says"),
    [
        ("", "p.txt", b"\n\n", "holds no prompts"),
        ("", "p.txt", b"caf\xe9", "not UTF-8"),
        ("", "p.jsonl", b'"good"\n{"prompt"', "line 2 is not JSON"),
        ("", "p.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("", "p.jsonl", b'{"question": "x"}', 'neither "prompt" nor "messages", but \'question\''),
        ("", "p.jsonl", b'"good"\n{"prompt": "hi", "max_new_tokens": 0}', "line 2: max_new_tokens=0 is not allowed"),
        ("", "p.jsonl", b'{"prompt": "hi", "max_new_token": 5}', "'max_new_token': did you mean 'max_new_tokens'?"),
        ("", "p.jsonl", b'{"prompt": "hi", "max_tokens": 5}', "'max_tokens': did you mean 'max_new_tokens'?"),
        ("", "p.jsonl", b'{"prompt": "hi", "num_draft_tokens": 5}', "num_draft_tokens=5 has no effect without a draft"),
        ("", "p.jsonl", b'"good"\n{"prompt": "hi", "messages": []}', "line 2 has both"),
        ("the model", "p.txt", b"good\n" + b"x" * 3000, "line 2: the prompt has"),
        ("the model", "p.jsonl", b"3", "not int"),
        ("the model", "p.jsonl", b'"\\ud800"', "half a surrogate"),
    ],
)
def test_a_bad_file_of_prompts_names_the_line(refused, folder, tmp_path, needs, name, content, says):
    """Before a model is loaded, where that does not need it."""
    (tmp_path / name).write_bytes(content)
    model = folder if needs else MISSING
    assert says in refused("generate", "--prompts", str(tmp_path / name), "--model", model)


def test_only_one_prompt_is_recorded(refused, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    how = ("--prompts", str(tmp_path / "prompts.txt"), "--record", str(tmp_path / "run.jsonl"))
    assert "--record goes with one prompt, and there are 2" in refused("generate", *how, "--model", MISSING)


@pytest.mark.parametrize("option", ["--prompts", "--draft-corpus", "--model"])
@pytest.mark.parametrize("link", [False, True])
def test_an_output_that_is_an_input_is_refused(refused, tmp_path, option, link):
    source = output = tmp_path / "in.gguf"
    source.write_text("one\n")
    if link:
        output = tmp_path / "link"
        output.symlink_to(source)
    prompt = ["--prompts", str(source)] if option == "--prompts" else ["hi"]
    corpus = ["--draft", "suffix", "--draft-corpus", str(source)] if option == "--draft-corpus" else []
    model = str(source) if option == "--model" else MISSING
    line = refused("generate", *prompt, *corpus, "--output", str(output), "--model", model)
    assert line == f"specbeam: --output {output} would replace the file of {option}: name another file"
    assert source.read_text() == "one\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--prompts=~/none.txt", "--model", MISSING),
        ("generate", "hi", "--output", "~/none/x", "--model", MISSING),
        ("generate", "hi", "--record=~/none/x.html", "--model", MISSING),
        ("generate", "hi", "--draft", "suffix", "--draft-corpus=~/none.txt", "--model", MISSING),
        ("generate", "hi", "--model=~/none.gguf"),
        ("generate", "hi", "--model", MISSING, "--draft=~/none.gguf"),
        ("batch", "~/none.jsonl", "~/out.jsonl", "--model", MISSING),
        ("verify", "~/none.jsonl"),
        ("study", "--config-dir=~/none", "prompts=[hi]"),
        ("study", "diff", "~/none", "~/none"),
    ],
)
def test_a_path_of_the_home_directory_may_be_quoted(refused, tmp_path, monkeypatch, arguments):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"{tmp_path}/none" in refused(*arguments)
