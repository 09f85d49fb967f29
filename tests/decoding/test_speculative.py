"""Speculation changes nothing but speed: greedy and beams against transformers, sampling against exact odds."""

from collections import Counter
from unittest.mock import patch

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
from specbeam.decoding.processors import Processors, Warpers
from specbeam.decoding.record import Record
from specbeam.decoding.sampling import seeded
from specbeam.decoding.speculative import reject_or_accept, speculative
from specbeam.decoding.stopping import Stopping
from specbeam.drafting.model import ModelDrafter
from specbeam.drafting.pace import Pace
from specbeam.tree import Tree
from tests.conftest import EOS, beams_of_transformers, random_model


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
    """What drafts for tiny("llama" and the like, **sizes), by how good it is."""
    made = {}

    def drafter(kind, family, as_model=False, **changes):
        """A drafter, or the model of transformers it was made of."""
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
    """A result, or None where the prompt is no text, so that another vocabulary cannot be used."""
    text = lm.decode(prompt, skip_special_tokens=False)
    both = (lm, draft) if kind == "another vocabulary" else ()
    if any(m.tokenizer.decode(m.tokenizer(text, add_special_tokens=False).input_ids) != text for m in both):
        with pytest.raises(SpecbeamError, match="text cannot bridge"):
            specbeam.generate(lm, prompt, draft=draft, **options)
        return None
    return specbeam.generate(lm, prompt, draft=draft, **options)


def guessing_among(tokens):
    """A context where draft models guess among so many tokens, or as many as that more, also where a text is short."""
    return patch.multiple("specbeam.drafting.model", VOCAB_STEP=tokens, MIN_RECENT_TOKENS=1)


def sizes(data):
    """Options for how much is drafted; most of the time something fixed, since that reaches the odd corners."""
    size = {
        "num_draft_tokens": st.sampled_from(["auto", 1, 2, 3, 6, 20]),
        "draft_width": st.sampled_from(["auto", 1, 2, 5, 13]),
        "draft_budget": st.sampled_from(["auto", "auto", 1, 4, 30]),
    }
    return {name: data.draw(values, name) for name, values in size.items()}


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(DRAFTERS),
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
    ids = torch.tensor([prompt])
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)[0, len(prompt) :]
    with guessing_among(data.draw(st.sampled_from([3, 4096]), "tokens")):
        result = generate_where_bridged(lm, prompt, draft, kind, **options, **sizes(data))
    if result is None:
        return
    assert result.token_ids == expected.tolist()
    assert result.sequences[0].score == pytest.approx(
        specbeam.generate(lm, prompt, **options).sequences[0].score, abs=1e-4
    )
    assert result.stats.accepted <= result.stats.drafted
    assert len(result.token_ids) <= result.stats.target_passes + result.stats.accepted


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(DRAFTERS),
    family=st.sampled_from(["llama", "qwen2", "qwen3"]),
    vocab_size=st.sampled_from([8, 20, 200]),
    num_beams=st.integers(2, 9),
    max_new_tokens=st.integers(1, 14),
    length_penalty=st.sampled_from([1.0, 0.0, 2.0, -1.0, 0.6]),
    early_stopping=st.sampled_from([False, True, "never"]),
    penalty=st.sampled_from([1.0, 1.0, 1.4]),
    data=st.data(),
)
def test_speculative_beam_search_is_beam_search_of_transformers(
    tiny, drafter, kind, family, vocab_size, num_beams, max_new_tokens, length_penalty, early_stopping, penalty, data
):
    changes = {"vocab_size": vocab_size, "eos_token_id": 1, "bos_token_id": 0, "initializer_range": 0.25}
    model, lm = tiny(family, **changes)
    draft = drafter(kind, family, **changes)
    token = st.integers(0, vocab_size - 1)
    prompt = data.draw(st.lists(token, min_size=1, max_size=12))
    options = {
        "num_beams": num_beams,
        "num_return_sequences": data.draw(st.integers(1, num_beams)),
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": data.draw(st.integers(0, max_new_tokens)),
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "repetition_penalty": penalty,
        "eos_token_id": sorted(data.draw(st.sets(token, min_size=1, max_size=min(6, vocab_size - 2)))),
    }
    expected, scores = beams_of_transformers(model, prompt, **options)
    with guessing_among(data.draw(st.sampled_from([3, 4096]), "tokens")):
        result = generate_where_bridged(lm, prompt, draft, kind, **options, **sizes(data))
    if result is None:
        return
    real = [score > -1e6 for score in scores]  # transformers fills places that no text took with rubbish
    assert len(result.sequences) == sum(real)
    for got, tokens, score in zip(result.sequences, expected, scores, strict=False):
        assert got.token_ids == tokens[: len(got.token_ids)]
        assert set(tokens[len(got.token_ids) :]) <= {EOS}  # padding
        assert got.score == pytest.approx(score, abs=1e-4, rel=1e-5)


