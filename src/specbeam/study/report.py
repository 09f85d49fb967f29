"""The study's report: one page for people who were not there, and its plots as files."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from specbeam.study import plots

MOST_SAMPLES, MOST_ROUNDS, MOST_BRANCHES, MOST_PIECES, MOST_FAILURES = 5, 3, 5, 400, 50

# What the table shows of each method: a heading, a metric, and what its number is multiplied by to be in that unit.
COLUMNS = [
    ("first token, ms", "time_to_first_token", 1000.0),
    ("target passes", "target_passes", 1.0),
    ("draft passes", "draft_passes", 1.0),
    ("tokens a pass", "steps_per_target_pass", 1.0),
    ("accepted, %", "acceptance_rate", 100.0),
    ("perplexity", "perplexity", 1.0),
    ("ROUGE-L", "rougeL", 1.0),
    ("chrF", "chrf", 1.0),
]
# What the table below it shows.
MORE_COLUMNS = [
    ("seconds", "seconds", 1.0),
    ("median gap, ms", "gap_p50", 1.0),
    ("95% gap, ms", "gap_p95", 1.0),
    ("peak memory, GB", "peak_memory", 1e-9),
    ("new tokens", "new_tokens", 1.0),
    ("repetition", "repetition", 1.0),
    ("distinct-1", "distinct_1", 1.0),
    ("distinct-2", "distinct_2", 1.0),
    ("self-BLEU", "self_bleu", 1.0),
    ("edit distance", "edit_distance", 1.0),
    ("ROUGE-1", "rouge1", 1.0),
    ("ROUGE-2", "rouge2", 1.0),
    ("BLEU", "bleu", 1.0),
]


def write_report(
    folder: Path,
    *,
    title: str,
    config: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    summary: Mapping[str, Any],
    records: list[dict[str, Any]],
    overhead: float | None = None,
) -> Path:
    """Write ``report.html`` and ``plots/*.png`` into a folder, each whole or not at all.

    Args:
        config: the settings, which are shown as YAML.
        fingerprint: the machine, versions and models, nested as deep as one likes.
        summary: the numbers of every method.
        records: the generations, whose texts and traces are the samples; those that failed are listed.
        overhead: the share of the time that the study itself took, beside the decoding.

    Returns:
        The page's path.
    """
    tokens: Counter[str] = Counter()
    for record in records:
        if not record.get("error") and record.get("stats"):
            tokens[record["method"]] += record["stats"].get("new_tokens") or 0
    drawn = plots.draw_all(summary, tokens)
    page = render(title, config, fingerprint, summary, records, overhead, drawn)
    images = folder / "plots"
    images.mkdir(parents=True, exist_ok=True)
    for plot in drawn:
        replace(images / f"{plot.name}.png", plot.png)
    for name in {*plots.NAMES} - {plot.name for plot in drawn}:  # of a report that this one replaces
        (images / f"{name}.png").unlink(missing_ok=True)
    replace(folder / "report.html", page.encode(errors="replace"))  # a model may write half a surrogate pair
    return folder / "report.html"


def replace(path: Path, content: bytes) -> None:
    """Put a file in its place, so that who reads it meanwhile sees the old one or the new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def render(
    title: str,
    config: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    summary: Mapping[str, Any],
    records: list[dict[str, Any]],
    overhead: float | None,
    drawn: list[plots.Plot],
) -> str:
    """The page."""
    import jinja2
    import yaml

    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["svg"] = Markup  # plots' own text is escaped where it is drawn
    template = resources.files("specbeam.study").joinpath("report.html.j2").read_text(encoding="utf-8")
    failed = [record for record in records if record.get("error")]
    plain = json.loads(json.dumps(config, default=str))
    methods = summary.get("methods", [])
    return environment.from_string(template).render(
        title=title,
        about=about(methods, records),
        answer=answer(summary),
        table=table(methods),
        more=more_metrics(methods),
        plots=drawn,
        samples=samples(records),
        config=yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100),
        fingerprint=[*facts(fingerprint)],
        overhead=overhead,
        failed=[(record.get("key", "–"), first_line(record["error"])) for record in failed[:MOST_FAILURES]],
        failed_more=max(0, len(failed) - MOST_FAILURES),
        light=plots.LIGHT,
        dark=plots.DARK,
    )


# Numbers, as text


def number(value: float | None) -> str:
    """Three significant digits, and all that are before the point."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    digits = max(0, min(4, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}"


def between(told: Mapping[str, Any], scale: float = 1.0) -> str:
    """An interval, or nothing if there is none, or it has no width."""
    low, high = told.get("low"), told.get("high")
    if low is None or high is None or low == high:
        return ""
    return f"{number(low * scale)}–{number(high * scale)}"


def between_ratios(told: Mapping[str, Any]) -> str:
    return "" if told.get("low") is None else f"{told['low']:.2f}–{told['high']:.2f}"


def times(told: Mapping[str, Any]) -> str:
    """A speed-up in words."""
    within = between_ratios(told)
    return f"{told['ratio']:.2f} times" + (f" ({within})" if within else "")


def several(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def first_line(text: Any, most: int = 300) -> str:
    line = next(iter(str(text).strip().splitlines()), "")
    return line if len(line) <= most else line[: most - 1] + "…"


# The answer in words


def about(methods: list[Any], records: list[dict[str, Any]]) -> str:
    """How much was done."""
    prompts = {(record.get("row"), record.get("turn")) for record in records}
    counted = [several(len(methods), "method"), several(len(prompts), "prompt"), several(len(records), "generation")]
    repeats = len({record.get("repeat") for record in records})
    return ", ".join(counted) + (f" ({several(repeats, 'repeat')} each)" if repeats > 1 else "")


def answer(summary: Mapping[str, Any]) -> list[Markup]:
    """What was found, in sentences."""
    methods = {method["method"]: method for method in summary.get("methods", [])}
    speeds = {name: speed for name, method in methods.items() if (speed := plots.interval(method, "tokens_per_second"))}
    failed = sum(method.get("failed") or 0 for method in methods.values())
    if not speeds:
        nothing = "No generation succeeded, so there is nothing to compare. The errors are listed below."
        return [Markup(nothing if failed else "There are no generations to compare.")]
    best = max(speeds, key=lambda name: speeds[name]["mean"])
    within = between(speeds[best])
    speed_of_best = f"{number(speeds[best]['mean'])} tokens per second" + (
        f" (95% interval {within})" if within else ""
    )
    told = [say("{} was the fastest: {}." if len(methods) > 1 else "{} made {}.", strong(best), speed_of_best)]
    ratios = {n: m["against"]["tokens_per_second"]["ratio"] for n, m in methods.items() if m.get("against")}
    baseline = methods[best]["against"]["baseline"] if best in ratios else best
    if best in ratios:
        told += [*compared(methods, best, "It"), *where(summary.get("categories", {}), best, baseline)]
    for other in dict.fromkeys(methods[name]["against"]["baseline"] for name in ratios):
        rivals = [name for name in ratios if methods[name]["against"]["baseline"] == other]
        fastest = max(rivals, key=ratios.__getitem__)
        if ratios[fastest] <= 1:
            told.append(say("Nothing that was tried made {} faster.", strong(other)))
        elif other != baseline:
            told += compared(methods, fastest, strong(fastest))
    if failed:
        told.append(say("{} failed and {} listed at the end.", several(failed, "generation"), is_or_are(failed)))
    return told


def compared(methods: Mapping[str, Any], name: str, subject: str) -> Iterator[Markup]:
    """A method beside its baseline: speed, whether the text is the same, quality."""
    method = methods[name]
    baseline, ratio = method["against"]["baseline"], method["against"]["tokens_per_second"]
    unsettled = ratio.get("low") is not None and ratio["low"] <= 1 <= ratio["high"]
    settled = ", so the measurements do not settle which of them is faster" if unsettled else ""
    yield say("{} is {} as fast as {}{}.", subject, times(ratio), strong(baseline), settled)
    same = method.get("agreement") or {"twin": baseline, "same": 0, "of": 0}
    exact = same["same"] == same["of"] > 0
    if exact:
        all_of = f"all {same['of']:,} generations" if same["of"] > 1 else "its one generation"
        yield say("Its text is exactly that of {} in {}, so its quality is the same.", same["twin"], all_of)
    elif same["of"]:
        share = f"{same['same']:,} of {same['of']:,} generations"
        yield say("Its text is exactly that of {} in {}.", same["twin"], share)
    qualities = [
        f"{label} {number(mine['mean'])} against {number(its['mean'])}"
        for group in plots.QUALITIES
        for metric, label, _ in group
        if (mine := plots.interval(method, metric)) and (its := plots.interval(methods.get(baseline, {}), metric))
    ]
    if qualities and not exact:
        yield say("In quality that is {}.", ", ".join(qualities))


def where(categories: Mapping[str, Any], name: str, baseline: str) -> Iterator[Markup]:
    """The categories in which a method helps most and least."""
    ratios = {}
    for category, methods in categories.items():
        mine, its = (plots.mean_of(methods.get(m, {}).get("tokens_per_second")) for m in (name, baseline))
        if mine and its:
            ratios[category] = mine / its
    if len(ratios) > 1:
        most, least = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
        slower = ", which is slower" if ratios[least] < 0.995 else ""
        sentence = "It helps most in “{}” ({:.2f} times) and least in “{}” ({:.2f} times{})."
        yield say(sentence, most, ratios[most], least, ratios[least], slower)


def say(sentence: str, *parts: Any) -> Markup:
    """A sentence whose parts are escaped."""
    return Markup(sentence).format(*parts)


def strong(name: str) -> Markup:
    return say("<strong>{}</strong>", name)


def is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


# The tables


@dataclass(frozen=True)
class Cell:
    """A number of the table.

    Attributes:
        whisker: where its interval begins, its mean and where it ends, in percent of the column's width.
        best: whether no method has a better one; only said of speed.
    """

    text: str = "–"
    interval: str = ""
    whisker: tuple[float, float, float] | None = None
    best: bool = False


@dataclass(frozen=True)
class Row:
    method: str
    mode: str
    colour: str
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    headings: list[str]
    rows: list[Row]


def table(methods: list[Mapping[str, Any]]) -> Table:
    """The methods' main numbers."""
    speeds = [plots.interval(method, "tokens_per_second") for method in methods]
    widest = max((s["high"] if s.get("high") is not None else s["mean"] for s in speeds if s), default=0.0)
    fastest = max((s["mean"] for s in speeds if s), default=0.0)
    columns: list[tuple[str, list[Cell]]] = [("tokens/s", [speed_cell(s, widest, fastest) for s in speeds])]
    if any(method.get("against") for method in methods):
        columns.append(("speed-up", [speed_up(method) for method in methods]))
    if any(method.get("agreement") for method in methods):
        columns.append(("same text", [agreement(method.get("agreement")) for method in methods]))
    columns += [  # no draft passes if no draft has a model
        (heading, cells)
        for heading, cells in metric_columns(methods, COLUMNS)
        if heading != "draft passes" or any(cell.text not in ("–", "0") for cell in cells)
    ]
    columns += metric_columns(
        methods, [(name, name, 1.0) for name in measured(methods) if name.startswith("perplexity ")]
    )
    if any(method.get("pass_at_1") is not None for method in methods):
        columns.append(("pass@1", [Cell(number(method.get("pass_at_1"))) for method in methods]))
    columns.append(("failed", [Cell(f"{method.get('failed') or 0:,}") for method in methods]))
    return as_table(methods, columns)


def more_metrics(methods: list[Mapping[str, Any]]) -> Table:
    """The rest of the metrics, those that have no heading here under their own names."""
    known = {"tokens_per_second", *(name for _, name, _ in COLUMNS + MORE_COLUMNS)}
    others = [(n, n, 1.0) for n in measured(methods) if n not in known and not n.startswith("perplexity ")]
    columns = metric_columns(methods, MORE_COLUMNS + others)
    for name, heading in (("bleu", "corpus BLEU"), ("chrf", "corpus chrF")):
        values = [(method.get("corpus") or {}).get(name) for method in methods]
        if any(value is not None for value in values):
            columns.append((heading, [Cell(number(value)) for value in values]))
    return as_table(methods, columns)


def measured(methods: list[Mapping[str, Any]]) -> list[str]:
    return [*dict.fromkeys(name for method in methods for name in method.get("metrics", {}))]


def metric_columns(
    methods: list[Mapping[str, Any]], wanted: Iterable[tuple[str, str, float]]
) -> list[tuple[str, list[Cell]]]:
    """A column for each metric that any method has."""
    columns = []
    for heading, metric, scale in wanted:
        found = [plots.interval(method, metric) for method in methods]
        if any(found):
            cells = [Cell(number(told["mean"] * scale), between(told, scale)) if told else Cell() for told in found]
            columns.append((heading, cells))
    return columns


def as_table(methods: list[Mapping[str, Any]], columns: list[tuple[str, list[Cell]]]) -> Table:
    rows = [
        Row(m["method"], m["mode"], plots.SERIES[i % len(plots.SERIES)], [cells[i] for _, cells in columns])
        for i, m in enumerate(methods)
    ]
    return Table([heading for heading, _ in columns], rows)


def speed_cell(speed: Mapping[str, Any] | None, widest: float, fastest: float) -> Cell:
    if speed is None:
        return Cell()
    ends = [value if value is not None else speed["mean"] for value in (speed.get("low"), speed.get("high"))]
    low, middle, high = (100 * value / widest if widest else 0.0 for value in (ends[0], speed["mean"], ends[1]))
    return Cell(number(speed["mean"]), between(speed), (low, middle, high), best=speed["mean"] == fastest)


def speed_up(method: Mapping[str, Any]) -> Cell:
    told = method.get("against")
    if not told:
        return Cell()
    ratio = told["tokens_per_second"]
    return Cell(f"{ratio['ratio']:.2f}×", between_ratios(ratio))


def agreement(told: Mapping[str, Any] | None) -> Cell:
    return Cell(f"{told['same']:,} of {told['of']:,}") if told and told["of"] else Cell()


def facts(told: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Nested settings as groups of names and values."""
    here = [(str(name), str(value)) for name, value in told.items() if not isinstance(value, Mapping)]
    if here:
        yield above, here
    for name, value in told.items():
        if isinstance(value, Mapping):
            yield from facts(value, f"{above} {name}".strip())


# Samples


@dataclass(frozen=True)
class Guess:
    text: str
    accepted: bool


@dataclass(frozen=True)
class Branch:
    """Guesses that follow one another.

    Attributes:
        beam: the number of the beam they follow, from 1; None for a single text.
        shared: how many of them were shown in a branch before.
    """

    beam: int | None
    guesses: list[Guess]
    shared: int = 0


@dataclass(frozen=True)
class Own:
    """Tokens the target chose that no draft proposed.

    Attributes:
        step: the step of beam search, from 1; None for a single text.
        place: the rejected guesses in whose place it stands.
    """

    step: int | None
    tokens: list[str]
    place: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    number: int
    branches: list[Branch]
    branches_more: int
    own: list[Own]


@dataclass(frozen=True)
class Sample:
    """A generation that is shown.

    Attributes:
        rounds: a few of its rounds; none for a method without drafts.
        pieces: its text, and of each piece whether a draft proposed it.
        pieces_more: tokens that are left out at the end.
        lookup: whether drafts came from a look-up, with no model.
    """

    method: str
    category: str
    why: str
    prompt: str
    facts: str
    rounds: list[Round]
    pieces: list[tuple[str, bool]]
    pieces_more: int
    beams: bool
    lookup: bool


def samples(records: list[dict[str, Any]]) -> list[Sample]:
    """A handful that teaches most: where drafts gained most in each category, methods in turn, and the worst."""
    good = [record for record in records if not record.get("error") and record.get("text")]
    drafted = [record for record in good if any(told["drafted"] for told in record.get("trace") or [])]
    shown: Counter[str] = Counter()
    chosen: list[tuple[str, dict[str, Any]]] = []
    pool = drafted or good
    most = MOST_SAMPLES - 1 if drafted else MOST_SAMPLES
    for category in dict.fromkeys(record.get("category") for record in pool):
        if len(chosen) == most:
            break
        here = [record for record in pool if record.get("category") == category]
        best = min(here, key=lambda record: (shown[record["method"]], -gain(record)))
        shown[best["method"]] += 1
        chosen.append(("", best))
    for method in dict.fromkeys(record["method"] for record in drafted):  # where there are few categories
        if not shown[method] and len(chosen) < most:
            here = [record for record in drafted if record["method"] == method]
            shown[method] += 1
            chosen.append(("", max(here, key=gain)))
    if drafted:
        worst = min(drafted, key=accepted_share)
        if all(record is not worst for _, record in chosen):
            chosen.append(("the fewest guesses accepted", worst))
    return [sample(record, why) for why, record in chosen]


def accepted_share(record: Mapping[str, Any]) -> float:
    return (record.get("stats") or {}).get("acceptance_rate") or 0.0


def gain(record: Mapping[str, Any]) -> float:
    """How many tokens a pass gave: most of the guesses accepted is little if there were few."""
    return (record.get("stats") or {}).get("steps_per_target_pass") or 0.0


def sample(record: Mapping[str, Any], why: str) -> Sample:
    """What is shown of a generation."""
    trace = record.get("trace") or []
    stats = record.get("stats") or {}
    beams = any(len(step) > 1 for told in trace for step in told["steps"])
    told = [several(stats["new_tokens"], "token")] if stats.get("new_tokens") else []
    if stats.get("target_passes"):
        passes = stats["target_passes"]
        told.append(f"{passes:,} {'pass' if passes == 1 else 'passes'} of the target")
    if stats.get("drafted"):
        told.append(f"{stats.get('accepted', 0):,} of {stats['drafted']:,} guesses accepted")
    rounds = sorted((i for i, one in enumerate(trace) if one["drafted"]), key=lambda i: -instructive(trace[i]))
    pieces = align(origins(record), record["text"])
    return Sample(
        method=record["method"],
        category=record.get("category") or "",
        why=why,
        prompt=str(record.get("prompt") or ""),
        facts=", ".join(told),
        rounds=[shown_round(i + 1, trace[i], beams) for i in sorted(rounds[:MOST_ROUNDS])],
        pieces=pieces[:MOST_PIECES],
        pieces_more=max(0, len(pieces) - MOST_PIECES),
        beams=beams,
        lookup=not stats.get("draft_passes"),
    )


def instructive(told: Mapping[str, Any]) -> int:
    """Most where some guesses were accepted, saving a pass, and others were not."""
    return len({guess["accepted"] for guess in told["drafted"]}) + (len(told["steps"]) > 1)


def shown_round(place: int, told: Mapping[str, Any], beams: bool) -> Round:
    """One pass of the target: the guesses as branches, and what was chosen beside them."""
    found = branches(told["drafted"], beams)
    own = []
    for step, ends in enumerate(told["steps"], 1):
        tokens = [*dict.fromkeys(visible(end["text"]) for end in ends if not end["drafted"])]
        if tokens:
            rejected = [] if beams else [visible(guess["text"]) for guess in beside(told["drafted"])]
            own.append(Own(step if beams else None, tokens, rejected))
    return Round(place, found[:MOST_BRANCHES], max(0, len(found) - MOST_BRANCHES), own)


def branches(drafted: list[Mapping[str, Any]], beams: bool) -> list[Branch]:
    """A tree of guesses as its paths from root to leaf, those with most accepted guesses first."""
    below: dict[int | None, list[int]] = {}
    for place, guess in enumerate(drafted):
        below.setdefault(guess["parent"], []).append(place)
    leaves: list[list[int]] = []
    paths = [[root] for root in reversed(below.get(None, []))]
    while paths:
        path = paths.pop()
        paths += [[*path, child] for child in reversed(below.get(path[-1], []))]
        if path[-1] not in below:
            leaves.append(path)
    leaves.sort(key=lambda path: -sum(drafted[place]["accepted"] for place in path))
    found = []
    seen: set[int] = set()
    for path in leaves:
        beam = drafted[path[0]]["beam"] if beams else None
        guesses = [Guess(visible(drafted[place]["text"]), drafted[place]["accepted"]) for place in path]
        found.append(Branch(None if beam is None else beam + 1, guesses, sum(place in seen for place in path)))
        seen.update(path)
    return found


def beside(drafted: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rejected guesses that follow the last accepted one."""
    last = max((place for place, guess in enumerate(drafted) if guess["accepted"]), default=None)
    return [guess for guess in drafted if not guess["accepted"] and guess["parent"] == last]


def origins(record: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The tokens of the text as a trace tells them, and whether each was drafted.

    A text of beam search is the path of beams whose tokens are its own; the trace need not have the last of them, since
    a beam that ends is a beam no more.
    """
    ids = record.get("token_ids") or []
    on_path: set[int | None] = {0, None}
    found: list[tuple[str, bool]] = []
    for step in (step for told in record.get("trace") or [] for step in told["steps"]):
        if len(found) == len(ids):
            break
        here = {i: b for i, b in enumerate(step) if b["beam"] in on_path and b["token_id"] == ids[len(found)]}
        if not here:
            break
        beam = next(iter(here.values()))
        found.append((beam["text"], beam["drafted"]))
        on_path = {*here}
    return found


def align(tokens: list[tuple[str, bool]], text: str) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it was drafted.

    Tokens are decoded one by one, so those that are parts of a character, or that drop the space they begin with, are
    not what the text has at their place: then the text between the tokens around them is theirs.
    """
    pieces: list[tuple[str, bool]] = []
    at = 0
    unclear: list[bool] = []
    for token, drafted in tokens:
        found = text.find(token, at) if token and "\ufffd" not in token else -1
        if found < 0 or (text[at:found].strip() and not unclear):
            unclear.append(drafted)
            continue
        if unclear:
            pieces.append((text[at:found], all(unclear)))
            at, unclear = found, []
        at, piece = found + len(token), text[at : found + len(token)]
        pieces.append((piece, drafted))
    if at < len(text):
        pieces.append((text[at:], bool(unclear) and all(unclear)))
    return [piece for piece in pieces if piece[0]]


def visible(text: str) -> str:
    """A token on one line, with nothing that cannot be seen."""
    return text.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥") or "∅"
