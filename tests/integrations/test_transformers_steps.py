"""``model.generate`` takes the same steps with and without us: scores, stopping criteria, streamers, encoders."""

import logging
from functools import partial

import pytest
import torch
from transformers import GenerationConfig, StopStringCriteria, TextIteratorStreamer, TextStreamer
from transformers import TemperatureLogitsWarper as Temperature
from transformers import TopKLogitsWarper as TopK
from transformers.generation.streamers import BaseStreamer

import specbeam
from specbeam import SpecbeamError, hf
from tests.backends.test_encoder_decoder import make
from tests.conftest import byte_tokenizer, random_model
from tests.integrations.conftest import DETAILS, EXTRA, PAD, assert_same, padded

LONG = {"max_new_tokens": 10, "eos_token_id": [1, 11], "pad_token_id": PAD}
NO_ASCII = [*range(94, 259)]
"""The tokens of a byte tokenizer that are not visible characters of ASCII."""


@pytest.fixture(scope="module")
def bytes_model():
    """A model whose tokens are bytes."""
    return random_model("llama", initializer_range=0.25)


def is_padding(scores):
    """The rows of scores [n, vocab] after a text: the padding has 0, and all other tokens have -inf."""
    return ((scores == 0).sum(-1) == 1) & ((scores == float("-inf")).sum(-1) == scores.shape[-1] - 1)


def check_scores(model, got, expected):
    """Scores equal transformers' scores of unfinished texts, and ``compute_transition_scores`` takes both."""
    assert got.sequences.tolist() == expected.sequences.tolist()
    assert type(got) is type(expected)
    beam_indices = getattr(expected, "beam_indices", None)
    assert len(got.scores) == len(expected.scores)
    if beam_indices is not None:
        assert got.beam_indices.dtype == beam_indices.dtype
        assert got.beam_indices.tolist() == beam_indices.tolist()
    for ours, theirs in zip(got.scores, expected.scores, strict=True):
        assert ours.shape == theirs.shape
        rows = ~is_padding(ours)
        torch.testing.assert_close(ours[rows], theirs[rows], atol=1e-4, rtol=1e-4)
    for normalize in (False, True):
        ours, theirs = (
            model.compute_transition_scores(o.sequences, o.scores, beam_indices, normalize_logits=normalize)
            for o in (got, expected)
        )
        padding = torch.stack([is_padding(scores) for scores in got.scores], 1) if beam_indices is None else ours == 0
        torch.testing.assert_close(ours[~padding], theirs[~padding], atol=1e-4, rtol=1e-4)
        assert not ours[padding].any()


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_scores_of_samples_are_the_warped_logits(model, draft):
    torch.manual_seed(0)
    options = LONG | DETAILS | {"do_sample": True, "temperature": 0.7, "top_k": 5, "num_return_sequences": 2}
    got = model.generate(torch.tensor([[3, 4, 5]]), **options, draft=draft, **EXTRA)
    for at, scores in enumerate(got.scores, start=3):
        rows = ~is_padding(scores)
        before = got.sequences[rows, :at]
        with torch.no_grad():
            warped = TopK(5)(before, Temperature(0.7)(before, model(before).logits[:, -1]))
        torch.testing.assert_close(scores[rows], warped, atol=1e-4, rtol=1e-4)
        assert (scores.gather(1, got.sequences[:, at, None]) > float("-inf")).all()


class Until(list):
    """A stopping criterion: a long enough text ends with every fourth token. Keeps its calls."""

    def __call__(self, input_ids, scores, **kwargs):
        self.append((input_ids, scores))
        return (input_ids[:, -1] % 4 == 3) & torch.tensor(input_ids.shape[1] > 6)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_callers_criterion_ends_each_text(model, small, num_beams):
    options = padded([[3, 4, 5], [6], [12, 13, 14, 3]]) | LONG | {"num_beams": num_beams, "max_new_tokens": 14}
    expected = model.generate(**options, **DETAILS, stopping_criteria=[Until()])
    assert expected.sequences.tolist() != model.generate(**options).tolist()
    for draft in (None, "ngram", small):
        criterion = Until()
        ours = {"stopping_criteria": [criterion], "draft": draft, **EXTRA}
        check_scores(model, model.generate(**options, **DETAILS, **ours), expected)
        criterion.clear()
        assert model.generate(**options, **ours).tolist() == expected.sequences.tolist()
        assert {scores for _, scores in criterion} == {None}


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_criterion_is_called_after_each_token_with_the_scores_so_far(model, draft):
    theirs, ours = Until(), Until()
    for criterion, more in ((theirs, {}), (ours, {"draft": draft, **EXTRA})):
        criteria = [criterion, lambda ids, scores: len(scores) == 4]
        rows = model.generate(**padded([[3, 4, 5]]), **LONG, **DETAILS, stopping_criteria=criteria, **more).sequences
        assert rows.shape == (1, 3 + 4)
    assert [ids.tolist() for ids, _ in ours] == [ids.tolist() for ids, _ in theirs]
    for (_, got), (_, expected) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_stop_strings_end_texts_as_in_transformers(bytes_model, num_beams):
    tokenizer = byte_tokenizer()
    options = {"input_ids": torch.tensor([[40, 41], [7, 8]]), "attention_mask": torch.ones(2, 2, dtype=torch.long)}
    options |= {"max_new_tokens": 12, "num_beams": num_beams, "pad_token_id": 256, "suppress_tokens": NO_ASCII}
    plain = bytes_model.generate(**options)
    stops = [tokenizer.decode(plain[0, 5:7]), tokenizer.decode(plain[1, 4])]
    how, drafts = {"stop_strings": stops, "tokenizer": tokenizer}, ({}, {"draft": "ngram"})
    expected = assert_same(bytes_model, **options, **how, drafts=drafts).tolist()
    assert expected != plain.tolist()
    for own in (
        *({"stopping_criteria": [StopStringCriteria(tokenizer, stops)], **draft, **EXTRA} for draft in drafts),
        {"custom_generate": partial(hf.generate, **how)},
    ):
        assert bytes_model.generate(**options, **own).tolist() == expected


