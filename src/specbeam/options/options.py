"""The options of a request: one dataclass with transformers' names, validated once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from specbeam.errors import SpecbeamError, located, wrong_value
from specbeam.options.declared import MAX_SIZES, OPTIONS, SHAPING, Declared, Need, NotGiven
from specbeam.options.generation_defaults import GenerationDefaults, is_number
from specbeam.options.names import nearest_name
from specbeam.options.values import check, checked

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


class Options(Declared):
    """Generation options of one request, named as in transformers' ``GenerationConfig``.

    ``None`` means that the option is not given. Then the checkpoint's generation settings decide (docs/models.md), and
    without a value there, the value in brackets. Whether to sample is never taken from the checkpoint: the default is
    greedy.

    Raises:
        SpecbeamError: an unknown option, a value out of its range, options that contradict each other, or an option
            without effect.
    """

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is not None or option.default is not None:
                object.__setattr__(self, name, checked(option, value))
        self._check("min_new_tokens", (self.min_new_tokens or 0) <= self.max_new_tokens, "0 to max_new_tokens")
        self._check_sampling()
        self._check_beams()

    def _check_sampling(self) -> None:
        if self.do_sample and self.temperature == 0:
            both = ("temperature", "do_sample")
            raise SpecbeamError("temperature=0 is greedy and contradicts do_sample=True: leave one out", option=both)
        # The likeliest token is in every truncated distribution: temperature=0 honours top_p and the others.
        if self.do_sample is False and self.temperature != 0:
            for name in self._shaping:
                raise self._without_effect(name, "with do_sample=False: leave one out")
        if not self.samples:
            how = "give do_sample=True or a temperature over 0, or leave it out"
            for name in self._given("sampling"):
                if name not in SHAPING:
                    raise self._without_effect(name, f"without sampling: {how}")

    def _check_beams(self) -> None:
        draws = self.samples and self.num_beams == 1
        allowed = "1 to num_beams, or do_sample=True without beams"
        holds = self.num_return_sequences <= self.num_beams or draws
        self._check("num_return_sequences", holds, allowed, "do_sample")
        if self.num_beams == 1:
            for name in self._given("beams"):
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

    @property
    def draft_sizes(self) -> dict[str, int | None]:
        """The sizes of drafts by their options; None for one that adapts."""
        sizes = {name: getattr(self, name) for name in MAX_SIZES}
        return {name: None if isinstance(size, str) else size for name, size in sizes.items()}

    def check_drafting(self, drafts: bool) -> None:
        """Refuse options that contradict having a draft, or having none.

        Raises:
            SpecbeamError: sizes of a draft without a draft, or several samples with one.
        """
        for name, size in self.draft_sizes.items():
            if not drafts and size is not None:
                raise self._without_effect(name, "without a draft: give one, or leave it out")
        if drafts and self.num_return_sequences > self.num_beams:
            says = "samples cannot have a draft, which would tie them to each other: leave one out"
            raise wrong_value("num_return_sequences", self.num_return_sequences, says)

    def __getitem__(self, name: str) -> Any:
        """The value of an option that is in force once a checkpoint's values are filled in."""
        value = getattr(self, name)
        return OPTIONS[name].unset if value is None else value

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
        """The sampling options that change the distribution. Users of other tools pass values without effect along."""
        return [name for name, neutral in SHAPING.items() if getattr(self, name) not in (None, neutral)]

    @property
    def is_distinct(self) -> bool:
        """Whether the hypotheses of beam search must differ as decoded texts."""
        return self.constraint is not None if self.distinct is None else self.distinct

    @property
    def num_texts(self) -> int:
        """The maximum number of sequences that may grow at once: beams, or samples."""
        return max(self.num_beams, self.num_return_sequences)

    def with_defaults(self, defaults: GenerationDefaults, begin: int = 0) -> Options:
        """These options, with missing values filled in from a checkpoint's generation settings.

        Args:
            begin: the tokens that the sequence begins with: the prompt, or start tokens.
        """
        method = {*(("sampling",) if self.samples else ()), *(("beams",) if self.num_beams > 1 else ())}
        fill = {
            name: defaults[name]
            for name, option in OPTIONS.items()
            if option.of_checkpoint == "fills" and option.needs <= method and getattr(self, name) is None
            if name in defaults
        }
        if fill.get("temperature") == 0:  # the checkpoint asks for greedy, but the caller asked to sample
            del fill["temperature"]
        if self.min_new_tokens is None and (minimum := _min_new_tokens_of(defaults, begin)) > 0:
            fill["min_new_tokens"] = min(minimum, self.max_new_tokens)
        if not fill:
            return self
        with located(f"the model's {defaults.file}", ", or set the option yourself"):
            return replace(self, **fill)

    def _given(self, need: Need) -> Iterator[str]:
        """The options that were given and that have an effect only with something."""
        for name, option in OPTIONS.items():
            if need in option.needs and getattr(self, name) != option.default:
                yield name

    def _check(self, name: str, holds: bool, allowed: str, *named: str) -> None:
        check(name, holds, getattr(self, name), allowed, *named)

    def _without_effect(self, name: str, reason: str) -> SpecbeamError:
        return SpecbeamError(f"{name}={getattr(self, name)} has no effect {reason}", option=name)


def _min_new_tokens_of(defaults: GenerationDefaults, begin: int) -> int:
    """The new tokens that a checkpoint asks for at least. Its min_length counts the tokens that it begins with, too."""
    for name, before in ("min_new_tokens", 0), ("min_length", begin):
        if (minimum := defaults.get(name)) is not None:
            if not is_number(minimum, integer=True):
                raise defaults.refused(name, "an integer, or set min_new_tokens yourself", "min_new_tokens")
            return int(minimum) - before
    return 0


Options.__init__ = refuse_unknown_keywords(Options.__init__, ARGUMENTS)  # type: ignore[method-assign]
DESCRIPTIONS = "".join(f"        {name}: {option.description}\n" for name, option in OPTIONS.items())
Options.__doc__ = str(Options.__doc__).replace("    Raises:", f"    Attributes:\n{DESCRIPTIONS}\n    Raises:")


def given_options(options: Options | Mapping[str, Any] | None) -> dict[str, Any]:
    """The options that were given or differ from their defaults, or all of a mapping.

    Raises:
        SpecbeamError: the value is neither.
    """
    if isinstance(options, Options):
        return {
            name: value
            for name, option in OPTIONS.items()
            if (value := getattr(options, name)) != option.default
            or (isinstance(option.default, NotGiven) and not isinstance(value, NotGiven))
        }
    if options is not None and not isinstance(options, Mapping):
        raise SpecbeamError(f"options={options!r} is not allowed: give Options or a mapping, or options by their names")
    return {**(options or {})}
