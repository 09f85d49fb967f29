"""Beam search against transformers' generate: the same sequences in the same order with the same scores."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

import specbeam
from specbeam import Engine, Options
from specbeam.backends.torch.sampling import normalizers_of
from specbeam.decoding.beam import BeamSearch
from tests.conftest import beams_of_transformers, random_model
from tests.decoding.test_distinct import written_out
from tests.decoding.test_lazy_beam import PROMPT, Searched


def test_with_a_beam_for_every_sequence_the_result_is_all_sequences_in_order(tiny):
    model, lm = tiny("llama", vocab_size=8, eos_token_id=1, bos_token_id=0, initializer_range=0.25)
    sequences = {}
    for a in range(7):  # 7 ends sequences and is forbidden here
        with torch.no_grad():
            rows = model(torch.tensor([[3, a]])).logits[0].log_softmax(-1)
        sequences |= {(a, b): (rows[0, a] + rows[1, b]).item() for b in range(7)}
    options = {"eos_token_id": 7, "min_new_tokens": 2, "max_new_tokens": 2, "length_penalty": 0.0}
    result = specbeam.generate(lm, [3], num_beams=49, num_return_sequences=49, **options)
    assert [tuple(s.token_ids) for s in result.sequences] == sorted(sequences, key=sequences.get, reverse=True)
    assert [s.score for s in result.sequences] == pytest.approx(sorted(sequences.values(), reverse=True), abs=1e-4)


def test_beam_sampling_draws_without_replacement(tiny):
    """Pairs of sequences of one token, against their probabilities written out. The first two draws are returned."""
    model, lm = tiny("llama", vocab_size=6, eos_token_id=5, bos_token_id=0, initializer_range=0.2)
    with torch.no_grad():
        p = (model(torch.tensor([[1, 2, 3]])).logits[0, -1].double().log_softmax(-1) / 2.0).softmax(-1).numpy()
    engine, draws = Engine(specbeam.load(lm.source, backend="cpu", quantize="float32"), max_requests=200), 500
    options = {"num_beams": 2, "num_return_sequences": 2, "temperature": 2.0, "max_new_tokens": 1}
    requests = [engine.submit([1, 2, 3], {**options, "seed": seed}) for seed in range(draws)]
    engine.run()
    drawn = Counter(frozenset(s.token_ids[0] for s in request.result().sequences) for request in requests)
    pairs = [frozenset([a, b]) for a in range(6) for b in range(a)]
    expected = np.array([p[a] * p[b] / (1 - p[a]) + p[b] * p[a] / (1 - p[b]) for a, b in pairs])
    assert expected.min() * draws > 3
    assert chisquare([drawn[pair] for pair in pairs], draws * expected).pvalue > 0.001


@pytest.mark.parametrize("draft", [None, "model"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5])
def test_nbest_yields_each_hypothesis_as_soon_as_it_is_certain(tiny, draft, length_penalty):
    _, lm = tiny("llama", vocab_size=20, eos_token_id=1, bos_token_id=0, initializer_range=0.2)
    options = {"num_beams": 5, "max_new_tokens": 30, "eos_token_id": [1, 2, 3, 4], "length_penalty": length_penalty}
    draft = lm if draft else None
    whole = specbeam.generate(lm, [5, 6], num_return_sequences=5, **options)
    yielded = list(specbeam.nbest(lm, [5, 6], draft=draft, **options))
    assert [s.token_ids for s in yielded] == [s.token_ids for s in whole.sequences]
    assert [s.score for s in yielded] == pytest.approx([s.score for s in whole.sequences], abs=1e-4)
    engine = Engine(lm)
    request = engine.submit([5, 6], Options(num_return_sequences=5, **options))
    first = rounds = 0
    while engine.step():
        rounds += 1
        first = first or (rounds if request.found else 0)
    if length_penalty == 0.0:
        assert 0 < first < rounds  # before the search was over


def test_the_search_ends_once_what_is_returned_is_certain(tiny):
    """With scores that only fall, one hypothesis takes fewer passes than five, and equals that of transformers."""
    model, lm = tiny("llama", vocab_size=20, eos_token_id=1, bos_token_id=0, initializer_range=0.2)
    options = {"num_beams": 5, "max_new_tokens": 40, "eos_token_id": [1, 2, 3, 4], "length_penalty": 0.0}
    passes = []
    for n in (1, 5):
        result = specbeam.generate(lm, [5, 6], num_return_sequences=n, **options)
        expected, _ = beams_of_transformers(model, [5, 6], num_return_sequences=n, **options)
        assert result.token_ids == expected[0][: len(result.token_ids)]
        passes.append(result.stats.target_passes)
    assert passes[0] < passes[1]


def diverse_by_hand(model, prompt, groups, size, penalty, steps):
    """Diverse beam search written out over whole sequences, without end-of-sequence tokens."""
    texts = [[((), 0.0)] for _ in range(groups)]
    for _ in range(steps):
        taken = torch.zeros(model.config.vocab_size)
        for g in range(groups):
            rows = torch.tensor([[*prompt, *text] for text, _ in texts[g]])
            with torch.no_grad():
                log_probs = model(rows).logits[:, -1].log_softmax(-1) - penalty * taken
            scored = [
                ((*text, token), score + log_probs[i, token].item())
                for i, (text, score) in enumerate(texts[g])
                for token in range(log_probs.shape[-1])
            ]
            texts[g] = sorted(scored, key=lambda pair: -pair[1])[:size]
            for text, _ in texts[g]:
                taken[text[-1]] += 1
    return sorted((pair for group in texts for pair in group), key=lambda pair: -pair[1])


@pytest.mark.parametrize("draft", [None, "model"])
@pytest.mark.parametrize(("groups", "size"), [(2, 2), (3, 1), (2, 3)])
def test_diverse_beam_search_is_the_one_written_out(tiny, groups, size, draft):
    model, lm = tiny("llama", vocab_size=20, eos_token_id=1, bos_token_id=0, initializer_range=0.2)
    expected = diverse_by_hand(model, [3, 4], groups, size, 0.7, 8)
    options = {"num_beams": groups * size, "num_beam_groups": groups, "diversity_penalty": 0.7, "length_penalty": 0.0}
    options |= {"num_return_sequences": groups * size, "max_new_tokens": 8, "eos_token_id": []}
    result = specbeam.generate(lm, [3, 4], draft=lm if draft else None, **options)
    assert [tuple(s.token_ids) for s in result.sequences] == [text for text, _ in expected]
    assert [s.score for s in result.sequences] == pytest.approx([score for _, score in expected], abs=1e-4)


def test_groups_hardly_kept_apart_are_searches_of_their_own(tiny):
    """Many candidates end, so a beam needs more of them than there are beams in its group."""
    _, lm = tiny("llama", vocab_size=20, eos_token_id=1, bos_token_id=0, initializer_range=0.2)
    options = {"max_new_tokens": 10, "length_penalty": 0.0, "eos_token_id": [*range(1, 8)]}
    alone = specbeam.generate(lm, [3], num_beams=3, num_return_sequences=3, **options)
    options |= {"num_beams": 6, "num_beam_groups": 2, "diversity_penalty": 1e-6}
    groups = specbeam.generate(lm, [3], num_return_sequences=6, **options)
    assert [s.token_ids for s in groups.sequences] == [s.token_ids for s in alone.sequences for _ in range(2)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 4, "num_beam_groups": 3}, "num_beam_groups=3"),
        ({"num_beams": 4, "diversity_penalty": 1.0}, "needs num_beam_groups"),
        ({"num_beams": 4, "num_beam_groups": 2, "temperature": 0.5}, "does not sample"),
        ({"num_beams": 4, "num_beam_groups": 2}, "num_beam_groups=2 needs a diversity_penalty"),
        ({"length_penalty": 0.5}, "length_penalty=0.5 has no effect without beams"),
        ({"early_stopping": True}, "early_stopping=True has no effect without beams"),
        ({"distinct": False, "temperature": 1.0}, "distinct=False has no effect without beams"),
        ({"bound_rule": False, "draft": "ngram"}, "bound_rule=False has no effect without beams"),
        ({"seed": 5}, "seed=5 has no effect without sampling"),
        ({"seed": 5, "top_k": 0}, "seed=5 has no effect"),
        ({"num_draft_tokens": 3}, "without a draft"),
        ({"draft": "ngrams"}, "draft='ngrams'"),
        ({"draft": "ngram", "num_draft_tokens": 0}, "num_draft_tokens=0"),
        ({"draft": "ngram", "draft_width": "wide"}, "draft_width='wide'"),
        ({"draft_temperature": 0.5}, "without sampling"),
        ({"draft_temperature": 0.5, "temperature": 1.0, "draft": "ngram"}, "draft_temperature=0.5 has no effect"),
        ({"draft_top_k": -1, "temperature": 1.0}, "draft_top_k=-1"),
        ({"bound_rule": 1}, "bound_rule=1"),
        ({"trace": "yes"}, "trace='yes'"),
        ({"logits_processor": 3}, "logits_processor=3"),
        *(({"top_logprobs": value}, "top_logprobs=") for value in (-1, 1.5, True, "two")),
        ({"num_return_sequences": 2}, "num_return_sequences=2 is not allowed"),
        ({"num_return_sequences": 2, "temperature": 0}, "num_return_sequences=2 is not allowed"),
        ({"num_return_sequences": 2, "do_sample": True, "draft": "ngram"}, "2 samples cannot have a draft"),
    ],
)
def test_options_that_contradict_are_refused(lm, options, says):
    with pytest.raises(specbeam.SpecbeamError, match=says):
        specbeam.generate(lm, [1, 2], **options)


def test_hundreds_of_beams_over_few_steps(tiny):
    model, lm = tiny("llama", vocab_size=200, eos_token_id=1, bos_token_id=0, initializer_range=0.25)
    options = {"num_beams": 300, "num_return_sequences": 300, "max_new_tokens": 4, "length_penalty": 0.0}
    expected, scores = beams_of_transformers(model, [3, 4, 5], **options)
    for draft in (None, lm):
        result = specbeam.generate(lm, [3, 4, 5], draft=draft, **options)
        assert [s.score for s in result.sequences] == pytest.approx(scores, abs=1e-4)
        same = sum(s.token_ids == e[: len(s.token_ids)] for s, e in zip(result.sequences, expected, strict=True))
        assert same >= 290  # near-ties may change places


@given(
    seed=st.integers(0, 10**6),
    num_beams=st.integers(2, 5),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0]),
    num_return_sequences=st.integers(1, 5),
    bounded=st.booleans(),
    more=st.integers(0, 3),
)
def test_ties_have_one_order(seed, num_beams, length_penalty, num_return_sequences, bounded, more):
    """Also where selections have more tokens than a step needs, and where the bound rule ends the search."""
    rows = np.random.default_rng(seed).integers(-2, 3, (8, 8)).astype(np.float32)  # logits by the last token
    log_probs = rows - normalizers_of(torch.from_numpy(rows)).numpy()[:, None]  # rounded as the search rounds them
    beams, ends = {"num_beams": num_beams, "length_penalty": length_penalty}, {1, 2}
    n = min(num_return_sequences, num_beams)
    options = Options(**beams, num_return_sequences=n, max_new_tokens=5, early_stopping=False)
    search = Searched(BeamSearch, options, 8, ends, lambda tokens: rows[tokens[-1]], bounded=bounded).run(more=more)
    assert search.yielded == search.found
    rows_after = {"log_probs": lambda tokens: log_probs[[*PROMPT, *tokens][-1]], "text_of": lambda tokens: tokens}
    expected = written_out(**rows_after, **beams, length=5, ends=ends)[:n]
    assert [tuple(tokens) for _, tokens, *_ in search.found] == [tokens for tokens, _ in expected]
    assert [score for *_, score, _ in search.found] == pytest.approx([float(score) for _, score in expected], abs=1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_no_bound_draft_or_deferred_beam_resolves_a_tie_differently(save, backend):
    """The output matrix has seven rows, many times each: the logits of many tokens are equal."""
    model = random_model("llama", seed=5, initializer_range=0.25)
    with torch.no_grad():
        model.lm_head.weight[:] = model.lm_head.weight[torch.arange(len(model.lm_head.weight)) % 7]
    lm = specbeam.load(save(model), backend=backend, dtype="float32")
    options = {"num_return_sequences": 2, "max_new_tokens": 12, "length_penalty": 0.0}
    options["eos_token_id"] = [*range(3, 39, 7)]  # twins, too
    for num_beams in (4, 16):
        every = specbeam.generate(lm, [77], num_beams=num_beams, bound_rule=False, **options)
        assert every.sequences[0].score == every.sequences[1].score
        for draft in (None, "ngram", lm):
            result = specbeam.generate(lm, [77], num_beams=num_beams, draft=draft, **options)
            assert [s.token_ids for s in result.sequences] == [s.token_ids for s in every.sequences]
