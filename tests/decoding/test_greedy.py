"""Greedy generation against transformers' generate, token for token."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam.decoding.stopping import Stopping
from specbeam.tree import Tree
from tests.conftest import EOS


def theirs(model, prompt, **options):
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=30),
    max_new_tokens=st.integers(1, 40),
    penalty=st.sampled_from([1.0, 1.3, 0.8]),
    data=st.data(),
)
def test_greedy_is_that_of_transformers(tiny, family, prompt, max_new_tokens, penalty, data):
    model, lm = tiny(family)
    options = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": data.draw(st.integers(0, max_new_tokens)),
        "repetition_penalty": penalty,
        "eos_token_id": data.draw(st.lists(st.integers(0, 258), min_size=1, max_size=40)),
    }
    expected = theirs(model, prompt, **options)
    result = specbeam.generate(lm, prompt, **options)
    assert result.token_ids == expected
    assert result.finish_reason == ("stop" if expected[-1] in options["eos_token_id"] else "length")
    assert result.stats.forward_passes == result.stats.new_tokens == len(expected)


def test_the_score_is_the_log_probability_of_the_tokens(tiny):
    model, lm = tiny("llama")
    prompt = [1, 2, 3]
    result = specbeam.generate(lm, prompt, max_new_tokens=12, repetition_penalty=1.5)
    with torch.no_grad():
        log_probs = model(torch.tensor([prompt + result.token_ids])).logits[0].log_softmax(-1)
    expected = sum(log_probs[len(prompt) - 1 + i, t].item() for i, t in enumerate(result.token_ids))
    assert result.sequences[0].score == pytest.approx(expected, abs=1e-3)


def test_the_end_of_text_is_kept_in_the_ids_and_out_of_the_text(tiny):
    _, lm = tiny("llama")
    long = specbeam.generate(lm, [5], max_new_tokens=8, eos_token_id=EOS)
    eos = long.token_ids[3]
    first = long.token_ids.index(eos)
    result = specbeam.generate(lm, [5], max_new_tokens=8, eos_token_id=[eos])
    assert result.token_ids == long.token_ids[: first + 1]
    assert result.finish_reason == "stop"


def test_text_ends_before_a_stop_string_and_as_soon_as_it_is_there(lm):
    whole = specbeam.generate(lm, "abc", max_new_tokens=60)
    assert len(whole.text) > 20
    stop = whole.text[10:13]
    result = specbeam.generate(lm, "abc", max_new_tokens=60, stop_strings=[stop, "never there"])
    assert result.finish_reason == "stop"
    assert result.text == whole.text[: whole.text.index(stop)]
    shorter = lm.decode(result.token_ids[:-1])
    assert stop in lm.decode(result.token_ids)
    assert stop not in shorter


def test_a_stop_string_is_seen_across_tokens_that_say_nothing(lm):
    tree = Tree([1])
    node = tree.tip
    for token in [*lm.tokenizer("STO").input_ids, *[EOS] * 40, *lm.tokenizer("P").input_ids]:
        (node,) = tree.add(node, token).tolist()
    stop = Stopping(frozenset(), 1000, ("STOP",), lm.decode)
    assert stop(tree, node) == "stop"
    assert stop(tree, tree.parents(node)) is None


def test_the_context_ends_a_sequence(tiny):
    _, lm = tiny("llama", max_position_embeddings=32)
    result = specbeam.generate(lm, [7] * 20, max_new_tokens=100, eos_token_id=EOS, min_new_tokens=100)
    assert len(result.token_ids) == 12
    assert result.finish_reason == "length"


def test_statistics(lm):
    stats = specbeam.generate(lm, [1, 2, 3, 4], max_new_tokens=10, min_new_tokens=10).stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.forward_passes) == (4, 10, 10)
    assert 0 < stats.time_to_first_token < stats.seconds
    assert math.isclose(stats.tokens_per_second, 10 / stats.seconds)
    assert stats.peak_memory > 1 << 20
