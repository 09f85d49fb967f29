"""The keyword arguments of ``generate``, ``stream`` and ``nbest``, for type checkers and editors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypedDict

from torch import Tensor

from specbeam.constraints import Constraint

AllowedTokens = Callable[[int, Tensor], Collection[int] | Tensor]
LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


class OptionKeywords(TypedDict, total=False):
    """The fields of :class:`specbeam.Options`, which says what each does.

    Kept by hand, since type checkers read no code. A test compares it with the fields.
    """

    max_new_tokens: int
    min_new_tokens: int
    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | str
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
    trace: bool
    constraint: Constraint | None
    prefix_allowed_tokens_fn: AllowedTokens | None
    logits_processor: LogitsProcessor | list[LogitsProcessor] | tuple[LogitsProcessor, ...] | None
