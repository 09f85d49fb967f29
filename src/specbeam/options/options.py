"""The options of a request: one dataclass with transformers' names, validated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from numbers import Integral, Rational, Real
from typing import Any, ParamSpec, TypeVar

from specbeam.errors import SpecbeamError, located, not_allowed, wrong_value
from specbeam.options.generation_defaults import GenerationDefaults, is_number
from specbeam.options.names import nearest_name

MAX_DRAFT_SIZES = {"num_draft_tokens": 64, "draft_width": 1024, "draft_budget": 4096}
"""The largest allowed values of the draft sizes: draft length, draft tokens per level, draft tokens per pass."""
NEUTRAL_VALUES = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""The options that shape the distribution of draws, and the values that leave it as it is."""
SAMPLING_OPTIONS = tuple(NEUTRAL_VALUES)
MAX_LOGIT_BIAS = 10_000
"""The sum of such biases over a sequence stays far from the scores that mark forbidden sequences."""
NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "max_new_tokens": (int, lambda n: n >= 1, "at least 1"),
    "min_new_tokens": (int, lambda n: n >= 0, "0 to max_new_tokens"),
    "top_logprobs": (int, lambda n: n >= 0, "0 or more, or None"),
    "temperature": (float, lambda x: x == 0 or 1e-5 <= x <= 1e5, "0, or 0.00001 to 100000"),
    "top_k": (int, lambda n: n >= 0, "0 (all tokens) or more"),
    "top_p": (float, lambda x: 0 < x <= 1, "over 0 and at most 1"),
    "min_p": (float, lambda x: 0 <= x <= 1, "0 to 1"),
    "typical_p": (float, lambda x: 0 < x <= 1, "over 0 and at most 1"),
    "seed": (int, lambda n: 0 <= n < 2**63, "0 to 2**63 - 1"),
    "repetition_penalty": (float, lambda x: 1e-5 <= x <= 1e5, "0.00001 to 100000"),
    "no_repeat_ngram_size": (int, lambda n: n >= 0, "0 (off) or more"),
    "frequency_penalty": (float, lambda x: abs(x) <= 2, "-2 to 2"),
    "presence_penalty": (float, lambda x: abs(x) <= 2, "-2 to 2"),
    "num_beams": (int, lambda n: n >= 1, "at least 1"),
    "num_return_sequences": (int, lambda n: n >= 1, "at least 1"),
    "length_penalty": (float, lambda x: abs(x) <= 10, "-10 to 10"),
    "num_beam_groups": (int, lambda n: n >= 1, "at least 1"),
    "diversity_penalty": (float, lambda x: 0 <= x <= MAX_LOGIT_BIAS, f"0 to {MAX_LOGIT_BIAS}"),
    "draft_temperature": (float, lambda x: 1e-5 <= x <= 1e5, "0.00001 to 100000"),
    "draft_top_k": (int, lambda n: n >= 0, "0 (all tokens) or more"),
}
"""The type of each option that is a number, whether a value is allowed, and the allowed values in words."""
BEAM_OPTIONS = ("length_penalty", "early_stopping", "distinct")
"""Options that have no effect without beams, None if they are not given."""
SEARCH_OPTIONS = ("num_beams", *BEAM_OPTIONS, "num_beam_groups", "diversity_penalty")
"""Options that only methods with beams have."""
FILLED_OPTIONS = ("repetition_penalty", "no_repeat_ngram_size")
FILLED_BEAM_OPTIONS = ("length_penalty", "early_stopping")
"""Options that a checkpoint's generation settings fill in: for every method, and with beams."""
ARGUMENTS = ("draft", "strategy", "system", "raw")
"""Names beside the options in calls such as ``generate``."""


def check_names(given: Iterable[str], names: Sequence[str], kind: str) -> None:
    """Refuse a given name that is not among the names, and suggest the one that was likely meant."""
    for name in given:
        if name not in names:
            near = nearest_name(str(name), names)
            hint = f"did you mean {near!r}?" if near else f"there are {', '.join(names)}"
            raise SpecbeamError(f"unknown {kind} {name!r}: {hint}")


P = ParamSpec("P")
R = TypeVar("R")


