"""A text goes on from its prompt: what decoding both together gives beyond the prompt's own text."""

import pickle
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import ByT5Tokenizer

import specbeam
from specbeam import Options, TokenTrie
from specbeam.recording import events
from specbeam.server.tokens import CompletionLogProbs, Part, TokenTexts
from specbeam.text.detokenizer import MIN_WINDOW_TOKENS, Detokenizer, NewText, TextStream, shared_length
from tests.conftest import byte_tokenizer, random_model
from tests.drafting.test_retokenizing import byte_level, metaspace
from tests.prefix_spaces import KINDS, prefix_space_tokenizer

TEMPLATE = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}{% if add_generation_prompt %}\n{% endif %}"


@pytest.fixture(scope="module")
def tokenizers():
    made = {kind: prefix_space_tokenizer(kind) for kind in KINDS}
    made |= {"bytes": byte_tokenizer(), "byte level": byte_level(300), "unigram": metaspace(150, unigram=True)}
    return made | {"ByT5": ByT5Tokenizer()}


@pytest.fixture(scope="module")
def models(save):
    """A model for each kind of tokenizer that puts a space before its texts."""
    tokenizers = {kind: prefix_space_tokenizer(kind, TEMPLATE) for kind in KINDS}
    size = len(tokenizers[KINDS[0]])
    model = random_model("llama", vocab_size=size, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return {kind: specbeam.load(save(model, tokenizers[kind]), backend="cpu", dtype="float32") for kind in KINDS}


def ids_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False).input_ids


def split_ids(data, tokenizer):
    """The token ids of a text, cut in two anywhere: between words, at special tokens, within a character."""
    special = [token for token in ("<turn>", "<eos>") if token in tokenizer.get_vocab()]
    words = st.sampled_from(["The", " is", " Paris", "is", " ", "\n", ".", "é", "你", "😀", " a", *special])
    ids = tokenizer("".join(data.draw(st.lists(words, max_size=40)))).input_ids
    cut = data.draw(st.integers(0, len(ids)))
    return ids[:cut], ids[cut:]


def whole(tokenizer, ids, skip_special_tokens=True):
    return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", [*KINDS, "bytes", "byte level", "unigram", "ByT5"])
@given(st.data())
def test_prompt_and_text_are_decoded_together(tokenizers, name, data):
    tokenizer = tokenizers[name]
    prompt, new = split_ids(data, tokenizer)
    before, both = whole(tokenizer, prompt), whole(tokenizer, prompt + new)
    expected = both[shared_length((before, both)) :]
    if not before.endswith("\ufffd"):
        assert expected == both[len(before) :]
    new_text = NewText(partial(whole, tokenizer))
    assert new_text.of(new_text.after(prompt), new) == expected
    stream = TextStream(new_text, new_text.after(prompt))
    assert "".join(stream.push([token]) for token in new) + stream.finish() == stream.text == expected


def led_to(prompt, ids):
    """Options of a text that has these tokens."""
    allowed = {"prefix_allowed_tokens_fn": lambda _, given: [ids[len(given) - len(prompt)]]}
    return {"max_new_tokens": len(ids), "eos_token_id": [], **allowed}


PROMPTS = {
    "raw": "The is",
    "messages": [{"role": "user", "content": "The"}],
    "continued": [{"role": "user", "content": "The"}, {"role": "assistant", "content": "Rome is"}],
    "only BOS": [1],
}


@pytest.mark.parametrize("kind", KINDS)
def test_texts_go_on_from_their_prompts(models, kind):
    lm = models[kind]
    new = [lm.tokenizer.convert_tokens_to_ids(piece) for piece in ("▁Paris", "▁in", ".")]
    for name, prompt in PROMPTS.items():
        how = {"raw": name == "raw"}
        ids = specbeam.models.prompts.encode(lm, prompt, **how)
        expected = whole(lm.tokenizer, ids + new)[len(whole(lm.tokenizer, ids)) :]
        assert expected == ("Paris in." if name == "only BOS" else " Paris in.")
        options = how | led_to(ids, new)
        for beams in ({}, {"num_beams": 2}, {"num_beams": 2, "distinct": True}):
            result = specbeam.generate(lm, prompt, **options, **beams, trace=True)
            assert [sequence.text for sequence in result.sequences] == [expected]
            assert "".join(one["text"] for one in result.trace) == expected
            steps = [token["text"] for one in result.trace for step in one["steps"] for token in step]
            assert {*steps} == {" Paris", " in", "."}
            assert "".join(piece.text for piece in specbeam.stream(lm, prompt, **options, **beams)) == expected
        assert [sequence.text for sequence in specbeam.nbest(lm, prompt, num_beams=2, **options)] == [expected]
        stopped = specbeam.generate(lm, prompt, **options, stop_strings=" in")
        assert (stopped.text, stopped.finish_reason) == (expected.removesuffix(" in."), "stop")
        first = specbeam.generate(lm, prompt, **options, stop_strings=" Paris")
        assert first.text == (expected if name == "only BOS" else "")


