"""Intervals and tests against scipy, closed forms and synthetic data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbeam import SpecbeamError
from specbeam.study.statistics import Comparison, Estimate, bootstrap_mean, holm, paired_ratio, settled

scipy_stats = pytest.importorskip("scipy.stats")


def test_a_mean_without_spread_has_an_interval_without_width():
    assert bootstrap_mean([]) is None
    same = bootstrap_mean([2.5] * 7)
    assert (same.mean, same.low, same.high, same.n) == (2.5, 2.5, 2.5, 7)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [0.7, 1e-9, 123.4])
def test_values_that_differ_by_rounding_have_an_interval_without_width(value):
    values = [value] * 4 + [float(np.nextafter(value, np.inf))]
    found = bootstrap_mean(values)
    assert (found.low, found.high) == pytest.approx((value, value), rel=1e-12)
    ratio = paired_ratio([1.0] * 4 + [float(np.nextafter(1.0, 2))], [1.0] * 5)
    assert (ratio.low, ratio.high) == pytest.approx((1, 1), rel=1e-12)


@pytest.mark.parametrize("ends", [(None, None), (float("nan"), float("nan")), (1.1, float("inf"))])
def test_an_interval_without_finite_ends_settles_nothing(ends):
    comparison = Comparison(1.2, *ends, 0.01, 9)
    assert not comparison.settled
    assert not settled(vars(comparison))


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.1], [1.0, 2.0, 9.0], [0, 0, 0, 1]])
def test_fewer_than_five_values_have_a_mean_and_no_interval(values):
    assert bootstrap_mean(values) == Estimate(pytest.approx(np.mean(values)), None, None, len(values))
    ratio = paired_ratio([np.exp(value) for value in values], [1.0] * len(values))
    assert (ratio.low, ratio.high, ratio.n, ratio.settled) == (None, None, len(values), False)
    assert ratio.p > 0.05


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0, 4.0, 5.0], [0, 0, 0, 0, 1], [0.0, 0.0, 0.0, 0.0, 1e9]])
def test_few_values_have_an_interval_around_the_mean(values):
    found = bootstrap_mean(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert min(values) <= found.low <= found.mean <= found.high <= max(values)


def test_an_interval_is_reproducible_and_grows_with_confidence():
    values = np.random.default_rng(0).normal(size=30).tolist()
    assert bootstrap_mean(values) == bootstrap_mean(values)
    narrow, wide = bootstrap_mean(values, confidence=0.5), bootstrap_mean(values, confidence=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_an_interval_is_near_students():
    values = np.random.default_rng(1).normal(10, 2, size=80)
    found = bootstrap_mean(values.tolist())
    low, high = scipy_stats.t.interval(0.95, len(values) - 1, values.mean(), scipy_stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1)


@pytest.mark.parametrize("draw", ["normal", "exponential"])
def test_intervals_cover_the_mean_about_as_often_as_they_say(draw):
    """40 values; the bootstrap is known to cover a little less than it says (Efron & Tibshirani 1993, 14.2)."""
    rng = np.random.default_rng(2)
    samples = {"normal": lambda: rng.normal(1, 1, 40), "exponential": lambda: rng.exponential(1, 40)}[draw]
    found = [bootstrap_mean(samples().tolist(), seed=seed) for seed in range(200)]
    covered = np.mean([one.low <= 1 <= one.high for one in found])
    assert 0.88 <= covered <= 0.99


def test_a_ratio_is_the_geometric_mean_of_pairs():
    rng = np.random.default_rng(3)
    b = rng.uniform(1, 100, 26)
    a = b * np.exp(rng.normal(np.log(1.25), 0.1, 26))
    found = paired_ratio(a.tolist(), b.tolist())
    assert found.ratio == pytest.approx(scipy_stats.gmean(a / b))
    assert found.p == pytest.approx(scipy_stats.wilcoxon(np.log(a), np.log(b)).pvalue)
    assert 1 < found.low < found.ratio < found.high
    assert found.n == 26
    back = paired_ratio(b.tolist(), a.tolist())
    assert back.ratio == pytest.approx(1 / found.ratio)
    assert back.p == pytest.approx(found.p)


def test_ratios_at_the_edges():
    assert paired_ratio([], []) is None
    one = paired_ratio([3.0], [2.0])
    assert (one.ratio, one.p) == pytest.approx((1.5, 1.0))
    equal = paired_ratio([3.0, 5.0, 7.0, 9.0, 11.0], [3.0, 5.0, 7.0, 9.0, 11.0])
    assert (equal.ratio, equal.low, equal.high, equal.p) == (1, 1, 1, 1)
    assert not equal.settled


def test_a_ratio_is_settled_if_its_interval_excludes_1():
    rng = np.random.default_rng(5)
    ones = [1.0] * 20
    assert paired_ratio(np.exp(rng.normal(0.3, 0.1, 20)).tolist(), ones).settled
    assert paired_ratio(np.exp(rng.normal(-0.3, 0.1, 20)).tolist(), ones).settled
    assert not paired_ratio(np.exp(rng.normal(0.01, 0.3, 20)).tolist(), ones).settled


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1.0], [1.0, 2.0], "1 values cannot be paired with 2"),
        ([1.0, 0.0], [1.0, 2.0], r"no ratio of 0\.0"),
        ([1.0], [-2.0], r"no ratio of -2\.0"),
        ([1.0], [float("nan")], "no ratio of nan"),
    ],
)
def test_what_has_no_ratio_is_refused(a, b, message):
    with pytest.raises(SpecbeamError, match=message):
        paired_ratio(a, b)


def test_holm_by_hand():
    assert holm([]) == []
    assert holm([0.03]) == [0.03]
    # Sorted: 0.005 * 4, 0.01 * 3, 0.03 * 2, then 0.04 * 1 is below the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_values_and_bonferronis(p_values):
    adjusted = holm(p_values)
    for p, one in zip(p_values, adjusted, strict=True):
        assert p <= one <= min(1, len(p_values) * p)
    order = np.argsort(p_values, kind="stable")
    assert np.all(np.diff(np.array(adjusted)[order]) >= 0)


def test_holm_keeps_the_familywise_error():
    """Where nothing differs, 8 tests at 0.05 flag something about once in twenty times."""
    p_values = np.random.default_rng(4).uniform(size=(4000, 8))
    assert np.mean([min(holm(some.tolist())) < 0.05 for some in p_values]) == pytest.approx(0.05, abs=0.015)
