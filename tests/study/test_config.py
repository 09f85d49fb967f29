"""Configurations: composed as Hydra does, checked name by name, and what methods they mean."""

import re

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from specbeam.cli import main
from specbeam.errors import SpecbeamError
from specbeam.study.config import check, compose, methods, sweep

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


def test_a_configuration_of_the_first_study_means_what_it_says(folder):
    found = check(compose([], folder))
    assert found.target_model == "Qwen/Qwen2.5-3B-Instruct"
    assert found.chat.system_prompt == "You are a concise and helpful assistant."
    assert found.debug.render_input_text
    assert found.prompts == ["The future of AI is", "Once upon a time in a digital world,"]
    (method,) = methods(found)
    assert (method.mode, method.draft) == ("speculative", "Qwen/Qwen2.5-0.5B-Instruct")
    assert (method.options["num_draft_tokens"], method.options["max_new_tokens"]) == (4, 50)


def test_the_command_line_comes_last(folder):
    found = check(compose(["target_model=other", "decode.k=2"], folder))
    assert (found.target_model, found.decode.k, found.decode.max_tokens) == ("other", 2, 50)


def test_a_folder_may_have_groups_of_its_own(folder):
    (folder / "ablation").mkdir()
    (folder / "ablation" / "mine.yaml").write_text("# @package _global_\nmethods: {a: {mode: beam, num_beams: 3}}\n")
    (method,) = methods(check(compose(["ablation=mine"], folder)))
    assert (method.name, method.options["num_beams"]) == ("a", 3)


def test_modes_are_compared_with_their_twins():
    found = {m.name: m for m in methods(study("decode.mode=[greedy,speculative,beam,hybrid,sample]"))}
    assert {name: m.twin for name, m in found.items()} == {
        "greedy": None,
        "speculative": "greedy",
        "beam": None,
        "hybrid": "beam",
        "sample": None,
    }
    assert found["hybrid"].options["num_beams"] == found["beam"].options["num_beams"] == 4
    assert found["sample"].options["do_sample"]
    assert not found["speculative"].options["do_sample"]


def test_a_twin_has_the_same_beams_and_weights():
    changes = "{a: {mode: beam}, b: {mode: hybrid}, c: {mode: hybrid, num_beams: 2}, d: {mode: hybrid, quantize: int4}}"
    assert [m.twin for m in methods(study(f"methods={changes}"))] == [None, "a", None, None]


