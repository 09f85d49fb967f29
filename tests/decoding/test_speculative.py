"""Speculation changes nothing but speed: greedy and beams against transformers, samples against their distribution."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import specbeam
from specbeam import Engine, Options, SpecbeamError
from specbeam.core.tree import Tree
from specbeam.drafting.model import ModelDrafter
from specbeam.drafting.policy.controller import Controller, Sizes
from specbeam.logits.processors import Processors
from specbeam.logits.selector import Selector
from specbeam.logits.stopping import Stopping
from tests.conftest import (
    assert_are_beams_of_transformers,
    beams_of_transformers,
    biases_and_bans,
    examples,
    fast_tokenizer,
    head_of,
    in_thorough_mode,
    prompt_and_beam_options,
    random_model,
)


def other_tokenizer():
    """Bytes in another order, and some pairs of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    pairs = [(a, b) for a in "!#%'" for b in '"$&(']
    vocabulary = {c: i for i, c in enumerate([*alphabet, *(a + b for a, b in pairs[:2])])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs[:2]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast_tokenizer(tokenizer)


DRAFTERS = [None, "ngram", "suffix", "perfect", "good", "other", "adversarial", "earlier texts", "another vocabulary"]


@pytest.fixture(scope="session")
def drafter(tiny, save):
    """Drafters for the models of ``tiny``, by how good their draft tokens are."""
    made = {}

    def drafter(kind, family, **changes):
        lm = tiny(family, **changes)[1]
        if kind in (None, "ngram", "suffix"):
            return kind
        if kind == "perfect":
            return lm
        if kind == "earlier texts":
            return specbeam.suffix_automaton(lm, [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [6, 5, 4, 3, 2, 1, 0, 5]])
        key = (kind, family, repr(changes))
        if key not in made:
            another = {"other": changes, "another vocabulary": {}}.get(kind)
            model = random_model(family, **changes) if another is None else random_model("llama", seed=7, **another)
            if kind == "good":
                torch.manual_seed(1)
                for parameter in model.parameters():
                    parameter.data += torch.randn_like(parameter) * 0.02
            if kind == "adversarial":
                head_of(model)[:] *= -1  # always the least likely
            tokenizer = other_tokenizer() if kind == "another vocabulary" else None
            made[key] = specbeam.load(save(model, tokenizer), device="cpu", dtype="float32")
        return made[key]

    return drafter


@pytest.fixture(scope="module")
def wide(save):
    """A model with a vocabulary that drafts read a part of, on the backend that selects in native code."""
    folder = save(random_model("llama", vocab_size=9000, initializer_range=0.25))
    return specbeam.load(folder, backend="cpu", quantize="float32")


def generate_where_bridged(lm, prompt, draft, kind, **options):
    """A result. None if the prompt is not valid text, since then a draft with another vocabulary cannot be used."""
    text = lm.decode(prompt, skip_special_tokens=False)
    both = (lm, draft) if kind == "another vocabulary" else ()
    if any(m.tokenizer.decode(m.tokenizer(text, add_special_tokens=False).input_ids) != text for m in both):
        with pytest.raises(SpecbeamError, match="text cannot bridge"):
            specbeam.generate(lm, prompt, draft=draft, **options)
        return None
    return specbeam.generate(lm, prompt, draft=draft, **options)


def sizes(data):
    """Options for how much is drafted. Most are fixed sizes, since these reach rare cases."""
    size = {
        "num_draft_tokens": st.sampled_from(["auto", 1, 2, 3, 6, 20]),
        "draft_width": st.sampled_from(["auto", 1, 2, 5, 13]),
        "draft_budget": st.sampled_from(["auto", "auto", 1, 4, 30]),
    }
    return {name: data.draw(values, name) for name, values in size.items()}


@pytest.mark.parametrize("search", ["greedy", "beams"])
@pytest.mark.parametrize("kind", DRAFTERS)
@settings(max_examples=examples(0.3))
@given(family=st.sampled_from(["llama", "qwen2", "qwen3"]), vocab_size=st.sampled_from([8, 20, 200]), data=st.data())
def test_searches_are_those_of_transformers_with_and_without_drafts(
    tiny, drafter, kind, search, family, vocab_size, data
):
    changes = {"vocab_size": vocab_size, "eos_token_id": 1, "bos_token_id": 0, "initializer_range": 0.25}
    model, lm = tiny(family, **changes)
    draft = drafter(kind, family, **changes)
    prompt, options = prompt_and_beam_options(data, vocab_size)
    if search == "greedy":
        names = ("max_new_tokens", "min_new_tokens", "repetition_penalty", "eos_token_id")
        options = {name: options[name] for name in names}
        options["repetition_penalty"] = data.draw(st.sampled_from([1.0, 1.4, 0.8]), "repetition_penalty")
    ours, theirs = biases_and_bans(data, vocab_size, len(prompt)) if vocab_size > 8 else ({}, {})
    expected, scores = beams_of_transformers(model, prompt, **options, **theirs)
    drafting = {} if kind is None else sizes(data)
    result = generate_where_bridged(lm, prompt, draft, kind, **options, **ours, **drafting)
    if result is None:
        return
    for got in result.sequences:
        assert got.finish_reason == ("stop" if got.token_ids[-1] in options["eos_token_id"] else "length")
    if search == "beams":
        assert_are_beams_of_transformers(result.sequences, expected, scores)
        return
    assert [result.token_ids] == expected
    assert result.stats.accepted <= result.stats.drafted
    assert len(result.token_ids) <= result.stats.target_passes + result.stats.accepted
    if kind is None:
        assert result.stats.forward_passes == result.stats.new_tokens == len(result.token_ids)


def test_a_perfect_draft_saves_passes(tiny):
    _, lm = tiny("llama")
    options = {"max_new_tokens": 40, "min_new_tokens": 40}
    for how in ({}, {"temperature": 1.0, "seed": 0}):
        one = specbeam.generate(lm, [1, 2, 3], draft=lm, num_draft_tokens=7, draft_width=1, **how, **options)
        assert (one.stats.target_passes, one.stats.steps_per_target_pass, one.stats.acceptance_rate) == (5, 8, 1)
    beams = specbeam.generate(lm, [1, 2, 3], draft=lm, num_draft_tokens=7, draft_width=8, num_beams=4, **options)
    assert beams.stats.target_passes <= 6


RAISED = {
    "all tokens": {"logit_bias": dict.fromkeys(range(259), 3.0)},
    "one token": {"logit_bias": {5: 10_000.0}},
    "frequent tokens": {"frequency_penalty": -1.0},
    "present tokens": {"presence_penalty": -2.0},
    "a caller's": {"logits_processor": lambda ids, scores: scores * 0.5 + 7},
}


@pytest.mark.parametrize("raised", RAISED.values(), ids=RAISED)
@pytest.mark.filterwarnings("error")
def test_a_perfect_draft_saves_passes_where_scores_are_raised_above_0(tiny, raised):
    _, lm = tiny("llama")
    sizes = {"num_draft_tokens": 8, "draft_width": 8, "draft_budget": 8}
    options = {"max_new_tokens": 40, "min_new_tokens": 40, **raised}
    result = specbeam.generate(lm, [*range(50)], draft=lm, trace=True, **sizes, **options)
    assert result.token_ids == specbeam.generate(lm, [*range(50)], **options).token_ids
    assert result.stats.target_passes <= 20
    draft_tokens = [one for entry in result.trace for one in entry["drafted"]]
    assert len(draft_tokens) >= 8
    assert not [one for one in draft_tokens if one["parent"] is None and one["beam"] is None]


LOW_TOKENS = [*range(10, 40), 12, 15, *range(10, 20)]


@pytest.mark.parametrize(
    ("prompt", "options", "vocab"),
    [
        (LOW_TOKENS, {}, 4096),
        ([*LOW_TOKENS, 8000], {}, 4096),  # a special token does not count as text
        ([*LOW_TOKENS, 5000, 5001, 5002], {}, 8192),
        (LOW_TOKENS[:20], {}, 9000),  # too few tokens to judge by
        (LOW_TOKENS, {"logits_processor": lambda ids, scores: scores}, 9000),  # may raise any token
    ],
)
def test_a_draft_model_reads_the_part_of_its_head_that_the_text_uses(prompt, options, vocab):
    options = Options(**options)
    tree, stop = Tree(prompt), Stopping(frozenset(), 99, (), None)
    controller = Controller([Sizes(3, 2, None, num_tips=1, chains=False)], float, float, float)
    drafter = ModelDrafter(tree, Selector(Processors(options, frozenset(), 9000)), stop, 9000, 99, [8000], controller)
    step = next(drafter.propose(np.array([tree.tip]), np.zeros(1)))
    assert (step.drafting, step.selection_request.vocab) == (True, vocab)


@pytest.mark.parametrize("outputs", [None, [[token, 8000 + token, token + 1, 3] for token in range(5, 30)]])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 1}, {"num_beams": 3, "temperature": 1.0, "seed": 1}],
)
def test_drafting_among_the_first_tokens_changes_no_bit(wide, options, outputs):
    """The mask of a constraint is of all tokens, the draft's logits of 4,096."""
    options |= {"max_new_tokens": 12, "top_logprobs": 3, "constraint": outputs and specbeam.TokenTrie(outputs)}
    sizes = {"num_draft_tokens": 4, "draft_width": 4, "draft_budget": 20}
    plain = specbeam.generate(wide, LOW_TOKENS, options)
    assert specbeam.generate(wide, LOW_TOKENS, options, draft="ngram").sequences == plain.sequences
    drafted = specbeam.generate(wide, LOW_TOKENS, options, draft=wide, trace=True, **sizes)
    assert drafted.sequences == plain.sequences
    first_round = [draft_token["token_id"] for draft_token in drafted.trace[0]["drafted"]]
    assert first_round
    assert max(first_round) < 4096