def test_a_perfect_draft_saves_passes(tiny):
    _, lm = tiny("llama")
    options = {"max_new_tokens": 40, "min_new_tokens": 40}
    result = specbeam.generate(lm, [1, 2, 3], draft=lm, num_draft_tokens=7, draft_width=1, **options)
    assert result.stats.target_passes == 5
    assert result.stats.steps_per_target_pass == 8
    assert result.stats.acceptance_rate == 1
    beams = specbeam.generate(lm, [1, 2, 3], draft=lm, num_draft_tokens=7, draft_width=8, num_beams=4, **options)
    assert beams.stats.target_passes <= 6


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0, "seed": 1}])
def test_guesses_are_among_the_tokens_that_the_text_reaches_to(tiny, options):
    _, lm = tiny("llama")
    wanted = []
    forward = lm.backend.forward

    def watched(segments):
        logits = forward(segments)
        wanted.extend((s.vocab, logits.shape[1]) for s in segments if s.vocab is not None)
        return logits

    sizes = {"num_draft_tokens": 4, "draft_width": 4, "max_new_tokens": 6, "min_new_tokens": 6}
    plain = specbeam.generate(lm, [10, 20, 30, 256, 257], **options, max_new_tokens=6, min_new_tokens=6)
    with guessing_among(16), patch.object(lm.backend, "forward", watched):
        result = specbeam.generate(lm, [10, 20, 30, 256, 257], draft=lm, trace=True, **options, **sizes)
    assert wanted[0] == (32, 32)  # 30 and what there is to the next 16; 256 and 257 are special tokens
    if "seed" not in options:
        assert result.token_ids == plain.token_ids
    guesses = [guess["token_id"] for guess in result.trace[0]["drafted"]]
    assert guesses
    assert max(guesses) < 32


def test_the_bound_rule_saves_passes(tiny, drafter):
    """With a draft as wide as the beams only, some beam is often missing that turns out not to matter."""
    lm, good = tiny("llama")[1], drafter("good", "llama")

    def run(**changes):
        options = {"num_beams": 4, "max_new_tokens": 30, "draft": good, "num_draft_tokens": 4, "draft_width": 4}
        return [specbeam.generate(lm, [n, 2, 3], **(options | changes)) for n in range(8)]

    bounded, whole = run(), run(bound_rule=False)
    assert [r.token_ids for r in bounded] == [r.token_ids for r in whole]
    assert sum(r.stats.target_passes for r in bounded) < sum(r.stats.target_passes for r in whole)


def texts_and_chances(model, prompt, length, vocab, warp):
    """Every text of a length with its exact probability, by brute force."""
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
    """What a model says after every text of up to a length, so that drawing many takes no passes."""
    texts = [()]
    table = {}
    for _ in range(length + 1):
        with torch.no_grad():
            table |= zip(texts, model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1], strict=True)
        texts = [(*text, token) for text in texts for token in range(vocab)]
    return table


