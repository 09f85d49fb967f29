"""The tables of a study: of the report, for LaTeX, and all figures as CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specbeam.jobs.files import write_whole
from specbeam.plugins import GROUPS, is_name
from specbeam.study.plots import SERIES, extent, interval
from specbeam.study.statistics import between, between_ratios, number, settled


class Column(NamedTuple):
    """Attributes:
    name: the metric, as ``methods.csv`` names it.
    scale: the factor from the metric to the heading's unit.
    """

    name: str
    heading: str
    scale: float = 1.0


SPEED = [
    Column("tokens_per_second", "tokens/s"),
    Column("speed_up", "speed-up"),
    Column("same_text", "same text"),
    Column("time_to_first_token", "first token, ms", 1000.0),
    Column("target_passes", "target passes"),
    Column("draft_passes", "draft passes"),
    Column("steps_per_target_pass", "tokens per pass"),
    Column("acceptance_rate", "accepted, %", 100.0),
    Column("evaluated_beams", "beams evaluated, %", 100.0),
    Column("failed", "failed"),
]
QUALITY = [
    Column("valid", "valid, %", 100.0),
    Column("pass_at_1", "pass@1"),
    Column("rougeL", "ROUGE-L"),
    Column("bleu", "BLEU"),
    Column("corpus_bleu", "corpus BLEU"),
    Column("chrf", "chrF"),
    Column("corpus_chrf", "corpus chrF"),
    Column("perplexity", "perplexity"),
]
DIVERSITY = [
    Column("repetition", "repetition"),
    Column("distinct_1", "distinct-1, text"),
    Column("distinct_2", "distinct-2, text"),
    Column("beams_distinct_1", "distinct-1, beams"),
    Column("beams_distinct_2", "distinct-2, beams"),
    Column("self_bleu", "self-BLEU"),
    Column("edit_distance", "edit distance"),
]
MORE = [
    Column("seconds", "seconds"),
    Column("time_per_token", "ms per token"),
    Column("time_per_token_p95", "95% of ms per token"),
    Column("peak_memory", "peak memory, GB", 1e-9),
    Column("new_tokens", "new tokens"),
    Column("rouge1", "ROUGE-1"),
    Column("rouge2", "ROUGE-2"),
]
KNOWN = {column.name: column for column in [*SPEED, *QUALITY, *DIVERSITY, *MORE]}
LATEX_COLUMNS = (
    "tokens_per_second", "speed_up", "same_text", "steps_per_target_pass", "acceptance_rate", "pass_at_1", "rougeL",
    "corpus_bleu", "perplexity",
)  # fmt: skip
"""The columns for LaTeX where none are chosen, as far as they were measured, besides custom metrics."""
NOT_SHOWN = ("gap_p50", "gap_p95")
"""Metrics for readers of ``summary.json`` alone. Gaps between pieces say little where pieces have several tokens."""


@dataclass(frozen=True)
class Cell:
    """A number of the table.

    Attributes:
        interval: its interval, and what else stands below it.
        n: the number of its values; None if it is not a mean.
        whisker: the start of its interval, its mean and the end of the interval, in percent of the column's width.
        best: whether it is settled that it is the best of its column; for speed only.
    """

    text: str = "–"
    interval: str = ""
    n: int | None = None
    whisker: tuple[float, float, float] | None = None
    best: bool = False


@dataclass(frozen=True)
class Row:
    """A method and its numbers.

    Attributes:
        n: the number of values of its means, or of most of them.
    """

    method: str
    mode: str
    colour: str
    n: int
    cells: list[Cell]

    def beside(self, cell: Cell) -> str:
        """The number of values of a cell where it is not the row's."""
        return "" if cell.n in (None, self.n) else f"n={cell.n}"


@dataclass(frozen=True)
class Table:
    name: str
    headings: list[str]
    rows: list[Row]


