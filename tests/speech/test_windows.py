"""The rules of openai-whisper for windows, fallback, silence and prompts, with a model that says what a test writes."""

import json
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import specbeam
from specbeam import SpecbeamError
from specbeam.results import Result, Sequence
from specbeam.speech.alignment import AlignText
from specbeam.speech.clips import Clip, named_clips, spoken_clips
from specbeam.speech.log_mel import LogMel
from specbeam.speech.requests import WindowRequest, compression_ratio
from specbeam.speech.settings import Settings
from specbeam.speech.vocabulary import Vocabulary, code_of
from specbeam.speech.windows import Transcriber, Windows
from specbeam.speech.word_timestamps import Timing, WordFinder
from tests.speech.conftest import (
    END,
    ENGLISH,
    NO_TIMES,
    POSITIONS,
    PREVIOUS,
    START,
    TIMES,
    TRANSCRIBE,
    TRANSLATE,
    noise,
    random_whisper,
    text_tokens,
    whisper_tokenizer,
)
from tests.speech.record_silences import WINDOW, script_of, tokens_of

BEGIN = [START, ENGLISH, TRANSCRIBE]
FRAMES = 2 * POSITIONS


def said(text, start=0, end=10):
    return [TIMES + start, *text_tokens(text), TIMES + end]


def sequence(tokens, log_prob=-0.1, mass=0.0):
    tokens = [*tokens, END]
    many = len(tokens)
    return Sequence(
        "", tokens, [log_prob] * many, log_prob * many, 0.0, "stop", allowed_log_probs=[mass] * many, is_complete=True
    )


def play(whisper, script, seconds=2.0, clips=None, listen=None, **settings):
    """Let windows ask for texts, and answer from a script of sequences, and probabilities of no speech.

    What asks for the times of words goes to ``listen``.

    Returns the segments, and the prompt and the options of each request.
    """
    transcriber = Transcriber.of(Vocabulary.of(whisper), Settings.of(settings))
    mel = LogMel(noise(seconds), transcriber.mel_bins)
    clips = [Clip([(0, mel.frames)])] if clips is None else clips
    windows = Windows(transcriber, mel, clips, "en").segments()
    segments, asked, answer, script = [], [], None, iter(script)
    while True:
        try:
            step = windows.send(answer)
        except StopIteration:
            assert next(script, None) is None, "a text that nobody asked for"
            return segments, asked
        answer = None
        if not isinstance(step, WindowRequest):
            segments.append(step)
            continue
        if isinstance(step.strategy, AlignText):
            listen(step.strategy)
            continue
        asked.append(step)
        sequences, no_speech = next(script)
        if step.strategy is not None:
            step.strategy.log_probs = [float(np.log(no_speech))]
        answer = Result(sequences if isinstance(sequences, list) else [sequences], stats=None)


def fitting(words, tokens):
    """The next words, of some tokens."""
    while tokens:
        word, *numbers = next(words)
        tokens -= len(word)
        yield Timing(word, [*word.encode()], *numbers)


