"""Logits that are not finite end their request by name, and no other. Before, they made texts or misleading errors.

Loaded weights are finite, so the tests spoil them after the load: from then on, one token has a NaN embedding.
"""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config

import specbeam
from specbeam import Engine, SpecbeamError
from specbeam.api.scoring import score
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.errors import NotFinite
from specbeam.server.errors import refusal_of
from tests.conftest import random_model
from tests.engine.conftest import ended

PROMPT, OTHER, NEW = [5, 6, 7, 8, 5, 6], [9, 10, 11], 20
BACKENDS = ("cpu", "torch", "transformers")
NAN, INF = float("nan"), float("inf")


def load(folder, backend):
    if backend == "transformers":
        return specbeam.hf.wrap(AutoModelForCausalLM.from_pretrained(folder).eval())
    return specbeam.load(folder, backend=backend, dtype="float32", threads=1 if backend == "cpu" else None)


def spoil(lm, token):
    """Make the embedding of a token NaN, so that the logits after it are NaN."""
    if lm.backend.name == "cpu":
        part = lm.backend._weights.parts["embedding.weight"][0]
        data = lm.backend._weights._data[part.offset : part.offset + part.size].view(np.float32)
        data.reshape(-1, part.columns, 16)[token // 16, :, token % 16] = NAN
    elif lm.backend.name == "torch":
        lm.backend.model.embedding.weight.data[token] = NAN
    else:
        lm.backend.model.get_input_embeddings().weight.data[token] = NAN


@pytest.fixture(scope="module")
def folder(save):
    return save(random_model("llama", initializer_range=0.1))


@pytest.fixture(scope="module")
def clean(folder):
    return load(folder, "cpu")


@pytest.fixture(scope="module")
def poison(clean):
    """A token that the greedy text has first at this position. The texts of NumPy's weights have none there."""
    pytest.importorskip("torch")
    return specbeam.generate(clean, PROMPT, max_new_tokens=NEW).token_ids[4]


@pytest.fixture(scope="module", params=BACKENDS)
def spoiled(request, folder, poison):
    lm = load(folder, request.param)
    spoil(lm, poison)
    return lm


def outcomes(lm, *requests, **engine):
    """The error or the token ids of requests that run together."""
    with Engine(lm, **engine) as running:
        submitted = [running.submit(prompt, options, **how) for prompt, options, how in requests]
        found = []
        for request in submitted:
            try:
                found.append(request.result().token_ids)
            except SpecbeamError as error:
                found.append(error)
    return found


OPTIONS = {
    "greedy": {},
    "2 beams": {"num_beams": 2},
    "16 beams": {"num_beams": 16},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "step by step": {"top_logprobs": 2},
    "a function": {"logits_processor": [lambda ids, scores: scores]},
    "samples": {"do_sample": True, "num_return_sequences": 9, "seed": 3},
    "drawn beams": {"do_sample": True, "num_beams": 4, "seed": 3},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda _, ids: range(200)},
    "ngram": {"draft": "ngram"},
    "suffix, beams": {"draft": "suffix", "num_beams": 3},
    "draft": {"draft": "itself"},
    "draft, beams": {"draft": "itself", "num_beams": 3},
    # Nodes that are evaluated in parts are recomputed in parts.
    "16 beams, short memory": {"num_beams": 16, "slots": len(PROMPT) + NEW + 1},
    "ngram, beams, short memory": {"draft": "ngram", "num_beams": 3, "slots": len(PROMPT) + NEW + 30},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_request_ends_by_name_and_the_others_go_on(clean, spoiled, poison, options):
    options = {"max_new_tokens": NEW, **OPTIONS[options]}
    draft, slots = options.pop("draft", None), options.pop("slots", None)
    how = {} if draft is None else {"draft": spoiled if draft == "itself" else draft}
    expected = specbeam.generate(clean, OTHER, max_new_tokens=NEW).token_ids
    assert poison not in expected
    requests = [(PROMPT, options, how), (OTHER, {"max_new_tokens": NEW}, {})]
    error, text = outcomes(spoiled, *requests, max_cache_tokens=slots)
    assert isinstance(error, NotFinite)
    assert f"logits of {spoiled.source} hold NaN: check its weights" in str(error)
    assert "\n" not in str(error)
    assert text == expected
    with pytest.raises(NotFinite):
        specbeam.generate(spoiled, PROMPT, **options, **how)


def test_the_place_is_named(spoiled, poison):
    for options in ({}, {"top_logprobs": 1}):
        with pytest.raises(NotFinite, match=f"after {len(PROMPT) + 5} tokens"):
            specbeam.generate(spoiled, PROMPT, max_new_tokens=NEW, **options)
    with pytest.raises(NotFinite, match=f"after {len(PROMPT) + 1} tokens"):
        specbeam.generate(spoiled, [*PROMPT, poison], max_new_tokens=NEW)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.01, "seed": 1}, {"num_beams": 2}])
