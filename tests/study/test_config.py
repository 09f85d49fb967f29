"""Configurations: composed as Hydra does, checked name by name, and what methods they mean."""

import re
from itertools import product

import pytest
import yaml

from specbeam.cli import main
from specbeam.errors import SpecbeamError
from specbeam.study.composition import as_yaml, compose, sweep
from specbeam.study.config import check, methods
from tests.pages import ROOT, files

ORIGINAL = """
project_name: specbeam-study
draft_model: Qwen/Qwen2.5-0.5B-Instruct
target_model: Qwen/Qwen2.5-3B-Instruct
chat: {use_system_prompt: true, system_prompt: "You are a concise and helpful assistant."}
debug: {render_input_text: true}
decode: {mode: speculative, k: 4, max_tokens: 50}
prompts: ["The future of AI is", "Once upon a time in a digital world,"]
"""


def study(*overrides, folder=None):
    return check(compose(["prompts=[hi]", *overrides], folder))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.yaml").write_text(ORIGINAL)
    return tmp_path


def test_the_configuration_of_the_first_study_means_what_it_says(folder):
    assert yaml.safe_load(files(ROOT / "docs/guides/study.md")["first-study/config.yaml"]) == yaml.safe_load(ORIGINAL)
    found = check(compose([], folder))
    assert found.target_model == "Qwen/Qwen2.5-3B-Instruct"
    assert found.chat.system_prompt == "You are a concise and helpful assistant."
    assert found.debug.render_input_text
    assert found.prompts == ["The future of AI is", "Once upon a time in a digital world,"]
    (method,) = methods(found)
    assert (method.mode, method.draft) == ("speculative", "Qwen/Qwen2.5-0.5B-Instruct")
    assert (method.options["num_draft_tokens"], method.options["max_new_tokens"]) == (4, 50)
    # The command line comes last. With a draft, its precision has an effect.
    found = check(compose(["target_model=other", "decode.num_draft_tokens=2", "draft.quantize=int4"], folder))
    assert (found.target_model, found.decode["num_draft_tokens"], found.decode["max_new_tokens"]) == ("other", 2, 50)
    assert found.draft.quantize == "int4"


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("decode.k=3;decode.max_tokens=9", "decode.num_draft_tokens=3;decode.max_new_tokens=9"),
        ("decode.mode=hybrid", "decode.mode=speculative-beam"),
        ("decode.mode=[greedy,'hybrid']", "decode.mode=[greedy,speculative-beam]"),
        ("decode={mode: hybrid, k: 3}", "decode={mode: speculative-beam, num_draft_tokens: 3}"),
        ("methods={a: {mode: hybrid, k: 3}}", "methods={a: {mode: speculative-beam, num_draft_tokens: 3}}"),
        (
            "methods={a: {mode: beam}};methods.a.mode=hybrid;methods.a.k=3;methods.a.max_tokens=9",
            "methods={a: {mode: speculative-beam, num_draft_tokens: 3, max_new_tokens: 9}}",
        ),
        (
            "decode.mode=[beam,hybrid];metrics.baseline=hybrid",
            "metrics.baseline=speculative-beam;decode.mode=[beam,speculative-beam]",
        ),
        (
            "methods={hybrid: {mode: hybrid}};metrics.baseline=hybrid",
            "methods={hybrid: {mode: speculative-beam}};metrics.baseline=hybrid",
        ),
        ("decode.k=3;project_name='k=${decode.k}'", "decode.num_draft_tokens=3;project_name=k\\=3"),
    ],
)
def test_words_of_the_first_study_are_our_names_on_the_command_line(words, ours):
    given = compose(["prompts=[hi]", *words.split(";")])
    assert given == compose(["prompts=[hi]", *ours.split(";")])
    assert check(given)


