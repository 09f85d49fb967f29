"""Where trees go on after cached prefixes, in models that keep some of their layers' numbers for near nodes alone."""

import re

import numpy as np
import pytest

import specbeam
from specbeam import Engine, SpecbeamError
from specbeam.backends.contract import POINT_TOKENS
from specbeam.cache.rows import TreeRows
from specbeam.core.strategy import Evaluate, Hypothesis
from tests.conftest import random_model, run_alone
from tests.engine.conftest import assert_memory_is_within_its_limit, assert_nothing_is_held, ended

LAYERS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
SHARED = 1000
SHORT = {"max_new_tokens": 12, "min_new_tokens": 12}


@pytest.fixture(scope="module")
def loaded(save):
    """Models with a context of 2048 tokens, by the kind of their other layers. One layer attends to all nodes."""
    sizes = {"max_position_embeddings": 2048}
    made = {
        "convolutions": random_model("lfm2", **sizes),
        "states": random_model("qwen3_5", **sizes),
        "windows": random_model("gemma3", **sizes, **LAYERS),
    }
    return {name: specbeam.load(save(model), backend="cpu") for name, model in made.items()}


def texts(*lengths):
    """Different token ids, lists of these lengths."""
    draw = np.random.default_rng(sum(lengths))
    return [draw.integers(3, 250, length).tolist() for length in lengths]


def evaluated(engine, prompt, **how):
    """The prompt tokens that are not reused, and the result."""
    result = ended(engine, prompt, SHORT, **how)
    return len(prompt) - result.stats.reused_tokens, result


@pytest.mark.parametrize(("kind", "most"), [("convolutions", POINT_TOKENS), ("windows", SHARED)])
def test_after_a_shared_prefix_few_tokens_are_recomputed(loaded, kind, most):
    """Where points are expensive, the second request makes the one at which the third goes on."""
    lm = loaded[kind]
    engine, (shared, *own) = Engine(lm), texts(SHARED, 300, 40, 50, 60)
    for number, text in enumerate(own):
        new, result = evaluated(engine, shared + text)
        assert new <= (SHARED + len(text) if number == 0 else len(text) + (most if number == 1 else 0))
        assert result.sequences == run_alone(lm, shared + text, SHORT).sequences


@pytest.mark.parametrize("kind", ["convolutions", "windows"])
def test_a_prompt_and_a_turn_go_on_where_they_ended(loaded, kind):
    lm = loaded[kind]
    engine, (prompt, more) = Engine(lm), texts(700, 20)
    _, first = evaluated(engine, prompt)
    assert evaluated(engine, prompt)[0] == 1  # logits are needed after its last token
    turn = prompt + first.token_ids + more
    new, second = evaluated(engine, turn)
    assert new == 1 + len(more)  # the last new token was never evaluated
    assert second.sequences == run_alone(lm, turn, SHORT).sequences


@pytest.mark.parametrize("kind", ["convolutions", "windows"])
def test_requests_that_come_together_read_what_they_share_once(loaded, kind):
    """The first one makes a point where each of the others goes on."""
    lm = loaded[kind]
    engine, (shared, *own) = Engine(lm), texts(600, 200, 30, 70)
    requests = [engine.submit(shared + text, SHORT) for text in own]
    engine.run()
    for number, (request, text) in enumerate(zip(requests, own, strict=True)):
        assert request.result().stats.reused_tokens == (600 if number else 0)
        assert request.result().sequences == run_alone(lm, shared + text, SHORT).sequences


@pytest.mark.parametrize("kind", ["convolutions", "windows"])
def test_points_are_evicted_with_the_least_recently_used_prefixes_and_no_bit_changes(loaded, kind):
    """There is room for one of the prompts, or a little more."""
    lm = loaded[kind]
    prompts = texts(400, 300, 200)
    expected = [run_alone(lm, prompt, SHORT).sequences for prompt in prompts]
    engine = Engine(lm, max_cache_tokens=450, max_batch_tokens=64)
    for number in (0, 1, 2, 0, 0, 2, 1, 1):
        request = engine.submit(prompts[number], SHORT)
        while engine.step():
            assert_memory_is_within_its_limit(engine)
        assert request.result().sequences == expected[number]
    assert request.result().stats.reused_tokens == 299  # the same prompt came just before
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("kind", ["convolutions", "windows"])
def test_without_its_points_a_prefix_is_recomputed_to_the_same_bits(loaded, kind):
    lm = loaded[kind]
    engine, (prompt,) = Engine(lm), texts(300)
    _, first = evaluated(engine, prompt)
    cache = engine._budget.target
    slots, before = cache.kept, engine.kept_bytes
    assert cache.evict(0) == 0
    while cache.points:
        cache.points.drop_oldest()
    assert cache.kept == slots
    assert engine.kept_bytes == slots * cache.slot_bytes < before
    new, again = evaluated(engine, prompt)
    assert new == 300
    assert again.sequences == first.sequences
    assert evaluated(engine, prompt)[0] == 1


