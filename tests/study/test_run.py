"""Whole studies on a tiny model: results, crashes and refusals."""

import functools
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pandas
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

import specbeam
from specbeam.cli import main
from specbeam.errors import SpecbeamError
from specbeam.options.options import Options
from specbeam.study import results, tracking, work
from specbeam.study.composition import compose
from specbeam.study.config import check
from specbeam.study.data import Row
from specbeam.study.run import run_study
from specbeam.study.samples import MAX_SAMPLES
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, of_transformers, random_model
from tests.jobs.faults import Crash, CrashingDisk, killed_at_sync
from tests.pages import ROOT, files, shell
from tests.study.test_metrics import make

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module")
def folder(save):
    return str(save(random_model("llama", initializer_range=0.1), byte_tokenizer(CHAT_TEMPLATE)))


@pytest.fixture
def command(folder, tmp_path):
    """The words of a study of some rows, with the run's folder of the given name."""

    def command(rows, name, *more):
        data = tmp_path / f"{len(rows)}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        load = ["load.backend=cpu", "load.quantize=float32"]  # bit for bit the same whatever is drafted
        return [f"target_model={folder}", f"output={tmp_path / name}", f"data.source={data}", *load, *more]

    return command


@pytest.fixture
def words(command):
    rows = [
        {"question_id": i, "category": "ab"[i % 2], "turns": [f"q {i}", "more"][: 1 + i % 2], "reference": ["x", "y"]}
        for i in range(4)
    ]
    return command(rows, "run", "decode.max_new_tokens=8")


@pytest.fixture
def small(command):
    """A study of two generations, whose folder has the given name."""
    row = {"question_id": 1, "category": "a", "turns": ["q", "more"], "reference": []}
    return lambda name: command([row], name, "decode.mode=greedy", "decode.max_new_tokens=4")


@pytest.fixture
def models_loaded_once(monkeypatch):
    monkeypatch.setattr(work, "load", functools.lru_cache(work.load))


def study(*words):
    return main(["study", *words])


def kept(folder):
    _, records, scores = results.read(folder)
    # Without the statistics: how much is drafted depends on the seconds of passes.
    compared = ("key", "text", "token_ids", "beams", "finish_reason", "error", "category", "references")
    return {record["key"]: {name: record[name] for name in compared} for record in records}, scores


def test_a_study_finds_what_generate_finds(words, folder, tmp_path, capsys):
    assert (
        study(
            *words,
            "decode.mode=[greedy,speculative,beam,speculative-beam]",
            "decode.num_return_sequences=4",
            "repeats=2",
        )
        == 0
    )
    records, scores = kept(tmp_path / "run")
    assert len(records) == 4 * 2 * (4 + 2)
    lm = specbeam.load(folder, backend="cpu", quantize="float32")
    for row in range(4):
        said = [{"role": "user", "content": f"q {row}"}]
        for turn in range(1 + row % 2):
            expected = specbeam.generate(lm, said, max_new_tokens=8)
            for method in ("greedy", "speculative"):
                assert records[f"{method}|{row}|{turn}|1"]["token_ids"] == expected.token_ids
            said += [{"role": "assistant", "content": expected.text}, {"role": "user", "content": "more"}]
        beams = specbeam.generate(lm, f"q {row}", max_new_tokens=8, num_beams=4, num_return_sequences=4)
        for method in ("beam", "speculative-beam"):
            found = records[f"{method}|{row}|0|0"]["beams"]
            assert [beam["token_ids"] for beam in found] == [s.token_ids for s in beams.sequences]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    same = {m["method"]: m["agreement"] for m in summary["methods"]}
    assert same["speculative"] == {"twin": "greedy", "same": 12, "of": 12}
    assert same["speculative-beam"] == {"twin": "beam", "same": 12, "of": 12}
    assert {*scores} == {*records}
    table = pandas.read_parquet(tmp_path / "run" / "generations.parquet")
    assert len(table) == 48
    assert (table.tokens_per_second > 0).all()
    out = capsys.readouterr().out
    assert "48 generations, 0 failed" in out
    report = (tmp_path / "run" / "report.html").read_text()
    header = report[report.index("<header>") : report.index("</header>")]
    assert f"{folder}, float32 on cpu" in header
    assert "<dt>drafts</dt><dd>ngram</dd>" in header
    assert f"specbeam {specbeam.__version__}, torch {torch.__version__}" in header
    assert re.search(r"<dt>date</dt><dd>\d{4}-\d\d-\d\d", header)
    assert study("show", str(tmp_path / "run")) == 0
    assert "speculative" in capsys.readouterr().out


