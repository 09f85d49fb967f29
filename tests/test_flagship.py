"""A draft saves most passes of beams on the prompts that show it, and none on questions. No token changes."""

import json

import pytest

import specbeam
from specbeam import Engine
from specbeam.engine import CostTable
from tests.conftest import reference_model
from tests.pages import FILES

pytestmark = pytest.mark.models

A_PASS = 0.0024
"""Seconds, about as SmolLM2-135M takes on two cores."""
AVX512, AVX2 = 0.025, 0.16
"""What a further node costs, as a share of a pass. Costs are given, so the counts are the same in every run."""


@pytest.fixture(scope="module")
def lm():
    return specbeam.load(reference_model("smollm2-135m-instruct"))


def results(lm, prompt, share, **options):
    """The results of four beams without a draft and with lookups, on a machine where passes cost this much."""
    engine = Engine(
        lm, costs=lambda _, ahead=False: CostTable(lambda nodes: A_PASS * (1.2 - 0.2 * ahead) * (1 + share * nodes))
    )
    raw = options.pop("raw", False)
    found = []
    for draft in (None, "ngram"):  # alone, since requests of one time share passes
        request = engine.submit(prompt, {"num_beams": 4, "max_new_tokens": 48, **options}, raw=raw, draft=draft)
        engine.run()
        found.append(request.result())
    return found


def prompts(name):
    return {row["id"]: row["prompt"] for row in map(json.loads, (FILES / name).read_text().splitlines())}


@pytest.mark.parametrize("share", [AVX512, AVX2])
@pytest.mark.parametrize("name", ["users", "customers", "counts"])
def test_a_draft_saves_passes_of_beams_on_rows_of_a_form(lm, name, share):
    plain, fast = results(lm, prompts("queries.jsonl")[name], share, raw=True, stop_strings=";")
    assert fast.token_ids == plain.token_ids
    assert fast.finish_reason == "stop"
    assert fast.stats.target_passes <= 0.6 * plain.stats.target_passes
    assert fast.stats.nodes_evaluated < plain.stats.nodes_evaluated


def test_questions_gain_nothing_and_lose_nothing(lm):
    plain, fast = results(lm, prompts("questions.jsonl")["opposite"], AVX512)
    assert fast.token_ids == plain.token_ids
    assert 0.9 * plain.stats.target_passes <= fast.stats.target_passes <= 1.1 * plain.stats.target_passes
