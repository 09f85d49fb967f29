"""The logits processors of one call of transformers' ``generate``, as the options of one of our requests.

transformers calls each processor for the whole batch, with the padding of the prompts. A request has one prompt and no
padding. So processors are narrowed to the request's rows of the batch, and get these as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from specbeam.core.callers import tensors
from specbeam.errors import SpecbeamError
from specbeam.options.declared import OPTIONS

BANS_AND_PENALTIES = (
    theirs.SequenceBiasLogitsProcessor,
    theirs.EncoderRepetitionPenaltyLogitsProcessor,
    theirs.RepetitionPenaltyLogitsProcessor,
    theirs.NoRepeatNGramLogitsProcessor,
    theirs.EncoderNoRepeatNGramLogitsProcessor,
    theirs.NoBadWordsLogitsProcessor,
    theirs.MinLengthLogitsProcessor,
    theirs.MinNewTokensLengthLogitsProcessor,
    theirs.PrefixConstrainedLogitsProcessor,
)
"""A mask has the same effect before and after each of these: they keep a score of -inf, and add no other mask to it."""
WARPERS: dict[type, tuple[str, str]] = {
    getattr(theirs, option.warper[0]): (name, option.warper[1])
    for name, option in OPTIONS.items()
    if option.warper is not None
}
"""The warpers that specbeam has, in the order it applies them: our option, and their attribute."""
OTHERS = (
    theirs.ForcedBOSTokenLogitsProcessor,
    theirs.ForcedEOSTokenLogitsProcessor,
    theirs.InfNanRemoveLogitsProcessor,
    theirs.ExponentialDecayLengthPenalty,
    theirs.SuppressTokensLogitsProcessor,
    theirs.SuppressTokensAtBeginLogitsProcessor,
    theirs.TopHLogitsWarper,
    theirs.EpsilonLogitsWarper,
    theirs.EtaLogitsWarper,
    theirs.WatermarkLogitsProcessor,
    theirs.WhisperTimeStampLogitsProcessor,
    theirs.LogitNormalization,
)
SUPPORTED = (*BANS_AND_PENALTIES, *WARPERS, *OTHERS)
"""Processors of transformers whose result for a text depends on the text, its scores, and the text's prompt alone."""
UNSUPPORTED_OPTIONS: dict[type, str] = {
    theirs.UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    theirs.SynthIDTextWatermarkLogitsProcessor: "a watermarking_config of SynthID",
}
"""Processors that remember their calls. The others that are not supported belong to models of speech and music."""

TOKENS_OF: dict[type, tuple[str, Callable[[Any], Iterable[int]]]] = {
    theirs.SequenceBiasLogitsProcessor: ("sequence_bias", lambda p: [i for words in p.sequence_bias for i in words]),
    theirs.NoBadWordsLogitsProcessor: ("bad_words_ids", lambda p: [i for words in p.sequence_bias for i in words]),
    theirs.ForcedBOSTokenLogitsProcessor: ("forced_bos_token_id", lambda p: [p.bos_token_id]),
    theirs.ForcedEOSTokenLogitsProcessor: ("forced_eos_token_id", lambda p: p.eos_token_id.tolist()),
    theirs.ExponentialDecayLengthPenalty: (
        "exponential_decay_length_penalty with eos",
        lambda p: p.eos_token_id.tolist(),
    ),
}
"""The option that a processor belongs to, and its token ids. They are indices of scores."""


