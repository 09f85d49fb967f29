"""All that a request's sequences depend on, as plain data: what a receipt is made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from specbeam.models.model import LanguageModel
from specbeam.options.declared import OBJECTS, names_where
from specbeam.options.generation_defaults import APPLIED, APPLIED_WHEN_SAMPLING, APPLIED_WITH_BEAMS
from specbeam.options.options import Options
from specbeam.results import INPUTS_FORMAT
from specbeam.structured.grammar import DESCRIPTIONS
from specbeam.version import __version__

CHANGE_NO_TOKEN = names_where(lambda option: not option.changes_text)
"""Options on which no token and no score depends. So a speculative run has the receipt of its plain twin."""
DESCRIBED = tuple(DESCRIPTIONS.values())


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
