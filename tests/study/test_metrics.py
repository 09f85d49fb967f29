"""Metrics against the libraries' own values, closed forms and the counts of generations."""

import json
from dataclasses import asdict

import nltk
import numpy as np
import pytest

from specbeam.results import Stats
from specbeam.study.metrics import (
    acceptance_by_position,
    diversity,
    finished,
    of_corpus,
    of_record,
    pieces,
    quality,
    repetition,
    time_by_component,
)

sacrebleu = pytest.importorskip("sacrebleu")
rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")

TEXT = "The quick brown fox jumps over the lazy dog."
REFERENCES = ["The quick brown dog jumps on the log.", "A fast brown fox jumped over a dog that was lazy."]


STATS = {
    "prompt_tokens": 5, "seconds": 2.0, "time_to_first_token": 0.25, "forward_passes": 9, "target_passes": 7,
    "draft_passes": 2, "nodes_evaluated": 20, "peak_slots": 30, "drafted": 10, "accepted": 4, "acceptance_rate": 0.4,
    "steps_per_target_pass": 1.5, "peak_memory": 1000, "precision": "int8 on cpu", "target_seconds": 1.25,
    "draft_seconds": 0.5,
}  # fmt: skip


def make(text=TEXT, *, method="greedy", row="81", turn=0, repeat=0, token_ids=(1, 2, 3), speed=20.0, **other):
    """A generation as a run keeps it."""
    ids = list(token_ids)
    record = {
        "key": f"{method}|{row}|{turn}|{repeat}", "method": method, "mode": "greedy", "row": row, "turn": turn,
        "repeat": repeat, "category": None, "prompt": "Say", "references": [], "text": text, "token_ids": ids,
        "finish_reason": "length", "beams": [{"text": text, "token_ids": ids, "score": -1.0}],
        "stats": asdict(Stats(**STATS, new_tokens=len(ids), tokens_per_second=speed)), "times": [0.25, 0.75, 2.0],
        "piece_tokens": [1, 1, 5], "error": None, "wall": 2.1,
    }  # fmt: skip
    return json.loads(json.dumps(record | other))


def failed(error="MemoryError: no room", **given):
    """A generation that failed."""
    record = make(**given)
    named = ("key", "method", "mode", "row", "turn", "repeat", "category", "prompt", "references", "wall")
    return {name: record[name] for name in named} | {"error": error}


def beam(*token_ids, text="x"):
    return {"text": text, "token_ids": list(token_ids), "score": 0.0}


def test_the_metrics_of_a_record():
    metrics = of_record(make())
    assert metrics == {
        **{name: STATS[name] for name in ("seconds", "time_to_first_token", "target_passes", "draft_passes")},
        **{name: STATS[name] for name in ("acceptance_rate", "steps_per_target_pass", "peak_memory")},
        "tokens_per_second": 20.0,
        "new_tokens": 3,
        "time_per_token": pytest.approx(1750 / 6),  # 500 ms for a token, and then 1250 ms for five
        "time_per_token_p95": pytest.approx(250 + 0.75 * 250),
        "gap_p50": pytest.approx(875.0),  # of 500 and 1250 ms
        "gap_p95": pytest.approx(500 + 0.95 * 750),
        "distinct_1": 1.0,
        "distinct_2": 1.0,
        **dict.fromkeys(("evaluated_beams", "repetition")),
    }
    assert {*of_record(make(references=REFERENCES))} == {*metrics, "rouge1", "rouge2", "rougeL", "bleu", "chrf"}


def test_valid_is_the_share_of_texts_that_satisfy_their_constraint():
    beams = [beam(i) | {"is_complete": i < 3} for i in range(4)]
    assert of_record(make(beams=beams))["valid"] == 0.75
    assert "valid" not in of_record(make(beams=[beam(1) | {"is_complete": None}]))


def test_an_empty_text_has_few_metrics():
    metrics = of_record(make("", token_ids=[], times=[], piece_tokens=[], references=["something"]))
    missing = ("time_per_token", "time_per_token_p95", "gap_p50", "gap_p95", "repetition", "distinct_1", "distinct_2")
    assert {metrics[name] for name in missing} == {None}
    assert metrics["bleu"] == metrics["rougeL"] == metrics["chrf"] == 0


def test_time_per_token_is_the_same_for_tokens_that_come_one_by_one_and_several_at_a_time():
    one_by_one = pieces([0.1 * n for n in range(1, 10)], [1] * 9)
    at_once = pieces([0.1, 0.5, 0.9], [1, 4, 4])
    assert at_once["time_per_token"] == pytest.approx(one_by_one["time_per_token"]) == pytest.approx(100)
    assert at_once["time_per_token_p95"] == pytest.approx(one_by_one["time_per_token_p95"])
    assert at_once["gap_p50"] == pytest.approx(4 * one_by_one["gap_p50"])


@pytest.mark.parametrize(
    ("token_ids", "share"),
    [([1, 2, 3], None), ([1, 2, 3, 4], 0), ([7] * 10, 6 / 7), ([1, 2, 3, 4, 1, 2, 3, 4], 1 / 5), (range(99), 0)],
)
def test_repetition(token_ids, share):
    assert repetition([*token_ids]) == (share if share is None else pytest.approx(share))


def test_diversity_of_beams():
    found = diversity([beam(1, 2, 3, 4), beam(1, 2, 5), beam(1, 2, 3, 4)])
    assert found["beams_distinct_1"] == pytest.approx(5 / 11)
    assert found["beams_distinct_2"] == pytest.approx(4 / 8)
    assert found["edit_distance"] == pytest.approx((2 / 4 + 0 + 2 / 4) / 3)


