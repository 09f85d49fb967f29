"""``model.generate`` takes the same steps with and without us: scores, stopping criteria, streamers, encoders."""

import logging
from functools import partial

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
    TextStreamer,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import specbeam
from specbeam import SpecbeamError, hf
from tests.backends.test_encoder_decoder import make
from tests.conftest import byte_tokenizer, random_model
from tests.integrations.test_transformers import EXTRA, PAD, VOCAB, padded

LONG = {"max_new_tokens": 10, "eos_token_id": [1, 11], "pad_token_id": PAD}
DETAILS = {"return_dict_in_generate": True, "output_scores": True}
NO_ASCII = [*range(94, 259)]
"""The tokens of a byte tokenizer that are not visible characters of ASCII."""


@pytest.fixture(scope="module")
def model():
    return random_model("llama", vocab_size=VOCAB, initializer_range=0.25)


@pytest.fixture(scope="module")
def small():
    """A draft model for it."""
    return random_model("llama", seed=1, vocab_size=VOCAB, initializer_range=0.25, num_hidden_layers=1)


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
    prompt = torch.tensor([[3, 4, 5]])
    got = model.generate(prompt, **options, draft=draft, **EXTRA)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)])
    for at, scores in enumerate(got.scores, start=prompt.shape[1]):
        rows = ~is_padding(scores)
        with torch.no_grad():
            logits = model(got.sequences[rows, :at]).logits[:, -1]
        torch.testing.assert_close(scores[rows], warpers(got.sequences[rows, :at], logits), atol=1e-4, rtol=1e-4)
        assert (scores.gather(1, got.sequences[:, at, None]) > float("-inf")).all()


class Until(list):
    """A stopping criterion: a long enough text ends with every fourth token. Keeps its calls."""

    def __call__(self, input_ids, scores, **kwargs):
        self.append((input_ids, scores))
        return (input_ids[:, -1] % 4 == 3) & torch.tensor(input_ids.shape[1] > 6)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_a_callers_criterion_ends_each_text(model, small, num_beams):
    inputs = padded([[3, 4, 5], [6], [12, 13, 14, 3]])
    options = LONG | {"num_beams": num_beams, "max_new_tokens": 14}
    expected = model.generate(**inputs, **options, **DETAILS, stopping_criteria=[Until()])
    assert expected.sequences.tolist() != model.generate(**inputs, **options).tolist()
    for draft in (None, "ngram", small):
        ours = {"stopping_criteria": [Until()], "draft": draft, **EXTRA}
        check_scores(model, model.generate(**inputs, **options, **DETAILS, **ours), expected)
        criterion = ours["stopping_criteria"][0]
        criterion.clear()
        assert model.generate(**inputs, **options, **ours).tolist() == expected.sequences.tolist()
        assert criterion
        assert all(scores is None for _, scores in criterion)


