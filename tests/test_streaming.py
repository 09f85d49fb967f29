"""Streamed pieces add up to the text, never split a character and never show part of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam.errors import SpecbeamError
from specbeam.streaming import TextStream
from tests.conftest import byte_tokenizer

TOKENIZER = byte_tokenizer()


def decode(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False).input_ids


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3), st.data())
def test_pieces_of_a_text(text, stops, data):
    ids = ids_of(text)
    expected = text[: min((text.index(s) for s in stops if s in text), default=len(text))]
    stream = TextStream(decode, stops)
    shown = ""
    while ids:
        n = data.draw(st.integers(1, 3))
        shown += stream.push(ids[:n])
        ids = ids[n:]
        assert expected.startswith(shown)  # whole characters, and nothing of a stop string
    shown += stream.finish()
    assert shown == stream.text == expected


@given(st.lists(st.integers(0, 258), max_size=30))
def test_any_bytes_end_as_the_tokenizer_decodes_them(ids):
    stream = TextStream(decode)
    shown = "".join([stream.push([i]) for i in ids]) + stream.finish()
    assert shown == decode(ids)


def test_stream_is_generate_in_pieces(lm):
    for prompt, options in (("hello", {}), ("x", {"temperature": 1.0, "seed": 3}), ("y", {"stop_strings": ["a", "e"]})):
        pieces = [p.text for p in specbeam.stream(lm, prompt, max_new_tokens=50, **options)]
        assert "".join(pieces) == specbeam.generate(lm, prompt, max_new_tokens=50, **options).text
        assert len(pieces) > 1 or options.get("stop_strings")


def test_stream_refuses_bad_input_at_once(lm):
    with pytest.raises(SpecbeamError, match="one prompt"):
        specbeam.stream(lm, ["a", "b"])
    with pytest.raises(SpecbeamError, match="max_new_tokens"):
        specbeam.stream(lm, "a", max_new_tokens=0)
