"""The fields of requests that say how to decode, and the options that they stand for.

A field that cannot be honoured is refused by its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, create_model, model_validator
from pydantic_core import PydanticKnownError

from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel
from specbeam.options.declared import MAX_LOGIT_BIAS, OPTIONS, SHAPING, Kind, Option
from specbeam.options.names import OTHER_NAMES
from specbeam.options.options import Options
from specbeam.server.errors import Refusal, refusal_of
from specbeam.server.formats import MakeOutputSpec, ResponseFormat, StructuredOutputs, output_spec_of
from specbeam.server.ignored_fields import PENALTY_WINDOWS, Fields, with_ignored_fields, without_nulls
from specbeam.server.limits import Limits
from specbeam.server.models import ServedModel
from specbeam.structured.after_thoughts import AfterThoughts, begins_in_thoughts
from specbeam.structured.grammar import OutputSpec
from specbeam.structured.thoughts import ThoughtFormat

SEEDS = 2**63
"""OpenAI's seeds may be negative. Ours are these numbers modulo this one."""
MAX_STOP_STRINGS = 64
MADE = ("max_new_tokens", "num_beams", "num_return_sequences", "seed", "eos_token_id")
"""The options that a plan makes of several fields, or of a field that each endpoint has."""


def as_integer(value: Any) -> Any:
    """A number without a fraction as an int: JSON has one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(as_integer)]
TokenId = Annotated[Integer, Field(ge=0, lt=2**31)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]+$")]
"""A token id as a name in an object."""
Bias = Annotated[float, Field(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]
Count = Annotated[Integer, Field(ge=1, lt=2**31)]
NewTokens = Count | Literal[-1]
"""How many new tokens there are at most. -1: as many as the context has left."""
TopLogprobs = Annotated[Integer, Field(ge=0, le=20)]
"""How many of the likeliest tokens to return for each position."""


def content_of(content: Any, message: ValidationInfo) -> Any:
    """The content of a message. Only the assistant's may be null, as in the type that OpenAI's client returns.

    Raises:
        PydanticKnownError: the content of another message is missing.
    """
    if content is None and message.data.get("role") != "assistant":
        raise PydanticKnownError("missing")
    return "" if content is None else content


@with_ignored_fields
class StreamOptions(Fields):
    """How a stream ends."""

    include_usage: bool | None = Field(None, description="Send a last frame with the usage.")


@with_ignored_fields
class OpenAIDecoding(Fields):
    """OpenAI's fields that all endpoints for texts share."""

    model: str | None = Field(None, description="A name from /v1/models. The first model if it is left out.")
    n: Count | None = Field(None, description="Texts for each prompt. With beams they are the best ones.")
    seed: Annotated[Integer, Field(ge=-(2**63), lt=2**64)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted, and has no effect.")
    metadata: Annotated[dict[str, str], BeforeValidator(without_nulls)] | None = Field(
        None, description="Accepted, and has no effect."
    )


def type_of(option: Option) -> Any:
    """The values of a field that sets an option."""
    limits: dict[str, Any] = {}
    if option.range is not None:
        low, high = option.range.low, option.range.high
        limits["gt" if option.range.exclusive else "ge"] = 0 if option.range.or_zero else low
        limits |= {"le": high} if high < 2**31 else {"lt": 2**31}
    integer: Any = Annotated[int, Field(**limits), BeforeValidator(as_integer)]
    kinds: dict[Kind, Any] = {
        Kind.INTEGER: integer,
        Kind.NUMBER: Annotated[float, Field(**limits)],
        Kind.FLAG: bool,
        Kind.SIZE: integer | Literal["auto"],
        Kind.STOPPING: bool | Literal["never"],
        Kind.BIASES: Annotated[dict[TokenKey, Bias], BeforeValidator(without_nulls)],
        Kind.TOKENS: list[TokenId],
        Kind.TEXTS: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)],
    }
    return kinds[option.kind]


def with_options(model: type[Decoding]) -> type[Decoding]:
    """The class with a field for each option that has none of its own there, with other values than the option's."""
    made: dict[str, Any] = {}
    for name, option in OPTIONS.items():
        if option.http_name is not None and option.http_name not in model.model_fields and name not in MADE:
            says = option.sentence
            says += " The model's default if it is left out." if option.of_checkpoint in ("fills", "read") else ""
            made[option.http_name] = (type_of(option) | None, Field(None, description=says))
    return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **made)