@pytest.mark.parametrize("num_beams", [1, 3])
def test_when_the_time_is_over_all_texts_end_where_they_are(model, num_beams):
    options = padded([[3 + n] for n in range(11)])  # more than a default engine runs at once
    options |= {"max_new_tokens": 14, "num_beams": num_beams, "eos_token_id": -1, "pad_token_id": PAD}
    assert assert_same(model, **options, max_time=0.0).shape[1] == 2


class Kept(BaseStreamer):
    """Keeps what it gets, and after how many passes."""

    def __init__(self, passes=()):
        self.got, self.passes = [], passes

    def put(self, value):
        self.got.append((len(self.passes), value.tolist()))

    def end(self):
        self.got.append("end")


def streaming(streamer):
    """The two ways to give a streamer: to ``generate``, or bound to our function."""
    return {"streamer": streamer, **EXTRA}, {"custom_generate": partial(hf.generate, streamer=streamer)}


def test_tokens_are_streamed_as_they_come(model):
    passes = []
    streamer = Kept(passes)
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    for way in streaming(streamer):
        text = model.generate(torch.tensor([[3, 4]]), max_new_tokens=5, eos_token_id=-1, **way)[0, 2:].tolist()
        assert streamer.got == [(0, [[3, 4]]), *((number, [token]) for number, token in enumerate(text, 1)), "end"]
        passes.clear()
        streamer.got.clear()
    hook.remove()


def test_transformers_streamers_work(bytes_model, capsys):
    tokenizer = byte_tokenizer()
    prompt, options = torch.tensor([[104, 105]]), {"max_new_tokens": 8, "pad_token_id": 256}
    bytes_model.generate(prompt, **options, streamer=TextStreamer(tokenizer))
    expected = capsys.readouterr().out
    bytes_model.generate(prompt, **options, streamer=TextStreamer(tokenizer), **EXTRA)
    assert capsys.readouterr().out == expected
    pieces = TextIteratorStreamer(tokenizer, skip_prompt=True)
    text = bytes_model.generate(prompt, **options, streamer=pieces, draft="suffix", **EXTRA)
    assert "".join(pieces) == tokenizer.decode(text[0, 2:])


def test_a_streamer_with_beams_is_refused_as_transformers_refuses_it(model):
    for how in streaming(Kept()):
        with pytest.raises(SpecbeamError, match=r"`streamer` cannot be used with beam search.*specbeam\.stream"):
            model.generate(torch.tensor([[3, 4]]), num_beams=2, max_new_tokens=3, **how)


@pytest.fixture
def submitted(monkeypatch):
    """The drafts of all requests."""
    drafts, submit = [], specbeam.Engine.submit

    def noting(*args, draft=None, **how):
        drafts.append(draft)
        return submit(*args, draft=draft, **how)

    monkeypatch.setattr(specbeam.Engine, "submit", noting)
    return drafts


@pytest.mark.parametrize("num_beams", [1, 3])
def test_lookups_and_loaded_models_are_drafts(model, small, num_beams, submitted):
    inputs, options = padded([[3, 4, 5, 3, 4], [6]]), LONG | {"num_beams": num_beams}
    expected = model.generate(**inputs, **options).tolist()
    loaded, corpus = hf.wrap(small), specbeam.suffix_automaton(hf.wrap(model), [[3, 4, 5, 6, 7]])
    for how, draft in (
        ({"prompt_lookup_num_tokens": 4} | options, "ngram"),
        ({"generation_config": GenerationConfig(prompt_lookup_num_tokens=4, **options)}, "ngram"),
        *(({"draft": draft} | options, draft) for draft in ("ngram", "suffix", corpus, loaded)),
    ):
        submitted.clear()
        assert model.generate(**inputs, **how, **EXTRA).tolist() == expected
        assert submitted == [draft, draft]
    submitted.clear()
    bound = {"custom_generate": partial(hf.generate, assistant_model=small)}
    for how in ({"draft": small, **EXTRA}, {"assistant_model": small, **EXTRA}, bound):
        assert model.generate(**inputs, **options, **how).tolist() == expected
    assert [draft.backend.model is small for draft in submitted] == [True] * 6


