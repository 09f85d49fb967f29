"""The backend goes on by itself where requests need nothing but the token that was chosen. Nobody can tell."""

from unittest.mock import Mock

import pytest

import specbeam
from specbeam import Engine, Options
from specbeam.core.selection import Selection
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.engine.costs import CostTable, nominal_cost, pass_times
from specbeam.engine.output import Output
from specbeam.engine.request_state import RequestState
from specbeam.engine.setup import make_setup
from tests.conftest import random_model, run_alone, table_of_costs

STEP_BY_STEP = {"stop_strings": ["a stop string that no text has"]}  # it is looked for after each token
KINDS = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"top_p": 0.9, "top_k": 40, "seed": 2},
    {"min_new_tokens": 12},
    {"do_sample": True, "logit_bias": {101: 2.0}, "min_new_tokens": 30, "seed": 3},
    {"do_sample": True, "typical_p": 0.9, "seed": 4},
    {"eos_token_id": [*range(0, 259, 7)]},
    {"do_sample": True, "seed": 5, "eos_token_id": [*range(0, 259, 7)]},
]
BEAMS = [
    {"num_beams": 2, "eos_token_id": []},
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 4, "length_penalty": 0.3, "eos_token_id": [101, 110, 120]},
    {"num_beams": 4, "length_penalty": -1.0, "early_stopping": "never", "eos_token_id": [*range(90, 130)]},
    {"num_beams": 4, "min_new_tokens": 12, "logit_bias": {101: 2.0, 102: -1.0}, "distinct": True},
    {"num_beams": 8, "bound_rule": False, "length_penalty": 2.0, "early_stopping": True, "eos_token_id": [33, 44]},
    {"num_beams": 16, "num_return_sequences": 16, "length_penalty": 0.7, "eos_token_id": [5, 6]},
]
LONG = {"max_new_tokens": 30, "eos_token_id": []}


@pytest.fixture(scope="module")
def lm(save):
    return specbeam.load(save(random_model("llama")), backend="cpu")


@pytest.fixture(scope="module")
def windowed(save):
    return specbeam.load(save(random_model("mistral", sliding_window=8)), backend="cpu")


def results(engine, options, count=3):
    requests = [engine.submit([97 + n, 98, 99], {"max_new_tokens": 30} | options) for n in range(count)]
    engine.run()
    return [request.result() for request in requests]