def test_a_backend_that_goes_ahead_stops_there(folder, poison, monkeypatch, options):
    lm, rows = load(folder, "cpu"), []
    spoil(lm, poison)
    forward_ahead = lm.backend.forward_ahead

    def watched(segments, requests, beams, passes, *more):
        selections = forward_ahead(segments, requests, beams, passes, *more)
        found = np.isfinite(selections[0].normalizers.reshape(-1, len(segments[0].tokens))).all(1)
        rows.append((passes, found.tolist()))
        return selections

    monkeypatch.setattr(lm.backend, "forward_ahead", watched)
    with pytest.raises(NotFinite):
        specbeam.generate(lm, PROMPT, max_new_tokens=NEW, **options)
    passes, found = next(call for call in rows if not all(call[1]))
    assert passes > len(found) > 1  # it would have gone on
    assert found == [True] * (len(found) - 1) + [False]


def test_a_request_that_is_preempted_before_it_is_tried_alone_waits(clean, folder, monkeypatch):
    """Both are to be tried alone. Then there is no memory for the first one, so the second one gives up its slots."""
    expected = [specbeam.generate(clean, prompt, max_new_tokens=8).token_ids for prompt in (PROMPT, OTHER)]
    lm, passes = load(folder, "torch"), []
    forward = lm.backend.forward

    def troubled(segments):
        passes.append(len(segments))
        if len(passes) == 4:
            raise MemoryError("full")
        logits = forward(segments)
        return torch.full_like(logits, NAN) if len(passes) == 3 else logits

    monkeypatch.setattr(lm.backend, "forward", troubled)
    engine = Engine(lm)
    requests = [engine.submit(prompt, {"max_new_tokens": 8}) for prompt in (PROMPT, OTHER)]
    engine.run()
    assert passes[2:4] == [2, 1]
    assert [request.result().token_ids for request in requests] == expected


@pytest.mark.parametrize("first_reads", [4, 64])
def test_what_is_read_beside_it_is_sound(clean, spoiled, poison, first_reads):
    """On the transformers backend, one mask is over all trees of a pass, and 0 times NaN is NaN."""
    long = [*range(20, 60)]
    expected = [specbeam.generate(clean, prompt, max_new_tokens=8).token_ids for prompt in (OTHER, long)]
    requests = [(prompt, {"max_new_tokens": 8}, {}) for prompt in ([3, poison], OTHER, long)]
    error, *texts = outcomes(spoiled, *requests, max_batch_tokens=2 * first_reads)
    assert isinstance(error, NotFinite)
    assert texts == expected


def test_a_prefix_that_it_left_is_recomputed(clean, spoiled, poison):
    """Attention in PyTorch multiplies masked values by 0, so the tokens before the poison are spoiled, too."""
    prefix = [*range(20, 60)]
    expected = specbeam.generate(clean, prefix + OTHER, max_new_tokens=8).token_ids
    engine = Engine(spoiled, max_batch_tokens=44)
    with pytest.raises(NotFinite):
        ended(engine, [*prefix, poison, *prefix], {"max_new_tokens": 2})
    assert ended(engine, prefix + OTHER, {"max_new_tokens": 8}).token_ids == expected


def changed(folder, change):
    """A model whose logits a function changes."""
    lm = load(folder, "torch")
    forward = lm.backend.forward
    lm.backend.forward = lambda segments: change(forward(segments))
    return lm


