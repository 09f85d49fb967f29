"""Decoding inside transformers: ``model.generate`` returns the same with and without our ``custom_generate``."""

from contextlib import contextmanager

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from specbeam import SpecbeamError, hf
from specbeam.backends.transformers.compat import CACHE
from tests.conftest import in_thorough_mode, random_model
from tests.integrations.conftest import DETAILS, EXTRA, VOCAB, assert_same, both, padded

PREFERRED = torch.tensor([token % 3 == 0 for token in range(VOCAB)])


def test_lengths_count_as_in_transformers(model):
    for options in (
        {"max_length": 9},
        {"max_length": 9, "min_length": 7},
        {"max_new_tokens": 4, "min_length": 30},
        {"max_length": 9, "eos_token_id": -1},
        {},
    ):
        expected, got = both(model, **padded([[3, 4, 5], [6]]), **options)
        assert (got.dtype, got.tolist()) == (expected.dtype, expected.tolist())


def test_samples_follow_the_global_seed(model):
    options = {"do_sample": True, "max_new_tokens": 8, "num_return_sequences": 3}

    def run(seed, **more):
        torch.manual_seed(seed)
        return model.generate(**padded([[3, 4, 5], [6]]), **options, **more, **EXTRA).tolist()

    first = run(1)
    assert run(1) == first != run(2)
    assert run(1, num_beams=3) == run(1, num_beams=3) != run(2, num_beams=3)
    for rows in (first, run(1, draft="ngram")):
        assert len(rows) == 6
        assert len({tuple(row) for row in rows[:3]}) > 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.2},
        {"top_k": 0, "typical_p": 0.6, "temperature": 1.5},
        {"top_k": 0, "top_h": 0.5},
        {"top_k": 12, "epsilon_cutoff": 0.05, "eta_cutoff": 0.1, "renormalize_logits": True},
        {"top_k": 8, "watermarking_config": transformers.WatermarkingConfig(bias=1.5)},
    ],
    ids=lambda options: list(options)[-1],
)
def test_samples_have_transformers_distribution(model, options):
    torch.manual_seed(0)
    draws = 2000 if in_thorough_mode() else 500
    options = padded([[3, 4, 5], [6]]) | options | {"do_sample": True, "max_new_tokens": 1}
    rows = model.generate(num_return_sequences=draws, **options, **EXTRA)
    out = model.generate(**options, **DETAILS)
    for drawn, scores in zip(rows[:, -1].split(draws), out.scores[0], strict=True):
        p = scores.double().softmax(-1)
        counts = drawn.bincount(minlength=VOCAB)
        assert not counts[p == 0].any()
        if (p > 0).sum() > 1:
            assert chisquare(counts[p > 0], draws * p[p > 0] / p.sum()).pvalue > 1e-3


@pytest.mark.parametrize(("top_p", "eos", "fewest_texts"), [(0.01, 1, 1), (0.8, [5, 8], 3)])
def test_sampled_beams_have_transformers_distribution(model, top_p, eos, fewest_texts):
    """With beams, transformers' warpers keep more tokens than without. Texts that end have a new rule."""
    torch.manual_seed(0)
    options = {"do_sample": True, "num_beams": 2, "top_k": 0, "top_p": top_p, "max_new_tokens": 2, "eos_token_id": eos}
    prompts = torch.tensor([[3, 4]] * (600 if in_thorough_mode() else 200))
    drawn = [rows[:, 2:].tolist() for rows in both(model, prompts, **options)]
    texts = sorted({tuple(text) for texts in drawn for text in texts})
    counts = torch.tensor([[sum(tuple(text) == t for text in texts_of) for t in texts] for texts_of in drawn])
    assert len(texts) >= fewest_texts
    assert chi2_contingency(counts[:, counts.sum(0) >= 10]).pvalue > 1e-3


def test_samples_of_one_prompt_read_it_once(model):
    read = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    options = {"do_sample": True, "num_return_sequences": 5, "max_new_tokens": 3}
    rows = model.generate(torch.tensor([[3, 4] * 30]), **options, **EXTRA)
    hook.remove()
    assert (rows.shape, read[0]) == ((5, 63), 60)
    assert sum(read) <= 60 + 5 * 2


def test_allowed_tokens_of_samples_get_the_number_of_the_sample(model):
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 2, "eos_token_id": 19}
    options["prefix_allowed_tokens_fn"] = lambda row, ids: [5 + row, len(ids)]
    for number, row in enumerate(model.generate(**padded([[3, 4], [6]]), **options, **EXTRA).tolist()):
        assert row[2] in (5 + number, 2)
        assert row[3] in (5 + number, 3)