@pytest.mark.parametrize(
    ("file", "content", "chosen"),
    [
        ("config.yaml", "decode: {mode: [beam, hybrid], k: 3, max_tokens: 9}\nproject_name: k${decode.k}", []),
        (
            "ablation/mine.yaml",
            "# @package _global_\ndecode: {mode: [beam, hybrid], k: 3}\nproject_name: k3",
            ["ablation=mine"],
        ),
        ("decode/mine.yaml", "{mode: [beam, hybrid], k: 3, max_tokens: 9}", ["+decode=mine", "project_name=k3"]),
        ("decode/mine.yaml", "# @package methods.a\n{mode: hybrid, k: 3}", ["+decode=mine"]),
    ],
)
def test_words_of_the_first_study_are_our_names_in_files(tmp_path, file, content, chosen):
    ours = content.replace("k: 3", "num_draft_tokens: 3").replace("max_tokens", "max_new_tokens")
    ours = ours.replace("hybrid", "speculative-beam").replace("${decode.k}", "${decode.num_draft_tokens}")
    found = []
    for text in (content, ours):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
        found.append(compose(["prompts=[hi]", *chosen], tmp_path))
        assert "num_draft_tokens: 3" in as_yaml(found[-1])
        # The command line comes last, in either words.
        word = "decode.num_draft_tokens=2" if text == content else "decode={k: 2}"
        assert compose(["prompts=[hi]", *chosen, word], tmp_path)["decode"]["num_draft_tokens"] == 2
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("words", "content", "says"),
    [
        ("decode.k=2 decode.num_draft_tokens=5", "decode: {k: 2, num_draft_tokens: 5}",
         "decode.k=2 and decode.num_draft_tokens=5"),
        ("++decode.max_new_tokens=64 decode.max_tokens=32", "decode: {max_new_tokens: 64, max_tokens: 32}",
         "decode.max_tokens=32 and decode.max_new_tokens=64"),  # 64 is the default, and given all the same
        ("methods={a:{mode:speculative,num_draft_tokens:auto,k:3}}", "methods: {a: {num_draft_tokens: auto, k: 3}}",
         "methods.a.k=3 and methods.a.num_draft_tokens='auto'"),
    ],
)  # fmt: skip
def test_a_word_and_our_name_of_one_setting_with_two_values_are_refused(words, content, says, tmp_path):
    says = re.escape(f"{says} are the same setting: leave one out")
    with pytest.raises(SpecbeamError, match=says):
        study(*words.split())
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(SpecbeamError, match=says):
        study(folder=tmp_path)
    assert study("decode.k=2", "decode.num_draft_tokens=2").decode["num_draft_tokens"] == 2


@pytest.mark.parametrize("word", ["override data: mine", "data: mine", "override /data: mine"])
def test_a_folder_may_choose_its_own_groups(tmp_path, word):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("source: mine.jsonl\ncolumns: {prompt: question}\n")
    (tmp_path / "config.yaml").write_text(f"defaults:\n  - {word}\ndata: {{limit: 7}}\nseed: 3\n")
    found = check(compose([], tmp_path))
    assert (found.data.source, found.data.columns.prompt, found.data.limit) == ("mine.jsonl", "question", 7)
    assert (found.seed, found.repeats) == (3, 1)
    assert check(compose(["data=spec_bench", "data.source=x", "data.limit=null"], tmp_path)).data.format == "spec_bench"


def test_options_follow_the_mode():
    found = {m.name: m.options for m in methods(study("decode.mode=[speculative,beam,speculative-beam,sample]"))}
    assert found["speculative-beam"]["num_beams"] == found["beam"]["num_beams"] == 4
    assert found["sample"]["do_sample"]
    assert not found["speculative"]["do_sample"]


OTHERS = "methods={a: {mode: beam}, b: {mode: speculative-beam}"
OTHERS += ", c: {mode: speculative-beam, num_beams: 2}, d: {mode: speculative-beam, quantize: int4}}"
SAMPLED = ("decode.do_sample=true", "decode.temperature=0.7", "decode.draft_temperature=0.5")


@pytest.mark.parametrize(
    ("given", "twins"),
    [
        (["decode.mode=[greedy,speculative,beam,speculative-beam,sample]"], [None, "greedy", None, "beam", None]),
        (["decode.mode=[sample,speculative]", *SAMPLED], [None, "sample"]),
        ([OTHERS], [None, "a", None, None]),
    ],
)
def test_methods_are_compared_with_the_twin_of_the_same_beams_and_weights(given, twins):
    assert [m.twin for m in methods(study(*given))] == twins


PRESETS = "num_draft_tokens draft_width num_beams draft_temperature drafter tree bound_rule quantization"


