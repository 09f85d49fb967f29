"""Receipts: whether a result comes again from all that it was made of, here or on another machine.

``Result.inputs`` is what a result was made of, and ``Result.receipt`` has digests of that and of its tokens. Drafts,
batches, threads and limits of memory change no token, so they are no part of either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from specbeam.errors import SpecbeamError, shown
from specbeam.options.declared import OBJECTS, names_where
from specbeam.options.generation_defaults import APPLIED, APPLIED_WHEN_SAMPLING, APPLIED_WITH_BEAMS, GenerationDefaults
from specbeam.options.options import Options
from specbeam.results import DIGITS, INPUTS_FORMAT, Result, Sequence, receipt_of
from specbeam.structured.grammar import OUTPUT_SPECS, output_spec_of
from specbeam.version import __version__

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.models.model import LanguageModel

CUT_SHORT = ("cancelled", "timeout")
"""The reasons of an end that no other run has at the same token."""
CHANGE_NO_TOKEN = names_where(lambda option: not option.changes_text)
"""Options on which no token and no score depends. So a speculative run has the receipt of its plain twin."""
DESCRIBED = tuple(OUTPUT_SPECS.values())


@dataclass(frozen=True)
class Saved:
    """A result that was saved with all that it was made of.

    Attributes:
        receipt: that was saved with it.
        inputs: of the result (see :class:`specbeam.Result`).
        options: the options in them, checked.
        sequences: with their tokens' log-probabilities, if these were saved.
        is_first: whether its text is that of the first sequence.
    """

    receipt: str
    inputs: Mapping[str, Any]
    options: Options
    sequences: list[Sequence]
    is_first: bool

    @classmethod
    def read(cls, value: Any) -> Saved:
        """The object that ``specbeam generate --json`` prints."""
        if isinstance(value, dict) and "inputs" not in value:
            raise SpecbeamError('it has no "inputs" to make it again from: save results with specbeam generate --json')
        inputs = _field(value, "inputs", dict)
        if (form := _field(inputs, "format", int)) != INPUTS_FORMAT:
            raise SpecbeamError(f"its inputs have the form {form}, and this specbeam reads {INPUTS_FORMAT}: upgrade it")
        for name in ("specbeam", "model", "backend", "numbers", "weights"):
            _field(inputs, name, str)
        if inputs.setdefault("start_token_ids", None) is not None:
            _list(inputs, "start_token_ids", int)
        _field(inputs, "generation_config", dict)
        _list(inputs, "prompt_ids", int)
        _list(inputs, "objects", str)
        asked = dict(_field(inputs, "options", dict))
        if "constraint" in asked:
            asked["constraint"] = output_spec_of(asked["constraint"])
        options = Options.of(asked)
        sequences = [_sequence(one) for one in _list(value, "sequences", dict)]
        if any(len(one.log_probs) not in (0, len(one.token_ids)) for one in sequences):
            raise SpecbeamError('a sequence has not as many "log_probs" as tokens, which no result has')
        best = {name: value.get(name) for name in ("text", "token_ids", "finish_reason")}
        is_first = bool(sequences) and best == {name: getattr(sequences[0], name) for name in best}
        return cls(_field(value, "receipt", str), inputs, options, sequences, is_first)

    def check(self, lm: LanguageModel) -> None:
        """Raises SpecbeamError if it cannot be made again, with this model or at all."""
        theirs, numbers = self.inputs["weights"], self.inputs["numbers"]
        if not self.is_first or self.receipt != receipt_of(self.inputs, self.sequences):
            raise SpecbeamError("it was changed after it was made, since its receipt belongs to another content")
        if objects := self.inputs["objects"]:
            raise SpecbeamError(f"it was made with {', '.join(objects)}, which no file can hold")
        if cut := {sequence.finish_reason for sequence in self.sequences}.intersection(CUT_SHORT):
            raise SpecbeamError(f"it was cut short ({', '.join(sorted(cut))}), and no other run ends there")
        if lm.weights != theirs:
            raise SpecbeamError(
                f"the weights are others: {theirs[:DIGITS]} there ({self.inputs['model']}, {numbers}), and "
                f"{(lm.weights or 'unknown')[:DIGITS]} here ({lm.source}). Give the same model with --model, --adapter "
                "and --revision"
            )
        if lm.backend.start_token_ids != (start := self.inputs["start_token_ids"]):
            raise SpecbeamError(f"its texts began with the tokens {start}, and now {lm.backend.start_token_ids} do")

    def prepare(self, lm: LanguageModel) -> LanguageModel:
        """The model with the generation settings that its checkpoint had then."""
        settings = _with_infinity(self.inputs["generation_config"])
        return replace(lm, generation_defaults=GenerationDefaults(settings, lm.generation_defaults.file))

    def verdict(self, result: Result) -> tuple[str, bool]:
        """Whether a result that was made again is the same: in words, and whether it is."""
        if (difference := self.difference(result)) is not None:
            versions = {made["specbeam"] for made in (self.inputs, result.inputs or self.inputs)}
            made_by = f" (made by specbeam {self.inputs['specbeam']})" if len(versions) > 1 else ""
            return f"different: {difference}{made_by}", False
        tokens = sum(len(sequence.token_ids) for sequence in self.sequences)
        if (score := self.other_score(result)) is None:
            return f"the same {tokens:,} tokens, and each bit of the scores", True
        # Only the cpu backend promises bits.
        return f"the same {tokens:,} tokens, but {score}", self.inputs["backend"] != "cpu"

    def difference(self, result: Result) -> str | None:
        """The first difference of a result that was made again; None if its sequences are the same."""
        if len(self.sequences) != len(result.sequences):
            return f"there are {len(self.sequences)} sequences there and {len(result.sequences)} here"
        for number, (theirs, ours) in enumerate(zip(self.sequences, result.sequences, strict=True), 1):
            of = f" of sequence {number}" if len(self.sequences) > 1 else ""
            for at, (a, b) in enumerate(zip_longest(theirs.token_ids, ours.token_ids), 1):
                if a != b:
                    return f"token {at}{of} is {a} there and {b} here".replace("None", "missing")
            if theirs.finish_reason != ours.finish_reason:
                return f"the reason of the end{of} is {theirs.finish_reason!r} there and {ours.finish_reason!r} here"
            if theirs.text != ours.text:
                return f"the text{of} is {shown(theirs.text)} there and {shown(ours.text)} here, of the same tokens"
        return None

    def other_score(self, result: Result) -> str | None:
        """The first log-probability or score that has other bits; None if there is none."""
        for number, (theirs, ours) in enumerate(zip(self.sequences, result.sequences, strict=True), 1):
            pairs = [(theirs.log_prob, ours.log_prob, "log_prob"), (theirs.score, ours.score, "score")]
            for at, pair in enumerate(zip(theirs.log_probs, ours.log_probs, strict=False), 1):
                pairs.append((*pair, f"log_prob of token {at}"))
            for a, b, name in pairs:
                if a != b:
                    return f"the {name} of sequence {number} is {a} there and {b} here"
        return None


def _field(value: Any, name: str, kind: Any) -> Any:
    """A field of a JSON object."""
    if not isinstance(value, dict):
        raise SpecbeamError(f"{shown(value)} is no JSON object")
    if not isinstance(found := value.get(name), kind) or isinstance(found, bool):
        raise SpecbeamError(f'its "{name}" is {shown(found)}, which no result has there')
    return found


def _list(value: Any, name: str, kind: type) -> list[Any]:
    entries: list[Any] = _field(value, name, list)
    for entry in entries:
        if not isinstance(entry, kind) or isinstance(entry, bool):
            raise SpecbeamError(f'its "{name}" has {shown(entry)}, which no result has there')
    return entries


def _sequence(value: Any) -> Sequence:
    try:
        log_prob, score = (float(_field(value, name, int | float)) for name in ("log_prob", "score"))
    except OverflowError as error:
        raise SpecbeamError("a score is beyond all numbers of 64 bits, which no result has there") from error
    reason = _field(value, "finish_reason", str)
    log_probs = _list(value, "log_probs", float) if "log_probs" in value else []
    return Sequence(_field(value, "text", str), _list(value, "token_ids", int), log_probs, log_prob, score, reason)


def _with_infinity(value: Any) -> Any:
    """A value of JSON with minus infinity where its name stands (see :func:`_plain`)."""
    if isinstance(value, dict):
        return {name: _with_infinity(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_with_infinity(part) for part in value]
    return float("-inf") if value == "-inf" else value


def inputs_of(
    lm: LanguageModel,
    prompt_ids: list[int],
    options: Options,
    eos_token_ids: Iterable[int],
    seed: int | None,
    objects: Iterable[str],
) -> dict[str, Any]:
    """The inputs of a request's result (see :class:`specbeam.Result`).

    Args:
        objects: the names of further objects of the caller that the request was made with.
    """
    chosen = {f.name: v for f in fields(options) if (v := getattr(options, f.name)) != f.default}
    objects = [*(name for name in OBJECTS if name in chosen and not isinstance(chosen[name], DESCRIBED)), *objects]
    asked = {name: _plain(value) for name, value in chosen.items() if name not in (*CHANGE_NO_TOKEN, *objects)}
    drawn = {} if seed is None else {"seed": seed}
    settings = (*APPLIED, *APPLIED_WHEN_SAMPLING, *APPLIED_WITH_BEAMS)
    return {
        "format": INPUTS_FORMAT,
        "specbeam": __version__,
        "model": lm.source,
        "backend": lm.backend.name,
        "numbers": getattr(lm.backend, "quantize", lm.backend.precision),
        "weights": lm.weights,
        "start_token_ids": lm.backend.start_token_ids,
        "prompt_ids": prompt_ids,
        "options": {
            **asked,
            **drawn,
            "max_new_tokens": options.max_new_tokens,
            "eos_token_id": sorted(eos_token_ids),
        },
        "generation_config": {n: _plain(lm.generation_defaults[n]) for n in settings if n in lm.generation_defaults},
        "objects": objects,
    }


def _plain(value: Any) -> Any:
    """A value as JSON can hold it and give it back: keys are strings, and so is minus infinity.

    The words of transformers' ``sequence_bias`` are keys, and become pairs, as in files.
    """
    if isinstance(value, DESCRIBED):
        value = value.to_dict()
    if isinstance(value, Mapping):
        if any(isinstance(key, tuple) for key in value):
            return [[[*key], _plain(part)] for key, part in value.items()]
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value
