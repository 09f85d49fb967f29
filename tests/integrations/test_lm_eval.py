"""The model of lm_eval, against lm_eval's own model "hf" on the same checkpoint."""

import json
import os
import subprocess
import sys
from functools import cache, partial
from importlib.metadata import entry_points

import datasets
import lm_eval.tasks
import numpy as np
import pytest
import torch
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing

from specbeam import Engine, SpecbeamError, hf
from specbeam.lm_eval import SpecbeamLM, main
from tests.conftest import BOS, CHAT_TEMPLATE, EOS, UNUSED, byte_tokenizer, needs_torch, random_model

CONTEXT = 64
PROMPTS = ["Once upon a time", "1 + 1 =", "x", "<bos>given", "long " * 40, "The quick brown fox jumps over"]


def tokenizer(kind):
    """With a BOS that begins every text, as Llama's; with one that does not; without one, as Qwen's."""
    made = byte_tokenizer(CHAT_TEMPLATE)
    if kind == "adds bos":
        made.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    if kind == "no bos":
        made.bos_token = None
    return made


@pytest.fixture(scope="module")
def folder(save):
    """A checkpoint with a short context that likes some tokens."""

    @cache
    def folder(kind="plain", likes=UNUSED):
        model = random_model("llama", max_position_embeddings=CONTEXT)
        model.lm_head.weight.data[likes] *= 2.5
        return str(save(model, tokenizer(kind)))

    return folder


def hflm(source, **arguments):
    return HFLM(pretrained=source, device="cpu", dtype="float32", **arguments)


def load(source, **arguments):
    return SpecbeamLM(pretrained=source, device="cpu", dtype="float32", **arguments)


def requests(kind, arguments):
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def texts_of(model, prompts=PROMPTS, **task):
    return model.generate_until(requests("generate_until", [(prompt, {"until": [], **task}) for prompt in prompts]))


@pytest.fixture(scope="module", params=["plain", "adds bos", "no bos"])
def both(folder, request):
    """The checkpoint as lm_eval's own model, and as ours."""
    theirs = hflm(folder(request.param))
    answer, answers = theirs.generate_until, {}

    def remembered(requests):  # several of our variants are held to one text
        key = repr([request.args for request in requests])
        return answers[key] if key in answers else answers.setdefault(key, answer(requests))

    theirs.generate_until = remembered
    return theirs, load(folder(request.param))


@pytest.fixture(scope="module")
def lm(folder):
    return load(folder()).lm


SCORED = [("The sky is", continuation) for continuation in (" blue", " green and blue", "!")]
SCORED += [("The sky is ", "blue"), ("", "no context"), ("<bos>given", " twice"), ("x" * 200, "too long")]
SCORED += [("x", "y" * 60), ("a", "b"), ("Ünïcödé", " → ✓")]
ROLLING = [("short",), ("",), ("A text of more than one window. " * 6,), ("w" * CONTEXT,)]


def test_log_likelihoods_are_theirs(both):
    """Also of continuations that are the text of greedy search, which is reported."""
    theirs, ours = both
    contexts = [chr(letter) for letter in range(ord("A"), ord("z"))]
    pairs = zip(contexts, texts_of(theirs, contexts, max_gen_toks=2), strict=True)
    scored = requests("loglikelihood", [*SCORED, *(pair for pair in pairs if pair[1] and pair[1].isascii())])
    expected, got = theirs.loglikelihood(scored), ours.loglikelihood(scored)
    assert [log_prob for log_prob, _ in got] == pytest.approx([log_prob for log_prob, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in got} == {True, False}
    rolling = requests("loglikelihood_rolling", ROLLING)
    assert ours.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), abs=1e-3)


def test_a_shorter_context_is_theirs(folder, lm):
    theirs, ours = hflm(folder(), max_length=48), SpecbeamLM(lm, max_length=48)
    scored = requests("loglikelihood", [pair for pair in SCORED if len(pair[1]) < 48])
    expected, got = ([log_prob for log_prob, _ in model.loglikelihood(scored)] for model in (theirs, ours))
    assert got == pytest.approx(expected, abs=1e-3)
    assert texts_of(ours, max_gen_toks=20) == texts_of(theirs, max_gen_toks=20)


@pytest.mark.parametrize("until", [["\n\n"], ["1"], ";", ["W", "<unused>"]], ids=repr)
def test_greedy_text_is_theirs(both, until):
    theirs, ours = both
    task = {"max_gen_toks": 20, "until": until, "do_sample": False, "temperature": 0.0}
    expected = texts_of(theirs, **task, top_p=1.0)
    for draft, batch_size in ((None, 4), ("ngram", 1)):
        ours = SpecbeamLM(ours.lm, draft=draft, batch_size=batch_size)
        assert texts_of(ours, **task, top_p=0.95) == expected
    whole = texts_of(theirs, max_gen_toks=20)
    assert (expected == whole) is (until == ["\n\n"])  # the others do end some texts