@pytest.mark.parametrize("name", PRESETS.split())
def test_presets_are_studies(name):
    found = methods(study(f"ablation={name}"))
    assert len(found) > 2
    assert all(m.twin is not None for m in found if m.draft)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode.num_draft=3", "no key decode.num_draft: did you mean decode.num_draft_tokens?"),
        ("sed=3", "did you mean seed?"),
        ("decode.mode=speculatve", "did you mean 'speculative'?"),
        ("decode.max_new_tokens=many", "max_new_tokens='many' is not allowed: give an integer"),
        ("decode.max_new_tokens=0", "max_new_tokens=0 is not allowed"),
        ("decode.num_draft_tokens=0", "num_draft_tokens=0 is not allowed"),
        ("metrics.confidence=95", "give 0.95"),
        ("metrics.baseline=greed", "did you mean 'greedy'?"),
        ("methods={a: {mod: beam}}", "did you mean methods.a.mode?"),
        ("methods={a: {mode: []}}", "methods.a.mode=[] is not allowed: give one of greedy"),
        ("methods={a: {mode: [beam]}}", "methods.a.mode=['beam'] is not allowed: did you mean 'beam'?"),
        ("methods={a: 3}", "methods.a=3 is not allowed"),
        ("methods={a: {mode: greedy, temperature: 0.7}}", "methods.a.temperature=0.7 has no effect: "),
        ("methods={a: {mode: beam, do_sample: true}}", "methods.a.do_sample=true has no effect: beam never samples"),
        ("draft.quantize=int4", "draft.quantize=int4 has no effect"),
        ("prompts=hi", "prompts='hi' is not allowed: give a list"),
        ("ablation=num_beam", "there is no ablation=num_beam: give one of"),
        ("tracking=wand", "there is no tracking=wand: give one of none, wandb"),
        ("launcher.name=slurm", "launcher.name='slurm' is not allowed"),
        ("data=spec_bench", "data.source"),
        ("chat=none", "chat='none' is not allowed"),
        ("decode.mode=sample decode.temperature=hot", "temperature='hot' is not allowed: give a number"),
        ("decode.mode=speculative decode.do_sample=true decode.draft_temperature=-1", "draft_temperature=-1.0"),
        ("decode.regex=a decode.choice=[a]", "decode has regex and choice, and a text has one constraint"),
        ("decode.json_schema={not: {}}", "method greedy: the JSON schema cannot be enforced: Unimplemented keys"),
        ("methods={a: {mode: greedy, choice: []}}", "method a: texts=[] is not allowed"),
        ("tracking.name=wand", "did you mean 'wandb'"),
        ("tracking=wand", "tracking.name=module:name"),
        ("report.latex_columns=[rougel]", "did you mean 'rougeL'"),
        ("report.latex_columns=[mine:score]", "is not allowed"),
        ("metrics.own=mine:score", "give a list"),
    ],
)
def test_what_is_wrong_is_named(override, message):
    with pytest.raises(SpecbeamError, match=re.escape(message)):
        study(*re.split(" (?=decode)", override))