def test_text_that_nobody_said_is_left_out_as_in_faster_whisper(save, monkeypatch):
    """Faster-whisper 1.2.1 with the same scripts, as record_silences.py wrote it down."""
    long = random_whisper(max_source_positions=WINDOW // 2, vocab_size=TIMES + WINDOW // 2 + 1)
    lm = specbeam.load(save(long, whisper_tokenizer()), quantize="float32", threads=1)
    left_out = 0
    for number, expected in enumerate(json.loads(Path(__file__).with_name("silences.json").read_text())):
        frames, threshold, windows = script_of(number)
        read, features = [], np.zeros((80, WINDOW), np.float32)
        mel = SimpleNamespace(frames=frames, window=lambda pieces, _, read=read, to=features: read.append(pieces) or to)
        said = iter(windows)

        def timings(finder, sound, segments, frames, said=said):
            yield from ()
            words = iter([word for own in next(said)[2] for word in own])
            return [[*fitting(words, len(own))] for own in segments]

        monkeypatch.setattr("tests.speech.test_windows.LogMel", lambda *_, mel=mel: mel)
        monkeypatch.setattr(WordFinder, "_timings", timings)
        script = [(sequence(tokens_of(window)), 0.1) for window in windows[: len(expected["read"])]]
        how = {"temperature": 0, "word_timestamps": True, "prepend_punctuations": "", "append_punctuations": ","}
        segments, _ = play(lm, script, clips=None, hallucination_silence_threshold=threshold, **how)
        assert [pieces[0][0] for pieces in read] == expected["read"]
        inside = [one for one in expected["segments"] if one[0] < frames / 100]  # theirs may begin behind the end
        for segment, (start, end, words) in zip(segments, inside, strict=True):
            assert [word.word for word in segment.words] == [word for word, *_ in words]
            assert (segment.start, segment.end) == pytest.approx((start, min(end, frames / 100)), abs=0.0051)
        left_out += sum(len(window[0]) for window in windows[: len(read)]) - len(segments)
    assert left_out > 50


def test_the_last_timestamp_says_where_the_next_window_begins(whisper):
    first = [*said("one", 0, 20), *said(" two", 20, 35), TIMES + 35, *text_tokens(" cut")]
    segments, asked = play(
        whisper, [(sequence(first), 0.1), (sequence(said(" three", 1, 30)), 0.1)], 1.7, temperature=0
    )
    assert [(s.start, s.end, s.text) for s in segments] == [(0, 0.4, "one"), (0.4, 0.7, " two"), (0.7, 1.3, " three")]
    assert segments[0].tokens == said("one", 0, 20)
    assert asked[0].prompt == BEGIN
    assert asked[1].prompt == [PREVIOUS, *said("one", 0, 20), *said(" two", 20, 35), *BEGIN]
    assert {s.temperature for s in segments} == {0.0}


def test_a_single_timestamp_at_the_end_ends_the_window(whisper):
    text = [*said("one", 0, 20), *said(" two", 20, 35)]
    segments, asked = play(whisper, [(sequence(text), 0.1), (sequence(said("three")), 0.1)], 1.7, temperature=0)
    assert [(s.start, s.end) for s in segments] == [(0, 0.4), (0.4, 0.7), (1.0, 1.2)]
    assert len(asked) == 2


def test_a_text_without_pairs_is_one_segment(whisper):
    for tokens, end in ((said("one", 3, 20), 0.4), ([TIMES, *text_tokens("one")], 1.0)):
        segments, _ = play(whisper, [(sequence(tokens), 0.1)], 1.0, temperature=0)
        assert [(s.start, s.end, s.text) for s in segments] == [(0, end, "one")]


def test_a_segment_that_begins_behind_the_end_is_left_out(whisper):
    text = [*said("one", 0, 40), *said(" two", 40, 49), *said(" three", 50, 50)]
    segments, _ = play(whisper, [(sequence(text), 0.1)], 0.45, temperature=0)
    assert [(s.start, s.end, s.text) for s in segments] == [(0, 0.45, "one")]


def test_segments_without_text_or_length_are_left_out_and_no_prompt(whisper):
    text = [*said("", 0, 20), *said("  ", 20, 35), *said("x", 40, 40)]
    segments, asked = play(whisper, [(sequence(text), 0.1), (sequence(said("y")), 0.1)], 1.7, temperature=0)
    assert [s.text for s in segments] == ["y"]
    assert asked[1].prompt == BEGIN


def test_a_text_that_is_rejected_is_drawn_again_at_the_next_temperature(whisper):
    loop = sequence(said("la la " * 30))
    unlikely, fine = sequence(said("one"), log_prob=-1.5), sequence(said("two"), -0.9)
    segments, asked = play(whisper, [(loop, 0.1), ([unlikely] * 5, 0.1), ([unlikely, fine], 0.1)], 1.0)
    (segment,) = segments
    assert (segment.text, segment.temperature) == ("two", 0.4)
    assert segment.avg_logprob == pytest.approx(-0.9)
    assert segment.rejected == (
        f"temperature 0: compression_ratio {compression_ratio(('la la ' * 30).strip()):.2f} > 2.4",
        "temperature 0.2: avg_logprob -1.50 < -1",
    )
    assert [one.options.get("temperature") for one in asked] == [None, 0.2, 0.4]
    assert [one.options.get("num_return_sequences") for one in asked] == [None, 5, 5]
    assert [one.options.get("num_beams") for one in asked] == [5, None, None]
    assert len({one.options["seed"] for one in asked[1:]}) == 2
    assert len({id(one.features) for one in asked}) == 1  # the encoder reads it once


def test_the_last_temperature_counts_if_all_texts_are_rejected(whisper):
    unlikely = [(sequence(said(word), log_prob=-2), 0.1) for word in ("a", "b", "c")]
    segments, _ = play(whisper, unlikely, 1.0, temperature=(0, 0.5, 1))
    assert [(s.text, s.temperature, len(s.rejected)) for s in segments] == [("c", 1.0, 2)]


def test_limits_can_be_lifted(whisper):
    unlikely = sequence(said("la la " * 30), log_prob=-2)
    limits = {"compression_ratio_threshold": None, "log_prob_threshold": None}
    segments, _ = play(whisper, [(unlikely, 0.1)], 1.0, **limits)
    assert [s.rejected for s in segments] == [()]


def test_log_probs_count_among_the_allowed_tokens(whisper):
    segments, _ = play(whisper, [(sequence(said("one"), log_prob=-1.5, mass=-1.0), 0.1)], 1.0)
    assert segments[0].avg_logprob == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("log_prob", "no_speech", "settings", "texts"),
    [
        (-1.5, 0.7, {}, 0),
        (-0.5, 0.7, {}, 1),
        (-1.5, 0.5, {"temperature": 0}, 1),
        (-0.5, 0.7, {"log_prob_threshold": None}, 0),
        (-1.5, 0.7, {"no_speech_threshold": None, "temperature": 0}, 1),
    ],
)
def test_silence_has_no_text(whisper, log_prob, no_speech, settings, texts):
    """A window is silent if no speech is likely and its text is not. Silence is not tried again."""
    segments, asked = play(whisper, [(sequence(said("you"), log_prob), no_speech)], 1.0, **settings)
    assert (len(segments), len(asked)) == (texts, 1)


