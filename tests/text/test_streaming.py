"""Streamed pieces add up to the text, never split a character and never show part of a stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam.errors import SpecbeamError
from specbeam.text.detokenizer import NewText, TextStream
from tests.conftest import byte_tokenizer

TOKENIZER = byte_tokenizer()


def decode(ids, skip_special_tokens=True):
    return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)


def ids_of(text):
    return TOKENIZER(text, add_special_tokens=False).input_ids


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=3), max_size=3), st.data())
def test_pieces_of_a_text(text, stops, data):
    ids = ids_of(text)
    expected = text[: min((text.index(s) for s in stops if s in text), default=len(text))]
    stream = TextStream(NewText(decode, stops))
    shown = ""
    while ids:
        n = data.draw(st.integers(1, 3))
        shown += stream.push(ids[:n])
        ids = ids[n:]
        assert expected.startswith(shown)  # whole characters, and nothing of a stop string
    shown += stream.finish()
    assert shown == stream.text == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"stop_strings": ["a", "e"]},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "seed": 3, "num_return_sequences": 2},
        {"draft": "suffix", "num_draft_tokens": 3},
    ],
    ids=["greedy", "sampled", "stop strings", "beams", "samples", "drafted"],
)
def test_stream_is_generate_in_pieces(lm, options):
    """On the backend that gives a text the same bits in any passes."""
    lm = specbeam.load(lm.source, backend="cpu", threads=1)
    options = {"max_new_tokens": 50, "top_logprobs": 2, **options}
    result = specbeam.generate(lm, "hello", **options)
    *pieces, last = specbeam.stream(lm, "hello", **options)
    assert [piece.result for piece in pieces] == [None] * len(pieces)
    assert last.result.sequences == result.sequences
    assert last.result.stats.new_tokens == len(result.token_ids)
    best = result.sequences[0]
    assert "".join(piece.text for piece in [*pieces, last]) == best.text
    for name in ("token_ids", "log_probs", "top_logprobs"):
        assert [one for piece in [*pieces, last] for one in getattr(piece, name)] == getattr(best, name)
    assert len(pieces) > 1 or options.keys() & {"stop_strings", "do_sample"}  # samples may part at once


def led_to(ids):
    """Options of a text that has these tokens."""
    return {"max_new_tokens": len(ids), "prefix_allowed_tokens_fn": lambda _, given: [ids[len(given) - 1]]}


def test_tokens_of_an_unfinished_character_come_before_its_text(lm):
    """A character of three bytes. A text that ends within it ends as the tokenizer decodes it."""
    ids = ids_of("€")
    pieces = [(piece.text, piece.token_ids) for piece in specbeam.stream(lm, [1], **led_to(ids))]
    assert pieces == [("", ids[:1]), ("", ids[1:2]), ("€", ids[2:])]
    *_, last = specbeam.stream(lm, [1], **led_to(ids[:2]))
    assert last.result.text == lm.tokenizer.decode(ids[:2]) == last.text


@pytest.mark.parametrize("streamed", range(9))
def test_a_cancelled_text_ends_before_an_unfinished_character(lm, streamed):
    """The model is led to characters of one, three and four bytes."""
    text = "a€😀b"
    ids = ids_of(text)
    engine = specbeam.Engine(lm)
    request = engine.submit([1], led_to(ids))
    while sum(len(piece.token_ids) for piece in request.pieces) < streamed:
        engine.step()
    request.cancel()
    engine.run()
    result = request.result()
    assert request.pieces[-1].result is result
    assert result.finish_reason == ("cancelled" if streamed < len(ids) else "length")
    assert [token for piece in request.pieces for token in piece.token_ids] == result.token_ids
    assert "".join(piece.text for piece in request.pieces) == result.text
    assert result.text == bytes(text, "utf-8")[: len(result.token_ids)].decode(errors="ignore")
    assert result.token_ids == ids[: len(result.token_ids)]


def test_stream_refuses_bad_input_at_once(lm):
    with pytest.raises(SpecbeamError, match="one prompt"):
        specbeam.stream(lm, ["a", "b"])
    with pytest.raises(SpecbeamError, match="max_new_tokens"):
        specbeam.stream(lm, "a", max_new_tokens=0)
