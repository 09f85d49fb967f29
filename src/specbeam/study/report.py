"""The study's report: one page for people who were not there, and its plots and tables as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from specbeam.jobs.files import write_whole
from specbeam.recording.replay import replay_page
from specbeam.study import plots
from specbeam.study.composition import as_yaml
from specbeam.study.metrics import finished
from specbeam.study.results import Record, file_name
from specbeam.study.samples import samples
from specbeam.study.statistics import between, number, settled, several, times, too_few
from specbeam.study.tables import tables, write_tables

MAX_FAILURES_LISTED = 50
MAX_ERROR_CHARACTERS = 300
NOTES = {
    "Speed": "A speed-up is not settled if its interval includes 1, or if there is none. Same text: in how many "
    "generations every token is that of the plain method of its kind. Tokens per pass: new tokens, or steps of beam "
    "search, for each forward pass of the target; 1 without drafts. Accepted: the share of draft tokens that were "
    "accepted. Beams evaluated: the share of the beams of all steps that the target evaluated; the others could not "
    "change the outcome.",
    "Quality": "Valid: the share of texts that satisfy their constraint; the others were cut. pass@1, ROUGE-L, BLEU "
    "and chrF: higher is better. They are means over texts, and corpus BLEU and chrF count n-grams over all texts. "
    f"{plots.WHAT_PERPLEXITY_REWARDS}",
    "Diversity": "Repetition: the share of 4-grams that occurred before. Distinct-1 and distinct-2: the share of "
    "different tokens, and of different pairs of tokens. Of the text, methods compare with each other. Of all beams "
    "together, it is lower the more beams there are, so only methods with equally many compare. Self-BLEU: how much a "
    "beam has in common with the others, 0 to 100. Edit distance: between beams, as a share of the longer one.",
}
"""What stands below each table."""


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
    latex_columns: Sequence[str] | None = None,
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
        latex_columns: as of :func:`specbeam.study.tables.write_tables`.

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
    write_tables(folder / "tables", summary, title, latex_columns)
    write_whole(folder / "report.html", page.encode(errors="replace"))  # a model may write half a surrogate pair
    return folder / "report.html"


def write_replays(folder: Path, records: list[Record]) -> list[dict[str, str]]:
    """Write a page for each recording. Returns the "method", the "prompt" and the "address" of each."""
    replays = []
    for record in finished(records):
        if record["recording"]:
            method, prompt = record["method"], record["prompt"]
            path = folder / "replays" / f"{file_name(method)}.html"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, replay_page(record["recording"], f"{method}: {prompt}"))
            replays.append({"method": method, "prompt": prompt, "address": quote(f"replays/{path.name}")})
    return replays


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
    failed = [(r["key"], plots.short(r["error"], MAX_ERROR_CHARACTERS)) for r in records if r["error"]]
    return environment.get_template("report.html.j2").render(
        title=title,
        about=about(summary["methods"], records),
        header=header,
        level=level(summary),
        answer=answer(summary),
        tables=tables(summary),
        plots=drawn,
        samples=samples(records),
        replays=replays,
        config=as_yaml(config, width=100),
        fingerprint=[*facts(fingerprint)],
        overhead=overhead,
        failed=failed[:MAX_FAILURES_LISTED],
        failed_more=max(0, len(failed) - MAX_FAILURES_LISTED),
        notes=NOTES,
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
    if ratios:
        shown = best if best in ratios else max(ratios, key=lambda name: ratios[name]["ratio"])
        baseline = methods[shown]["against"]["baseline"]
        pair = {shown, baseline} == {best, *fastest["unsettled"]}  # the first sentence has their ratio
        if not (pair and ratios[shown]["low"] is not None):
            subject = "It" if shown == best else strong(shown)
            known = settled(ratios[shown]) or {shown, baseline} <= {best, *fastest["unsettled"]}
            verb = "is" if settled(ratios[shown]) else "came out"
            why = "" if known else ", so the measurements do not settle which of them is faster"
            sentence = "{} {} {} as fast as {}{}."
            sentences.append(say(sentence, subject, verb, times(ratios[shown]), strong(baseline), why))
        sentences += text_of(methods, shown, "Its" if shown == best or not pair else say("{}’s", strong(shown)))
        if shown == best:
            sentences += where(summary["categories"], best)
    if failed:
        are = "is" if failed == 1 else "are"
        sentences.append(say("{} failed and {} listed at the end.", several(failed, "generation"), are))
    return [*sentences, *failed_metrics(summary)]


def failed_metrics(summary: Mapping[str, Any]) -> Iterator[Markup]:
    """For each custom metric that failed: on how many generations, and why on the first of them."""
    for name, reasons in summary.get("failed_metrics", {}).items():
        key, why = next(iter(reasons.items()))
        on = several(len(reasons), "generation")
        yield say(
            "The metric {} failed on {}; the first is {}: {}.", name, on, key, plots.short(why, MAX_ERROR_CHARACTERS)
        )


def spread(fastest: Mapping[str, Any]) -> Iterator[Markup]:
    """Whether the measurements spread more than the fastest methods differ: then no other figure says much."""
    if not fastest["unsettled"]:
        return
    ratios = _ratios(fastest)
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
    facts = (number(speed["mean"]), within)
    if len(fastest["unsettled"]) == 1 and _ratios(fastest):
        return say("On average it made {} tokens per second ({}).", *facts)
    if not fastest["rivals"]:
        verb = "made"
    else:
        verb = "has the highest mean speed:" if fastest["unsettled"] else "was the fastest:"
    return say("{} {} {} tokens per second ({}).", strong(method["method"]), verb, *facts)


def _ratios(fastest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The ratios, with intervals, of the fastest method to the methods that may be as fast."""
    rivals = [fastest["rivals"][name] for name in fastest["unsettled"]]
    return [ratio for ratio in rivals if ratio is not None and ratio["low"] is not None]


