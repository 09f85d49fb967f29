"""Text decoded token by token, against the decoder of the tokenizers library on the whole text."""

import operator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specbeam.core.tree import Tree
from specbeam.logits.stopping import Stopping
from specbeam.text.detokenizer import MIN_WINDOW_TOKENS, Detokenizer, NewText, TextEnd, TextStream
from tests.conftest import EOS, examples, needs_torch

BYTES = [f"<0x{value:02X}>" for value in (10, 0xE4, 0xBD, 0xA0, 0xFF, 0xF0, 0x9F)]
WORDS = ["▁", "▁the", "▁sea", "a", "b", "é", ".", *BYTES]


def whole_text(decoder, tokens):
    """``decode`` of a tokenizer with this decoder; its last token is a special one, which texts leave out."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0]))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<special>"])

    def decode(ids, skip_special_tokens=True):
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    return decode, tokenizer.get_vocab_size()


def llama():
    to_text = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    return decoders.Sequence([*to_text])


def multi_byte_tokens():
    """Bytes, and tokens that begin or end within a character, as byte-pair merges do."""
    to_unicode = byte_order()
    parts = [bytes([byte]) for byte in b"\xe4\xbd\xa0\xff\xf0\x9f\x98\x80"]
    parts += [b"\xa0\xe4\xbd", b"\xbd\xa0", b"\xe4\xbd", b" the", b"\xff\xe4", b"\xf0\x9f\x98"]
    return [*"abcĠ", *("".join(to_unicode[byte] for byte in part) for part in parts)]


def byte_order():
    """The character that byte-level tokenizers write for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


DECODERS = {
    "byte level": (decoders.ByteLevel(), multi_byte_tokens()),
    "metaspace": (decoders.Metaspace(), [t for t in WORDS if not t.startswith("<")]),
    "word piece": (decoders.WordPiece(), ["the", "sea", "##side", "##s", ".", "'", "s", "n't", "do"]),
    "bpe": (decoders.BPEDecoder(), ["the</w>", "sea", "side</w>", "s</w>", "</w>", "."]),
    "byte fallback": (llama(), WORDS),
}
EXACT = [name for name in DECODERS if name != "byte fallback"]


def ids(name):
    """Token ids that repeat short patterns, so that unusual states last."""
    _, tokens = DECODERS[name]
    pattern = st.lists(st.integers(0, len(tokens)), min_size=1, max_size=5)
    patterns = st.lists(st.builds(operator.mul, pattern, st.integers(1, 15)), max_size=6)
    return patterns.map(lambda repeated: [token for tokens in repeated for token in tokens])


@pytest.mark.parametrize("name", EXACT)
@given(st.data())
def test_pieces_add_up_to_the_whole_text(name, data):
    decode, _ = whole_text(*DECODERS[name])
    tokens = data.draw(ids(name))
    detokenizer, end, text = Detokenizer(decode), TextEnd(), ""
    for n, token in enumerate(tokens, start=1):
        end = detokenizer.push(end, token)
        text += end.added
        assert text + end.unsettled == decode(tokens[:n])
        assert decode(tokens[:n]).endswith(end.text)
    stream = TextStream(NewText(decode))
    assert "".join([stream.push([token]) for token in tokens]) + stream.finish() == decode(tokens) == stream.text


@given(st.text(alphabet="ab é你😀\n", max_size=60))
def test_characters_of_single_bytes_add_up_to_the_whole_text(text):
    """With byte fallback a character that is no token comes as its bytes."""
    decode, _ = whole_text(llama(), ["▁", "a", "b", *(f"<0x{b:02X}>" for b in range(256))])
    tokens = [t for c in text for t in ([" ab".index(c)] if c in " ab" else [3 + b for b in c.encode()])]
    stream = TextStream(NewText(decode))
    assert "".join([stream.push([token]) for token in tokens]) + stream.finish() == decode(tokens)


def after_prompt(decode, prompt, tokens):
    """The text of tokens after a prompt, as vLLM and llama.cpp have it."""
    return decode([*prompt, *tokens])[len(decode(prompt)) :]


def written_out(decode, prompt, tokens, special):
    """The same with each special token written where the text has come to."""
    text = after_prompt(decode, prompt, tokens)
    before = [after_prompt(decode, prompt, tokens[:n]) for n, token in enumerate(tokens) if token == special]
    for at in (len(beginning.rstrip("\ufffd")) for beginning in reversed(before)):
        text = f"{text[:at]}<special>{text[at:]}"
    return text


