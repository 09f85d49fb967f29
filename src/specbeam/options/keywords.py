"""The keyword arguments of ``generate``, ``stream`` and ``nbest``, for type checkers and editors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypedDict, TypeVar, get_type_hints

import numpy as np
from numpy.typing import NDArray

from specbeam.options.declared import OPTIONS
from specbeam.structured import Constraint
from specbeam.structured.grammar import OutputSpec

AllowedTokens = Callable[[int, Any], Collection[int] | NDArray[np.integer] | Any]
"""The token ids are an array, int64 [length], or a tensor (:func:`specbeam.tensors`)."""
LogitsProcessor = Callable[[Any, Any], Any]
"""Of token ids, int64 [n, length], and scores, float32 [n, vocab]: arrays, or tensors."""


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`specbeam.Options`, which says what each does.

    ``python -m specbeam.options`` writes them, since type checkers read no code. A test compares them with the fields.
    """

    max_new_tokens: int
    min_new_tokens: int | None
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | None
    bad_words_ids: Iterable[Iterable[int]] | None
    seed: int | None
    num_beams: int
    num_return_sequences: int
    distinct: bool | None
    length_penalty: float | None
    early_stopping: bool | str | None
    num_beam_groups: int
    diversity_penalty: float
    num_draft_tokens: int | str
    draft_width: int | str
    draft_budget: int | str
    draft_temperature: float | None
    draft_top_k: int | None
    bound_rule: bool
    eos_token_id: int | Iterable[int] | None
    stop_strings: str | Iterable[str] | None
    top_logprobs: int | None
    share_prefix: bool
    trace: bool
    constraint: Constraint | OutputSpec | None
    prefix_allowed_tokens_fn: AllowedTokens | None
    logits_processor: LogitsProcessor | list[LogitsProcessor] | tuple[LogitsProcessor, ...] | None


Function = TypeVar("Function", bound=Callable[..., object])


def show_option_keywords(function: Function) -> Function:
    """Let ``help``, ``inspect.signature`` and notebooks show the options that a function takes as keywords."""
    signature = inspect.signature(function, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=OPTIONS[name].default, annotation=annotation)
        for name, annotation in get_type_hints(OptionKeywords).items()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return function