def test_a_callers_own_processor_of_a_known_kind_counts(model):
    prompt, options = torch.tensor([[3, 4]]), {"max_new_tokens": 6}
    own = [transformers.TopPLogitsWarper(1e-6)]  # leaves one token
    sampled = model.generate(prompt, **options, do_sample=True, top_k=0, logits_processor=own, **EXTRA)
    assert sampled.tolist() == model.generate(prompt, **options).tolist()


FORBIDDEN = {"prefix_allowed_tokens_fn": lambda row, ids: [5], "bad_words_ids": [[5]]}
"""Newer releases of transformers force a forbidden token if prefix_allowed_tokens_fn allows no other."""
FEW = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": VOCAB + 2, "no_repeat_ngram_size": 1}
"""transformers returns the prompt alone, or other texts in another batch."""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"guidance_scale": 1.5}, "guidance_scale"),
        ({"watermarking_config": transformers.SynthIDTextWatermarkingConfig(keys=[1, 2], ngram_len=3)}, "SynthID"),
        ({"forced_eos_token_id": VOCAB + 3}, "forced_eos_token_id: the token 23"),
        ({"forced_bos_token_id": -1}, "forced_bos_token_id: the token -1"),
        ({"bad_words_ids": [[3], [4, VOCAB]]}, "bad_words_ids: the token 20"),
        ({"sequence_bias": {(VOCAB,): 1.0}}, "sequence_bias: the token 20"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, "pad prompts on the left"),
        ({CACHE: transformers.DynamicCache(), "num_beams": 2}, "(cache|past_key_values) with beams"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
        ({"output_logits": True, "return_dict_in_generate": True, "num_beams": 2}, "output_logits with beams"),
        ({"position_ids": torch.tensor([[4, 5, 6]])}, "position_ids"),
        ({"num_beams": 2, "low_memory": True}, "does not support low_memory with beams"),
        (FEW | {"eos_token_id": 6}, "num_return_sequences=3, but"),
        (FORBIDDEN, "prefix_allowed_tokens_fn"),
        (FORBIDDEN | {"num_beams": 3}, "prefix_allowed_tokens_fn"),
        (FORBIDDEN | {"remove_invalid_values": True}, "prefix_allowed_tokens_fn"),
        (FORBIDDEN | {"remove_invalid_values": True, "num_beams": 3}, "prefix_allowed_tokens_fn"),
        ({"do_sample": True, "assistant_model": None, "assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight"),
        ({"draft": "n-gram"}, "ngram"),
        ({"draft": "ngram", "prompt_lookup_num_tokens": 3}, "draft and prompt_lookup_num_tokens each"),
        ({"stop_strings": "a"}, "tokenizer="),
        ({"stopping_criteria": [lambda ids, scores: torch.zeros(3, dtype=torch.bool)]}, "stopping_criteria returned"),
        ({"num_beams": 2, "sequence_bias": {(7,): float("inf")}}, "sequence_bias .* to inf: with beams, keep scores"),
        (
            {"num_beams": 2, "logits_processor": [lambda ids, scores: scores.masked_fill(PREFERRED, float("inf"))]},
            r"logits_processor.* to inf: with beams, keep scores finite",
        ),
        (
            {"num_beams": 2, "exponential_decay_length_penalty": (2, 1.6), "remove_invalid_values": True},
            "exponential_decay_length_penalty with remove_invalid_values and beams",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_we_do_not_have_is_refused_by_name(model, small, options, says):
    options = {"max_new_tokens": 3} | options | ({"assistant_model": small} if "assistant_model" in options else {})
    with pytest.raises(SpecbeamError, match=says) as raised:
        model.generate(torch.tensor([[6, 15, 7]]), **options, **EXTRA)
    assert "\n" not in str(raised.value)


def test_a_direct_call_says_how_to_call(model):
    with pytest.raises(SpecbeamError, match=r"model\.generate\(\.\.\., custom_generate=specbeam\.hf\.generate\)"):
        hf.generate(model, torch.tensor([[3, 4]]))
    with pytest.raises(SpecbeamError, match="custom_generate"):
        hf.generate(model, torch.tensor([[3, 4]]), max_new_tokens=3)


def test_a_streamer_that_is_none_is_refused(model):
    class Silent:
        """Transformers itself needs no more of it."""

        def put(self, tokens):
            pass

    def generate(model, *given, **named):
        return hf.generate(model, *given, **named, streamer=3)

    with pytest.raises(SpecbeamError, match=r"streamer=3 is not allowed: give .* such as TextStreamer"):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, custom_generate=generate)
    with pytest.raises(SpecbeamError, match=r"streamer=.*Silent.* is not allowed"):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, streamer=Silent(), **EXTRA)


def test_what_is_no_loaded_model_is_refused(model):
    for wrong, says in ("gpt2", "model='gpt2'"), (3, "of type int"), (None, "NoneType"), (model.model, "LlamaModel"):
        with pytest.raises(SpecbeamError, match=f"{says} is no model of transformers that generates text: give"):
            hf.wrap(wrong)


def test_a_callers_own_end_of_text_counts(model):
    prompt = torch.tensor([[3, 4]])
    end = int(model.generate(prompt, max_new_tokens=6)[0, 4])
    assert_same(model, prompt, max_new_tokens=6, stopping_criteria=[transformers.EosTokenCriteria(end)])


def test_a_quantized_cache_is_refused_by_name(model):
    def generate(model, input_ids, generation_config, **given):
        generation_config.cache_implementation = "quantized"  # generate itself needs another package for it
        return hf.generate(model, input_ids, generation_config=generation_config, **given)

    with pytest.raises(SpecbeamError, match="quantized cache"):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, custom_generate=generate)