def test_the_likeliest_sample_per_token_is_taken(whisper):
    loop, one, two = sequence(said("la " * 60)), sequence(said("one"), -0.5), sequence(said("a longer two"), -0.48)
    segments, _ = play(whisper, [(loop, 0.1), ([one, two], 0.1)], 1.0)
    assert segments[0].text == "a longer two"


@pytest.mark.parametrize(("temperature", "settings"), [(0.6, {}), (0, {"condition_on_previous_text": False})])
def test_the_prompt_is_reset(whisper, temperature, settings):
    given = {"temperature": temperature, "initial_prompt": "Hello", "best_of": 1, **settings}
    _, asked = play(whisper, [(sequence(said("one")), 0.1)] * 2, 1.7, **given)
    assert asked[0].prompt == [PREVIOUS, *text_tokens(" Hello"), *BEGIN]
    assert asked[1].prompt == BEGIN


def test_hotwords_come_before_every_window_and_the_end_of_the_text(whisper):
    given = {"hotwords": "Zoë ", "initial_prompt": [65, 66], "temperature": 0}
    _, asked = play(whisper, [(sequence(said("123456789")), 0.1)] * 4, 3.5, **given)
    words = text_tokens(" Zoë")
    assert asked[0].prompt == [PREVIOUS, *words, 65, 66, *BEGIN]
    assert asked[1].prompt == [PREVIOUS, *words, 65, 66, *said("123456789"), *BEGIN]
    assert asked[3].prompt == [PREVIOUS, *words, *(said("123456789") * 3)[-26:], *BEGIN]  # 64 / 2 - 1 = 31 tokens
    assert all(one.options["max_new_tokens"] == 32 for one in asked)


def test_tasks_and_texts_without_timestamps(whisper):
    text = sequence(text_tokens("one"))
    given = {"task": "translate", "without_timestamps": True, "temperature": 0}
    segments, asked = play(whisper, [(text, 0.1)] * 2, 1.7, **given)
    assert asked[0].prompt == [START, ENGLISH, TRANSLATE, NO_TIMES]
    assert [(s.start, s.end) for s in segments] == [(0, 1), (1, 1.7)]


