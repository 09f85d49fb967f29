"""Speculation changes nothing but speed: greedy and beams against transformers, samples against plain samples."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specbeam
from specbeam import Engine, Options, SpecbeamError
from specbeam.decoding.processors import Processors
from specbeam.decoding.record import Record
from specbeam.decoding.selector import Selector, warpers_of
from specbeam.decoding.speculative import speculative
from specbeam.decoding.stopping import Stopping
from specbeam.drafting.controller import Controller
from specbeam.drafting.model import ModelDrafter
from specbeam.drafting.sizes import Sizes
from specbeam.selection import select
from specbeam.tree import Tree
from tests.conftest import (
    assert_are_beams_of_transformers,
    beams_of_transformers,
    biases_and_bans,
    examples,
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
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


DRAFTERS = ["ngram", "suffix", "perfect", "good", "other", "adversarial", "earlier texts", "another vocabulary"]


@pytest.fixture(scope="session")
def drafter(tiny, save):
    """Drafters for the models of ``tiny``, by how good their draft tokens are."""
    made = {}

    def drafter(kind, family, as_model=False, **changes):
        """A drafter, or the transformers model that it was made of."""
        lm = tiny(family, **changes)[1]
        if kind in ("ngram", "suffix"):
            return kind
        if kind == "perfect":
            return lm
        if kind == "earlier texts":
            return specbeam.suffix_automaton(lm, [[1, 2, 3, 4, 5, 6, 7, 1, 2, 3], [6, 5, 4, 3, 2, 1, 0, 5]])
        key = (kind, family, repr(changes))
        if key not in made:
            if kind == "other":
                model = random_model("llama", seed=7, **changes)
            elif kind == "another vocabulary":
                model = random_model("llama", seed=7)
            else:
                model = random_model(family, **changes)
            if kind == "good":
                torch.manual_seed(1)
                for parameter in model.parameters():
                    parameter.data += torch.randn_like(parameter) * 0.02
            if kind == "adversarial":
                model.lm_head.weight.data.neg_()  # always the least likely
            tokenizer = other_tokenizer() if kind == "another vocabulary" else None
            made[key] = model, specbeam.load(save(model, tokenizer), device="cpu", dtype="float32")
        return made[key][0 if as_model else 1]

    return drafter


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


@pytest.mark.parametrize("kind", DRAFTERS)
@settings(max_examples=examples(0.3))
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    vocab_size=st.sampled_from([8, 20, 200]),
    max_new_tokens=st.integers(1, 24),
    penalty=st.sampled_from([1.0, 1.0, 1.4, 0.8]),
    data=st.data(),
)
def test_speculative_greedy_is_that_of_transformers(
    tiny, drafter, kind, family, vocab_size, max_new_tokens, penalty, data
):
    changes = {"vocab_size": vocab_size, "eos_token_id": 1, "bos_token_id": 0, "initializer_range": 0.25}
    model, lm = tiny(family, **changes)
    draft = drafter(kind, family, **changes)
    token = st.integers(0, vocab_size - 1)
    prompt = data.draw(st.lists(token, min_size=1, max_size=12))
    options = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": data.draw(st.integers(0, max_new_tokens)),
        "repetition_penalty": penalty,
        "eos_token_id": sorted(data.draw(st.sets(token, min_size=1, max_size=6))),
    }
    ours, theirs = biases_and_bans(data, vocab_size, len(prompt)) if vocab_size > 8 else ({}, {})
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, do_sample=False, **options, **theirs)[0, len(prompt) :]
    result = generate_where_bridged(lm, prompt, draft, kind, **options, **ours, **sizes(data))
    if result is None:
        return
    assert result.token_ids == expected.tolist()
    assert result.sequences[0].score == pytest.approx(
        specbeam.generate(lm, prompt, **options, **ours).sequences[0].score, abs=1e-4
    )
    assert result.stats.accepted <= result.stats.drafted
    assert len(result.token_ids) <= result.stats.target_passes + result.stats.accepted


@pytest.mark.parametrize("kind", DRAFTERS)
@settings(max_examples=examples(0.3))
@given(
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    vocab_size=st.sampled_from([8, 20, 200]),
    data=st.data(),
)
def test_speculative_beam_search_is_beam_search_of_transformers(tiny, drafter, kind, family, vocab_size, data):
    changes = {"vocab_size": vocab_size, "eos_token_id": 1, "bos_token_id": 0, "initializer_range": 0.25}
    model, lm = tiny(family, **changes)
    draft = drafter(kind, family, **changes)
    prompt, options = prompt_and_beam_options(data, vocab_size)
    ours, theirs = biases_and_bans(data, vocab_size, len(prompt)) if vocab_size > 8 else ({}, {})
    expected, scores = beams_of_transformers(model, prompt, **options, **theirs)
    result = generate_where_bridged(lm, prompt, draft, kind, **options, **ours, **sizes(data))
    if result is None:
        return
    assert_are_beams_of_transformers(result.sequences, expected, scores)


@pytest.mark.parametrize("kind", DRAFTERS)
@settings(max_examples=examples(0.3))
@given(
    vocab_size=st.sampled_from([8, 20, 200]),
    num_beams=st.sampled_from([1, 1, 1, 3]),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    warped=st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05, "repetition_penalty": 1.4}]),
    seed=st.integers(0, 2**63 - 1),
    chunk=st.sampled_from([1, 7, 512]),
    data=st.data(),
)
def test_a_seed_gives_the_same_sequence_with_any_draft(
    tiny, drafter, kind, vocab_size, num_beams, temperature, warped, seed, chunk, data
):
    changes = {"vocab_size": vocab_size, "eos_token_id": 1, "bos_token_id": 0, "initializer_range": 0.25}
    _, lm = tiny("llama", **changes)
    draft = drafter(kind, "llama", **changes)
    prompt = data.draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=12))
    options = {"temperature": temperature, **warped, "seed": seed, "max_new_tokens": 16, "num_beams": num_beams}
    plain = specbeam.generate(lm, prompt, **options)
    drafted = generate_where_bridged(lm, prompt, draft, kind, **options, **sizes(data))
    if drafted is None:
        return
    engine = Engine(lm, max_batch_tokens=chunk)
    requests = [
        engine.submit(prompt, options, draft=draft),
        engine.submit([3, 5], {"num_beams": 2, "max_new_tokens": 9}),
        engine.submit(prompt, options),
    ]
    engine.run()
    for result in (drafted, requests[0].result(), requests[2].result()):
        assert result.token_ids == plain.token_ids
        assert result.sequences[0].score == pytest.approx(plain.sequences[0].score, abs=1e-4)


def test_a_perfect_draft_saves_passes(tiny):
    _, lm = tiny("llama")
    options = {"max_new_tokens": 40, "min_new_tokens": 40}
    result = specbeam.generate(lm, [1, 2, 3], draft=lm, num_draft_tokens=7, draft_width=1, **options)
    assert result.stats.target_passes == 5
    assert result.stats.steps_per_target_pass == 8
    assert result.stats.acceptance_rate == 1
    sampled = specbeam.generate(
        lm, [1, 2, 3], draft=lm, num_draft_tokens=7, draft_width=1, temperature=1.0, seed=0, **options
    )
    assert (sampled.stats.target_passes, sampled.stats.acceptance_rate) == (5, 1)
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
    selector = Selector(Processors(options, frozenset(), 9000))
    drafter = ModelDrafter(tree, selector, stop, 9000, 99, [8000], controller)
    step = next(drafter.propose(np.array([tree.tip]), np.zeros(1)))
    assert (step.drafting, step.selection_request.vocab) == (True, vocab)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 1}, {"num_beams": 3, "temperature": 1.0, "seed": 1}],
)
def test_drafting_among_the_first_tokens_changes_nothing(tiny, options):
    lm = tiny("llama", vocab_size=9000, initializer_range=0.25)[1]
    options = {**options, "max_new_tokens": 12, "min_new_tokens": 12}
    drafted = specbeam.generate(
        lm, LOW_TOKENS, draft=lm, trace=True, num_draft_tokens=4, draft_width=4, draft_budget=20, **options
    )
    assert drafted.token_ids == specbeam.generate(lm, LOW_TOKENS, **options).token_ids
    first_round = [draft_token["token_id"] for draft_token in drafted.trace[0]["drafted"]]
    assert first_round
    assert max(first_round) < 4096


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 1}])
def test_a_constraint_holds_for_drafting_among_the_first_tokens(save, options):
    """The mask is of all tokens, the draft's logits of 4,096, on the backend that selects in native code."""
    folder = save(random_model("llama", vocab_size=9000, initializer_range=0.25))
    lm = specbeam.load(folder, backend="cpu", quantize="float32")
    outputs = [[token, 8000 + token, token + 1, 3] for token in range(5, 30)]
    options = {**options, "constraint": specbeam.TokenTrie(outputs), "max_new_tokens": 8}
    sizes = {"num_draft_tokens": 3, "draft_width": 4}
    drafted = specbeam.generate(lm, LOW_TOKENS, draft=lm, **sizes, **options)
    assert drafted.stats.drafted
    assert drafted.sequences == specbeam.generate(lm, LOW_TOKENS, **options).sequences


