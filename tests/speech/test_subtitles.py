"""Files equal openai-whisper's. Recorded with openai-whisper 20250625."""

import json
from pathlib import Path

import pytest

from specbeam import SpecbeamError
from specbeam.options.names import TRANSCRIPT_FORMATS
from specbeam.speech import Segment, Transcript
from specbeam.speech.subtitles import PLAIN, STREAMED, Layout, document, written
from specbeam.speech.transcript import Word

RECORDED = json.loads(Path(__file__).with_name("subtitles.json").read_text(encoding="utf-8"))
MEASURES = {"avg_logprob": -0.5, "no_speech_prob": 0.1, "compression_ratio": 1.2, "temperature": 0.0}
SEGMENTS = [Segment(start, end, text, tokens=[5, 6], **MEASURES) for start, end, text in RECORDED["segments"]]
TRANSCRIPT = Transcript("en", 0.9, 400_000.0, SEGMENTS)


@pytest.mark.parametrize("form", RECORDED["written"])
def test_files_equal_openai_whispers(form):
    assert written(TRANSCRIPT, form) == RECORDED["written"][form]


@pytest.mark.parametrize(("options", "files"), RECORDED["laid_out"], ids=lambda given: "-".join(given))
def test_subtitles_of_words_equal_openai_whispers(options, files):
    segments = []
    for words in RECORDED["words"]:
        own = [Word(word, start, end, 0.5) for word, start, end in words]
        text = "".join(word.word for word in own)
        segments.append(Segment(own[0].start, own[-1].end, text, tokens=[5], **MEASURES, words=own))
    for form, expected in files.items():
        assert written(Transcript("en", 0.9, 4000.0, segments), form, Layout(**options)) == expected


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_line_width": 0}, "max_line_width=0 is not allowed: give at least 1"),
        ({"max_line_count": 2}, "max_line_count=2 needs max_line_width"),
        ({"max_words_per_line": 2, "max_line_width": 9}, "do not go together"),
    ],
)
def test_layouts_that_cannot_be_honoured_are_refused(options, says):
    with pytest.raises(SpecbeamError, match=says):
        Layout(**options)


def test_json_has_the_fields_of_openai_whisper():
    read = json.loads(written(TRANSCRIPT, "json"))
    assert read == json.loads(json.dumps(document(TRANSCRIPT)))
    assert read["language"] == "en"
    assert read["segments"][3] == {
        **{"id": 3, "start": 3599.9994, "end": 3600.0, "text": " Ünï 你好", "tokens": [5, 6], "rejected": []},
        **MEASURES,
    }


def test_pieces_come_with_their_segments():
    for form, pieces in STREAMED.items():
        taken = []
        written = pieces((taken.append(segment) or segment for segment in SEGMENTS), PLAIN)
        for piece in written:
            assert piece.endswith("\n")
        assert len(taken) == len(SEGMENTS)
        assert form in TRANSCRIPT_FORMATS
    assert {*TRANSCRIPT_FORMATS} == {*STREAMED, "json"}


def test_a_file_without_speech():
    empty = Transcript(None, 0.0, 3.0)
    heads = {"txt": "", "srt": "", "vtt": "WEBVTT\n\n", "tsv": "start\tend\ttext\n"}
    assert {form: written(empty, form) for form in STREAMED} == heads
    assert json.loads(written(empty, "json"))["segments"] == []