def test_beams_are_theirs(both):
    theirs, ours = both
    task, beams = {"max_gen_toks": 16, "until": ["\n\n"]}, {"num_beams": 4, "length_penalty": 0.5}
    expected = texts_of(theirs, **task, **beams, do_sample=False)
    for draft in (None, "ngram"):
        assert texts_of(SpecbeamLM(ours.lm, draft=draft), **task, **beams, do_sample=False) == expected
        assert texts_of(SpecbeamLM(ours.lm, draft=draft, **beams), **task) == expected


def test_beams_that_end_are_those_of_transformers(folder):
    # Lm_eval's own model is no reference: its stopping criterion ends all beams when the best one ends.
    source = folder(likes=EOS)
    theirs, ours = hflm(source), load(source, draft="ngram")
    for until in ("\n\n", "1"):
        for prompt, text in zip(PROMPTS, texts_of(ours, max_gen_toks=16, num_beams=4, until=[until]), strict=True):
            ids = theirs.tok_encode(prompt)[16 - CONTEXT :]
            how = {"num_beams": 4, "max_new_tokens": 16, "stop_strings": [until], "tokenizer": theirs.tokenizer}
            out = theirs.model.generate(torch.tensor([ids]), **how)
            assert text == theirs.tok_decode(out[0, len(ids) :]).split(until)[0]


def test_a_draft_model_changes_nothing(folder, lm, monkeypatch):
    drafts, submit = [], Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda *a, draft, **kw: drafts.append(draft) or submit(*a, draft=draft, **kw))
    expected = texts_of(SpecbeamLM(lm, num_beams=2), max_gen_toks=12)
    ours = load(folder(), num_beams=2, draft=folder("adds bos"), num_draft_tokens=3)
    assert texts_of(ours, max_gen_toks=12) == expected
    assert drafts[-1].source == folder("adds bos")


@pytest.mark.parametrize(
    ("given", "task", "expected"),
    [
        ({}, {}, {"max_new_tokens": 256, "samples": False, "stop_strings": (), "eos_token_id": (EOS,)}),
        ({}, {"until": "a", "max_gen_toks": 7}, {"stop_strings": ("a",), "max_new_tokens": 7}),
        ({}, {"until": ["", "b"], "max_new_tokens": 7}, {"stop_strings": ("b",), "max_new_tokens": 7}),
        ({"eos_token_id": 9}, {"until": ["<unused>"]}, {"eos_token_id": (9,), "stop_strings": ("<unused>",)}),
        ({"stop_strings": "c", "max_new_tokens": 5}, {"until": "d"}, {"stop_strings": ("c", "d"), "max_new_tokens": 5}),
        ({}, {"do_sample": True, "temperature": 2, "top_p": 0.9}, {"samples": True, "temperature": 2, "top_p": 0.9}),
        ({}, {"temperature": 0.5}, {"samples": True, "temperature": 0.5}),
        ({}, {"do_sample": False, "temperature": 0.5, "top_p": 0.9}, {"samples": False, "top_p": None}),
        ({}, {"do_sample": True, "temperature": 0.0}, {"samples": False}),
        ({}, {"top_p": 0.9}, {"samples": False}),
        ({"temperature": 0.7}, {"do_sample": False, "temperature": 0.0}, {"samples": True, "temperature": 0.7}),
        ({"top_k": 5}, {"do_sample": True, "temperature": 0.8}, {"samples": True, "temperature": 0.8, "top_k": 5}),
        ({"temperature": 0}, {"do_sample": True, "temperature": 0.8}, {"samples": False}),
        ({"do_sample": False}, {"do_sample": True, "temperature": 0.8}, {"samples": False, "temperature": None}),
        ({"num_beams": 3}, {"num_beams": 1}, {"num_beams": 3}),
        ({}, {"num_beams": 2, "early_stopping": True}, {"num_beams": 2, "early_stopping": True}),
        ({}, {"num_beams": 1, "length_penalty": 0.5, "early_stopping": True}, {"length_penalty": None}),
        ({"num_beams": 1}, {"num_beams": 4, "length_penalty": 0.5}, {"num_beams": 1, "length_penalty": None}),
        ({"seed": 3}, {"seed": 4}, {"samples": False, "seed": None}),
        ({}, {"seed": 4, "do_sample": True}, {"samples": True, "seed": 4}),
        ({"seed": 3}, {"seed": 4, "do_sample": True}, {"samples": True, "seed": 3}),
    ],
    ids=str,
)
def test_what_the_model_was_given_wins_over_the_task(lm, monkeypatch, given, task, expected):
    chosen = []
    monkeypatch.setattr(Engine, "submit", lambda self, prompt, options, draft: chosen.append(options) or 1 / 0)
    ours = SpecbeamLM(lm, **given)
    monkeypatch.setattr(ours, "max_length", 1000)
    with pytest.raises(ZeroDivisionError):
        ours.generate_until(requests("generate_until", [("x", task)]))
    assert {name: getattr(chosen[0], name) for name in expected} == expected


