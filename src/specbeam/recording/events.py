"""A run as events: the beginning, one event per round, and the end. A recording replays without a model.

A recording is a file with one event per line, as JSON. The server sends the same events while they happen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from specbeam.options.options import Options
from specbeam.results import Result

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.models.model import LanguageModel

Event = dict[str, Any]
FORMAT = 1
"""The number of the form of events. Another form gets another number."""
LIKELIEST = 10
"""A recording has this many likeliest tokens at each position, unless the caller says otherwise."""
PLAIN = (bool, int, float, str, list, tuple, dict)
LEAST_NUMBER = -9999.0
"""JSON has no infinity. This number is written for lower ones, as OpenAI does."""


def begin(
    lm: LanguageModel, prompt_ids: Sequence[int], options: Options, draft: str | None, message: str | None = None
) -> Event:
    """The first event: the model, the tokens of the prompt, and the options that are not the default.

    Args:
        draft: the name of the draft; None without one.
        message: what a person wrote, if the tokens have a chat template around it.
    """
    given = {field.name: getattr(options, field.name) for field in fields(options)}
    default = {field.name: field.default for field in fields(options)}
    shown = {name: value for name, value in given.items() if value != default[name] and isinstance(value, PLAIN)}
    prompt = [{"token_id": token, "text": lm.token_text(token)} for token in prompt_ids]
    return {
        "event": "begin",
        "format": FORMAT,
        "model": lm.source,
        "draft": draft,
        "options": {**shown, "max_new_tokens": options.max_new_tokens, "num_beams": options.num_beams},
        "prompt": prompt,
        **({} if message is None else {"message": message}),
    }


def rounds(trace: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """An event for each round of a trace (see :class:`specbeam.Result`)."""
    for one_round in trace:
        yield {"event": "round", **one_round}


def end(result: Result) -> Event:
    """The last event: the texts, best first, and their cost."""
    # Without the likeliest tokens, which the rounds have.
    texts = [replace(sequence, top_logprobs=None).to_dict() for sequence in result.sequences]
    return {"event": "end", "sequences": texts, "stats": asdict(result.stats)}


def events(
    lm: LanguageModel,
    prompt_ids: Sequence[int],
    options: Options,
    draft: str | None,
    result: Result,
    message: str | None = None,
) -> Iterator[Event]:
    """All events of a run that was made with ``trace=True``."""
    yield begin(lm, prompt_ids, options, draft, message)
    yield from rounds(result.trace or [])
    yield end(result)


def event_line(event: Event) -> str:
    """An event as one line of JSON. Half a surrogate pair, which no encoding can write, becomes a question mark."""
    line = json.dumps(finite(event), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return line.encode(errors="replace").decode()


def finite(value: Any) -> Any:
    """A value whose numbers JSON can write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else LEAST_NUMBER
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value
