"""Several samples of one prompt: independent, each as if it were drawn alone, with one prefill of the prompt."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import specbeam
from specbeam import Engine
from tests.conftest import EOS, examples, in_thorough_mode

SMALL = {"vocab_size": 6, "eos_token_id": 5, "bos_token_id": 0, "initializer_range": 0.3}


def distribution(model, ids, temperature):
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, -1].double() / temperature).softmax(-1).numpy()


def test_samples_are_independent_and_follow_the_model(tiny):
    """Neighbouring samples, as pairs, follow the product of the model's probabilities."""
    model, lm = tiny("llama", **SMALL)
    draws = 8000 if in_thorough_mode() else 2000
    options = {"temperature": 0.8, "max_new_tokens": 2, "num_return_sequences": draws}
    result = specbeam.generate(lm, [1, 2, 3], seed=3, **options)
    first = distribution(model, [1, 2, 3], 0.8)
    texts = {(5,): first[5]} | {
        (a, b): first[a] * p for a in range(5) for b, p in enumerate(distribution(model, [1, 2, 3, a], 0.8))
    }
    number = {text: i for i, text in enumerate(texts)}
    p = np.array([*texts.values()])
    drawn = np.array([number[tuple(sequence.token_ids)] for sequence in result.sequences])
    assert chisquare(np.bincount(drawn, minlength=len(p)), draws * p / p.sum()).pvalue > 1e-3
    rare = np.argsort(p)[:-4]  # as one sequence, so that every pair is frequent enough
    drawn, p = np.where(np.isin(drawn, rare), rare[0], drawn), np.where(np.isin(np.arange(len(p)), rare), 0, p)
    p[rare[0]] = 1 - p.sum()
    pairs = np.bincount(drawn[::2] * len(p) + drawn[1::2], minlength=len(p) ** 2)
    expected = draws / 2 * np.outer(p, p).ravel()
    assert chisquare(pairs[expected > 0], expected[expected > 0]).pvalue > 1e-3


@settings(max_examples=examples(0.5))
@given(
    n=st.integers(2, 6),
    seed=st.integers(0, 2**63 - 1),
    penalty=st.sampled_from([None, 1.4]),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=8),
)
def test_a_sample_depends_neither_on_the_other_samples_nor_on_the_batch(lm, n, seed, penalty, prompt):
    options = {"temperature": 1.3, "top_p": 0.95, "max_new_tokens": 8, "seed": seed, "repetition_penalty": penalty}
    options["eos_token_id"] = [EOS, *range(40)]
    engine = Engine(lm)
    several = engine.submit(prompt, options | {"num_return_sequences": n})
    for other in range(3):
        engine.submit([other, 7, 9], {"do_sample": True, "max_new_tokens": 5, "num_return_sequences": other + 1})
    engine.run()
    samples = [(s.token_ids, s.finish_reason) for s in several.result().sequences]
    assert len(samples) == n
    fewer = specbeam.generate(lm, prompt, **options, num_return_sequences=n - 1).sequences
    assert [(s.token_ids, s.finish_reason) for s in fewer] == samples[:-1]
    alone = specbeam.generate(lm, prompt, **options).sequences[0]
    assert (alone.token_ids, alone.finish_reason) == samples[0]
    assert alone.score == pytest.approx(several.result().sequences[0].score, abs=1e-4)


def test_the_prompt_is_read_once(lm):
    prompt = [*range(100)]
    result = specbeam.generate(lm, prompt, do_sample=True, num_return_sequences=7, max_new_tokens=4, seed=1)
    assert len({tuple(s.token_ids) for s in result.sequences}) > 1
    assert result.stats.nodes_evaluated <= 100 + 7 * 3
    assert result.stats.target_passes == max(len(s.token_ids) for s in result.sequences)


def test_samples_that_agree_share_their_nodes_and_stream_at_once(lm):
    engine = Engine(lm)
    options = {"temperature": 1e-5, "num_return_sequences": 5, "max_new_tokens": 6}
    request = engine.submit("abc", options)
    streamed = []
    while engine.step():
        streamed += [piece.text for piece in request.pieces]
        request.pieces.clear()
    streamed += [piece.text for piece in request.pieces]
    result = request.result()
    assert {tuple(s.token_ids) for s in result.sequences} == {
        tuple(specbeam.generate(lm, "abc", max_new_tokens=6).token_ids)
    }
    assert result.stats.nodes_evaluated == result.stats.prompt_tokens + 5
    assert "".join(streamed) == result.text