def draw_two(prompt, length, vocab, target, draft, shape, options, seed):
    """The first two tokens of a text by the strategy itself, its models answered from tables."""
    tree = Tree(prompt)
    process, warp, generator = Processors(options, frozenset()), Warpers(options), seeded(seed)
    stop = Stopping(frozenset(), len(prompt) + length, (), None)
    pace = Pace(*shape, None, num_beams=1, target=float, draft=float, chains=False)
    drafter = ModelDrafter(tree, process, stop, vocab, 99, (), pace, draws=(warp, generator))
    choose = reject_or_accept(tree, warp, generator)
    strategy = speculative(tree, process, stop, Record(tree), drafter, choose)
    wish = next(strategy)
    while len(tree.trunk) < len(prompt) + 2:
        paths = tree.tokens(tree.paths(wish.nodes))[:, len(prompt) :]
        lengths = tree.depths(wish.nodes) + 1 - len(prompt)
        table = draft if wish.drafting else target
        rows = [table[tuple(path[:n])] for path, n in zip(paths.tolist(), lengths.tolist(), strict=True)]
        try:
            wish = strategy.send(torch.stack(rows))
        except StopIteration as finished:
            return tuple(tree.new_tokens(finished.value[0].node)[:2])
    return tuple(tree.tokens(tree.trunk[len(prompt) : len(prompt) + 2]).tolist())


@pytest.mark.parametrize("warped", WARPED)
@pytest.mark.parametrize(
    ("kind", "shape", "among"),
    [
        ("good", (2, 1), 4096),
        ("other", (2, 1), 4096),
        ("good", (2, 3), 4096),
        ("other", (2, 4), 4096),
        ("adversarial", (2, 3), 4096),
        ("good", (2, 2), 4),
    ],
)
def test_speculative_sampling_has_the_exact_distribution(tiny, drafter, kind, shape, among, warped):
    """20,000 draws in each of twelve cases, four of them chains, two with guesses among some of the tokens."""
    vocab, prompt, length, draws = 6, [1, 2, 3, 1, 2], 3, 20_000
    changes = {"vocab_size": vocab, "eos_token_id": 5, "bos_token_id": 0, "initializer_range": 0.2}
    model, _ = tiny("llama", **changes)
    drafts = drafter(kind, "llama", as_model=True, **changes)
    tables = [logits_by_text(m, prompt, length, vocab) for m in (model, drafts)]
    options, warp = WARPED[warped]
    options = Options(**options)
    with guessing_among(among):
        counts = Counter(draw_two(prompt, length, vocab, *tables, shape, options, seed) for seed in range(draws))
    check_fit(counts, texts_and_chances(model, prompt, 2, vocab, warp), draws)


@pytest.mark.parametrize(
    ("kind", "drafting"),
    [
        ("good", {"num_draft_tokens": 2, "draft_width": 3}),
        ("ngram", {"draft_width": 2}),
        ("other", {}),
        ("good", {"num_draft_tokens": 3, "draft_temperature": 0.3}),
        ("other", {"num_draft_tokens": 3, "draft_width": 2, "draft_temperature": 2.0, "draft_top_k": 3}),
    ],
)
def test_speculative_sampling_in_the_engine_has_the_exact_distribution(tiny, drafter, kind, drafting):
    changes = {"vocab_size": 8, "eos_token_id": 7, "bos_token_id": 0, "initializer_range": 0.2}
    model, lm = tiny("llama", **changes)
    options, warp = WARPED["warm, top-k"]
    prompt, draws, length = [1, 2, 3, 1, 2], 2000, 3
    options = {**options, "max_new_tokens": length + 1, "eos_token_id": [], **drafting}
    engine = Engine(lm, max_requests=200)
    draft = drafter(kind, "llama", **changes)
    requests = [engine.submit(prompt, {**options, "seed": n}, draft=draft) for n in range(draws)]
    engine.run()
    counts = Counter(tuple(request.result().token_ids[:length]) for request in requests)
    check_fit(counts, texts_and_chances(model, prompt, length, 8, warp), draws)
    again = specbeam.generate(lm, prompt, draft=draft, **options, seed=5)
    assert again.token_ids == requests[5].result().token_ids  # a seed is a seed, whatever else there was in the batch