def test_the_first_timestamp_is_not_late(whisper):
    for latest, last in ((0.0, TIMES), (0.2, TIMES + 10), (99, TIMES + POSITIONS)):
        (one,) = play(whisper, [(sequence(said("a")), 0.1)], 1.0, temperature=0, max_initial_timestamp=latest)[1]
        rules = one.options["constraint"]
        assert np.flatnonzero(np.unpackbits(rules.mask(rules.start, 0), bitorder="little"))[-1] == last


def test_windows_end_with_their_clip_and_times_are_of_the_file(whisper):
    clips = [Clip([(50, 120)]), Clip([(200, 240), (300, 420)])]
    script = [
        (sequence(said("a", 0, 35)), 0.1),
        (sequence([*said("b", 0, 20), *said("c", 20, 45), TIMES + 45]), 0.1),
        (sequence(said("d", 0, 35)), 0.1),
    ]
    segments, asked = play(whisper, script, 5.0, clips, temperature=0)
    assert [(s.start, s.end, s.text) for s in segments] == [
        (0.5, 1.2, "a"),
        (2.0, 2.4, "b"),  # an end is before the gap
        (3.0, 3.5, "c"),
        (3.5, 4.2, "d"),
    ]
    assert not asked[0].features.source[:, 70:].any()
    assert asked[1].features.source.any(axis=0).all()


def test_clips_of_times_and_of_speech():
    assert [clip.pieces for clip in named_clips([0.5, 1, 2], 300)] == [[(50, 100)], [(200, 300)]]
    assert [clip.pieces for clip in named_clips([1, 9], 300)] == [[(100, 300)]]
    assert named_clips([9], 300) == []
    with pytest.raises(SpecbeamError, match=r"a clip from 3 to 2 seconds: give start, end, start, end"):
        named_clips([3, 2], 300)
    stretches = [(0, 1600), (3210, 8000), (8010, 16_000), (30_000, 60_000), (61_000, 61_100)]
    found = [clip.pieces for clip in spoken_clips(stretches, 375, 100, 40)]
    assert found == [[(0, 10), (20, 50), (50, 100)], [(187, 375)]]


