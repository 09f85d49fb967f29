"""Comparisons of runs find planted changes of speed, and do not find noise or drifting machines."""

import json

import numpy as np
import pytest

from specbeam.study.metrics import of_corpus, of_record
from specbeam.study.statistics import bootstrap_mean, paired_ratio
from specbeam.study.summary import diff, summarize
from tests.study.test_metrics import REFERENCES, TEXT, failed, make

pytest.importorskip("scipy")
pytest.importorskip("sacrebleu")

METHODS = ("greedy", "beam", "speculative", "speculative-beam")
ROWS = 26


def method_of(summary, name):
    return next(one for one in summary["methods"] if one["method"] == name)


def test_a_summary_is_plain_data():
    records = [
        make(method=method, row=row, speed=speed, references=REFERENCES, category="qa")
        for method in ("greedy", "beam")
        for row, speed in (("a", 10.0), ("b", 30.0))
    ]
    summary = summarize([*records, failed(row="c")], {}, baseline="greedy", twins={"beam": "greedy"})
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert {*summary} == {
        "confidence",
        "methods",
        "fastest",
        "categories",
        "acceptance_by_position",
        "failed_metrics",
        "time",
    }
    assert [one["method"] for one in summary["methods"]] == ["greedy", "beam"]
    greedy = method_of(summary, "greedy")
    assert (greedy["mode"], greedy["generations"], greedy["failed"]) == ("greedy", 3, 1)
    assert {*greedy["metrics"]} == {name for name, value in of_record(records[0]).items() if value is not None}
    assert greedy["metrics"]["tokens_per_second"]["mean"] == 20
    assert greedy["metrics"]["tokens_per_second"]["n"] == 2
    assert greedy["corpus"] == of_corpus(records[:2])
    assert greedy["pass_at_1"] is greedy["agreement"] is greedy["against"] is None
    assert summary["time"]["beam"] == {"target": 2.5, "draft": 1.0, "rest": 0.5}
    assert summary["acceptance_by_position"] == {"greedy": [], "beam": []}


def test_nothing_and_failures_only():
    assert summarize([], {})["methods"] == []
    summary = summarize([failed(), failed(method="beam")], {}, baseline="greedy", twins={"beam": "greedy"})
    assert [(one["generations"], one["failed"], one["metrics"]) for one in summary["methods"]] == [(1, 1, {})] * 2
    assert method_of(summary, "beam")["against"] is None
    assert method_of(summary, "beam")["agreement"] == {"twin": "greedy", "same": 0, "of": 0}


def test_repeats_are_averaged_before_rows_are_compared():
    speeds = {("a", 0): [10.0, 20.0, 60.0], ("a", 1): [40.0], ("b", 0): [2.0, 4.0]}
    records = [
        make(row=row, turn=turn, repeat=repeat, speed=speed)
        for (row, turn), some in speeds.items()
        for repeat, speed in enumerate(some)
    ]
    greedy = method_of(summarize(records, {}), "greedy")
    expected = bootstrap_mean([30.0, 40.0, 3.0])
    assert greedy["generations"] == 6
    assert greedy["metrics"]["tokens_per_second"] == pytest.approx(vars(expected))


def test_speed_is_compared_over_common_rows():
    rng = np.random.default_rng(0)
    base, other = rng.uniform(10, 20, ROWS), rng.uniform(20, 40, ROWS)
    records = [make(row=str(i), speed=speed) for i, speed in enumerate(base.tolist())]
    records += [make(method="beam", row=str(i), speed=speed) for i, speed in enumerate(other.tolist())]
    records += [make(method="beam", row=row, speed=speed) for row, speed in (("other", 1000.0), ("empty", 0))]
    records.append(make(row="empty"))
    summary = summarize(records, {}, baseline="greedy")
    assert method_of(summary, "greedy")["against"] is None
    against = method_of(summary, "beam")["against"]
    assert against["baseline"] == "greedy"
    assert against["tokens_per_second"] == pytest.approx(vars(paired_ratio(other.tolist(), base.tolist())))
    assert method_of(summarize(records, {}, baseline="none such"), "beam")["against"] is None


def test_scores_found_later():
    records = [make(row=row, repeat=repeat) for row in "ab" for repeat in (0, 1)]
    passed = [True, False, True, True]
    perplexities = [1.0, 3.0, 5.0, None]
    scores = {
        record["key"]: {"perplexity": {"target": p, "judge": 2.0}, "passed": good}
        for record, good, p in zip(records, passed, perplexities, strict=True)
    }
    greedy = method_of(summarize(records, scores), "greedy")
    assert greedy["pass_at_1"] == pytest.approx((0.5 + 1) / 2)
    assert greedy["metrics"]["perplexity"]["mean"] == pytest.approx((2 + 5) / 2)
    assert greedy["metrics"]["perplexity judge"]["mean"] == 2
    one = {records[0]["key"]: {"passed": None}, records[1]["key"]: {"passed": False}}
    assert method_of(summarize(records, one), "greedy")["pass_at_1"] == 0