def test_repeated_requests_are_different_samples(lm):
    def run(torch_seed, **given):
        torch.manual_seed(torch_seed)
        return texts_of(SpecbeamLM(lm, **given), ["x"] * 4, do_sample=True, max_gen_toks=8)

    assert len(set(run(0))) > 1
    assert run(0) == run(0) != run(1)
    assert run(0, seed=5) == run(1, seed=5) != run(0, seed=6)
    assert len(set(run(0, seed=5))) > 1


def test_answers_are_kept_as_they_come(lm):
    class Hook:
        def add_partial(self, kind, arguments, answer):
            kept.append((kind, arguments, answer))

    kept, ours, task = [], SpecbeamLM(lm), {"max_gen_toks": 4, "until": ["a"]}
    ours.set_cache_hook(Hook())
    for kind, arguments in {
        "loglikelihood": SCORED,
        "loglikelihood_rolling": ROLLING,
        "generate_until": [(prompt, task) for prompt in PROMPTS],
    }.items():
        answers = getattr(ours, kind)(requests(kind, arguments))
        expected = [(kind, given, answer) for given, answer in zip(arguments, answers, strict=True)]
        assert sorted(kept, key=repr) == sorted(expected, key=repr)
        kept.clear()


def test_chat_templates_are_applied_as_theirs(folder, save):
    theirs, ours = hflm(folder()), load(folder())
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The"}]
    for add in (True, False):
        assert ours.apply_chat_template(messages, add) == theirs.apply_chat_template(messages, add)
    assert ours.chat_template(True) == theirs.chat_template(True) == CHAT_TEMPLATE
    assert ours.tokenizer_name == theirs.tokenizer_name

    source = str(save(random_model("llama"), byte_tokenizer(CHAT_TEMPLATE.replace("'system', ", ""))))
    with_system = [{"role": "system", "content": "Be brief."}, *messages]
    ours = load(source)
    expected = hflm(source).apply_chat_template(with_system)
    assert ours.apply_chat_template(with_system) == expected == ours.apply_chat_template(messages)
    with pytest.raises(SpecbeamError, match="unknown role tool"):
        ours.apply_chat_template([{"role": "tool", "content": "Hi"}])
    with pytest.raises(SpecbeamError, match="has no chat template"):
        load(save(random_model("llama"))).apply_chat_template(messages)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "give the model argument pretrained="),
        ("pretrained=/nowhere/at/all", "/nowhere/at/all"),
        ("pretrained={},num_beam=2", "unknown model argument 'num_beam': did you mean 'num_beams'?"),
        ("pretrained={},devise=cpu", "unknown model argument 'devise': did you mean 'device'?"),
        ("pretrained={},num_beams=0", "num_beams=0 is not allowed"),
        ("pretrained={},num_draft_tokens=3", "num_draft_tokens=3 has no effect without a draft"),
        ("pretrained={},device=abacus", "abacus"),
        ("pretrained={},batch_size=many", "batch_size='many' is not allowed"),
        ("pretrained={},max_length=65", "max_length=65 is not allowed: give 2 to 64"),
        ("pretrained={},draft=ngam", "ngam"),
    ],
)
def test_wrong_model_arguments_are_told_in_one_line(folder, arguments, says):
    with pytest.raises(SpecbeamError) as raised:
        SpecbeamLM.create_from_arg_string(arguments.format(folder()))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "arguments", "says"),
    [
        ("generate_until", ("x", {"num_beems": 2}), "'num_beems': did you mean 'num_beams'?"),
        ("generate_until", ("x", {"max_gen_toks": 64}), "64 new tokens leave no room for a prompt"),
        ("loglikelihood", ("x", "y" * 65), "a text of 65 tokens is to be scored in one piece"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(lm, kind, arguments, says):
    with pytest.raises(SpecbeamError, match=says):
        getattr(SpecbeamLM(lm), kind)(requests(kind, [arguments]))


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(SpecbeamError, match="no tokenizer"):
        SpecbeamLM(hf.wrap(random_model("gpt2")))


def test_model_args_win_over_the_harness(folder):
    said = {"pretrained": folder(), "batch_size": 3}
    ours = SpecbeamLM.create_from_arg_obj(said, {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"})
    assert ours.batch_size == 3
    assert ours.lm.backend.device == ("cuda" if torch.cuda.is_available() else "cpu")
    said["device"] = "cpu"
    assert SpecbeamLM.create_from_arg_obj(said, {"device": "abacus"}).lm.backend.device == "cpu"
    assert SpecbeamLM(ours.lm, batch_size="auto").batch_size == 8
    assert SpecbeamLM(ours.lm, batch_size="auto:4", max_batch_size=16).batch_size == 16


@needs_torch
def test_the_model_is_where_lm_eval_looks_for_plugins():
    (found,) = entry_points(group="lm_eval.models", name="specbeam")
    assert found.load() is SpecbeamLM


DOCUMENTS = [{"question": f"{n} + {n} =", "answer": str(2 * n), "other": str(2 * n + 1)} for n in range(1, 6)]
METRICS = {"tiny_choice": "acc", "tiny_generate": "exact_match", "tiny_perplexity": "word_perplexity"}
TASKS = {
    "tiny_choice": {"output_type": "multiple_choice", "doc_to_choice": "{{[answer, other]}}", "doc_to_target": 0},
    "tiny_generate": {
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["1"], "max_gen_toks": 8, "do_sample": False},
    },
    "tiny_perplexity": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{question}}"},
}
for name, task in TASKS.items():
    TASKS[name] = {"task": name, "doc_to_text": "{{question}}", "metric_list": [{"metric": METRICS[name]}]} | task


def test_an_evaluation_gives_what_theirs_gives(folder):
    def evaluate(model, **given):
        data = {"test_split": "test", "custom_dataset": lambda **kwargs: {"test": Dataset.from_list(DOCUMENTS)}}
        return simple_evaluate(
            model=model,
            model_args={"pretrained": folder(), **given},
            tasks=[task | data for task in TASKS.values()],
            task_manager=TaskManager(include_defaults=False),
            device="cpu",
            apply_chat_template=True,
            bootstrap_iters=0,
        )

    expected, got = evaluate("hf", dtype="float32"), evaluate("specbeam", dtype="float32", draft="ngram", batch_size=4)
    for task, metric in METRICS.items():
        answers, theirs = ([s["filtered_resps"] for s in out["samples"][task]] for out in (got, expected))
        if task == "tiny_generate":
            assert answers == theirs
        else:
            np.testing.assert_allclose(np.array(answers, float), np.array(theirs, float), atol=1e-3)
        ours, theirs = (out["results"][task][f"{metric},none"] for out in (got, expected))
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A folder of tasks for ``--include_path``. In this process the harness does not read its own 10,000 tasks."""
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(documents)}}, "test_split": "test"}
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task | data))  # JSON is YAML
    return tmp_path


@pytest.mark.parametrize("is_module", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_command_line_evaluates(folder, tasks, monkeypatch, capsys, is_module):
    """In this process, or as a module in a process of its own."""
    source = folder()
    model = f"pretrained={source},device=cpu,dtype=float32,num_beams=2,draft=ngram,length_penalty=0.5"
    arguments = ["--model", "specbeam", "--tasks", *TASKS, "--include_path", str(tasks), "--apply_chat_template"]
    arguments += ["--model_args", model, "--batch_size", "auto"]
    arguments += ["--output_path", str(tasks / "results.json"), "--log_samples"]
    if is_module:
        environment = {**os.environ, "HF_HOME": str(tasks), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        command = [sys.executable, "-m", "specbeam.lm_eval", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    else:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tasks / "cache"))
        monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
        assert main() == 0
        printed = capsys.readouterr().out
    assert all(name in printed for name in TASKS)
    (samples,) = tasks.glob("samples_tiny_generate_*.jsonl")
    texts = [json.loads(line)["resps"][0][0] for line in samples.read_text().splitlines()]
    ours = load(source, num_beams=2, length_penalty=0.5)
    prompts = [ours.apply_chat_template([{"role": "user", "content": d["question"]}]) for d in DOCUMENTS]
    assert texts == texts_of(ours, prompts, **TASKS["tiny_generate"]["generation_kwargs"])


def test_the_command_line_tells_what_is_wrong_in_one_line(folder, tasks, monkeypatch, capsys):
    arguments = ["--model", "specbeam", "--model_args", f"pretrained={folder()},num_beam=2"]
    arguments += ["--include_path", str(tasks), "--tasks", "tiny_choice"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments])
    assert main() == 2
    says = "specbeam: unknown model argument 'num_beam': did you mean 'num_beams'?"
    assert capsys.readouterr().err.splitlines()[-1] == says
