"""The pages of the cookbook on real models: each gives what it says. tests/test_docs.py runs them on tiny ones."""

import json
import re
from itertools import pairwise

import pytest

from specbeam import cli
from tests.conftest import reference_model
from tests.pages import COOKBOOK, ROOT, blocks, program, shell, text_of

pytestmark = pytest.mark.models


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    """Where the paths of the pages begin, and where the names of models are the reference models."""
    for module in ("specbeam.models.model", "specbeam.checkpoints"):
        monkeypatch.setattr(f"{module}.locate", lambda source, *_, **__: reference_model(source.removesuffix(".gguf")))
    monkeypatch.chdir(ROOT)


def run(name, first=None):
    """Run a page's Python, or its first blocks alone. Returns its variables."""
    page = page_of(name)
    variables = {"__name__": "page"}
    text = program(page)
    if first is not None:
        text = "".join([code for language, code in blocks(page) if language == "python"][:first])
    exec(compile(text, page, "exec"), variables)
    return variables


def page_of(name):
    (page,) = (page for page in COOKBOOK if page.stem == name)
    return page


def texts_of(result):
    """The texts of a result, stripped. They differ, and their scores fall."""
    texts = [sequence.text.strip() for sequence in result.sequences]
    assert len({*texts}) == len(texts)
    assert all(a.score >= b.score for a, b in pairwise(result.sequences))
    return texts


@pytest.mark.thorough
def test_translations_differ_and_their_scores_fall():
    texts = texts_of(run("translate", first=1)["result"])
    assert len(texts) == 5
    assert texts[0] == "Merci pour votre aide."


@pytest.mark.thorough
def test_the_translation_of_the_command_line(capsys):
    words, *_ = shell(page_of("translate"))
    assert cli.main(words[1:]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"score -\d", printed)) == 5
    assert "Merci pour votre aide." in printed


@pytest.mark.thorough
def test_titles_are_of_the_catalogue_and_the_right_one_is_first():
    page = run("retrieve")
    texts = texts_of(page["result"])
    assert len(texts) == 3
    assert {*texts} <= {*page["titles"]}
    assert texts[0] == "How to bake bread at home"


@pytest.mark.thorough
def test_a_draft_changes_no_token_of_code():
    page = run("code")
    assert page["drafted"].token_ids == page["plain"].token_ids
    assert page["drafted"].stats.target_passes < page["plain"].stats.target_passes / 3
    assert "count = count + 1" in page["renamed"].text


@pytest.mark.thorough
def test_texts_are_ranked_by_the_sum_of_log_probabilities_there_and_back():
    page = run("rerank")
    scores, candidates, result = page["scores"], page["candidates"], page["result"]
    assert page["ranked"][0] == "Merci pour votre aide."
    assert all(scores[a] >= scores[b] for a, b in pairwise(page["ranked"]))
    there = page["log_prob"](page["there"].format(page["english"]), candidates[0])
    assert there == pytest.approx(result.sequences[0].log_prob, abs=1e-3)  # as the search found it


def test_the_labels_of_the_page_are_those_that_it_prints(capsys):
    page = run("label")
    shown = re.findall(r"```text\n(.*?)```\n", text_of(page_of("label")), re.DOTALL)
    assert "".join(shown[-2:]) == capsys.readouterr().out
    assert sum(page["right"].values()) == 19
    assert all(sum(share.values()) == pytest.approx(1) for share in page["shares"])


@pytest.mark.thorough
def test_candidates_of_a_file_are_reranked(tmp_path):
    *_, words = shell(page_of("rerank"))
    assert cli.main([*words[1:3], str(tmp_path / "ranked.jsonl"), *words[4:]]) == 0
    best = [json.loads(line)["best"] for line in (tmp_path / "ranked.jsonl").read_text("utf-8").splitlines()]
    assert best == ["Merci pour votre aide.", "Le livre est sur la table."]


def test_the_passage_that_answers_a_question_is_found():
    page = run("long-document")
    assert "Disclaimer of Warranty" in page["best"]
    assert page["answer"].text.strip().startswith("No")


@pytest.mark.thorough
def test_settings_are_compared_on_labelled_reviews():
    answers = run("evaluate")["answers"]
    assert sum(answers["int8"]) >= 18
    assert sum(answers["int4"]) >= 18
