"""``specbeam.Tokenizer`` gives the ids, texts and prompts that transformers' class gives for the same tokenizer."""

import random
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from specbeam import Tokenizer
from specbeam.checkpoints import open_checkpoint
from tests.checkpoints.test_gguf import tokenizer_of_file
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, in_thorough_mode, of_transformers, reference_model

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


SHOWN = "{{ messages }}|{{ tools }}|{{ documents }}|{{ bos_token }}|{{ mode }}|{{ tools | tojson }}"
TEMPLATES = {
    "as it is": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}{{ m }}{% endfor %}" + SHOWN,
    "trimmed": "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "parts": "{% for m in messages %}{% for part in m.content %}{{ part.text }};{% endfor %}{% endfor %}",
    "calls": "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{% set given = call.function.arguments %}"
    "{{ given if given is string else given | tojson }}{% endfor %}{{ 'none' if m.content is none }}{% endfor %}",
    "named": {
        "default": "{% for m in messages %}{{ m.content }}{% endfor %}",
        "tool_use": "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
    },
}
TEXT = st.sampled_from(["", "a", " Hi ü\n", "\n\n", "<bos>x", "{{ x }}", "none"])
SCALARS = st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats(-2, 2) | TEXT
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2), max_leaves=4
)


class Mode(StrEnum):
    fast = "f"


@dataclass
class Note:
    text: str


RICH = st.sampled_from([np.int64(3), np.bool_(False), np.float32(0.5), Mode.fast, Note("n"), np.zeros(2), object])
ARGUMENTS = st.dictionaries(TEXT, JSON | RICH, max_size=2) | TEXT | st.none()
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": TEXT, "arguments": ARGUMENTS})}, optional={"id": TEXT}
    ),
    max_size=2,
)
PARTS_OF_MESSAGE = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "image"])}, optional={"text": TEXT, "image": RICH}),
    max_size=2,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT | st.none() | PARTS_OF_MESSAGE},
    optional={"tool_calls": CALLS | st.none(), "reasoning": TEXT | st.none(), "thinking": TEXT, "name": JSON},
)
CONVERSATION = st.lists(MESSAGE, min_size=1, max_size=3)
HOW = st.fixed_dictionaries(
    {},
    optional={
        "tools": st.lists(st.dictionaries(TEXT, JSON, max_size=2), max_size=2) | st.none(),
        "documents": st.lists(st.fixed_dictionaries({"title": TEXT, "text": TEXT}), max_size=2) | st.none(),
        "chat_template": st.sampled_from([None, "tool_use", "{{ messages[0].content }}!"]),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.sampled_from([True, False, "content", "reasoning_content", "thinking"]),
        "tokenize": st.booleans(),
        "return_dict": st.booleans(),
        "tokenizer_kwargs": st.sampled_from([None, {"return_special_tokens_mask": True}]),
        "padding": st.just(False),
        "bos_token": TEXT,
        "mode": JSON | RICH,
    },
)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@given(conversation=CONVERSATION | st.lists(CONVERSATION, min_size=1, max_size=2), how=HOW)
def test_prompts_equal_those_of_transformers(template, conversation, how):
    tokenizer = byte_tokenizer()
    ours = Tokenizer(tokenizer.backend_tokenizer, {"bos_token": "<bos>", "eos_token": "<eos>"}, template)
    try:
        expected = of_transformers(ours).apply_chat_template(conversation, **how)
    except Exception:
        with pytest.raises(ValueError, match=r"."):
            ours.apply_chat_template(conversation, **how)
        return
    got = ours.apply_chat_template(conversation, **how)
    if isinstance(got, dict):
        got, expected = dict(got), {name: expected[name] for name in expected if name != "token_type_ids"}
    assert got == expected


@pytest.mark.parametrize(
    ("conversation", "how", "says"),
    [
        (CHAT, {"padding": True}, "padding=True"),
        (CHAT, {"return_tensors": "pt"}, "return_tensors='pt'"),
        (CHAT, {"max_length": 5, "truncation": True}, "truncation=True"),
        (CHAT, {"return_assistant_tokens_mask": True}, "return_assistant_tokens_mask=True"),
        (CHAT, {"sanitize_control_tokens": True}, "sanitize_control_tokens=True"),
        (CHAT, {"tools": [odd_texts]}, "odd_texts .*: tools are JSON schemas"),
        (CHAT, {"documents": ["a"]}, "'a': .* documents dictionaries"),
        (CHAT, {"mode": (1, 2)}, r"the tuple \(1, 2\)"),
        (CHAT, {"mode": {1: 2}}, "1 as a key"),
        (CHAT, {"messages": CHAT}, "messages is no variable"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "both true"),
        ([], {}, r"conversation=\[\]"),
        (CHAT[0], {}, "a list of messages"),
        ("Hi", {}, "conversation='Hi'"),
        ([CHAT, ["Hi"]], {}, "a dictionary, and not 'Hi'"),
    ],
)
def test_what_differs_from_transformers_is_refused_by_name(conversation, how, says):
    with pytest.raises(ValueError, match=says):
        in_bytes().apply_chat_template(conversation, **how)


@pytest.mark.parametrize("make", [in_bytes, sentencepiece])
def test_token_ids_in_any_form_have_the_texts_of_transformers(make):
    ours = make()
    theirs = of_transformers(ours)
    forms = [72, np.int64(72), True, [72, 258], (72, 73), np.array([72, 73]), [np.int32(72), 73], [], [[72], []]]
    forms += [[np.array([72]), np.array([73, 74])], np.array([[72], [73]]), ours("Hi"), np.uint8([72])]
    forms += [torch.tensor(72), torch.tensor([72, 73]), [torch.tensor(72)]]
    for ids in forms:
        for how in ({}, {"skip_special_tokens": True}, {"clean_up_tokenization_spaces": False}):
            assert ours.decode(ids, **how) == theirs.decode(ids, **how)
    for ids in ("72", ["72"], [72.0], None, [None]):
        for one in (ours, theirs):
            with pytest.raises((TypeError, ValueError, AttributeError)):
                one.decode(ids)


def test_spaces_are_cleaned_up_nowhere():
    """transformers does not either with BPE tokenizers."""
    ids = in_bytes()("a , b .").input_ids
    assert in_bytes().decode(ids, clean_up_tokenization_spaces=True) == "a , b ."
    words = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")), {})
    with pytest.raises(ValueError, match="clean_up_tokenization_spaces=True is not supported"):
        words.decode([0], clean_up_tokenization_spaces=True)
