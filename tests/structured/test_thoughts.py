"""Thoughts: they are separated from answers in any pieces, and constraints hold for the answer alone."""

import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken

import specbeam
from specbeam import Choice, JsonSchema, Regex
from specbeam.models.answers import AnswerReader, thought_tokens
from specbeam.structured.after_thoughts import AfterThoughts, begins_in_thoughts
from specbeam.structured.thoughts import (
    GEMMA,
    GRANITE,
    HARMONY,
    HUNYUAN,
    MISTRAL,
    THINK,
    ThoughtReader,
    thinking_variables,
    thoughts_of,
)
from specbeam.structured.tools import format_of
from specbeam.structured.tools.reader import Reader
from tests.conftest import EOS, byte_tokenizer, random_model
from tests.structured.tools.templates import GPT_OSS

FINAL, ASIDE = "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"
FIRST, NEXT = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
CASES = {
    # format: whether the text begins within thoughts, the text, its thoughts and its answer
    "think": (THINK, [
        (None, "<think>\nHm, so.\n</think>\n\nHello\n", "Hm, so.", "Hello\n"),
        (None, "\n<think>a <b </think>c", "a <b", "c"),
        (None, " Hello <think>a</think>", "", " Hello <think>a</think>"),
        (None, "<think>\n\n</think>\n\nHi", "", "Hi"),
        (None, "<think>a\n\nb", "a\n\nb", ""),
        (None, "<thin", "", "<thin"),
        (True, "Hm</think>Hello", "Hm", "Hello"),
        (True, " Hm\n<think>a</thin", "Hm\n<think>a</thin", ""),
        (False, " good <think>", "", " good <think>"),
    ]),
    "hunyuan": (HUNYUAN, [
        (None, "<think>\na\n</think>\n<answer>\nYes </b\n</answer>", "a", "Yes </b"),
        (None, "<think>a</think>Yes</answer>\n", "a", "Yes"),
        (None, "<answer>Yes</answer> no", "", "Yes</answer> no"),
        (False, "<answer>\nYes\n</answer>", "", "Yes"),
    ]),
    "granite": (GRANITE, [(None, "<think>a</think><response>Yes</response>", "a", "Yes")]),
    "mistral": (MISTRAL, [(None, "[THINK]Hm[/THINK]Hello [THIN", "Hm", "Hello [THIN")]),
    "gemma": (GEMMA, [
        (None, "<|channel>thought\nHm<channel|>Hello", "Hm", "Hello"),
        (None, "<|channel>thought\n<channel|>Hello", "", "Hello"),
        (False, "Hello <|chan", "", "Hello <|chan"),
        (None, "<|channel>thought\nHm<channel|>Hello<|channel>thought\n<channel|>", "Hm", "Hello"),
        (False, "Hello<|channel>thought\nHm<channel|> you", "Hm", "Hello you"),
    ]),
    "harmony": (HARMONY, [
        (None, f"{FIRST}a{NEXT}{FIRST}b\n{NEXT}{FINAL}Yes", "a\n\nb", "Yes"),
        (None, f"{FINAL}Yes", "", "Yes"),
        (None, f"{FIRST}a{NEXT}{ASIDE}I look.{NEXT}<|channel|>commentary to=functions.f<|message|>{{}}", "a",
         "I look.<|channel|>commentary to=functions.f<|message|>{}"),
        (None, f"{FIRST}a{NEXT} to=functions.f", "a", "to=functions.f"),
        (None, f"{FIRST}a<|end|>", "a<|end|>", ""),
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_thoughts_are_separated_in_any_pieces(name):
    thought_format, cases = CASES[name]
    for thinks, text, thoughts, answer in cases:
        for length in range(1, len(text) + 1):
            reader = ThoughtReader(thought_format, thinks)
            said = [reader.push(text[at : at + length]) for at in range(0, len(text), length)]
            said.append(reader.push("", is_last=True))
            assert ("".join(one for one, _ in said), "".join(one for _, one in said)) == (thoughts, answer), text
            assert reader.thoughts == thoughts


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", None),
        ("{{ '<think>\n' }}", THINK),
        ("{{ m.content.split('</think>')[-1] }}", THINK),
        ("{{ '<think>' }}{{ m.content.split('<answer>')[-1] }}", HUNYUAN),
        ("Write <think></think> and <response></response>.", GRANITE),
        ("{{ '[THINK]' + block.thinking + '[/THINK]' }}", MISTRAL),
        ("{{ '<|channel>thought\n' }}", GEMMA),
        ("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", HARMONY),
    ],
)
def test_the_template_says_the_format(template, expected):
    assert thoughts_of(template) is expected


@pytest.mark.parametrize(
    ("template", "think", "effort", "variables", "ignored"),
    [
        ("{% if enable_thinking %}", False, None, {"enable_thinking": False}, []),
        ("{% if not thinking %}", True, None, {"thinking": True}, []),
        ("{{ reasoning_effort }}", None, "low", {"reasoning_effort": "low"}, []),
        ("{{ reasoning_effort }}", False, "low", {"reasoning_effort": "low"}, ["enable_thinking"]),
        ("{% if enable_thinking %}", None, "none", {"enable_thinking": False}, []),
        ("{% if enable_thinking %}", None, "high", {"enable_thinking": True}, []),
        ("{% if enable_thinking %}", False, "high", {"enable_thinking": False}, ["reasoning_effort"]),
        ("{{ message.thinking }} thinking {{ 'enable_thinking' }}", True, "low", {},
         ["reasoning_effort", "enable_thinking"]),
        ("", None, None, {}, []),
    ],
)  # fmt: skip
def test_variables_of_the_template(template, think, effort, variables, ignored):
    assert thinking_variables(template, think, effort) == (variables, ignored)


TOKENS = {
    "think": {"<think>": False, "</think>": False},
    "spelled": {},  # the marks are no tokens
    "hunyuan": {},
    "gemma": {"<|channel>": True, "<channel|>": True},
    "harmony": {"<|channel|>": True, "<|message|>": True, "<|start|>": True, "<|end|>": True},
}
FORMATS = {"think": THINK, "spelled": THINK, "hunyuan": HUNYUAN, "gemma": GEMMA, "harmony": HARMONY}


@pytest.fixture(scope="module")
def lms(save):
    made = {}
    for name, tokens in TOKENS.items():
        tokenizer = byte_tokenizer()
        tokens = tokens | {"<turn>": True, "<other>": True}
        tokenizer.add_tokens([AddedToken(text, special=special) for text, special in tokens.items()])
        model = random_model("llama", vocab_size=259 + len(tokens))
        made[name] = specbeam.load(save(model, tokenizer), backend="cpu")
    return made


def ids_of(lm, text):
    return lm.tokenizer(text, add_special_tokens=False).input_ids


def allows(lm, constraint, ids):
    """Whether these tokens may be written, and be all. Masks and steps say the same."""
    state, size = constraint.start, lm.backend.vocab_size
    for token in ids:
        is_in_mask = bool(constraint.mask(state, size)[token // 8] >> token % 8 & 1)
        state = constraint.advance(state, token)
        assert is_in_mask == (state is not None)
        if state is None:
            return False
    return constraint.complete(state)


@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("think", "<think>Hm</think>Hello", 4),
        ("think", "Hello <think>", 0),
        ("think", "<think>é", 3),
        ("spelled", "<think>Hm</think>Hello", 17),
        ("spelled", "<thin", 0),
        ("gemma", "<|channel>thought\nHm<channel|>Hello<|channel>thought\n<channel|>", 22),
        ("harmony", f"{FIRST}a{NEXT}{ASIDE}I look.{NEXT}{FIRST}b{NEXT}{FINAL}Yes", 44),
        ("harmony", f"{FINAL}Yes", 0),
    ],
)
def test_tokens_of_thoughts_are_counted_with_their_marks(lms, name, text, count):
    lm = lms[name]
    assert thought_tokens(lm, ids_of(lm, "Hi"), FORMATS[name], ids_of(lm, text)) == count


def test_the_first_token_of_an_answer_may_be_within_thoughts(lms):
    lm = lms["think"]
    assert thought_tokens(lm, ids_of(lm, "<think>\n"), THINK, ids_of(lm, "Hm</think>Yes")) == 3


def test_a_remark_may_come_before_an_answer_that_allows_it(lms):
    lm = lms["harmony"]
    plain, remarks = (AfterThoughts(SPECS[0], HARMONY, None, True, may).compile(lm) for may in (False, True))
    for text in (f"{ASIDE}I look.{NEXT}1", f"{FIRST}a{NEXT}{ASIDE}I{NEXT}1", f"{ASIDE}I{NEXT}{FIRST}a{NEXT}1"):
        assert allows(lm, remarks, ids_of(lm, text))
        assert not allows(lm, plain, ids_of(lm, text))
    for text in ("1", f"{FIRST}a{NEXT}1"):
        assert allows(lm, remarks, ids_of(lm, text))
    for text in (f"{ASIDE}I look.", f"{ASIDE}I{NEXT}2", "2"):
        assert not allows(lm, remarks, ids_of(lm, text))


@pytest.mark.parametrize("thoughts", ["", "Hm"])
def test_a_remark_before_a_call_is_content_in_any_pieces(thoughts):
    tools = format_of(GPT_OSS)
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    text = f"{FIRST}{thoughts}{NEXT}" * bool(thoughts) + f"{ASIDE}I look.{NEXT}{call}"
    for length in range(1, len(text) + 1):
        reader = AnswerReader(HARMONY, None, Reader(tools, ["f"], 1))
        said = [one for at in range(0, len(text), length) for one in reader.push(text[at : at + length])]
        said += reader.push("", is_last=True)
        assert "".join(one.content for one in said) == reader.content == "I look."
        assert (reader.thoughts, "".join(one.thoughts for one in said)) == (thoughts, thoughts)
        assert [(one.name, one.arguments) for one in reader.calls] == [("f", '{"a": 1}')]


SPECS = [JsonSchema({"enum": [1, {"a": 2}]}), Regex('1|[{]"a": 2[}]'), Choice(("1", '{"a": 2}'))]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_form_holds_for_the_answer_alone(lms, name, spec):
    lm, own = lms[name], FORMATS[name]
    may, must = (AfterThoughts(spec, own, thinks).compile(lm) for thinks in (None, True))
    opening = own.opening if own.must_open else ""
    for answer in ("1", '{"a": 2}'):
        for thoughts in ("", "Hm, 2 <thi\n", "1"):
            text = (
                f"{thoughts}{own.end}\n\n{opening}{answer}"
                if not own.must_open
                else f"{thoughts}{own.end}{opening}{answer}"
            )
            assert allows(lm, must, ids_of(lm, text))
            assert allows(lm, may, ids_of(lm, own.begin + text))
        assert allows(lm, may, ids_of(lm, opening + answer))
    if own.opening and not own.must_open:
        assert allows(lm, must, ids_of(lm, f"a{own.end}\n{own.opening}\n1"))
    behind = f"{own.end}{opening}"
    for text in (
        *(f"{opening}2", f"{own.begin}a{behind}2", f"{own.begin}1", f"{own.begin}a<other>{behind}1"),
        *(f"{own.begin}a{own.end}{' ' * 70}{opening}1", own.begin, ""),
    ):
        assert not allows(lm, may, ids_of(lm, text)), text
    assert AfterThoughts(spec, own, False).compile(lm).complete is not None


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_is_allowed_is_read_as_an_answer_of_the_form(lms, name):
    """A random walk. Marks that are spelled in other tokens than their own count, too."""
    lm, own, rng = lms[name], FORMATS[name], random.Random(3)
    schema = {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    constraint = AfterThoughts(JsonSchema({"type": "object", **schema}), own, None).compile(lm)
    size, num_thoughts = lm.backend.vocab_size, 0
    spelled = [own.begin, own.end, own.opening or own.end]
    for _ in range(40):
        state, tokens = constraint.start, []
        wanted = [token for part in rng.choices([*spelled, "x", "\n"], k=6) for token in _spelled(lm, part, rng)]
        while not constraint.complete(state):
            allowed = np.flatnonzero(np.unpackbits(constraint.mask(state, size), bitorder="little")[:size]).tolist()
            assert EOS not in allowed
            token = wanted.pop(0) if wanted and wanted[0] in allowed else rng.choice(allowed)
            if not wanted and rng.random() < 0.5:
                wanted = _spelled(lm, own.end, rng)
            tokens.append(token)
            state = constraint.advance(state, token)
            assert len(tokens) < 5000
        reader = ThoughtReader(own, None)
        _, answer = reader.push(lm.decode_token(tokens), is_last=True)
        assert set(json.loads(answer)) == {"a"}
        num_thoughts += bool(reader.thoughts)
    assert num_thoughts > 5


def _spelled(lm, text, rng):
    """A text in its own tokens, or one byte after another."""
    return ids_of(lm, text) if rng.random() < 0.5 else [token for byte in text for token in ids_of(lm, byte)]


PROMPTS = {
    "think": {
        "<think>a</think>b<turn>assistant": None,  # the thoughts of another turn
        "<think>a<turn>assistant": None,
        "<turn>assistant<think>\n": True,
        f"<turn>assistant<think>{'hm ' * 20}": True,
        "<turn>assistant<think>\n\n</think>\n\n": False,
        f"<turn>assistant<think>a</think>{'It is ' * 20}": False,
        "Hi": None,
    },
    "spelled": {"<think>\n": True, "<think>\n\n</think>\n": False, "Hi": None},
    "gemma": {
        "<turn>model\n": None,
        "<turn>model\n<|channel>thought\n": True,
        "<turn>model\n<|channel>thought\n<channel|>": False,
    },
    "harmony": {
        f"<|start|>user<|message|>Hi{NEXT}": None,
        f"{NEXT}{FIRST}Hm": True,
        f"{NEXT}{FIRST}Hm{NEXT}": None,
        f"{NEXT}{FIRST}Hm{NEXT}{FINAL}Yes": False,
    },
}


@pytest.mark.parametrize("name", PROMPTS)
def test_where_an_answer_begins_in_thoughts(lms, name):
    lm = lms[name]
    for prompt, expected in PROMPTS[name].items():
        assert begins_in_thoughts(lm, FORMATS[name], ids_of(lm, prompt)) is expected, prompt
        spelled = [token for byte in prompt for token in ids_of(lm, byte)]  # as a user may write it
        if TOKENS[name]:
            assert begins_in_thoughts(lm, FORMATS[name], spelled) is None, prompt