def test_the_bound_rule_saves_passes(tiny, drafter):
    """If a draft is only as wide as the beams, a beam that does not matter is often missing."""
    lm, good = tiny("llama")[1], drafter("good", "llama")
    options = {"num_beams": 4, "max_new_tokens": 30, "num_draft_tokens": 4, "draft_width": 4}
    bounded, whole = (specbeam.generate(lm, [4, 2, 3], options, draft=good, bound_rule=rule) for rule in (True, False))
    assert bounded.token_ids == whole.token_ids
    assert bounded.stats.target_passes < whole.stats.target_passes


def sequences_and_chances(model, prompt, length, temperature, top_k):
    """Every sequence of a length with its exact probability, by brute force."""
    chances = {(): 1.0}
    for _ in range(length):
        rows = [[*prompt, *text] for text in chances]
        with torch.no_grad():
            logits = model(torch.tensor(rows)).logits[:, -1].double() / temperature
        p = torch.where(logits < logits.topk(top_k).values[:, -1:], float("-inf"), logits).softmax(-1).numpy()
        chances = {
            (*text, token): chance * p[i, token]
            for i, (text, chance) in enumerate(chances.items())
            for token in np.flatnonzero(p[i]).tolist()
        }
    return chances


@pytest.mark.parametrize(
    ("kind", "drafting"),
    [
        ("other", {"num_draft_tokens": 3, "draft_width": 2, "draft_temperature": 2.0, "draft_top_k": 3}),
        pytest.param("ngram", {"draft_width": 2}, marks=pytest.mark.thorough),
        pytest.param("good", {"num_draft_tokens": 2, "draft_width": 3}, marks=pytest.mark.thorough),
    ],
)
def test_speculative_sampling_in_the_engine_has_the_exact_distribution(tiny, drafter, kind, drafting):
    """2,000 draws per case in thorough mode, 500 in quick mode, in batches of 200 requests.

    Quick mode has one case: a seed gives the same sequence with any draft (tests/engine/test_exactness.py).
    """
    changes = {"vocab_size": 8, "eos_token_id": 7, "bos_token_id": 0, "initializer_range": 0.2}
    model, lm = tiny("llama", **changes)
    lm = specbeam.load(lm.source, backend="cpu", quantize="float32")
    prompt, draws, length = [1, 2, 3, 1, 2], 2000 if in_thorough_mode() else 500, 3
    warping = {"temperature": 1.3, "top_k": 5}
    options = {**warping, "max_new_tokens": length + 1, "eos_token_id": []}
    engine = Engine(lm, max_requests=200)
    draft = drafter(kind, "llama", **changes)
    requests = [engine.submit(prompt, {**options, **drafting, "seed": n}, draft=draft) for n in range(draws)]
    engine.run()
    counts = Counter(tuple(request.result().token_ids[:length]) for request in requests)
    chances = sequences_and_chances(model, prompt, length, **warping)
    assert set(counts) <= set(chances)
    common = [text for text, chance in chances.items() if chance * draws >= 5]  # rare ones are counted together
    seen = np.array([counts[text] for text in common], dtype=float)
    expected = np.array([chances[text] * draws for text in common])
    if draws - expected.sum() >= 1:
        seen, expected = np.append(seen, draws - seen.sum()), np.append(expected, draws - expected.sum())
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 0.001


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 1}])
def test_a_draft_may_lack_some_of_the_targets_tokens(tiny, save, options):
    _, lm = tiny("llama")
    fewer = specbeam.load(save(random_model("llama", vocab_size=258)), device="cpu", dtype="float32")
    for draft, target in ((fewer, lm), (lm, fewer)):
        prompt = [1, 258, 3] if target is lm else [1, 3]
        result = specbeam.generate(target, prompt, draft=draft, num_draft_tokens=3, max_new_tokens=9, **options)
        assert result.stats.draft_passes > 0
        assert result.token_ids == specbeam.generate(target, prompt, max_new_tokens=9, **options).token_ids


@pytest.mark.parametrize("draft", ["ngram", "suffix", "perfect"])
def test_sequences_the_target_never_chooses_may_have_no_continuation(tiny, drafter, draft):
    (_, lm), first, other = tiny("llama"), 20, 9

    def allowed(_, ids):
        return [] if ids[-1] == other and len(ids) > 3 else [first, other, 5]

    options = {"max_new_tokens": 5, "prefix_allowed_tokens_fn": allowed, "logit_bias": {first: 50.0}}
    sizes = {"num_draft_tokens": 3, "draft_width": 3}
    result = specbeam.generate(lm, [7, other, 7], draft=drafter(draft, "llama"), **sizes, **options)
    assert result.token_ids == specbeam.generate(lm, [7, other, 7], **options).token_ids


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 2}])
def test_no_pass_has_more_draft_tokens_than_the_budget(tiny, options):
    _, lm = tiny("llama")
    sizes = {"num_draft_tokens": 20, "draft_width": 5, "draft_budget": 4}
    result = specbeam.generate(lm, [1, 2], draft=lm, trace=True, max_new_tokens=40, **sizes, **options)
    assert 0 < max(len(entry["drafted"]) for entry in result.trace) <= 4
