"""Words and their times against openai-whisper 20250625, as record_words.py wrote them down."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import specbeam
from specbeam import SpecbeamError, transcribe
from specbeam.core.selection import AttentionProbe, SelectionRequest
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.options.generation_defaults import GenerationDefaults
from specbeam.speech import Settings
from specbeam.speech.alignment import alignment_heads, attention, median_filter, token_times, warp
from specbeam.speech.clips import Clip
from specbeam.speech.words import WITHOUT_SPACES, Spoken, WordFinder, split_words
from tests.conftest import needs_torch
from tests.speech.conftest import END, ENGLISH, NO_TIMES, START, TIMES, TRANSCRIBE, noise, random_whisper, text_tokens
from tests.speech.record_words import BEGIN, bytes_of, logits_of, scores_of, text_of
from tests.speech.record_words import END as END_OF_BYTES
from tests.speech.test_windows import play, said, sequence

RECORDED = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
BYTES = SimpleNamespace(end=END_OF_BYTES, no_timestamps=300, decode=text_of)


def answered(steps, answer):
    """The result of a generator that asks an engine once. The answer fills in the attempt."""
    try:
        asked = next(steps)
        answer(asked)
        steps.send(None)
    except StopIteration as end:
        return end.value
    pytest.fail("it asks twice")


@pytest.mark.parametrize("number", range(len(RECORDED["cases"])))
def test_words_are_those_of_openai_whisper(number):
    one, expected = RECORDED["cases"][number], RECORDED["words"][number]
    seek, frames = one["seek"], one["frames"]
    by_spaces = one["language"] not in WITHOUT_SPACES
    finder = WordFinder(BYTES, Settings(), ((0, 0), (0, 1), (0, 2)), BEGIN, by_spaces, 3000, last_end=one["last"])
    segments = [Spoken(100 * s["start"], 100 * s["end"], [400, *bytes_of(s["text"]), 401]) for s in one["segments"]]

    def attend(asked):
        text = [token for segment in one["segments"] for token in bytes_of(segment["text"])]
        assert asked.prompt == [*BEGIN, 300, *text, END_OF_BYTES]
        assert (asked.sound, asked.writes, asked.drafts) == ("sound", False, False)
        listen = asked.strategy
        listen.probe.scores[:] = scores_of(one)[:, :, : listen.probe.scores.shape[2]]
        assert listen.probe.scores.shape == (3, len(asked.prompt), frames // 2)
        logits = logits_of(one, len(asked.prompt))[len(BEGIN) :, :END_OF_BYTES].astype(np.float64)
        odds = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        listen.probabilities = [float(row[token]) for row, token in zip(odds, text, strict=False)]

    found = answered(finder.find("sound", segments, Clip([(0, seek + 3000)]), seek, frames), attend)
    for segment, (start, end, words) in zip(found.segments, expected, strict=True):
        assert (segment.start / 100, segment.end / 100) == pytest.approx((start, end), abs=0.0051)
        assert [word.word for word in segment.words] == [word for word, *_ in words]
        for word, (_, *numbers) in zip(segment.words, words, strict=True):
            assert (word.start, word.end, word.probability) == pytest.approx(numbers, abs=0.0051)
            assert word.probability == pytest.approx(numbers[2], rel=1e-4)
    ends = [end for *_, words in expected for _, _, end, _ in words] or [expected[-1][1]]
    assert (finder.last_end, finder.last_frame / 100) == pytest.approx((ends[-1], ends[-1]), abs=0.0051)


@pytest.mark.parametrize("marks", [{}, {"prepend_punctuations": "-a", "append_punctuations": ". say"}])
def test_no_word_lies_in_two_segments(marks):
    """Also where a segment ends with a mark of the next word, or begins within a word."""
    texts = [' They say "', " well", "you -", " a. say", '."', " -"]
    finder = WordFinder(BYTES, Settings(**marks), ((0, 0),), BEGIN, True, 3000)
    segments = [Spoken(100 * i, 100 * (i + 1), [400, *bytes_of(text), 401]) for i, text in enumerate(texts)]

    def attend(asked):
        size = asked.strategy.probe.scores.shape[1:]
        asked.strategy.probe.scores[0] = np.random.default_rng(1).normal(size=size)
        asked.strategy.probabilities = [0.5] * len(b"".join(text.encode() for text in texts))

    found = answered(finder.find("sound", segments, Clip([(0, 3000)]), 0, 3000), attend)
    assert ["".join(word.word for word in segment.words) for segment in found.segments] == texts


@pytest.mark.parametrize("number", range(len(RECORDED["paths"])))
def test_paths_are_those_of_openai_whisper(number):
    one = RECORDED["paths"][number]
    assert warp(np.array(one["costs"], float)).tolist() == one["path"]


def test_medians_and_attention_where_there_is_little_sound():
    rows = np.random.default_rng(0).normal(size=(3, 20)).astype(np.float32)
    expected = [
        np.median(np.take(rows, [abs(i) if i < 20 else 38 - i for i in range(t - 3, t + 4)], 1), 1) for t in range(20)
    ]
    np.testing.assert_array_equal(median_filter(rows), np.array(expected).T)
    assert median_filter(rows[:, :3]) is not None
    for positions in (1, 2, 5):  # openai-whisper has NaN for one position
        matrix = attention(np.ones((2, 6, positions), np.float32))
        assert not matrix.any()
        times = token_times(matrix)
        assert (len(times), times[0]) == (6, 0)
        assert (np.diff(times) >= 0).all()


def test_words_keep_the_tokens_of_a_text_in_their_order():
    for text in (" one two", "one", " “Zoë”, 你好", " 🤷🏽", "  a  b ", "\n", "..", " naïve-ish co-op"):
        tokens = bytes_of(text)
        for by_spaces in (True, False):
            words = split_words(tokens, text_of, by_spaces)
            assert "".join(word for word, _ in words) == text
            assert [token for _, own in words for token in own] == tokens
    cut = bytes_of(" ok é")[:-1]
    assert split_words(cut, text_of, True) == [(" ok", bytes_of(" ok")), (" \ufffd", cut[-2:])]
    assert split_words(bytes_of("你a"), text_of, False) == [("你", bytes_of("你")), ("a", bytes_of("a"))]


def in_order(transcript):
    """All words, after some checks of a transcript with words."""
    words = [word for segment in transcript.segments for word in segment.words]
    whole = [one for one in transcript.segments if "\ufffd" not in one.text]  # else its characters are cut
    assert all("".join(word.word for word in one.words) == one.text for one in whole)
    assert all(0 <= word.start <= word.end <= transcript.duration for word in words)
    assert all(0 <= word.probability <= 1 for word in words)
    assert all(before.start <= after.start for before, after in pairwise(words))
    return words


WORDS = {"vad_filter": False, "temperature": 0, "no_speech_threshold": None, "word_timestamps": True}


@pytest.mark.parametrize("options", [{"num_beams": 1}, {"num_beams": 3}, {"temperature": 0.7, "best_of": 2}])
def test_words_are_the_same_alone_among_others_and_with_little_memory(whisper, options):
    files = [noise(seconds, seed) for seed, seconds in enumerate([0.5, 2.3, 0.0, 1.2])]
    together = transcribe(whisper, files, "en", **WORDS | options)
    assert sum(len(in_order(one)) for one in together) >= 5
    assert together[2].segments == []
    assert [transcribe(whisper, file, "en", **WORDS | options) for file in files] == together
    # Chunks of the prompt, and requests that are preempted, change nothing.
    least = 50 + 64  # slots of one window
    engine = specbeam.Engine(whisper, max_batch_tokens=7, max_cache_tokens=least)
    for file, expected in zip(files, together, strict=True):
        stream = specbeam.transcribe_stream(whisper, file, "en", engine=engine, **WORDS | options)
        assert [*stream] == expected.segments
    assert engine.cache_tokens == 0
    with specbeam.Engine(whisper, max_cache_tokens=2 * least) as engine, ThreadPoolExecutor() as pool:
        streams = [specbeam.transcribe_stream(whisper, one, "en", engine=engine, **WORDS | options) for one in files]
        assert [*pool.map(list, streams)] == [one.segments for one in together]


def test_scores_count_as_memory_beside_other_requests(whisper):
    probe, held = AttentionProbe(((1, 0),), np.zeros((1, 64, 50), np.float32)), []

    def strategy(setup, drafter):
        for nodes in ([0, 1], [2, 3]):
            yield Evaluate(nodes, SelectionRequest(), probe=probe)
            held.append(engine._budget.source_bytes)
        return [Hypothesis(setup.tree.tip, 0.0, "stop")]

    features = np.random.default_rng(1).normal(size=whisper.backend.features_shape).astype(np.float32)
    engine = specbeam.Engine(whisper)
    for number in (1, 2):
        held.clear()
        requests = [
            engine.submit([START, ENGLISH, TRANSCRIBE, NO_TIMES], strategy=strategy, features=features, writes=False)
            for _ in range(number)
        ]
        engine.run()
        assert all(request.result() for request in requests)
        assert max(held) == (number * probe.scores.nbytes if number > 1 else 0)
        assert engine._budget.source_bytes == 0
    assert probe.scores[0, :4].any(axis=1).all()
    assert not probe.scores[0, 4:].any()


@pytest.mark.parametrize(
    "how", [pytest.param({"backend": "torch"}, marks=needs_torch), {"quantize": "int8"}, {"quantize": "int4"}]
)
def test_words_on_other_backends_and_with_other_weights(whisper, save, how):
    from tests.speech.conftest import whisper_tokenizer

    lm = specbeam.load(save(random_whisper(), whisper_tokenizer()), **how)
    found = transcribe(lm, noise(2.3), "en", num_beams=1, **WORDS)
    assert len(in_order(found)) >= 3
    if how == {"backend": "torch"}:
        expected = transcribe(whisper, noise(2.3), "en", num_beams=1, **WORDS)
        assert [s.tokens for s in found.segments] == [s.tokens for s in expected.segments]
        for word, same in zip(in_order(found), in_order(expected), strict=True):
            assert word.word == same.word
            assert (word.start, word.end) == pytest.approx((same.start, same.end), abs=0.0201)
            assert word.probability == pytest.approx(same.probability, abs=1e-4)


def test_times_equal_those_of_transformers(whisper):
    """``return_token_timestamps`` has the same attention, heads and warping, but other rows."""
    torch, utils = pytest.importorskip("torch"), pytest.importorskip("transformers.utils")
    model = random_whisper(attn_implementation="eager")
    model.generation_config.median_filter_width = 7
    texts = text_tokens(" hello there, you")
    prompt = [START, ENGLISH, TRANSCRIBE, NO_TIMES, *texts, END]
    features = np.random.default_rng(1).normal(size=whisper.backend.features_shape).astype(np.float32)
    with torch.no_grad():
        out = model(torch.tensor(features)[None], decoder_input_ids=torch.tensor([prompt]), output_attentions=True)
    heads = alignment_heads(whisper)
    assert heads == ((1, 0), (1, 1))
    outputs = utils.ModelOutput(cross_attentions=[out.cross_attentions], sequences=torch.tensor([[*prompt, END]]))
    weights = torch.cat([out.cross_attentions[layer][0, head : head + 1] for layer, head in heads])
    scores = weights.log().numpy()  # as far as the softmax can tell
    theirs = model._extract_token_timestamps(outputs, [[*pair] for pair in heads], num_frames=100, num_input_ids=0)[
        0
    ].tolist()
    assert token_times(attention(scores)).tolist() == pytest.approx(theirs[: len(prompt)])


def test_heads_are_those_of_the_checkpoint(whisper, monkeypatch):
    def heads(given):
        lm = SimpleNamespace(
            backend=whisper.backend, generation_defaults=GenerationDefaults({"alignment_heads": given})
        )
        return alignment_heads(lm)

    assert heads([[0, 1], [1, 0]]) == ((0, 1), (1, 0))
    assert heads([]) == heads(None) == ((1, 0), (1, 1))
    for wrong in ([[2, 0]], [[0, 2]], [[-1, 0]], [[0]], [0, 1], "01", [[0, True]], [["0", 1]], 7):
        with pytest.raises(
            SpecbeamError, match=r"generation_config.json: alignment_heads=.* is not allowed: give pairs"
        ):
            heads(wrong)
    monkeypatch.setattr(whisper.backend, "cross_heads", None)
    with pytest.raises(SpecbeamError, match="word_timestamps needs attention weights, which the backend cpu does not"):
        transcribe(whisper, noise(1), word_timestamps=True)


def evenly(listen, positions_per_token=2.0):
    """The attention of a text whose tokens take two positions each, from the start of the window on."""
    _, rows, positions = listen.probe.scores.shape
    listen.probabilities = [0.5] * rows
    listen.probe.scores[:] = -3 * np.abs(np.arange(positions) - positions_per_token * (np.arange(rows) - 3)[:, None])


@pytest.mark.parametrize(("rest", "second"), [([], 1.0), ([TIMES + 40, *text_tokens(" left")], 0.42)])
def test_windows_begin_where_the_last_word_ends(whisper, rest, second):
    """As in openai-whisper: unless the text ends with a single timestamp."""
    text = [*said(" one", 0, 3), *said(" two, t", 5, 40), *rest]
    script = [(sequence(text), 0.1), (sequence(said(" x", 0, 2)), 0.1)]
    segments, asked = play(whisper, script, 1.4, temperature=0, word_timestamps=True, listen=evenly)
    words = [word for segment in segments for word in segment.words]
    assert [word.word for word in words] == [" one", " two,", " t", " x"]
    assert len(asked) == 2
    assert words[-1].start == pytest.approx(second)
    assert (segments[1].end, segments[2].start >= segments[1].end) == (words[2].end, True)


def test_a_word_lies_in_one_piece_of_a_clip():
    clip, both = Clip([(100, 200), (300, 400)]), (0, 200)
    assert clip.span(10, 20, both) == (1.1, 1.2)
    assert clip.span(90, 104, both) == (1.9, 2.0)
    assert clip.span(98, 120, both) == (3.0, 3.2)
    assert clip.span(190, 230, both) == (3.9, 4.0)
    assert clip.span(-3, 0, both) == (1.0, 1.0)
    assert clip.span(90, 104, (100, 200)) == (3.0, 3.04)  # that of its segment
    assert clip.span(98, 120, (50, 100)) == (1.98, 2.0)
    assert clip.span(80, 90, (100, 200)) == (1.8, 1.9)  # which it does not touch


@pytest.mark.parametrize(("with_words", "second"), [(False, (7.0, 7.4)), (True, None)])
def test_a_segment_is_not_in_a_stretch_where_it_is_not_spoken(whisper, with_words, second):
    """Its timestamp is a little before the silence that was cut out: it was shown a minute too early."""
    clip = Clip([(0, 50), (700, 750)], edge=10)
    script = [(sequence([*said(" one", 0, 22), *said(" two", 22, 45)]), 0.1)]
    listen = partial(evenly, positions_per_token=5.5)
    options = {"temperature": 0, "listen": listen, "word_timestamps": with_words}
    one, two = play(whisper, script, 8.0, [clip], **options)[0]
    assert one.end <= 0.5
    assert two.start >= 7.0
    if with_words:
        assert [(s.start, s.end) for s in (one, two)] == [(s.words[0].start, s.words[-1].end) for s in (one, two)]
    else:
        assert (two.start, two.end) == second
