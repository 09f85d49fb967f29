"""The study's report: one page for people who were not there, and its plots and tables as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from specbeam.jobs.atomic import write_whole
from specbeam.replay import replay_page
from specbeam.study import plots
from specbeam.study.composition import as_yaml
from specbeam.study.metrics import finished
from specbeam.study.results import Record, file_name
from specbeam.study.samples import samples
from specbeam.study.words import between, between_ratios, number, settled, several, short, times, too_few

MAX_FAILURES_LISTED = 50
MAX_ERROR_CHARACTERS = 300

# The columns of the main table: a heading, a metric, and the factor from the metric to the heading's unit.
COLUMNS = [
    ("first token, ms", "time_to_first_token", 1000.0),
    ("target passes", "target_passes", 1.0),
    ("draft passes", "draft_passes", 1.0),
    ("tokens per pass", "steps_per_target_pass", 1.0),
    ("accepted, %", "acceptance_rate", 100.0),
    ("pass@1", "pass_at_1", 1.0),
    ("ROUGE-L", "rougeL", 1.0),
    ("chrF", "chrf", 1.0),
    ("perplexity", "perplexity", 1.0),
]
# The columns of the second table.
MORE_COLUMNS = [
    ("seconds", "seconds", 1.0),
    ("ms per token", "time_per_token", 1.0),
    ("95% of ms per token", "time_per_token_p95", 1.0),
    ("peak memory, GB", "peak_memory", 1e-9),
    ("new tokens", "new_tokens", 1.0),
    ("beams evaluated, %", "evaluated_beams", 100.0),
    ("repetition", "repetition", 1.0),
    ("distinct-1, text", "distinct_1", 1.0),
    ("distinct-2, text", "distinct_2", 1.0),
    ("distinct-1, beams", "beams_distinct_1", 1.0),
    ("distinct-2, beams", "beams_distinct_2", 1.0),
    ("self-BLEU", "self_bleu", 1.0),
    ("edit distance", "edit_distance", 1.0),
    ("ROUGE-1", "rouge1", 1.0),
    ("ROUGE-2", "rouge2", 1.0),
    ("BLEU", "bleu", 1.0),
]

NOT_SHOWN = ("gap_p50", "gap_p95")
"""Metrics for readers of ``summary.json`` alone. Gaps between pieces say little where pieces have several tokens."""


def write_report(
    folder: Path,
    *,
    title: str,
    config: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    summary: Mapping[str, Any],
    records: list[Record],
    overhead: float | None = None,
    header: Sequence[tuple[str, str]] = (),
) -> Path:
    """Write ``report.html``, ``plots/``, ``tables/`` and ``replays/`` into a folder, each file whole or not at all.

    Args:
        config: the settings, shown as YAML.
        fingerprint: the machine, versions and models, nested to any depth.
        summary: as :func:`specbeam.study.summary.summarize` returns it.
        records: the generations. The samples show some of their texts and traces; failed ones are listed. Recordings
            among them become replays.
        overhead: the share of the time that the study took beside the decoding.
        header: facts to show at the top, by name.

    Returns:
        The page's path.
    """
    tokens: Counter[str] = Counter()
    for record in finished(records):
        tokens[record["method"]] += record["stats"]["new_tokens"]
    drawn = plots.draw_all(summary, tokens)
    replays = write_replays(folder, records)
    page = render(title, config, fingerprint, summary, records, overhead, drawn, header, replays)
    images = folder / "plots"
    images.mkdir(parents=True, exist_ok=True)
    for plot in drawn:
        for kind, content in plot.files.items():
            write_whole(images / f"{plot.name}.{kind}", content)
    for name in {*plots.NAMES} - {plot.name for plot in drawn}:  # plots of an earlier report
        for kind in plots.FORMATS:
            (images / f"{name}.{kind}").unlink(missing_ok=True)
    write_tables(folder / "tables", summary)
    write_whole(folder / "report.html", page.encode(errors="replace"))  # a model may write half a surrogate pair
    return folder / "report.html"


def write_replays(folder: Path, records: list[Record]) -> list[dict[str, str]]:
    """Write a page for each recording. Returns the "method", the "prompt" and the "address" of each."""
    made = []
    for record in finished(records):
        if record["recording"]:
            method, prompt = record["method"], record["prompt"]
            path = folder / "replays" / f"{file_name(method)}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, replay_page(record["recording"], f"{method}: {prompt}"))
            made.append({"method": method, "prompt": prompt, "address": quote(f"replays/{path.name}")})
    return made


def render(
    title: str,
    config: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    summary: Mapping[str, Any],
    records: list[Record],
    overhead: float | None,
    drawn: list[plots.Plot],
    header: Sequence[tuple[str, str]] = (),
    replays: Sequence[Mapping[str, str]] = (),
) -> str:
    """The page."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["svg"] = Markup  # plots' own text is escaped where it is drawn
    failed = [(r["key"], short(r["error"], MAX_ERROR_CHARACTERS)) for r in records if r["error"]]
    methods = summary["methods"]
    return environment.get_template("report.html.j2").render(
        title=title,
        about=about(methods, records),
        header=header,
        level=level(summary),
        answer=answer(summary),
        table=table(summary),
        more=more_metrics(methods),
        plots=drawn,
        samples=samples(records),
        replays=replays,
        config=as_yaml(config, width=100),
        fingerprint=[*facts(fingerprint)],
        overhead=overhead,
        failed=failed[:MAX_FAILURES_LISTED],
        failed_more=max(0, len(failed) - MAX_FAILURES_LISTED),
        perplexity=plots.WHAT_PERPLEXITY_REWARDS,
        light=plots.LIGHT,
        dark=plots.DARK,
    )


