"""The retry policy: rests before a probe, ever longer rests after failures, and no probe that could not pay."""

from specbeam.drafting.retry import MAX_REST_ROUNDS, MIN_REST_ROUNDS, Phase, RetryPolicy

CHEAP = {"plain_cost": 10.0, "best_cost": 1.0, "probe_cost": 0.1}


def rounds_until_probe(retry, **costs):
    """Rounds of rest, of a policy that just rested one, until it probes; None if it drafts by the evidence first."""
    for rounds in range(1, 10_000):
        if retry.is_due:
            retry.consider(**(costs or CHEAP))
        if retry.phase is not Phase.RESTING:
            return rounds if retry.phase is Phase.PROBING else None
        retry.rest()
    raise AssertionError("no probe")


def test_rests_double_after_each_failed_probe_up_to_the_cap():
    retry, rests = RetryPolicy(), []
    for _ in range(7):
        retry.rest()
        rests.append(rounds_until_probe(retry))
        retry.drafted(accepted=False)
        assert retry.phase is Phase.DRAFTING
    expected = [min(MIN_REST_ROUNDS * 2**failures, MAX_REST_ROUNDS) for failures in range(7)]
    assert rests == expected
    retry.rest()
    rounds_until_probe(retry)
    retry.drafted(accepted=True)  # one success, and rests are short again
    retry.rest()
    assert rounds_until_probe(retry) == MIN_REST_ROUNDS


def test_a_dear_probe_waits_until_its_share_of_the_possible_gain_pays_for_it():
    retry = RetryPolicy()
    retry.rest()
    # A round could gain 8 s with every guess accepted. A quarter of that, 2 s, may go into a probe of 100 s.
    assert rounds_until_probe(retry, plain_cost=10.0, best_cost=2.0, probe_cost=100.0) == 50


def test_what_could_hardly_gain_is_not_probed():
    retry = RetryPolicy()
    retry.rest()
    assert rounds_until_probe(retry, plain_cost=1.0, best_cost=0.95, probe_cost=0.0) is None
