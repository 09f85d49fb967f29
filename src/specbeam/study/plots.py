"""The study's plots, drawn with matplotlib: as SVG for the page, whose colours follow its theme, and as files."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # it takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any colour vision can distinguish; some are darkened for small letters on
# white. Each name is a CSS variable of the page, with its colour in the light and in the dark theme. SVGs are drawn in
# LIGHT and use var(--name), so one SVG serves both themes.
COLOURS = {
    "ink": ("#1d2126", "#e8e6e1"),
    "soft": ("#5c636b", "#a3a7ac"),
    "line": ("#d3d6da", "#3a3f45"),
    "blue": ("#0072b2", "#5aabdf"),
    "vermillion": ("#b84e00", "#f08448"),
    "green": ("#007a5a", "#3fbf98"),
    "purple": ("#a34a7f", "#d994bb"),
    "orange": ("#946400", "#e3ad3c"),
    "teal": ("#1b7f8c", "#6fc7d1"),
    "grey": ("#666c73", "#9aa0a6"),
    "amber": ("#e69f00", "#e6ac33"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
DARK = {name: dark for name, (_, dark) in COLOURS.items()}
SERIES = ["blue", "vermillion", "green", "purple", "orange", "teal", "grey"]
MARKERS = {"greedy": "o", "sample": "^", "beam": "s", "speculative": "D", "speculative-beam": "P"}

# The qualities of a frontier: the metric, its name on an axis, and whether more of it is better. Each group is one
# plot, of the first metric that was measured. Metrics of the task come first.
QUALITIES = [
    [("pass_at_1", "pass@1", True), ("rougeL", "ROUGE-L", True), ("chrf", "chrF", True)],
    [("perplexity", "perplexity", False)],
]
WHAT_PERPLEXITY_REWARDS = (
    "Perplexity is how surprised a model is by the text; lower is better. It rewards what is likely and what repeats "
    "itself. Beam search looks for likely text, so it is ahead here by construction, whatever the text is worth."
)
NAMES = ["frontier-task", "frontier-perplexity", "acceptance", "time", "categories"]
FORMATS = ("png", "svg", "pdf")
"""The formats of a plot's files."""
MAX_CATEGORIES_SHOWN = 16


@dataclass(frozen=True)
class Plot:
    """A plot in all its forms.

    Attributes:
        wide: SVG for a column of text.
        narrow: the same for the width of a phone, drawn anew so that its letters are as large.
        files: the plot with its title, as the content of a file of each of FORMATS.
    """

    name: str
    title: str
    caption: str
    alt: str
    wide: str
    narrow: str
    files: Mapping[str, bytes]


def draw_all(summary: Mapping[str, Any], new_tokens: Mapping[str, int]) -> list[Plot]:
    """The plots for which there is data.

    Args:
        summary: the study's summary.
        new_tokens: by method, how many tokens it made in the generations whose seconds are in ``summary["time"]``.
    """
    colours = {m["method"]: LIGHT[SERIES[i % len(SERIES)]] for i, m in enumerate(summary["methods"])}
    drawn = [
        *frontiers(summary, colours),
        acceptance(summary, colours),
        time_by_component(summary, new_tokens),
        categories(summary, colours),
    ]
    return [plot for plot in drawn if plot is not None]


def frontiers(summary: Mapping[str, Any], colours: Mapping[str, str]) -> list[Plot]:
    """Speed against quality: by the task's own measure, if there is one, and by perplexity."""
    plots = []
    for name, group in zip(NAMES, QUALITIES, strict=False):
        for metric, label, more_is_better in group:
            points = [
                Point(method["method"], method["mode"], *extent(speed), *extent(q))
                for method in summary["methods"]
                if (speed := interval(method, "tokens_per_second")) and (q := interval(method, metric))
            ]
            if points:
                plots.append(_frontier(name, label, more_is_better, points, colours))
                break
    return plots


@dataclass(frozen=True)
class Point:
    """A method's speed and quality, each with its interval; without an interval, its width is 0."""

    method: str
    mode: str
    x: float
    left: float
    right: float
    y: float
    low: float
    high: float


