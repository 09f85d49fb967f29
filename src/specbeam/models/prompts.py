"""Prompts: from text, chat messages or token ids to the token ids that the model reads."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.files import refusing
from specbeam.checkpoints.tokenizers.gguf_vocabulary import NAMES
from specbeam.errors import PromptTooLong, SpecbeamError
from specbeam.models.model import LanguageModel
from specbeam.system.machine import return_free_memory
from specbeam.system.numbers import is_integer
from specbeam.text import chat_templates
from specbeam.text.control_tokens import ControlTokens
from specbeam.text.detokenizer import shared_length

Message = dict[str, Any]
"""A chat message: a dictionary with the text "role" and the "content", a text or a list of parts.

A part is ``{"type": "text", "text": ...}``. A line break joins the parts, as in vLLM and llama.cpp. A chat template
that reads only lists of parts gets the text as one part (:mod:`specbeam.text.chat_templates`).
"""
CHARACTERS_PER_TOKEN = 8
"""A text with fewer characters for each token of the limit is tokenized as a whole."""
MAX_TORN_TOKENS = 1024
"""More tokens than the pieces of one token or word have, where a beginning of the text ends within it."""
GROWTH = 4
"""The factor by which the next beginning of a text is longer."""
MISTRAL = ("[SUFFIX]", "[PREFIX]")
"""Mistral's models read the suffix first, and have no third token."""


class SupportsToList(Protocol):
    """A tensor of PyTorch, which need not be installed."""

    def tolist(self) -> Any: ...


Prompt = str | Sequence[int] | Sequence[Message] | NDArray[np.integer[Any]] | SupportsToList
"""Text, token ids (a list, or a vector of NumPy or PyTorch), or chat messages."""

PLACE_OF_ANSWER = "<PLACE OF THE ANSWER>"
"""A mark at the end of the message to be continued. It shows that end in the rendered template."""

ALSO_NEW = ", which must hold at least one new token too"
"""What messages say of a context that a prompt may not fill."""
MANY_CHARACTERS = 1 << 18
"""Tokenizing a text with more characters takes hundreds of megabytes for a time."""


@dataclass(frozen=True)
class Rendering:
    """How a chat template renders messages, with the names of transformers and vLLM.

    Attributes:
        add_generation_prompt: the assistant begins a new message. None: unless the last message is continued.
        continue_final_message: the last message is continued, and not closed. None: if it is the assistant's and
            ``add_generation_prompt`` is None, too.
        chat_template_kwargs: further variables of the template.
        tools: the variable by which the template gets tools, with them.

    Raises:
        SpecbeamError: the last message cannot be continued and followed by a new one.
    """

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Mapping[str, str | float | None] = field(default_factory=dict)
    tools: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise SpecbeamError(
                "continue_final_message and add_generation_prompt are both true, but a message is continued or a new "
                "one begins: leave one out"
            )


DEFAULT_RENDERING = Rendering()


def as_list(given: Any) -> Any:
    """A list of Python's own values, whatever holds them: a tuple, a generator, an array, or a column of a table.

    A column may be of pandas, polars, pyarrow or datasets. What is no list, such as a text, is returned as it is.
    """
    if isinstance(given, list | str | bytes | bytearray | Mapping | AbstractSet):
        return given
    if hasattr(given, "columns") or hasattr(given, "column_names"):
        raise SpecbeamError(f"{type(given).__name__} is a table: give one of its columns, such as table['text']")
    for name in ("tolist", "to_pylist"):  # iteration would yield NumPy's and pyarrow's values
        if hasattr(given, name):
            return getattr(given, name)()
    return [*given] if isinstance(given, Iterable) else given