def test_a_group_that_is_not_there_shows_no_search_path(folder, capsys):
    assert main(["study", "--config-dir", str(folder), "data=nope"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    known = "cnn_dailymail, human_eval, none, spec_bench, wmt14"
    says = f"specbeam: there is no data=nope: give one of {known}, or --config-dir DIR with DIR/data/nope.yaml"
    assert line == says
    (folder / "data").mkdir()
    (folder / "data" / "mine.yaml").write_text("source: x.jsonl\n")
    assert main(["study", "--config-dir", str(folder), "data=nope"]) == 2
    assert "human_eval, mine, none" in capsys.readouterr().err


def test_every_option_that_yaml_can_hold_is_a_key_of_decode():
    (method,) = methods(study("decode.mode=beam", "decode.repetition_penalty=1.2", "decode.stop_strings=[END]"))
    assert (method.options["repetition_penalty"], method.options["stop_strings"]) == (1.2, ("END",))


@pytest.mark.parametrize(
    ("words", "given", "by"),
    [
        ("temperature=0.7", "temperature", {}),
        ("temperature=0.7 mode=[greedy,sample]", "temperature", {"sample": 0.7}),
        ("top_p=0.5 mode=[sample,speculative]", "top_p", {"sample": 0.5}),
        ("top_k=3 mode=[greedy,speculative] do_sample=true", "top_k", {"speculative": 3}),
        ("length_penalty=0.5 mode=[greedy,sample]", "length_penalty", {}),
        ("length_penalty=0.5", "length_penalty", {"beam": 0.5, "speculative-beam": 0.5}),
        ("num_beams=8 mode=greedy", "num_beams", {}),
        ("num_beam_groups=2 diversity_penalty=1 mode=[greedy,beam]", "num_beam_groups", {"beam": 2}),
        ("num_draft_tokens=3 mode=[greedy,beam]", "num_draft_tokens", {}),
        ("bound_rule=false mode=[beam,speculative]", "bound_rule", {"beam": False}),
        ("bound_rule=false mode=[greedy,speculative]", "bound_rule", {}),
        ("bound_rule=false", "bound_rule", {"beam": False, "speculative-beam": False}),
        ("draft_temperature=0.5 mode=[sample,speculative]", "draft_temperature", {}),
        ("num_return_sequences=2 mode=greedy", "num_return_sequences", {}),
        ("num_return_sequences=2 mode=[greedy,sample]", "num_return_sequences", {"sample": 2}),
        ("do_sample=true", "do_sample", {"speculative": True}),
        ("do_sample=true mode=[greedy,beam]", "do_sample", {}),
    ],
)
def test_an_option_goes_to_the_methods_it_is_for_and_is_refused_if_there_are_none(words, given, by):
    words = [f"decode.{word}" for word in words.split()]
    if by:
        found = {m.name: m.options[given] for m in methods(study(*words)) if given in m.options}
        assert {name: value for name, value in found.items() if given != "do_sample" or value} == by
    else:
        with pytest.raises(SpecbeamError, match=rf"decode\.{given}=\S+ has no effect: it is for .*, or (give|leave)"):
            study(*words)


def test_beams_return_one_text_unless_more_are_asked_for():
    """A search for all its beams has to evaluate all of them, so no draft could save much."""
    returned = {m.name: m.options.get("num_return_sequences", 1) for m in methods(study())}
    assert returned == dict.fromkeys(("greedy", "speculative", "beam", "speculative-beam"), 1)


USELESS = "hydra.job.chdir=true hydra.env={} ++hydra.callbacks.mine=1 hydra/job_logging=disabled +hydra/callbacks=mine"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("hydra.run.dir=x", "give output=FOLDER"),
        ("hydra.sweep.subdir=x", "give --multirun and output=FOLDER"),
        ("hydra.mode=MULTIRUN", "give --multirun"),
        ("hydra.sweeper.params={seed: 1}", "give --multirun and KEY=A,B"),
        ("hydra/sweeper=basic", "give --multirun and KEY=A,B"),
        ("+hydra.launcher.n_jobs=2", "give launcher=ray"),
        ("hydra.job.name=x", "give project_name=NAME"),
        ("hydra.searchpath=[file:///tmp]", "give --config-dir DIR"),
        *((word, "leave it out") for word in [*USELESS.split(), "~hydra.run_dir", "~hydra", "hydra=x"]),
    ],
)
def test_keys_of_hydras_own_are_refused(override, hint, capsys):
    key = override.lstrip("+~").partition("=")[0]
    for sweeping in ([], ["--multirun"]):
        assert main(["study", "--show-config", "prompts=[hi]", override, *sweeping]) == 2
        says = f"specbeam: {key} is a key of Hydra's own, and a study does not use it: {hint}\n"
        assert capsys.readouterr() == ("", says)


FLAGS = "--config-path=x -cp=x --config-name=x -cn=x -cd=x --cfg=job -c=job --package=x -p=x --hydra-help --info -i"
FLAGS += " --resolve --run -r --experimental-rerun=x --shell-completion"


@pytest.mark.parametrize("flag", FLAGS.split())
def test_flags_of_hydras_own_are_refused(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["study", "--show-config", "prompts=[hi]", flag])
    assert f"unknown option {flag}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "key"),
    [
        ("config.yaml", "hydra: {run: {dir: x}}", "hydra.run.dir"),
        ("config.yaml", "defaults: [{override hydra/job_logging: disabled}]", "hydra.job_logging"),
        ("ablation/mine.yaml", "# @package _global_\nhydra: {sweep: {dir: x}}", "hydra.sweep.dir"),
        ("ablation/mine.yaml", "# @package hydra\njob: {chdir: true}", "hydra.job.chdir"),
    ],
)
def test_keys_of_hydras_own_are_refused_in_files(tmp_path, file, content, key):
    folder = tmp_path / "it's, [my] {own}=1 $folder"
    (folder / "ablation").mkdir(parents=True)
    (folder / "ablation" / "mine.yaml").write_text("# @package _global_\nseed: 5")
    assert study("ablation=mine", folder=folder).seed == 5
    (folder / file).write_text(content)
    with pytest.raises(SpecbeamError, match=f"{key}.* is a key of Hydra's own|override hydra/job_logging"):
        study("ablation=mine", folder=folder)