VALUES = {
    "no_repeat_ngram_size": 2,
    "bad_words_ids": [[5], [7, 8]],
    "prefix_allowed_tokens_fn": lambda row, ids: [1, 3 + row, 9, 10, int(ids[-1]) // 2 + 3, len(ids)],
    "repetition_penalty": 1.3,
    "min_new_tokens": 4,
    "min_length": 8,
    "sequence_bias": {(4,): 2.0, (9, 10): -3.0},
    "encoder_repetition_penalty": 1.6,
    "encoder_no_repeat_ngram_size": 1,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": [9, 1],
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.6),
    "suppress_tokens": [4, 9, 12, -1],
    "begin_suppress_tokens": list(range(1, VOCAB, 2)),
    "renormalize_logits": True,
    "watermarking_config": transformers.WatermarkingConfig(bias=2.0, context_width=2),
}
OWN_PROCESSORS = {
    "function": [lambda ids, scores: scores + 3 * ((ids[:, -1:] + ids.shape[1]) % 2) * PREFERRED],
    "repetition_penalty_of_the_caller": [transformers.RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=2)],
    "min_length_of_other_tokens": [transformers.MinLengthLogitsProcessor(8, [1, 11])],
    "warpers": [transformers.TopKLogitsWarper(3), transformers.TypicalLogitsWarper(0.8)],
}
OPTIONS = {name: {name: value} for name, value in VALUES.items()}
OPTIONS |= {name: {"logits_processor": own} for name, own in OWN_PROCESSORS.items()}
"""Options for each of transformers' processors that we support."""


PENALTY = transformers.EncoderRepetitionPenaltyLogitsProcessor(2.0, torch.tensor([[0]]))
PENALIZED = PENALTY(torch.zeros(2, 1).long(), torch.ones(2, 2))
OLD_MISTAKES = () if PENALIZED[1, 0] != 1 else ("encoder_repetition_penalty", "exponential_decay_length_penalty")
"""Options that older releases of transformers get wrong: for all beams but the first, and for forbidden end tokens."""


@pytest.mark.parametrize("num_beams", [pytest.param(1, marks=pytest.mark.thorough), 3])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_processor_counts_in_a_batch_with_and_without_drafts(model, small, name, num_beams):
    if name in OLD_MISTAKES and num_beams > 1:
        pytest.skip("this release of transformers penalizes the first beam alone")
    options = OPTIONS[name] | {"num_beams": num_beams, "num_return_sequences": num_beams, "max_new_tokens": 8}
    inputs = padded([[3, 4, 5], [6], [12, 13, 14, 3]])
    assert_same(model, **inputs, **options, eos_token_id=[1, 11], drafts=({}, {"assistant_model": small}))


@given(
    architecture=st.sampled_from(["llama", "gpt2", "mistral"]),
    prompts=st.lists(st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=8), min_size=1, max_size=3),
    names=st.sets(st.sampled_from([*OPTIONS]), max_size=5),
    num_beams=st.integers(1, 3),
    eos=st.sampled_from([-1, 4, [4, 8], [8, -1]]),
    pad=st.sampled_from([None, 0, 3]),
)
def test_processors_go_together_in_any_batch(models, small, architecture, prompts, names, num_beams, eos, pad):
    model, inputs = models(architecture), padded(prompts)
    options = {"num_beams": num_beams, "max_new_tokens": 7, "eos_token_id": eos, "pad_token_id": pad}
    if -1 in torch.tensor(eos).flatten():
        names.discard("exponential_decay_length_penalty")  # transformers refuses this
    names.difference_update(OLD_MISTAKES)
    if num_beams > 1 and "remove_invalid_values" in names:
        names.discard("exponential_decay_length_penalty")  # refused, since transformers' texts have scores of inf
    for name in sorted(names):
        options |= OPTIONS[name]
    with forced_tokens() as forced:
        expected = model.generate(**inputs, **options, **DETAILS)
    for draft in {}, {"assistant_model": small}:
        try:
            got = model.generate(**inputs, **options, **draft, **EXTRA)
        except SpecbeamError:
            assert any(forced) or has_dead_end(expected, num_beams)
        else:
            assert got.tolist() == expected.sequences.tolist()