def test_distinct_n_is_of_the_text_whether_there_are_other_beams_or_not():
    """Four beams that are nearly one text would make it look repetitive, and the same text alone would not."""
    alone = of_record(make(token_ids=[1, 2, 3, 1]))
    of_four = of_record(make(token_ids=[1, 2, 3, 1], beams=[beam(1, 2, 3, 1)] * 4))
    assert alone["distinct_1"] == of_four["distinct_1"] == pytest.approx(3 / 4)
    assert alone["distinct_2"] == of_four["distinct_2"] == pytest.approx(3 / 3)
    assert "beams_distinct_1" not in alone
    assert of_four["beams_distinct_1"] == pytest.approx(3 / 16)
    assert of_four["beams_distinct_2"] == pytest.approx(3 / 12)


def test_edit_distances_are_those_of_nltk():
    pairs = [("kitten", "sitting"), ("prekitten", "presitting"), ("flaw", "lawn"), ("", "abc"), ("", "")]
    pairs.append(("same", "same"))
    generator = np.random.default_rng(0)
    for length in (1, 20, 200):
        pairs.append(["".join(map(chr, generator.integers(0, 5, length + i))) for i in (0, length // 3)])
    for a, b in pairs:
        expected = nltk.edit_distance(a, b) / max(len(a), len(b), 1)
        assert diversity([beam(*map(ord, a)), beam(*map(ord, b))])["edit_distance"] == pytest.approx(expected)


def test_self_bleu_is_sacrebleus_of_each_beam_with_the_others_as_references():
    texts = [TEXT, *REFERENCES]
    expected = [
        sacrebleu.BLEU(effective_order=True).sentence_score(texts[i], [texts[j] for j in range(3) if j != i]).score
        for i in range(3)
    ]
    assert diversity([beam(1, text=text) for text in texts])["self_bleu"] == pytest.approx(np.mean(expected))
    assert diversity([beam(1, text=TEXT)] * 2)["self_bleu"] == pytest.approx(100)


def test_quality_is_the_libraries():
    scores = quality(TEXT, REFERENCES)
    names = ["rouge1", "rouge2", "rougeL"]
    each = [rouge_scorer.RougeScorer(names).score(reference, TEXT) for reference in REFERENCES]
    for name in names:
        assert scores[name] == pytest.approx(max(one[name].fmeasure for one in each))
    assert scores["bleu"] == pytest.approx(sacrebleu.BLEU(effective_order=True).sentence_score(TEXT, REFERENCES).score)
    assert scores["chrf"] == pytest.approx(sacrebleu.CHRF().sentence_score(TEXT, REFERENCES).score)
    # rouge_score's own example: of 8 words of the reference and 9 of the text 6 are common, 5 of them in order.
    alone = quality(TEXT, REFERENCES[:1])
    assert alone["rouge1"] == pytest.approx(2 * 6 / (8 + 9), abs=1e-4)
    same = quality(TEXT, [TEXT])
    assert (same["rouge1"], same["rougeL"], same["bleu"], same["chrf"]) == pytest.approx((1, 1, 100, 100))


def test_a_corpus_is_judged_as_a_whole():
    texts = [TEXT, "It was a cold night in November.", "Two roads diverged in a yellow wood."]
    references = [REFERENCES, ["It was a cold day in November."], ["Two roads went apart in a yellow wood.", "No."]]
    records = [make(text, references=some) for text, some in zip(texts, references, strict=True)]
    streams = [[REFERENCES[0], references[1][0], references[2][0]], [REFERENCES[1], None, references[2][1]]]
    expected = {
        "bleu": pytest.approx(sacrebleu.BLEU().corpus_score(texts, streams).score),
        "chrf": pytest.approx(sacrebleu.CHRF().corpus_score(texts, streams).score),
    }
    assert of_corpus(records) == expected
    assert of_corpus([*records, make("without a reference"), failed(references=["x"])]) == expected
    assert of_corpus([make(), failed()]) == {}


def drafting(*counts):
    """A generation with these numbers of drafted and accepted tokens at each position."""
    record = make()
    record["stats"]["acceptance_by_position"] = [[*pair] for pair in counts]
    return record


def test_acceptance_by_position_adds_the_counts_of_generations():
    records = [drafting((3, 1), (2, 1), (1, 0)), drafting((4, 4)), make(), failed()]
    found = acceptance_by_position(records)
    assert [(one["position"], one["drafted"], one["accepted"]) for one in found] == [(1, 7, 5), (2, 2, 1), (3, 1, 0)]
    assert acceptance_by_position([make(), make()]) == []


def test_few_draft_tokens_that_were_all_accepted_have_a_wide_interval():
    """Wilson's interval by its formula: of 3 of 3, it goes down to n / (n + z * z)."""
    (one,) = acceptance_by_position([drafting((3, 3))])
    assert (one["low"], one["high"]) == pytest.approx((3 / (3 + 1.959964**2), 1))
    (many,) = acceptance_by_position([drafting((300, 300))])
    assert many["low"] > 0.98
    (less_sure,) = acceptance_by_position([drafting((3, 3))], confidence=0.5)
    assert less_sure["low"] > one["low"]


def test_the_times_of_components():
    records = [make(), make(), failed()]
    assert time_by_component(records) == {"target": 2.5, "draft": 1.0, "rest": 0.5}
    assert time_by_component([]) == {"target": 0, "draft": 0, "rest": 0}
    assert len(finished(records)) == 2
