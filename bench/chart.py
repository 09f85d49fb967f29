"""The chart of speed against peers in README and docs: docs/speed-light.svg and docs/speed-dark.svg.

    python bench/chart.py bench/results/cpu-2026-11-24-1b4f860ee2.json

The file is what ``python bench/cpu.py --json`` writes; it names the machine and the date.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from figures import REPOSITORY, Figures

MODELS = {
    "smollm2-135m-instruct": "SmolLM2 135M (Q4_1 file)",
    "qwen2.5-coder-1.5b-instruct": "Qwen2.5-Coder 1.5B (Q4_K_M file)",
}
SEARCHES = ("greedy", "4 beams")
ENGINES = {
    "CTranslate2, int8": "CTranslate2, int8",
    "llama.cpp, the file": "llama.cpp, the file",
    "specbeam, int8": "specbeam, int8",
    "specbeam, keep": "specbeam, the file",
}
"""The methods of bench/cpu.py, from the bottom bar to the top bar, and their labels."""
COLOURS: dict[str, dict[str, Any]] = {
    "light": {"text": "#1f2933", "faint": "#5b6770", "bars": ["#c3cad0", "#9aa5ad", "#5cb8ac", "#00796b"]},
    "dark": {"text": "#e4e7eb", "faint": "#a0abb4", "bars": ["#4c565f", "#6b7780", "#2f8f83", "#4fd1c0"]},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    figures = Figures.read(parser.parse_args().results)
    for scheme, colours in COLOURS.items():
        draw(figures, colours, REPOSITORY / f"docs/speed-{scheme}.svg")


def draw(figures: Figures, colours: dict[str, Any], path: Path) -> None:
    speeds = {figure.name: figure.value for figure in figures.figures}
    style: Any = {
        "svg.fonttype": "none",  # text stays text, so it can be read aloud and searched
        "svg.hashsalt": "specbeam",  # the same figures give the same bytes
        "font.family": "sans-serif",
        "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
        "text.color": colours["text"],
        "axes.labelcolor": colours["faint"],
    }
    with plt.rc_context(style):
        chart, panels = plt.subplots(1, 2, figsize=(10, 4.3), gridspec_kw={"wspace": 0.62})
        for panel, (model, title) in zip(panels, MODELS.items(), strict=True):
            labels, places = [], []
            top = max(speeds[f"{model} / greedy / {engine}"] for engine in ENGINES)
            for group, search in enumerate(reversed(SEARCHES)):
                first = group * (len(ENGINES) + 1.1)
                for row, (engine, label) in enumerate(ENGINES.items()):
                    speed = speeds.get(f"{model} / {search} / {engine}")
                    if speed is not None:
                        panel.barh(first + row, speed, height=0.82, color=colours["bars"][row])
                    shown = "no beam search" if speed is None else f"{speed:.1f}"
                    ours = engine.startswith("specbeam")
                    panel.text(
                        (speed or 0) + top * 0.015,
                        first + row,
                        shown,
                        va="center",
                        size=10,
                        color=colours["text" if speed else "faint"],
                        weight="bold" if ours else "normal",
                    )
                    labels.append(label)
                    places.append(first + row)
                panel.text(0, first + len(ENGINES) - 0.36, search, size=10, color=colours["faint"], va="bottom")
            panel.set_title(title, loc="left", size=12, weight="bold", color=colours["text"], pad=16)
            panel.set_yticks(places, labels, size=10, color=colours["text"])
            panel.set_xlim(0, top * 1.12)
            panel.set_ylim(-0.6, places[-1] + 0.9)
            panel.set_xticks([])
            panel.tick_params(length=0)
            panel.spines[:].set_visible(False)
        processor, rest = figures.machine.split(" (", 1)
        cores = ", ".join(part for part in rest.split(", ") if part.endswith(("cores", "threads")))
        caption = f"tokens/s, 64 new tokens. {processor}, {cores}, {figures.date}, commit {figures.commit}."
        chart.text(0.125, 0.02, caption, ha="left", size=9, color=colours["faint"])
        chart.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None})
        plt.close(chart)


if __name__ == "__main__":
    main()