def test_the_bound_rule_saves_passes(tiny, drafter):
    """If a draft is only as wide as the beams, a beam that does not matter is often missing."""
    lm, good = tiny("llama")[1], drafter("good", "llama")

    def run(**changes):
        options = {"num_beams": 4, "max_new_tokens": 30, "draft": good, "num_draft_tokens": 4, "draft_width": 4}
        return [specbeam.generate(lm, [n, 2, 3], **(options | changes)) for n in range(8)]

    bounded, whole = run(), run(bound_rule=False)
    assert [r.token_ids for r in bounded] == [r.token_ids for r in whole]
    assert sum(r.stats.target_passes for r in bounded) < sum(r.stats.target_passes for r in whole)


def texts_and_chances(model, prompt, length, vocab, warp):
    """Every sequence of a length with its exact probability, by brute force."""
    chances = {(): 1.0}
    for _ in range(length):
        rows = [[*prompt, *text] for text in chances]
        with torch.no_grad():
            logits = model(torch.tensor(rows)).logits[:, -1]
        p = warp(logits).double().softmax(-1).numpy()
        chances = {
            (*text, token): chance * p[i, token]
            for i, (text, chance) in enumerate(chances.items())
            for token in range(vocab)
            if p[i, token] > 0
        }
    return chances