@with_ignored_fields
@with_options
class Decoding(OpenAIDecoding):
    """The fields that all endpoints for texts share: OpenAI's, and vLLM's and specbeam's after them."""

    top_k: Annotated[Integer, Field(ge=-1, lt=2**31)] | None = Field(None, description="-1 and 0: all tokens.")
    ignore_eos: bool | None = Field(None, description="Do not end at an end-of-sequence token.")
    stop_token_ids: list[TokenId] | None = Field(None, description="Further tokens that end the text.")
    num_beams: Count | None = Field(None, description="Beam search with this many beams. n is at most this.")
    use_beam_search: bool | None = Field(None, description="Beam search with best_of or n beams, as in vLLM.")
    best_of: Count | None = Field(None, description="Beams; or samples, and the n likeliest per token are returned.")
    draft: str | None = Field(None, description='The name of a draft, "ngram", "suffix" or "none".')
    priority: Annotated[Integer, Field(ge=-(2**31), lt=2**31)] | None = Field(
        None, description="Lower ones start first."
    )
    response_format: ResponseFormat | None = Field(None, description="The answer is JSON, or valid by a JSON Schema.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="As in vLLM, one of choice (a list of texts), json, json_object, regex and grammar."
    )
    return_token_ids: bool | None = Field(None, description="Add token_ids and prompt_token_ids.")

    @model_validator(mode="before")
    @classmethod
    def _without_repetitions(cls, given: Any) -> Any:
        """Leave out fields that only repeat another one, or its default, by the name of another server."""
        if not isinstance(given, dict):
            return given
        repeated = {
            theirs
            for ours, names in OTHER_NAMES.items()
            if ours in cls.model_fields
            for theirs in names
            if theirs not in cls.model_fields
            and theirs in given
            and given[theirs] == given.get(ours, REPEATED_DEFAULTS.get(ours))
        }
        return {name: value for name, value in given.items() if name not in repeated}

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    format_field: ClassVar[str] = "response_format"
    """The field of OpenAI's that has the form of the answer."""

    @property
    def format(self) -> Any:
        """The form that an answer must have; None for any."""
        return self.response_format

    def output_spec(self) -> tuple[MakeOutputSpec | None, str]:
        """The maker of the output spec, if the fields have one, and the field that has it.

        Raises:
            Refusal: two fields ask for one.
        """
        output_spec = output_spec_of(self.format)
        if self.structured_outputs is None:
            return output_spec, self.format_field
        if output_spec is not None:
            raise Refusal(
                f"{self.format_field} and structured_outputs both give the form: leave one out", "structured_outputs"
            )
        return self.structured_outputs.output_spec(), "structured_outputs"

    def check(self) -> None:
        """Refuse fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise Refusal("stream_options goes with stream: true", "stream_options")
        if self.num_beams is not None and (self.use_beam_search or self.best_of is not None):
            name = "use_beam_search" if self.use_beam_search else "best_of"
            raise Refusal(f"num_beams and {name} both give the number of beams: leave one out", name)
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise Refusal(f"best_of={self.best_of} is less than n={self.n}: give at least n", "best_of")
        if self.stream and self.best_of is not None and not self.use_beam_search and self.best_of > (self.n or 1):
            raise Refusal("best_of cannot be streamed: all its texts must end before the best one is known", "best_of")
        penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        penalizes = any(getattr(self, name) not in (None, OPTIONS[name].unset) for name in penalties)
        for name in PENALTY_WINDOWS if penalizes else ():
            if (value := getattr(self, name)) not in (None, -1):
                raise Refusal(f"{name}={value:g} is not supported: penalties count over all tokens. Remove it", name)

    def plan(self, model: ServedModel, limits: Limits, field: str, default: int, top: int | None) -> Plan:
        """How to decode for this request.

        Args:
            field: the field that says how many new tokens there are at most.
            default: new tokens if the field is left out, or as many as the context has left.
            top: how many likeliest tokens to return for each position; None for no log-probabilities.

        Raises:
            Refusal: fields out of range, or that contradict each other.
        """
        self.check()
        asked: int | None = getattr(self, field)
        max_tokens = default if asked is None else limits.max_tokens if asked == -1 else min(asked, limits.max_tokens)
        n = self.n or 1
        output_spec, constrained_by = self.output_spec()
        choices = () if self.structured_outputs is None else self.structured_outputs.choices
        if output_spec is not None and self.ignore_eos:
            raise Refusal(f"ignore_eos contradicts {constrained_by}, which says where a text ends", "ignore_eos")
        beams = self.num_beams or ((self.best_of or n) if self.use_beam_search else 1)
        searches = bool(self.use_beam_search) or beams > 1
        width = beams if searches else self.best_of or n
        width_name = next((name for name in ("num_beams", "best_of") if getattr(self, name)), "n")
        if width > limits.max_beams:
            raise Refusal(f"{width_name}={width} is more than this server's limit of {limits.max_beams}", width_name)
        if searches and n > beams:
            raise Refusal(f"n={n} is more than num_beams={beams}: give at most {beams}, or more beams", "n")
        if choices and searches and n > len(choices):
            raise Refusal(f"n={n} is more than the {len(choices)} texts of structured_outputs.choice", "n")
        names = {name: option.http_name for name, option in OPTIONS.items() if option.http_name is not None}
        values = {n: value for n in names if n not in MADE and (value := getattr(self, names[n])) is not None}
        names |= {"max_new_tokens": field, "constraint": constrained_by}
        if (minimum := values.get("min_new_tokens", 0)) > max_tokens:
            raise Refusal(f"min_tokens={minimum} is more than {field}={max_tokens}", "min_tokens")
        if self.top_k is not None:
            values["top_k"] = max(self.top_k, 0)
        if self.ignore_eos or self.stop_token_ids:
            ends = () if self.ignore_eos else model.lm.eos_token_ids
            values["eos_token_id"] = sorted({*ends, *(self.stop_token_ids or ())})
        if searches:
            values |= {"num_beams": beams, "num_return_sequences": n}
        else:
            values = {
                name: value
                for name, value in values.items()
                if "beams" not in OPTIONS[name].needs or value != OPTIONS[name].unset  # clients also send defaults
            }
        values |= {"max_new_tokens": max(max_tokens, 1), "top_logprobs": top}
        try:
            options = Options.of(model.sampling.fill(values, searches=searches))
            if self.seed is not None and options.samples:  # a text that is not drawn is the same for each seed
                options = replace(options, seed=self.seed % SEEDS)
        except SpecbeamError as error:
            raise refusal_of(error, names) from error
        if searches and not options.samples:
            for name, neutral in SHAPING.items():
                if name != "temperature" and getattr(options, name) not in (None, neutral):
                    raise Refusal(f"{name} has no effect on beams with temperature 0: leave one out", name)
        return Plan(
            options=options,
            n=n,
            draws=1 if searches else self.best_of or n,
            searches=searches,
            draft=model.draft(self.draft),
            priority=self.priority or 0,
            names=names,
            output_spec=output_spec,
        )


REPEATED_DEFAULTS = {"max_tokens": -1, "repetition_penalty": 1, "typical_p": 1, "min_tokens": 0, "stop": []}
"""What other servers' names of a field may have where the field itself is left out."""