def test_a_constraint_holds_in_each_method_and_the_report_says_how_many_texts_satisfy_it(command, tmp_path, capsys):
    rows = [{"question_id": 1, "category": "a", "turns": ["q"], "reference": []}]
    methods = (
        "methods={cut: {mode: greedy, max_new_tokens: 3}, whole: {mode: speculative}, beams: {mode: beam, "
        "num_return_sequences: 2, num_beams: 2}, free: {mode: greedy, json_schema: null}}"
    )
    schema = "{type: object, properties: {a: {enum: [b, cd]}}, required: [a], additionalProperties: false}"
    assert study(*command(rows, "run", f"decode.json_schema={schema}", methods, "decode.max_new_tokens=40")) == 0
    records, _ = kept(tmp_path / "run")
    texts = {key.partition("|")[0]: [beam["text"] for beam in records[key]["beams"]] for key in records}
    assert texts.pop("free")[0][:1] != "{"
    assert texts["cut"] == ['{"a']
    assert [*map(json.loads, texts["whole"])] in ([{"a": "b"}], [{"a": "cd"}])
    assert sorted(texts["beams"]) == ['{"a": "b"}', '{"a": "cd"}']
    found = json.loads((tmp_path / "run" / "summary.json").read_text())["methods"]
    valid = {method["method"]: method["metrics"].get("valid", {}).get("mean") for method in found}
    assert valid == {"cut": 0.0, "whole": 1.0, "beams": 1.0, "free": None}
    assert "valid, %" in (tmp_path / "run" / "report.html").read_text()


def test_no_measured_generation_is_traced(words, tmp_path, monkeypatch):
    """A trace costs time. The generations that the report shows run once more for it, after all measured ones."""
    ran = []

    class Engine(specbeam.Engine):
        def submit(self, prompt, options, **how):
            request = super().submit(prompt, options, **how)
            ran.append((Options.of(options).trace, request))
            return request

    monkeypatch.setattr(work, "Engine", Engine)
    assert study(*words, "decode.mode=[greedy,speculative,speculative-beam]", "decode.num_draft_tokens=2") == 0
    _, records, _ = results.read(tmp_path / "run")
    traced = [trace for trace, _ in ran]
    warm_ups = 3
    assert traced[: warm_ups + len(records)] == [False] * (warm_ups + len(records))
    # The first prompt of each method, and the samples of the report.
    assert 3 <= traced.count(True) <= 3 + MAX_SAMPLES
    assert len(traced) == warm_ups + len(records) + traced.count(True)
    untraced = Counter(request.result().text for trace, request in ran if not trace)
    measured = Counter(record["text"] for record in records)
    assert measured <= untraced
    assert (untraced - measured).total() == warm_ups
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    drafted = {record["method"]: 0 for record in records}
    for record in records:
        drafted[record["method"]] += record["stats"]["drafted"]
    assert drafted["greedy"] == 0 < min(drafted["speculative"], drafted["speculative-beam"])
    for method, places in summary["acceptance_by_position"].items():
        assert sum(place["drafted"] for place in places) == drafted[method]
    table = pandas.read_parquet(tmp_path / "run" / "generations.parquet")
    assert 2 <= table.trace.notna().sum() == traced.count(True)
    report = (tmp_path / "run" / "report.html").read_text()
    assert "what it proposed" in report
    assert len([*(tmp_path / "run" / "replays").iterdir()]) == 3
    ran.clear()
    assert study(*words, "decode.mode=[greedy,speculative,speculative-beam]", "decode.num_draft_tokens=2") == 0
    assert not ran  # recordings are kept, too
    assert (tmp_path / "run" / "report.html").read_text().count("what it proposed") == report.count("what it proposed")


