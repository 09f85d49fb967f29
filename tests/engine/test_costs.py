"""Expected costs of passes, learned from measured ones."""

import pytest

from specbeam.engine.costs import PassTimes


def test_what_a_pass_takes_is_learned_from_passes():
    times = PassTimes()
    for _ in range(2):
        times.add(1, 1.0)
    # Not measured: a little more than a pass over fewer nodes, until it is tried twice.
    assert 1 < times.expected(8) < 1.5
    times.add(8, 9.0)
    assert times.expected(8) < 1.5
    times.add(8, 3.0)
    assert times.expected(8) == pytest.approx(3.0)
    times.add(4, 2.0)
    times.add(4, 2.0)
    assert times.expected(2) == pytest.approx(1 + 1 / 3)  # between 1 and 4
    assert times.expected(6) == pytest.approx(2.5)
    assert times.expected(16) == pytest.approx(5.0)  # on from 4 and 8
    times.add(16, 9.0)
    times.add(16, 9.0)
    assert times.expected(64) == pytest.approx(36.0)  # but never more than as many times as much


def test_a_machine_that_slows_down_does_so_for_passes_of_all_sizes():
    times = PassTimes()
    for _ in range(3):
        times.add(1, 1.0)
        times.add(8, 2.0)
    for _ in range(200):
        times.add(1, 1.5)
    assert times.expected(1) == pytest.approx(1.5, rel=0.01)
    assert times.expected(8) > 2.4


def test_passes_that_were_never_measured_are_taken_for_fast():
    """A draft is tried, then, and measured, also where only its pass over a prompt was."""
    times = PassTimes()
    assert times.expected(1) < times.expected(64) < 0.01
    for _ in range(2):
        times.add(64, 1.0)
    assert times.expected(1) < 0.02
    assert times.expected(8) < 2 * times.expected(1)
    for _ in range(2):
        times.add(1, 0.9)
    assert times.expected(32) <= 1.0
