"""The documentation is true: its code runs, its commands parse, and the paths it names exist."""

import json
import re
import shlex
import tomllib
from itertools import groupby
from pathlib import Path

import pytest
import transformers
from transformers import MarianConfig, MarianMTModel

import specbeam
from specbeam import cli
from tests.conftest import CHAT_TEMPLATE, EOS, byte_tokenizer, random_model

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TARGETS = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
RUN = ("generate", "compare", "tokens", "models", "batch")
"""Commands that are run, not only parsed. A study and a ladder take too long."""


def blocks(page):
    return [(language, code) for _, language, code in BLOCK.findall(page.read_text(encoding="utf-8"))]


def named(pages):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def program(page):
    """The Python of a page, at the lines where it stands there."""
    text, lines = page.read_text(encoding="utf-8"), {}
    for found in BLOCK.finditer(text):
        if found[2] == "python":
            lines |= dict(enumerate(found[3].splitlines(), text.count("\n", 0, found.start(3))))
    return "\n".join(lines.get(number, "") for number in range(max(lines) + 1))


def with_block(language):
    return named(page for page in PAGES if language in dict(blocks(page)))


@pytest.fixture(scope="session")
def stand_ins(save):
    """Folders of tiny models, in place of the models that the pages name."""
    sizes = {"max_position_embeddings": 1024, "initializer_range": 0.2}
    causal = save(random_model("llama", **sizes), byte_tokenizer(CHAT_TEMPLATE))
    gpt2 = save(random_model("gpt2", tie_word_embeddings=True))
    config = MarianConfig(
        vocab_size=259,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        pad_token_id=258,
        eos_token_id=EOS,
        forced_eos_token_id=EOS,
        decoder_start_token_id=256,
    )
    translator = save(MarianMTModel(config).eval())
    return {"causal": causal, "gpt2": gpt2, "translator": translator}


@pytest.fixture
def workplace(stand_ins, tmp_path, monkeypatch):
    """A folder with the files that the pages name, where every source of a model is a tiny one."""

    def locate(source, revision=None):
        return stand_ins["translator" if "opus-mt" in str(source) else "causal"]

    for module in ("specbeam.model", "specbeam.checkpoints"):  # to import the first reads the second
        monkeypatch.setattr(f"{module}.locate", locate)
    for loader in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", from_folder(loader.from_pretrained, locate))
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/gpt2").symlink_to(stand_ins["gpt2"])
    (tmp_path / "prompts.parquet").touch()
    for name in ("prompts.jsonl", "questions.jsonl"):
        (tmp_path / name).write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return tmp_path


def from_folder(load, locate):
    """from_pretrained for names of the hub, too."""
    return lambda name, **how: load(name if Path(name).is_dir() else locate(name), **how)


@pytest.mark.parametrize("page", named(PAGES))
def test_every_block_is_python_or_shell_or_marked_as_text(page):
    assert {language for language, _ in blocks(page)} <= {"python", "sh", "text"}


@pytest.mark.parametrize("page", with_block("python"))
def test_python_runs(page, workplace, monkeypatch):
    if page.name == "evaluate.md":
        no_downloads(monkeypatch)
    exec(compile(program(page), page, "exec"), {"__name__": "page"})


def no_downloads(monkeypatch):
    """lm_eval's tasks are data sets of the hub: in place of them the model answers two requests."""
    import lm_eval
    from lm_eval.api.instance import Instance

    def simple_evaluate(model, tasks):
        assert tasks
        ask = {"until": ["\n"], "max_gen_toks": 8}
        return model.generate_until([Instance("generate_until", {}, (text, ask), 0) for text in ("one", "two")])

    monkeypatch.setattr(lm_eval, "simple_evaluate", simple_evaluate)