def test_perplexity_is_transformers_loss(words, folder, save, tmp_path):
    """Of the target, and of another model that judges, which reads the text by its own tokenizer."""
    other = save(random_model("llama", seed=5), byte_tokenizer(CHAT_TEMPLATE))
    study(*words, "decode.mode=greedy", "chat.raw=true", f"metrics.perplexity=[target,{other}]")
    _, records, scores = results.read(tmp_path / "run")
    for name, judge in {"target": folder, str(other): other}.items():
        reference = AutoModelForCausalLM.from_pretrained(judge, dtype=torch.float32)
        for record in records:
            prompt = byte_tokenizer()(record["prompt"]).input_ids
            read = record["token_ids"] if name == "target" else byte_tokenizer()(record["text"]).input_ids
            ids = torch.tensor([[*prompt, *read]])
            labels = ids.clone()
            labels[:, : len(prompt)] = -100
            with torch.no_grad():
                loss = float(reference(ids, labels=labels).loss)
            assert scores[record["key"]]["perplexity"][name] == pytest.approx(math.exp(loss), rel=1e-4)


def test_each_methods_own_model_measures_the_perplexity_of_its_texts(words, tmp_path):
    """Models that are loaded in two ways give the same short texts, and other probabilities."""
    words = [word for word in words if not word.startswith("load.")]
    given = "methods={exact: {mode: greedy, quantize: float32}, small: {mode: greedy, quantize: int4}}"
    assert study(*words, given, "load.backend=cpu", "decode.max_new_tokens=1") == 0
    _, records, scores = results.read(tmp_path / "run")
    by_key = {record["key"]: record for record in records}
    same = [key for key in by_key if by_key[key]["token_ids"] == by_key[key.replace("exact", "small")]["token_ids"]]
    assert any(key.startswith("exact") for key in same)
    for record in records:
        expected = math.exp(-record["beams"][0]["log_prob"] / len(record["token_ids"]))
        assert scores[record["key"]]["perplexity"]["target"] == pytest.approx(expected, rel=1e-12)


def test_a_text_that_is_next_to_impossible_has_an_infinite_perplexity():
    job = {"token_ids": [1, 2], "beams": [{"log_prob": -2000.0}]}
    assert work.Work.perplexity(None, "target", job) == math.inf