# The answer in words


def about(methods: list[Any], records: list[Record]) -> str:
    """The size of the study, in words."""
    prompts = {(record["row"], record["turn"]) for record in records}
    counted = [several(len(methods), "method"), several(len(prompts), "prompt"), several(len(records), "generation")]
    repeats = len({record["repeat"] for record in records})
    return ", ".join(counted) + (f" ({several(repeats, 'repeat')} each)" if repeats > 1 else "")


def level(summary: Mapping[str, Any]) -> str:
    """The confidence level of the intervals."""
    return f"{100 * summary['confidence']:.3g}%"


def answer(summary: Mapping[str, Any]) -> list[Markup]:
    """The result of the study, in sentences. It names a winner only where the measurements settle it."""
    methods = {method["method"]: method for method in summary["methods"]}
    failed = sum(method["failed"] for method in methods.values())
    fastest = summary["fastest"]
    if not fastest:
        nothing = "No generation succeeded, so there is nothing to compare. The errors are listed below."
        return [Markup(nothing if failed else "There are no generations to compare.")]
    best = fastest["method"]
    sentences = [*spread(fastest), speed_of(methods[best], fastest, level(summary))]
    ratios = {name: m["against"]["tokens_per_second"] for name, m in methods.items() if m["against"]}
    if best in ratios:
        sentences += compared(methods, best, strong(best) if fastest["unsettled"] else "It")
        sentences += where(summary["categories"], best)
    if ratios:
        leader = max(ratios, key=lambda name: ratios[name]["ratio"])
        baseline = methods[leader]["against"]["baseline"]
        if all(settled(ratio) and ratio["ratio"] < 1 for ratio in ratios.values()):
            sentences.append(say("Nothing that was tried made {} faster.", strong(baseline)))
        elif not any(settled(ratio) and ratio["ratio"] > 1 for ratio in ratios.values()):
            sentences.append(say("No method is settled to be faster than {}.", strong(baseline)))
        elif best not in (baseline, *ratios):
            sentences += compared(methods, leader, strong(leader))
    if failed:
        are = "is" if failed == 1 else "are"
        sentences.append(say("{} failed and {} listed at the end.", several(failed, "generation"), are))
    return sentences


def spread(fastest: Mapping[str, Any]) -> Iterator[Markup]:
    """Whether the measurements spread more than the fastest methods differ: then no other figure says much."""
    if not fastest["unsettled"]:
        return
    found = [fastest["rivals"][name] for name in fastest["unsettled"]]
    ratios = [ratio for ratio in found if ratio is not None and ratio["low"] is not None]
    why = "The spread of this run is larger than its effect" if ratios else "This run is too small to show an effect"
    *names, last = map(strong, [fastest["method"], *fastest["unsettled"]])
    if len(names) == 1 and ratios:
        yield say("{}: {} is {} as fast as {}.", why, names[0], times(ratios[0]), last)
    else:
        yield say("{}: which of {} and {} is the fastest is not settled.", why, Markup(", ").join(names), last)


