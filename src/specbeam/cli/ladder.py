"""``specbeam ladder``: the same text with and without a cache, compiled or not, and by the engine, timed."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import add_model_to, load_model, some_of
from specbeam.cli.printing import json_line, print_lines
from specbeam.cli.prompts import read_rows
from specbeam.errors import FAILED, SpecbeamError, Unsupported
from specbeam.options.options import Options
from specbeam.system.extras import require

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.ladder import Rung

RUNG_NUMBERS = [1, 2, 3, 4, 5]
DEFAULT_PROMPT = "Why is the sky blue?"
LINE_WIDTH = 100


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "ladder",
        help="time one greedy text without a cache, with one, compiled, and by the engine",
        description="Make one greedy text in five ways on every device, check that the texts are equal, and show the "
        "time of each way. The rungs: 1 no cache; 2 no cache, compiled; 3 KV cache; 4 KV cache, compiled; 5 specbeam's "
        "engine. Compiling takes minutes on a CPU: --rungs 1,3,5 leaves it out.",
        conflict_handler="resolve",  # --device has another default here
    )
    about = f'the prompt (default "{DEFAULT_PROMPT}"); - reads it from standard input'
    parser.add_argument("prompt", nargs="?", default=DEFAULT_PROMPT, metavar="PROMPT", help=about)
    parser.add_argument(
        "--rungs", type=rungs, default=RUNG_NUMBERS, metavar="LIST", help="some of 1,2,3,4,5 (default all)"
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="time N runs after a warm-up (default 3)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=32, metavar="N", help="end after N new tokens (default 32)"
    )
    add_model_to(parser)
    parser.add_argument("--device", default="all", help="all, cpu, cuda, mps, ... (default all)")
    parser.add_argument("--json", action="store_true", help="print only one JSON object")
    parser.set_defaults(run=run)


def rungs(text: str) -> list[int]:
    return [int(number) for number in some_of([*map(str, RUNG_NUMBERS)], "rung", text)]


def run(args: argparse.Namespace) -> int:
    Options.of({"max_new_tokens": args.max_new_tokens})  # wrong input is refused before a model is loaded
    if args.runs < 1:
        raise SpecbeamError(f"--runs {args.runs} is not allowed: give at least 1")
    prompt = next(read_rows(args.prompt, None)).prompt

    require("specbeam ladder", "torch")
    import torch
    from tqdm import tqdm

    from specbeam.backends.devices import choose_device, devices

    if args.device != "all":
        chosen = [choose_device(args.device)]
    elif args.backend == "cpu":
        chosen = ["cpu"]
    else:
        chosen = devices()
    finished: list[Rung] = []
    left = {device: [*args.rungs] for device in chosen}
    with tqdm(total=len(chosen) * len(args.rungs), unit="rung", leave=False, disable=None) as bar:
        try:
            for device in chosen:
                here: list[Rung] = []
                for rung in rungs_on(device, args, prompt, bar.set_description):
                    bar.update()
                    if not args.json:
                        print_lines(*([] if here else heading(rung, prompt, args.runs)), row(rung, [*here, rung]))
                    here.append(rung)
                    finished.append(rung)
                    left[device].remove(rung.number)
                if not args.json:
                    print_lines(*verdict(here))
        except KeyboardInterrupt:
            others = " and ".join(
                f"--device {device} --rungs {','.join(map(str, rungs))}" for device, rungs in left.items() if rungs
            )
            total = len(chosen) * len(args.rungs)
            raise KeyboardInterrupt(
                f"{len(finished)} of {total} rungs are finished; for the others give {others}"
            ) from None
        finally:  # after Ctrl-C, too
            if args.json and finished:
                about = {"model": args.model, "prompt": prompt, "torch": torch.__version__}
                print_lines(json_line(about | {"rungs": [*map(to_dict, finished)]}))
    wrong = [rung for rung in finished if rung.difference is not None and not rung.difference.near_tie]
    return FAILED if wrong or all(rung.failure for rung in finished) else 0


def rungs_on(device: str, args: argparse.Namespace, prompt: Any, say: Callable[[str], object]) -> Iterator[Rung]:
    """Time each rung on a device. ``say`` takes lines about the progress."""
    from specbeam.engine import Engine
    from specbeam.ladder import RUNGS, Rung, climb, reason

    say(f"{device}: loading")
    where = {"device": device}
    plain = args.backend == args.quantize == "auto" and args.dtype in ("auto", "float32") and args.threads is None
    if plain and device.startswith("cpu"):
        where |= {"backend": "torch", "dtype": "float32"}  # the default there, the cpu backend, has nothing to compile
    try:
        lm = load_model(argparse.Namespace(**vars(args) | where))
    except Unsupported:
        lm = load_model(argparse.Namespace(**vars(args) | where | {"backend": args.backend}))
    except SpecbeamError:
        raise
    except Exception as error:  # the device lacks memory, or an operation that the model needs
        yield from (Rung(n, device, args.backend, args.dtype, failure=reason(error)) for n in args.rungs)
        return
    options = {"max_new_tokens": args.max_new_tokens}
    ids = Engine(lm).check(prompt, options, system=args.system, raw=args.raw)
    yield from climb(
        lm,
        ids,
        rungs=args.rungs,
        runs=args.runs,
        tell=lambda number, what: say(f"{device}: {RUNGS[number]}, {what}"),
        **options,
    )


def heading(rung: Rung, prompt: str, runs: int) -> Iterator[str]:
    import torch

    yield textwrap.shorten(f"prompt: {prompt}", LINE_WIDTH, placeholder=" ...")
    threads = f", {torch.get_num_threads()} threads" if rung.device == "cpu" and rung.backend != "cpu" else ""
    runs_on = f"{rung.device}, {rung.backend} backend, {rung.weights}{threads}"
    yield f"{runs_on}, torch {torch.__version__}, {rung.prompt_tokens} tokens of prompt, n={runs} runs"
    yield ""
    names = f"{'tokens/s':>8}  {'speed-up':>8}  {'passes':>6}  {'compile s':>9}  {'GB':>5}  {'identical':>9}"
    yield f"{'rung':20}  {'seconds (min to max)':>21}  {names}"


def row(rung: Rung, here: list[Rung]) -> str:
    """A line of the table. Speed-ups are over the first rung that worked, with "~" where the times do not settle it."""
    name = f"{rung.number} {rung.name}"
    if rung.median is None or rung.tokens_per_second is None:
        return f"{name:20}  failed: {rung.failure}"
    first = next(r for r in here if r.median is not None)
    assert first.median is not None
    speed_up = f"{first.median / rung.median:.2f}"
    if rung is not first and not apart(rung.seconds, first.seconds):
        speed_up = f"~{speed_up}"
    seconds = f"{rung.median:.2f} ({min(rung.seconds):.2f} to {max(rung.seconds):.2f})"
    compiling = "-" if rung.compile_seconds is None else f"{rung.compile_seconds:.1f}"
    memory = "-" if rung.peak_memory is None else f"{rung.peak_memory / 1e9:.2f}"
    same = {None: "-", True: "yes", False: "differs"}[rung.identical]
    if rung.difference is not None and rung.difference.near_tie:
        same = "near-tie"
    return (
        f"{name:20}  {seconds:>21}  {rung.tokens_per_second:>8.1f}  {speed_up:>8}  {rung.passes:>6}  "
        f"{compiling:>9}  {memory:>5}  {same:>9}"
    )


def apart(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether all of these times lie on one side of all the others. A single time settles nothing."""
    several = len(some) > 1 and len(others) > 1
    return several and (max(some) < min(others) or min(some) > max(others))


def verdict(here: list[Rung]) -> Iterator[str]:
    """The text, and the rungs whose texts differ from it."""
    worked = [rung for rung in here if rung.failure is None]
    for rung in worked:
        if (other := rung.difference) is not None:
            gap = "" if other.gap is None else f", where the two tokens' logits lie {other.gap:.2g} apart"
            can = "can do that (docs/exactness.md)" if other.near_tie else "does not do that"
            parts = f"{rung.number} {rung.name} parts from {worked[0].number} {worked[0].name}"
            yield from ("", f"{parts} at new token {other.token}{gap}: rounding {can}")
    if any(not apart(rung.seconds, worked[0].seconds) for rung in worked[1:]):
        yield from ("", "~ the times of the two rungs overlap, or there is one run: which is faster is not settled")
    if worked:
        yield ""
        for line in worked[0].text.split("\n"):
            yield from textwrap.wrap(line, LINE_WIDTH, initial_indent="  ", subsequent_indent="  ") or [""]
    yield ""


def to_dict(rung: Rung) -> dict[str, Any]:
    """A rung as plain data: its fields, and the figures that follow from them."""
    return asdict(rung) | {
        "name": rung.name,
        "median": rung.median,
        "tokens_per_second": rung.tokens_per_second,
    }
