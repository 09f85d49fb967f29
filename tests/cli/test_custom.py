"""User-defined methods and drafters on the command line, from a file in the current directory."""

import json
import sys

import pytest

import specbeam
from specbeam.cli import batch

OWN = """
from specbeam.core.strategy import Evaluate, Hypothesis

calls = []

def propose(tokens, lm):
    calls.append(tokens)
    return [9, 9]

def broken(tokens, lm):
    return tokens.nothing

def shortest(setup, drafter):
    tree, tip = setup.tree, setup.tree.tip
    selection = yield Evaluate([tip], setup.selector(tree, [tip]))
    tip = tree.append(tip, selection.tokens[0, 0], selection.log_probs[0, 0])
    return [Hypothesis(tip, float(tree.scores(tip)), "length")]
"""
FEW = ("--max-new-tokens", "6", "--num-draft-tokens", "2")


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module of the current directory, once it was imported."""
    (tmp_path / "own_methods.py").write_text(OWN)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in ("hi", "you")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda: sys.modules["own_methods"]
    sys.modules.pop("own_methods", None)


@pytest.fixture
def run(own, folder, specbeam_command):
    def run(command, *words, status=0):
        found, out, err = specbeam_command(command, *words, "--model", folder)
        assert found == status, err
        return out or err

    return run


def test_generate_takes_both(run, own, model):
    plain = specbeam.generate(model, "hi", max_new_tokens=6)
    drafted = json.loads(run("generate", "hi", "--json", *FEW, "--draft", "own_methods:propose"))
    assert (drafted["token_ids"], drafted["receipt"]) == (plain.token_ids, plain.receipt)
    assert own().calls[0] == specbeam.Engine(model).check("hi")
    short = json.loads(run("generate", "hi", "--json", "--strategy", "own_methods:shortest"))
    assert short["token_ids"] == plain.token_ids[:1]
    assert short["inputs"]["objects"] == ["strategy own_methods:shortest"]


def test_verify_says_that_it_cannot_make_it_again(run, specbeam_command, tmp_path):
    (tmp_path / "saved.json").write_text(run("generate", "hi", "--json", "--strategy", "own_methods:shortest"))
    status, out, _ = specbeam_command("verify", str(tmp_path / "saved.json"))
    assert status == 1
    assert "cannot be made again: it was made with strategy own_methods:shortest, which no file can hold" in out


def test_batch_goes_on_with_the_same_strategy_only(run, own, tmp_path, monkeypatch):
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi"}\n' * 6)
    words = ("in.jsonl", "out.jsonl", "--strategy", "own_methods:shortest", "--batch-size", "1")
    answer, first = batch.answer, iter(range(4))

    def interrupted(*given):
        if next(first, None) is None:
            raise KeyboardInterrupt
        return answer(*given)

    monkeypatch.setattr(batch, "answer", interrupted)
    run("batch", *words, status=130)
    monkeypatch.setattr(batch, "answer", answer)
    (tmp_path / "own_methods.py").write_text(OWN + "# changed")
    assert "is of another run" in run("batch", *words, status=2)
    (tmp_path / "own_methods.py").write_text(OWN)
    assert "6 rows (4 of them earlier), 0 failed" in run("batch", *words)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["new_tokens"] for row in rows] == [1] * 6


def test_an_error_in_a_row_is_of_that_row(run, tmp_path):
    run("batch", "in.jsonl", "out.jsonl", *FEW, "--draft", "own_methods:broken", status=1)
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        assert "drafter own_methods:broken" in (error := json.loads(line)["error"])
        assert (
            f"AttributeError: 'list' object has no attribute 'nothing' ({tmp_path / 'own_methods.py'}, line 11)"
            in error
        )


def test_compare_shows_own_strategies_beside_ours(run):
    listed = "own_methods:shortest,greedy,speculative"
    found = json.loads(run("compare", "hi", "--json", *FEW, "--strategies", listed, "--draft", "own_methods:propose"))
    tokens = {name: result["token_ids"] for name, result in found["strategies"].items()}
    assert [*tokens] == ["greedy", "speculative", "own_methods:shortest"]
    assert tokens["speculative"] == tokens["greedy"]
    assert tokens["own_methods:shortest"] == tokens["greedy"][:1]
    assert found["strategies"]["own_methods:shortest"]["identical"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "hi", "--draft", "own_methods:prpose"], "has no 'prpose' (did you mean 'propose'?)"),
        (["generate", "hi", "--strategy", "own_method:shortest"], "no module 'own_method' in the current directory"),
        (["batch", "in.jsonl", "out.jsonl", "--strategy", "beams"], "unknown strategy 'beams': no package declares"),
        (["compare", "hi", "--strategies", "own_methods:longest"], "has no 'longest'"),
        (["generate", "hi", "--draft", "ngrams"], "give ngram, suffix, mtp, a model or module:name"),
    ],
)
def test_a_wrong_name_is_refused_before_a_model_is_loaded(run, monkeypatch, words, says):
    monkeypatch.setattr("specbeam.models.model.load", None)
    assert says in run(*words, status=2)
