"""Stop strings: looked for in the new text with special tokens written out, after ``min_new_tokens`` tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import specbeam
from specbeam import hf
from specbeam.text.detokenizer import NewText, TextStream
from tests.conftest import UNUSED, byte_tokenizer

TOKENIZER = byte_tokenizer()
PIECES = {**{token: TOKENIZER.decode([token]) for token in TOKENIZER("abc<u").input_ids}, UNUSED: "<unused>"}
PIECE_IDS = {piece: token for token, piece in PIECES.items()}
STOPS = ["a", "ba", "abab", "<unused>", "b<unused>a", "c<u", "d>", "<unused><unused>", "never"]


def decode(ids, skip_special_tokens=True):
    return TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)


def ended(tokens, stops, min_tokens):
    """Where a text of these pieces ends, written out: the number of tokens, None if it goes on, and what is shown."""
    for n in range(min_tokens + 1, len(tokens) + 1):
        text = "".join(PIECES[token] for token in tokens[:n])
        old = len(text) - len(PIECES[tokens[n - 1]])
        places = [at for s in stops for at in range(len(text)) if text.startswith(s, at) and at + len(s) > old]
        if places:
            begins, shown = 0, ""
            for token in tokens[:n]:
                if token != UNUSED:
                    shown += PIECES[token][: max(0, min(places) - begins)]
                begins += len(PIECES[token])
            return n, shown
    return None, "".join(PIECES[token] for token in tokens if token != UNUSED)


@given(
    tokens=st.lists(st.sampled_from([*PIECES, UNUSED]), max_size=30),
    stops=st.lists(st.sampled_from(STOPS), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_texts_end_before_the_first_stop_string_written_out(tokens, stops, min_tokens):
    count, expected = ended(tokens, stops, min_tokens)
    new_text = NewText(decode, stops, min_tokens)
    stream, streamed = TextStream(new_text), ""
    for n, token in enumerate(tokens, start=1):
        streamed += stream.push([token])
        assert expected.startswith(streamed)
        assert stream.stopped == (count is not None and n >= count)
    assert streamed + stream.finish() == stream.text == expected


def test_a_special_token_that_ends_a_text_comes_after_an_incomplete_character():
    incomplete, *_ = TOKENIZER("é").input_ids
    new_text = NewText(decode, ["<unused>"])
    assert new_text.of(new_text.after([]), [PIECE_IDS["a"], incomplete, UNUSED]) == "a\ufffd"


@pytest.fixture(scope="module")
def talks(tiny):
    """A model of transformers, and options under which it says two letters and a special token."""
    few = {*TOKENIZER("ab").input_ids, UNUSED}
    return tiny("llama", initializer_range=0.25)[0], {
        "suppress_tokens": [t for t in range(259) if t not in few],
        "no_repeat_ngram_size": 2,
    }


@pytest.mark.parametrize("min_new_tokens", [0, 5])
def test_hf_generate_ends_where_transformers_does(talks, min_new_tokens):
    """At a special token, where a stop string begins in the prompt, and before ``min_new_tokens``."""
    model, few = talks
    prompt = torch.tensor([TOKENIZER("ba").input_ids])
    how = {"max_new_tokens": 6, "min_new_tokens": min_new_tokens, "tokenizer": TOKENIZER}
    how |= {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "input_ids": prompt, **few}
    plain = model.generate(**how)[0].tolist()
    for stop, length in (("<unused>", None), ("a" + TOKENIZER.decode(plain[2]), 3)):
        expected = model.generate(stop_strings=[stop], **how)
        assert expected.shape[1] == (length or plain.index(UNUSED) + 1)
        got = model.generate(stop_strings=[stop], custom_generate=hf.generate, **how)
        assert got.tolist() == expected.tolist()


METHODS = [
    {}, {"draft": "ngram", "num_draft_tokens": 3}, {"temperature": 1.0, "seed": 4}, {"num_beams": 2},
    {"num_beams": 2, "distinct": True, "draft": "suffix"},
]  # fmt: skip


@pytest.mark.parametrize("options", METHODS, ids=str)
@pytest.mark.parametrize("stop", ["a<unused>", "<unused>", "ab", "bba"])
def test_every_method_ends_texts_there(lm, options, stop):
    """The last token is the one that brings the stop string, and the shown text ends before it."""
    tokens = [PIECE_IDS[piece] for piece in ("b", "a", "<unused>", "b", "a", "<unused>", "b")]
    allowed = {"prefix_allowed_tokens_fn": lambda _, ids: [tokens[len(ids) - 2]], "max_new_tokens": 7}
    for min_new_tokens in (0, 3):
        how = {**options, **allowed, "stop_strings": ["never", stop], "min_new_tokens": min_new_tokens}
        *pieces, last = specbeam.stream(lm, TOKENIZER("ba").input_ids, **how)
        count, text = ended(tokens, [stop], min_new_tokens)
        assert last.result.token_ids == tokens[:count]
        assert "".join(piece.text for piece in [*pieces, last]) == last.result.text == text
        assert last.result.finish_reason == ("length" if count is None else "stop")


def test_distinct_texts_are_told_apart_by_what_precedes_the_stop_string(lm):
    a, b = TOKENIZER("ab").input_ids
    outputs = [[a, UNUSED], [a, a, UNUSED], [b, a, UNUSED]]
    how = {"constraint": specbeam.TokenTrie(outputs), "num_beams": 3, "num_return_sequences": 3}
    sequences = specbeam.generate(lm, "ba", stop_strings="a<unused>", **how).sequences
    assert sorted(s.text for s in sequences) == ["", "a", "b"]
