"""Ignored fields: OpenAI's for other models, and samplers of other servers that are switched off.

Many clients send them along. They are declared with the values that change no text, and refused with others.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    create_model,
    model_validator,
)

from specbeam.errors import shown

M = TypeVar("M", bound=BaseModel)


def without_nulls(values: Any) -> Any:
    """The values of an object. Null means that a field is left out."""
    return {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values


class Fields(BaseModel):
    """An object of a request. Unknown fields are refused, and so are values of another type.

    Within a value that is any JSON, such as a schema, null is a value like any other.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="wrap")
    @classmethod
    def _without_nulls(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return handler(without_nulls(values))


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
Detail = Literal["auto", "concise", "detailed"]


class Reasoning(Fields):
    """How much a model thinks. The summary has no effect: answers have the thoughts themselves."""

    effort: Effort | None = None
    summary: Detail | None = None
    generate_summary: Detail | None = None


def _text_alone(kind: Any) -> Any:
    """The type of a part of a message. One that holds an image, audio or a file is refused with the reason."""
    if isinstance(kind, str) and not kind.endswith("text"):
        raise ValueError(f"{shown(kind)} is not supported, because specbeam reads text only")
    return kind


def _no_images(images: Any) -> Any:
    if images:
        raise ValueError("not supported, because specbeam reads text only: remove it")
    return images


TextAlone = BeforeValidator(_text_alone)
Empty = Annotated[list[Any], Field(max_length=0)]
NoImages = Annotated[list[Any], BeforeValidator(_no_images)]
Off, One = Literal[0], Literal[1]
NO_EFFECT = "Accepted, and has no effect."
SHARED_PREFIXES = "Accepted: prefixes are shared in any case."
CACHED = dict.fromkeys(("cache_control", "prompt_cache_breakpoint"), (dict[str, Any], SHARED_PREFIXES))
PENALTY_WINDOWS = ("repeat_last_n", "rep_pen_range", "repetition_penalty_range", "rep_pen_slope")
"""The last tokens over which other servers count penalties. Here they count over all tokens."""
OTHER_SAMPLERS: dict[str, Any] = {
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff", "penalty_alpha", "skew", "min_keep"), Off),
    **dict.fromkeys(("tfs", "tfs_z", "guidance_scale", "encoder_repetition_penalty"), One),
    **dict.fromkeys(("top_n_sigma", "nsigma"), Literal[0, -1]),
    **dict.fromkeys(("mirostat", "mirostat_mode", "dynatemp_range", "smoothing_factor"), Off),
    **dict.fromkeys(("dry_multiplier", "xtc_probability"), Off),
    **dict.fromkeys(("dynamic_temperature", "temperature_last"), Literal[False]),
    "adaptive_target": Annotated[float, Field(le=0)],
    # The parameters of the samplers above, which have no effect while these are off:
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "smoothing_curve"), float),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "xtc_threshold", "adaptive_decay"), float),
    "dry_sequence_breakers": str | list[str],
    "negative_prompt": str,
    **dict.fromkeys(PENALTY_WINDOWS, (float, "Only -1, if there are penalties: they count over all tokens.")),
}
"""Samplers of llama.cpp and text-generation-webui that are not implemented here, as SillyTavern sends them."""
OTHER_SERVERS: dict[str, Any] = {
    "cache_prompt": (bool, SHARED_PREFIXES),
    **dict.fromkeys(("id_slot", "n_keep"), (int, NO_EFFECT)),
    **dict.fromkeys(("truncation_length", "num_ctx"), (int, "Accepted: the context is the model's.")),
    **dict.fromkeys(("t_max_predict_ms", "n_indent", "max_tokens_second"), Off),
    **dict.fromkeys(("timings_per_token", "return_progress", "post_sampling_probs", "legacy_api"), Literal[False]),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens", "include_reasoning"), Literal[True]),
    **dict.fromkeys(("include_stop_str_in_output", "return_tokens_as_token_ids", "ban_eos_token"), Literal[False]),
    "add_bos_token": Literal[True],
    **dict.fromkeys(("bad_words", "banned_strings"), Empty),
    **dict.fromkeys(("custom_token_bans", "banned_tokens", "grammar", "grammar_string"), Literal[""]),
    **dict.fromkeys(("api_type", "api_server", "request_id"), (str, NO_EFFECT)),
}
"""Further fields of llama.cpp, vLLM, text-generation-webui and SillyTavern."""
GIVEN_BACK = "Accepted in answers that are given back."
PARSED = (Any, "Accepted in answers that are given back: what OpenAI's client made of the text.")
IGNORED: dict[str, dict[str, Any]] = {
    "OpenAIDecoding": {
        "safety_identifier": (str, NO_EFFECT),
        "prompt_cache_key": (str, SHARED_PREFIXES),
        "prompt_cache_retention": (Literal["in_memory", "in-memory", "24h"], NO_EFFECT),
        "prompt_cache_options": (dict[str, Any], SHARED_PREFIXES),
        "store": (bool, "Nothing is stored."),
        "service_tier": (Literal["auto", "default", "flex", "scale", "priority", "fast"], NO_EFFECT),
    },
    "Decoding": OTHER_SAMPLERS | OTHER_SERVERS,
    "StreamOptions": {"include_obfuscation": Literal[False]},
    "TextPart": CACHED,
    "FunctionTool": CACHED,
    "Message": CACHED | {"annotations": Empty, "refusal": None, "audio": None, "function_call": None, "parsed": PARSED},
    "CalledFunction": {"parsed_arguments": PARSED},
    "ChatRequest": {
        "modalities": Annotated[list[Literal["text"]], Field(max_length=1)],
        "verbosity": (Verbosity, NO_EFFECT),
        "add_special_tokens": (Literal[False], "A chat template has its own."),
        "echo": Literal[False],
        "audio": None,
        "functions": Empty,
        "function_call": Literal["none", "auto"],
        **dict.fromkeys(("moderation", "prediction", "web_search_options")),
    },
    "CompletionRequest": {"add_special_tokens": Literal[True]},
    "InputPart": CACHED | {"annotations": Empty, "logprobs": (list[Any], GIVEN_BACK), "parsed": PARSED},
    "TextBlock": CACHED | {"citations": Empty},
    "ToolUseBlock": CACHED | {"caller": (dict[str, Any], NO_EFFECT)},
    "ToolResultBlock": CACHED,
    "InTool": CACHED | {"defer_loading": Literal[False], "eager_input_streaming": bool, "input_examples": Empty},
    "TokensRequest": CACHED | {"mcp_servers": Empty},
    "MessagesRequest": {
        "metadata": (dict[str, Any], NO_EFFECT),
        "service_tier": (Literal["auto", "standard_only"], NO_EFFECT),
        "speed": Literal["standard"],
    },
    "OllamaMessage": {"images": NoImages},
    "OllamaRequest": {
        "keep_alive": (float | str, "Accepted: models stay loaded."),
        **dict.fromkeys(("truncate", "shift"), Literal[False]),
    },
    "OllamaGenerate": {"template": Literal[""], "context": Empty, "images": NoImages},
    "InputMessage": {"type": Literal["message"], "id": (str, GIVEN_BACK), "status": (str, GIVEN_BACK), "phase": None},
    "CallItem": {
        "id": (str, GIVEN_BACK),
        "status": (str, GIVEN_BACK),
        "parsed_arguments": PARSED,
        **dict.fromkeys(("namespace", "caller")),
    },
    "ResultItem": {"id": (str, GIVEN_BACK), "status": (str, GIVEN_BACK), "caller": None},
    "ReasoningItem": {
        "id": str,
        "summary": list[Any],
        "content": list[Any],
        **dict.fromkeys(("encrypted_content", "status"), str),
    },
    "ResponseRequest": {
        "truncation": Literal["disabled"],
        "background": Literal[False],
        "return_token_ids": Literal[False],
        **dict.fromkeys(("access_programs", "background_options", "context_management", "conversation", "image")),
        **dict.fromkeys(("max_tool_calls", "moderation", "previous_response_id", "prompt")),
    },
}
"""The fields of each object of a request, and the type of the values that they may have; None for only null.

A field may also be left out, or null. Some have a description beside their type.
"""


def with_ignored_fields(model: type[M]) -> type[M]:
    """A class decorator: adds the fields that :data:`IGNORED` has for the class, after its others."""
    ignored: dict[str, Any] = {}
    for name, entry in IGNORED[model.__name__].items():
        kind, description = entry if isinstance(entry, tuple) else (entry, None)
        ignored[name] = (NoneType if kind is None else kind | None, Field(None, description=description))
    return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **ignored)