WARPED = {
    "plain": ({"temperature": 1.0}, lambda logits: logits),
    "warm, top-k": ({"temperature": 1.3, "top_k": 5}, lambda logits: top_k(logits / 1.3, 5)),
}


def top_k(logits, k):
    return torch.where(logits < logits.topk(k).values[:, -1:], float("-inf"), logits)


def logits_by_text(model, prompt, length, vocab):
    """The logits after every sequence up to a length. With this table, drawing many takes no passes."""
    texts = [()]
    table = {}
    for _ in range(length + 1):
        with torch.no_grad():
            table |= zip(texts, model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1], strict=True)
        texts = [(*text, token) for text in texts for token in range(vocab)]
    return table


def draw_two(prompt, length, vocab, target, draft, shape, options, seed):
    """The first two tokens of a sequence, from the strategy itself with tables of logits for models."""
    tree = Tree(prompt)
    selector = Selector(Processors(options, frozenset(), vocab), warpers_of(options), seed)
    stop = Stopping(frozenset(), len(prompt) + length, (), None)
    controller = Controller([Sizes(*shape, None, num_tips=1, chains=False)], float, float, float)
    drafter = ModelDrafter(tree, selector, stop, vocab, 99, (), controller)
    strategy = speculative(tree, selector, stop, Record(tree), drafter)
    step = next(strategy)
    while len(tree.prefix) < len(prompt) + 2:
        paths = tree.tokens(tree.paths(step.nodes))[:, len(prompt) :]
        lengths = tree.depths(step.nodes) + 1 - len(prompt)
        table = draft if step.drafting else target
        rows = [table[tuple(path[:n])] for path, n in zip(paths.tolist(), lengths.tolist(), strict=True)]
        try:
            step = strategy.send(select(torch.stack(rows), step.selection_request))
        except StopIteration as finished:
            return tuple(tree.new_tokens(finished.value[0].node)[:2])
    return tuple(tree.tokens(tree.prefix[len(prompt) : len(prompt) + 2]).tolist())