@contextmanager
def forced_tokens():
    """A list, with a bool for each step: prefix_allowed_tokens_fn forced tokens that were forbidden."""
    forced, usual = [], transformers.PrefixConstrainedLogitsProcessor.__call__

    def call(self, input_ids, scores):
        after = usual(self, input_ids, scores)
        forced.append(bool((scores.isneginf() & ~after.isneginf()).any()))
        return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.PrefixConstrainedLogitsProcessor, "__call__", call)
        yield forced


def has_dead_end(output, num_beams):
    """Whether transformers had no allowed token for a text, or returns one that is forbidden or has not ended."""
    if num_beams == 1:
        return not all((scores.amax(-1) > float("-inf")).all() for scores in output.scores)
    return not (output.sequences_scores > -1e8).all()


def test_an_end_token_that_is_forbidden_does_not_score_infinity(model):
    """remove_invalid_values makes its score finite, exponential_decay_length_penalty infinite. Then texts go on."""
    options = OPTIONS["exponential_decay_length_penalty"] | OPTIONS["remove_invalid_values"] | OPTIONS["min_length"]
    options |= padded([[15, 4, 14], [13, 18], [18]]) | {"max_new_tokens": 7, "eos_token_id": [4, 8]}
    assert model.generate(**options, num_beams=2, **DETAILS).sequences_scores.isinf().all()
    with pytest.raises(SpecbeamError, match="exponential_decay_length_penalty with remove_invalid_values"):
        model.generate(**options, num_beams=2, **EXTRA)
    assert_same(model, **options, num_beams=1)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_texts_without_an_allowed_token_are_not_renormalized(model, num_beams):
    """transformers makes NaN of these scores, and NaN is the highest of all."""
    prompt, options = torch.tensor([[3, 4]]), {"prefix_allowed_tokens_fn": lambda row, ids: [5, 6]}
    options |= {"begin_suppress_tokens": [5, 6], "renormalize_logits": True, "num_beams": num_beams}
    assert model.generate(prompt, **options, max_new_tokens=3, **DETAILS).scores[0].isnan().all()
    says = r"renormalize_logits gives NaN: .* other options must allow some token"
    for draft in (None, "ngram"):
        with pytest.raises(SpecbeamError, match=says):
            model.generate(prompt, **options, max_new_tokens=3, draft=draft, **EXTRA)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_draft_tokens_without_an_allowed_token_are_no_error(model, num_beams):
    """Of the draft tokens after 3, nothing may follow 4. No text has it."""
    nothing_after = torch.arange(VOCAB) == 4
    own = [
        lambda ids, scores: scores.masked_fill(nothing_after[ids[:, -1]][:, None], float("-inf")),
        lambda ids, scores: torch.where(nothing_after, scores - 50, scores),
    ]
    options = {"logits_processor": own, "renormalize_logits": True, "num_beams": num_beams, "max_new_tokens": 4}
    assert_same(model, torch.tensor([[3, 4, 7, 3, 4, 6, 3]]), **options, drafts=({"draft": "ngram"},))


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1, "forced_eos_token_id": 5},  # one text is possible, and transformers returns it thrice
        {"max_new_tokens": 3, "forced_eos_token_id": [15, 9], "eos_token_id": [5, -1]},  # equal scores
        {"max_new_tokens": 3, "eos_token_id": [5, 5], "suppress_tokens": list(range(3, VOCAB - 1))},
    ],
)
def test_where_few_texts_are_possible_beams_are_still_those_of_transformers(model, options):
    expected, got = both(model, torch.tensor([[6, 15, 7]]), **options, **DETAILS, num_beams=4, num_return_sequences=3)
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert got.beam_indices.tolist() == expected.beam_indices.tolist()
    torch.testing.assert_close(got.sequences_scores, expected.sequences_scores)


def test_scores_change_no_text_where_logits_are_equal():
    """All beams are evaluated and ranked in one way, whether the scores of the steps are returned or not."""
    model = random_model("llama", seed=5, initializer_range=0.25)
    with torch.no_grad():
        model.lm_head.weight[:] = model.lm_head.weight[torch.arange(len(model.lm_head.weight)) % 7]
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 12, "length_penalty": 0.0}
    options |= {"eos_token_id": [*range(3, 39, 7)], "do_sample": False, "return_dict_in_generate": True}
    for token in range(40, 60):
        without, with_scores = (
            model.generate(torch.tensor([[token]]), **options, output_scores=asked, **EXTRA).sequences.tolist()
            for asked in (False, True)
        )
        assert without == with_scores
