"""The documentation is true: its code and its commands run, and the names in it exist."""

import builtins
import contextlib
import dis
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import CodeType

import pandas
import pytest
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import specbeam
from docs.hooks import help_of
from specbeam import cli
from specbeam.errors import BAD_INPUT
from specbeam.options.names import OTHER_NAMES
from specbeam.plugins import GROUPS
from specbeam.server.chat import ChatRequest
from tests.backends.test_encoder_decoder import make
from tests.conftest import CHAT_TEMPLATE, EOS, byte_tokenizer, in_thorough_mode, needs_torch, random_model
from tests.heads import add_mtp
from tests.pages import COOKBOOK, PAGES, ROOT, blocks, files, inline_code, named, program, shell, text_of
from tests.server.conftest import serving
from tests.speech.conftest import random_whisper, whisper_tokenizer
from tests.speech.sounds import tones, write_wav

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = re.findall(r"^([\w./-]+):", MAKEFILE, re.MULTILINE)
SHORT = {
    "generate": {"--max-new-tokens": "8"},
    "compare": {"--max-new-tokens": "8"},
    "batch": {"--max-new-tokens": "8"},  # of texts: labels and requests have no such option
    "ladder": {"--max-new-tokens": "4", "--runs": "1", "--rungs": "3,5"},  # tests/test_ladder.py compiles
    "study": {"decode.max_new_tokens": "4", "data.limit": "2"},
}
"""The sizes that commands have in these tests."""
KINDS = {"opus-mt": "translator", "adapter-": "adapter", "gpt2": "gpt2", "whisper": "speech", "qwen3.5": "headed"}
"""The stand-in of a model, by a part of its name."""


@pytest.fixture(scope="session")
def stand_ins(save, tmp_path_factory):
    """Folders of tiny models, in place of the models that the pages name."""
    sizes = {"max_position_embeddings": 2048, "initializer_range": 0.2}  # passages of up to 1,114 bytes
    causal = save(random_model("llama", **sizes), byte_tokenizer(CHAT_TEMPLATE))
    gpt2 = save(random_model("gpt2", tie_word_embeddings=True))
    translator = save(make("marian", max_position_embeddings=1024, forced_eos_token_id=EOS))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(causal), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(adapter := tmp_path_factory.mktemp("adapter"))
    speech = save(random_whisper(), whisper_tokenizer())
    headed = save(random_model("llama", **sizes), byte_tokenizer(CHAT_TEMPLATE))
    add_mtp(headed)
    folders = {"causal": causal, "gpt2": gpt2, "translator": translator, "adapter": adapter}
    return folders | {"speech": speech, "headed": headed}