@pytest.mark.parametrize(
    ("kind", "shape", "draft_vocab", "warped"),
    [
        ("other", (2, 1), 6, "warm, top-k"),
        ("good", (2, 3), 6, "plain"),
        ("good", (2, 2), 4, "plain"),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in [
                ("good", (2, 1), 6, "plain"),
                ("good", (2, 1), 6, "warm, top-k"),
                ("good", (2, 3), 6, "warm, top-k"),
                ("other", (2, 1), 6, "plain"),
                ("other", (2, 4), 6, "plain"),
                ("other", (2, 4), 6, "warm, top-k"),
                ("adversarial", (2, 3), 6, "plain"),
                ("adversarial", (2, 3), 6, "warm, top-k"),
                ("good", (2, 2), 4, "warm, top-k"),
            ]
        ),
    ],
)
def test_a_model_drafter_keeps_the_distribution(tiny, drafter, kind, shape, draft_vocab, warped):
    """Chains and trees, and a draft model that knows only the first 4 tokens. 2,000 draws per case in thorough mode.

    In quick mode 500 do: a seed gives the same sequence with and without a draft.
    """
    vocab, prompt, length, draws = 6, [1, 2, 3, 1, 2], 3, 2000 if in_thorough_mode() else 500
    changes = {"vocab_size": vocab, "eos_token_id": 5, "bos_token_id": 0, "initializer_range": 0.2}
    model, _ = tiny("llama", **changes)
    drafts = drafter(kind, "llama", as_model=True, **changes)
    target, draft = (logits_by_text(m, prompt, length, vocab) for m in (model, drafts))
    draft = {text: logits[:draft_vocab] for text, logits in draft.items()}
    options, warp = WARPED[warped]
    options = Options(**options)
    counts = Counter(draw_two(prompt, length, vocab, target, draft, shape, options, seed) for seed in range(draws))
    check_fit(counts, texts_and_chances(model, prompt, 2, vocab, warp), draws)


@pytest.mark.parametrize(
    ("kind", "drafting"),
    [
        ("ngram", {"draft_width": 2}),
        ("other", {"num_draft_tokens": 3, "draft_width": 2, "draft_temperature": 2.0, "draft_top_k": 3}),
        pytest.param("good", {"num_draft_tokens": 2, "draft_width": 3}, marks=pytest.mark.thorough),
        pytest.param("good", {"num_draft_tokens": 3, "draft_temperature": 0.3}, marks=pytest.mark.thorough),
        pytest.param("other", {}, marks=pytest.mark.thorough),
    ],
)
def test_speculative_sampling_in_the_engine_has_the_exact_distribution(tiny, drafter, kind, drafting):
    """2,000 draws per case in thorough mode, 600 in quick mode, in batches of 200 requests."""
    changes = {"vocab_size": 8, "eos_token_id": 7, "bos_token_id": 0, "initializer_range": 0.2}
    model, lm = tiny("llama", **changes)
    options, warp = WARPED["warm, top-k"]
    prompt, draws, length = [1, 2, 3, 1, 2], 2000 if in_thorough_mode() else 600, 3
    options = {**options, "max_new_tokens": length + 1, "eos_token_id": [], **drafting}
    engine = Engine(lm, max_requests=200)
    draft = drafter(kind, "llama", **changes)
    requests = [engine.submit(prompt, {**options, "seed": n}, draft=draft) for n in range(draws)]
    engine.run()
    counts = Counter(tuple(request.result().token_ids[:length]) for request in requests)
    check_fit(counts, texts_and_chances(model, prompt, length, 8, warp), draws)
    without = {name: value for name, value in options.items() if not name.startswith("draft_")}
    without.pop("num_draft_tokens", None)
    again = specbeam.generate(lm, prompt, **without, seed=5)
    assert again.token_ids == requests[5].result().token_ids  # the seed alone decides, not the batch or the draft


