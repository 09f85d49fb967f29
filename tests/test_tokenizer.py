"""``specbeam.Tokenizer`` gives the ids, texts and prompts that transformers' class gives for the same tokenizer."""

import random

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from specbeam import Tokenizer
from specbeam.checkpoints import open_checkpoint
from tests.checkpoints.test_gguf import tokenizer_of_file
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, in_thorough_mode, reference_model

TEXTS = 2000 if in_thorough_mode() else 200
PARTS = [
    *(" ", "  ", "\n", "\r\n\n", "\t", "a", "The", " the", "don't", "I'LL", "x_1", "3", "1234567", "3.14", "ß", "İ"),
    *(
        "e\u0301",
        "é",
        "日本語",
        "한국어",
        "😀",
        "👩‍👩‍👧",
        "\u200b",
        "\u2028",
        "\x00",
        "\x7f",
        "\ufffd",
        "▁",
        "Ġ",
        "<s>",
        "</s>",
    ),
    *("<bos>", "<eos>", "<unk>", "<|im_start|>", "<0x41>", "...", "!!", "{}();", "  def f(x):", "a" * 40),
]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi 😀 <eos>\n"}]


def odd_texts(seed=0):
    draw = random.Random(seed)
    yield from ("", *PARTS)
    for _ in range(TEXTS):
        yield "".join(draw.choice(PARTS) for _ in range(draw.randint(1, 12)))


def sentencepiece():
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a", "T", "h", "e", "Th", "The"]
    types = [2, 3, 3, *[6] * 256, *[1] * 8]
    return tokenizer_of_file("llama", tokens, scores=[-float(i) for i in range(len(tokens))], token_type=types)


def in_bytes():
    theirs = byte_tokenizer(CHAT_TEMPLATE)
    theirs.backend_tokenizer.add_tokens([AddedToken("the", normalized=False)])
    return Tokenizer(theirs.backend_tokenizer, {"bos_token": "<bos>", "eos_token": "<eos>"}, CHAT_TEMPLATE)


def of_file(name):
    return lambda: open_checkpoint(reference_model(name)).tokenizer


KINDS = {
    "bytes": in_bytes,
    "sentencepiece": sentencepiece,
    "smollm2": pytest.param(of_file("smollm2-135m-instruct"), marks=pytest.mark.models),
    "qwen2.5-coder": pytest.param(of_file("qwen2.5-coder-0.5b-instruct"), marks=pytest.mark.models),
    "gemma3": pytest.param(of_file("gemma3-270m"), marks=[pytest.mark.models, pytest.mark.thorough]),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_ids_and_texts_equal_those_of_transformers(make):
    ours = make()
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=ours.backend_tokenizer,
        chat_template=ours.chat_template,
        clean_up_tokenization_spaces=False,
        **ours.special_tokens_map,
    )
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert sorted(ours.all_special_ids) == sorted(theirs.all_special_ids)
    assert ours.added_tokens_decoder == theirs.added_tokens_decoder
    details = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    for text in odd_texts():
        for special in (True, False):
            got, expected = (one(text, add_special_tokens=special, **details) for one in (ours, theirs))
            assert got.input_ids == expected.input_ids
            assert got["offset_mapping"] == expected["offset_mapping"]
            assert got["special_tokens_mask"] == expected["special_tokens_mask"]
            assert ours.encode(text, add_special_tokens=special) == expected.input_ids
        ids = expected.input_ids
        assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        assert ours.convert_tokens_to_ids(theirs.convert_ids_to_tokens(ids)) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids[1:3], skip_special_tokens=skip) == theirs.decode(ids[1:3], skip_special_tokens=skip)
    several = [*odd_texts(1)][:50]
    assert ours(several).input_ids == theirs(several).input_ids
    if ours.chat_template is not None:
        for how in ({"add_generation_prompt": True}, {}):
            expected = theirs.apply_chat_template(CHAT, tokenize=False, **how)
            assert ours.apply_chat_template(CHAT, tokenize=False, **how) == expected
            assert (
                ours.apply_chat_template(CHAT, **how)["input_ids"]
                == theirs.apply_chat_template(CHAT, **how)["input_ids"]
            )


def test_what_the_vocabulary_lacks():
    plain = in_bytes()
    assert plain.convert_tokens_to_ids(["a", "no such token"]) == [plain.get_vocab()["a"], None]
    assert sentencepiece().convert_tokens_to_ids("no such token") == 0  # <unk>
    assert plain.convert_ids_to_tokens([10_000]) == [None]
    assert plain([]).input_ids == []


def test_without_a_template_no_messages_are_read():
    with pytest.raises(ValueError, match="no chat template"):
        sentencepiece().apply_chat_template(CHAT)
