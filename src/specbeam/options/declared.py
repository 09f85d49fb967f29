"""Each option of a request, declared once.

Parsers of arguments, fields of HTTP, keys of studies, the page's form, keywords for type checkers, the table in the
documentation and all lists of names follow from here (:mod:`specbeam.options.surfaces`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any, Literal, NamedTuple

LARGEST = 2**63
"""Numbers are smaller than this, so that arrays can hold them."""
MAX_LOGIT_BIAS = 10_000
"""The sum of such biases over a sequence stays far from the scores that mark forbidden sequences."""


class Kind(Enum):
    """What the values of an option are."""

    INTEGER = auto()
    NUMBER = auto()
    FLAG = auto()
    SIZE = auto()  # "auto", or an integer
    STOPPING = auto()  # true, false or "never"
    BIASES = auto()  # numbers by token id
    WORDS = auto()  # lists of token ids
    TOKENS = auto()  # a token id, or several
    TEXTS = auto()  # a text, or several
    CONSTRAINT = auto()
    FUNCTION = auto()
    FUNCTIONS = auto()  # one, or several


Need = Literal["beams", "sampling", "draft", "several"]
"""What an option has an effect with. Several: with beams, and with samples."""


class Range(NamedTuple):
    """The numbers that an option may have.

    Attributes:
        words: the numbers, for messages.
        exclusive: the lowest one is not among them.
        or_zero: 0 is among them.
    """

    low: float
    high: float
    words: str
    exclusive: bool = False
    or_zero: bool = False

    def __contains__(self, value: object) -> bool:
        number: Any = value
        in_order = self.low < number if self.exclusive else self.low <= number
        return bool((in_order and number <= self.high) or (self.or_zero and number == 0))


POSITIVE = Range(1, LARGEST - 1, "at least 1")
FACTOR = Range(1e-5, 1e5, "0.00001 to 100000")
PROBABILITY = Range(0, 1, "over 0 and at most 1", exclusive=True)
ALL_OR_TOP = Range(0, LARGEST - 1, "0 (all tokens) or more")


def up_to(largest: int) -> Range:
    return Range(1, largest, f'"auto", or 1 to {largest}')


class InPage(NamedTuple):
    """A field of the page's form.

    Attributes:
        start: what it holds at first; None for nothing.
        step: between two values.
        more: it is shown on demand.
        in_chat: the chat has it, too.
        start_in_chat: what it holds there.
        more_in_chat: it is shown there on demand.
        of_server: empty in the chat, it is the server's default.
    """

    label: str
    start: float | None = None
    step: float = 1
    more: bool = True
    in_chat: bool = False
    start_in_chat: float | None = None
    more_in_chat: bool = True
    of_server: bool = False


class Option(NamedTuple):
    """A declared option.

    Attributes:
        help: what it does, in one sentence without capital and full stop.
        details: what the documentation says beside it. Brackets have what holds if it is not given.
        annotation: the type of the values that :class:`specbeam.Options` stores.
        accepts: the type of the values that callers may give, where it is another one.
        default: what it is stored as if it is not given. None: the checkpoint decides.
        otherwise: the value in force if the checkpoint does not decide, either.
        needs: what it has an effect with.
        warper: transformers' class that shapes the distribution of draws so, and the attribute that has the value.
            The value in ``otherwise`` leaves the distribution as it is, and another one asks for sampling.
        of_checkpoint: the value of a checkpoint fills it in, is read in another place, or is left to the caller. None:
            checkpoints have no such setting.
        changes_text: a token or a score can depend on it.
        forbids: it can take tokens away.
        http: whether a field over HTTP sets it, or the name of the field if it is another one.
        metavar: of its values on the command line; None if it is not offered there.
        speech: transcription has it, too, with the same values.
        page: its field in the page.
        others: its names in other tools, and likely slips.
    """

    name: str
    annotation: str
    default: Any
    kind: Kind
    help: str
    details: str
    range: Range | None = None
    accepts: str | None = None
    otherwise: Any = None
    needs: frozenset[Need] = frozenset()
    warper: tuple[str, str] | None = None
    of_checkpoint: Literal["fills", "read", "left"] | None = None
    changes_text: bool = True
    forbids: bool = False
    http: bool | str = False
    metavar: str | None = None
    speech: bool = False
    page: InPage | None = None
    others: tuple[str, ...] = ()

    @property
    def unset(self) -> Any:
        """The value in force if nobody gives one."""
        return self.otherwise if self.default is None else self.default

    @property
    def http_name(self) -> str | None:
        """The field over HTTP that sets it."""
        return self.name if self.http is True else self.http or None

    @property
    def sentence(self) -> str:
        return f"{self.help[0].upper()}{self.help[1:]}."

    @property
    def description(self) -> str:
        """All that the documentation says."""
        unset = "" if self.otherwise is None else f"[{self.otherwise}]"
        return " ".join(filter(None, (self.sentence, self.details, unset)))

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return f"--{self.name.replace('_', '-')}"


class NotGiven(int):
    """The default of an option. The same number is another type where a caller gives it."""


def option(kind: Kind, help: str, details: str = "", *, default: Any = None, needs: Any = (), **rest: Any) -> Any:
    """Declare an option, with the attributes of :class:`Option`."""
    declared = {"kind": kind, "help": help, "details": details, "needs": frozenset(needs), **rest}
    return field(default=default, metadata=declared)


SHAPES: Any = {"needs": {"sampling"}, "of_checkpoint": "fills", "http": True}
OF_DRAFT: Any = {"needs": {"draft"}, "changes_text": False, "http": True, "default": "auto"}
OF_DRAFT_MODEL: Any = {"needs": {"draft", "sampling"}, "changes_text": False, "http": True}
OF_OPENAI: Any = {"range": Range(-2, 2, "-2 to 2"), "default": 0.0, "http": True, "metavar": "X"}


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The options."""

    max_new_tokens: int = option(
        Kind.INTEGER,
        "end after this many new tokens",
        "The model's context may end a sequence earlier.",
        range=POSITIVE,
        default=256,
        of_checkpoint="left",
        http="max_tokens",
        metavar="N",
        speech=True,
        page=InPage("New tokens", start=48, more=False, in_chat=True, start_in_chat=512, more_in_chat=False),
        others=(
            *("max_tokens", "max_length", "max_completion_tokens", "max_gen_toks", "max_decoding_length"),
            *("n_predict", "num_predict"),
        ),
    )
    min_new_tokens: int | None = option(
        Kind.INTEGER,
        "do not end before this many new tokens",
        "No end-of-sequence token can be chosen before, and no stop string ends the text [the checkpoint's, or what "
        "its min_length leaves after the prompt; else 0].",
        range=Range(0, LARGEST - 1, "0 to max_new_tokens"),
        of_checkpoint="read",
        forbids=True,
        http="min_tokens",
        metavar="N",
        others=("min_tokens", "min_length", "min_decoding_length"),
    )
    do_sample: bool | None = option(
        Kind.FLAG,
        "draw tokens instead of taking the likeliest",
        "If not given: sample when a temperature other than 0 is given, or one of top_k, top_p, min_p and typical_p "
        "that is not off.",
        of_checkpoint="left",
        metavar="",
        others=("sample", "sampling", "greedy", "use_sampling"),
    )
    temperature: float | None = option(
        Kind.NUMBER,
        "0 takes the likeliest token, higher ones draw more freely",
        "Logits are divided by it.",
        range=Range(1e-5, 1e5, "0, or 0.00001 to 100000", or_zero=True),
        otherwise=1.0,
        warper=("TemperatureLogitsWarper", "temperature"),
        metavar="T",
        page=InPage("Temperature", start=0, step=0.1, in_chat=True, more_in_chat=False, of_server=True),
        others=("temp", "sampling_temperature"),
        **SHAPES,
    )
    top_k: int | None = option(
        Kind.INTEGER,
        "draw among this many of the likeliest tokens; 0 allows all",
        "transformers' own default is 50.",
        range=ALL_OR_TOP,
        otherwise=0,
        warper=("TopKLogitsWarper", "top_k"),
        metavar="K",
        page=InPage("Top k", in_chat=True, of_server=True),
        others=("sampling_topk", "topk"),
        **SHAPES,
    )
    top_p: float | None = option(
        Kind.NUMBER,
        "draw among the likeliest tokens whose probabilities first sum to this",
        range=PROBABILITY,
        otherwise=1.0,
        warper=("TopPLogitsWarper", "top_p"),
        metavar="P",
        page=InPage("Top p", step=0.01, in_chat=True, more_in_chat=False, of_server=True),
        others=("sampling_topp", "topp", "nucleus"),
        **SHAPES,
    )
    min_p: float | None = option(
        Kind.NUMBER,
        "draw among tokens at least this fraction as likely as the likeliest one",
        range=Range(0, 1, "0 to 1"),
        otherwise=0.0,
        warper=("MinPLogitsWarper", "min_p"),
        metavar="P",
        **SHAPES,
    )
    typical_p: float | None = option(
        Kind.NUMBER,
        "draw among the tokens of most expected surprise whose probabilities first sum to this",
        'Their surprise is nearest to the expected one (Meister et al. 2023, "Locally Typical Sampling", 4).',
        range=PROBABILITY,
        otherwise=1.0,
        warper=("TypicalLogitsWarper", "mass"),
        metavar="P",
        others=("typical", "typ_p"),
        **SHAPES,
    )
    repetition_penalty: float | None = option(
        Kind.NUMBER,
        "over 1 makes repetition less likely",
        "That is of tokens of the sequence, prompt included.",
        range=FACTOR,
        otherwise=1.0,
        of_checkpoint="fills",
        http=True,
        metavar="R",
        speech=True,
        page=InPage("Repetition penalty", step=0.05, in_chat=True, of_server=True),
        others=("repeat_penalty", "rep_pen"),
    )
    no_repeat_ngram_size: int | None = option(
        Kind.INTEGER,
        "no run of this many tokens comes twice; 0 allows all",
        "The prompt counts, too.",
        range=Range(0, LARGEST - 1, "0 (off) or more"),
        otherwise=0,
        of_checkpoint="fills",
        forbids=True,
        http=True,
        metavar="N",
        speech=True,
        page=InPage("No repeated n-grams"),
        others=("no_repeat_ngram", "block_ngram_repeat"),
    )
    frequency_penalty: float = option(
        Kind.NUMBER,
        "subtracted from a token's score for each time it was generated",
        "It is OpenAI's.",
        others=("frequence_penalty",),
        **OF_OPENAI,
    )
    presence_penalty: float = option(
        Kind.NUMBER,
        "subtracted from a token's score once it was generated",
        "It is OpenAI's.",
        others=("presence_penality",),
        **OF_OPENAI,
    )
    logit_bias: Any = option(
        Kind.BIASES,
        "added to a token's score; -inf forbids it",
        "It is OpenAI's: numbers from -10000 to 10000, or -inf, by token id.",
        accepts="Mapping[int, float] | None",
        forbids=True,
        http=True,
        metavar="ID=X",
        others=("sequence_bias",),
    )
    bad_words_ids: Any = option(
        Kind.WORDS,
        "token ids that the text must not have in this order; specbeam tokens shows a word's ids",
        "The prompt may have them. A list of one end token alone has no effect, as in transformers [the checkpoint's].",
        accepts="Iterable[Iterable[int]] | None",
        of_checkpoint="read",
        forbids=True,
        metavar="ID,ID,...",
        others=("bad_words", "suppress_tokens", "suppress_sequences"),
    )
    seed: int | None = option(
        Kind.INTEGER,
        "the same seed draws the same text",
        "What else runs in the batch makes no difference. Without sampling a seed is refused.",
        range=Range(0, LARGEST - 1, "0 to 2**63 - 1"),
        needs={"sampling"},
        http=True,
        metavar="N",
        speech=True,
        page=InPage("Seed", in_chat=True),
        others=("random_seed", "rng_seed", "sampler_seed"),
    )
    num_beams: int = option(
        Kind.INTEGER,
        "beam search with this many beams; 1 is greedy search or sampling",
        "More than 1 with sampling is beam sampling.",
        range=POSITIVE,
        default=NotGiven(1),  # nbest has other defaults
        needs={"beams"},
        of_checkpoint="left",
        http=True,
        metavar="B",
        speech=True,
        page=InPage("Beams", start=4, more=False),
        others=("beam", "beams", "beam_size", "beam_width", "best_of", "use_beam_search"),
    )
    num_return_sequences: int = option(
        Kind.INTEGER,
        "return this many of the best beams, or samples",
        "They are the best finished hypotheses of beam search, else independent samples.",
        range=POSITIVE,
        default=NotGiven(1),
        needs={"several"},
        of_checkpoint="left",
        http="n",
        metavar="N",
        speech=True,
        page=InPage("Texts"),
        others=("n", "num_return", "num_samples", "num_hypotheses"),
    )
    distinct: bool | None = option(
        Kind.FLAG,
        "return beams whose texts differ, not only their tokens",
        "Decoded texts count, with special tokens written out and without the end token. Of hypotheses that decode "
        "alike the best is kept, and others are returned instead of the rest (docs/exactness.md). Without a tokenizer, "
        "they differ by their tokens without the end token [True under a constraint, else False, as in transformers].",
        needs={"beams"},
        http=True,
        metavar="",
    )
    length_penalty: float | None = option(
        Kind.NUMBER,
        "over 0 favours long beams",
        "Hypotheses compete by log-probability / length ** length_penalty.",
        range=Range(-10, 10, "-10 to 10"),
        otherwise=1.0,
        needs={"beams"},
        of_checkpoint="fills",
        http=True,
        metavar="X",
        speech=True,
        page=InPage("Length penalty", step=0.1),
    )
    early_stopping: bool | str | None = option(
        Kind.STOPPING,
        "whether beam search ends once there are enough finished beams: true, false or never",
        "True stops beam search when num_beams hypotheses are finished. False stops it when the best beam, if it ended "
        'now, would not beat the worst of them. "never" stops it when the best beam would not beat it at any length.',
        otherwise=False,
        needs={"beams"},
        of_checkpoint="fills",
        http=True,
        metavar="E",
        others=("stop_early", "allow_early_exit"),
    )
    num_beam_groups: int = option(
        Kind.INTEGER,
        "diverse beam search with this many groups of beams",
        "Each group is kept off the tokens of the groups before it.",
        range=POSITIVE,
        default=1,
        needs={"beams"},
        of_checkpoint="left",
        http=True,
        metavar="G",
    )
    diversity_penalty: float = option(
        Kind.NUMBER,
        "subtracted from the score of a token that another group chose",
        "It counts for each beam of an earlier group that chose the token in the same step. It is over 0 if there are "
        "groups.",
        range=Range(0, MAX_LOGIT_BIAS, f"0 to {MAX_LOGIT_BIAS}"),
        default=0.0,
        needs={"beams"},
        of_checkpoint="left",
        http=True,
        metavar="X",
    )
    num_draft_tokens: int | str = option(
        Kind.SIZE,
        "how far the draft looks ahead, in tokens",
        '"auto" adapts to acceptance and to the cost of forward passes.',
        range=up_to(64),
        metavar="K",
        page=InPage("Draft length", more=False),
        others=(
            *("num_assistant_tokens", "num_speculative_tokens", "prompt_lookup_num_tokens", "n_draft", "draft_max"),
            "gamma",
        ),
        **OF_DRAFT,
    )
    draft_width: int | str = option(
        Kind.SIZE,
        "draft tokens per level of the draft tree",
        "The levels of a draft model are below the sequence, or below all beams, and those of lookups below each "
        'sequence or beam. "auto" adapts for a draft model, and is 1 for lookups.',
        range=up_to(1024),
        metavar="W",
        page=InPage("Draft width", more=False),
        **OF_DRAFT,
    )
    draft_budget: int | str = option(
        Kind.SIZE,
        "the maximum number of draft tokens per forward pass",
        'It is of the target. "auto" adapts.',
        range=up_to(4096),
        metavar="N",
        **OF_DRAFT,
    )
    draft_temperature: float | None = option(
        Kind.NUMBER,
        "the temperature of a draft model",
        "It changes how many draft tokens are accepted, but no probability of a sequence [temperature].",
        range=FACTOR,
        **OF_DRAFT_MODEL,
    )
    draft_top_k: int | None = option(
        Kind.INTEGER,
        "the top_k of a draft model",
        "It changes how many draft tokens are accepted, but no probability of a sequence [top_k].",
        range=ALL_OR_TOP,
        **OF_DRAFT_MODEL,
    )
    bound_rule: bool = option(
        Kind.FLAG,
        "leave out beams that provably cannot matter",
        "False waits for all of them in each step, with the same result (docs/exactness.md). Without beams it is "
        "refused.",
        default=True,
        needs={"beams"},
        changes_text=False,
    )
    eos_token_id: Any = option(
        Kind.TOKENS,
        "a token that ends the text",
        "One id or several (kept as a tuple) [the checkpoint's].",
        accepts="int | Iterable[int] | None",
        of_checkpoint="read",
        http="stop_token_ids",
        metavar="ID",
        others=("eos", "eos_id", "eos_token", "end_token", "stop_token_ids"),
    )
    stop_strings: Any = option(
        Kind.TEXTS,
        "end before this text",
        "One string or several (kept as a tuple). The first that appears in the new text counts. Special tokens count "
        'there as they are written, such as "<|im_end|>".',
        accepts="str | Iterable[str] | None",
        default=(),
        http="stop",
        metavar="TEXT",
        page=InPage("Stop text"),
        others=("stop", "stops", "stopping_strings", "stop_words", "stop_sequences"),
    )
    top_logprobs: int | None = option(
        Kind.INTEGER,
        "also return the log-probabilities of this many of the likeliest tokens at the position of each new token",
        "They are in :class:`specbeam.Sequence`. None for none.",
        range=Range(0, LARGEST - 1, "0 or more, or None"),
        changes_text=False,
        speech=True,
        others=("logprobs", "log_probs", "output_scores", "output_logits", "return_log_prob"),
    )
    share_prefix: bool = option(
        Kind.FLAG,
        "share the KV cache of the prompt's first tokens with other requests of the engine",
        "No result changes, only the time of the prefill.",
        default=True,
        changes_text=False,
    )
    trace: bool = option(
        Kind.FLAG,
        "record in the result the drafted, accepted and chosen tokens of each round",
        default=False,
        changes_text=False,
        http=True,
    )
    constraint: Any = option(
        Kind.CONSTRAINT,
        "the sequences that may be generated",
        "A :class:`specbeam.JsonSchema`, :class:`specbeam.Regex`, :class:`specbeam.Grammar` or "
        ":class:`specbeam.Choice`, a :class:`specbeam.TokenTrie`, or another :class:`specbeam.constraints.Constraint`.",
        accepts="Constraint | OutputSpec | None",
        forbids=True,
        others=("constraints", "grammar", "choices", "guided_choice", "allowed_tokens", "force_words_ids"),
    )
    prefix_allowed_tokens_fn: Any = option(
        Kind.FUNCTION,
        "a function that returns the ids of the tokens that may follow",
        "As in transformers, it is called with 0 and the token ids so far, prompt included (int64 array [length]).",
        accepts="AllowedTokens | None",
        forbids=True,
    )
    logits_processor: Any = option(
        Kind.FUNCTIONS,
        "one function or several (kept as a tuple) that change scores",
        "As in transformers, each is called with token ids (int64 [n, length], prompts included) and scores (float32 "
        "[n, vocab]), and returns scores. The scores are log-probabilities in beam search, else logits, after all "
        "other processors. Both are NumPy arrays. Functions that are marked by :func:`specbeam.tensors`, and "
        "processors of transformers, get tensors on the model's device.",
        accepts="LogitsProcessor | list[LogitsProcessor] | tuple[LogitsProcessor, ...] | None",
        default=(),
        forbids=True,
        others=("logits_processors", "processors"),
    )

    def __post_init__(self) -> None:
        raise NotImplementedError  # Options checks the values


OPTIONS: Mapping[str, Option] = {
    one.name: Option(one.name, str(one.type), one.default, **one.metadata) for one in fields(Declared)
}


def names_where(holds: Any) -> tuple[str, ...]:
    """The names of the options of which something holds."""
    return tuple(name for name, one in OPTIONS.items() if holds(one))


SHAPING = {name: one.otherwise for name, one in OPTIONS.items() if one.warper is not None}
"""The options that shape the distribution of draws, in the order of their effects, and the values without effect."""
MAX_SIZES: Mapping[str, int] = {
    name: int(one.range.high) for name, one in OPTIONS.items() if one.kind is Kind.SIZE and one.range is not None
}
"""The largest allowed values of the draft sizes."""
OBJECTS = names_where(lambda one: one.kind in (Kind.CONSTRAINT, Kind.FUNCTION, Kind.FUNCTIONS))
"""Options that are objects of the caller, which no file can hold. A constraint may be described by plain data."""
