"""A model's tokenizer: texts to token ids and back, its special tokens, and its chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload

import tokenizers

from specbeam.errors import SpecbeamError

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Encoded(dict[str, Any]):
    """What a tokenizer makes of a text, by the names in transformers; lists of these for several texts.

    Attributes:
        input_ids: the token ids.
    """

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]


class Tokenizer:
    """A tokenizer of the ``tokenizers`` library, with the calls and the names that transformers gives it.

    Args:
        tokenizer: splits, merges and decodes.
        special_tokens: the texts of bos_token, eos_token, unk_token and pad_token, as far as there are such tokens.
        chat_template: the source of a template that makes a prompt of messages, in Jinja's language.

    Attributes:
        special_tokens_map: the special tokens.
        bos_token, eos_token, unk_token, pad_token: the token that begins texts, ends them, stands for anything
            the vocabulary lacks, or fills up short texts; None if there is none.
        bos_token_id, eos_token_id, unk_token_id, pad_token_id: their ids.
    """

    is_fast = True
    clean_up_tokenization_spaces = False

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.special_tokens_map = dict(special_tokens or {})
        self.chat_template = chat_template
        for name in SPECIAL_TOKENS:
            token = self.special_tokens_map.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else tokenizer.token_to_id(token))

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} tokens, {self.special_tokens_map})"

    def __len__(self) -> int:
        """The number of tokens, with the added ones."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer:
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        """The number of tokens, without the added ones."""
        return self._tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens that have a name, each once."""
        return list(dict.fromkeys(self.special_tokens_map.values()))

    @property
    def all_special_ids(self) -> list[int]:
        return [i for token in self.all_special_tokens if (i := self._tokenizer.token_to_id(token)) is not None]

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        """The tokens that are read as a whole, by their ids."""
        return self._tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
        return_special_tokens_mask: bool = False,
        verbose: bool = True,
    ) -> Encoded:
        """The token ids of a text, or of several.

        Args:
            add_special_tokens: put the tokens that begin and end texts around each.
            return_offsets_mapping: also ``offset_mapping``, the begin and the end of each token in the text, in
                characters.
            return_special_tokens_mask: also ``special_tokens_mask``, 1 for each token that was put around the text.
            verbose: has no effect. Tokenizers of transformers take it.
        """
        if not isinstance(text, str):
            found = self._tokenizer.encode_batch([*text], add_special_tokens=add_special_tokens)
            made = [self._encoded(one, return_offsets_mapping, return_special_tokens_mask) for one in found]
            return Encoded({name: [one[name] for one in made] for name in made[0]} if made else {"input_ids": []})
        one = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._encoded(one, return_offsets_mapping, return_special_tokens_mask)

    @staticmethod
    def _encoded(found: tokenizers.Encoding, offsets: bool, mask: bool) -> Encoded:
        made = Encoded(input_ids=found.ids, attention_mask=found.attention_mask)
        if offsets:
            made["offset_mapping"] = found.offsets
        if mask:
            made["special_tokens_mask"] = found.special_tokens_mask
        return made

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """The text of token ids.

        Args:
            skip_special_tokens: leave special tokens out.
            clean_up_tokenization_spaces: has no effect. Tokenizers of transformers take it, and some of them remove
                spaces before punctuation.
        """
        ids = [token_ids] if isinstance(token_ids, int) else [*token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        """Tokens as the vocabulary writes them; None for an id that it lacks."""
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        return [self._tokenizer.id_to_token(int(i)) for i in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The ids of tokens as the vocabulary writes them. An unknown one has the id of the unknown token."""
        if isinstance(tokens, str):
            i = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if i is None else i
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_chat_template(self) -> str:
        """The source of the chat template.

        Raises:
            SpecbeamError: there is none.
        """
        if self.chat_template is None:
            raise SpecbeamError("the tokenizer has no chat template: give a text")
        return self.chat_template

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """The prompt that the chat template makes of messages.

        Args:
            add_generation_prompt: end with the tokens that begin an answer.
            tokenize: make token ids, as calls of this object do; False for the text.
            variables: of the template.

        Raises:
            SpecbeamError: there is no template.
            ValueError: the template refuses the messages, or exceeds a limit (:mod:`specbeam.chat_templates`).
        """
        from specbeam import chat_templates

        how = {**self.special_tokens_map, **variables, "add_generation_prompt": add_generation_prompt}
        text = chat_templates.render(self.get_chat_template(), [dict(message) for message in messages], **how)
        return self(text, add_special_tokens=False) if tokenize else text