def is_batch(prompt: Any) -> bool:
    """Whether what :func:`as_list` returned is a list of prompts, not one prompt."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    return isinstance(first, Iterable) and not isinstance(first, Mapping)


def encode(
    lm: LanguageModel,
    prompt: Any,
    *,
    system: str | None = None,
    raw: bool = False,
    max_tokens: int | None = None,
    control_tokens: ControlTokens | None = None,
    rendering: Rendering = DEFAULT_RENDERING,
) -> list[int]:
    """Token ids of one prompt.

    Args:
        prompt: text, a list of chat messages (dictionaries with "role" and "content"), or token ids. A chat model gets
            text as a user's message, other models get it unchanged. Token ids are used unchanged.
            A message of the assistant at the end is continued: the chat template does not close it. If it is empty,
            the assistant begins its answer.
        system: a system message to put first. It is refused beside one in the messages.
        raw: use no chat template. Messages and the system message are joined by blank lines.
        max_tokens: the maximum number of tokens that it may have. Of a text that has far more, not all is tokenized.
        control_tokens: of the model's tokenizer, to read those in messages as text. Without it they are control tokens.
            In strings of ``chat_template_kwargs`` they are text, too.
        rendering: how the chat template renders messages.

    Raises:
        PromptTooLong: it has more than ``max_tokens`` tokens.
        SpecbeamError: an empty prompt, one of another kind, messages the chat template refuses, or two sources of the
            system message.
    """
    messages = check(lm, prompt, system=system)
    ids: list[int] = (
        messages
        if isinstance(messages[0], int)
        else _encode_text(lm, messages, raw, max_tokens, control_tokens, rendering)
    )
    if max_tokens is not None and len(ids) > max_tokens:
        raise too_long(lm, f"{len(ids):,}", max_tokens)
    return ids


def encode_answers(
    lm: LanguageModel, prompt: Any, answers: Sequence[str], *, system: str | None = None, raw: bool = False
) -> tuple[list[int], list[list[int]]]:
    """Token ids of a prompt and of texts that follow it. Prompt and text are tokenized together, as one text.

    So no token boundary is put where the tokenizer would put none: a space at the end of the prompt belongs to the
    text's first token. After a chat template the text begins the answer. Otherwise, also where it continues an answer,
    it follows a space (:func:`space_before`).

    Args:
        prompt: text or messages; None: the texts follow nothing. Then there is no template, and they come after the
            token that begins or, in models without one, ends texts.
        answers: the texts, none of them empty.

    Returns:
        The tokens that all of these texts begin with, at least one, and the other tokens of each.

    Raises:
        SpecbeamError: as :func:`encode`, and for a prompt of token ids, an empty text, and one that is too long.
    """
    if "" in answers:
        raise SpecbeamError("a text to be scored is empty: give at least one character")
    if lm.tokenizer is None:
        raise SpecbeamError(f"{lm.source} has no tokenizer, which texts need: load the model with one")
    if lm.backend.start_token_ids is not None:  # the texts stand in the decoder, and the prompt in the encoder
        if prompt is None:
            raise SpecbeamError(f"{lm.source} is an encoder-decoder model: a text to be scored needs a prompt")
        context = encode(lm, prompt, system=system, raw=raw, max_tokens=max_prompt_length(lm, False))
        return context, _encode_all(lm, answers, add_special_tokens=False)
    first: list[int] = []
    if prompt is None:
        first, texts, templated = [first_token(lm)], ["", *answers], False
    else:
        messages = check(lm, prompt, system=system)
        if isinstance(messages[0], int):
            raise SpecbeamError("texts follow a text or messages, not token ids: give the prompt as text")
        encode(lm, messages, raw=raw, max_tokens=max_prompt_length(lm, False))  # whatever is wrong with it is named
        templated = not raw and lm.has_chat_template
        joined = "\n\n".join(message["content"] for message in messages)
        before = render(lm.tokenizer, messages) if templated else joined
        is_fresh = templated and (messages[-1]["role"] != "assistant" or not messages[-1]["content"])
        texts = [before, *(f"{before}{'' if is_fresh else space_before(before, answer)}{answer}" for answer in answers)]
    own, *wholes = _encode_all(lm, texts, add_special_tokens=not templated)
    if own[:1] != first and prompt is None:
        own, wholes = [*first, *own], [[*first, *ids] for ids in wholes]
    length = shared_length([own, *wholes])
    if not length:
        raise SpecbeamError("the prompt has no token that stays when a text follows it: give a longer prompt")
    return own[:length], [ids[length:] for ids in wholes]


def first_token(lm: LanguageModel) -> int:
    """The token before a text that follows nothing: the one that begins texts, or the one that ends them."""
    for token in (lm.tokenizer.bos_token_id, lm.tokenizer.eos_token_id, *sorted(lm.eos_token_ids)):
        if token is not None:
            return int(token)
    raise SpecbeamError(f"{lm.source} has neither a BOS nor an EOS token to score a text without a context")


def space_before(prompt: str, answer: str) -> str:
    """The space between a prompt and the text that follows it, unless one of them, or its script, makes it needless.

    That is after white space, an opening bracket or quotation mark, or the wide punctuation of Chinese and Japanese,
    and before white space.
    """
    last = prompt[-1:]
    is_punctuation = unicodedata.category(last or " ").startswith("P")
    is_wide = is_punctuation and unicodedata.east_asian_width(last) in "WF"
    opens = unicodedata.category(last or " ") in ("Ps", "Pi") or last in "\"'`"
    return "" if last.isspace() or answer[:1].isspace() or opens or is_wide else " "


def _encode_all(lm: LanguageModel, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
    """Token ids of texts, tokenized side by side."""
    for text in texts:
        check_unicode(text)
    with refusing("the model's tokenizer cannot read this text"):
        ids: list[list[int]] = lm.tokenizer([*texts], add_special_tokens=add_special_tokens, verbose=False).input_ids
    return ids


def _encode_text(
    lm: LanguageModel,
    messages: list[Message],
    raw: bool,
    max_tokens: int | None,
    control_tokens: ControlTokens | None,
    rendering: Rendering,
) -> list[int]:
    if lm.tokenizer is None:
        raise SpecbeamError(f"{lm.source} has no tokenizer: give token ids, or a model with its tokenizer")
    templated = not raw and lm.has_chat_template
    tokenizer, hidden = lm.tokenizer, None
    given = [*messages, dict(rendering.chat_template_kwargs), dict(rendering.tools)]
    if control_tokens is not None and templated and (hidden := control_tokens.hide(given)) is not None:
        (*messages, variables, tools), stand_ins = hidden
        text = render(lm.tokenizer, messages, replace(rendering, chat_template_kwargs=variables, tools=tools))
        tokenizer, text = control_tokens.tokenizer, control_tokens.show(text, stand_ins)
    else:
        joined = "\n\n".join(message["content"] for message in messages)
        text = render(lm.tokenizer, messages, rendering) if templated else joined
    if max_tokens is not None:
        check_unicode(text)
        min_tokens = min_tokens_of(text, max_tokens, lambda beginning: len(token_ids(tokenizer, beginning)))
        if min_tokens > max_tokens:
            raise too_long(lm, f"at least {min_tokens:,}", max_tokens)
    ids = token_ids(tokenizer, text, add_special_tokens=not templated)
    if control_tokens is not None and hidden is not None:
        ids = control_tokens.ids(ids)
    if not ids:
        raise SpecbeamError("the prompt has no tokens: give at least one")
    for i in ids:
        if i >= lm.backend.vocab_size:
            raise SpecbeamError(
                f"the prompt has the token {lm.decode_token([i])!r}, whose id {i} is not in the model's vocabulary of "
                f"{lm.backend.vocab_size}: leave it out"
            )
    return ids


def check(lm: LanguageModel, prompt: Any, *, system: str | None = None) -> list[Any]:
    """A prompt as token ids or as messages, after all checks that need no tokenizer. See :func:`encode`."""
    prompt = as_list(prompt)
    if not isinstance(prompt, str | list):
        raise SpecbeamError(f"a prompt is text, a list of messages or a list of token ids, not {type(prompt).__name__}")
    if not len(prompt):
        raise SpecbeamError("the prompt is empty: give at least one character, message or token id")
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif all(isinstance(part, dict) for part in prompt):
        messages = _messages(prompt)
    elif all(map(is_integer, prompt)):
        if system is not None:
            says = "system= goes with text or messages: a prompt of token ids is taken as it is"
            raise SpecbeamError(says, option="system")
        return _in_vocabulary(lm, prompt)
    else:
        raise SpecbeamError("a prompt is text, a list of messages or a list of token ids; this list mixes kinds")
    if system is not None:
        if any(message["role"] == "system" for message in messages):
            says = "the messages have a system message, and system= gives another one: leave one out"
            raise SpecbeamError(says, option="system")
        messages = [*_messages([{"role": "system", "content": system}]), *messages]
    return messages


def last_message(lm: LanguageModel, prompt: Any, *, raw: bool = False) -> str | None:
    """The last message of a prompt, without the chat template around it; None for a prompt that has no template."""
    if raw or not lm.has_chat_template:
        return None
    last = check(lm, prompt)[-1]
    return last["content"] if isinstance(last, dict) else None


def show_prompt(lm: LanguageModel, prompt: Any, *, system: str | None = None, raw: bool = False) -> str:
    """A prompt as the model reads it, with special tokens written out. Arguments and errors as for :func:`encode`."""
    return lm.decode(encode(lm, prompt, system=system, raw=raw), skip_special_tokens=False)


def render(tokenizer: Any, messages: list[Message], rendering: Rendering = DEFAULT_RENDERING) -> str:
    """Messages as text by the tokenizer's chat template, up to the place where the model should answer.

    If the assistant has the last message, that place is the end of its content. Space at its end stays, also where the
    template trims messages. An empty last message of the assistant is an answer that it has not begun.
    ``rendering`` may say otherwise.
    """
    adds, begun = rendering.add_generation_prompt, rendering.continue_final_message
    is_free = adds is None and begun is None
    if is_free and messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
        messages = messages[:-1]
        if not messages:
            raise SpecbeamError("the messages are empty: give at least one with text")
    *earlier, last = messages
    if begun is None:
        begun = is_free and last["role"] == "assistant"
    if begun:
        messages = [*earlier, last | {"content": last["content"] + PLACE_OF_ANSWER}]
    adds = not begun if adds is None else adds
    variables = {**rendering.chat_template_kwargs, **rendering.tools}
    text = apply_chat_template(tokenizer, messages, **variables, add_generation_prompt=adds)
    if begun:
        text, found, _ = text.rpartition(PLACE_OF_ANSWER)
        if not found or not text.endswith(last["content"].lstrip()):
            raise SpecbeamError(
                f"the model's chat template changes the {last['role']}'s message at the end, so that it cannot be "
                "continued: end with a user's message, or use raw=True"
            )
    return text


def apply_chat_template(tokenizer: Any, messages: list[Message], /, **how: Any) -> str:
    """The text of ``tokenizer.apply_chat_template``, rendered with limits (:mod:`specbeam.text.chat_templates`).

    Args:
        how: ``add_generation_prompt`` or ``continue_final_message``, and further variables of the template.

    Raises:
        SpecbeamError: the template refuses the messages, or exceeds a limit.
    """
    with refusing("the model's chat template refuses these messages"):
        template = tokenizer.get_chat_template(tools=how.get("tools"))
        return chat_templates.render(template, messages, **tokenizer.special_tokens_map, **how)


def token_ids(tokenizer: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """The token ids of a text. Raises SpecbeamError as :func:`tokenize`."""
    ids: list[int] = tokenize(tokenizer, text, add_special_tokens).input_ids
    if len(text) > MANY_CHARACTERS:
        return_free_memory()
    return ids


def tokenize(tokenizer: Any, text: str, add_special_tokens: bool, **details: bool) -> Any:
    """The tokenizer's encoding of a text: its ``input_ids``, and the details that are asked for.

    Raises:
        SpecbeamError: the text is not valid Unicode, or the tokenizer is damaged.
    """
    check_unicode(text)
    with refusing("the model's tokenizer cannot read this text"):
        return tokenizer(text, add_special_tokens=add_special_tokens, verbose=False, **details)


def check_unicode(text: str) -> None:
    """Raises SpecbeamError if a text has half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecbeamError(
            f"the prompt has half a surrogate pair ({text[error.start]!r}), which is no character: give valid Unicode"
        ) from error