def check_fit(counts, chances, draws):
    """Chi-square, with rare texts put together."""
    assert set(counts) <= set(chances)
    common = [text for text, chance in chances.items() if chance * draws >= 5]
    seen = np.array([counts[text] for text in common], dtype=float)
    expected = np.array([chances[text] * draws for text in common])
    if draws - expected.sum() >= 1:
        seen, expected = np.append(seen, draws - seen.sum()), np.append(expected, draws - expected.sum())
    assert chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 0.001


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(["ngram", "suffix", "good", "other", "adversarial"]),
    num_beams=st.sampled_from([1, 2, 3, 4, 6]),
    groups=st.sampled_from([1, 1, 2]),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    early_stopping=st.sampled_from([False, True, "never"]),
    data=st.data(),
)
def test_drafts_change_nothing_where_texts_end_by_strings_or_in_groups(
    tiny, drafter, kind, num_beams, groups, length_penalty, early_stopping, data
):
    """What transformers has no reference for is compared with the plain search."""
    changes = {"vocab_size": 20, "eos_token_id": 1, "bos_token_id": 0, "initializer_range": 0.25}
    lm = tiny("llama", **changes)[1]
    prompt = data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=6))
    options = {"num_beams": num_beams, "num_return_sequences": data.draw(st.integers(1, num_beams))}
    options |= {"max_new_tokens": data.draw(st.integers(1, 16)), "length_penalty": length_penalty}
    options |= {"early_stopping": early_stopping, "eos_token_id": data.draw(st.sets(st.integers(0, 19), max_size=3))}
    options["stop_strings"] = data.draw(st.lists(st.sampled_from("!#$%&'()*+"), max_size=4, unique=True))
    if num_beams % groups == 0 and num_beams > groups > 1:
        options |= {"num_beam_groups": groups, "diversity_penalty": 0.5}
    plain = specbeam.generate(lm, prompt, **options)
    drafted = specbeam.generate(lm, prompt, draft=drafter(kind, "llama", **changes), **options, **sizes(data))
    assert [s.token_ids for s in drafted.sequences] == [s.token_ids for s in plain.sequences]
    assert [s.score for s in drafted.sequences] == pytest.approx([s.score for s in plain.sequences], abs=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.0}])
def test_a_draft_may_lack_some_of_the_targets_tokens(tiny, save, options):
    _, lm = tiny("llama")
    fewer = specbeam.load(save(random_model("llama", vocab_size=258)), device="cpu", dtype="float32")
    for draft, target in ((fewer, lm), (lm, fewer)):
        prompt = [1, 258, 3] if target is lm else [1, 3]
        result = specbeam.generate(target, prompt, draft=draft, num_draft_tokens=3, max_new_tokens=9, seed=1, **options)
        assert result.stats.draft_passes > 0
        if not options.get("temperature"):
            assert result.token_ids == specbeam.generate(target, prompt, max_new_tokens=9, **options).token_ids


@pytest.mark.parametrize("draft", ["ngram", "suffix", "perfect"])
def test_texts_the_target_never_leads_to_may_have_no_continuation(tiny, drafter, draft):
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
def test_no_pass_has_more_guesses_than_the_budget(tiny, options):
    _, lm = tiny("llama")
    sizes = {"num_draft_tokens": 20, "draft_width": 5, "draft_budget": 4}
    result = specbeam.generate(lm, [1, 2], draft=lm, trace=True, max_new_tokens=40, **sizes, **options)
    assert 0 < max(len(told["drafted"]) for told in result.trace) <= 4