def test_tokens_of_recordings_have_their_spaces(models):
    for lm in models.values():
        ids = lm.tokenizer("The is\nParis<turn>").input_ids
        prompt = events.begin(lm, ids, Options(), None)["prompt"]
        assert "".join(token["text"] for token in prompt) == "<s> The is\nParis<turn>"


def test_distinct_texts_differ_in_the_space_after_the_prompt(models):
    lm = models["first"]
    outputs = [lm.tokenizer.convert_tokens_to_ids([piece]) for piece in ("▁Paris", "Paris")]
    how = {"constraint": TokenTrie(outputs), "num_beams": 2, "num_return_sequences": 2, "raw": True}
    assert {s.text for s in specbeam.generate(lm, "The is", **how).sequences} == {" Paris", "Paris"}
    assert {s.text for s in specbeam.generate(lm, [1], **how).sequences} == {"Paris"}


@pytest.mark.parametrize("kind", KINDS)
def test_allowed_texts_follow_the_prompt_as_they_are(models, kind):
    lm = models[kind]
    texts = [" Paris", "Paris", "\nParis", " Paris is", "é", "  Rome"]
    how = {"constraint": TokenTrie(texts, lm), "num_beams": 6, "num_return_sequences": 6, "raw": True}
    for prompt in ("The is", "The is\n", "The<turn>"):
        assert {s.text for s in specbeam.generate(lm, prompt, **how).sequences} == {*texts}
    paris = lm.tokenizer.convert_tokens_to_ids("▁Paris")
    assert specbeam.generate(lm, "The is", constraint=TokenTrie([" Paris"], lm), raw=True).token_ids[0] == paris


@pytest.mark.parametrize("name", ["bytes", "byte level", "ByT5"])
def test_other_tokenizers_keep_their_own_tokens_of_allowed_texts(tokenizers, name):
    texts = [" Paris", "Paris", "\n\nParis", " 's", "1", "  "]
    own = [ids_of(tokenizers[name], text) for text in texts]
    assert pickle.dumps(TokenTrie(texts, tokenizers[name])) == pickle.dumps(TokenTrie(own))


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_offsets_say_where_tokens_are_in_the_text(models, kind, data):
    lm = models[kind]
    texts = TokenTexts(lm)
    prompt, new = split_ids(data, lm.tokenizer)
    assume(not whole(lm.tokenizer, prompt).endswith("\ufffd"))
    text = NewText(lm.decode)
    parts = {None: Part(text.of(text.after(prompt), new), new, [0.0] * len(new))}
    if prompt:
        shown = whole(lm.tokenizer, prompt)
        parts[shown] = Part(shown, prompt, [None] * len(prompt)) + parts[None]
    for echoed, part in parts.items():
        made = CompletionLogProbs(lm, texts, prompt, echoed)(part)
        for token, name, offset in zip(part.token_ids, made["tokens"], made["text_offset"], strict=True):
            if "bytes:" not in name and texts.is_shown(token):
                assert part.text[offset : offset + len(name)] == name


def test_offsets_in_a_prompt_with_special_tokens(models):
    lm = models["prepended"]
    prompt = "The<turn>is Paris"
    ids = lm.tokenizer(prompt).input_ids
    made = CompletionLogProbs(lm, TokenTexts(lm), ids, prompt)(Part(prompt, ids, [None] * len(ids)))
    assert made["tokens"] == ["<s>", "The", "<turn>", "is", " Paris"]
    assert made["text_offset"] == [0, 0, 3, 9, 11]


def test_a_long_prompt_is_decoded_at_its_end_only():
    handed = 0

    def decode(ids):
        nonlocal handed
        handed += len(ids)
        return tokenizer.decode(ids)

    tokenizer = prefix_space_tokenizer("prepended")
    end = Detokenizer(decode).after(ids_of(tokenizer, "The é你 is" * 10_000))
    assert end.of_prompt == end.text
    assert handed <= 16 * MIN_WINDOW_TOKENS