def speed_of(method: Mapping[str, Any], fastest: Mapping[str, Any], level: str) -> Markup:
    """The method with the highest mean speed."""
    speed = method["metrics"]["tokens_per_second"]
    within = between(speed)
    within = f"{level} interval {within}, n={speed['n']}" if within else too_few(speed["n"])
    if not fastest["rivals"]:
        verb = "made"
    else:
        verb = "has the highest mean speed:" if fastest["unsettled"] else "was the fastest:"
    return say("{} {} {} tokens per second ({}).", strong(method["method"]), verb, number(speed["mean"]), within)


def compared(methods: Mapping[str, Any], name: str, subject: str) -> Iterator[Markup]:
    """A method compared with its baseline: speed, whether the text is the same, quality."""
    method = methods[name]
    baseline, ratio = method["against"]["baseline"], method["against"]["tokens_per_second"]
    unsettled = "" if settled(ratio) else ", so the measurements do not settle which of them is faster"
    yield say("{} is {} as fast as {}{}.", subject, times(ratio), strong(baseline), unsettled)
    same = method["agreement"] or {"same": 0, "of": 0}
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
        if (mine := plots.interval(method, metric)) and (its := plots.interval(methods[baseline], metric))
    ]
    if qualities and not exact:
        yield say("Its mean quality is {}.", ", ".join(qualities))


def where(categories: Mapping[str, Any], name: str) -> Iterator[Markup]:
    """The categories in which a method helps most and least, if their intervals do not overlap."""
    found = {category: methods.get(name, {}).get("against") for category, methods in categories.items()}
    ratios = {category: ratio for category, ratio in found.items() if ratio and ratio["low"] is not None}
    if len(ratios) > 1:
        most, least = (end(ratios, key=lambda category: ratios[category]["ratio"]) for end in (max, min))
        if ratios[most]["low"] > ratios[least]["high"]:
            slower = ", which is slower" if ratios[least]["high"] < 1 else ""
            sentence = "It helps more in “{}” ({}) than in “{}” ({}{})."
            yield say(sentence, most, times(ratios[most]), least, times(ratios[least]), slower)


def say(sentence: str, *parts: Any) -> Markup:
    """A sentence whose parts are escaped."""
    return Markup(sentence).format(*parts)


def strong(name: str) -> Markup:
    return say("<strong>{}</strong>", name)


# The tables


@dataclass(frozen=True)
class Cell:
    """A number of the table.

    Attributes:
        whisker: the start of its interval, its mean and the end of the interval, in percent of the column's width.
        best: whether it is settled that it is the best of its column; for speed only.
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


def table(summary: Mapping[str, Any]) -> Table:
    """The methods' main numbers."""
    methods = summary["methods"]
    fastest = summary["fastest"]
    winner = fastest["method"] if fastest and fastest["rivals"] and not fastest["unsettled"] else None
    speeds = [plots.interval(method, "tokens_per_second") for method in methods]
    widest = max((max(plots.extent(speed)) for speed in speeds if speed), default=0.0)
    cells = [speed_cell(s, widest, m["method"] == winner) for s, m in zip(speeds, methods, strict=True)]
    columns: list[tuple[str, list[Cell]]] = [("tokens/s", cells)]
    if any(method["against"] for method in methods):
        columns.append(("speed-up", [speed_up(method) for method in methods]))
    if any(method["agreement"] for method in methods):
        columns.append(("same text", [agreement(method["agreement"]) for method in methods]))
    columns += [  # no draft passes if no draft has a model
        (heading, cells)
        for heading, cells in metric_columns(methods, COLUMNS)
        if heading != "draft passes" or any(cell.text not in ("–", "0") for cell in cells)
    ]
    columns += metric_columns(
        methods, [(name, name, 1.0) for name in measured(methods) if name.startswith("perplexity ")]
    )
    columns.append(("failed", [Cell(f"{method['failed']:,}") for method in methods]))
    return as_table(methods, columns)


def more_metrics(methods: list[Mapping[str, Any]]) -> Table:
    """The other metrics. A metric that has no heading here is shown under its own name."""
    known = {"tokens_per_second", *NOT_SHOWN, *(name for _, name, _ in COLUMNS + MORE_COLUMNS)}
    others = [(n, n, 1.0) for n in measured(methods) if n not in known and not n.startswith("perplexity ")]
    columns = metric_columns(methods, MORE_COLUMNS + others)
    for name, heading in (("bleu", "corpus BLEU"), ("chrf", "corpus chrF")):
        values = [method["corpus"].get(name) for method in methods]
        if any(value is not None for value in values):
            columns.append((heading, [Cell(number(value)) for value in values]))
    return as_table(methods, columns)


def measured(methods: list[Mapping[str, Any]]) -> list[str]:
    return [*dict.fromkeys(name for method in methods for name in method["metrics"])]