def passes_of_calls(monkeypatch, lm, before=lambda: None, seconds=1e-3):
    """The number of passes of each call that may go ahead, as they come. Passes count as fast, on any machine.

    Args:
        seconds: of a pass over few nodes.
    """
    table = table_of_costs(lambda nodes: seconds * nominal_cost(nodes))
    monkeypatch.setattr("specbeam.engine.engine.pass_times", table)
    calls, forward_ahead = [], lm.backend.forward_ahead

    def recorded(*args):
        before()
        selections = forward_ahead(*args)
        calls.append(len(selections[0].tokens) // len(args[0][0].tokens))
        return selections

    monkeypatch.setattr(lm.backend, "forward_ahead", recorded)
    return calls


@pytest.mark.parametrize("options", KINDS + BEAMS)
def test_to_go_ahead_changes_no_bit_and_no_count(lm, options):
    costs = table_of_costs(lambda nodes: 1e-3 * nominal_cost(nodes))
    single = results(Engine(lm, costs=costs), options | STEP_BY_STEP)
    for count in (1, 3):
        ahead = results(Engine(lm, costs=costs), options, count)
        assert [one.sequences for one in ahead] == [one.sequences for one in single[:count]]
        for one, other in zip(ahead, single[:count], strict=True):
            for count_of in ("target_passes", "nodes_evaluated", "steps_per_target_pass", "new_tokens"):
                assert getattr(one.stats, count_of) == getattr(other.stats, count_of)
            if options in KINDS:  # beams that were given up keep their slots until the last pass
                assert one.stats.peak_slots == other.stats.peak_slots


def test_beams_go_ahead_beside_single_sequences(lm, monkeypatch):
    calls = passes_of_calls(monkeypatch, lm)
    engine = Engine(lm)
    kinds = [{}, {"temperature": 0.8, "seed": 1}, {"num_beams": 4}, {"num_beams": 2}]
    requests = [engine.submit([97 + n, 98, 99], LONG | options) for n, options in enumerate(kinds)]
    engine.run()
    assert max(calls) == 8
    assert sum(calls) == 30 - 1  # the first pass is prefill
    for n, (request, options) in enumerate(zip(requests, kinds, strict=True)):
        assert request.result().sequences == run_alone(lm, [97 + n, 98, 99], LONG | options | STEP_BY_STEP).sequences


@pytest.mark.parametrize("options", [{"num_beams": 4}, {}, {"temperature": 0.8, "seed": 1}])
def test_a_request_goes_ahead_while_it_skips_drafting(lm, monkeypatch, options):
    """A draft model as slow as the target never saves time. Lookups find nothing in a text without repetitions."""
    calls = passes_of_calls(monkeypatch, lm)
    plain = run_alone(lm, [97, 98, 99], LONG | options)
    for draft in (lm, "ngram", "suffix"):
        calls.clear()
        with_draft = run_alone(lm, [97, 98, 99], LONG | options, draft)
        assert max(calls) == 8
        assert with_draft.stats.draft_note.startswith("draft proposed no tokens")
        assert with_draft.sequences == plain.sequences


LOOKS = [{"no_repeat_ngram_size": 3}, {"trace": True}]
LOOKS_OF_BEAMS = [*LOOKS, {"do_sample": True}, {"num_beam_groups": 2, "diversity_penalty": 0.5}]
LOOKS += [{"repetition_penalty": 1.1}, {"top_logprobs": 2}, *({"num_beams": 4, **one} for one in LOOKS_OF_BEAMS)]


@pytest.mark.parametrize("options", LOOKS)
def test_who_looks_at_tokens_goes_step_by_step(lm, monkeypatch, options):
    calls = passes_of_calls(monkeypatch, lm)
    results(Engine(lm), options)
    assert not calls
    costs = Mock(wraps=pass_times)
    for one in ({}, options):
        make_setup(lm, [1], Options.of(one), costs)
    assert [call.args[1:] for call in costs.call_args_list] == [(), (True,), (), (False,)]  # they expect no such costs


def test_a_new_request_waits_for_one_pass(lm, monkeypatch):
    engine, others = Engine(lm), []

    def submit_another():
        if not others:
            others.append(engine.submit([1, 2], {"max_new_tokens": 2}))

    calls = passes_of_calls(monkeypatch, lm, submit_another)
    results(engine, {"eos_token_id": []}, count=1)
    assert calls[0] == 1
    assert max(calls) > 1


def test_a_cancelled_request_gets_the_token_of_one_pass(lm, monkeypatch):
    engine = Engine(lm)
    request = engine.submit([1, 2], LONG)
    calls = passes_of_calls(monkeypatch, lm, request.cancel)
    engine.run()
    assert calls == [1]
    assert len(request.result().token_ids) == 2
    assert request.result().finish_reason == "cancelled"


def test_if_passes_ahead_fail_each_request_goes_on_alone(lm, monkeypatch):
    def fail(*args):
        raise RuntimeError("no")

    expected = [result.sequences for result in results(Engine(lm), {})]
    monkeypatch.setattr(lm.backend, "forward_ahead", fail)
    assert [result.sequences for result in results(Engine(lm), {})] == expected


# Requests that go ahead beside others that cannot.


BESIDE = [
    {"repetition_penalty": 1.1},
    {"stop_strings": ["a stop string that no text has"]},
    {"top_logprobs": 2},
    {"trace": True},
    {"num_beams": 4, "no_repeat_ngram_size": 3},
    {"num_beams": 3, "do_sample": True, "seed": 3},
]


def steps_of(monkeypatch):
    """The passes whose selections a strategy has taken at once, by request, as they come."""
    steps, advance = {}, RequestState._advance

    def counted(state, selection):
        if isinstance(selection, Selection):
            steps.setdefault(state.request, []).append(len(selection.tokens))
        advance(state, selection)

    monkeypatch.setattr(RequestState, "_advance", counted)
    return steps


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("name", ["lm", "windowed"])
def test_a_request_that_looks_at_its_tokens_does_not_stop_others(request, monkeypatch, name, beside):
    lm, steps = request.getfixturevalue(name), steps_of(monkeypatch)
    kinds = [{}, {"temperature": 0.8, "seed": 1}, {"min_new_tokens": 12, "logit_bias": {101: 2.0}}, beside]
    alone = [run_alone(lm, [97 + n, 98, 99], LONG | one | STEP_BY_STEP) for n, one in enumerate(kinds)]
    steps.clear()
    engine = Engine(lm)
    requests = [engine.submit([97 + n, 98, 99], LONG | one) for n, one in enumerate(kinds)]
    engine.run()
    assert [request.result().sequences for request in requests] == [one.sequences for one in alone]
    for plain, single in zip(requests[:3], alone, strict=False):
        assert max(steps[plain]) == 9
        assert plain.result().stats.target_passes == single.stats.target_passes
        assert plain.result().stats.nodes_evaluated == single.stats.nodes_evaluated
        assert plain.result().stats.time_to_first_token < plain.result().stats.seconds


@pytest.mark.parametrize("beside", [None, {"repetition_penalty": 1.1}])
def test_a_strategy_may_go_ahead_below_one_of_two_branches(lm, beside):
    def branching(ahead):
        def strategy(setup, drafter):
            tree, selector = setup.tree, setup.selector
            found = yield Evaluate([tree.tip], selector(tree, [tree.tip], top=2))
            node, other = tree.add([tree.tip] * 2, found.tokens[0], found.log_probs[0]).tolist()
            while len(tree.new_tokens(node)) < 20:
                found = yield Evaluate([node], selector(tree, [node]), ahead=ahead)
                for row in range(len(found.tokens)):
                    (node,) = tree.add([node], found.tokens[row, :1], found.log_probs[row, :1]).tolist()
                tree.keep([node, other])
            return [Hypothesis(node, 0.0, "length")]

        return strategy

    def tokens(ahead):
        engine = Engine(lm)
        request = engine.submit([97, 98, 99], LONG, strategy=branching(ahead))
        if beside is not None:
            engine.submit([1, 2, 3], LONG | beside)
        engine.run()
        return request.result().token_ids[:20]

    assert tokens(5) == tokens(0)


@pytest.mark.parametrize("passes", [1, 2, 5, 8, 9, 10])  # a strategy sees its tokens after nine
@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_a_request_that_is_stopped_has_all_tokens_so_far(lm, monkeypatch, passes, how):
    engine = Engine(lm)
    kinds = [{}, {"temperature": 0.8, "seed": 1}, {"repetition_penalty": 1.1}]
    plain, *_ = requests = [engine.submit([97 + n, 98, 99], LONG | one) for n, one in enumerate(kinds)]
    for _ in range(passes):
        engine.step()
    if how == "cancel":
        plain.cancel()
    else:
        next(one for one in engine._scheduler._live if one.request is plain).deadline = 0.0
        engine._scheduler._next_deadline = 0.0
    engine.run()
    for n, request in enumerate(requests):
        expected = run_alone(lm, [97 + n, 98, 99], LONG | kinds[n]).token_ids
        assert request.result().token_ids == (expected[:passes] if request is plain else expected)


# Streams.

SECONDS_PER_PASS = 0.0055
"""A token may wait for the next three passes, which take less than 20 ms."""
SLOW_SECONDS_PER_PASS = 0.03
"""Each token is handed out."""


def read(engine, *submitted):
    """The pieces of requests that somebody reads from the start, and the results. The engine runs in its thread."""
    requests = [engine.submit([97 + n, 98, 99], {"max_new_tokens": 30} | one) for n, one in enumerate(submitted)]
    pieces = [request.pieces for request in requests]
    with engine:
        found = [request.result(60) for request in requests]
    return [[*some] for some in pieces], found


def lengths(pieces):
    return [len(piece.token_ids) for piece in pieces if piece.token_ids]


@pytest.mark.parametrize(
    ("seconds", "is_known", "passes"),
    [(SECONDS_PER_PASS, True, [4] * 7), (SLOW_SECONDS_PER_PASS, True, []), (1e-3, False, [])],
    ids=["fast", "slow", "as long as the time of a pass is unknown"],
)
def test_while_somebody_reads_the_backend_goes_less_far(lm, monkeypatch, seconds, is_known, passes):
    calls = passes_of_calls(monkeypatch, lm, seconds=seconds)
    monkeypatch.setattr(CostTable, "knows", lambda table, nodes: is_known)
    (pieces,), (result,) = read(Engine(lm), {"eos_token_id": []})
    assert calls == passes
    assert lengths(pieces) == [1, *passes, 1] if passes else [1] * 30
    assert result.stats.target_passes == 30
    assert lengths(specbeam.stream(lm, [97, 98, 99], LONG)) == lengths(pieces)  # no thread
    calls.clear()
    specbeam.generate(lm, [97, 98, 99], LONG)  # nobody reads
    assert max(calls) > max(passes, default=1)


def test_tokens_of_beams_are_certain_only_after_their_step(lm, monkeypatch):
    calls = passes_of_calls(monkeypatch, lm, seconds=SECONDS_PER_PASS)
    options = {"num_beams": 4, "eos_token_id": []}
    (pieces,), (result,) = read(Engine(lm), options)
    assert max(calls) == 1 + int(0.02 / (SECONDS_PER_PASS * nominal_cost(4)))
    assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
    assert result.sequences == run_alone(lm, [97, 98, 99], LONG | options).sequences


@pytest.mark.parametrize(("seconds", "tokens"), [(SECONDS_PER_PASS, 5), (SLOW_SECONDS_PER_PASS, 2)])
def test_a_reader_may_cancel(lm, monkeypatch, seconds, tokens):
    """No pass comes after that, and the text is what it has read."""
    passes_of_calls(monkeypatch, lm, seconds=seconds)
    engine, taken = Engine(lm), []
    request = engine.submit([97, 98, 99], LONG)

    def take(piece):
        taken.append(piece)
        if len(taken) == 2:
            request.cancel()

    request.add_piece_callback(take)
    with engine:
        result = request.result(60)
    assert result.finish_reason == "cancelled"
    assert [token for piece in taken for token in piece.token_ids] == result.token_ids
    assert len(result.token_ids) == result.stats.target_passes == tokens


def test_a_function_in_the_engines_thread_may_do_anything(lm, monkeypatch):
    """It may even use the backend."""
    calls, pieces = passes_of_calls(monkeypatch, lm, seconds=SECONDS_PER_PASS), []
    engine = Engine(lm)
    request = engine.submit([97, 98, 99], LONG)

    def take(piece):
        pieces.append(piece)
        if len(pieces) < 4:
            specbeam.generate(lm, [1, 2], max_new_tokens=2, stop_strings=["no text has this"])

    request.add_piece_callback(take)
    with engine:
        request.result(60)
    assert max(calls) == max(lengths(pieces)) == 4


def test_a_text_that_cannot_be_shown_ends_only_its_request(lm, monkeypatch):
    passes_of_calls(monkeypatch, lm, seconds=SLOW_SECONDS_PER_PASS)
    engine, show = Engine(lm), Output.show
    fine, broken = (engine.submit([97 + n, 98, 99], LONG) for n in range(2))
    pieces, _ = fine.pieces, broken.pieces  # both are read

    def fail(output, held):
        if output._request is broken:
            raise ValueError("no text")
        show(output, held)

    monkeypatch.setattr(Output, "show", fail)
    with engine:
        with pytest.raises(ValueError, match="no text"):
            broken.result(60)
        found = fine.result(60)
    assert found.sequences == run_alone(lm, [97, 98, 99], LONG).sequences
    assert [token for piece in pieces for token in piece.token_ids] == found.token_ids