def test_a_draft_may_have_another_vocabulary(bytes_model, submitted):
    prompt, options = torch.tensor([[40, 41, 42]]), {"max_new_tokens": 8, "pad_token_id": 257}
    options["suppress_tokens"] = NO_ASCII
    other = random_model("llama", vocab_size=130, eos_token_id=1, bos_token_id=2)
    tokenizer, others = byte_tokenizer(), byte_tokenizer(vocab_size=130)
    expected = bytes_model.generate(prompt, **options).tolist()
    for how in (
        *({name: other, "assistant_tokenizer": others} for name in ("assistant_model", "draft")),
        {"draft": hf.wrap(other, others)},
    ):
        got = bytes_model.generate(prompt, **options, **how, tokenizer=tokenizer, **EXTRA)
        assert got.tolist() == expected
    assert [(draft.backend.model, draft.tokenizer) for draft in submitted] == [(other, others)] * 3
    with pytest.raises(SpecbeamError, match="different vocabularies"):
        bytes_model.generate(prompt, **options, draft=other, **EXTRA)


def test_a_draft_by_our_name_gives_no_warning(model, small, caplog):
    """transformers warns that beams ignore an assistant, before it calls us."""
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        for how in ({"draft": small}, {"prompt_lookup_num_tokens": 3}, {"draft": "ngram"}, {"assistant_model": small}):
            assert "ignored" not in caplog.text
            model.generate(torch.tensor([[3, 4]]), **LONG, num_beams=2, **how, **EXTRA)
        assert "ignored" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_criteria_of_several_texts_need_an_end_token(model, monkeypatch):
    """Without one, transformers goes on with texts that have ended, until the last has ended."""
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    options = {"max_new_tokens": 6, "stopping_criteria": [Until()]}
    with pytest.raises(SpecbeamError, match="need an eos_token_id"):
        model.generate(**padded([[3], [4]]), **options, **EXTRA)
    assert_same(model, **padded([[3]]), **options)


# Encoder-decoder models: transformers has run the encoder already.
LONGEST = 21
SOURCES = [[10, 11, 12, 13, 257], [7, 257], [*range(40, 60), 257]]
PADDED = {
    "input_ids": torch.tensor([ids + [258] * (LONGEST - len(ids)) for ids in SOURCES]),
    "attention_mask": torch.tensor([[1] * len(ids) + [0] * (LONGEST - len(ids)) for ids in SOURCES]),
}


@pytest.fixture(scope="module")
def encoders():
    made = {}
    return lambda kind, seed=0: made.setdefault((kind, seed), make(kind, seed))


def test_the_encoder_reads_once(encoders):
    model, passes = encoders("t5"), []
    model.generate(**PADDED, max_new_tokens=1, **EXTRA)  # a new model is tried once
    hook = model.get_encoder().register_forward_hook(lambda *_: passes.append(1))
    model.generate(**PADDED, num_beams=2, max_new_tokens=4, **EXTRA)
    hook.remove()
    assert len(passes) == 1


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_options_of_encoder_decoder_models(encoders, kind):
    model, begin = encoders(kind), torch.tensor([[256, 30, 31]] * 3)
    drafts = ({}, {"draft": "ngram" if kind == "t5" else encoders(kind, 1)})
    for options in (
        {"decoder_input_ids": begin, "num_beams": 2},
        {"decoder_input_ids": begin, "decoder_attention_mask": torch.ones_like(begin)},
        {"encoder_outputs": model.get_encoder()(**PADDED)},
        {"forced_bos_token_id": 77, "num_beams": 3, "repetition_penalty": 1.3},
        {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5},
        {"prefix_allowed_tokens_fn": lambda row, ids: [257, 30 + row, 40, len(ids)], "num_beams": 2},
        {"stopping_criteria": [Until()], "num_beams": 2},
    ):
        assert_same(model, **PADDED, **options, max_new_tokens=8, pad_token_id=PAD, drafts=drafts)
    assert_same(model, PADDED["input_ids"], max_new_tokens=8)


def test_a_source_may_fill_the_context(encoders):
    assert_same(encoders("bart"), torch.arange(128)[None] % 100 + 3, max_new_tokens=4)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"decoder_input_ids": torch.tensor([[256, 30], [256, 31], [256, 32]])}, "decoder_input_ids that differ"),
        ({"input_ids": None, "encoder_outputs": True, "draft": "encoder"}, "a draft without input_ids"),
        ({"draft": "causal"}, "begins its sequences with"),
    ],
)
def test_encoder_decoder_models_refuse_by_name(encoders, options, says):
    model, inputs = encoders("t5"), PADDED
    if "encoder_outputs" in options:
        options = options | {"encoder_outputs": model.get_encoder()(**inputs)}
    if "draft" in options:
        options = options | {"draft": random_model("llama") if options["draft"] == "causal" else encoders("t5", 1)}
    with pytest.raises(SpecbeamError, match=says):
        model.generate(**inputs | options, max_new_tokens=4, **EXTRA)
