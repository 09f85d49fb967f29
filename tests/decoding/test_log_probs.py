"""Log-probabilities of tokens and of their alternatives, against transformers' logits and its transition scores."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam import Engine
from specbeam.decoding import Evaluate, Hypothesis, alternatives
from specbeam.decoding.alternatives import Alternatives
from specbeam.selection import SelectionRequest, select
from specbeam.tree import Tree
from tests.conftest import EOS, random_model

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
PROMPTS = st.lists(st.integers(0, 255), min_size=1, max_size=12)


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


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("length_penalty", [0.0, 1.3])
def test_log_probs_are_the_transition_scores_of_transformers(tiny, num_beams, length_penalty):
    model, lm = tiny("llama")
    ids, how = torch.tensor([[7, 8, 9]]), {"num_beams": num_beams, "num_return_sequences": num_beams}
    if num_beams > 1:
        how["length_penalty"] = length_penalty
    theirs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=8,
        output_scores=True,
        return_dict_in_generate=True,
        **how,
    )
    scores = model.compute_transition_scores(
        theirs.sequences, theirs.scores, theirs.get("beam_indices"), normalize_logits=num_beams == 1
    )
    result = specbeam.generate(lm, [7, 8, 9], max_new_tokens=8, **how)
    for sequence, row in zip(result.sequences, scores, strict=True):
        assert sequence.log_probs == pytest.approx(row[: len(sequence.token_ids)].tolist(), abs=1e-4)
        if num_beams > 1:
            normalized = sequence.log_prob / len(sequence.token_ids) ** length_penalty
            assert sequence.score == pytest.approx(normalized, abs=1e-4)


@pytest.fixture(scope="module")
def exact(save):
    """A target on the backend that gives a node the same bits in any pass, and drafts for it by name."""
    target, other = (specbeam.load(save(random_model("llama", seed=seed)), backend="cpu", threads=1) for seed in (0, 1))
    return target, {"ngram": "ngram", "suffix": "suffix", "itself": target, "another model": other}


@pytest.mark.parametrize("draft", ["ngram", "suffix", "itself", "another model"])
@given(
    prompt=PROMPTS,
    options=st.sampled_from([METHODS["greedy"], METHODS["penalized"], METHODS["beams"], METHODS["penalized beams"]]),
    sizes=st.sampled_from([{}, {"num_draft_tokens": 3}, {"num_draft_tokens": 2, "draft_width": 4}]),
    k=st.sampled_from([0, 1, 4, 1000]),
)
def test_drafts_change_no_bit_of_log_probs(exact, draft, prompt, options, sizes, k):
    lm, drafts = exact
    options = {**options, "max_new_tokens": 12, "eos_token_id": [EOS, 17], "top_logprobs": k}
    plain = specbeam.generate(lm, prompt * 2, **options)
    drafted = specbeam.generate(lm, prompt * 2, draft=drafts[draft], **sizes, **options)
    assert drafted.sequences == plain.sequences
    for sequence in plain.sequences:
        assert {len(likeliest) for likeliest in sequence.top_logprobs} == {min(k, 259)}


@pytest.mark.parametrize("draft", ["ngram", "another model"])
def test_log_probs_of_speculative_samples_are_those_of_the_same_sequence(exact, draft):
    """Greedy search that is led along a speculative sample gives its bits."""
    lm, drafts = exact
    drawn = specbeam.generate(
        lm, [1, 2, 3] * 3, draft=drafts[draft], temperature=1.2, seed=4, max_new_tokens=20, top_logprobs=3
    )
    text = [1, 2, 3] * 3 + drawn.token_ids
    led = specbeam.generate(
        lm,
        text[:9],
        max_new_tokens=20,
        top_logprobs=3,
        prefix_allowed_tokens_fn=lambda _, ids: [text[len(ids)]],
    )
    assert led.sequences[0] == drawn.sequences[0]


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS)
def test_to_ask_for_alternatives_changes_nothing_else(lm, options):
    asked, plain = (specbeam.generate(lm, [4, 5], max_new_tokens=12, **options, **k) for k in ({"top_logprobs": 2}, {}))
    for one, other in zip(asked.sequences, plain.sequences, strict=True):
        assert other.top_logprobs is None
        assert (one.text, one.token_ids, one.score, one.log_probs) == (
            other.text,
            other.token_ids,
            other.score,
            other.log_probs,
        )


def test_the_object_for_json_has_log_probs_where_they_are_asked_for(lm):
    how = {"max_new_tokens": 3, "num_beams": 2}
    (plain,) = specbeam.generate(lm, [1], **how).to_dict()["sequences"]
    assert set(plain) == {"text", "token_ids", "log_prob", "score", "finish_reason"}
    result = specbeam.generate(lm, [1], top_logprobs=2, **how)
    (asked,) = result.to_dict()["sequences"]
    (found,) = result.sequences
    assert asked == {**plain, "log_probs": found.log_probs, "top_logprobs": found.top_logprobs}


@pytest.mark.parametrize("value", [-1, 1.5, True, "two"])
def test_a_number_of_alternatives_that_is_none_is_refused(value):
    with pytest.raises(specbeam.SpecbeamError, match="top_logprobs"):
        specbeam.Options(top_logprobs=value)


def test_alternatives_of_dropped_nodes_take_no_memory():
    tree, logits = Tree([1]), torch.rand(16, 300)
    selection = select(logits, SelectionRequest(top=50))
    remembered = Alternatives(tree, 50)
    tracemalloc.start()
    for _ in range(40):
        nodes = tree.add(np.full(16, tree.tip), np.arange(16))
        remembered.add(nodes, selection)
        tree.keep(nodes[:1])
    held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, alternatives.__file__)])
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
        (second,) = tree.add(first, 6, float(logits[0].log_softmax(-1)[6]))
        return [Hypothesis(int(second), 0.0, "length")]

    engine = Engine(lm)
    request = engine.submit([1, 2, 3], {"top_logprobs": 2}, strategy=strategy)
    engine.run()
    (sequence,) = request.result().sequences
    unknown, known = sequence.top_logprobs
    assert (sequence.token_ids, unknown) == ([5, 6], {})
    assert [*known] == log_probs_of_model(model, [1, 2, 3], [5, 6])[1].topk(2).indices.tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_no_alternatives_may_be_asked_for_with_any_vocabulary(tiny, options):
    lm = tiny("llama", vocab_size=20, eos_token_id=7, bos_token_id=1)[1]
    result = specbeam.generate(lm, [1, 2], max_new_tokens=3, min_new_tokens=3, top_logprobs=0, **options)
    assert result.sequences[0].top_logprobs == [{}, {}, {}]