def test_agreement_counts_the_same_tokens_in_all_beams():
    def beams(*last):
        return [{"text": "x", "token_ids": [1, token], "score": 0.0} for token in last]

    twin = [make(method="beam", row=row, token_ids=[1, 2], beams=beams(2, 3)) for row in "abcd"]
    fast = [
        make(method="speculative-beam", row="a", token_ids=[1, 2], beams=beams(2, 3)),
        make(method="speculative-beam", row="b", token_ids=[1, 2], beams=beams(2, 4)),
        make(method="speculative-beam", row="c", token_ids=[1, 9], beams=beams(9, 3)),
        make(method="speculative-beam", row="c", repeat=1, token_ids=[1, 2], beams=beams(2, 3)),
        failed(method="speculative-beam", row="d"),
    ]
    summary = summarize([*twin, *fast], {}, twins={"speculative-beam": "beam", "beam": "none such"})
    assert method_of(summary, "speculative-beam")["agreement"] == {"twin": "beam", "same": 1, "of": 3}
    assert method_of(summary, "beam")["agreement"] == {"twin": "none such", "same": 0, "of": 0}


def test_categories():
    records = [
        make(row="a", category="qa", speed=10.0),
        make(row="a", turn=1, category="qa", speed=20.0),
        make(row="b", category="math", speed=7.0, token_ids=range(9)),
        make(row="c", category=None, speed=99.0),
        make(row="a", method="beam", category="qa", speed=1.0),
    ]
    categories = summarize(records, {})["categories"]
    assert categories == {
        "qa": {
            "greedy": {"n": 2, "tokens_per_second": 15, "steps_per_target_pass": 1.5, "new_tokens": 3},
            "beam": {"n": 1, "tokens_per_second": 1, "steps_per_target_pass": 1.5, "new_tokens": 3},
        },
        "math": {"greedy": {"n": 1, "tokens_per_second": 7, "steps_per_target_pass": 1.5, "new_tokens": 9}},
    }


def speeds_of(rng, **means):
    """Records of 12 rows whose speeds differ by rows more than by methods."""
    rows = rng.uniform(0.3, 3, 12)
    return [
        make(method=method, row=str(i), speed=float(mean * rows[i] * np.exp(rng.normal(0, 0.05))))
        for method, mean in means.items()
        for i in range(12)
    ]


def test_the_fastest_is_settled_if_it_beats_every_other_one_row_by_row():
    rng = np.random.default_rng(0)
    fastest = summarize(speeds_of(rng, a=20, b=30, c=10), {})["fastest"]
    assert (fastest["method"], fastest["unsettled"]) == ("b", [])
    assert {*fastest["rivals"]} == {"a", "c"}
    assert fastest["rivals"]["a"]["ratio"] == pytest.approx(1.5, rel=0.1)
    fastest = summarize(speeds_of(rng, a=30, b=30.2, c=10), {})["fastest"]
    assert fastest["unsettled"] == [{"a": "b", "b": "a"}[fastest["method"]]]
    few = [record for record in speeds_of(rng, a=20, b=30) if int(record["row"]) < 4]
    assert summarize(few, {})["fastest"]["unsettled"] == ["a"]
    assert summarize(speeds_of(rng, a=20), {})["fastest"] == {"method": "a", "rivals": {}, "unsettled": []}
    assert summarize([], {})["fastest"] is None


def test_categories_are_compared_with_the_baseline():
    rng = np.random.default_rng(1)
    records = [
        record | {"category": "qa" if int(record["row"]) < 8 else "code"}
        for record in speeds_of(rng, greedy=10, beam=20)
    ]
    categories = summarize(records, {}, baseline="greedy")["categories"]
    assert categories["qa"]["beam"]["against"]["n"] == 8
    assert categories["qa"]["beam"]["against"]["ratio"] == pytest.approx(2, rel=0.1)
    assert categories["code"]["beam"]["against"]["low"] is None  # four rows
    assert "against" not in categories["qa"]["greedy"]


def test_runs_of_a_few_rows_have_no_significant_change():
    rng = np.random.default_rng(2)
    difference = diff(measured(rng, rows=4), measured(rng, rows=4, changes={"beam": 0.1}))
    assert not flagged(difference)
    assert all(one["relative"]["low"] is None and one["relative"]["n"] == 4 for one in difference["methods"])


