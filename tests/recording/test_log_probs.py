"""Log-probabilities of tokens and of their alternatives, against transformers' logits."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam
from specbeam import Engine
from specbeam.backends.torch.selecting import select
from specbeam.core.selection import SelectionRequest
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.core.tree import Tree
from specbeam.recording import log_probs
from specbeam.recording.log_probs import Alternatives
from tests.engine.conftest import ended

METHODS = {
    "greedy": {},
    "penalized": {"repetition_penalty": 1.5, "min_new_tokens": 5},
    "sample": {"temperature": 1.7, "top_k": 20, "seed": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3, "seed": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.7},
    "penalized beams": {"num_beams": 3, "num_return_sequences": 3, "repetition_penalty": 1.5},
    "beam sampling": {"num_beams": 3, "temperature": 1.5, "seed": 5},
    "diverse beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "num_return_sequences": 4},
}


def log_probs_of_model(model, prompt, token_ids):
    """The model's log-probabilities of all tokens at the position of each new token, [new tokens, vocab]."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + token_ids[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].log_softmax(-1)


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_log_probs_are_those_of_the_models_own_logits(tiny, options):
    model, lm = tiny("llama")
    prompt = [1, 2, 3]
    result = specbeam.generate(lm, prompt, max_new_tokens=10, top_logprobs=5, **options)
    plain = specbeam.generate(lm, prompt, max_new_tokens=10, **options)
    assert [replace(one, top_logprobs=None) for one in result.sequences] == plain.sequences
    assert len(result.sequences) == options.get("num_return_sequences", 1)
    for sequence in result.sequences:
        expected = log_probs_of_model(model, prompt, sequence.token_ids)
        of_tokens = expected[torch.arange(len(expected)), sequence.token_ids]
        assert sequence.log_probs == pytest.approx(of_tokens.tolist(), abs=1e-4)
        assert sequence.log_prob == pytest.approx(sum(sequence.log_probs))
        values, tokens = expected.topk(5)
        assert [[*likeliest] for likeliest in sequence.top_logprobs] == tokens.tolist()
        got = [[*likeliest.values()] for likeliest in sequence.top_logprobs]
        assert np.array(got) == pytest.approx(values.numpy(), abs=1e-4)
        for token, log_prob, likeliest in zip(
            sequence.token_ids, sequence.log_probs, sequence.top_logprobs, strict=True
        ):
            assert likeliest.get(token, log_prob) == log_prob
        if "num_beams" not in options:
            assert sequence.score == sequence.log_prob
        if "length_penalty" in options:
            normalized = sequence.log_prob / len(sequence.token_ids) ** options["length_penalty"]
            assert sequence.score == pytest.approx(normalized, abs=1e-5)


def test_the_object_for_json_has_log_probs_where_they_are_asked_for(lm):
    how = {"max_new_tokens": 3, "num_beams": 2}
    (plain,) = specbeam.generate(lm, [1], **how).to_dict()["sequences"]
    assert set(plain) == {"text", "token_ids", "log_prob", "score", "finish_reason"}
    result = specbeam.generate(lm, [1], top_logprobs=2, **how)
    (asked,) = result.to_dict()["sequences"]
    (found,) = result.sequences
    assert asked == {**plain, "log_probs": found.log_probs, "top_logprobs": found.top_logprobs}


def test_alternatives_of_dropped_nodes_take_no_memory():
    tree, logits = Tree([1]), torch.rand(16, 300)
    selection = select(logits, SelectionRequest(top=50))
    remembered = Alternatives(tree, 50)
    tracemalloc.start()
    for _ in range(40):
        nodes = tree.add(np.full(16, tree.tip), np.arange(16))
        remembered.add(nodes, selection)
        tree.keep(nodes[:1])
    held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, log_probs.__file__)])
    tracemalloc.stop()
    rows = sum(trace.size for trace in held.statistics("filename")) / (50 * 24)  # a float of 24 bytes per token
    assert rows < 40 * 8  # 40 live nodes, of 640
    assert [*remembered.after(tree.tip)] == logits[0].topk(50).indices.tolist()


def test_no_alternatives_are_known_where_a_strategy_added_a_token_unasked(tiny):
    model, lm = tiny("llama")

    def strategy(setup, drafter):
        tree = setup.tree
        (first,) = tree.add(tree.tip, 5, -1.0)  # the prompt's end was not evaluated
        logits = yield Evaluate(np.array([first]))
        (second,) = tree.add(first, 6, float(torch.from_numpy(logits[0]).log_softmax(-1)[6]))
        return [Hypothesis(int(second), 0.0, "length")]

    (sequence,) = ended(Engine(lm), [1, 2, 3], {"top_logprobs": 2}, strategy=strategy).sequences
    unknown, known = sequence.top_logprobs
    assert (sequence.token_ids, unknown) == ([5, 6], {})
    assert [*known] == log_probs_of_model(model, [1, 2, 3], [5, 6])[1].topk(2).indices.tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_no_alternatives_may_be_asked_for_with_any_vocabulary(tiny, options):
    lm = tiny("llama", vocab_size=20, eos_token_id=7, bos_token_id=1)[1]
    result = specbeam.generate(lm, [1, 2], max_new_tokens=3, min_new_tokens=3, top_logprobs=0, **options)
    assert result.sequences[0].top_logprobs == [{}, {}, {}]