@dataclass(frozen=True)
class Plan:
    """How the texts of a request are decoded.

    Attributes:
        n: texts to return for each prompt.
        draws: requests to the engine for each prompt. The likeliest n of their texts are returned.
        searches: by beams, so that each text has a score.
        draft, priority: as for :meth:`specbeam.Engine.submit`.
        names: fields of the request by the options that they set.
        output_spec: makes the spec of the texts; None for any text.
    """

    options: Options
    n: int
    draws: int
    searches: bool
    draft: Any
    priority: int
    names: dict[str, str]
    output_spec: MakeOutputSpec | None

    def after_thoughts(
        self, thought_format: ThoughtFormat | None, *, opens: bool = False, remarks: bool = False
    ) -> Plan:
        """The plan with an output spec that holds for the answer, and not for thoughts before it.

        Args:
            thought_format: None if the model has no thoughts.
            opens, remarks: as in :class:`AfterThoughts`.
        """
        if (make := self.output_spec) is None or thought_format is None:
            return self

        def made(lm: LanguageModel, ids: Sequence[int]) -> OutputSpec:
            thinking = begins_in_thoughts(lm, thought_format, ids)
            return AfterThoughts(make(lm, ids), thought_format, thinking, opens, remarks)

        return replace(self, output_spec=made)