def metric_columns(
    methods: list[Mapping[str, Any]], wanted: Iterable[tuple[str, str, float]]
) -> list[tuple[str, list[Cell]]]:
    """A column for each metric that any method has."""
    columns = []
    for heading, metric, scale in wanted:
        found = [plots.interval(method, metric) for method in methods]
        if any(found):
            cells = [
                Cell(number(estimate["mean"] * scale), beside(estimate, scale)) if estimate else Cell()
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


def beside(estimate: Mapping[str, Any], scale: float = 1.0) -> str:
    """The interval of an estimate, and the number of values."""
    n = "" if estimate["n"] is None else f"n={estimate['n']}"
    return ", ".join(filter(None, [between(estimate, scale), n]))


def speed_cell(speed: Mapping[str, Any] | None, widest: float, best: bool) -> Cell:
    if speed is None:
        return Cell()
    mean, low, high = (100 * value / widest if widest else 0.0 for value in plots.extent(speed))
    return Cell(number(speed["mean"]), beside(speed), (low, mean, high), best)


def speed_up(method: Mapping[str, Any]) -> Cell:
    if not method["against"]:
        return Cell()
    ratio = method["against"]["tokens_per_second"]
    facts = [between_ratios(ratio), f"n={ratio['n']}", "" if settled(ratio) else "not settled"]
    return Cell(f"{ratio['ratio']:.2f}×", ", ".join(filter(None, facts)))


def agreement(counts: Mapping[str, Any] | None) -> Cell:
    return Cell(f"{counts['same']:,} of {counts['of']:,}") if counts and counts["of"] else Cell()


def write_tables(folder: Path, summary: Mapping[str, Any]) -> None:
    """Write the page's two tables for LaTeX, and all figures of the study as one CSV table."""
    import pandas

    folder.mkdir(parents=True, exist_ok=True)
    columns = ["method", "mode", "category", "metric", "value", "low", "high", "n"]
    every = pandas.DataFrame(figures(summary), columns=columns).astype({"n": "Int64"})
    write_whole(folder / "methods.csv", every.to_csv(index=False).encode(errors="replace"))
    for name, shown in (("methods", table(summary)), ("metrics", more_metrics(summary["methods"]))):
        cells = [[f"{c.text} ({c.interval})" if c.interval else c.text for c in row.cells] for row in shown.rows]
        frame = pandas.DataFrame(cells, [row.method for row in shown.rows], shown.headings)
        tex = frame.to_latex(escape=True, column_format="l" + "r" * len(shown.headings))
        tex = tex.replace("–", "--").replace("×", r"$\times$")
        write_whole(folder / f"{name}.tex", f"% It needs \\usepackage{{booktabs}}.\n{tex}".encode(errors="replace"))


def figures(summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All figures of a study, each with its interval and its number of values where there are any."""
    for method in summary["methods"]:
        name = method["method"]
        about = {"method": name, "mode": method["mode"]}
        for metric, estimate in method["metrics"].items():
            yield {**about, "metric": metric, **estimate, "value": estimate["mean"]}
        for metric, value in method["corpus"].items():
            yield {**about, "metric": f"corpus_{metric}", "value": value}
        if method["pass_at_1"] is not None:
            yield {**about, "metric": "pass_at_1", "value": method["pass_at_1"]}
        if (same := method["agreement"]) and same["of"]:
            yield {**about, "metric": "same_text", "value": same["same"] / same["of"], "n": same["of"]}
        if method["against"]:
            ratio = method["against"]["tokens_per_second"]
            yield {**about, "metric": "speed_up", **ratio, "value": ratio["ratio"]}
        for place in summary["acceptance_by_position"].get(name, []):
            share = {"value": place["accepted"] / place["drafted"], "n": place["drafted"]}
            yield {**about, "metric": f"acceptance_at_{place['position']}", **place, **share}
        for category, by_method in summary["categories"].items():
            for metric, value in by_method.get(name, {}).items():
                here = {**about, "category": category, "metric": metric}
                if metric == "against" and value:
                    yield {**here, "metric": "speed_up", **value, "value": value["ratio"]}
                elif metric not in ("against", "n"):
                    yield {**here, "value": value, "n": by_method[name]["n"]}


def facts(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Nested settings as groups of names and values."""
    here = [(str(name), str(value)) for name, value in settings.items() if not isinstance(value, Mapping)]
    if here:
        yield above, here
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from facts(value, f"{above} {name}".strip())
