"""OpenAI's fields that have no meaning for a model of text alone.

Many clients send them along. They are declared with the values that change nothing, and refused with others.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, create_model, model_validator

M = TypeVar("M", bound=BaseModel)


def given(values: Any) -> Any:
    """The values of an object. Null stands for a field that is not given, and is left out."""
    return {name: value for name, value in values.items() if value is not None} if isinstance(values, dict) else values


class Fields(BaseModel):
    """An object of a request. Unknown fields are refused, and so are values of another type.

    Within a value that is any JSON, such as a schema, null is a value like any other.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="wrap")
    @classmethod
    def _without_nulls(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return handler(given(values))


class Reasoning(Fields):
    """How much the model reasons. Here it does not."""

    effort: Literal["none"] | None = None


Empty = Annotated[list[Any], Field(max_length=0)]
NO_EFFECT = "Accepted, and has no effect."
GIVEN_BACK = "Accepted in answers that are given back."
PARSED = (Any, "Accepted in answers that are given back: what OpenAI's client made of the text.")
NEUTRAL: dict[str, dict[str, Any]] = {
    "OpenAIDecoding": {
        "safety_identifier": (str, NO_EFFECT),
        "prompt_cache_key": (str, "Accepted: prefixes are shared in any case."),
        "prompt_cache_retention": (Literal["in_memory", "in-memory", "24h"], NO_EFFECT),
        "store": (Literal[False], "Nothing is stored."),
        "service_tier": Literal["auto", "default"],
    },
    "StreamOptions": {"include_obfuscation": Literal[False]},
    "Message": {"annotations": Empty, "refusal": None, "audio": None, "function_call": None, "parsed": PARSED},
    "CalledFunction": {"parsed_arguments": PARSED},
    "ChatRequest": {
        "modalities": Annotated[list[Literal["text"]], Field(max_length=1)],
        "reasoning_effort": Literal["none"],
        "verbosity": Literal["medium"],
        "audio": None,
        "functions": Empty,
        "function_call": Literal["none", "auto"],
        **dict.fromkeys(("moderation", "prediction", "prompt_cache_options", "web_search_options")),
    },
    "CompletionRequest": {"suffix": Literal[""]},
    "InputPart": {"annotations": Empty, "logprobs": (list[Any], GIVEN_BACK), "parsed": PARSED},
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
        **dict.fromkeys(("max_tool_calls", "moderation", "previous_response_id", "prompt", "prompt_cache_options")),
        "reasoning": Reasoning,
    },
}
"""The fields of each object of a request, and the type of the values that they may have; None for only null.

A field may also be left out, or null. Some have a description beside their type.
"""


def with_neutral_fields(model: type[M]) -> type[M]:
    """The class of an object of a request, with the fields that :data:`NEUTRAL` has for it. They come last."""
    made: dict[str, Any] = {}
    for name, entry in NEUTRAL[model.__name__].items():
        kind, says = entry if isinstance(entry, tuple) else (entry, None)
        made[name] = (NoneType if kind is None else kind | None, Field(None, description=says))
    return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **made)