@pytest.mark.parametrize("word", ["seed=interval(0,1)", "data=glob(*)", "seed=range(1,1)", "seed=1,", "=1", "data=3"])
def test_a_sweep_that_cannot_be_listed_is_one_line(word, capsys):
    assert main(["study", "--multirun", "--show-config", "prompts=[hi]", word]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_configuration_without_prompts_is_shown_and_then_refused(capsys):
    assert main(["study", "--show-config", "decode.num_beams=7"]) == 2
    shown, refused = capsys.readouterr()
    assert yaml.safe_load(shown)["decode"]["num_beams"] == 7
    assert refused == "specbeam: there is nothing to decode: give prompts=[...] or data.source=FILE\n"


def test_the_configurations_of_a_sweep_are_shown_as_documents(capsys):
    words = ["decode.num_draft_tokens=1,2", "seed=range(0,3)", "decode.max_new_tokens=8"]
    assert main(["study", "--multirun", "--show-config", "prompts=[hi]", *words]) == 0
    shown = [*yaml.safe_load_all(capsys.readouterr().out)]
    assert [(one["decode"]["num_draft_tokens"], one["seed"]) for one in shown] == [*product((1, 2), range(3))]
    assert {one["decode"]["max_new_tokens"] for one in shown} == {8}


def test_an_unreadable_configuration_is_one_line(tmp_path):
    contents = {b"a: [1,": "cannot be composed", b"a: \xff\xfe": "UTF-8|cannot be composed"}
    contents[b"defaults:\n  m _self_\n"] = "cannot be composed"  # a list of defaults that is a text
    for content, says in contents.items():
        (tmp_path / "config.yaml").write_bytes(content)
        with pytest.raises(SpecbeamError, match=says):
            compose([], tmp_path)
    with pytest.raises(SpecbeamError, match="is not a folder"):
        compose([], tmp_path / "missing")


def test_a_path_of_the_home_directory_is_found_quoted_unquoted_in_yaml_and_in_sweeps(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    home = str(tmp_path)
    for word in ("data.source=~/a b.jsonl", "data.source='~/a b.jsonl'"):
        assert compose(["prompts=[hi]", word])["data"]["source"] == f"{home}/a b.jsonl"
    words = ["output=~/run", "target_model=~/t", "draft_model='~/d'", "metrics.perplexity=[target, ~/p]"]
    found = compose([*words, "methods={a: {draft_model: ~/m}}"])
    assert [found[key] for key in ("output", "target_model", "draft_model")] == [
        f"{home}/{x}" for x in ("run", "t", "d")
    ]
    assert found["metrics"]["perplexity"] == ["target", f"{home}/p"]
    assert found["methods"]["a"]["draft_model"] == f"{home}/m"
    swept = [compose(words)["data"]["source"] for words, _ in sweep([r"data.source=~/a.jsonl,~/b\,c.jsonl"])]
    assert swept == [f"{home}/a.jsonl", f"{home}/b,c.jsonl"]
    (tmp_path / "config.yaml").write_text("output: ~/run\ndata: {source: ~/a.jsonl}\n")
    found = compose([], tmp_path)
    assert (found["output"], found["data"]["source"]) == (f"{home}/run", f"{home}/a.jsonl")
    # Text that is no path stays.
    found = compose(["prompts=[~ is a tilde,'~/x']", "~data", "data.template='~/{prompt}'"])
    assert (found["prompts"], found["data"]) == (["~ is a tilde", "~/x"], {"template": "~/{prompt}"})


def test_tracking_takes_a_class_by_name_and_a_file_of_ones_own(tmp_path):
    assert study("tracking=mine:Tracker").tracking.name == "mine:Tracker"
    (tmp_path / "tracking").mkdir()
    (tmp_path / "tracking" / "lines.yaml").write_text("name: mine:Lines\nproject: p\n")
    found = study("tracking=lines", folder=tmp_path).tracking
    assert (found.name, found.project) == ("mine:Lines", "p")
