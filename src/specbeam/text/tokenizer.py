"""A model's tokenizer: the ``tokenizers`` library's, with the special tokens and the chat template of a checkpoint.

Its calls have the names and the results of transformers' tokenizers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import index
from typing import Any, SupportsIndex, overload

import numpy as np
import tokenizers
from tokenizers import models

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The names of special tokens that all models may have."""
UNSUPPORTED = (
    *("padding", "truncation", "max_length", "return_tensors"),
    *("return_assistant_tokens_mask", "sanitize_control_tokens"),
)
"""Arguments of transformers' ``apply_chat_template`` that are refused here."""
SHOWN_BYTES = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
BYTES = {chr(b): b for b in SHOWN_BYTES}
BYTES |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in SHOWN_BYTES)}
"""The visible characters that stand for bytes in byte-level vocabularies (Radford et al., 2019)."""
SENTENCEPIECE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece writes one byte of a character without a token."""


class Encoding(dict[str, Any]):
    """What :class:`Tokenizer` makes of texts: lists by their names, ``input_ids`` among them."""

    input_ids: list[Any]
    """The token ids of the text; of several texts a list for each."""

    def __getattr__(self, name: str) -> Any:
        """The lists are attributes, too."""
        if name not in self:
            raise AttributeError(f"an encoding has no {name}: it has {', '.join(self)}")
        return self[name]


class Tokenizer:
    """Turns texts into token ids, and token ids into texts.

    ``load(...).tokenizer`` is one, and so it has the tokens and the chat template of the model's files. If a model's
    tokenizer needs transformers, it is one of transformers', which has all of these calls, too.

    Args:
        backend: does the work. It is used as it is, and without truncation and padding.
        special: the texts of special tokens by their names, such as ``eos_token``. The tokens of models may have other
            names, too.
        extra: the texts of more special tokens, which have no names.
        chat_template: the source of the template, or the sources of several by their names; None if there is none.
        kind: the class that transformers has for this tokenizer.

    Attributes:
        backend_tokenizer: the ``tokenizers.Tokenizer``.
        special_tokens_map: the texts of special tokens, by their names.
        chat_template: as given.
        is_fast: true. Some of transformers' tokenizers are slow, and know no offsets.
    """

    is_fast = True

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: Mapping[str, str],
        chat_template: str | dict[str, str] | None = None,
        *,
        extra: Iterable[str] = (),
        kind: str = "TokenizersBackend",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._tokenizer = backend
        self.chat_template, self.kind = chat_template, kind
        names = [*NAMED, *(name for name in special if name not in NAMED)]
        self.special_tokens_map = {name: special[name] for name in names if name in special}
        self._extra = [*extra]

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        return self._tokenizer

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        return_special_tokens_mask: bool = False,
        verbose: bool = True,
    ) -> Encoding:
        """The token ids of a text, or of several.

        Args:
            add_special_tokens: put those around the text that the model expects, such as BOS.
            return_offsets_mapping: add ``offset_mapping``: for each token the indexes of the characters where it begins
                and ends.
            return_special_tokens_mask: add ``special_tokens_mask``: for each token 1 if it is not of the text, else 0.
            verbose: transformers' tokenizers have this argument. Here it changes nothing.
        """
        if isinstance(text, str):
            made = [self._tokenizer.encode(text, add_special_tokens=add_special_tokens)]
        else:
            made = self._tokenizer.encode_batch([*text], add_special_tokens=add_special_tokens)
        lists: dict[str, list[Any]] = {
            "input_ids": [one.ids for one in made],
            "attention_mask": [one.attention_mask for one in made],
        }
        if return_special_tokens_mask:
            lists["special_tokens_mask"] = [one.special_tokens_mask for one in made]
        if return_offsets_mapping:
            lists["offset_mapping"] = [one.offsets for one in made]
        return Encoding({name: each[0] if isinstance(text, str) else each for name, each in lists.items()})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return self(text, add_special_tokens=add_special_tokens).input_ids

    @overload
    def decode(
        self,
        token_ids: int | Iterable[SupportsIndex],
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool | None = ...,
    ) -> str: ...
    @overload
    def decode(
        self,
        token_ids: Iterable[Iterable[SupportsIndex]],
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool | None = ...,
    ) -> list[str]: ...
    def decode(
        self, token_ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> Any:
        """The text of token ids, or the list of texts of a batch. Ids outside the vocabulary are skipped.

        Args:
            token_ids: one or several, also as an array, or lists of several.
            skip_special_tokens: leave special tokens out of the text.
            clean_up_tokenization_spaces: transformers' tokenizers have this argument. Spaces of BPE tokenizers stay as
                they are; for others, True is refused.

        Raises:
            ValueError: ``clean_up_tokenization_spaces`` is true, and the tokenizer is no BPE tokenizer.
        """
        if clean_up_tokenization_spaces and not isinstance(self._tokenizer.model, models.BPE):
            raise ValueError("clean_up_tokenization_spaces=True is not supported: leave it out")
        if isinstance(token_ids, Mapping):
            token_ids = token_ids["input_ids"]
        if hasattr(token_ids, "tolist"):  # an array, a tensor or one of their numbers
            token_ids = token_ids.tolist()
        ids = [token_ids] if isinstance(token_ids, int) else [*token_ids]
        if ids and np.ndim(ids[0]):
            return [self.decode(one, skip_special_tokens) for one in ids]
        return self._decode([index(i) for i in ids], skip_special_tokens)

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def __len__(self) -> int:
        """The size of the vocabulary with all added tokens."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens, by the tokens."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The size of the vocabulary without added tokens."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """The tokens that are read as a whole, by their ids."""
        return self._tokenizer.get_added_tokens_decoder()

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str | None] | None:
        """The token of an id as the vocabulary has it, or the tokens of several; None for an id that it lacks."""
        find = self._tokenizer.id_to_token
        return find(ids) if isinstance(ids, int) else [find(int(i)) for i in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...  # type: ignore[overload-overlap]
    @overload
    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int | None] | None:
        """The id of a token, or the ids of several. Any other text has the id of the token for unknown words."""
        return self._id(tokens) if isinstance(tokens, str) else [self._id(token) for token in tokens]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens as the vocabulary has them."""
        decoder = self._tokenizer.decoder
        return " ".join(tokens) if decoder is None else str(decoder.decode([*tokens]))

    def _id(self, token: str) -> int | None:
        i: int | None = self._tokenizer.token_to_id(token)
        return self.unk_token_id if i is None else i

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        if token is None or name == "unk_token":
            return None if token is None else self._tokenizer.token_to_id(token)
        return self._id(token)

    @property
    def bos_token(self) -> str | None:
        """The token that begins a text; None if there is none."""
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """The token that ends a text; None if there is none."""
        return self.special_tokens_map.get("eos_token")

    @property
    def unk_token(self) -> str | None:
        """The token for unknown words; None if there is none."""
        return self.special_tokens_map.get("unk_token")

    @property
    def pad_token(self) -> str | None:
        """The token that fills rows; None if there is none."""
        return self.special_tokens_map.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of :attr:`bos_token`."""
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of :attr:`eos_token`."""
        return self._named_id("eos_token")

    @property
    def unk_token_id(self) -> int | None:
        """The id of :attr:`unk_token`."""
        return self._named_id("unk_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of :attr:`pad_token`."""
        return self._named_id("pad_token")

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of all special tokens, each once: first those with names."""
        return [*dict.fromkeys([*self.special_tokens_map.values(), *self._extra])]

    @property
    def all_special_ids(self) -> list[int | None]:
        """The ids of :attr:`all_special_tokens`."""
        return self.convert_tokens_to_ids(self.all_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, str]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        *,
        return_dict: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> Any:
        """The prompt that the chat template makes of messages, as token ids.

        Args:
            conversation: the messages, or a list of several conversations, which become a prompt each.
            tools: the JSON schemas of functions that the model may call.
            documents: texts that the model may use, with their titles.
            chat_template: another template, or the name of one of the tokenizer's.
            add_generation_prompt: end where an answer begins.
            continue_final_message: end with the content of the last message, or with another field of it.
            tokenize: False for the text.
            return_dict: False for a list of token ids, as transformers' tokenizers can be asked for.
            tokenizer_kwargs: for the call that turns the text into token ids.
            variables: of the template. They come before special tokens of the same name.

        Raises:
            ValueError: there is no template, it refuses the messages, or it exceeds a limit
                (:mod:`specbeam.text.chat_templates`). Also for an argument of transformers' that is not supported.
        """
        from specbeam.text import chat_templates

        for name in UNSUPPORTED:
            if (value := variables.pop(name, None)) is not None and value is not False:
                raise ValueError(f"apply_chat_template does not support {name}={value!r}: leave it out")
        if reserved := [name for name in chat_templates.OWN_NAMES if name in variables]:
            raise ValueError(f"{reserved[0]} is no variable of a chat template: leave it out")
        if add_generation_prompt and continue_final_message:
            raise ValueError("continue_final_message and add_generation_prompt are both true: leave one out")
        for one in [*(tools or ()), *(documents or ())]:
            if not isinstance(one, Mapping):
                raise ValueError(f"{one!r}: tools are JSON schemas, and documents dictionaries with title and text")
        if isinstance(conversation, str | Mapping) or not len(conversation):
            raise ValueError(f"conversation={conversation!r}: give a list of messages, at least one")
        template = self.get_chat_template(chat_template, tools)
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        how |= {**self.special_tokens_map, **_plain({**variables, "tools": tools, "documents": documents})}
        is_batch = isinstance(conversation[0], list | tuple)
        texts = []
        for given in conversation if is_batch else [conversation]:
            messages = [_plain(message) for message in given]
            for message, plain in zip(given, messages, strict=True):
                if not isinstance(plain, dict):
                    raise ValueError(f"a message is a dictionary, and not {message!r}")
            texts.append(chat_templates.render(template, messages, False, **how))
        text = texts if is_batch else texts[0]
        if not tokenize:
            return text
        made = self(text, add_special_tokens=False, **tokenizer_kwargs or {})
        return made if return_dict else made.input_ids

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The source of the chat template; of several the one that is named ``default``, or beside tools ``tool_use``.

        Args:
            chat_template: another template, or the name of one of the tokenizer's.

        Raises:
            ValueError: there is none.
        """
        named = self.chat_template if isinstance(self.chat_template, dict) else {}
        if chat_template is not None:
            return named.get(chat_template, chat_template)
        templates: Mapping[str, Any] = named or {"default": self.chat_template}
        name = "tool_use" if tools is not None and "tool_use" in templates else "default"
        if name not in templates:
            raise ValueError(f"it has the chat templates {sorted(templates)}, and none is named default")
        if not isinstance(template := templates[name], str):
            raise ValueError("it has no chat template")
        return template


def _plain(value: Any) -> Any:
    """The data of a template as JSON has it. Other objects, such as images, are replaced by the names of their types.

    Raises:
        ValueError: JSON would change it.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # also of a member of an enum
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif callable(getattr(value, "model_dump", None)):  # pydantic
        value = value.model_dump()
    if isinstance(value, Mapping):
        if other := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"a chat template gets {other[0]!r} as a key: give a text")
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, tuple):
        raise ValueError(f"a chat template gets the tuple {value!r}: give a list")
    return f"<{type(value).__name__}>"


def text_of(tokenizer: Any, i: int, piece: str) -> str | bytes:
    """The text of a single token, with its leading space, which decoders remove from a first token.

    Args:
        piece: the token as the vocabulary writes it.
    """
    if "▁" in piece:
        return piece.replace("▁", " ")
    text: str = tokenizer.decode([i], clean_up_tokenization_spaces=False)
    if "\ufffd" not in text:
        return text
    if byte := SENTENCEPIECE_BYTE.fullmatch(piece):
        return bytes.fromhex(byte[1])
    if not BYTES.keys() >= {*piece}:
        return text
    written = bytes(BYTES[c] for c in piece)
    return text if written == text.encode() else written  # the text itself may contain U+FFFD