def check_fit(counts, chances, draws):
    """A chi-square test, with rare sequences counted together."""
    assert set(counts) <= set(chances)
    common = [text for text, chance in chances.items() if chance * draws >= 5]
    seen = np.array([counts[text] for text in common], dtype=float)
    expected = np.array([chances[text] * draws for text in common])
    if draws - expected.sum() >= 1:
        seen, expected = np.append(seen, draws - seen.sum()), np.append(expected, draws - expected.sum())
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 0.001


@pytest.mark.parametrize("kind", ["ngram", "suffix", "good", "other", "adversarial"])
@settings(max_examples=examples(0.3))
@given(
    num_beams=st.sampled_from([1, 2, 3, 4, 6]),
    groups=st.sampled_from([1, 1, 2]),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    data=st.data(),
)
def test_drafts_change_nothing_where_sequences_end_by_strings_or_in_groups(
    tiny, drafter, kind, num_beams, groups, length_penalty, early_stopping, data
):
    """Transformers has no reference for these options, so the plain search is the reference."""
    changes = {"vocab_size": 20, "eos_token_id": 1, "bos_token_id": 0, "initializer_range": 0.25}
    lm = tiny("llama", **changes)[1]
    prompt = data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=6))
    options = {"num_beams": num_beams, "num_return_sequences": data.draw(st.integers(1, num_beams))}
    options |= {"max_new_tokens": data.draw(st.integers(1, 16))}
    options |= {"eos_token_id": data.draw(st.sets(st.integers(0, 19), max_size=3))}
    if num_beams > 1:
        options |= {"length_penalty": length_penalty, "early_stopping": early_stopping}
        options["distinct"] = data.draw(st.booleans())
    options["stop_strings"] = data.draw(st.lists(st.sampled_from("!#$%&'()*+"), max_size=4, unique=True))
    if num_beams % groups == 0 and num_beams > groups > 1:
        options |= {"num_beam_groups": groups, "diversity_penalty": 0.5}
    plain = specbeam.generate(lm, prompt, **options)
    drafted = specbeam.generate(lm, prompt, draft=drafter(kind, "llama", **changes), **options, **sizes(data))
    assert [s.token_ids for s in drafted.sequences] == [s.token_ids for s in plain.sequences]
    assert [s.score for s in drafted.sequences] == pytest.approx([s.score for s in plain.sequences], rel=2e-6, abs=1e-4)


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
    _, lm = tiny("llama")
    first = specbeam.generate(lm, [7, 9, 7], max_new_tokens=1).token_ids[0]
    other = 9 if first != 9 else 8

    def allowed(_, ids):
        return [] if ids[-1] == other and len(ids) > 3 else [first, other, 5]

    options = {"max_new_tokens": 1, "prefix_allowed_tokens_fn": allowed}
    drafts = drafter(draft, "llama")
    plain = specbeam.generate(lm, [7, other, 7], **options).token_ids
    options["max_new_tokens"] = 5
    if plain == [first]:
        sizes = {"num_draft_tokens": 3, "draft_width": 3}
        result = specbeam.generate(lm, [7, other, 7], draft=drafts, **sizes, **options)
        assert result.token_ids == specbeam.generate(lm, [7, other, 7], **options).token_ids


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 2}])
def test_no_pass_has_more_draft_tokens_than_the_budget(tiny, options):
    _, lm = tiny("llama")
    sizes = {"num_draft_tokens": 20, "draft_width": 5, "draft_budget": 4}
    result = specbeam.generate(lm, [1, 2], draft=lm, trace=True, max_new_tokens=40, **sizes, **options)
    assert 0 < max(len(entry["drafted"]) for entry in result.trace) <= 4
