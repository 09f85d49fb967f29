"""``specbeam compare``: the same prompts with several strategies, side by side."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from statistics import fmean
from typing import Any

from specbeam import plugins
from specbeam.cli.arguments import add_generation_to, check_sources, load_draft, load_model, some_of
from specbeam.cli.generate import numbered_texts
from specbeam.cli.printing import json_line, one_line, print_lines
from specbeam.cli.prompts import read_rows
from specbeam.errors import FAILED, SpecbeamError, located, wrong_value
from specbeam.options.declared import MAX_SIZES, OPTIONS, Need
from specbeam.options.options import Options

TWINS = {"greedy": None, "speculative": "greedy", "beam": None, "speculative-beam": "beam", "sample": None}
"""The strategies in the order they run. Each has the strategy whose text it must reproduce, or None."""
WITH_BEAMS, WITH_DRAFTS = ("beam", "speculative-beam"), ("speculative", "speculative-beam")
WITH: dict[Need, tuple[str, ...]] = {
    "sampling": ("sample",),
    "several": WITH_BEAMS,
    "beams": WITH_BEAMS,
    "draft": WITH_DRAFTS,
}
"""The strategies that have what an option needs."""
ONLY: dict[str, tuple[str, ...]] = {
    **{name: WITH[need] for name, option in OPTIONS.items() for need in option.needs},
    **dict.fromkeys(("draft", "draft_corpus"), WITH_DRAFTS),
}
"""The strategies of the options that not all strategies have."""
WARM_UP_TOKENS = 8
LINE_WIDTH = 100
DEFAULT_BEAMS = 4

COLUMNS: dict[str, tuple[str, Callable[[Any], float | None]]] = {
    "tokens/s": (".1f", lambda result: result.stats.tokens_per_second),
    "target passes": (".0f", lambda result: result.stats.target_passes),
    "draft passes": (".0f", lambda result: result.stats.draft_passes),
    "steps/pass": (".2f", lambda result: result.stats.steps_per_target_pass),
    "accepted": (".0%", lambda result: result.stats.acceptance_rate),
    "log-prob": (".3f", lambda result: result.sequences[0].log_prob),
}
"""The columns of the table: how a figure is written, and where it is in a result."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        help="compare strategies on a prompt, side by side",
        description="Run each prompt with each strategy, one at a time, and show speed and texts side by side. "
        "A step is one token, or with beams one token of each beam. Accepted is the acceptance rate of the draft "
        "tokens. Log-prob is the log-probability of the best text, the sum over its tokens. Beam search ranks by the "
        "score in --json, which divides it by length ** length_penalty. Times include the prefill, but not a short "
        "warm-up.",
        conflict_handler="resolve",  # some of generate's options have other defaults here
    )
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="the prompts; - reads one from standard input")
    parser.add_argument(
        "--strategies",
        "--methods",
        type=strategies,
        default=[name for name in TWINS if name != "sample"],
        metavar="LIST",
        help=f"some of {','.join(TWINS)} (default all but sample), and methods of your own as module:name",
    )
    add_generation_to(parser, max_new_tokens=48)
    parser.add_argument("--do-sample", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
    parser.add_argument("--num-beams", type=int, metavar="B", help=f"beams for beam search (default {DEFAULT_BEAMS})")
    parser.add_argument("--draft", metavar="SOURCE", help="as in generate (default ngram)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object per prompt")
    parser.set_defaults(run=run)


def strategies(text: str) -> list[str]:
    """The strategies that a text has between commas: ours in the order of TWINS, then custom ones."""
    names = [name.strip() for name in text.split(",")]
    custom = [name for name in names if name not in TWINS and plugins.names_one(name, "strategy")]
    ours = ",".join(name for name in names if name not in custom)
    return [*(some_of(TWINS, "strategy", ours) if ours or not custom else ()), *dict.fromkeys(custom)]


def options_by_strategy(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The options of each strategy."""
    if args.do_sample is not None:
        raise SpecbeamError("--strategies has sample for sampling: leave out --do-sample")
    values = {name: value for name, value in vars(args).items() if value is not None}
    for name, users in ONLY.items():
        has_own = bool({*args.strategies} - {*TWINS}) and "speculative" not in users
        if name in values and not (has_own or {*users} & {*args.strategies}):
            says = f"{name}={values[name]} is for {' and '.join(users)}: add one to --strategies"
            raise SpecbeamError(says, option=name)
    names = OPTIONS.keys() & values
    # A custom strategy gets all options but the sizes of drafts: it has none.
    chosen = {
        s: {n: values[n] for n in names if s in ONLY.get(n, TWINS) or (s not in TWINS and n not in MAX_SIZES)}
        for s in args.strategies
    }
    for strategy, options in chosen.items():
        if strategy == "sample":
            options["do_sample"] = True
        if strategy not in TWINS and "sample" in chosen and not Options.of({**options, "seed": None}).samples:
            options.pop("seed", None)  # it is for the samples
        if strategy in WITH_BEAMS and options.setdefault("num_beams", DEFAULT_BEAMS) < 2:
            raise wrong_value("num_beams", options["num_beams"], "is no beam search: give 2 or more")
        Options.of(options)
    return chosen


def run(args: argparse.Namespace) -> int:
    chosen = options_by_strategy(args)  # wrong input is refused before a model is loaded
    check_sources(args)
    custom = {s: plugins.resolve(s, "strategy", from_here=True) for s in chosen if s not in TWINS}
    prompts = [row.prompt for prompt in args.prompts for row in read_rows(prompt, None)]

    from tqdm import tqdm

    from specbeam.api.generation import generate
    from specbeam.engine import Engine

    drafted = {*WITH_DRAFTS} & {*chosen}
    if drafted and args.draft is None:
        args.draft = "ngram"
    lm = load_model(args)
    draft = load_draft(args, lm)
    engine = Engine(lm)
    how = {"system": args.system, "raw": args.raw}
    where = {s: {**how, "draft": draft if s in drafted else None, "strategy": custom.get(s)} for s in chosen}
    for number, prompt in enumerate(prompts, 1):
        for strategy, options in chosen.items():
            with located(f"prompt {number}" if len(prompts) > 1 else ""):
                engine.check(prompt, options, **where[strategy])

    done: list[dict[str, Any]] = []
    with tqdm(total=len(prompts) * len(chosen), desc="warm-up", leave=False, disable=None) as bar:
        for strategy, options in chosen.items():
            few = {"max_new_tokens": min(WARM_UP_TOKENS, args.max_new_tokens), "min_new_tokens": 0}
            with suppress(Exception):  # the measured run reports it
                generate(lm, prompts[0], **where[strategy], **options | few)
        for number, prompt in enumerate(prompts, 1):
            results: dict[str, Any] = {}
            try:
                if not args.json:
                    print_lines(*heading(prompt, args.draft), header())
                for strategy, options in chosen.items():
                    bar.set_description(strategy)
                    results[strategy] = generate(lm, prompt, **where[strategy], **options)
                    bar.update()
                    if not args.json:
                        print_lines(row(strategy, [results]))
            except OSError:  # nobody reads on, or the disk is full
                raise
            except Exception as error:  # the other prompts go on after any error
                print_lines(f"specbeam: prompt {number} failed: {one_line(error)}", file=sys.stderr)
                continue
            except KeyboardInterrupt:
                print_lines(*(means(chosen, done) if not args.json else ()))
                left = "give only the others to go on" if done else "the same command begins again"
                raise KeyboardInterrupt(f"{len(done)} of {len(prompts)} prompts are finished; {left}") from None
            done.append(results)
            print_lines(*([json_line(to_dict(prompt, args.draft, results))] if args.json else texts(results)))
        if not args.json:
            print_lines(*means(chosen, done))
    return 0 if len(done) == len(prompts) else FAILED


def means(strategies: Iterable[str], done: list[dict[str, Any]]) -> Iterator[str]:
    """The table of several prompts."""
    if len(done) > 1:
        yield from (f"means of n={len(done)} prompts, each run once per strategy", "", header())
        yield from (row(strategy, done) for strategy in strategies)
        yield from ("", "No difference of speed is settled by single runs: specbeam study measures with intervals.")


def to_dict(prompt: Any, draft: str | None, results: dict[str, Any]) -> dict[str, Any]:
    """The results of a prompt as plain data."""
    strategies = {s: result.to_dict() | {"identical": identical(s, results)} for s, result in results.items()}
    return {"prompt": prompt, "draft": draft, "strategies": strategies}


def identical(strategy: str, results: dict[str, Any]) -> bool | None:
    """Whether a strategy found its plain twin's texts. None if the twin did not run."""
    twin = results.get(TWINS.get(strategy) or "")
    if twin is None:
        return None
    return [s.token_ids for s in results[strategy].sequences] == [s.token_ids for s in twin.sequences]


def heading(prompt: str, draft: str | None) -> Iterator[str]:
    yield textwrap.shorten(f"prompt: {prompt}", LINE_WIDTH, placeholder=" ...")
    if draft is not None:
        yield f"draft: {draft}"
    yield ""


def header() -> str:
    return "  ".join([f"{'strategy':16}", *(f"{name:>8}" for name in COLUMNS), "identical"])


def row(strategy: str, prompts: list[dict[str, Any]]) -> str:
    """A line of the table: a strategy's figures on one prompt, or their means over several prompts."""
    cells = [f"{strategy:16}"]
    for name, (form, figure) in COLUMNS.items():
        known = [value for results in prompts if (value := figure(results[strategy])) is not None]
        cells.append(f"{f'{fmean(known):{form}}' if known else '-':>{max(8, len(name))}}")
    same = [identical(strategy, results) for results in prompts]
    if len(same) > 1 and None not in same:
        verdict = f"{same.count(True)} of {len(same)}"
    else:
        verdict = {None: "-", True: "yes", False: "differs"}[same[0]]
    return "  ".join([*cells, f"{verdict:>9}"])


def texts(results: dict[str, Any]) -> Iterator[str]:
    """Each different text once, then notes on beams, on unused drafts and strategies that differ from their twins."""
    strategies_by_text: dict[tuple[str, ...], list[str]] = {}
    for strategy, result in results.items():
        strategies_by_text.setdefault(tuple(s.text for s in result.sequences), []).append(strategy)
    for names in strategies_by_text.values():
        yield from ("", f"{', '.join(names)}:")
        for line in "\n".join(numbered_texts(results[names[0]])).split("\n"):
            yield from textwrap.wrap(line, LINE_WIDTH, initial_indent="  ", subsequent_indent="  ") or [""]
    yield ""
    for strategy, result in results.items():
        if (share := result.stats.evaluated_beams) is not None and share < 1:
            yield f"{strategy}: {share:.0%} of the beams were evaluated, since the others could not matter\n"
        if result.stats.draft_note is not None:
            yield f"{strategy}: {result.stats.draft_note}\n"
        if identical(strategy, results) is False:
            twin = TWINS[strategy]
            yield f"{strategy} differs from {twin}: a near-tie in floating point can do that (docs/exactness.md)\n"