@dataclass(frozen=True)
class BatchRows:
    """The rows of the batch that one request answers. They have the same prompt.

    Attributes:
        input_ids: of the batch as processors get it, int64 [rows, length].
        first: the number of the first of the request's rows.
        prompt_length: how many tokens the request's own prompt has.
        padding: how many tokens of padding come before these in the row. None if they are not the rest of the row.
        num_beams: the beams per text. Texts that are drawn have one each.
    """

    input_ids: Tensor
    first: int
    prompt_length: int
    padding: int | None
    num_beams: int

    def of(self, batch: Any) -> Any:
        """The request's part of a processor's rows: there are as many as in the batch, or fewer for its prompts."""
        return batch[self.first * len(batch) // len(self.input_ids)]

    def whole(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the request's token ids, int64 [..., length], that passes them on behind the whole row."""
        if self.padding == 0:
            return call
        row = self.input_ids[self.first]

        def of_row(input_ids: Tensor, *scores: Tensor) -> Any:
            before = row.to(input_ids.device).expand(*input_ids.shape[:-1], -1)
            return call(torch.cat([before, input_ids[..., self.prompt_length :]], dim=-1), *scores)

        return of_row


@dataclass(frozen=True)
class Named:
    """A processor, and the option that errors name."""

    option: str
    call: Callable[..., Tensor]
    wants_tensors: ClassVar[bool] = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.call(input_ids, scores)


def check_processors(processors: Sequence[Any], vocab_size: int, num_beams: int) -> None:
    """Refuse processors of transformers that need the whole batch, and tokens that the model lacks."""
    kinds = {type(processor) for processor in processors}
    if num_beams > 1 and {theirs.InfNanRemoveLogitsProcessor, theirs.ExponentialDecayLengthPenalty} <= kinds:
        # The first makes a forbidden end token's -inf finite, and the second raises that to inf. Then transformers goes
        # on with texts that have ended, and replaces finished texts while others of the batch go on.
        raise unsupported("exponential_decay_length_penalty with remove_invalid_values and beams")
    for processor in processors:
        for kind in type(processor).__mro__:
            if kind.__module__ == theirs.__name__ and kind is not theirs.LogitsProcessor and kind not in SUPPORTED:
                raise unsupported(UNSUPPORTED_OPTIONS.get(kind, kind.__name__))
        option, tokens = TOKENS_OF.get(type(processor), ("", lambda _: ()))
        for token in tokens(processor):
            if not 0 <= token < vocab_size:
                raise SpecbeamError(f"{option}: the token {token} is not in the model's vocabulary of {vocab_size}")


def options_of(processors: Iterable[Any], row: BatchRows, eos: Sequence[int], do_sample: bool) -> dict[str, Any]:
    """Our options for all processors, both from the generation config and the caller's own.

    A processor that specbeam has becomes an option if it has its turn there. The others are functions.
    """
    steps = [_narrowed(processor, row) for processor in processors]
    warpers = _last_warpers(steps) if do_sample else []
    options: dict[str, Any] = {"logits_processor": []}
    masks_come_first = True  # a mask among the steps so far could as well be the first
    for number, step in enumerate(steps[: len(steps) - len(warpers)]):
        kind = type(step)
        masks_come_first &= kind in BANS_AND_PENALTIES
        if kind is theirs.RepetitionPenaltyLogitsProcessor and not number and _starts_at_prompt(step, row):
            options["repetition_penalty"] = step.penalty
        elif masks_come_first and (shortest := _min_new_tokens(step, row, eos)) is not None:
            options["min_new_tokens"] = max(shortest, options.get("min_new_tokens", 0))
        elif kind is theirs.PrefixConstrainedLogitsProcessor:
            if not masks_come_first:
                raise unsupported("a PrefixConstrainedLogitsProcessor after processors that force tokens")
            options["prefix_allowed_tokens_fn"] = _allowed_tokens(step, row)
        else:
            if kind is theirs.InfNanRemoveLogitsProcessor and "prefix_allowed_tokens_fn" in options:
                step = _but_for_no_tokens(step)
            name = "renormalize_logits" if kind is theirs.LogitNormalization else "logits_processor"
            options["logits_processor"].append(Named(name, row.whole(step)))
    return options | {WARPERS[type(w)][0]: getattr(w, WARPERS[type(w)][1]) for w in warpers}


def unsupported(what: str) -> SpecbeamError:
    """The error for an option that specbeam lacks."""
    return SpecbeamError(f"specbeam.hf.generate does not support {what}: leave it out, or custom_generate")


def _narrowed(processor: Any, row: BatchRows) -> Any:
    """The processor for the request's rows alone, if it has data for each row or prompt of the batch."""
    changes: dict[str, Any] = {}
    match processor:
        case theirs.EncoderRepetitionPenaltyLogitsProcessor():
            changes["encoder_input_ids"] = row.of(processor.encoder_input_ids)[None]
        case theirs.EncoderNoRepeatNGramLogitsProcessor():
            changes = {"generated_ngrams": [row.of(processor.generated_ngrams)], "batch_size": 1}
        case theirs.RepetitionPenaltyLogitsProcessor(prompt_ignore_length=Tensor() as lengths):
            changes["prompt_ignore_length"] = int(row.of(lengths))
    if changes:
        processor = copy.copy(processor)
        vars(processor).update(changes)
    return processor


def _starts_at_prompt(penalty: Any, row: BatchRows) -> bool:
    """Whether a repetition penalty counts the prompt's tokens, but not the padding."""
    return (penalty.prompt_ignore_length or 0) == row.padding


def _min_new_tokens(step: Any, row: BatchRows, eos: Sequence[int]) -> int | None:
    """The number of new tokens before which a processor forbids all end tokens; None for other processors."""
    match step:
        case theirs.MinLengthLogitsProcessor():
            shortest: int = step.min_length - row.input_ids.shape[1]
        case theirs.MinNewTokensLengthLogitsProcessor():
            shortest = step.min_new_tokens + step.prompt_length_to_skip - row.input_ids.shape[1]
        case _:
            return None
    forbidden = {i for i in step.eos_token_id.tolist() if i >= 0}
    return max(0, shortest) if forbidden == {*eos} else None


def _allowed_tokens(step: Any, row: BatchRows) -> Callable[[int, Tensor], Any]:
    """The caller's function, with the number of the text in the batch."""
    allowed = row.whole(partial(step._prefix_allowed_tokens_fn, row.first // row.num_beams))
    return tensors(lambda _, input_ids: allowed(input_ids))


def _but_for_no_tokens(remove_invalid: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """The processor, except where no beam has an allowed token: then scores stay, and the texts are refused.

    Newer releases of transformers have forced the tokens of ``prefix_allowed_tokens_fn`` there.
    """
    return lambda ids, scores: scores if bool(scores.isneginf().all()) else remove_invalid(ids, scores)


def _last_warpers(steps: list[Any]) -> list[Any]:
    """The longest end of the steps that consists of warpers that specbeam has, in its order."""
    order = [*WARPERS]
    warpers: list[Any] = []
    for step in reversed(steps):
        kind = type(step)
        later = order.index(type(warpers[-1])) if warpers else len(order)
        if kind not in WARPERS or order.index(kind) >= later or not _is_plain(step):
            break
        warpers.append(step)
    return warpers


def _is_plain(warper: Any) -> bool:
    """Whether a warper may leave one token, and gives the others probability 0."""
    kept = 1 if type(warper) is theirs.TopKLogitsWarper else getattr(warper, "min_tokens_to_keep", 1)
    return kept == 1 and getattr(warper, "filter_value", float("-inf")) == float("-inf")