def refuse_unknown_keywords(function: Callable[P, R], elsewhere: Sequence[str] = ()) -> Callable[P, R]:
    """The function, with a SpecbeamError in place of Python's TypeError for a keyword that it does not have.

    Args:
        elsewhere: names that callers know from calls such as ``generate``, and that are no options.
    """
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        for name in elsewhere:
            if name in keywords:
                raise SpecbeamError(f"{name} is no option: give it beside the options, as in {name}={keywords[name]!r}")
        check_names(keywords, [*names, *elsewhere], "option")
        return function(*args, **keywords)

    return checked


class NotGiven(int):
    """The default of an option. The same number is another type where a caller gives it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Generation options of one request, named as in transformers' ``GenerationConfig``.

    ``None`` means that the option is not given. Then the checkpoint's generation settings decide (docs/models.md), and
    without a value there, the value in brackets. Whether to sample is never taken from the checkpoint: the default is
    greedy.

    Attributes:
        max_new_tokens: the largest number of tokens to generate. The model's context may end a sequence earlier.
        min_new_tokens: the number of tokens before which no end-of-sequence token can be chosen, and no stop string
            ends the text [the checkpoint's, or what its min_length leaves after the prompt; else 0].
        do_sample: draw tokens instead of taking the likeliest. If not given: sample when a temperature other than 0 is
            given, or one of top_k, top_p, min_p and typical_p that is not off.
        temperature: logits are divided by it [1.0]; 0 is greedy.
        top_k: draw among the k likeliest tokens [0: all of them; transformers' own default is 50].
        top_p: draw among the likeliest tokens whose probabilities first sum to this [1.0: off].
        min_p: draw among tokens at least this fraction as likely as the likeliest one [0.0: off].
        typical_p: draw among the tokens whose surprise is nearest to the expected one. There are as many of them as
            first sum to this probability [1.0: off] (Meister et al. 2023, "Locally Typical Sampling", 4).
        repetition_penalty: 0.00001 to 100000. A value over 1 makes tokens of the sequence, prompt included, less likely
            to come again [1.0].
        no_repeat_ngram_size: no n-gram of this size comes twice in the sequence, prompt included [0: off].
        frequency_penalty, presence_penalty: OpenAI's, -2 to 2. The score of a token that was generated count > 0 times
            loses count * frequency_penalty + presence_penalty.
        logit_bias: OpenAI's: numbers that are added to the scores of tokens, by token id. They are -10000 to 10000, or
            -inf, which forbids a token.
        bad_words_ids: token id lists. The output contains none of them, but the prompt may. A list of one end token
            alone has no effect, as in transformers [the checkpoint's].
        num_beams: the number of beams of beam search. 1 is greedy search or sampling. More than 1 with sampling is beam
            sampling.
        num_return_sequences: the number of sequences to return: the best finished hypotheses of beam search, else
            independent samples.
        distinct: the hypotheses that beam search returns differ as decoded texts, with special tokens written out and
            without the end token. Of hypotheses that decode alike the best is kept, and others are returned instead of
            the rest (docs/exactness.md). Without a tokenizer, they differ by their tokens without the end token
            [True under a constraint, else False, as in transformers].
        length_penalty: hypotheses compete by log-probability / length ** length_penalty. A value over 0 favours long
            ones [1.0].
        early_stopping: True stops beam search when num_beams hypotheses are finished. False stops it when the best
            beam, if it ended now, would not beat the worst of them. "never" stops it when the best beam would not beat
            it at any length [False].
        num_beam_groups: the number of groups in diverse beam search. Each group is kept off the tokens of the groups
            before it.
        diversity_penalty: the score a token loses for each beam of an earlier group that chose it in the same step. It
            is over 0 if there are groups, and at most 10000.
        num_draft_tokens: the draft length, in tokens. "auto" adapts to acceptance and to the cost of forward passes.
        draft_width: for a draft model, draft tokens per level below the sequence, or below all beams. For lookups,
            draft tokens per level below each sequence or beam. "auto" adapts for a draft model, and is 1 for lookups.
        draft_budget: the largest number of draft tokens per pass of the target; "auto" adapts.
        draft_temperature, draft_top_k: with sampling, shape the distribution that a draft model draws from
            [temperature and top_k]. They change how many draft tokens are accepted, but no probability of a sequence.
        bound_rule: a step of beam search may do without beams that provably cannot matter (docs/exactness.md). False
            waits for all of them, with the same result. Without beams False is refused.
        seed: the seed of this request's random draws. It gives the same sequence whatever else runs in the batch.
            Without sampling it is refused.
        eos_token_id: one id or several (kept as a tuple) that end the sequence [the checkpoint's].
        stop_strings: one string or several (kept as a tuple). The text ends before the first that appears in the new
            text. Special tokens count there as they are written, such as "<|im_end|>".
        top_logprobs: also return the log-probabilities of this many of the likeliest tokens at the position of each new
            token (:class:`specbeam.Sequence`). None for none.
        share_prefix: share the KV cache of the prompt's first tokens with other requests of the engine. No result
            changes, only the time of the prefill.
        trace: record in the result the drafted, accepted and chosen tokens of each round.
        constraint: the sequences that may be generated: a :class:`specbeam.JsonSchema`, :class:`specbeam.Regex`,
            :class:`specbeam.Grammar` or :class:`specbeam.Choice`, a :class:`specbeam.TokenTrie`, or another
            :class:`specbeam.constraints.Constraint`.
        prefix_allowed_tokens_fn: as in transformers, called with 0 and the token ids so far, prompt included (int64
            array [length]). It returns the ids of the tokens that may follow.
        logits_processor: one function or several (kept as a tuple) as in transformers. Each is called with token ids
            (int64 [n, length], prompts included) and scores (float32 [n, vocab]), and returns scores. The scores are
            log-probabilities in beam search, else logits, after all other processors. Both are NumPy arrays. Functions
            that are marked by :func:`specbeam.tensors`, and processors of transformers, get tensors on the model's
            device.

    Raises:
        SpecbeamError: an unknown option, a value out of its range, options that contradict each other, or an option
            without effect.
    """

    max_new_tokens: int = 256
    min_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Any = None
    bad_words_ids: Any = None
    seed: int | None = None
    num_beams: int = NotGiven(1)  # nbest has other defaults
    num_return_sequences: int = NotGiven(1)
    distinct: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
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
    top_logprobs: int | None = None
    share_prefix: bool = True
    trace: bool = False
    constraint: Any = None
    prefix_allowed_tokens_fn: Any = None
    logits_processor: Any = ()

    def __post_init__(self) -> None:
        for name, (kind, holds, allowed) in NUMBERS.items():
            self._make_number(name, kind)
            value = getattr(self, name)
            self._check(name, value is None or holds(value), allowed)
        for name in ("do_sample", "distinct", "bound_rule", "share_prefix", "trace"):
            value = getattr(self, name)
            self._check(name, isinstance(value, bool) or value is _DEFAULTS[name], "true or false")
        self._check("min_new_tokens", (self.min_new_tokens or 0) <= self.max_new_tokens, "0 to max_new_tokens")
        self._check_ends()
        self._check_sampling()
        self._make_logit_bias()
        self._make_bad_words()
        self._check_beams()
        self._check_draft_sizes()
        self._check_constraints()

    def _check_ends(self) -> None:
        stops = self._make_tuple("stop_strings", self.stop_strings if self.stop_strings is not None else (), str)
        if not all(stops):
            raise not_allowed("stop_strings", "", "text that is not empty")
        if self.eos_token_id is not None:
            ids = self._make_tuple("eos_token_id", self.eos_token_id, Integral)
            self._check("eos_token_id", all(0 <= i < 2**63 for i in ids), "token ids")

    def _check_sampling(self) -> None:
        if self.do_sample and self.temperature == 0:
            both = ("temperature", "do_sample")
            raise SpecbeamError("temperature=0 is greedy and contradicts do_sample=True: leave one out", option=both)
        # The likeliest token is in every truncated distribution: temperature=0 honours top_p and the others.
        if self.do_sample is False and self.temperature != 0:
            for name in self._shaping:
                raise self._without_effect(name, "with do_sample=False: leave one out")
        for name in ("seed", "draft_temperature", "draft_top_k"):
            if getattr(self, name) is not None and not self.samples:
                how = "give do_sample=True or a temperature over 0, or leave it out"
                raise self._without_effect(name, f"without sampling: {how}")

    def _make_logit_bias(self) -> None:
        given = self.logit_bias
        if given is None:
            return
        numbers = f"numbers from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}, or -inf, by token id, such as {{50256: -100}}"
        self._check("logit_bias", isinstance(given, Mapping), numbers)
        whole = all(isinstance(token, Integral | str) and not isinstance(token, bool) for token in given)
        try:  # keys of JSON objects are strings
            bias = {int(token): float(value) for token, value in given.items()} if whole else {-1: 0.0}
        except (TypeError, ValueError, OverflowError):
            bias = {-1: 0.0}
        for token, value in bias.items():
            in_range = abs(value) <= MAX_LOGIT_BIAS or value == float("-inf")
            self._check("logit_bias", 0 <= token < 2**63 and in_range, numbers)
        self._check("logit_bias", len(bias) == len(given), 'each token id once: 5 and "5" are the same one')
        object.__setattr__(self, "logit_bias", bias)

    def _make_bad_words(self) -> None:
        given = self.bad_words_ids
        if given is None:
            return
        allowed = "lists of token ids, such as lm.tokenizer([...], add_special_tokens=False).input_ids"
        try:
            words = tuple(() if isinstance(word, str | bytes) else tuple(word) for word in given)
        except TypeError:
            words = ((),)
        for word in words:
            whole = all(isinstance(token, Integral) and not isinstance(token, bool) for token in word)
            self._check("bad_words_ids", bool(word) and whole and all(0 <= token < 2**63 for token in word), allowed)
        object.__setattr__(self, "bad_words_ids", tuple(tuple(map(int, word)) for word in words))

    def _check_beams(self) -> None:
        draws = self.samples and self.num_beams == 1
        allowed = "1 to num_beams, or do_sample=True without beams"
        holds = self.num_return_sequences <= self.num_beams or draws
        self._check("num_return_sequences", holds, allowed, "do_sample")
        early = self.early_stopping
        known = early is None or isinstance(early, bool) or (isinstance(early, str) and early == "never")
        self._check("early_stopping", known, 'true, false or "never"')
        for name in (*BEAM_OPTIONS, "bound_rule"):
            if getattr(self, name) != _DEFAULTS[name] and self.num_beams == 1:
                raise self._without_effect(name, "without beams: give num_beams of 2 or more, or leave it out")
        groups = self.num_beam_groups
        self._check("num_beam_groups", self.num_beams % groups == 0, f"a divisor of {self.num_beams} beams")
        if self.diversity_penalty and groups == 1:
            raise wrong_value("diversity_penalty", self.diversity_penalty, "needs num_beam_groups of 2 or more")
        if groups > 1 and self.samples:
            raise SpecbeamError(
                "diverse beam search does not sample: leave out num_beam_groups or the sampling options",
                option="num_beam_groups",
            )
        if groups > 1 and not self.diversity_penalty:
            needs = "needs a diversity_penalty over 0, such as 0.5: with 0 all groups find the same hypotheses"
            raise wrong_value("num_beam_groups", groups, needs)

    def _check_draft_sizes(self) -> None:
        for name, largest in MAX_DRAFT_SIZES.items():
            size = getattr(self, name)
            if not (isinstance(size, str) and size == "auto"):
                whole = isinstance(size, Integral) and not isinstance(size, bool)
                self._check(name, whole and 1 <= size <= largest, f'"auto", or 1 to {largest}')

    def draft_size(self, name: str) -> int | None:
        """The value of num_draft_tokens, draft_width or draft_budget; None if it adapts."""
        size = getattr(self, name)
        return None if isinstance(size, str) else int(size)

    def check_drafting(self, drafts: bool) -> None:
        """Refuse options that contradict having a draft, or having none.

        Raises:
            SpecbeamError: sizes of a draft without a draft, or several samples with one.
        """
        for name in MAX_DRAFT_SIZES:
            if not drafts and self.draft_size(name) is not None:
                raise self._without_effect(name, "without a draft: give one, or leave it out")
        if drafts and self.num_return_sequences > self.num_beams:
            says = "samples cannot have a draft, which would tie them to each other: leave one out"
            raise wrong_value("num_return_sequences", self.num_return_sequences, says)

    @classmethod
    def of(cls, given: Options | Mapping[str, Any] | None = None, /, **changes: Any) -> Options:
        """Options from options or a mapping, with changes. An unknown name is refused, and the likely one suggested."""
        if isinstance(given, Options) and not changes:
            return given
        values = {**given_options(given), **changes}
        return cls(**{str(name): value for name, value in values.items()})

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn (true) or the likeliest is taken (false)."""
        if self.do_sample is not None:
            return self.do_sample
        return self.temperature != 0 and (self.temperature is not None or bool(self._shaping))

    @property
    def _shaping(self) -> list[str]:
        """The sampling options that change the distribution. Users of other tools pass neutral values along."""
        return [name for name, neutral in NEUTRAL_VALUES.items() if getattr(self, name) not in (None, neutral)]

    @property
    def is_distinct(self) -> bool:
        """Whether the hypotheses of beam search must differ as decoded texts."""
        return self.constraint is not None if self.distinct is None else self.distinct

    @property
    def num_texts(self) -> int:
        """The most sequences that may grow at once: beams, or samples."""
        return max(self.num_beams, self.num_return_sequences)

    def with_defaults(self, defaults: GenerationDefaults, begin: int = 0) -> Options:
        """These options, with missing values filled in from a checkpoint's generation settings.

        Args:
            begin: the tokens that the sequence begins with: the prompt, or start tokens.
        """
        of_method = [*(SAMPLING_OPTIONS if self.samples else ()), *(FILLED_BEAM_OPTIONS if self.num_beams > 1 else ())]
        names = (*FILLED_OPTIONS, *of_method)
        fill = {name: defaults[name] for name in names if getattr(self, name) is None and name in defaults}
        if fill.get("temperature") == 0:  # the checkpoint asks for greedy, but the caller asked to sample
            del fill["temperature"]
        if self.min_new_tokens is None and (least := _least_new_tokens(defaults, begin)) > 0:
            fill["min_new_tokens"] = min(least, self.max_new_tokens)
        if not fill:
            return self
        with located(f"the model's {defaults.file}", ", or set the option yourself"):
            return replace(self, **fill)

    def _check_constraints(self) -> None:
        if (constraint := self.constraint) is not None:
            # They import NumPy, which the command line's help does not need.
            from specbeam.structured import Constraint
            from specbeam.structured.grammar import Description

            is_one = isinstance(constraint, Constraint | Description) and not isinstance(constraint, type)
            self._check("constraint", is_one, "a JsonSchema, Regex, Grammar, Choice, TokenTrie or another Constraint")
        allowed = self.prefix_allowed_tokens_fn
        self._check("prefix_allowed_tokens_fn", allowed is None or callable(allowed), "a function")
        given = self.logits_processor
        processors = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
        self._check("logits_processor", all(map(callable, processors)), "one function or several")
        object.__setattr__(self, "logits_processor", processors)

    def _check(self, name: str, holds: bool, allowed: str, *named: str) -> None:
        if not holds:
            raise not_allowed(name, getattr(self, name), allowed, *named)

    def _without_effect(self, name: str, reason: str) -> SpecbeamError:
        return SpecbeamError(f"{name}={getattr(self, name)} has no effect {reason}", option=name)

    def _make_number(self, name: str, make: type) -> None:
        """Check the kind of an option and make it a Python number. It may be a NumPy number."""
        value = getattr(self, name)
        if value is None and _DEFAULTS[name] is None:
            return
        # Asking abstract classes takes microseconds.
        if isinstance(value, int | float) and type(value) is make and abs(value) < 2**63:
            return
        kind, number = (Integral, "a whole number") if make is int else (Real, "a number")
        self._check(name, isinstance(value, kind) and not isinstance(value, bool), number)
        whole = isinstance(value, Rational)  # Python's are of any size
        self._check(name, not whole or abs(value) < 2**63, f"{number} between -2**63 and 2**63")
        if not isinstance(value, NotGiven):
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


def _least_new_tokens(defaults: GenerationDefaults, begin: int) -> int:
    """The new tokens that a checkpoint asks for at least. Its min_length counts the tokens that it begins with, too."""
    for name, before in ("min_new_tokens", 0), ("min_length", begin):
        if (least := defaults.get(name)) is not None:
            if not is_number(least, whole=True):
                raise defaults.refused(name, "a whole number, or set min_new_tokens yourself", "min_new_tokens")
            return int(least) - before
    return 0


Options.__init__ = refuse_unknown_keywords(Options.__init__, ARGUMENTS)  # type: ignore[method-assign]
_DEFAULTS = {field.name: field.default for field in fields(Options)}


def given_options(options: Options | Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that were given or differ from their defaults, or all of a mapping.

    Raises:
        SpecbeamError: the value is neither.
    """
    if isinstance(options, Options):
        return {
            name: value
            for name, default in _DEFAULTS.items()
            if (value := getattr(options, name)) != default
            or (isinstance(default, NotGiven) and not isinstance(value, NotGiven))
        }
    if options is not None and not isinstance(options, Mapping):
        raise SpecbeamError(f"options={options!r} is not allowed: give Options or a mapping, or options by their names")
    return {**(options or {})}