@pytest.mark.parametrize("backend", BACKENDS)
def test_draft_tokens_that_are_never_accepted_change_nothing(clean, folder, backend):
    """A draft model that always proposes one token, after which the target's logits are NaN."""
    lm, drafted = load(folder, backend), 200
    draft = changed(folder, lambda logits: (0 * logits).index_fill(1, torch.tensor([drafted]), 9.0))
    spoil(lm, drafted)
    for num_beams in (1, 3):
        options = {"max_new_tokens": NEW, "num_beams": num_beams}
        expected = specbeam.generate(clean, OTHER, **options).token_ids
        assert drafted not in expected
        assert specbeam.generate(lm, OTHER, draft=draft, num_draft_tokens=2, **options).token_ids == expected


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_with_such_logits_changes_nothing(clean, folder, backend):
    """It only loses its draft tokens: a draft changes no text."""
    draft = load(folder, backend)
    for token in range(258):
        spoil(draft, token)
    for how in ({}, {"num_beams": 3}, {"do_sample": True, "seed": 2}):
        options = how | {"max_new_tokens": NEW}
        plain, drafted = (specbeam.generate(clean, PROMPT, options, draft=one) for one in (None, draft))
        assert drafted.token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("kept", "value", "says"), [(200, NAN, "NaN"), (200, INF, r"\+inf"), (0, -INF, "-inf alone"), (200, -INF, None)]
)
def test_only_a_row_without_probabilities_ends_it(folder, kept, value, says):
    lm = changed(folder, lambda logits: logits.index_fill(1, torch.arange(kept, logits.shape[1]), value))
    for options in ({}, {"num_beams": 2}, {"num_beams": 16}, {"do_sample": True, "seed": 1}):
        if says is None:  # a mask
            assert max(specbeam.generate(lm, PROMPT, max_new_tokens=5, **options).token_ids) < kept
            continue
        with pytest.raises(NotFinite, match=rf"after {len(PROMPT)} tokens.* hold {says}:"):
            specbeam.generate(lm, PROMPT, max_new_tokens=5, **options)


def test_a_strategy_that_takes_rows_of_logits_is_told_too(folder):
    def strategy(setup, drafter):
        yield Evaluate([setup.tree.tip])
        return [Hypothesis(setup.tree.tip, 0.0, "length")]

    for value, is_refused in ((NAN, True), (INF, True), (-INF, False)):
        lm = changed(folder, lambda logits, value=value: logits.index_fill(1, torch.tensor([7]), value))
        (found,) = outcomes(lm, (PROMPT, {"max_new_tokens": 1}, {"strategy": strategy}))
        assert isinstance(found, NotFinite) == is_refused


def test_processed_scores_may_all_be_masked(clean):
    """Then no text is possible, as before: the logits themselves are finite."""
    for num_beams in (1, 3):
        options = {"num_beams": num_beams, "logits_processor": [lambda ids, scores: np.full_like(scores, -INF)]}
        (found,) = outcomes(clean, (PROMPT, {"max_new_tokens": 3, **options}, {}))
        assert "no text is possible" in str(found)


def test_texts_with_such_logits_have_no_score(spoiled, poison):
    ((_, one, _),) = score(spoiled, [(PROMPT, [1])])
    assert np.isfinite(one)
    with pytest.raises(NotFinite, match=f"because the logits of {spoiled.source} hold NaN"):
        list(score(spoiled, [(PROMPT, [poison, 1])]))


def test_it_is_no_mistake_of_a_client():
    refusal = refusal_of(NotFinite("the logits hold NaN: give dtype='float32'"), {})
    assert refusal.status == 500
    assert "hold NaN" in refusal.message


def test_an_encoder_may_be_the_cause():
    torch.manual_seed(0)
    config = T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, tie_word_embeddings=False)
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    model.generation_config.decoder_start_token_id = 0
    lm = specbeam.hf.wrap(model)
    expected = specbeam.generate(lm, OTHER, max_new_tokens=4).token_ids
    model.encoder.set_input_embeddings(torch.nn.Embedding.from_pretrained(model.shared.weight.detach().clone()))
    model.encoder.embed_tokens.weight.data[33] = NAN
    error, text = outcomes(lm, *((prompt, {"max_new_tokens": 4}, {}) for prompt in ([5, 33], OTHER)))
    assert isinstance(error, NotFinite)
    assert text == expected
