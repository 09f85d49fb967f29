"""An engine's other work changes no bit of a request, whatever its kind.

Requests share prefixes, passes, memory and threads here, and the backend goes ahead of some. Each is compared with
itself alone on a fresh engine.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, TokenTrie
from tests.conftest import EOS, examples, random_model, run_alone
from tests.decoding.test_speculative import other_tokenizer

OUTPUTS = TokenTrie([[a, b, *range(97, 97 + c), EOS] for a in (99, 120) for b in (97, 101, 110) for c in range(4)])
CHAIN = {"num_draft_tokens": 2, "draft_budget": 4}
DRAFT = CHAIN | {"draft_width": 2}
KINDS = [
    ({}, None),
    ({"temperature": 0.8, "seed": 1}, None),
    ({"top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 2}, None),
    ({"num_beams": 4}, None),
    ({"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.0}, None),
    ({"do_sample": True, "num_return_sequences": 3, "seed": 3}, None),
    ({"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.7}, None),
    ({"num_beams": 2, "do_sample": True, "seed": 4}, None),
    ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, None),
    ({"num_beams": 3, "num_return_sequences": 3, "constraint": OUTPUTS}, None),
    (CHAIN, "ngram"),
    ({"do_sample": True, "seed": 5} | CHAIN, "suffix"),
    ({"num_beams": 3} | DRAFT, "ngram"),
    ({"constraint": OUTPUTS} | CHAIN, "suffix"),
    (DRAFT, "model"),
    ({"do_sample": True, "seed": 6} | DRAFT, "model"),
    ({"num_beams": 3, "num_return_sequences": 3} | DRAFT, "model"),
    (CHAIN, "other vocabulary"),
    ({"num_beams": 2} | CHAIN, "other vocabulary"),
]
CHANGES = [
    {},
    {"top_logprobs": 2},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2, "logit_bias": {101: 1.5}},
    {"presence_penalty": 0.4, "min_new_tokens": 5},
]
BEGINNINGS = [[97 + n % 7 for n in range(60)], [97 + n % 7 for n in range(30)] + [110] * 30, [98] * 5]
REQUEST = st.fixed_dictionaries(
    {
        "beginning": st.integers(0, len(BEGINNINGS) - 1),
        "cut": st.sampled_from([0, 0, 1, 20]),
        "end": st.lists(st.integers(97, 122), max_size=4),
        # Half of them are such that the backend may go on by itself, if all live requests are.
        "kind": st.integers(0, 4) | st.integers(0, len(KINDS) - 1),
        "changes": st.just(0) | st.integers(0, len(CHANGES) - 1),
        "share_prefix": st.sampled_from([True, True, False]),
        "priority": st.integers(0, 1),
        "iterations": st.integers(0, 3),  # before the next one is submitted
    }
)
LIMITS = st.fixed_dictionaries(
    {
        "max_requests": st.sampled_from([2, 8]),
        "max_batch_tokens": st.sampled_from([5, 16, 512]),
        "max_cache_tokens": st.sampled_from([None, 300]),  # with 300, requests are preempted
        "max_pass_seconds": st.sampled_from([None, 0.0]),
    }
)


@pytest.fixture(scope="module")
def models(save):
    """Targets by whether they have windows and by threads, drafts by name, and the result of a request alone."""
    sizes = {"num_hidden_layers": 2}
    drafts = {
        "model": specbeam.load(save(random_model("llama", seed=1, **sizes)), backend="cpu"),
        "other vocabulary": specbeam.load(
            save(random_model("llama", seed=7, **sizes), other_tokenizer()), backend="cpu"
        ),
    }
    folders = save(random_model("llama")), save(random_model("mistral", sliding_window=8))
    targets = [[specbeam.load(folder, backend="cpu", threads=n) for n in (1, 2)] for folder in folders]

    @cache
    def alone(windows, prompt, kind, changes):
        lm, (options, draft) = targets[windows][0], KINDS[kind]
        options = {"max_new_tokens": 8, "share_prefix": False} | options | CHANGES[changes]
        return run_alone(lm, [*prompt], options, drafts.get(draft, draft)).sequences

    return targets, drafts, alone


@settings(max_examples=examples(0.8))
@given(
    cases=st.lists(REQUEST, min_size=1, max_size=6),
    limits=LIMITS,
    windows=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_prefixes_preemption_batch_threads_and_order_change_no_bit(models, cases, limits, windows, threads):
    targets, drafts, alone = models
    engine = Engine(targets[windows][threads - 1], **limits)
    submitted = []
    for case in cases:
        beginning, (options, draft) = BEGINNINGS[case["beginning"]], KINDS[case["kind"]]
        prompt = beginning[: len(beginning) - case["cut"]] + case["end"] or [100]
        options = {"max_new_tokens": 8, "share_prefix": case["share_prefix"]} | options | CHANGES[case["changes"]]
        request = engine.submit(prompt, options, draft=drafts.get(draft, draft), priority=case["priority"])
        submitted.append((request, (windows, tuple(prompt), case["kind"], case["changes"])))
        for _ in range(case["iterations"]):
            engine.step()
    engine.run()
    assert engine.cache_tokens == 0
    for request, what in submitted:
        assert request.result().sequences == alone(*what)
