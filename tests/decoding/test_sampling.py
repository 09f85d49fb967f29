"""Several samples of one prompt: independent, each as if it were drawn alone, with one prefill of the prompt."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import specbeam
from specbeam import Engine
from tests.conftest import EOS, examples, in_thorough_mode
from tests.decoding.test_speculative import sequences_and_chances


def test_samples_are_independent_and_follow_the_model(tiny):
    """Neighbouring samples, as pairs, follow the product of the model's probabilities. The prompt is read once."""
    model, lm = tiny("llama", vocab_size=6, eos_token_id=5, bos_token_id=0, initializer_range=0.3)
    draws = 8000 if in_thorough_mode() else 2000
    options = {"temperature": 0.8, "max_new_tokens": 2, "num_return_sequences": draws, "eos_token_id": []}
    result = specbeam.generate(lm, [1, 2, 3], seed=3, **options)
    assert result.stats.target_passes == 2
    assert result.stats.nodes_evaluated <= 3 + 6
    chances = sequences_and_chances(model, [1, 2, 3], length=2, temperature=0.8, top_k=6)
    number = {sequence: i for i, sequence in enumerate(chances)}
    p = np.array([*chances.values()])
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


def test_samples_that_agree_share_their_nodes_and_stream_at_once(lm):
    engine = Engine(lm)
    request, early = engine.submit("abc", {"temperature": 1e-5, "num_return_sequences": 5, "max_new_tokens": 6}), ""
    while engine.step():
        early = "".join(piece.text for piece in request.pieces)
    result = request.result()
    greedy = specbeam.generate(lm, "abc", max_new_tokens=6)
    assert [sequence.token_ids for sequence in result.sequences] == [greedy.token_ids] * 5
    assert result.stats.nodes_evaluated == result.stats.prompt_tokens + 5
    assert early
    assert "".join(piece.text for piece in request.pieces) == result.text