def measured(rng, *, drift=1.0, changes=None, methods=METHODS, noise=0.1, rows=ROWS):
    """A run: rows differ, methods differ, every generation has noise of its own, and the machine drifts."""
    own = np.random.default_rng(12).uniform(5, 50, size=(len(methods), rows))
    drifts = np.exp(rng.normal(np.log(drift), 0.03, size=rows))  # what hits all methods at a row
    speeds = own * drifts * np.exp(rng.normal(0, noise, size=own.shape))
    return [
        make(method=method, row=str(row), speed=float(speeds[i, row] * (changes or {}).get(method, 1.0)))
        for i, method in enumerate(methods)
        for row in range(rows)
    ]


def flagged(difference):
    return {one["method"] for one in difference["methods"] if one["significant"]}


@pytest.mark.parametrize("methods", [METHODS[:3], METHODS])
def test_a_method_that_became_slower_is_found_on_a_machine_that_did_too(methods):
    """20 % slower, 15 % drift, 10 % noise of every measurement."""
    wrong = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        before = measured(rng, methods=methods)
        difference = diff(before, measured(rng, methods=methods, drift=0.85, changes={"speculative": 0.8}))
        found = method_of(difference, "speculative")
        assert found["significant"]
        assert 0.72 < found["relative"]["ratio"] < 0.89
        assert found["raw"]["ratio"] == pytest.approx(0.8 * 0.85, rel=0.1)
        wrong += len(flagged(difference) - {"speculative"})
    assert wrong <= 2  # of 40 or 60


@pytest.mark.parametrize("drift", [1.0, 0.85, 1.3])
def test_noise_is_no_change(drift):
    wrong = 0
    for seed in range(20):
        rng = np.random.default_rng(100 + seed)
        wrong += bool(flagged(diff(measured(rng), measured(rng, drift=drift))))
    assert wrong <= 3  # one in twenty runs is what the level allows


def test_a_change_too_small_to_matter_is_not_significant():
    rng = np.random.default_rng(0)
    before = measured(rng, noise=0.001)
    difference = diff(before, measured(rng, noise=0.001, changes={"beam": 0.98}))
    assert method_of(difference, "beam")["p"] < 0.01
    assert not flagged(difference)


def test_nothing_differs_from_itself():
    run = measured(np.random.default_rng(0))
    difference = diff(run, run)
    assert json.loads(json.dumps(difference, allow_nan=False)) == difference
    assert difference["note"] is None
    for one in difference["methods"]:
        assert one["raw"]["ratio"] == one["relative"]["ratio"] == one["p"] == 1
        assert one["identical"] == {"same": ROWS, "of": ROWS, "share": 1}
        assert not one["significant"]


def test_two_methods_cannot_be_told_from_the_machine():
    rng = np.random.default_rng(0)
    difference = diff(measured(rng, methods=METHODS[:2]), measured(rng, methods=METHODS[:2], drift=0.7))
    assert "2 methods" in difference["note"]
    assert all(one["relative"] == one["raw"] for one in difference["methods"])
    assert flagged(difference) == {"greedy", "beam"}


def test_methods_and_rows_of_one_run_only():
    rng = np.random.default_rng(0)
    a, b = measured(rng, methods=("old", *METHODS)), measured(rng, methods=(*METHODS, "new"), rows=ROWS - 6)
    b = [failed(method=r["method"], row="3") if r["method"] == "beam" and r["row"] == "3" else r for r in b]
    difference = diff(a, b)
    assert (difference["only_in_a"], difference["only_in_b"]) == (["old"], ["new"])
    assert [one["method"] for one in difference["methods"]] == [*METHODS]
    assert method_of(difference, "greedy")["raw"]["n"] == method_of(difference, "greedy")["relative"]["n"] == ROWS - 6
    assert method_of(difference, "beam")["raw"]["n"] == method_of(difference, "beam")["identical"]["of"] == ROWS - 7


def test_runs_without_anything_in_common():
    assert diff([], [])["methods"] == []
    three = METHODS[:3]
    difference = diff([make(method=m, row="a") for m in three], [make(method=m, row="b") for m in three])
    for one in difference["methods"]:
        assert one["raw"] is one["relative"] is one["identical"]["share"] is None
        assert not one["significant"]


def test_texts_that_differ_are_counted():
    a = [make(row=row, repeat=repeat) for row in "ab" for repeat in (0, 1)]
    b = [make(row="a"), make(row="a", repeat=1, token_ids=[9]), make(TEXT, row="b"), failed(row="b", repeat=1)]
    assert diff(a, b)["methods"][0]["identical"] == {"same": 2, "of": 3, "share": pytest.approx(2 / 3)}