@pytest.mark.parametrize("draft", [None, "ngram"])
def test_a_criterion_is_called_after_each_token_with_the_scores_so_far(model, draft):
    def fourth(ids, scores):
        return len(scores) == 4

    options = LONG | DETAILS
    inputs = padded([[3, 4, 5]])
    theirs, ours = Until(), Until()
    for criterion, more in ((theirs, {}), (ours, {"draft": draft, **EXTRA})):
        rows = model.generate(**inputs, **options, stopping_criteria=[criterion, fourth], **more).sequences
        assert rows.shape == (1, 3 + 4)
    assert [ids.tolist() for ids, _ in ours] == [ids.tolist() for ids, _ in theirs]
    for (_, got), (_, expected) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_stop_strings_end_texts_as_in_transformers(bytes_model, num_beams):
    tokenizer = byte_tokenizer()
    inputs = {"input_ids": torch.tensor([[40, 41], [7, 8]]), "attention_mask": torch.ones(2, 2, dtype=torch.long)}
    options = {"max_new_tokens": 12, "num_beams": num_beams, "pad_token_id": 256}
    options["suppress_tokens"] = NO_ASCII
    plain = bytes_model.generate(**inputs, **options)
    stops = [tokenizer.decode(plain[0, 5:7]), tokenizer.decode(plain[1, 4])]
    expected = bytes_model.generate(**inputs, **options, stop_strings=stops, tokenizer=tokenizer)
    assert expected.tolist() != plain.tolist()
    hows = [
        {"stop_strings": stops, "tokenizer": tokenizer},
        {"stopping_criteria": [StopStringCriteria(tokenizer, stops)]},
    ]
    for how in hows:
        for draft in (None, "ngram"):
            assert bytes_model.generate(**inputs, **options, **how, draft=draft, **EXTRA).tolist() == expected.tolist()
    bound = partial(hf.generate, stop_strings=stops, tokenizer=tokenizer)
    assert bytes_model.generate(**inputs, **options, custom_generate=bound).tolist() == expected.tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_when_the_time_is_over_all_texts_end_where_they_are(model, num_beams):
    prompts = [[3 + n] for n in range(11)]  # more than a default engine runs at once
    options = {"max_new_tokens": 14, "num_beams": num_beams, "eos_token_id": -1, "pad_token_id": PAD, "max_time": 0.0}
    expected = model.generate(**padded(prompts), **options)
    assert expected.shape[1] == 2
    assert model.generate(**padded(prompts), **options, **EXTRA).tolist() == expected.tolist()


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
    passes, prompt = [], torch.tensor([[3, 4]])
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    for way in (0, 1):
        passes.clear()
        streamer = Kept(passes)
        text = model.generate(prompt, max_new_tokens=5, eos_token_id=-1, **streaming(streamer)[way])[0, 2:].tolist()
        assert streamer.got == [(0, [[3, 4]]), *((number, [token]) for number, token in enumerate(text, 1)), "end"]
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
    options = LONG | {"num_beams": num_beams}
    inputs = padded([[3, 4, 5, 3, 4], [6]])
    expected = model.generate(**inputs, **options).tolist()
    loaded, corpus = hf.wrap(small), specbeam.suffix_automaton(hf.wrap(model), [[3, 4, 5, 6, 7]])
    config = GenerationConfig(prompt_lookup_num_tokens=4, **options)
    for how, draft in (
        ({"prompt_lookup_num_tokens": 4}, "ngram"),
        ({"generation_config": config}, "ngram"),
        ({"draft": "ngram"}, "ngram"),
        ({"draft": "suffix"}, "suffix"),
        ({"draft": corpus}, corpus),
        ({"draft": loaded}, loaded),
    ):
        submitted.clear()
        how = how if "generation_config" in how else options | how
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
    expected = bytes_model.generate(prompt, **options).tolist()
    other = random_model("llama", vocab_size=130, eos_token_id=1, bos_token_id=2)
    tokenizer, others = byte_tokenizer(), byte_tokenizer(vocab_size=130)
    for how in (
        {"assistant_model": other, "assistant_tokenizer": others},
        {"draft": other, "assistant_tokenizer": others},
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
        for how in ({"draft": small}, {"prompt_lookup_num_tokens": 3}, {"draft": "ngram"}):
            model.generate(torch.tensor([[3, 4]]), **LONG, num_beams=2, **how, **EXTRA)
        assert "ignored" not in caplog.text
        model.generate(torch.tensor([[3, 4]]), **LONG, num_beams=2, assistant_model=small, **EXTRA)
        assert "ignored" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)


def test_criteria_of_several_texts_need_an_end_token(model):
    """Without one, transformers goes on with texts that have ended, until the last has ended."""
    inputs = padded([[3], [4]])
    options = {"max_new_tokens": 6, "stopping_criteria": [Until()]}
    model.generation_config.eos_token_id, before = None, model.generation_config.eos_token_id
    try:
        with pytest.raises(SpecbeamError, match="need an eos_token_id"):
            model.generate(**inputs, **options, **EXTRA)
        one = {name: rows[:1] for name, rows in inputs.items()}
        assert model.generate(**one, **options, **EXTRA).tolist() == model.generate(**one, **options).tolist()
    finally:
        model.generation_config.eos_token_id = before


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
    model, inputs = encoders(kind), PADDED
    begin = torch.tensor([[256, 30, 31]] * 3)
    read = model.get_encoder()(**inputs)
    for options in (
        {"decoder_input_ids": begin, "num_beams": 2},
        {"decoder_input_ids": begin, "decoder_attention_mask": torch.ones_like(begin)},
        {"encoder_outputs": read},
        {"forced_bos_token_id": 77, "num_beams": 3, "repetition_penalty": 1.3},
        {"encoder_no_repeat_ngram_size": 1, "encoder_repetition_penalty": 1.5},
        {"prefix_allowed_tokens_fn": lambda row, ids: [257, 30 + row, 40, len(ids)], "num_beams": 2},
        {"stopping_criteria": [Until()], "num_beams": 2},
    ):
        options = {"max_new_tokens": 8, "pad_token_id": PAD} | options
        expected = model.generate(**inputs, **options).tolist()
        for draft in (None, "ngram" if kind == "t5" else encoders(kind, 1)):
            assert model.generate(**inputs, **options, draft=draft, **EXTRA).tolist() == expected
    unmasked = {"input_ids": inputs["input_ids"], "max_new_tokens": 8}
    assert model.generate(**unmasked, **EXTRA).tolist() == model.generate(**unmasked).tolist()


def test_a_source_may_fill_the_context(encoders):
    model = encoders("bart")
    inputs = {"input_ids": torch.arange(128)[None] % 100 + 3, "max_new_tokens": 4}
    assert model.generate(**inputs, **EXTRA).tolist() == model.generate(**inputs).tolist()


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