def max_prompt_length(lm: LanguageModel, writes: bool = True) -> int:
    """The maximum length of a prompt: the context must hold at least one new token too, except behind an encoder.

    Args:
        writes: whether there are new tokens.
    """
    return lm.backend.context_length - (writes and lm.backend.start_token_ids is None)


def too_long(lm: LanguageModel, tokens: str, max_tokens: int) -> PromptTooLong:
    """The error for a prompt with more tokens than there is room for."""
    context = lm.backend.context_length
    too = ALSO_NEW if max_tokens < context else ""
    message = f"the prompt has {tokens} tokens, but {lm.source} has a context of {context:,}{too}: shorten the prompt"
    return PromptTooLong(message, tokens)


def _messages(prompt: Sequence[Message]) -> list[Message]:
    """The messages, with the content of each as one text."""
    return [message | {"content": _content(message)} for message in prompt]


def _content(message: Message) -> str:
    content = message.get("content")
    texts: list[Any] = [_text(part) for part in content] if isinstance(content, list) else [content]
    if not isinstance(message.get("role"), str) or not all(isinstance(text, str) for text in texts):
        raise SpecbeamError(f'a chat message needs the texts "role" and "content": {message!r}')
    return "\n".join(texts)


def _text(part: Any) -> Any:
    """The text of a part of a message; None if it is no part."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in (None, "text"):
        raise SpecbeamError(f"a chat message has a part of type {kind!r}, but specbeam reads text only: remove it")
    return part.get("text") if kind else None


def _in_vocabulary(lm: LanguageModel, ids: Sequence[int]) -> list[int]:
    size = lm.backend.vocab_size
    for token in ids:
        if not 0 <= token < size:
            raise SpecbeamError(f"token id {token} is not in the model's vocabulary of {size}")
    return [int(token) for token in ids]


def min_tokens_of(text: str, max_tokens: int, count: Callable[[str], int]) -> int:
    """A number of tokens that a text has at least. It is above ``max_tokens`` only if the text certainly has more.

    Args:
        count: the number of tokens of a text, from the tokenizer.
    """
    size = CHARACTERS_PER_TOKEN * (max_tokens + MAX_TORN_TOKENS)
    while size < len(text):
        beginning = text[:size].rstrip()  # the next token may take all space before it (lstrip)
        if (min_tokens := count(beginning) - MAX_TORN_TOKENS) > max_tokens:
            return min_tokens
        size *= GROWTH
    return 0


def infilling_prompt(lm: LanguageModel, prefix: str, suffix: str) -> list[int]:
    """The token ids of a prompt for the text between two others: the prefix first, then the suffix."""
    tokenizer = lm.tokenizer
    bare, whole = token_ids(tokenizer, prefix), token_ids(tokenizer, prefix, add_special_tokens=True)
    begin = whole[: len(whole) - len(bare)] if whole[len(whole) - len(bare) :] == bare else []
    ending = token_ids(tokenizer, suffix)
    marks = [_first_of(tokenizer, NAMES[name]) for name in ("fim_pre", "fim_suf", "fim_mid")]
    if None not in marks:
        before, between, after = marks
        return [*begin, before, *bare, between, *ending, after]
    marks = [_first_of(tokenizer, (name,)) for name in MISTRAL]
    if None not in marks:
        before, between = marks
        return [*begin, before, *ending, between, *bare]
    raise SpecbeamError(
        f"suffix: the vocabulary of {lm.source} has no tokens to fill in the middle, such as <|fim_middle|>: leave it "
        "out, or use a model for code",
        option="suffix",
    )


def _first_of(tokenizer: Any, names: tuple[str, ...]) -> Any:
    """The id of the first of some tokens that the vocabulary has; None if it has none."""
    ids = tokenizer.convert_tokens_to_ids([*names])
    found = [number for name, number in zip(names, ids, strict=True) if number is not None]
    return next((number for number in found if tokenizer.convert_ids_to_tokens(number) in names), None)
