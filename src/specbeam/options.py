"""The options of a request: one dataclass with transformers' names, validated once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from specbeam.errors import SpecbeamError

MAX_DRAFT_SIZES = {"num_draft_tokens": 64, "draft_width": 1024, "draft_budget": 4096}
"""The largest allowed values of the draft sizes: tokens ahead, guesses per level, guesses per pass."""
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "min_p")


def check_names(given: Iterable[str], names: Sequence[str], kind: str) -> None:
    """Refuse a given name that is not among the names, and suggest the nearest of them."""
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise SpecbeamError(f"unknown {kind} {name!r}: {hint}")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Generation options of one request, named as in transformers' ``GenerationConfig``.

    ``None`` means that the option is not given. Then the checkpoint's ``generation_config.json`` decides, and without a
    value there, the value in brackets. Whether to sample is never taken from the checkpoint: the default is greedy.

    Attributes:
        max_new_tokens: the largest number of tokens to generate. The model's context may end a text earlier.
        min_new_tokens: the number of tokens before which no end-of-sequence token can be chosen.
        do_sample: draw tokens instead of taking the likeliest. If not given: sample when temperature (other than 0),
            top_k, top_p or min_p is given.
        temperature: logits are divided by it [1.0]; 0 is greedy.
        top_k: draw among the k likeliest tokens [0: all of them; transformers' own default is 50].
        top_p: draw among the likeliest tokens whose probabilities first sum to this [1.0].
        min_p: draw among tokens at least this fraction as likely as the likeliest one [0.0].
        repetition_penalty: a value over 1 makes tokens of the prompt and of the text less likely to come again [1.0].
        num_beams: the number of beams of beam search. 1 is greedy search or sampling. More than 1 with sampling is beam
            sampling.
        num_return_sequences: the number of texts to return: of beams the best finished ones, else independent samples.
        length_penalty: beams compete by log-probability / length ** length_penalty. A value over 0 favours long texts.
        early_stopping: True stops beam search when num_beams texts are finished. False stops it when the best beam, if
            it ended now, would not beat the worst of them. "never" stops it when no length would make the best beam
            beat that.
        num_beam_groups: the number of groups in diverse beam search. Each group is kept off the tokens of the groups
            before it.
        diversity_penalty: the score a token loses for each beam of an earlier group that chose it in the same step.
        num_draft_tokens: how many tokens ahead drafts guess. "auto" adapts to acceptance and to the cost of passes.
        draft_width: for a draft model, guesses per level below the text, or below all beams. For lookups, guesses per
            level below each text or beam. "auto" adapts.
        draft_budget: the largest number of guesses per pass of the target; "auto" adapts.
        draft_temperature, draft_top_k: shape the distribution that a draft model draws its guesses from, when texts are
            drawn [the text's own temperature and top_k]. They change how many guesses are accepted, and no probability
            of a text.
        bound_rule: a speculative step of beam search may do without beams that provably cannot matter
            (docs/exactness.md). False waits for all of them. The resulting beams are the same.
        seed: the seed of this request's random draws. It gives the same text whatever else runs in the batch.
        eos_token_id: one id or several (kept as a tuple) that end the text [the checkpoint's].
        stop_strings: one string or several (kept as a tuple). The text ends before the first that appears.
        trace: record in the result the drafted, accepted and chosen tokens of each round.
        constraint: the texts that may be generated: a :class:`specbeam.TokenTrie` or another
            :class:`specbeam.constraints.Constraint`.
        prefix_allowed_tokens_fn: as in transformers, called with 0 and the token ids so far, prompt included (int64
            tensor [length]). It returns the ids of the tokens that may follow.
        logits_processor: one function or several (kept as a tuple) as in transformers. Each is called with token ids
            (int64 [n, length], prompts included) and scores (float32 [n, vocab]), and returns scores. The scores are
            log-probabilities in beam search, else logits, after all other processors.

    Raises:
        SpecbeamError: a value is out of its range, or two options contradict each other.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    num_beams: int = 1
    num_return_sequences: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    num_draft_tokens: int | str = "auto"
    draft_width: int | str = "auto"
    draft_budget: int | str = "auto"
    draft_temperature: float | None = None
    draft_top_k: int | None = None
    bound_rule: bool = True
    eos_token_id: Any = None
    stop_strings: Any = ()
    trace: bool = False
    constraint: Any = None
    prefix_allowed_tokens_fn: Any = None
    logits_processor: Any = ()

    def __post_init__(self) -> None:
        for name in (
            "max_new_tokens",
            "min_new_tokens",
            "top_k",
            "draft_top_k",
            "seed",
            "num_beams",
            "num_return_sequences",
        ):
            self._make_number(name, Integral, int)
        self._make_number("num_beam_groups", Integral, int)
        for name, largest in MAX_DRAFT_SIZES.items():
            size = getattr(self, name)
            if not (isinstance(size, str) and size == "auto"):
                whole = isinstance(size, Integral) and not isinstance(size, bool)
                self._check(name, whole and 1 <= size <= largest, f'"auto", or 1 to {largest}')
        for name in (
            "temperature",
            "draft_temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "length_penalty",
            "diversity_penalty",
        ):
            self._make_number(name, Real, float)
        self._check("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        self._check("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens")
        self._check("do_sample", any(self.do_sample is value for value in (None, True, False)), "true or false")
        temperature = self.temperature
        self._check(
            "temperature",
            temperature is None or temperature == 0 or 1e-5 <= temperature <= 1e5,
            "0, or 0.00001 to 100000",
        )
        temperature = self.draft_temperature
        in_range = temperature is None or 1e-5 <= temperature <= 1e5
        self._check("draft_temperature", in_range, "0.00001 to 100000")
        self._check("draft_top_k", self.draft_top_k is None or self.draft_top_k >= 0, "0 (all tokens) or more")
        for name in ("draft_temperature", "draft_top_k"):
            if getattr(self, name) is not None and not self.samples:
                raise SpecbeamError(
                    f"{name}={getattr(self, name)} has no effect on a text that is not drawn: leave it out"
                )
        self._check("bound_rule", self.bound_rule is True or self.bound_rule is False, "true or false")
        self._check("top_k", self.top_k is None or self.top_k >= 0, "0 (all tokens) or more")
        self._check("top_p", self.top_p is None or 0 < self.top_p <= 1, "over 0 and at most 1")
        self._check("min_p", self.min_p is None or 0 <= self.min_p <= 1, "0 to 1")
        penalty = self.repetition_penalty
        self._check("repetition_penalty", penalty is None or 0 < penalty < float("inf"), "over 0")
        self._check("num_beams", self.num_beams >= 1, "at least 1")
        returned = self.num_return_sequences
        draws = self.samples and self.num_beams == 1
        allowed = "1 to num_beams, or do_sample=True without beams"
        self._check("num_return_sequences", 1 <= returned <= self.num_beams or (returned > 1 and draws), allowed)
        self._check("length_penalty", abs(self.length_penalty) <= 10, "-10 to 10")
        early = self.early_stopping
        never = isinstance(early, str) and early == "never"
        self._check("early_stopping", early is True or early is False or never, 'true, false or "never"')
        groups = self.num_beam_groups
        self._check(
            "num_beam_groups", groups >= 1 and self.num_beams % groups == 0, f"a divisor of {self.num_beams} beams"
        )
        self._check("diversity_penalty", 0 <= self.diversity_penalty < float("inf"), "0 or more")
        if self.diversity_penalty and groups == 1:
            raise SpecbeamError(f"diversity_penalty={self.diversity_penalty} needs num_beam_groups of 2 or more")
        if groups > 1 and self.samples:
            raise SpecbeamError(
                "diverse beam search does not sample: leave out num_beam_groups or the sampling options"
            )
        self._check("trace", self.trace is True or self.trace is False, "true or false")
        self._check_constraints()
        self._check("seed", self.seed is None or 0 <= self.seed < 2**63, "0 to 2**63 - 1")
        stops = self._make_tuple("stop_strings", self.stop_strings if self.stop_strings is not None else (), str)
        self._check("stop_strings", all(stops), "text that is not empty")
        if self.eos_token_id is not None:
            ids = self._make_tuple("eos_token_id", self.eos_token_id, Integral)
            self._check("eos_token_id", all(i >= 0 for i in ids), "token ids")
        if self.do_sample is False and self._asks_to_sample():
            given = next(name for name in SAMPLING_OPTIONS if getattr(self, name) is not None)
            raise SpecbeamError(f"{given}={getattr(self, given)} has no effect with do_sample=False: leave one out")
        if self.do_sample and self.temperature == 0:
            raise SpecbeamError("temperature=0 is greedy and contradicts do_sample=True: leave one out")

    def draft_size(self, name: str) -> int | None:
        """The value of num_draft_tokens, draft_width or draft_budget; None if it adapts."""
        size = getattr(self, name)
        return None if isinstance(size, str) else int(size)

    @classmethod
    def of(cls, given: Options | Mapping[str, Any]) -> Options:
        """Options from a mapping; an unknown name is refused with the nearest valid one."""
        if isinstance(given, Options):
            return given
        check_names(given, [field.name for field in fields(cls)], "option")
        return cls(**given)

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn (true) or the likeliest is taken (false)."""
        return self._asks_to_sample() if self.do_sample is None else self.do_sample

    @property
    def num_texts(self) -> int:
        """The most texts that may grow at once: beams, or samples."""
        return max(self.num_beams, self.num_return_sequences)

    def with_defaults(self, defaults: Mapping[str, Any]) -> Options:
        """These options, with missing values filled in from a checkpoint's ``generation_config.json``."""
        names = ("repetition_penalty", *(SAMPLING_OPTIONS if self.samples else ()))
        fill = {name: defaults[name] for name in names if getattr(self, name) is None and name in defaults}
        if fill.get("temperature") == 0:  # the checkpoint asks for greedy, but the caller asked to sample
            del fill["temperature"]
        try:
            return replace(self, **fill)
        except SpecbeamError as error:
            raise SpecbeamError(f"the model's generation_config.json: {error}, or set the option yourself") from error

    def _asks_to_sample(self) -> bool:
        if self.temperature == 0:
            return False
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        given = [name for name in SAMPLING_OPTIONS if getattr(self, name) is not None]
        if self.do_sample is False:  # transformers' users pass neutral values along with do_sample=False
            given = [name for name in given if getattr(self, name) != neutral[name]]
        return bool(given)

    def _check_constraints(self) -> None:
        from specbeam.constraints import Constraint  # it imports NumPy, which the command line's help does not need

        self._check(
            "constraint",
            self.constraint is None
            or (isinstance(self.constraint, Constraint) and not isinstance(self.constraint, type)),
            "a TokenTrie or another Constraint",
        )
        allowed = self.prefix_allowed_tokens_fn
        self._check("prefix_allowed_tokens_fn", allowed is None or callable(allowed), "a function")
        given = self.logits_processor
        processors = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
        self._check("logits_processor", all(map(callable, processors)), "one function or several")
        object.__setattr__(self, "logits_processor", processors)

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise SpecbeamError(f"{name}={getattr(self, name)!r} is not allowed: give {allowed}")

    def _make_number(self, name: str, kind: type, make: type) -> None:
        """Check the kind of an option and make it a Python number. It may be a NumPy number."""
        value = getattr(self, name)
        if value is None and _DEFAULTS[name] is None:
            return
        number = "a whole number" if make is int else "a number"
        self._check(name, isinstance(value, kind) and not isinstance(value, bool), number)
        object.__setattr__(self, name, make(value))

    def _make_tuple(self, name: str, value: Any, kind: type) -> tuple[Any, ...]:
        """Check one value or several and make them a tuple."""
        values = (value,) if isinstance(value, kind) else value
        several = isinstance(values, Iterable) and not isinstance(values, str | bytes)
        values = tuple(values) if several else (None,)
        holds = all(isinstance(v, kind) and not isinstance(v, bool) for v in values)
        self._check(name, holds, "one or several of its kind")
        values = tuple(v if kind is str else int(v) for v in values)
        object.__setattr__(self, name, values)
        return values


_DEFAULTS = {field.name: field.default for field in fields(Options)}