@pytest.mark.parametrize(
    "name",
    ["k", "draft_width", "beam_width", "draft_temperature", "drafter", "tree", "bound_rule", "quantization"],
)
def test_presets_are_studies(name):
    found = methods(study(f"ablation={name}"))
    assert len(found) > 2
    assert all(m.twin is not None for m in found if m.draft and not m.options["do_sample"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode.kk=3", "no key decode.kk: did you mean decode.k?"),
        ("sed=3", "did you mean seed?"),
        ("decode.mode=speculatve", "did you mean 'speculative'?"),
        ("decode.max_tokens=many", "decode.max_tokens='many' is not allowed: give a whole number"),
        ("decode.max_tokens=0", "decode.max_tokens=0 is not allowed"),
        ("decode.k=0", "num_draft_tokens=0 is not allowed"),
        ("decode.temperature=hot", "give a number or null"),
        ("metrics.confidence=95", "give 0.95"),
        ("metrics.baseline=greed", "did you mean 'greedy'?"),
        ("methods={a: {mod: beam}}", "did you mean methods.a.mode?"),
        ("methods={a: {mode: []}}", "methods.a.mode=[] is not allowed: give one of greedy"),
        ("methods={a: {mode: [beam]}}", "methods.a.mode=['beam'] is not allowed: did you mean 'beam'?"),
        ("methods={a: 3}", "methods.a=3 is not allowed"),
        ("prompts=hi", "prompts='hi' is not allowed: give a list"),
        ("ablation=kk", "Could not find 'ablation/kk'"),
        ("tracking=wand", "Could not find 'tracking/wand'"),
        ("launcher.name=slurm", "launcher.name='slurm' is not allowed"),
        ("data=spec_bench", "data.source"),
        ("chat=none", "chat='none' is not allowed"),
        ("draft.temperature=-1", "needs|not allowed|no key|-1"),
    ],
)
def test_what_is_wrong_is_named(override, message):
    if override.startswith("draft.temperature"):
        override_list = [override, "decode.mode=speculative", "decode.do_sample=true"]
    else:
        override_list = [override]
    with pytest.raises(SpecbeamError, match=re.sub(r"([?(\[\]])", r"\\\1", message)):
        study(*override_list)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("hydra.run.dir=x", "give output=FOLDER"),
        ("hydra.sweep.dir=x", "give --multirun and output=FOLDER"),
        ("hydra.sweep.subdir=x", "give --multirun and output=FOLDER"),
        ("hydra.mode=MULTIRUN", "give --multirun"),
        ("hydra.sweeper.params={seed: 1}", "give --multirun and KEY=A,B"),
        ("hydra/sweeper=basic", "give --multirun and KEY=A,B"),
        ("hydra/launcher=joblib", "give launcher=ray"),
        ("+hydra.launcher.n_jobs=2", "give launcher=ray"),
        ("hydra.job.name=x", "give project_name=NAME"),
        ("hydra.searchpath=[file:///tmp]", "give --config-dir DIR"),
        *(
            (key, "leave it out")
            for key in (
                "hydra.job.chdir=true",
                "hydra.job.id=1",
                "hydra.job.num=1",
                "hydra.job.override_dirname=x",
                "hydra.job.config.override_dirname.kv_sep=x",
                "hydra.job.config_name=x",
                "+hydra.job.env_set.A=1",
                "hydra.job.env_copy=[A]",
                "hydra.verbose=true",
                "hydra.output_subdir=null",
                "hydra.help.app_name=x",
                "hydra.hydra_help.template=x",
                "hydra.hydra_logging.version=1",
                "hydra.job_logging=null",
                "hydra.env={}",
                "hydra.overrides.task=[]",
                "hydra.runtime.cwd=x",
                "++hydra.callbacks.mine=1",
                "hydra/job_logging=disabled",
                "hydra/hydra_logging=none",
                "hydra/help=default",
                "hydra/hydra_help=default",
                "hydra/output=default",
                "hydra/env=default",
                "+hydra/callbacks=mine",
                "~hydra.run_dir",
                "~hydra",
                "hydra=x",
            )
        ),
    ],
)
def test_keys_of_hydras_own_are_refused(override, hint, capsys):
    key = override.lstrip("+~").partition("=")[0]
    for sweeping in ([], ["--multirun"]):
        assert main(["study", "--show-config", "prompts=[hi]", override, *sweeping]) == 2
        says = f"specbeam: {key} is a key of Hydra's own, and a study does not use it: {hint}\n"
        assert capsys.readouterr() == ("", says)


@pytest.mark.parametrize(
    "flag",
    [
        *[
            "--config-path=x",
            "-cp=x",
            "--config-name=x",
            "-cn=x",
            "-cd=x",
            "--cfg=job",
            "-c=job",
            "--package=x",
            "-p=x",
        ],
        *["--hydra-help", "--info", "-i", "--resolve", "--run", "-r", "--experimental-rerun=x", "--shell-completion"],
    ],
)
def test_flags_of_hydras_own_are_refused(flag, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["study", "--show-config", "prompts=[hi]", flag])
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


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


def test_nothing_to_decode_is_refused():
    with pytest.raises(SpecbeamError, match="nothing to decode"):
        check(compose([]))


def test_an_unreadable_configuration_is_one_line(tmp_path):
    for content in ("a: [1,", "defaults:\n  m _self_\n"):  # no YAML, and a list of defaults that is a text
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(SpecbeamError, match="cannot be composed"):
            compose([], tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(SpecbeamError, match=r"UTF-8|cannot be composed"):
        compose([], tmp_path)
    with pytest.raises(SpecbeamError, match="is not a folder"):
        compose([], tmp_path / "missing")


def test_sweeps_are_what_hydra_makes_of_them():
    words = ["decode.k=1,2", "seed=range(0,3)", "decode.max_tokens=8"]
    parsed = OverridesParser.create().parse_overrides(words)
    expected = [[f"decode.k={k}", f"seed={s}", "decode.max_tokens=8"] for k in (1, 2) for s in range(3)]
    assert [*sweep(words)] == expected
    assert [o.is_sweep_override() for o in parsed] == [True, True, False]
