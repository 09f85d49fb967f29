"""Short memory costs time, and no result. test_exactness.py draws limits, requests, and clocks that say anything."""

from functools import partial

import pytest
import torch

import specbeam
from specbeam import Engine, SpecbeamError, hf
from tests.conftest import random_model, table_of_costs

PROMPT = [97, 98, 99, 100] * 3
LENGTH = {"max_new_tokens": 12, "min_new_tokens": 8}


@pytest.fixture(scope="module")
def lm(save):
    return specbeam.load(save(random_model("llama", initializer_range=0.3)), backend="cpu")


@pytest.fixture(scope="module")
def draft(save):
    return specbeam.load(save(random_model("llama", seed=1, initializer_range=0.3)), backend="cpu")


def result(lm, options, draft=None, **limits):
    """With costs at which no beam is deferred, and drafts are long."""
    engine = Engine(lm, costs=table_of_costs(lambda nodes: 1e-3), **limits)
    request = engine.submit(PROMPT, LENGTH | options, draft=draft)
    engine.run()
    return request.result()


def test_the_least_memory_is_that_of_one_sequence(lm, draft):
    for options in ({}, {"num_beams": 32}, {"do_sample": True, "num_return_sequences": 5, "seed": 2}):
        whole, tight = (result(lm, options, max_cache_tokens=slots) for slots in (None, 24))
        assert tight.stats.peak_slots <= 24
        assert tight.sequences == whole.sequences
    for one in (None, "ngram", draft):
        Engine(lm, max_cache_tokens=24).submit(PROMPT, LENGTH, draft=one)
        with pytest.raises(SpecbeamError, match="need 24 cache slots, the engine has 23"):
            Engine(lm, max_cache_tokens=23).submit(PROMPT, LENGTH, draft=one)


def test_a_draft_that_does_not_fit_is_left_out(lm, draft):
    """The draft is as large as the model. It begins, and goes when the sequence needs its memory."""
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "num_draft_tokens": 3}
    for more in ({}, {"num_beams": 4}):
        whole, got = (result(lm, options | more, draft, max_cache_tokens=slots) for slots in (None, 64))
        assert got.sequences == whole.sequences
        assert 0 < got.stats.drafted < whole.stats.drafted


def test_samples_wait_for_each_other(lm):
    """Sequences that share only the prompt are drawn one after the other. No token is computed many times."""
    options = {"do_sample": True, "seed": 4, "num_return_sequences": 8, "max_new_tokens": 40, "min_new_tokens": 40}
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
