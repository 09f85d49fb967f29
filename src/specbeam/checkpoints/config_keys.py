"""The keys of a config.json as transformers reads them: their types, defaults and older names, and rotary rules.

An :class:`~specbeam.checkpoints.architecture.Architecture` lists its keys. The tests compare the result with the
configuration classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, get_args, get_origin

from specbeam.errors import SpecbeamError

Keys = dict[str, tuple[Any, Any]]
"""The type and the default of each key."""

COMMON: Keys = {
    "attention_dropout": (float | int, 0.0),
    "bos_token_id": (int | None, None),
    "eos_token_id": (int | list[int] | None, None),
    "initializer_range": (float, 0.02),
    "max_position_embeddings": (int, 2048),
    "pad_token_id": (int | None, None),
    "rope_parameters": (dict | None, None),
    "tie_word_embeddings": (bool, False),
    "use_cache": (bool, True),
    **dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), (int, None)),
}
"""The keys that all architectures have. The last four have no default: without them a file is refused."""
ORIGINAL = "original_max_position_embeddings"
"""The context length before rotary scaling."""
NEEDED = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", ORIGINAL},
    "longrope": {"short_factor", "long_factor", ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
}
"""The keys without which a kind of rotary scaling is refused."""
WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a point",
    str: "a text",
    dict: "an object",
    list: "a list",
    NoneType: "null",
}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON has a type. A whole number is no ``float``, and true and false are no ``int``."""
    if isinstance(kind, UnionType):
        return any(fits(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(fits(entry, get_args(kind)[0]) for entry in value)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def in_words(kind: Any) -> str:
    """A type as a reader of JSON says it."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return " or ".join(dict.fromkeys(WORDS[get_origin(one) or one] for one in kinds))


def rope_parameters(given: SimpleNamespace, theta: float, theta_key: str = "rope_theta") -> dict[str, Any]:
    """The rotary settings in the form of transformers 5, where one or several older keys may stand for them.

    Args:
        theta: the default of ``rope_theta``.
        theta_key: its key beside the other settings.
    """
    ropes = getattr(given, "rope_scaling", None) or given.rope_parameters
    given.rope_parameters = ropes = {} if ropes is None else ropes
    theta, partial = getattr(given, theta_key, theta), vars(given).pop("partial_rotary_factor", None)
    for parameters in nested(given) or [ropes]:
        parameters.setdefault("rope_theta", theta)
        if partial is not None:
            parameters.setdefault("partial_rotary_factor", partial)
    return standardized(given)


def standardized(given: SimpleNamespace) -> dict[str, Any]:
    """The rotary settings, with their kind and the original context length where that counts."""
    context = given.max_position_embeddings
    for parameters in nested(given) or [given.rope_parameters]:
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        if parameters["rope_type"] in ("llama3", "yarn", "longrope"):
            parameters.setdefault(ORIGINAL, context)
    ropes: dict[str, Any] = given.rope_parameters
    return ropes


def scaled_context(ropes: Mapping[str, Any], context: int) -> int:
    """The tokens of the longest sequence that rotary settings are for.

    YaRN's are for ``factor`` times the original context. Model cards ask to add them to a config.json that keeps its
    ``max_position_embeddings``. LongRoPE's rotation changes for all tokens of a sequence beyond the original context.
    The other kinds are for ``max_position_embeddings``.

    Args:
        ropes: of transformers 5. They may be nested by kinds of layers, of which those count that see the whole text.
        context: ``max_position_embeddings``.
    """
    ropes = ropes.get("full_attention") or ropes
    kind, original = ropes.get("rope_type"), ropes.get(ORIGINAL)
    if kind == "longrope" and original:
        return min(context, int(original))
    if kind == "yarn" and original and (factor := ropes.get("factor")):
        return int(factor * original)
    return context


def nested(given: SimpleNamespace) -> list[dict[str, Any]]:
    """The rotary settings of each kind of layers; empty if there is one for all layers."""
    kinds = getattr(given, "layer_types", None) or ()
    return [value for key, value in given.rope_parameters.items() if key in kinds and value is not None]


def check_rope(parameters: Mapping[str, Any]) -> None:
    """Refuse rotary settings that lack a key, or have a text in place of a number."""
    kind = parameters.get("rope_type") or "default"
    if missing := NEEDED.get(kind, set()) - set(parameters):
        raise SpecbeamError(f"the rotary scaling {kind!r} of config.json lacks {', '.join(sorted(missing))}")
    for key, value in parameters.items():
        if isinstance(value, str) and key not in ("rope_type", "type"):
            raise SpecbeamError(f"the rotary scaling of config.json says {key} = {value[:80]!r}, which is no number")