@pytest.mark.parametrize("kind", ["convolutions", "windows"])
def test_a_long_sequence_takes_little_more_than_its_slots(loaded, kind):
    """The prompt and what is generated, in any pieces."""
    lm = loaded[kind]
    (lifetime,) = lm.backend.lifetimes
    (prompt,) = texts(1200)
    for batch in (512, 7):
        engine = Engine(lm, max_batch_tokens=batch)
        request, most = engine.submit(prompt, {"max_new_tokens": 300, "min_new_tokens": 300}), 0
        while engine.step():
            most = max(most, engine._budget.held)
        rows = lifetime.rows(1500, batch) * lifetime.row_bytes
        assert 1499 * lm.backend.slot_bytes < most <= 1499 * lm.backend.slot_bytes + rows
        assert len(request.result().token_ids) == 300


NEW = 8
APART = {"max_new_tokens": NEW, "share_prefix": False}


def far_apart(beams, seen):
    """A strategy of beams that have only the prompt in common. It appends the logits of each step to ``seen``."""

    def strategy(setup, drafter):
        tree = setup.tree
        yield Evaluate([tree.tip])
        tips = np.full(beams, tree.tip)
        for step in range(NEW - 1):
            tips = tree.add(tips, [3 + (beams * step + beam) % 250 for beam in range(beams)])
            tree.keep(tips)
            seen.append((yield Evaluate(tips)))
        return [Hypothesis(tip, 0.0, "length") for tip in tips.tolist()]

    return strategy


def engine_for_one(lm, length, batch):
    """An engine with no more memory than for one sequence with this prompt."""
    with pytest.raises(SpecbeamError) as refused:
        Engine(lm, max_cache_tokens=1, max_batch_tokens=batch).submit([5] * length, APART)
    needed = int(re.search(r"need (\d+) cache slots", str(refused.value))[1])
    return Engine(lm, max_cache_tokens=needed, max_batch_tokens=batch)


@pytest.mark.parametrize(
    ("kind", "length", "batch", "beams"),
    [("convolutions", 25, 1, 3), ("convolutions", 60, 5, 3), ("states", 90, 5, 30), ("windows", 150, 16, 20)],
)
def test_beams_take_turns_in_the_memory_of_one(loaded, kind, length, batch, beams):
    """A wanted node takes the passes of its sequence and, before that, of nodes that did not fit together."""
    lm, (prompt,) = loaded[kind], texts(length)
    engine, seen, expected, steps = engine_for_one(lm, length, batch), [], [], 0
    request = engine.submit(prompt, APART, strategy=far_apart(beams, seen))
    most = beams * NEW * 2 * (-(-(length + NEW) // batch) + 1)
    while engine.step():
        steps += 1
        assert steps <= most
    plain = ended(Engine(lm), prompt, APART, strategy=far_apart(beams, expected))
    np.testing.assert_array_equal(seen, expected)
    assert request.result().stats.nodes_evaluated > 2 * plain.stats.nodes_evaluated
    assert_nothing_is_held(engine)


def test_a_sequence_that_does_not_fit_after_all_is_an_error(loaded, monkeypatch):
    """A fault of the engine's own: no row is let go."""
    lm, (prompt,) = loaded["convolutions"], texts(25)
    engine = engine_for_one(lm, len(prompt), 1)
    monkeypatch.setattr(TreeRows, "sweep", lambda *_: None)
    request = engine.submit(prompt, APART, strategy=far_apart(3, []))
    for _ in range(1000):
        if not engine.step():
            break
    with pytest.raises(SpecbeamError, match="need more than the engine's"):
        request.result()
    assert_nothing_is_held(engine)