def text_of(methods: Mapping[str, Any], name: str, whose: str) -> Iterator[Markup]:
    """Whether a method's text is that of its plain method, else its quality and the baseline's."""
    method = methods[name]
    baseline = method["against"]["baseline"]
    same = method["agreement"] or {"same": 0, "of": 0}
    exact = same["same"] == same["of"] > 0
    if exact:
        all_of = f"all {same['of']:,} generations" if same["of"] > 1 else "its one generation"
        yield say("{} text is exactly that of {} in {}, so its quality is the same.", whose, same["twin"], all_of)
        passes = [
            methods[method]["metrics"].get("target_passes") for method in (name, same["twin"]) if method in methods
        ]
        if len(passes) == 2 and all(passes):
            yield say("A text took {} passes of the model instead of {}.", *(f"{p['mean']:.3g}" for p in passes))
    elif same["of"]:
        share = f"{same['same']:,} of {same['of']:,} generations"
        yield say("{} text is exactly that of {} in {}.", whose, same["twin"], share)
    qualities = [
        f"{label} {number(mine['mean'])} against {number(its['mean'])}"
        for group in plots.QUALITIES
        for metric, label, _ in group
        if (mine := plots.interval(method, metric)) and (its := plots.interval(methods[baseline], metric))
    ]
    if qualities and not exact:
        yield say("{} mean quality is {}.", "Its" if same["of"] else whose, ", ".join(qualities))


def where(categories: Mapping[str, Any], name: str) -> Iterator[Markup]:
    """The categories in which a method helps most and least, if their intervals do not overlap."""
    against = {category: methods.get(name, {}).get("against") for category, methods in categories.items()}
    ratios = {category: ratio for category, ratio in against.items() if ratio and ratio["low"] is not None}
    if len(ratios) > 1:
        fastest, slowest = (end(ratios, key=lambda category: ratios[category]["ratio"]) for end in (max, min))
        if ratios[fastest]["low"] > ratios[slowest]["high"]:
            slower = ", which is slower" if ratios[slowest]["high"] < 1 else ""
            sentence = "It helps more in “{}” ({}) than in “{}” ({}{})."
            yield say(sentence, fastest, times(ratios[fastest]), slowest, times(ratios[slowest]), slower)


def say(sentence: str, *parts: Any) -> Markup:
    """A sentence whose parts are escaped."""
    return Markup(sentence).format(*parts)


def strong(name: str) -> Markup:
    return say("<strong>{}</strong>", name)


# The setting


def facts(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Nested settings as groups of names and values."""
    here = [(str(name), str(value)) for name, value in settings.items() if not isinstance(value, Mapping)]
    if here:
        yield above, here
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from facts(value, f"{above} {name}".strip())
