"""Whether a request is admitted, and whether it finishes, follows from the request and the limits: not from the clock.

Measured times decide which beams are deferred and how far drafts go. Here a clock says anything, and the memory is
short. Each request is admitted where the plain method is, finishes, and returns what the plain method returns.
"""

import random
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, SpecbeamError, hf
from specbeam.cache.pool import pool_of
from specbeam.engine.costs import nominal_cost
from tests.conftest import examples, random_model, table_of_costs
from tests.decoding.test_speculative import other_tokenizer
from tests.engine.conftest import in_use

PROMPT = [97, 98, 99, 100] * 3
LENGTH = {"max_new_tokens": 12, "min_new_tokens": 8}
KINDS = [
    {},
    {"do_sample": True, "seed": 1},
    {"do_sample": True, "seed": 2, "num_return_sequences": 5},
    {"num_beams": 3, "do_sample": True, "seed": 3},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"num_beams": 4, "num_return_sequences": 2},
    {"num_beams": 16},
    {"num_beams": 32, "num_return_sequences": 8, "length_penalty": 0.0},
]
DRAFTS = [None, None, "ngram", "suffix", "model", "itself", "other vocabulary"]


def flat(nodes):
    """No deferring, and long drafts."""
    return 1e-3


def noisy(seed):
    """A clock that says anything."""
    draw = random.Random(seed)
    return lambda nodes: draw.lognormvariate(-7, 1) * nominal_cost(nodes * draw.choice([0, 1, 30]))


COSTS = st.sampled_from([flat, lambda nodes: 1e-3 * nodes]) | st.integers(0, 1000).map(noisy)


@pytest.fixture(scope="module")
def models(save):
    """Targets by whether they have windows, drafts by name, and what the plain method returns for a kind of request."""
    sharp = {"initializer_range": 0.3}
    folders = save(random_model("llama", **sharp)), save(random_model("mistral", sliding_window=8, **sharp))
    targets = [specbeam.load(folder, backend="cpu") for folder in folders]
    drafts = {
        "model": specbeam.load(save(random_model("llama", seed=1, **sharp)), backend="cpu"),
        "other vocabulary": specbeam.load(save(random_model("llama", seed=7), other_tokenizer()), backend="cpu"),
    }

    @cache
    def plain(windows, kind, length):
        return result(targets[windows], plain_options(KINDS[kind]), prompt=PROMPT[:length])

    return targets, drafts, plain


def plain_options(options):
    return LENGTH | options | ({"bound_rule": False} if options.get("num_beams", 1) > 1 else {})


def result(lm, options, draft=None, prompt=PROMPT, **limits):
    engine = Engine(lm, costs=table_of_costs(flat), **limits)
    request = engine.submit(prompt, LENGTH | options, draft=draft)
    while engine.step():
        assert engine._budget.held <= engine._budget.cache_bytes
    return request.result()


@settings(max_examples=examples(2))
@given(
    limits=st.fixed_dictionaries(
        {
            "max_cache_tokens": st.integers(20, 160),
            "max_batch_tokens": st.sampled_from([4, 64]),
            "max_pass_seconds": st.sampled_from([None, 0.0]),
        }
    ),
    data=st.data(),
    windows=st.booleans(),
    cost=COSTS,
)
def test_every_request_that_is_admitted_finishes(models, limits, data, windows, cost):
    """Also requests and cached prefixes together take no more slots than the limit."""
    targets, drafts, plain = models
    lm, slots, draw = targets[windows], limits["max_cache_tokens"], data.draw
    before = in_use(lm)
    engine, requests = Engine(lm, costs=table_of_costs(cost), **limits), []

    def step():
        more = engine.step()
        assert engine._budget.held <= engine._budget.cache_bytes
        assert engine.cache_tokens <= pool_of(lm.backend).in_use - before <= slots
        return more

    for _ in range(draw(st.integers(1, 3))):
        kind, draft = draw(st.integers(0, len(KINDS) - 1)), draw(st.sampled_from(DRAFTS))
        length = draw(st.sampled_from([9, 12]))
        several = KINDS[kind].get("num_return_sequences", 1) > KINDS[kind].get("num_beams", 1)
        draft = None if several else lm if draft == "itself" else drafts.get(draft, draft)
        options = LENGTH | KINDS[kind] | {"share_prefix": draw(st.booleans())}
        if draft is not None and draw(st.booleans()):  # else times decide whether drafts pay
            options["num_draft_tokens"] = 3
        try:
            Engine(lm, **limits).check(PROMPT[:length], plain_options(KINDS[kind]))
        except SpecbeamError:
            with pytest.raises(SpecbeamError, match=f"cache slots, the engine has {slots}"):
                engine.submit(PROMPT[:length], options, draft=draft)
            continue
        requests.append((engine.submit(PROMPT[:length], options, draft=draft), kind, length))
        for _ in range(draw(st.integers(0, 3))):
            step()
    while step():
        pass
    for request, *case in requests:
        assert request.result().sequences == plain(windows, *case).sequences


def test_the_least_memory_is_that_of_one_sequence(models):
    lm = models[0][0]
    for options in ({}, {"num_beams": 32}, {"do_sample": True, "num_return_sequences": 5, "seed": 2}):
        whole, tight = (result(lm, options, max_cache_tokens=slots) for slots in (None, 24))
        assert tight.stats.peak_slots <= 24
        assert tight.sequences == whole.sequences
    for draft in (None, "ngram", models[1]["model"]):
        Engine(lm, max_cache_tokens=24).submit(PROMPT, LENGTH, draft=draft)
        with pytest.raises(SpecbeamError, match="need 24 cache slots, the engine has 23"):
            Engine(lm, max_cache_tokens=23).submit(PROMPT, LENGTH, draft=draft)


def test_a_draft_that_does_not_fit_is_left_out(models):
    """The draft is as large as the model. It begins, and goes when the sequence needs its memory."""
    (lm, _), drafts, _ = models
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "num_draft_tokens": 3}
    for more in ({}, {"num_beams": 4}):
        whole = result(lm, options | more, draft=drafts["model"])
        got = result(lm, options | more, draft=drafts["model"], max_cache_tokens=64)
        assert got.sequences == whole.sequences
        assert 0 < got.stats.drafted < whole.stats.drafted


def test_samples_wait_for_each_other(models):
    """Sequences that share only the prompt are drawn one after the other. No token is computed many times."""
    lm, options = models[0][0], {"do_sample": True, "seed": 4, "num_return_sequences": 8, "max_new_tokens": 40}
    options |= {"min_new_tokens": 40}
    expected = result(lm, options)
    got = result(lm, options, max_cache_tokens=120)
    assert expected.stats.peak_slots > 300
    assert got.sequences == expected.sequences
    assert got.stats.nodes_evaluated < 2 * expected.stats.nodes_evaluated


def test_the_scores_of_transformers_generate_come_from_short_memory_too(monkeypatch):
    model = random_model("llama", initializer_range=0.3)
    how = {"max_new_tokens": 20, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}
    how |= {"custom_generate": hf.generate, "prompt_lookup_num_tokens": 8}
    prompt = torch.tensor([PROMPT])
    expected = model.generate(prompt, **how)
    monkeypatch.setattr("specbeam.integrations.transformers.Engine", partial(Engine, max_cache_tokens=33))
    got = model.generate(prompt, **how)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert all(torch.equal(one, other) for one, other in zip(got.scores, expected.scores, strict=True))