@pytest.mark.parametrize("seed", range(60))
def test_times_in_the_file_are_in_order_and_in_stretches(seed):
    """Random stretches of speech, segments and words, against sets of frames."""
    rng = np.random.default_rng(seed)
    edge, points = int(rng.integers(0, 90)), np.cumsum(rng.integers(1, 200, 2 * rng.integers(1, 5))).tolist()
    pieces = [*zip(points[::2], points[1::2], strict=True)]
    clip = Clip(pieces, edge)
    heard = [(number, frame) for number, (start, end) in enumerate(pieces) for frame in range(start, end)]
    cuts = np.unique(rng.integers(0, clip.frames + 1, 9)).tolist()
    last = 0.0
    for first, end in pairwise(cuts):
        covered = Counter(number for number, _ in heard[first:end])
        sizes = {number: stop - start for number, (start, stop) in enumerate(pieces)}
        spoken = [n for n in covered if covered[n] > edge or covered[n] > sizes[n] / 2] or [
            max(covered, key=covered.get)
        ]
        frames = [frame for number, frame in heard[first:end] if min(spoken) <= number <= max(spoken)]
        segment = clip.trimmed(first, end)
        times = clip.seconds(segment[0]), clip.seconds(segment[1], is_end=True)
        assert times == (frames[0] / 100, (frames[-1] + 1) / 100)
        assert last <= times[0] < times[1]
        last = times[1]
        marks = np.sort(rng.integers(max(0, first - 40), min(clip.frames, end + 40) + 1, 8)).tolist()
        words = [clip.span(*word, segment) for word in zip(marks[::2], marks[1::2], strict=True)]
        for start, stop in words:
            assert any(low <= round(100 * start) <= round(100 * stop) <= high for low, high in pieces)
        assert [*chain(*words)] == sorted(chain(*words))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        *(("zh-cn", "zh"), ("zh-Hans-CN", "zh"), ("en-US", "en"), ("pt_BR", "pt"), ("yue-HK", "yue")),
        *(("DE", "de"), (" German ", "de"), ("haitian creole", "ht"), ("auto", None), ("Auto", None), ("", None)),
    ],
)
def test_a_language_is_a_code_a_name_a_tag_or_the_likeliest(given, code):
    assert code_of(given) == code


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"language": "xx"}, "language='xx' is not known: .* knows en, de, fr"),
        ({"language": "Englisch"}, "language='Englisch' is not known: did you mean 'english'?"),
        ({"language": "?"}, "language='\\?' is not known: give a code or an English name, such as 'de' or 'german'"),
        ({"task": "sing"}, "task='sing' is not allowed: give 'transcribe' or 'translate'"),
        ({"beam_size": 5}, "beam_size=5 cannot be honoured: it is num_beams here"),
        ({"hallucination_silence_threshold": 2}, "hallucination_silence_threshold=2 needs word_timestamps"),
        ({"hallucination_silence_threshold": -1}, "hallucination_silence_threshold=-1 is not allowed: give seconds"),
        ({"word_timestamps": "yes"}, "word_timestamps='yes' is not allowed: give true or false"),
        ({"append_punctuations": None}, "append_punctuations=None is not allowed: give a text"),
        ({"num_return_sequences": 6}, "num_return_sequences=6 is not allowed: give at most num_beams=5"),
        (
            {"num_return_sequences": 3, "num_beams": 2},
            "num_return_sequences=3 is not allowed: give at most num_beams=2",
        ),
        ({"num_return_sequences": 6, "temperature": 0.5}, "=6 is not allowed: give at most best_of=5"),
        ({"vad_parameters": [0.5]}, r"vad_parameters=\[0.5\] is not allowed: give arguments by their names"),
        ({"vad_parameters": {"thresold": 0.5}}, "unknown VAD parameter 'thresold': did you mean 'threshold'?"),
        ({"vad_parameters": {"samples": 1}}, "unknown VAD parameter 'samples': there are threshold, neg_thr"),
        ({"vad_parameters": {"threshold": "x"}}, "vad_parameters: threshold='x' is not allowed: give a number"),
        ({"vad_parameters": {"speech_pad_ms": 0.5}}, "speech_pad_ms=0.5 is not allowed: give milliseconds, 0 or more"),
        ({"vad_parameters": {"min_speech_duration_ms": None}}, "min_speech_duration_ms=None is not allowed"),
        ({"top_logprobs": -1}, "top_logprobs=-1 is not allowed: give 0 or more, or None"),
        ({"no_speach_threshold": 0.5}, "unknown option 'no_speach_threshold': did you mean 'no_speech_threshold'"),
        ({"temperature": "hot"}, "temperature='hot' is not allowed"),
        ({"temperature": []}, "temperature=.* is not allowed: give 0"),
        ({"best_of": 0}, "best_of=0 is not allowed"),
        ({"seed": -1}, "seed=-1 is not allowed"),
        ({"clip_timestamps": "1,x"}, "clip_timestamps='1,x' is not allowed: give seconds"),
        ({"hotwords": "x" * 40}, "hotwords: 41 tokens are too many, since a prompt holds at most 31: give fewer"),
        ({"hotwords": "x" * 30, "initial_prompt": "y"}, "hotwords: 31 tokens .* at most 30 beside initial_prompt"),
        ({"hotwords": "say <|de|>"}, "hotwords has the special token '<|de|>': give plain text"),
        ({"initial_prompt": [10**6]}, "the token id 1000000 is not in the vocabulary"),
        ({"max_new_tokens": 33}, "max_new_tokens=33 is not allowed: a window has at most 32 new tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(whisper, settings, says):
    with pytest.raises(SpecbeamError, match=says):
        Transcriber.of(Vocabulary.of(whisper), Settings.of(settings))


def test_parameters_of_voice_activity_detection_are_taken():
    given = {"threshold": 1, "neg_threshold": None, "speech_pad_ms": 0, "min_silence_duration_ms": 500}
    assert Settings.of({"vad_parameters": given}).vad_parameters == given


def test_neutral_values_of_other_options_are_taken():
    given = {"patience": 1, "word_timestamps": False, "prefix": None, "chunk_length": 30, "clip_timestamps": "0"}
    assert Settings.of(given) == Settings()
    assert Settings.of({"temperature": 0.3, "suppress_tokens": None}).temperature == (0.3,)