def tables(summary: Mapping[str, Any]) -> list[Table]:
    """The tables of the report that have a column: speed, quality, diversity, and all that has no place in these.

    Custom metrics and other models' perplexities are among the quality.
    """
    methods = summary["methods"]
    names = measured(methods)
    judged = [Column(name, name) for name in names if name.startswith("perplexity ")]
    known = {*KNOWN, *NOT_SHOWN, *(column.name for column in judged)}
    others = [Column(name, name) for name in names if name not in known and ":" not in name]
    groups = {
        "Speed": SPEED,
        "Quality": [*custom_columns(names), *QUALITY, *judged],
        "Diversity": DIVERSITY,
        "Other metrics": [*MORE, *others],
    }
    shown = ((name, _columns(summary, columns)) for name, columns in groups.items())
    return [_table(summary, name, columns) for name, columns in shown if columns]


def custom_name(text: str) -> str:
    """The name of a custom metric, given as ``module:name`` or as an entry point. It has a colon."""
    return text if is_name(text) else f"{GROUPS['metric']}:{text}"


def custom_columns(names: Sequence[str]) -> list[Column]:
    """The columns of custom metrics, whose names have a colon. The heading leaves the module out."""
    functions = [name for name in names if ":" in name]
    short = Counter(name.rpartition(":")[2] for name in functions)
    return [Column(name, last if short[last := name.rpartition(":")[2]] == 1 else name) for name in functions]


def measured(methods: Sequence[Mapping[str, Any]]) -> list[str]:
    """The metrics that any method has."""
    return [*dict.fromkeys(name for method in methods for name in method["metrics"])]


def _columns(summary: Mapping[str, Any], wanted: Sequence[Column]) -> dict[Column, list[Cell]]:
    """The cells of the columns in which any method has a value."""
    columns = {column: _cells(summary, column) for column in wanted}
    return {column: cells for column, cells in columns.items() if any(cell.text != Cell.text for cell in cells)}


def _cells(summary: Mapping[str, Any], column: Column) -> list[Cell]:
    """A column, with a cell for each method."""
    methods, name = summary["methods"], column.name
    if name == "tokens_per_second":
        speeds = [interval(method, name) for method in methods]
        widest = max((max(extent(speed)) for speed in speeds if speed), default=0.0)
        fastest = summary["fastest"]
        winner = fastest["method"] if fastest and fastest["rivals"] and not fastest["unsettled"] else None
        return [_speed(s, widest, m["method"] == winner) for s, m in zip(speeds, methods, strict=True)]
    if name == "speed_up":
        return [_speed_up(method["against"]) for method in methods]
    if name == "same_text":
        counts = [method["agreement"] for method in methods]
        return [Cell(f"{c['same']:,} of {c['of']:,}") if c and c["of"] else Cell() for c in counts]
    if name == "failed":
        return [Cell(f"{method['failed']:,}") for method in methods]
    if name in ("corpus_bleu", "corpus_chrf"):
        values = [method["corpus"].get(name.removeprefix("corpus_")) for method in methods]
        return [Cell() if value is None else Cell(number(value)) for value in values]
    means = [interval(method, name) for method in methods]
    if name == "draft_passes" and not any(mean and mean["mean"] for mean in means):
        return [Cell() for _ in means]  # no draft has a model
    scale = column.scale
    return [Cell(number(mean["mean"] * scale), between(mean, scale), mean["n"]) if mean else Cell() for mean in means]


def _speed(speed: Mapping[str, Any] | None, widest: float, best: bool) -> Cell:
    if speed is None:
        return Cell()
    mean, low, high = (100 * value / widest if widest else 0.0 for value in extent(speed))
    return Cell(number(speed["mean"]), between(speed), speed["n"], (low, mean, high), best)


def _speed_up(against: Mapping[str, Any] | None) -> Cell:
    if not against:
        return Cell()
    ratio = against["tokens_per_second"]
    facts = [between_ratios(ratio), "" if settled(ratio) else "not settled"]
    return Cell(f"{ratio['ratio']:.2f}×", ", ".join(filter(None, facts)), ratio["n"])


def _table(summary: Mapping[str, Any], name: str, columns: Mapping[Column, Sequence[Cell]]) -> Table:
    methods = summary["methods"]
    rows = []
    for i, method in enumerate(methods):
        cells = [some[i] for some in columns.values()]
        n = max((estimate["n"] for estimate in method["metrics"].values()), default=0)
        rows.append(Row(method["method"], method["mode"], SERIES[i % len(SERIES)], n, cells))
    return Table(name, [column.heading for column in columns], rows)