@pytest.fixture
def workplace(stand_ins, tmp_path, monkeypatch):
    """A folder with the files that the pages name, where every source of a model is a tiny one."""

    def locate(source, *_, **__):
        kinds = [kind for name, kind in KINDS.items() if name in str(source)]
        return stand_ins[kinds[0] if kinds else "causal"]

    for module in ("specbeam.models.model", "specbeam.checkpoints", "specbeam.study.run"):  # the others read the second
        monkeypatch.setattr(f"{module}.locate", locate)
    for loader in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", from_folder(loader.from_pretrained, locate))
    monkeypatch.setattr("specbeam.speech.vocabulary.MULTILINGUAL", 0)  # the stand-in is small, and has languages
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO())  # a conversation ends at once
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "models").mkdir()
    (tmp_path / "models/gpt2").symlink_to(stand_ins["gpt2"])
    rows = [{"prompt": "one"}, {"prompt": "two"}]
    for name in ("prompts.jsonl", "questions.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}]
    (tmp_path / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    questions = [{"question_id": n, "category": "ab"[n], "turns": ["one", "two"], "reference": []} for n in range(2)]
    (tmp_path / "spec_bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    return tmp_path


@pytest.fixture(scope="session")
def finished_study(stand_ins, tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "run"
    words = [f"target_model={stand_ins['causal']}", f"output={folder}", "prompts=[one,two]", "decode.max_new_tokens=4"]
    assert cli.main(["study", *words]) == 0
    return folder


def from_folder(load, locate):
    """from_pretrained for names of the hub, too."""
    return lambda name, **how: load(name if Path(name).is_dir() else locate(name), **how)


@pytest.mark.parametrize("page", named(PAGES))
def test_every_block_is_python_or_shell_or_marked_as_text(page):
    assert {language for language, _ in blocks(page)} <= {"python", "sh", "text"}
    assert 2 * len(blocks(page)) == len(re.findall(r"^\s*(?:```|~~~)", text_of(page), re.MULTILINE))
    outputs = [code for language, code in blocks(page) if language == "text"]
    assert not [code for code in outputs if re.match(r"(make \w+|specbeam \w+|python|pip|import|from|\.ci/\w+) ", code)]


@pytest.mark.parametrize("page", named(page for page in PAGES if "python" in dict(blocks(page))))
def test_python_runs(page, workplace, monkeypatch):
    if page.name == "evaluate.md" and page not in COOKBOOK:
        no_downloads(monkeypatch)
    variables = {"__name__": "page"}
    text = program(page)
    with contextlib.ExitStack() as stack:
        if page.name == "server.md":
            name = "smollm2-135m-instruct"
            server = stack.enter_context(serving({name: specbeam.load(name)}))
            text = text.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
        code = compile(text, page, "exec")
        exec(code, variables)
    assert names_read(code) <= variables.keys() | vars(builtins).keys()


def test_the_greedy_search_of_the_architecture_page_is_greedy_search(stand_ins):
    page = {}
    exec(program(ROOT / "docs/architecture.md"), page)
    engine = specbeam.Engine(specbeam.load(stand_ins["causal"]))
    strategies = (None, lambda s, drafter: page["greedy"](s.tree, s.selector, s.stop))
    one, other = [engine.submit("one", {"max_new_tokens": 8}, strategy=strategy) for strategy in strategies]
    engine.run()
    assert one.result().token_ids == other.result().token_ids


def names_read(code, operations=("LOAD_GLOBAL", "LOAD_NAME")):
    """The global names that a program reads, also in functions that it only defines."""
    reads = {i.argval for i in dis.get_instructions(code) if i.opname in operations}
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return reads.union(*(names_read(function, ("LOAD_GLOBAL",)) for function in inner))


def no_downloads(monkeypatch):
    """lm_eval's tasks are data sets of the hub: in place of them the model answers two requests."""
    import lm_eval
    from lm_eval.api.instance import Instance

    def simple_evaluate(model, tasks):
        assert tasks
        ask = {"until": ["\n"], "max_gen_toks": 8}
        return model.generate_until([Instance("generate_until", {}, (text, ask), 0) for text in ("one", "two")])

    monkeypatch.setattr(lm_eval, "simple_evaluate", simple_evaluate)


@pytest.mark.parametrize("page", named(page for page in PAGES if [*shell(page)]))
def test_shell_commands_run(page, workplace, no_plots, request, capsys):
    for name, content in files(page).items():
        (workplace / name).parent.mkdir(parents=True, exist_ok=True)
        (workplace / name).write_text(content)
    for words in shell(page):
        check_command(words, request)
    assert "Traceback" not in capsys.readouterr().err


def check_command(words, request):
    """Run a command of specbeam. Of another program, check the files and the names that it is given."""
    program = words[0].removeprefix(".venv/bin/")
    match [program, *words[1:]]:
        case ["specbeam", command, *_]:
            check_specbeam(command, words[1:], request)
        case ["make", target, *settings]:
            assert target in TARGETS
            assert all(re.search(rf"\$\((or )?{name.partition('=')[0]}\b", MAKEFILE) for name in settings)
        case ["pip", "install", *what]:
            for extra in re.findall(r"\[(.*?)\]", " ".join(what)):
                assert set(extra.split(",")) <= set(EXTRAS)
            assert all((ROOT / word).is_file() for word in what if word.endswith(".txt"))
        case ["curl", url, "-H", "Content-Type: application/json", "-d", body]:
            assert url == "http://127.0.0.1:8000/v1/chat/completions"
            ChatRequest.model_validate_json(body)
        case ["python", "-m", "specbeam.lm_eval", *options]:
            check_evaluation(options)
        case ["python", "-m", module, *options] if module.startswith("tests."):
            check_command(["python", f"{module.replace('.', '/')}.py", *options], request)
        case ["python", script, *options]:
            source = "".join((ROOT / path).read_text(encoding="utf-8") for path in (script, "bench/prompts.py"))
            assert all(f'"{option}"' in source for option in options if option.startswith("--") and option != "--json")
        case ["jupyter", "execute", notebook]:
            assert (ROOT / notebook).is_file()  # tests/test_notebooks.py runs it
        case ["python3", "-m", "venv", ".venv"]:
            pass
        case [".", activate]:
            assert activate == ".venv/bin/activate"
        case [".ci/run" | ".ci/release" | ".ci/language", *_]:
            assert (ROOT / program).is_file()
        case _:
            pytest.fail(f"no test knows the command {shlex.join(words)}")


def check_specbeam(command, words, request):
    """Run a command on tiny models and short texts."""
    for word in words:
        if word.startswith("runs/"):
            shutil.copytree(request.getfixturevalue("finished_study"), word, dirs_exist_ok=True)
    if "prompts.parquet" in words:
        pandas.DataFrame({"prompt": ["one", "two"]}).to_parquet("prompts.parquet")
    for word in words:
        if word.endswith((".mp3", ".mp4")):
            write_wav(Path(word), tones())
    sizes = SHORT.get(command, {}).items()
    shorter = [word for size in sizes for word in size]  # the last of two values holds
    if command == "study":
        runs = not {"show", "diff", "--show-config"} & {*words}
        shorter = [f"{name}={size}" for name, size in sizes] if runs else []
    if {"--choices", "--labels", "requests.jsonl"} & {*words}:
        shorter = []
    if command in ("serve", "demo"):  # it would not end. The last argument is checked after all others were parsed
        assert run([*words, "--port", "-1"]) == BAD_INPUT
        return
    if "ray" in words and not in_thorough_mode():  # starting a cluster takes long
        words, shorter = [command], ["--help"]
    assert run([*words, *shorter]) == 0, words


def run(words):
    try:
        return cli.main(words)
    except SystemExit as stop:  # after --help
        return stop.code


def check_evaluation(options):
    from lm_eval.utils import simple_parse_args_string

    given = dict(zip(options[::2], options[1::2], strict=False))
    arguments = simple_parse_args_string(given["--model_args"])
    specbeam.Options.of({name: value for name, value in arguments.items() if name not in ("pretrained", "draft")})


# Names in prose.

DOTTED = re.compile(r"specbeam(?:\.\w+)+")
RESOLVE = """
import json, sys
import specbeam

def missing(name):
    found, *parts = specbeam, *name.split(".")[1:]
    for part in parts:
        if not hasattr(found, part):
            return True
        found = getattr(found, part)

print(json.dumps([name for name in json.load(sys.stdin) if missing(name)]))
"""


@needs_torch
def test_dotted_names_resolve():
    """Every specbeam.x.y of prose and programs is there after ``import specbeam``, in a process of its own."""
    places = {}
    for page in PAGES:
        code = [code for language, code in blocks(page) if language == "python"]
        for name in DOTTED.findall("\n".join([*inline_code(page), *code])):
            places.setdefault(name, page.name)
    for group in GROUPS.values():  # of entry points, which are no attributes
        places.pop(group, None)
    how = {"capture_output": True, "text": True, "env": os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}}
    found = subprocess.run([sys.executable, "-c", RESOLVE], input=json.dumps([*places]), check=True, **how)
    assert {name: places[name] for name in json.loads(found.stdout)} == {}


@cache
def command_help():
    """The help of each command of specbeam."""
    commands = re.findall(r"^    (\w+) ", help_of([]), re.MULTILINE)
    return {command: help_of([command]) for command in commands}


@cache
def other_options():
    """The options of the programs in bench, of the evaluation harness, and names that get a suggestion."""
    import lm_eval

    files = [*(ROOT / "bench").glob("*.py"), *(ROOT / "tests/fuzz").glob("*.py")]
    files += Path(lm_eval.__file__).parent.rglob("*cli*/**/*.py")
    suggested = {f"--{name}".replace("_", "-") for names in OTHER_NAMES.values() for name in names}
    text = "".join(map(text_of, files))
    return suggested | {*re.findall(r"\"(--[\w-]+)\"", text)}


@pytest.mark.parametrize("page", named(PAGES))
def test_commands_and_options_in_prose_exist(page):
    for span in inline_code(page):
        words = span.split()
        program = words[0].removeprefix(".venv/bin/")
        helps = [*command_help().values()]
        if program == "make" and len(words) > 1:
            assert words[1] in TARGETS, span
        if program == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), span
        if program == "specbeam" and len(words) > 1:
            assert words[1] in command_help(), span
            helps = [command_help()[words[1]]]
        known = {*re.findall(r"--[\w-]+", "\n".join(helps))}
        for option in re.findall(r"(?<![\w-])--\w[\w-]*", span):
            assert option.replace("_", "-") in known or (program != "specbeam" and option in other_options()), span


@cache
def words_of_the_code():
    """Every word of the files that git tracks, and of their names, without the pages."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [ROOT / name for name in tracked.splitlines() if not name.endswith((".md", ".png"))]
    text = tracked + "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
    return {*re.findall(r"\w+", text), *re.findall(r"[^\W_]+", tracked)}


OF_OTHERS = {
    *("jupyterlab", "lab", "manylinux_2_35", "vpdpbusd", "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "SPECBEAM_", "xe6"),
    *("bashrc", "CT2_FORCE_CPU_ISA", "q4_k_m", "sentencepiece", "zshrc", "generated_label"),
}
"""Names of other programs, and parts of names."""


@pytest.mark.parametrize("page", named(PAGES))
def test_names_in_code_style_occur_in_the_code(page):
    """A name that was renamed or removed, or that is misspelled, stands nowhere else."""
    names = {word for span in inline_code(page) for word in re.findall(r"[^\W\d]\w{2,}", span)}
    assert names - words_of_the_code() - OF_OTHERS == set()


PATH = re.compile(r"`((?:\.?[\w-]+/)*[\w-]+(?:/|\.(?:py|cpp|h|ipynb)|(?<=/)[\w-]*\.(?:md|yaml|txt)))`")
MADE = ("site/", "packed/", "plots/", "runs/", "cmake/native/", "specbeam-test-builds/", "dist/")
"""Folders that commands make."""
FOLDERS = ("", "backends/cpu", "backends/cpu/native", "checkpoints/families")
PARENTS = (ROOT, *(ROOT / "src/specbeam" / folder for folder in FOLDERS))


@pytest.mark.parametrize("page", named([*PAGES, *(ROOT / name for name in ("SECURITY.md", "bench/README.md"))]))
def test_paths_exist(page):
    """Paths in code style, of files and folders. NAME stands for a file that is to be added."""
    for name in PATH.findall(page.read_text(encoding="utf-8")):
        path = Path(name).parent if "NAME" in name else Path(name)
        is_made = name.startswith(MADE) or name in files(page)
        assert is_made or any((parent / path).exists() for parent in (page.parent, *PARENTS)), f"{page} names {name}"


def test_documents_named_in_the_code_exist():
    for folder in ("src", "tests", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w/.-]+\.(?:md|ipynb|svg|png)", path.read_text(encoding="utf-8")):
                assert (ROOT / name).is_file(), f"{path} names {name}"


def test_links_of_the_readme_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)|(?:src|srcset)=\"([^\"]+)\"", text_of(page)):
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
