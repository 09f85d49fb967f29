"""The study's report: one page for people who were not there, and its plots as files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from specbeam.jobs.atomic import write_whole
from specbeam.study import plots
from specbeam.study.samples import samples
from specbeam.study.words import between, between_ratios, first_line, number, several, times

MAX_FAILURES_LISTED = 50

# The columns of the main table: a heading, a metric, and the factor from the metric to the heading's unit.
COLUMNS = [
    ("first token, ms", "time_to_first_token", 1000.0),
    ("target passes", "target_passes", 1.0),
    ("draft passes", "draft_passes", 1.0),
    ("tokens per pass", "steps_per_target_pass", 1.0),
    ("accepted, %", "acceptance_rate", 100.0),
    ("perplexity", "perplexity", 1.0),
    ("ROUGE-L", "rougeL", 1.0),
    ("chrF", "chrf", 1.0),
]
# The columns of the second table.
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
        config: the settings, shown as YAML.
        fingerprint: the machine, versions and models, nested to any depth.
        summary: as :func:`specbeam.study.summary.summarize` returns it.
        records: the generations. The samples show some of their texts and traces; failed ones are listed.
        overhead: the share of the time that the study took beside the decoding.

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
        write_whole(images / f"{plot.name}.png", plot.png)
    for name in {*plots.NAMES} - {plot.name for plot in drawn}:  # plots of an earlier report
        (images / f"{name}.png").unlink(missing_ok=True)
    write_whole(folder / "report.html", page.encode(errors="replace"))  # a model may write half a surrogate pair
    return folder / "report.html"


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
        failed=[(record.get("key", "–"), first_line(record["error"])) for record in failed[:MAX_FAILURES_LISTED]],
        failed_more=max(0, len(failed) - MAX_FAILURES_LISTED),
        light=plots.LIGHT,
        dark=plots.DARK,
    )


# The answer in words


def about(methods: list[Any], records: list[dict[str, Any]]) -> str:
    """The size of the study, in words."""
    prompts = {(record.get("row"), record.get("turn")) for record in records}
    counted = [several(len(methods), "method"), several(len(prompts), "prompt"), several(len(records), "generation")]
    repeats = len({record.get("repeat") for record in records})
    return ", ".join(counted) + (f" ({several(repeats, 'repeat')} each)" if repeats > 1 else "")


def answer(summary: Mapping[str, Any]) -> list[Markup]:
    """The result of the study, in sentences."""
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
    sentences = [say("{} was the fastest: {}." if len(methods) > 1 else "{} made {}.", strong(best), speed_of_best)]
    ratios = {n: m["against"]["tokens_per_second"]["ratio"] for n, m in methods.items() if m.get("against")}
    baseline = methods[best]["against"]["baseline"] if best in ratios else best
    if best in ratios:
        sentences += [*compared(methods, best, "It"), *where(summary.get("categories", {}), best, baseline)]
    for other in dict.fromkeys(methods[name]["against"]["baseline"] for name in ratios):
        rivals = [name for name in ratios if methods[name]["against"]["baseline"] == other]
        fastest = max(rivals, key=ratios.__getitem__)
        if ratios[fastest] <= 1:
            sentences.append(say("Nothing that was tried made {} faster.", strong(other)))
        elif other != baseline:
            sentences += compared(methods, fastest, strong(fastest))
    if failed:
        sentences.append(say("{} failed and {} listed at the end.", several(failed, "generation"), is_or_are(failed)))
    return sentences


def compared(methods: Mapping[str, Any], name: str, subject: str) -> Iterator[Markup]:
    """A method compared with its baseline: speed, whether the text is the same, quality."""
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
        whisker: the start of its interval, its mean and the end of the interval, in percent of the column's width.
        best: whether it is the best of its column; for speed only.
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
    """The other metrics. A metric that has no heading here is shown under its own name."""
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
            cells = [
                Cell(number(estimate["mean"] * scale), between(estimate, scale)) if estimate else Cell()
                for estimate in found
            ]
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
    against = method.get("against")
    if not against:
        return Cell()
    ratio = against["tokens_per_second"]
    return Cell(f"{ratio['ratio']:.2f}×", between_ratios(ratio))


def agreement(counts: Mapping[str, Any] | None) -> Cell:
    return Cell(f"{counts['same']:,} of {counts['of']:,}") if counts and counts["of"] else Cell()


def facts(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Nested settings as groups of names and values."""
    here = [(str(name), str(value)) for name, value in settings.items() if not isinstance(value, Mapping)]
    if here:
        yield above, here
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from facts(value, f"{above} {name}".strip())