@pytest.mark.parametrize("name", DECODERS)
@given(st.data())
def test_a_stop_string_is_found_where_the_text_with_special_tokens_first_has_it(name, data):
    decode, size = whole_text(*DECODERS[name])
    whole = partial(written_out, decode, [0], special=size - 1)
    tokens = []
    for token in data.draw(ids(name)):
        if token != size - 1 or not decode(tokens).endswith("\ufffd"):  # special tokens come after whole characters
            tokens.append(token)
    stops = tuple(data.draw(st.lists(st.text(alphabet="ab .s你<", min_size=1, max_size=30), min_size=1, max_size=2)))
    text = whole(tokens).replace("\ufffd", "")
    if text and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(text) - 1))
        stops = (*stops, text[start : start + data.draw(st.integers(1, 40))])
    tree, stop = Tree([0]), Stopping(frozenset(), 10_000, stops, decode)
    for n, token in enumerate(tokens, start=1):
        expected = "stop" if any(s in whole(tokens[:n]) for s in stops) else None
        assert stop(tree, grow(tree, token)) == expected
        if expected:
            break


def grow(tree, token):
    """Add a token to the one sequence of a tree."""
    (node,) = tree.add(tree.tip, token).tolist()
    tree.keep(node)
    return node


def test_a_stop_string_that_ends_inside_a_token_is_found_where_the_window_begins_anew():
    decode, _ = whole_text(*DECODERS["metaspace"])
    tokens = [1] * 13 + [0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    stop_string = decode([*tokens, 0])[58:77]
    tree, stop = Tree([0]), Stopping(frozenset(), 10_000, (stop_string,), decode)
    *_, last = [grow(tree, token) for token in tokens]
    assert stop_string in decode(tokens)
    assert stop(tree, last) == "stop"


@settings(max_examples=examples(0.3))
@given(st.integers(0, 1000))
def test_stop_strings_of_beams_are_found_though_sequences_are_dropped(seed):
    decode, _ = whole_text(*DECODERS["byte level"])
    tree, stop = Tree([0]), Stopping(frozenset(), 10_000, ("a b", "bbb"), decode)
    random, tips = np.random.default_rng(seed), np.array([0])
    for _ in range(60):
        nodes = tree.add(random.choice(tips, 16), random.integers(0, 5, 16))
        expected = [any(s in decode(tree.new_tokens(node)) for s in stop.stop_strings) for node in nodes.tolist()]
        assert stop.ended(tree, nodes).tolist() == expected
        going = nodes[~np.array(expected)]
        if not len(going):
            break
        tips = random.choice(going, 4)
        tree.keep(tips, nodes[expected])


@pytest.mark.parametrize("name", DECODERS)
def test_work_does_not_grow_with_the_text(name):
    """Counts the tokens handed to ``decode``, for text that comes again and again and for lasting invalid bytes."""
    whole, size = whole_text(*DECODERS[name])
    handed = 0

    def decode(ids, **options):
        nonlocal handed
        handed += len(ids)
        return whole(ids, **options)

    _, vocabulary = DECODERS[name]
    invalid = next(i for i, token in enumerate(vocabulary) if "ÿ" in token or "FF" in token or token == ".")
    for pattern in ([*range(size)], [0, 3], [invalid]):
        tree, stop = Tree([0]), Stopping(frozenset(), 10_000, ("never said",), decode)
        stream, work = TextStream(NewText(decode)), []
        for token in (pattern * 400)[:400]:
            handed = 0
            stop(tree, grow(tree, token))
            stream.push([token])
            work.append(handed)
        assert sum(work[200:]) < 1.3 * sum(work[:200]) + 40 * MIN_WINDOW_TOKENS
        if len(pattern) < size:
            assert len(stream.text) > len(decode((pattern * 400)[:400])) - 8  # lasting invalid bytes are streamed, too


@needs_torch
def test_a_tokenizer_that_decodes_in_its_own_way_does_so(lm):
    class Loud(PreTrainedTokenizerFast):
        def _decode(self, token_ids, skip_special_tokens=False, **kwargs):
            return super()._decode(token_ids, skip_special_tokens=skip_special_tokens, **kwargs).upper()

    loud = replace(lm, tokenizer=Loud(tokenizer_object=lm.tokenizer.backend_tokenizer))
    ids = lm.tokenizer("a text").input_ids
    assert (lm.decode(ids), loud.decode(ids)) == ("a text", "A TEXT")
    assert lm.decode([*ids, EOS], skip_special_tokens=False) == "a text<eos>"