def commands(code):
    """The commands of a shell block, as words, without comments and with continued lines joined."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        for is_and, command in groupby(words, lambda word: word == "&&"):
            if not is_and:
                yield list(command)


@pytest.mark.parametrize("page", with_block("sh"))
def test_shell_commands_are_right(page, workplace, monkeypatch, capsys):
    for language, code in blocks(page):
        for words in commands(code) if language == "sh" else ():
            with monkeypatch.context() as patch:
                check_command(words, patch)
    assert "Traceback" not in capsys.readouterr().err


def check_command(words, monkeypatch):
    program = words[0].removeprefix(".venv/bin/")
    match [program, *words[1:]]:
        case ["make", target, *_]:
            assert target in TARGETS
        case ["pip", "install", *what]:
            for extra in re.findall(r"\[(.*?)\]", " ".join(what)):
                assert set(extra.split(",")) <= set(EXTRAS)
            assert all((ROOT / word).is_file() for word in what if word.endswith(".txt"))
        case ["python", "-m", "specbeam.lm_eval", *options]:
            check_evaluation(options)
        case ["python", script, *_]:
            assert (ROOT / script).is_file()
        case ["specbeam", command, *_]:
            check_specbeam(command, words[1:], monkeypatch)
        case ["jupyter", "execute", notebook]:
            assert (ROOT / notebook).is_file()
        case [".ci/run" | ".ci/release" | ".ci/language", *_]:
            assert (ROOT / program).is_file()
        case _:
            pytest.fail(f"no test knows the command {shlex.join(words)}")


def check_specbeam(command, words, monkeypatch):
    """Run a command where that is quick; else have the real parser read it, and a study's configuration checked."""
    if command == "study" and not {"show", "diff"} & set(words):
        words = [*words, "--show-config"]
    elif command not in RUN or {"ray", "prompts.parquet"} & set(words):
        monkeypatch.setattr(f"specbeam.cli.{command}.run", lambda given: 0)
    limit = ["--max-new-tokens", "8"] if command in ("generate", "compare") and "--max-new-tokens" not in words else []
    assert cli.main([*words, *limit]) == 0, words


def check_evaluation(options):
    from lm_eval.utils import simple_parse_args_string

    given = dict(zip(options[::2], options[1::2], strict=False))
    arguments = simple_parse_args_string(given["--model_args"])
    specbeam.Options.of({name: value for name, value in arguments.items() if name not in ("pretrained", "draft")})


PATH = re.compile(r"`((?:\.?[\w-]+/)*[\w-]+(?:/|\.(?:py|cpp|h|ipynb)|(?<=/)[\w-]*\.(?:md|yaml|txt)))`")
MADE = ("site/", "packed/", "plots/", "runs/", "models/", "cmake/native/", "specbeam-test-builds/", "dist/")
"""Folders that commands make."""
PARENTS = (
    ROOT,
    ROOT / "src/specbeam",
    ROOT / "src/specbeam/backends/cpu",
    ROOT / "src/specbeam/backends/cpu/native",
    ROOT / "src/specbeam/checkpoints/families",
)


@pytest.mark.parametrize("page", named(PAGES))
def test_paths_exist(page):
    """Paths in code style, of files and folders. NAME stands for a file that is to be added."""
    for name in PATH.findall(page.read_text(encoding="utf-8")):
        path = Path(name).parent if "NAME" in name else Path(name)
        assert name.startswith(MADE) or any((parent / path).exists() for parent in PARENTS), f"{page} names {name}"


def test_documents_named_in_the_code_exist():
    for folder in ("src", "tests", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w/.-]+\.(?:md|ipynb|svg|png)", path.read_text(encoding="utf-8")):
                assert (ROOT / name).is_file(), f"{path} names {name}"


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)|(?:src|srcset)=\"([^\"]+)\"", page.read_text(encoding="utf-8")):
            name = "".join(target)
            assert name.startswith("http") or (ROOT / name).exists(), name


def test_the_chart_shows_the_recorded_figures():
    for chart in ("speed-light.svg", "speed-dark.svg"):
        text = (ROOT / "docs" / chart).read_text()
        date, commit = re.search(r"(\d{4}-\d\d-\d\d), commit (\w+)", text).groups()
        figures = json.loads((ROOT / f"bench/results/cpu-{date}-{commit}.json").read_text())["figures"]
        for figure in figures:
            _, part, *_ = figure["name"].split(" / ")
            if part in ("greedy", "4 beams"):
                assert f">{figure['value']:.1f}<" in text, figure["name"]


def test_pages_load_nothing_from_other_hosts():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in settings
    assert not re.search(r"https?://|analytics", settings)
    for page in PAGES:
        assert not re.search(r"!\[[^]]*\]\(https?:|src=\"https?:", page.read_text(encoding="utf-8")), page
