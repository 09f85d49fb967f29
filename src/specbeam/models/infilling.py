"""Prompts to fill in the middle of a text, for models that were trained to (Bavarian et al. 2022)."""

from __future__ import annotations

from typing import Any

from specbeam.checkpoints.tokenizers.gguf_vocabulary import NAMES
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel
from specbeam.models.prompts import token_ids

MISTRAL = ("[SUFFIX]", "[PREFIX]")
"""Mistral's models read the suffix first, and have no third token."""


def infilling_prompt(lm: LanguageModel, prefix: str, suffix: str) -> list[int]:
    """The token ids of a prompt for the text between two others: the prefix first, then the suffix.

    Raises:
        SpecbeamError: the vocabulary has no tokens for it.
    """
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