def _frontier(name: str, label: str, more_is_better: bool, points: list[Point], colours: Mapping[str, str]) -> Plot:
    best = pareto([(point.x, point.y if more_is_better else -point.y) for point in points])

    def draw(figure: Figure, narrow: bool) -> None:
        figure.set_size_inches(*((3.7, 3.3) if narrow else (7.6, 4.0)))
        axes = _dress(figure.add_subplot(), grid="both")
        line = sorted((points[i].x, points[i].y) for i in best)
        axes.plot(*zip(*line, strict=True), color=LIGHT["soft"], linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        for p in points:
            colour = colours[p.method]
            axes.plot([p.left, p.right], [p.y, p.y], color=colour, linewidth=1.1, solid_capstyle="butt")
            axes.plot([p.x, p.x], [p.low, p.high], color=colour, linewidth=1.1, solid_capstyle="butt")
            axes.plot([p.x], [p.y], MARKERS[p.mode], color=colour, markersize=7.5, markeredgewidth=0)
        axes.set_xlim(*_with_margin(min(p.left for p in points), max(p.right for p in points)))
        axes.set_ylim(*_with_margin(min(p.low for p in points), max(p.high for p in points)))
        if not more_is_better:
            axes.invert_yaxis()
        axes.set_xlabel("tokens per second")
        axes.set_ylabel(label if more_is_better else f"{label} (lower is better: axis reversed)")
        _label(figure, axes, points, colours, narrow)

    lower = "" if more_is_better else f" {WHAT_PERPLEXITY_REWARDS} The axis runs downwards."
    return _plot(
        name,
        f"Speed and {label}",
        "Up and to the right is better. Neither axis begins at 0. The lines through a point are its intervals; below 5 "
        "prompts there are none. "
        "Methods on the dashed line are the frontier of the means: no other mean is both faster and better. Where "
        "intervals overlap, the order is not settled." + lower,
        f"Scatter plot of tokens per second and {label}. On the frontier: {', '.join(points[i].method for i in best)}. "
        + "; ".join(f"{p.method}: {p.x:.3g} tokens per second, {label} {p.y:.3g}" for p in points)
        + ".",
        draw,
    )


def _with_margin(low: float, high: float) -> tuple[float, float]:
    """The ends of an axis whose points fill most of it."""
    margin = max(0.12 * (high - low), 0.02 * abs(high), 1e-6)
    return low - margin, high + margin


def pareto(points: list[tuple[float, float]]) -> list[int]:
    """The numbers of the points that no other point beats in both coordinates, where more is better."""
    return [i for i, (x, y) in enumerate(points) if not any(a >= x and b >= y and (a, b) != (x, y) for a, b in points)]


def acceptance(summary: Mapping[str, Any], colours: Mapping[str, str]) -> Plot | None:
    """How often the first, second, third draft token after the known tokens is accepted, and of how many."""
    lines = {
        method: [position | {"share": position["accepted"] / position["drafted"]} for position in positions]
        for method, positions in summary["acceptance_by_position"].items()
        if positions
    }
    if not lines:
        return None
    last = max(position["position"] for positions in lines.values() for position in positions)

    def draw(figure: Figure, narrow: bool) -> None:
        figure.set_size_inches(3.7 if narrow else 7.6, (3.2 if narrow else 3.5) + 0.14 * len(lines))
        axes = _dress(figure.add_subplot(), grid="y")
        ticks = range(1, last + 1, 1 + (last - 1) // (7 if narrow else 12))
        ends = []
        for number, (method, positions) in enumerate(lines.items()):
            colour = colours[method]
            aside = 0.07 * (number - (len(lines) - 1) / 2)  # intervals of several methods are beside each other
            xs, ys = [p["position"] + aside for p in positions], [p["share"] for p in positions]
            beyond = [[p["share"] - p["low"] for p in positions], [p["high"] - p["share"] for p in positions]]
            axes.errorbar(xs, ys, beyond, color=colour, linewidth=1.5, elinewidth=1, marker="o", markersize=4)
            ends.append((method, xs[-1], ys[-1], colour))
            for position in positions:
                if position["position"] in ticks:
                    axes.annotate(
                        f"{position['drafted']:,}", (position["position"], 0), (0, -22 - 10 * number), ha="center",
                        va="top", xycoords=("data", "axes fraction"), textcoords="offset points", color=colour,
                        fontsize=7.5,
                    )  # fmt: skip
        axes.set_ylim(-0.02, 1.04)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.set_xticks(ticks)
        axes.margins(x=0.04)
        axes.set_xlabel("position in the draft, and number of draft tokens", labelpad=6 + 10 * len(lines))
        axes.set_ylabel("accepted")
        _label_ends(figure, axes, ends, narrow)

    def described(method: str, positions: list[dict[str, Any]]) -> str:
        ends = positions[:1] + positions[1:][-1:]
        return f"{method}: " + ", ".join(
            f"{p['share']:.0%} of {p['drafted']:,} at position {p['position']} ({p['low']:.0%}–{p['high']:.0%})"
            for p in ends
        )

    return _plot(
        "acceptance",
        "Acceptance rate, by position",
        "The share of draft tokens that were accepted, by their position in the draft. The bars are Wilson's "
        "intervals, as of independent tokens, and the numbers below the axis count the draft tokens. A draft token is "
        "accepted only if all before it were. Long drafts are made where acceptance is likely, so a line may rise all "
        "the same.",
        "Line plot of the acceptance rate by position. " + "; ".join(described(m, p) for m, p in lines.items()) + ".",
        draw,
    )


def time_by_component(summary: Mapping[str, Any], new_tokens: Mapping[str, int]) -> Plot | None:
    """The milliseconds per new token, by component."""
    parts = {"target": "blue", "draft": "amber", "rest": "grey"}
    rows = {
        method: {part: 1000 * seconds[part] / tokens for part in parts}
        for method, seconds in summary["time"].items()
        if (tokens := new_tokens.get(method, 0)) > 0 and any(seconds.values())
    }
    if not rows:
        return None

    def draw(figure: Figure, narrow: bool) -> None:
        figure.set_size_inches(3.7 if narrow else 7.6, 0.75 + (0.44 if narrow else 0.31) * len(rows))
        axes = _dress(figure.add_subplot(), grid="x")
        longest = max(sum(row.values()) for row in rows.values())
        for at, (method, row) in enumerate(rows.items()):
            left = 0.0
            for part, colour in parts.items():
                axes.barh(at, row[part], left=left, height=0.44 if narrow else 0.62, color=LIGHT[colour])
                left += row[part]
            axes.text(
                left + 0.012 * longest,
                at,
                f"{left:.{1 if left >= 10 else 2}f}",
                va="center",
                color=LIGHT["ink"],
                fontsize=8.5,
            )
            if narrow:  # a name beside its bar would take half of the width
                axes.text(0, at - 0.3, short(method, 40), va="bottom", color=LIGHT["ink"], fontsize=8.5)
        axes.set_yticks([] if narrow else range(len(rows)), [] if narrow else [short(method) for method in rows])
        axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
        axes.spines["left"].set_visible(False)
        axes.set_ylim(len(rows) - 0.5, -0.75 if narrow else -0.5)
        axes.set_xlim(0, 1.1 * longest)
        axes.set_xlabel("milliseconds per new token")
        first = dict(zip(parts, axes.containers, strict=False))
        axes.legend(
            first.values(), first.keys(), loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9,
            labelcolor=LIGHT["ink"], handlelength=1, handleheight=0.9, columnspacing=1.6, borderaxespad=0.2,
        )  # fmt: skip

    return _plot(
        "time",
        "Where the time goes",
        "Milliseconds a new token takes: in passes of the target, in passes of the draft model, and in all the rest "
        "(look-ups, choosing tokens, waiting). Drafts pay if the target's bar shrinks by more than the others grow.",
        "Stacked bars of milliseconds per new token. "
        + "; ".join(f"{m}: " + ", ".join(f"{part} {v:.3g}" for part, v in row.items()) for m, row in rows.items())
        + ".",
        draw,
    )


def categories(summary: Mapping[str, Any], colours: Mapping[str, str]) -> Plot | None:
    """Tokens per pass of the target by category: one panel per method that drafts."""
    steps = {
        category: {m: v for m, figures in methods.items() if (v := figures["steps_per_target_pass"]) is not None}
        for category, methods in summary["categories"].items()
    }
    drafting = [m for m in colours if any(values.get(m, 1.0) > 1.005 for values in steps.values())]
    steps = {
        category: drafted
        for category, values in steps.items()
        if (drafted := {m: v for m, v in values.items() if m in drafting})
    }
    if not steps:
        return None
    order = sorted(steps, key=lambda category: fmean(steps[category].values()), reverse=True)
    if len(order) > MAX_CATEGORIES_SHOWN:  # the best and the worst are the most instructive
        order = order[: MAX_CATEGORIES_SHOWN // 2] + order[-MAX_CATEGORIES_SHOWN // 2 :]

    def draw(figure: Figure, narrow: bool) -> None:
        across = min(len(drafting), 2 if narrow else 4)
        down = math.ceil(len(drafting) / across)
        figure.set_size_inches(3.7 if narrow else 7.6, 0.35 + down * (0.62 + 0.25 * len(order)))
        panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat
        right = max(max(steps[category].values()) for category in order)
        for axes, method in zip_longest(panels, drafting):
            if method is None:
                axes.set_visible(False)
                continue
            colour = colours[method]
            _dress(axes)
            axes.axvline(1, color=LIGHT["line"], linewidth=0.8)
            for at, category in enumerate(order):
                if (value := steps[category].get(method)) is not None:
                    axes.plot([1, value], [at, at], color=colour, linewidth=1.2, solid_capstyle="butt")
                    axes.plot([value], [at], "o", color=colour, markersize=5, markeredgewidth=0)
                    axes.annotate(
                        f"{value:.2f}", (value, at), (5, 0), textcoords="offset points", va="center",
                        color=LIGHT["ink"], fontsize=8,
                    )  # fmt: skip
            axes.set_title(short(method, 19 if narrow else 24), loc="left", fontsize=9, color=colour, fontweight="bold")
            axes.set_yticks(range(len(order)), [short(category, 14 if narrow else 24) for category in order])
            axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
            axes.spines["left"].set_visible(False)
            axes.set_ylim(len(order) - 0.4, -0.6)
            axes.set_xlim(0.9 if right < 2 else 0.8, right + (right - 0.8) * (0.5 if narrow else 0.32))
        figure.supxlabel("tokens per pass of the target", fontsize=9, color=LIGHT["soft"])

    def described(method: str) -> str:
        return f"{method}: " + ", ".join(f"{c} {steps[c][method]:.2f}" for c in order if method in steps[c])

    left_out = len(steps) - len(order)
    return _plot(
        "categories",
        "Tokens per pass, by category",
        "How many tokens each pass of the target gives; 1 is what there is without drafts. "
        "Categories are sorted by their mean over methods."
        + (f" The {left_out} in the middle are left out." if left_out else ""),
        "Dot plot of tokens per pass of the target by category. " + "; ".join(map(described, drafting)) + ".",
        draw,
    )


def short(text: str, max_characters: int = 32) -> str:
    return text if len(text) <= max_characters else text[: max_characters - 1].rstrip() + "…"


def interval(method: Mapping[str, Any], metric: str) -> Mapping[str, Any] | None:
    """A method's metric as mean, low, high and n; None if there is no finite mean. pass@1 has only a mean."""
    if metric == "pass_at_1":
        value = method["pass_at_1"]
        return None if value is None else {"mean": value, "low": None, "high": None, "n": None}
    estimate: Mapping[str, Any] | None = method["metrics"].get(metric)
    return estimate if estimate is not None and math.isfinite(estimate["mean"]) else None


def extent(estimate: Mapping[str, Any]) -> tuple[float, float, float]:
    """A mean and the ends of its interval, which are the mean if there is no interval."""
    mean, low, high = estimate["mean"], estimate["low"], estimate["high"]
    return mean, mean if low is None else low, mean if high is None else high


def _dress(axes: Axes, grid: Literal["x", "y", "both"] | None = None) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT["line"])
    axes.tick_params(colors=LIGHT["soft"], labelsize=8.5, length=3, width=0.8)
    axes.xaxis.label.set(color=LIGHT["soft"], fontsize=9)
    axes.yaxis.label.set(color=LIGHT["soft"], fontsize=9)
    axes.set_axisbelow(True)
    axes.patch.set_alpha(0)
    if grid:
        axes.grid(axis=grid, color=LIGHT["line"], linewidth=0.5)
    return axes


def _label(figure: Figure, axes: Axes, points: list[Point], colours: Mapping[str, str], narrow: bool) -> None:
    """Write names beside points, each on the side where it covers least."""
    from matplotlib.transforms import Bbox

    def overlap(a: Bbox, b: Bbox) -> float:
        both = Bbox.intersection(a, b)
        return 0.0 if both is None else both.width * both.height

    figure.draw_without_rendering()
    scale = figure.dpi / 72
    frame = axes.get_window_extent()
    taken = []
    for p in points:
        (x, y), *ends = axes.transData.transform([(p.x, p.y), (p.left, p.low), (p.right, p.high)])
        (left, right), (low, high) = (sorted(end[i] for end in ends) for i in (0, 1))
        taken.append(Bbox.from_extents(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale))
        taken.append(Bbox.from_extents(left, y - 3 * scale, right, y + 3 * scale))
        taken.append(Bbox.from_extents(x - 3 * scale, low, x + 3 * scale, high))
    sides = [(dx, dy) for far in (9, 18, 27, 36) for dy in (far, -far) for dx in (6, -6, 0)] + [(8, 0), (-8, 0)]
    for p in points:
        options = []
        for number, (dx, dy) in enumerate(sides):
            label = axes.annotate(
                short(p.method, 24 if narrow else 32), (p.x, p.y), (dx, dy), textcoords="offset points", va="center",
                ha="left" if dx > 0 else "right" if dx < 0 else "center", color=colours[p.method], fontsize=8.5,
            )  # fmt: skip
            label.set_in_layout(False)
            mine = label.get_window_extent()
            label.remove()
            outside = mine.width * mine.height - overlap(mine, frame)
            cost = 4 * outside + sum(overlap(mine, other) for other in taken) + 4 * scale * scale * number
            options.append((cost, number, label, mine))
        _, _, label, mine = min(options)
        axes.add_artist(label)
        taken.append(mine)


def _label_ends(figure: Figure, axes: Axes, ends: list[tuple[str, float, float, str]], narrow: bool) -> None:
    """Write the names of lines to the right of their ends, without overlap; on a phone, above the plot."""
    if narrow:
        for number, (name, _, _, colour) in enumerate(reversed(ends)):
            axes.annotate(
                "● " + short(name, 36), (0, 1), (0, 6 + 12 * number), xycoords="axes fraction", color=colour,
                textcoords="offset points", fontsize=8.5,
            )  # fmt: skip
        return
    figure.draw_without_rendering()
    gap = 12 / (axes.get_window_extent().height * 72 / figure.dpi) * 1.02  # of the axis, for a line of text
    right = max(x for _, x, _, _ in ends)
    below = -1.0
    labels = []
    for name, x, y, colour in sorted(ends, key=lambda end: end[2]):
        below = max(y, below + gap)
        labels.append((name, x, y, below, colour))
    over = max(0.0, below - 1.0)
    for name, x, y, text_y, colour in labels:
        if x < right:
            axes.plot([x, right], [y, text_y - over], color=colour, linewidth=0.6, linestyle=(0, (1, 3)))
        axes.annotate(
            short(name, 28), (right, text_y - over), (7, 0), textcoords="offset points", va="center", color=colour,
            fontsize=8.5,
        )  # fmt: skip


def _plot(name: str, title: str, caption: str, alt: str, draw: Callable[[Figure, bool], None]) -> Plot:
    """Draw a plot for the page, for a phone, and as a file."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def drawn(kind: str) -> Figure:
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        figure.patch.set_alpha(0)
        draw(figure, kind == "narrow")
        return figure

    def svg(figure: Figure, kind: str) -> str:
        # The salt makes identifiers differ between the SVGs of a page, and equal each time an SVG is drawn.
        with matplotlib.rc_context({"svg.hashsalt": f"{name}-{kind}"}):
            figure.savefig(file := io.BytesIO(), format="svg")
        return inline(file.getvalue())

    # A method's name may have a dollar in it, and characters that only the page's fonts have.
    style: Any = {"text.parse_math": False, "svg.fonttype": "none", "pdf.fonttype": 42}  # text stays text
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")
        narrow = svg(drawn("narrow"), "narrow")
        wide = svg(figure := drawn("wide"), "wide")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=LIGHT["ink"], fontweight="bold")
        files = {}
        for kind in FORMATS:
            figure.savefig(file := io.BytesIO(), format=kind, dpi=160, facecolor="white")
            files[kind] = file.getvalue()
    return Plot(name, title, caption, alt, wide, narrow, files)


def inline(svg: bytes) -> str:
    """An SVG for use inside the page: no prolog or metadata, and the page's width, colours and fonts."""
    text = svg.decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg\s[^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    text = text.replace("xlink:href", "href")
    used = {*re.findall(r"#(\w+)", text)}
    text = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ?([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r"font: ?(bold|700) ([\d.]+)px [^;\"]*", r"font-size: \2px; font-weight: 600", text)
    for name, colour in LIGHT.items():
        text = text.replace(colour, f"var(--{name})")
    return text