# The files


def write_tables(folder: Path, summary: Mapping[str, Any], title: str, chosen: Sequence[str] | None = None) -> None:
    """Write a table for LaTeX, and all figures of the study as one CSV table.

    Args:
        title: of the study, for the caption.
        chosen: the metrics that are columns for LaTeX, as ``methods.csv`` names them; None for LATEX_COLUMNS.
    """
    import pandas

    folder.mkdir(parents=True, exist_ok=True)
    columns = ["method", "mode", "category", "metric", "value", "low", "high", "n"]
    every = pandas.DataFrame(figures(summary), columns=columns).astype({"n": "Int64"})
    write_whole(folder / "methods.csv", every.to_csv(index=False).encode(errors="replace"))
    write_whole(folder / "methods.tex", latex(summary, title, chosen).encode(errors="replace"))
    (folder / "metrics.tex").unlink(missing_ok=True)  # of an earlier version


def latex(summary: Mapping[str, Any], title: str, chosen: Sequence[str] | None = None) -> str:
    """A table for LaTeX with booktabs. Arguments as of :func:`write_tables`."""
    import pandas

    custom = {column.name: column for column in custom_columns(measured(summary["methods"]))}
    wanted = [(custom | KNOWN).get(name, Column(name, name)) for name in chosen or (*LATEX_COLUMNS, *custom)]
    columns = {c: _cells(summary, c) for c in wanted} if chosen else _columns(summary, wanted)
    shown = _table(summary, title, columns)
    cells = [[f"{c.text} ({c.interval})" if c.interval else c.text for c in row.cells] for row in shown.rows]
    frame = pandas.DataFrame(cells, [row.method for row in shown.rows], shown.headings)
    about = f"{title}: means with {100 * summary['confidence']:.3g}% bootstrap intervals over prompts, {counts(shown)}."
    if any(cell.text.endswith("×") for row in shown.rows for cell in row.cells):
        baseline = next(m["against"]["baseline"] for m in summary["methods"] if m["against"])
        about += f" Speed-ups are paired with {baseline} by prompt."
    form = "l" + "r" * len(shown.headings)
    tex = frame.to_latex(escape=True, column_format=form, caption=about.translate(ESCAPES), label="tab:methods")
    tex = tex.replace("–", "--").replace("×", r"$\times$")
    return f"% It needs \\usepackage{{booktabs}}.\n{tex}"


def counts(table: Table) -> str:
    """The number of values of a table's means, and the means that have another number."""
    usual = Counter(row.n for row in table.rows)
    ((usual_n, _),) = usual.most_common(1) or [(0, 0)]
    parts = [f"n={row.n} for {row.method}" for row in table.rows if row.n != usual_n]
    for i, heading in enumerate(table.headings):
        of_column = {row.method: row.cells[i].n for row in table.rows if row.cells[i].n is not None}
        of_method = {row.method: row.n for row in table.rows}
        if len({*of_column.values()}) == 1 and not any(of_column[method] == of_method[method] for method in of_column):
            parts.append(f"n={next(iter(of_column.values()))} for {heading}")
        else:
            parts += [f"n={n} for {heading} of {method}" for method, n in of_column.items() if n != of_method[method]]
    return f"n={usual_n}" + (f" ({'; '.join(parts)})" if parts else "")


ESCAPES = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {character: f"\\{character}" for character in "&%$#_{}"}
)
"""What stands for characters that LaTeX takes for its own."""


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
        for position in summary["acceptance_by_position"].get(name, []):
            share = {"value": position["accepted"] / position["drafted"], "n": position["drafted"]}
            yield {**about, "metric": f"acceptance_at_{position['position']}", **position, **share}
        for category, by_method in summary["categories"].items():
            for metric, value in by_method.get(name, {}).items():
                here = {**about, "category": category, "metric": metric}
                if metric == "against" and value:
                    yield {**here, "metric": "speed_up", **value, "value": value["ratio"]}
                elif metric not in ("against", "n"):
                    yield {**here, "value": value, "n": by_method[name]["n"]}