def test_another_base_model_of_an_adapter_is_another_run(small, save, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    base = save(random_model("llama"))
    model = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    words = [*small("run")[1:], f"target_model={tmp_path / 'adapter'}", "metrics.perplexity=[]"]
    assert study(*words) == 0
    random_model("llama", seed=1).save_pretrained(base)
    capsys.readouterr()
    assert study(*words) == 2
    assert "holds another run (models." in capsys.readouterr().err


def test_methods_take_turns_to_be_first():
    made = check(compose(["prompts=[hi]", "decode.mode=[greedy,speculative,beam]"]))
    rows = [Row(str(i), ["a"]) for i in range(3)]
    jobs = work.jobs_of_turn(made, rows, 0, {})
    assert [job["method"] for job in jobs[::3]] == ["greedy", "speculative", "beam"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A fresh folder, which is the current one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def tiny_words(folder):
    return [f"target_model={folder}", "metrics.perplexity=[]", "decode.mode=greedy", "decode.max_new_tokens=2"]


def runs_in(folder):
    return sorted(path.name for path in (folder / "runs").iterdir())


def test_every_configuration_has_its_own_folder_and_the_same_command_goes_on(here, tiny_words, capsys, monkeypatch):
    def prompt(text):
        (here / "q.txt").write_text(text)
        return [*tiny_words, "data.source=q.txt"]

    assert study("show") == 2
    assert "there is no run in runs/: give show RUN" in capsys.readouterr().err
    assert study(*prompt("one")) == 0
    (first,) = runs_in(here)
    assert re.fullmatch(r"specbeam-study-[0-9a-f]{8}", first)
    assert capsys.readouterr().out.startswith(f"runs/{first}: a new run\n")
    assert study(*prompt("two")) == 0
    (second,) = {*runs_in(here)} - {first}  # other prompts in a file of the same name are another run
    assert study(*prompt("two"), "project_name=mine") == 0
    (third,) = {*runs_in(here)} - {first, second}
    assert third.startswith("mine-")
    capsys.readouterr()
    assert study("show") == 0
    assert capsys.readouterr().out.startswith(f"runs/{third}:\n")
    assert study("show", "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"] == f"runs/{third}"
    before = (here / "runs" / first / "generations.jsonl").read_bytes()
    monkeypatch.setattr(work, "Engine", lambda *given: pytest.fail("it was there"))
    assert study(*prompt("one")) == 0
    assert capsys.readouterr().out.startswith(f"runs/{first}: goes on, 1 of 1 generations are there\n")
    assert (here / "runs" / first / "generations.jsonl").read_bytes() == before
    assert runs_in(here) == sorted([first, second, third])


@pytest.mark.parametrize("output", ["runs", "swp"])
def test_runs_of_a_sweep_are_named_by_their_values(here, tiny_words, output):
    """Also by values that are no names of folders. Options may stand between the words."""
    contents = {"a/b.txt": "one", "a_b.txt": "two", f"{'x' * 240}.txt": "three"}
    (here / "a").mkdir()
    for name, text in contents.items():
        (here / name).write_text(text)
    words = [] if output == "runs" else [f"output={output}"]
    assert study(*words, "--multirun", *tiny_words, f"data.source={','.join(contents)}") == 0
    found = [*(here / output).glob("*/generations.jsonl")]
    assert sorted(json.loads(path.read_text())["prompt"] for path in found) == sorted(contents.values())
    assert study(*words, "--multirun", *tiny_words[:-2], "decode.max_new_tokens=1,2", "prompts=[one]") == 0
    for most in (1, 2):
        (folder,) = (here / output).glob(f"*max_new_tokens={most}*")
        assert output == "swp" or folder.name[:-9] == f"specbeam-study-decode.max_new_tokens={most}"
        assert all(len(record["token_ids"]) <= most for record in kept(folder)[0].values())


def test_ctrl_c_shows_the_finished_generations_and_how_to_go_on(here, tiny_words, capsys, monkeypatch):
    words = [*tiny_words, "prompts=[one,two,three]"]
    answer = work.Work.__call__

    def interrupted(self, job):
        if job["row"] == "prompt 3":
            raise KeyboardInterrupt
        return answer(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(work.Work, "__call__", interrupted)
        assert study(*words) == 130
    out, err = capsys.readouterr()
    (name,) = runs_in(here)
    assert f"2 of 3 generations are kept in runs/{name}; give the same command to go on" in err
    table = out.splitlines()
    assert table[1].split()[:3] == ["method", "n", "tokens/s"]
    assert table[2].split()[:2] == ["greedy", "2"]
    assert table[3] == "n=2: too few for an interval"
    assert study(*words) == 0
    assert "goes on, 2 of 3 generations are there" in capsys.readouterr().out


def test_a_run_without_a_summary_yet_is_shown_and_compared(words, tmp_path, capsys):
    assert study(*words, "decode.mode=[beam,speculative-beam]", "data.limit=2", "metrics.perplexity=[target]") == 0
    now, before = tmp_path / "run", tmp_path / "before"
    before.mkdir()
    for name in (results.GENERATIONS, results.SCORES, results.FINGERPRINT):
        (before / name).write_text((now / name).read_text())
    summaries = []
    for folder in (now, before):
        capsys.readouterr()
        assert study("show", str(folder), "--json") == 0
        summaries.append(json.loads(capsys.readouterr().out) | {"run": None})
    assert summaries[0] == summaries[1]
    assert study("show", str(now)) == 0
    first = capsys.readouterr().out.splitlines()[1]
    assert first.startswith("This run is too small to show an effect: which of ")
    assert first.endswith(" is the fastest is not settled.")
    study("diff", str(before), str(now))
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[:2]] == ["beam", "speculative-beam"]
    assert "only in" not in out
    assert out.count("(n=4: too few for an interval)") == 2
    assert out.count("not settled") == 2


GUIDE = ROOT / "docs/guides/study.md"


def write_files_of_the_guide(folder, name):
    for file, content in files(GUIDE).items():
        if file.startswith(f"{name}/"):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(content)


def test_the_configuration_folder_of_the_guide(here, folder, capsys):
    """The files and the command of docs/guides/study.md, as they stand there."""
    write_files_of_the_guide(here, "my-study")
    (command,) = [words for words in shell(GUIDE) if "my-study" in words]
    assert main([*command[1:], f"target_model={folder}", "decode.max_new_tokens=2"]) == 0
    (name,) = runs_in(here)
    assert name.startswith("my-study-")
    _, records, _ = results.read(here / "runs" / name)
    assert {record["prompt"] for record in records} == {"Why is the sky blue?", "How do birds find their way?"}
    assert "0 failed" in capsys.readouterr().out


@pytest.fixture
def first_study(here, folder, save, monkeypatch):
    """The folder of the guide with the configuration of the first study, whose models are tiny ones here."""
    draft = str(save(random_model("llama", seed=1), byte_tokenizer(CHAT_TEMPLATE)))
    sources = {"Qwen/Qwen2.5-3B-Instruct": folder, "Qwen/Qwen2.5-0.5B-Instruct": draft}
    monkeypatch.setattr("specbeam.models.model.locate", lambda source, *_: Path(sources.get(source, source)))
    monkeypatch.setattr("specbeam.study.run.locate", lambda source, *_: Path(sources.get(source, source)))
    write_files_of_the_guide(here, "first-study")
    return here / "first-study" / "config.yaml"


def test_the_configuration_of_the_first_study_runs_as_it_stands(here, first_study, folder, capsys):
    assert study("--config-dir", "first-study") == 0
    (name,) = runs_in(here)
    config = yaml.safe_load((here / "runs" / name / results.CONFIG).read_text())
    assert config["decode"] == {"mode": "speculative", "max_new_tokens": 50, "num_beams": 4, "num_draft_tokens": 4}
    lm = specbeam.load(folder)
    _, records, _ = results.read(here / "runs" / name)
    assert [record["method"] for record in records] == ["speculative"] * 2
    for record, prompt in zip(records, ("The future of AI is", "Once upon a time in a digital world,"), strict=True):
        said = [("system", "You are a concise and helpful assistant."), ("user", prompt)]
        messages = [{"role": role, "content": content} for role, content in said]
        assert record["token_ids"] == specbeam.generate(lm, messages, max_new_tokens=50).token_ids
        assert record["rendered"] == of_transformers(lm.tokenizer).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert record["stats"]["drafted"] > 0
        assert len(record["stats"]["acceptance_by_position"]) <= 4
    text = first_study.read_text()
    first_study.write_text(text.replace("  k:", "  num_draft_tokens:").replace("max_tokens", "max_new_tokens"))
    capsys.readouterr()
    assert study("--config-dir", "first-study") == 0  # the same run in our words
    assert capsys.readouterr().out.startswith(f"runs/{name}: goes on, 2 of 2 generations are there\n")


def test_a_sweep_in_words_of_the_first_study_is_the_sweep_in_ours(here, first_study, capsys):
    words = ["--config-dir", "first-study", "metrics.perplexity=[]", "--multirun"]
    assert study(*words, "decode.k=1,2", "decode.mode=hybrid", "decode.max_tokens=2") == 0
    names = runs_in(here)
    assert [name[:-9] for name in names] == [f"specbeam-study-decode.num_draft_tokens={k}" for k in (1, 2)]
    for name, k in zip(names, (1, 2), strict=True):
        config = json.loads((here / "runs" / name / results.FINGERPRINT).read_text())["config"]
        assert (config["decode"]["num_draft_tokens"], config["decode"]["mode"]) == (k, "speculative-beam")
    capsys.readouterr()
    ours = ["decode.num_draft_tokens=1,2", "decode.mode=speculative-beam", "decode.max_new_tokens=2"]
    assert study(*words, *ours) == 0
    assert capsys.readouterr().out.count("goes on, 2 of 2 generations are there") == 2
    assert runs_in(here) == names


@pytest.mark.parametrize("power", [False, True])
def test_whenever_the_process_ends_nothing_is_lost_or_doubled(small, models_loaded_once, tmp_path, power):
    """The process ends, or the machine loses power, at each kind of operation on the disk; the same study goes on."""
    whole, whole_scores = kept(run_study(dict(compose(small("whole")))))
    config, folder = dict(compose(small("crashed"))), tmp_path / "crashed"

    def crash(at):
        with pytest.MonkeyPatch.context() as patch:
            CrashingDisk(patch, at, power)
            with pytest.raises(Crash):
                run_study(config)

    for operation in range(1, 8):  # write, sync and replace the configuration, then the fingerprint; write a line
        crash(operation)
    records, scores = {}, {}
    # An operation may be the write of a line, its sync, or the removal of a torn line.
    for operation in itertools.cycle([1, 1, 3, 3]):
        before, scores_before = records, scores
        crash(operation)
        records, scores = kept(folder)
        assert before.items() <= records.items() <= whole.items()
        assert scores_before.items() <= scores.items() <= whole_scores.items()
        if len(scores) == len(whole_scores):
            break
    assert run_study(config) == folder
    assert kept(folder) == (whole, whole_scores)
    keys = [json.loads(line)["key"] for line in (folder / "generations.jsonl").read_text().splitlines()]
    assert len(keys) == len({*keys}) == len(whole)


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
@pytest.mark.thorough
def test_killed_for_real_it_goes_on(small, tmp_path):
    command = [*killed_at_sync(4), "study", *small("killed")]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == -signal.SIGKILL
    records, scores = kept(tmp_path / "killed")
    assert (len(records), scores) == (2, {})  # the configuration, the fingerprint and a line were synced, one written
    assert study(*small("killed")) == 0
    whole, whole_scores = kept(run_study(dict(compose(small("whole")))))
    assert records == whole
    assert kept(tmp_path / "killed") == (whole, whole_scores)


def test_a_failed_generation_is_a_line_and_the_others_go_on(small, tmp_path, capsys):
    assert study(*small("run"), f"prompts=['{'long ' * 100}']", "decode.mode=[greedy,beam]") == 0
    _, records, _ = results.read(tmp_path / "run")
    failed = [record for record in records if record["error"]]
    assert {record["row"] for record in failed} == {"prompt 1"}
    assert "context" in failed[0]["error"]
    assert "6 generations, 2 failed" in capsys.readouterr().out


def test_a_folder_of_another_run_is_refused(small, tmp_path, capsys):
    study(*small("run"))
    before = (tmp_path / "run" / "generations.jsonl").read_bytes()
    assert study(*small("run"), "seed=1") == 2
    assert "config.seed was 0, now 1" in capsys.readouterr().err
    words = small("run")
    (tmp_path / "1.jsonl").write_text('{"question_id": 1, "category": "a", "turns": ["other"]}\n')
    assert study(*words) == 2
    assert "data was" in capsys.readouterr().err
    assert (tmp_path / "run" / "generations.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["target_model=missing-model"], "missing-model"),
        (["metrics.perplexity=[missing-model]"], "missing-model"),
        (["data.source=missing.jsonl"], "no such file"),
        (["decode.num_draft=1"], "did you mean decode.num_draft_tokens?"),
        (["what"], "is no KEY=VALUE"),
        (["show", "a", "b"], "give show, show RUN"),
        (["show", "nowhere"], "is no run folder"),
        (["diff", "nowhere", "here"], "is no run folder"),
        (["output=/dev/null/run"], "cannot be written"),
    ],
)
def test_what_is_wrong_is_one_line(words, change, message, capsys):
    words = [] if change[0] in ("show", "diff") else words
    assert study(*words, *change) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert "\n" not in err


def test_a_full_disk_keeps_what_was_finished(small, tmp_path, capsys):
    sync, calls = os.fsync, itertools.count(1)

    def full(file):
        if next(calls) == 4:  # after the configuration, the fingerprint and a generation
            raise OSError(28, os.strerror(28))
        sync(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert study(*small("run")) == 2
    assert "No space left" in capsys.readouterr().err
    kept_before = kept(tmp_path / "run")[0]
    assert 1 <= len(kept_before) <= 2
    assert study(*small("run")) == 0
    assert kept_before.items() <= kept(tmp_path / "run")[0].items()


def test_diff_tells_a_slower_method(tmp_path, capsys):
    noise, methods = random.Random(1), ("greedy", "speculative", "beam", "speculative-beam")
    for folder, slow in ((tmp_path / "run", 1.0), (tmp_path / "slower", 0.8)):
        folder.mkdir()
        (folder / results.FINGERPRINT).write_text('{"config": {}}')
        text = ""
        for row, method in itertools.product(range(48), methods):
            speed = 100 * noise.gauss(1, 0.05) * (slow if method == "beam" else 1)
            text += json.dumps(make(method=method, row=str(row), speed=speed, started=0.0)) + "\n"
        (folder / results.GENERATIONS).write_text(text)
    assert study("diff", str(tmp_path / "run"), str(tmp_path / "slower")) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "SLOWER" in line]
    assert line.startswith("beam")
    assert study("diff", str(tmp_path / "run"), str(tmp_path / "run")) == 0


@pytest.mark.parametrize("mode", ["offline", pytest.param(None, marks=pytest.mark.thorough)])
def test_wandb_goes_on_without_a_key_or_network_and_says_where_its_files_are(
    small, tmp_path, monkeypatch, mode, caplog
):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_MODE", raising=False) if mode is None else monkeypatch.setenv("WANDB_MODE", mode)
    assert study(*small("run"), "tracking=wandb") == 0
    (files,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    begin, end = [record.getMessage() for record in caplog.records if "W&B" in record.getMessage()]
    why = "there is no key; set WANDB_API_KEY, or run wandb login" if mode is None else "WANDB_MODE says so"
    assert begin == f"W&B is offline ({why})"
    assert end == f"W&B was offline, so the run's files are on this disk; send them with: wandb sync {files}"


def test_what_fails_beside_the_measurements_leaves_them(small, tmp_path, monkeypatch, caplog):
    class Broken(tracking.Unfailing):
        def record(self, record):
            raise RuntimeError("no tracker today")

    def fail(*given):
        raise MemoryError("no room for a trace")

    monkeypatch.setattr(tracking, "WandbTracker", lambda config, folder: Broken(None))
    monkeypatch.setattr(work.Work, "recording", fail)
    assert study(*small("run"), "tracking=wandb") == 0
    assert "no tracker today" in caplog.text
    assert "was not recorded: no room for a trace" in caplog.text
    assert len(kept(tmp_path / "run")[0]) == 2
    assert (tmp_path / "run" / "report.html").exists()


OWN = """
seen = []

def letters(record):
    record["text"] += "changed"  # has no effect
    return len(record["text"]) - len("changed")

def broken(record):
    return "yes" if record["method"] == "greedy" else record["method"] == "speculative"

def raises(record):
    return None if record["method"] == "greedy" else record["gone"]

class Tracker:
    def __init__(self, config, folder):
        seen.append((config["seed"], folder.name))

    def record(self, record):
        seen.append(record.pop("key"))

    def summary(self, summary, folder):
        seen.append((len(summary["methods"]), (folder / "report.html").exists()))
        raise OSError("the network is gone")

    def close(self):
        seen.append("closed")

class NoTracker:
    def __init__(self, config, folder):
        pass

    def record(self, record):
        pass

class FailingTracker(Tracker):
    def __init__(self, config, folder):
        raise OSError("no network")
"""


@pytest.fixture
def own(here, monkeypatch):
    """A user's module in the current directory, of a name that no other test has."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    (here / "own_code.py").write_text(OWN)


def test_metrics_of_ones_own_are_in_every_table_and_are_measured_anew(
    own, small, tmp_path, monkeypatch, capsys, caplog
):
    assert study(*small("run"), "decode.mode=[greedy,speculative]") == 0
    monkeypatch.setattr(work, "Engine", lambda *given: pytest.fail("it was there"))
    names = ["own_code:letters", "own_code:broken", "own_code:raises"]
    words = [*small("run"), "decode.mode=[greedy,speculative]", f"metrics.own=[{','.join(names)}]"]
    capsys.readouterr()
    assert study(*words) == 0  # metrics belong to no run
    table = pandas.read_parquet(tmp_path / "run" / "generations.parquet").set_index("key")
    assert table["own_code:letters"].tolist() == table.text.str.len().tolist()
    first, last = "greedy|1|0|0", "speculative|1|0|0"
    assert table["own_code:broken"][last] == 1
    reason = "it returned the str 'yes'; return a finite number, True or False, or None"
    assert f"metric own_code:broken failed on generation {first}: {reason}" in caplog.text
    assert f"metric own_code:raises failed on generation {last}: KeyError: 'gone' (" in caplog.text
    assert caplog.text.count("own_code:broken failed") == 1  # of two generations
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    greedy, speculative = (method["metrics"] for method in summary["methods"])
    assert greedy["own_code:letters"]["mean"] == table.text.str.len().groupby(table.method).mean()["greedy"]
    assert "own_code:broken" not in greedy
    assert "own_code:raises" not in speculative
    assert [*summary["failed_metrics"]["own_code:broken"]] == ["greedy|1|0|0", "greedy|1|1|0"]
    out = capsys.readouterr().out
    assert f"The metric own_code:broken failed on 2 generations; the first is {first}: {reason}." in out
    assert "letters" in out
    assert '<th scope="col">letters</th>' in (tmp_path / "run" / "report.html").read_text()
    assert "& letters &" in (tmp_path / "run" / "tables" / "methods.tex").read_text()


def test_a_tracker_of_ones_own_follows_a_study_and_loses_nothing(own, small, tmp_path, caplog):
    for start in range(2):
        assert study(*small("run"), "tracking=own_code:Tracker") == 0
        made, *keys, last = sys.modules["own_code"].seen[4 * start :]
        assert made == (0, "run")
        assert keys == ["greedy|1|0|0", "greedy|1|1|0"]
        assert last == (1, True)
    assert caplog.text.count("tracking stopped: summary of the tracker failed: OSError: the network is gone (") == 2
    assert len(kept(tmp_path / "run")[0]) == 2
    assert study(*small("other"), "tracking=own_code:FailingTracker") == 0
    assert "no tracking: own_code:FailingTracker cannot be made: OSError: no network (" in caplog.text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("metrics.own=[own_code:gone]", "has no 'gone'"),
        ("metrics.own=[missing_code:score]", "there is no module 'missing_code'"),
        ("metrics.own=[own_code:seen]", "metric 'own_code:seen' is no function of a generation"),
        ("metrics.own=[rougeX]", "unknown metric 'rougeX'"),
        ("tracking=own_code:NoTracker", "tracker 'own_code:NoTracker' has no method summary"),
        ("tracking=own_code:letters", "tracker 'own_code:letters' cannot be made: give a class"),
    ],
)
def test_what_is_no_metric_or_tracker_is_one_line_before_the_study(own, small, tmp_path, word, message, capsys):
    assert study(*small("run"), word) == 2
    err = capsys.readouterr().err.strip()
    assert message in err
    assert "\n" not in err
    assert not [*tmp_path.glob("run/generations.jsonl")] or not kept(tmp_path / "run")[0]


def test_the_same_configuration_is_one_run_in_whichever_sweep_it_came(here, tiny_words, capsys, monkeypatch):
    words = [*tiny_words, "prompts=[one]"]
    assert study(*words, "--multirun", "seed=1,2") == 0
    before = runs_in(here)
    assert len(before) == 2
    capsys.readouterr()
    monkeypatch.setattr(work, "Engine", lambda *given: pytest.fail("it was there"))
    assert study(*words, "seed=1") == 0
    assert study(*words, "--multirun", "repeats=1", "seed=2,1") == 0
    assert capsys.readouterr().out.count("goes on, 1 of 1 generations are there") == 3
    assert runs_in(here) == before


@pytest.mark.thorough
def test_workers_on_a_cluster_find_the_same(words, tmp_path):
    pytest.importorskip("ray")
    assert study(*words) == 0
    whole = kept(tmp_path / "run")
    words = [word.replace("/run", "/ray") for word in words]
    assert study(*words, "launcher=ray", "launcher.workers=2") == 0
    assert kept(tmp_path / "ray") == whole


def test_two_processes_do_not_share_a_folder(tmp_path):
    run = results.Run(tmp_path / "x", {"config": {}}, "")
    with pytest.raises(SpecbeamError, match="another process"):
        results.Run(tmp_path / "x", {"config": {}}, "")
    run.close()


@pytest.mark.parametrize("file", [results.GENERATIONS, results.SCORES, results.FINGERPRINT])
@pytest.mark.parametrize("content", ["{}\n", '{"key": 3}\n', "[]\n", "3\n"])
def test_a_damaged_file_of_a_run_is_one_error(tmp_path, file, content):
    results.Run(tmp_path, {"config": {}}, "").close()
    (tmp_path / file).write_text(content)
    if file != results.FINGERPRINT or content[0] != "{":
        with pytest.raises(SpecbeamError, match=f"{file} is damaged"):
            results.read(tmp_path)
    with pytest.raises(SpecbeamError, match=f"{file} is damaged|holds another run"):
        results.Run(tmp_path, {"config": {}}, "")
    (tmp_path / file).unlink()
