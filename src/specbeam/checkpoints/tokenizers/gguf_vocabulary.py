"""The vocabulary of a GGUF file: its tokens, which of them are special, and which end a text.

All of this is as llama.cpp has it. A file names few special tokens, so llama.cpp finds the others by their texts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError

logger = logging.getLogger("specbeam")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens. Tokens of the last three are read as a whole, and USER_DEFINED ones are shown, too."""
NO_TOKEN = 2**32 - 1
"""llama.cpp's -1, the id of no token, as a header holds it."""
SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""The names in the keys of a file, by the names in transformers."""
DEFAULTS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}
"""The ids of special tokens that a file does not name, by the kind of its tokenizer.

llama.cpp has defaults for the kind gpt2, too: token 11 begins and ends texts. That was Falcon's, and is a comma in
other vocabularies. Here a file of that kind without the key has no such token.
"""

END_OF_TURN = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>"),
    *("[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
)
END_OF_MESSAGE = ("<|eom_id|>",)
NAMES = {
    "eot": END_OF_TURN,
    "eom": END_OF_MESSAGE,
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""The texts by which a special token is found that the file does not name. The first in the vocabulary counts."""
OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
ENDS = (
    *(*END_OF_TURN, *END_OF_MESSAGE, "</s>", "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
)
"""Tokens that end a text, besides eos, eot, eom, fim_pad, fim_rep and fim_sep."""
ALWAYS_SHOWN = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
HARMONY = (
    {"<|return|>", "<|call|>"},
    {"<|return|>", "<|calls|>"},
    {"<|call|>", "<|flush|>"},
    {"<|calls|>", "<|flush|>"},
)
"""In a vocabulary that has the tokens of one of these sets, <|end|> ends a message, and no text."""
ID_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in (*SPECIAL_TOKENS.values(), *NAMES, *OLD_KEYS.values()))
"""The keys that name a special token."""


@dataclass(frozen=True)
class GGUFVocabulary:
    """The tokens of a file.

    Attributes:
        kind: of the tokenizer, such as "gpt2"; None if the file does not say.
        tokens: by their ids; empty if the file has none.
        ids: of the tokens.
        types: of the tokens.
        special: the ids of bos_token, eos_token, unk_token and pad_token, as far as there are such tokens.
        eos_token_ids: the tokens that end a text.
        path: of the file, for errors.
    """

    kind: str | None
    tokens: list[str]
    ids: dict[str, int]
    types: list[int]
    special: Mapping[str, int]
    eos_token_ids: frozenset[int]
    path: Path | str


def vocabulary_from_gguf(metadata: Mapping[str, Any], path: Path | str) -> GGUFVocabulary:
    """The vocabulary in a GGUF file's metadata."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _tokens(metadata.get("tokenizer.ggml.tokens") or [], path)
    types = list(metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens))
    if len(types) < len(tokens):
        raise SpecbeamError(f"{path}: its tokenizer has {len(tokens)} tokens and {len(types)} types of tokens")
    del types[len(tokens) :]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise SpecbeamError(f"{path}: its tokenizer has the token {twice!r} twice")

    named = _named(metadata, kind, len(tokens), path)
    changed: list[str] = []

    def make_control(name: str) -> int:
        if types[ids[name]] != CONTROL:
            types[ids[name]] = CONTROL
            changed.append(name)
        return ids[name]

    for key, names in NAMES.items():
        present = sorted(ids[name] for name in names if name in ids)
        if key not in named and present:
            named[key] = make_control(tokens[present[0]])
    ends = {make_control(name) for name in ENDS if name in ids}
    ends |= {named[key] for key in ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep") if key in named}
    if changed:
        logger.warning(
            "%s: by their names these are control tokens, so no text shows them: %s. The file does not mark them so. "
            "llama.cpp does the same",
            path,
            ", ".join(f"{name!r} ({ids[name]})" for name in changed),
        )
    _make_exceptions(ids, types, ends)
    special = {name: named[key] for name, key in SPECIAL_TOKENS.items() if key in named}
    return GGUFVocabulary(kind, tokens, ids, types, special, frozenset(ends), path)


def _tokens(tokens: list[str], path: Path | str) -> list[str]:
    """The tokens, where empty ones have a name."""
    if "" not in tokens:
        return tokens
    empty = [i for i, token in enumerate(tokens) if not token]
    logger.warning("%s: its tokenizer has %d empty tokens, the first of them %d", path, len(empty), empty[0])
    return [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]


def _named(metadata: Mapping[str, Any], kind: str | None, size: int, path: Path | str) -> dict[str, int]:
    """The ids of special tokens, by their names in the keys: the file's, or the defaults of this kind of tokenizer."""
    known = {name: i for name, i in DEFAULTS.get(kind or "", {}).items() if i < size}
    for name in (*SPECIAL_TOKENS.values(), *NAMES):
        for key in _keys(name):
            i = metadata.get(key)
            if i is None:
                continue
            if i < 0 or i == NO_TOKEN:
                known.pop(name, None)
            elif size and i >= size:
                logger.warning(
                    "%s: its key %s names token %d of a vocabulary of %d, and is ignored", path, key, i, size
                )
            else:
                known[name] = i
    return known


def _keys(name: str) -> Iterable[str]:
    return (f"tokenizer.ggml.{key}_token_id" for key in (name, OLD_KEYS.get(name)) if key)


def _make_exceptions(ids: Mapping[str, int], types: list[int], ends: set[int]) -> None:
    """Tokens that have the name of a special token, and are none beside certain others."""
    for name in ALWAYS_SHOWN:
        if name in ids:
            types[ids[name]] = USER_DEFINED
    if any(tokens <= ids.keys() for tokens in HARMONY) and ids.get("<|end|>") in ends:
        ends.remove(ids["<|end|>"])
        types[ids["<|end|>"]] = USER_DEFINED
    if "<|tool_response>" in ids and ids.get("</s>") in ends:  # Gemma 4
        ends.remove(ids["</s>"])
        types[ids["</s>"]] = NORMAL
