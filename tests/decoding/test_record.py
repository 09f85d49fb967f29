"""A trace records each round as it happened."""

import json

import pytest

import specbeam
from specbeam.cli.trace import show_trace

HOW = {
    "greedy": {},
    "drafted": {"draft": "suffix", "num_draft_tokens": 4, "draft_width": 2},
    "drafted by a model": {"num_draft_tokens": 4, "draft_width": 2},
    "sampled": {"draft": "ngram", "temperature": 0.05, "seed": 3},
    "beams": {"num_beams": 3, "length_penalty": 0.0},
    "drafted beams": {"num_beams": 3, "length_penalty": 0.0, "num_draft_tokens": 3, "draft_width": 5},
}


@pytest.fixture(params=HOW)
def result(request, tiny):
    lm = tiny("llama", initializer_range=0.1)[1]  # likes to repeat itself
    options = {"max_new_tokens": 30, "eos_token_id": [], "trace": True, **HOW[request.param]}
    if "model" in request.param or request.param == "drafted beams":
        options["draft"] = tiny("llama", initializer_range=0.102)[1]
    return specbeam.generate(lm, [1, 2, 3, 1, 2], **options)


def test_the_steps_lead_to_the_text(result):
    beams = [[]]
    for entry in result.trace:
        for step in entry["steps"]:
            beams = [[*beams[b["beam"]], b["token_id"]] for b in step]
            scores = [b["score"] for b in step]
    assert beams[0] == result.token_ids
    assert scores[0] == pytest.approx(result.sequences[0].score, abs=1e-4)
    assert sum(len(entry["steps"]) for entry in result.trace) == 30


def test_rounds_add_up_to_the_statistics(result):
    stats = result.stats
    guesses = [g for entry in result.trace for g in entry["drafted"]]
    assert len(result.trace) == stats.target_passes
    assert len(guesses) == stats.drafted
    assert sum(g["accepted"] for g in guesses) == stats.accepted
    assert stats.steps_per_target_pass == pytest.approx(30 / stats.target_passes)
    if stats.drafted:
        assert stats.acceptance_rate == stats.accepted / stats.drafted
        assert stats.accepted
    for entry in result.trace:
        for i, guess in enumerate(entry["drafted"]):
            assert guess["parent"] is None or guess["parent"] < i


def test_it_is_plain_data_and_can_be_read(result):
    assert json.loads(json.dumps(result.to_dict()))["trace"] == result.trace
    lines = list(show_trace(result.trace, colour=False))
    assert sum(line.startswith("round") for line in lines) == len(result.trace)
    if all(len(step) == 1 for entry in result.trace for step in entry["steps"]) and result.stats.accepted:
        accepted = next(g for entry in result.trace for g in entry["drafted"] if g["accepted"])
        assert f"+{accepted['text']}+".replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") in "".join(lines)


def test_no_trace_unless_asked_for(lm):
    result = specbeam.generate(lm, [1], max_new_tokens=2)
    assert result.trace is None
    assert "trace" not in result.to_dict()
