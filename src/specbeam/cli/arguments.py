"""The arguments that several commands share, and the model, draft and options that they name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam import plugins
from specbeam.cli.prompts import read_rows
from specbeam.drafting.resolve import resolve_draft
from specbeam.errors import SpecbeamError, shown
from specbeam.options.declared import OPTIONS, SHAPING, Kind, Option
from specbeam.options.names import BACKENDS, LOOKUPS, MTP
from specbeam.options.options import Options
from specbeam.text import chat_templates
from specbeam.text.escapes import unescaped

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.models.model import LanguageModel
    from specbeam.models.prompts import Rendering

DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16", "float16")
FORMATS = ("auto", "keep", "int8", "int4", "float32")
OFFERED = [option for option in OPTIONS.values() if option.metavar is not None]
"""The options that commands have as they are declared."""
SAMPLING = (*SHAPING, "repetition_penalty")


def completer(*names: str) -> Callable[..., list[str]]:
    """Completes a model for argcomplete: names and aliases. Where none fits, the shell completes files."""

    def complete(prefix: str, **_: Any) -> list[str]:
        from specbeam.checkpoints.sources.registry import ALIASES

        return [name for name in (*names, *ALIASES) if name.startswith(prefix)]

    return complete


def add_source_to(parser: Any) -> None:
    source = parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="SOURCE",
        help="an alias, a folder, a .gguf file or a hub id (default %(default)s)",
    )
    source.completer = completer()


def add_revision_to(parser: Any) -> None:
    parser.add_argument("--revision", help="a branch, tag or commit of a hub id")


def add_generation_to(parser: argparse.ArgumentParser, max_new_tokens: int = 256, labels: bool = True) -> None:
    """The options of commands that generate: for a model, its prompts, the generation and a draft."""
    add_model_to(parser)
    add_options_to(parser, max_new_tokens, labels)
    add_draft_to(parser)


def add_model_to(parser: argparse.ArgumentParser) -> None:
    """The options for a model, and for the form in which it reads prompts."""
    model = parser.add_argument_group("model")
    add_source_to(model)
    add_revision_to(model)
    model.add_argument("--adapter", metavar="SOURCE", help="a LoRA adapter to merge into it: a folder or a hub id")
    add_placement_to(model)
    parser.add_argument("--system", type=typed_text, metavar="TEXT", help="a system message to put first")
    parser.add_argument("--raw", action="store_true", help="do not apply the model's chat template")


def add_thinking_to(parser: argparse.ArgumentParser) -> None:
    """The option for models that think first."""
    says = "let a model think first or not, if its chat template has a variable for it (default: the template's own)"
    parser.add_argument("--think", action=argparse.BooleanOptionalAction, help=says)


def thinking_of(lm: LanguageModel, think: bool | None, raw: bool) -> Rendering:
    """How the chat template renders messages for ``--think`` or ``--no-think``, or without either."""
    from specbeam.models.prompts import DEFAULT_RENDERING, Rendering
    from specbeam.structured.thoughts import thinking_variables

    if think is None:
        return DEFAULT_RENDERING
    template = "" if raw or not lm.has_chat_template else lm.tokenizer.get_chat_template()
    variables, ignored = thinking_variables(template, think)
    if ignored:
        option = "--think" if think else "--no-think"
        why = "no chat template is used" if not template else f"the chat template of {lm.source} has no variable for it"
        print(f"specbeam: {option} has no effect: {why}", file=sys.stderr)
    return Rendering(chat_template_kwargs=variables)


def add_placement_to(model: Any) -> None:
    """The options for the device and the precision of a model."""
    add = partial(model.add_argument, default="auto")
    backends = ("auto", *BACKENDS)
    add("--backend", choices=backends, metavar="NAME", help=f"{', '.join(backends)} (default %(default)s)")
    add("--device", help="auto, cpu, cuda, ... (default %(default)s)")
    exact = "float32 for transformers' own numbers"
    add("--dtype", choices=DTYPES, metavar="TYPE", help=f"{', '.join(DTYPES)} (default %(default)s); {exact}")
    add("--quantize", choices=FORMATS, metavar="TYPE", help=f"on a CPU: {', '.join(FORMATS)} (default %(default)s)")
    model.add_argument("--threads", type=int, metavar="N", help="on a CPU: the number of threads (default: all)")


def add_options_to(parser: argparse.ArgumentParser, max_new_tokens: int, labels: bool) -> None:
    """The options for generation: the fields of Options, under the same names.

    Args:
        labels: with --labels, which is a constraint. A command may have labels of its own.
    """
    options = parser.add_argument_group("generation (transformers' names; see specbeam.Options)")
    for option in OFFERED:
        if "draft" not in option.needs:
            add_option_to(options, option, max_new_tokens if option.name == "max_new_tokens" else None)
    add = partial(options.add_mutually_exclusive_group().add_argument, dest="constraint")
    add("--json-schema", type=json_schema, metavar="FILE", help="write JSON that is valid by the JSON Schema in a file")
    add("--regex", type=regex, metavar="PATTERN", help="write a text that matches a regular expression as a whole")
    add("--choice", action=Choices, metavar="TEXT", help="write one of these texts (repeatable)")
    if labels:
        add("--labels", type=labels_in, metavar="FILE", help="write one of the texts on the lines of a file")
    add("--grammar", type=grammar, metavar="FILE", help="write a text of a grammar: a file in Lark or GBNF")


def add_option_to(group: Any, option: Option, default: Any = None, usual: Any = None) -> None:
    """Add an option.

    Args:
        default: what it is if it is not given.
        usual: what its help calls the default. None: the default, or else the option's own.
    """
    how: dict[str, Any] = {"default": default, **READ[option.kind]}
    if option.kind is not Kind.FLAG:
        how["metavar"] = option.metavar
    usual = default if usual is None else usual
    usual = option.unset if usual is None else usual
    notes = [r"\n is a new line"] if option.kind is Kind.TEXTS else []
    notes += ["repeatable"] if how.get("action") in ("append", Biases) else []
    if usual not in (None, ()) and option.name not in SAMPLING:
        notes.append(f"default {usual:g}" if isinstance(usual, float) else f"default {usual}".lower())
    elif option.of_checkpoint == "read":
        notes.append("default: the model's own")
    group.add_argument(option.flag, help=option.help + (f" ({'; '.join(notes)})" if notes else ""), **how)


def add_sampling_to(group: Any) -> None:
    """The options that say how tokens are drawn: ``SAMPLING``."""
    for name in SAMPLING:
        add_option_to(group, OPTIONS[name])


def add_draft_to(parser: argparse.ArgumentParser) -> None:
    draft = parser.add_argument_group("draft (the same text sooner; see docs/speculation.md)")
    add = draft.add_argument
    source = add(
        "--draft",
        metavar="SOURCE",
        help="proposes the next tokens: a smaller model, mtp for the model's own draft head, ngram or suffix, which "
        "look them up in the text so far, or a function of your own as module:name (docs/guides/extend.md)",
    )
    source.completer = completer(*LOOKUPS, MTP)  # type: ignore[attr-defined]
    add("--draft-corpus", metavar="FILE", help="earlier texts for --draft suffix, one per line as for --prompts")
    for option in OFFERED:
        if "draft" in option.needs:
            add_option_to(draft, option)


def add_strategy_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        metavar="MODULE:NAME",
        help="a decoding method of your own, in place of the one that the options name: a function of a module on "
        "Python's path or in the current directory, or an entry point (docs/guides/extend.md)",
    )


def auto_or_int(value: str) -> str | int:
    return value if value == "auto" else int(value)


auto_or_int.__name__ = "number"  # in error messages


def typed_text(text: str) -> str:
    """A text with its escapes read (:mod:`specbeam.text.escapes`)."""
    try:
        return unescaped(text)
    except SpecbeamError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def token_and_number(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    return int(token), float(value)


token_and_number.__name__ = "ID=X"


class Biases(argparse.Action):
    """Collects pairs of a token id and a number in a dictionary."""

    def __call__(self, parser: Any, args: argparse.Namespace, pair: Any, option: str | None = None) -> None:
        token, value = pair
        setattr(args, self.dest, (getattr(args, self.dest) or {}) | {token: value})


class Choices(argparse.Action):
    """Collects texts in a description of a constraint."""

    def __call__(self, parser: Any, args: argparse.Namespace, text: Any, option: str | None = None) -> None:
        from specbeam.structured import Choice

        before = getattr(args, self.dest)
        try:
            setattr(args, self.dest, Choice((*(() if before is None else before.texts), text)))
        except SpecbeamError as error:
            parser.error(f"argument {option}: {error}")


def token_ids(text: str) -> list[int]:
    return [int(token) for token in text.split(",")]


token_ids.__name__ = "list of token ids"


def flag_or_text(value: str) -> bool | str:
    return {"true": True, "false": False}.get(value.lower(), value)


READ: dict[Kind, dict[str, Any]] = {
    Kind.INTEGER: {"type": int},
    Kind.NUMBER: {"type": float},
    Kind.FLAG: {"action": argparse.BooleanOptionalAction},
    Kind.SIZE: {"type": auto_or_int},
    Kind.STOPPING: {"type": flag_or_text},
    Kind.BIASES: {"type": token_and_number, "action": Biases},
    Kind.WORDS: {"type": token_ids, "action": "append"},
    Kind.TOKENS: {"type": int, "action": "append"},
    Kind.TEXTS: {"type": typed_text, "action": "append"},
}
"""How a parser reads an option, by its kind."""


def json_schema(path: str) -> Any:
    return described("JsonSchema", content_of(path))


def regex(pattern: str) -> Any:
    return described("Regex", pattern)


def grammar(path: str) -> Any:
    return described("Grammar", content_of(path))


def labels_in(path: str) -> Any:
    return described("Choice", [line for line in content_of(path).split("\n") if line.strip()])


def content_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        if any(part in path for part in ("{", "\n", "::=")):
            message = (
                f"{shown(path)} is the content of a file, not the name of one: write it to a file, and give its name"
            )
            raise argparse.ArgumentTypeError(message) from error
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error}") from error


def described(kind: str, given: Any) -> Any:
    """A description of a constraint. Its packages are imported only for that."""
    from specbeam import structured

    try:
        return getattr(structured, kind)(given)
    except SpecbeamError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def some_of(names: Collection[str], kind: str, text: str) -> list[str]:
    """The names that a text has between commas, in the order of ``names``. Raises ArgumentTypeError for others."""
    asked = [name.strip().replace("_", "-") for name in text.split(",") if name.strip()]
    for name in asked or [""]:
        if name not in names:
            wrong = f"{name!r} is no {kind}" if name else f"no {kind} is named"
            raise argparse.ArgumentTypeError(f"{wrong}: give some of {','.join(names)}")
    return [name for name in names if name in asked]


def options_of(args: argparse.Namespace, own: dict[str, Any] | None = None) -> Options:
    """The options from the command line. A prompt's ``own`` options take their place.

    Raises:
        SpecbeamError: an option is wrong, or contradicts having a draft or none.
    """
    options = Options.of(values_of(args) | (own or {}))
    options.check_drafting(args.draft is not None)
    return options


def values_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line gives, by the names of Options."""
    values = {name: getattr(args, name, None) for name in OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def check_sources(args: argparse.Namespace) -> None:
    """Refuse a model, draft or strategy that is not there. The imports that loading needs take seconds, so this comes
    first.

    Raises:
        SpecbeamError: no such file, folder or alias, or no such module, name or entry point.
    """
    if args.draft_corpus is not None:
        if args.draft != "suffix":
            raise SpecbeamError("--draft-corpus goes with --draft suffix")
        next(read_rows(None, args.draft_corpus))
    check_source(args.model)
    load_strategy(args)
    check_draft_source(args.draft)


def check_draft_source(source: str | None) -> None:
    """Refuse a draft that is not there."""

    def check(model: str) -> None:
        try:
            if model != MTP:
                check_source(model)
        except SpecbeamError as error:
            says = "give ngram, suffix, mtp, a model or module:name"
            raise SpecbeamError(f"--draft {model}: {says}; {error}") from error

    resolve_draft(source, check, from_here=True)


def check_source(source: str) -> None:
    """Refuse a model that is not there. An alias or a hub id may still have to be fetched, and is not looked up."""
    from specbeam.checkpoints import locate
    from specbeam.checkpoints.sources import hub
    from specbeam.checkpoints.sources.registry import ALIASES

    found = hub.ID.fullmatch(source)
    is_hub_id = found is not None and (found["pick"] or not source.endswith(".gguf")) and not source.startswith(".")
    if source not in ALIASES and not is_hub_id:
        locate(source)


def placement_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the options of ``add_placement_to`` say: the fields of :class:`specbeam.models.model.Placement`."""
    return {name: getattr(args, name) for name in ("backend", "device", "dtype", "quantize", "threads")}


def load_model(args: argparse.Namespace, says_precision: bool = True) -> LanguageModel:
    """Load the model as the options of ``add_model_to`` say.

    Args:
        says_precision: False for a command that says it in words of its own.
    """
    if not args.raw:
        chat_templates.render.start()  # while this process imports and loads
    from specbeam.models.model import Placement, load, load_silently, warn_of_settings

    placement = placement_of(args)
    if says_precision:
        return load(args.model, **placement, revision=args.revision, adapter=args.adapter)
    lm = load_silently(args.model, Placement(**placement), args.revision, args.adapter)
    warn_of_settings(lm)
    return lm


def load_draft(args: argparse.Namespace, lm: Any) -> Any:
    """Load the draft that ``--draft`` names, for the target ``lm``."""
    from specbeam.drafting.lookup import suffix_automaton

    if args.draft_corpus is not None:
        return suffix_automaton(lm, (row.prompt for row in read_rows(None, args.draft_corpus)))
    return resolve_draft(args.draft, lm.draft_model, from_here=True)


def load_strategy(args: argparse.Namespace) -> Any:
    """The user-defined strategy that ``--strategy`` names; None without one.

    Raises:
        SpecbeamError: there is no such module, name or entry point.
    """
    strategy = getattr(args, "strategy", None)  # not all commands have the option
    return None if strategy is None else plugins.resolve(strategy, "strategy", from_here=True)
