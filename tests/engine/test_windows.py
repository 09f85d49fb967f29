"""Models whose layers all have windows keep only what a later node may see."""

import pytest
import torch

import specbeam
from specbeam import Engine
from specbeam.api.scoring import score
from specbeam.backends.contract import token_bytes
from specbeam.core.strategy import Evaluate, Hypothesis
from tests.conftest import random_model, run_alone
from tests.engine.conftest import ended

WINDOW, BLOCK = 8, 64
LONG = {"max_new_tokens": 100, "min_new_tokens": 100}
KINDS = [
    (LONG, None),
    (LONG | {"do_sample": True, "seed": 3}, None),
    (LONG | {"num_draft_tokens": 3}, "ngram"),
    (LONG | {"num_draft_tokens": 2}, "model"),
    (LONG | {"num_beams": 3, "num_return_sequences": 3}, None),
    (LONG | {"num_beams": 2, "num_draft_tokens": 2}, "model"),
]
PROMPT = [3 + n % 11 for n in range(150)]


@pytest.fixture(scope="module")
def target(save):
    return save(random_model("mistral", sliding_window=WINDOW, max_position_embeddings=1024))


@pytest.fixture(scope="module")
def loaded(target, save):
    """By backend: a target and a draft with windows, and the same target without the engine's knowing of them."""
    draft, made = save(random_model("mistral", seed=1, sliding_window=5, max_position_embeddings=1024)), {}

    def loaded(backend):
        if backend not in made:
            made[backend] = [specbeam.load(folder, backend=backend) for folder in (target, draft, target)]
            keep_all(made[backend][2].backend)
        return made[backend]

    return loaded


def keep_all(backend):
    """Let the engine know nothing of lifetimes: rows are slots then."""
    backend.slot_bytes, backend.lifetimes = token_bytes(backend), ()


OTHERS = [(backend, kind) for backend in ("torch", "transformers") for kind in (4, 0, 3)]


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("cpu", kind) for kind in range(len(KINDS))),
        *(pytest.param(*one, marks=() if one[1] == 4 else pytest.mark.thorough) for one in OTHERS),
    ],
)
def test_slots_are_bounded_and_no_bit_changes(loaded, backend, kind):
    """On the other backends, no token changes."""
    options, draft = KINDS[kind]
    windowed, small, whole = loaded(backend)
    draft = small if draft == "model" else draft
    got = run_alone(windowed, PROMPT, options, draft, max_batch_tokens=32)
    expected = run_alone(whole, PROMPT, options, draft)
    assert [one.token_ids for one in got.sequences] == [one.token_ids for one in expected.sequences]
    assert backend != "cpu" or got.sequences == expected.sequences
    assert expected.stats.peak_slots > 240
    suffixes = 0 if options.get("num_beams", 1) == 1 else 3 * 100  # beams may have nothing in common but the prompt
    assert got.stats.peak_slots < WINDOW + BLOCK + 32 + suffixes


def test_long_sequences_fit_where_they_would_not_without_windows(loaded):
    windowed, _, whole = loaded("cpu")
    engine = Engine(windowed, max_cache_tokens=130, max_batch_tokens=32)
    prompts = [PROMPT, *([n] * 10 for n in range(3))]
    requests = [engine.submit(prompt, LONG) for prompt in prompts]
    most = preempted = 0
    while engine.step():
        most = max(most, engine.cache_tokens + engine.kept_tokens)
        preempted += any(one.pieces and not one.used_slots and not one.done for one in requests)
    assert most <= 130
    assert preempted
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.result().sequences == run_alone(whole, prompt, LONG).sequences
    with pytest.raises(specbeam.SpecbeamError, match="need 250 cache slots, the engine has 200"):
        Engine(whole, max_cache_tokens=200).submit(PROMPT, LONG)
    with pytest.raises(specbeam.SpecbeamError, match="need 105 cache slots, the engine has 104"):
        Engine(windowed, max_cache_tokens=104, max_batch_tokens=32).submit(PROMPT, LONG)
    assert len(run_alone(windowed, PROMPT, LONG, max_cache_tokens=105, max_batch_tokens=32).token_ids) == 100


def test_a_sequence_stays_cached_for_others_while_there_is_room(loaded):
    """There is just room for the sequence. Whoever begins with it holds only what it still sees."""
    windowed, _, whole = loaded("cpu")
    engine = Engine(windowed, max_cache_tokens=250, max_batch_tokens=32)
    sequence = PROMPT + ended(engine, PROMPT, LONG).token_ids
    again = ended(engine, [*sequence, 5], LONG)
    assert again.stats.reused_tokens == len(sequence) - 1
    assert again.stats.nodes_evaluated == 2 + 99
    assert again.sequences == run_alone(whole, [*sequence, 5], LONG).sequences


def test_a_strategy_may_look_back_behind_the_window(loaded):
    windowed, _, whole = loaded("cpu")
    seen = []

    def look_back(setup, drafter):
        for nodes in ([149], [148], [20], [149, 90]):
            seen.append((yield Evaluate(nodes)))
        return [Hypothesis(setup.tree.tip, 0.0, "length")]

    for lm in (windowed, whole):
        ended(Engine(lm), PROMPT, strategy=look_back)
    for got, expected in zip(seen[:4], seen[4:], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_scores_of_long_texts_are_the_same(loaded):
    windowed, _, whole = loaded("cpu")
    texts = [(PROMPT, [5] * 60), (PROMPT, [6] * 70), (PROMPT[:9], PROMPT)]
    assert sorted(score(windowed, texts, max_batch_tokens=16)) == sorted(score(whole, texts))
