"""The page and its plots: their words, their safety, that they are whole, and their look in a browser."""

import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pandas
import pytest
from markupsafe import Markup

pytest.importorskip("matplotlib")
pytest.importorskip("yaml")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from specbeam.study import plots, report, samples, statistics, tables
from specbeam.study.statistics import share_interval
from specbeam.study.summary import summarize
from tests.study.test_metrics import failed, make

AXE = Path(sys.prefix) / "npm/node_modules/axe-core/axe.min.js"
"""Where ``make .venv/npm`` puts it."""
METHODS = {
    "greedy": ("greedy", 13.4, 1.0, None),
    "greedy, n-gram drafts": ("speculative", 24.9, 2.31, "greedy"),
    "greedy, model drafts": ("speculative", 19.6, 2.9, "greedy"),
    "beam search, 4 beams": ("beam", 7.2, 1.0, None),
    "beam search, 4 beams, drafts": ("speculative-beam", 11.8, 1.9, "beam search, 4 beams"),
    "sampling": ("sample", 13.3, 1.0, None),
}
"""The mode, tokens per second, tokens per pass and twin of each method."""
CATEGORIES = {"code": 1.5, "summaries": 1.3, "questions": 0.9, "prose": 0.7}
NASTY = "<script>alert('x')</script> & \"quotes\" 🦋 שלום עולם " + "A" * 400


def around(mean):
    return {"mean": mean, "low": 0.94 * mean, "high": 1.07 * mean, "n": 24}


def around_ratio(ratio, share=0.1):
    return {"ratio": ratio, "low": ratio * (1 - share), "high": ratio * (1 + share), "p": 0.001, "n": 24}


def place(position, drafted, accepted):
    low, high = share_interval(accepted, drafted)
    return {"position": position, "drafted": drafted, "accepted": accepted, "low": low, "high": high}


def token(text, drafted, beam=0, score=-1.0):
    return {"token_id": sum(map(ord, text)), "text": text, "beam": beam, "drafted": drafted, "score": score}


def draft(text, accepted, parent=None, beam=None):
    return {"token_id": sum(map(ord, text)), "text": text, "parent": parent, "beam": beam, "accepted": accepted}


CHAIN = [
    {"drafted": [], "ahead": [], "steps": [[token("def", False)]]},
    {
        "drafted": [draft(" add", True, beam=0), draft("(", True, 0), draft("x", False, 1), draft(")", False, 2)],
        "ahead": [],
        "steps": [[token(" add", True)], [token("(", True)], [token("a", False)]],
    },
    {"drafted": [draft(",", True, beam=0)], "ahead": [], "steps": [[token(",", True)], [token(" b", False)]]},
]
BEAMS = [
    {"drafted": [], "ahead": [], "steps": [[token("The", False), token("A", False)]]},
    {
        "drafted": [draft(" sky", True, beam=0), draft(" is", True, 0), draft(" cat", False, beam=1)],
        "ahead": [],
        "steps": [
            [token(" sky", True, 0), token(" dog", False, 1)],
            [token(" is", True, 0), token(" was", False, 0)],
            [token(" blue", False, 0), token(" red", False, 1)],
        ],
    },
]


def generation(method, row=0, category="code", text=None, trace=None, **more):
    chosen = trace if trace is not None else {"speculative": CHAIN, "speculative-beam": BEAMS}.get(METHODS[method][0])
    text = text if text is not None else "The sky is blue" if chosen is BEAMS else "def add(a, b"
    ids = [next(b["token_id"] for b in step) for round in chosen or [] for step in round["steps"]]
    more = {"prompt": "Write a function that adds.", "category": category, "trace": chosen, "recording": None, **more}
    record = make(text, method=method, mode=METHODS[method][0], row=str(row), token_ids=ids, **more)
    drafted = [g["accepted"] for round in chosen or [] for g in round["drafted"]]
    record["stats"] |= {"new_tokens": 64, "drafted": len(drafted), "accepted": sum(drafted)}
    return record


def study(methods=tuple(METHODS), perplexity=True, with_categories=True):
    """Summary and records, as a real study has them."""
    method_summaries = []
    for name in methods:
        mode, speed, steps, twin = METHODS[name]
        beams = mode in ("beam", "speculative-beam")
        means = {"tokens_per_second": speed, "time_to_first_token": 0.213, "target_passes": 64 / steps}
        means |= {"draft_passes": 0.0, "steps_per_target_pass": steps, "new_tokens": 64.0, "time_per_token": 31.7}
        means["rougeL"] = 0.287 if beams else 0.241
        if perplexity:
            means["perplexity"] = 4.02 if beams else 9.7 if mode == "sample" else 4.91
        if steps > 1:
            means["acceptance_rate"] = 0.61
        one = {"method": name, "mode": mode, "generations": 24, "failed": 0, "corpus": {}, "pass_at_1": None}
        one |= {"metrics": {metric: around(mean) for metric, mean in means.items()}, "agreement": None, "against": None}
        if twin:
            one["agreement"] = {"twin": twin, "same": 24, "of": 24}
        if name != "greedy":
            ratio = around_ratio(speed / METHODS["greedy"][1])
            one["against"] = {"baseline": "greedy", "tokens_per_second": ratio}
        method_summaries.append(one)

    def in_category(name, how):
        _, speed, steps, twin = METHODS[name]
        how_much = how if steps > 1 else 1
        return {
            "tokens_per_second": speed * how_much,
            "steps_per_target_pass": max(1.0, steps * how_much),
            "new_tokens": 64,
            "n": 6,
            "against": around_ratio(speed * how / METHODS[twin][1], 0.05) if twin else None,
        }

    categories = {category: {name: in_category(name, how) for name in methods} for category, how in CATEGORIES.items()}
    drafting = [name for name in methods if METHODS[name][2] > 1]
    best = max(methods, key=lambda name: METHODS[name][1])
    rivals = {name: around_ratio(METHODS[best][1] / METHODS[name][1]) for name in methods if name != best}
    summary = {
        "confidence": 0.95,
        "fastest": {"method": best, "rivals": rivals, "unsettled": []},
        "methods": method_summaries,
        "categories": categories if with_categories else {},
        "acceptance_by_position": {
            name: [place(p, 900 - 100 * p, round((900 - 100 * p) * (0.9 - 0.04 * i) ** p)) for p in range(1, 8)]
            for i, name in enumerate(drafting)
        },
        "time": {name: {"target": 14.0 / METHODS[name][2], "draft": 0.4, "rest": 0.3} for name in methods},
    }
    return {
        "title": "A study",
        "config": {"model": {"target": "smollm2"}, "decode": {"mode": ["greedy"], "k": "auto"}},
        "fingerprint": {"machine": {"cpu": "a CPU"}, "models": {"target": {"sha256": "0123456789abcdef" * 4}}},
        "summary": summary,
        "records": [generation(name, row, category) for row, category in enumerate(CATEGORIES) for name in methods],
    }


class Page(HTMLParser):
    """The page's tags, and its text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def written(folder, **report_data):
    path = report.write_report(folder, **report_data)
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


BAD = "<img src=x onerror=alert(1)>"


def everything_is_strange():
    """Texts that want to be HTML wherever a text can be, and long, in many records; numbers that are missing."""
    report_data = study()
    summary = report_data["summary"]
    for method in summary["methods"]:
        method["metrics"]["tokens_per_second"] |= {"low": None, "high": None}
        method["metrics"]["perplexity big/judge"] = around(12.0)
        method["metrics"]["perplexity"]["mean"] = float("nan")
    summary["methods"][1]["method"] = summary["fastest"]["method"] = BAD
    summary["fastest"]["unsettled"] = ["greedy", "sampling"]
    summary["categories"] = {BAD: {BAD: {"tokens_per_second": 9, "steps_per_target_pass": 2.0, "n": 6}}}
    summary["acceptance_by_position"] = {BAD: [place(1, 5, 3)]}
    summary["time"] = {BAD: {"target": 1.0, "draft": 0.0, "rest": 0.1}}
    records = [generation("greedy, n-gram drafts", row, text=NASTY, prompt=NASTY + "\ud83d") for row in range(500)]
    records += [generation("greedy", 0, category=BAD, text=NASTY, prompt=NASTY), generation("greedy") | {"method": BAD}]
    records.append(failed(row="2", error=BAD))
    named = {"title": BAD, "config": {BAD: BAD}, "fingerprint": {BAD: {BAD: BAD}}, "header": [(BAD, BAD)]}
    return report_data | named | {"records": records}


def all_failed():
    records = [failed(row=str(row), error="SpecbeamError: out of memory") for row in range(60)]
    return study(["greedy"]) | {"summary": summarize(records, {}), "records": records}


STUDIES = {
    "everything": study,
    "one method": lambda: study(["greedy"]),
    "no drafts, categories and perplexity": lambda: (
        study(["greedy", "sampling", "beam search, 4 beams"], perplexity=False, with_categories=False)
        | {"records": [generation("sampling", category=None)]}
    ),
    "all failed": all_failed,
    "nothing": lambda: {"title": "", "config": {}, "fingerprint": {}, "summary": summarize([], {}), "records": []},
    "everything is strange": everything_is_strange,
}


@pytest.fixture(scope="module")
def report_of(tmp_path_factory):
    """The folder, the HTML and the page of a report, which is written once."""
    reports = {}

    def report_of(which):
        if which not in reports:
            folder = tmp_path_factory.mktemp("report")
            with pytest.MonkeyPatch.context() as patch:
                if which != "everything":  # the files take most of the time
                    patch.setattr(plots, "FORMATS", ())
                reports[which] = folder, *written(folder, **STUDIES[which](), overhead=0.013)
        return reports[which]

    return report_of


def test_every_method_its_numbers_and_their_intervals_are_there(report_of):
    report_data = study()
    _, html, page = report_of("everything")
    for method in report_data["summary"]["methods"]:
        assert method["method"] in page.text
        speed = method["metrics"]["tokens_per_second"]
        assert statistics.number(speed["mean"]) in page.text
        assert f"{statistics.number(speed['low'])}–{statistics.number(speed['high'])}" in page.text
        assert f"<bdi>{method['method']}</bdi>" in html
    assert html.count("<td>24</td>") == len(METHODS) * html.count('class="numbers"')  # n
    milliseconds, sha256 = ("213", "31.7"), "0123456789abcdef" * 4
    for text in ("24 of 24", "4.91", "1.86×", *milliseconds, "1.3% of the time", "mode:\n", sha256):
        assert text in page.text
    assert html.startswith("<!doctype html>")
    assert re.findall(r"<td><strong>(.*?)</strong>", html) == ["24.9"]  # the settled winner alone


def said(summary):
    return Markup(" ").join(report.answer(summary)).striptags()


def test_the_answer_says_what_is_fastest_by_how_much_whether_exact_and_where():
    lead = said(study()["summary"])
    assert "greedy, n-gram drafts was the fastest: 24.9 tokens per second (95% interval 23.4–26.6, n=24)" in lead
    assert "It is 1.86 times (1.67–2.04) as fast as greedy." in lead
    assert "exactly that of greedy in all 24 generations, so its quality is the same" in lead
    assert "more in “code” (2.79 times (2.65–2.93)) than in “prose” (1.30 times (1.24–1.37))" in lead


def test_a_difference_that_is_not_settled_is_called_that_and_other_texts_have_their_quality():
    summary = study()["summary"]
    summary["fastest"]["unsettled"] = ["greedy", "sampling"]
    summary["fastest"]["rivals"] |= {"greedy": around_ratio(1.05), "sampling": around_ratio(1.06)}
    drafts = summary["methods"][1]
    drafts["against"]["tokens_per_second"]["low"] = 0.97
    drafts["agreement"]["same"] = 20
    lead, spread = said(summary), "The spread of this run is larger than its effect:"
    assert "was the fastest" not in lead
    which = "which of greedy, n-gram drafts, greedy and sampling is the fastest is not settled."
    assert lead.startswith(f"{spread} {which}")
    assert "n-gram drafts has the highest mean speed: 24.9" in lead
    assert lead.count("settle") == 1
    assert "in 20 of 24 generations" in lead
    assert "Its mean quality is ROUGE-L 0.241 against 0.241, perplexity 4.91 against 4.91" in lead
    summary["fastest"]["unsettled"] = ["greedy"]
    lead = said(summary)
    first = (
        f"{spread} greedy, n-gram drafts is 1.05 times (0.95–1.16) as fast as greedy. On average it made 24.9 tokens"
    )
    assert lead.startswith(first)
    assert lead.count(" as fast as ") == lead.count("24.9") == 1


def test_of_few_prompts_nothing_is_called_the_fastest():
    report_data = study(["greedy", "greedy, n-gram drafts"])
    summary = report_data["summary"]
    few = {"low": None, "high": None, "n": 3}
    for method in summary["methods"]:
        against = [method["against"]["tokens_per_second"]] if method["against"] else []
        for figure in [*method["metrics"].values(), *against]:
            figure |= few
    for by_method in summary["categories"].values():
        for figures in by_method.values():
            if figures["against"]:
                figures["against"] |= few | {"n": 1}
    summary["fastest"] |= {"unsettled": ["greedy"], "rivals": {"greedy": None}}
    lead = said(summary)
    assert "24.9 tokens per second (n=3: too few for an interval)" in lead
    which = "which of greedy, n-gram drafts and greedy is the fastest is not settled."
    assert lead.startswith(f"This run is too small to show an effect: {which}")
    assert "It came out 1.86 times as fast as greedy. Its text is exactly" in lead
    assert lead.count("too few") == lead.count("settled") == 1
    assert "helps" not in lead
    html = report.render(**report_data, overhead=None, drawn=[])
    page = Page(html)
    assert "was the fastest" not in page.text
    assert "<small>not settled</small>" in html
    assert "<strong>24.9" not in html


def a_baseline_that_is_the_fastest(ratio):
    """Of greedy search, which is the baseline, and a method with drafts that has the ratio to it."""
    summary = study(["greedy", "greedy, n-gram drafts"])["summary"]
    summary["methods"][1]["against"]["tokens_per_second"] = around_ratio(ratio)
    rivals = {"greedy, n-gram drafts": around_ratio(1 / ratio)}
    summary["fastest"] = {"method": "greedy", "rivals": rivals, "unsettled": [] if ratio < 0.9 else [*rivals]}
    return summary


def test_a_baseline_that_is_the_fastest_and_one_that_may_be():
    slower, unsettled = map(said, map(a_baseline_that_is_the_fastest, (0.7, 0.99)))
    text = "text is exactly that of greedy in all 24 generations, so its quality is the same."
    text += " A text took 27.7 passes of the model instead of 64."
    assert slower.startswith("greedy was the fastest: 13.4 tokens per second")
    assert slower.endswith(f"greedy, n-gram drafts is 0.70 times (0.63–0.77) as fast as greedy. Its {text}")
    assert "greedy is 1.01 times (0.91–1.11) as fast as greedy, n-gram drafts." in unsettled
    assert unsettled.endswith(f"n=24). greedy, n-gram drafts’s {text}")
    assert unsettled.count(" as fast as ") == 1


def test_a_metric_that_failed_is_named_with_its_first_generation():
    summary = study(["greedy"])["summary"] | {"failed_metrics": {"mine:score": {"greedy|2|0|0": "no <b>", "b": "x"}}}
    assert report.answer(summary)[-1] == (
        "The metric mine:score failed on 2 generations; the first is greedy|2|0|0: no &lt;b&gt;."
    )


def test_the_header_names_the_setting():
    report_data = study(["greedy"])
    header = [("target", "smollm2, int8 on cpu"), ("machine", "a <CPU>, 2 cores"), ("date", "2026-11-22")]
    report_data["header"] = header
    report_data["summary"]["confidence"] = 0.9
    html = report.render(**report_data, overhead=None, drawn=[])
    head = Page(html[html.index("<header>") : html.index("</header>")])
    for name, fact in header:
        assert name in head.text
        assert fact in head.text
    assert "90% intervals" in Page(html).text


def test_plots_are_files_and_in_the_page(report_of):
    from PIL import Image

    folder, html, page = report_of("everything")
    for name in ["frontier-task", "frontier-perplexity", "acceptance", "time", "categories"]:
        with Image.open(folder / "plots" / f"{name}.png") as image:
            image.verify()
            assert image.format == "PNG"
            assert image.size[0] > 1000
        assert (folder / "plots" / f"{name}.pdf").read_bytes().startswith(b"%PDF-")
        root = ElementTree.fromstring((folder / "plots" / f"{name}.svg").read_bytes())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        shown = "".join(root.itertext())
        assert "greedy, n-gram drafts" in shown  # letters, not curves: an editor can change them
    described = [attributes["aria-label"] for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert len(described) == 5
    assert all(len(alt) > 50 for alt in described)
    drawn = html[html.index("<figure>") :]
    assert not [hex for hex in plots.LIGHT.values() if hex in drawn]  # all colours follow the theme


def test_tables_are_files(report_of):
    folder, _, _ = report_of("everything")
    table = pandas.read_csv(folder / "tables" / "methods.csv").set_index(["method", "category", "metric"])
    speed = table.loc[("greedy", float("nan"), "tokens_per_second")].squeeze()
    assert (speed["mode"], speed.value, speed.n) == ("greedy", 13.4, 24)
    assert [speed.low, speed.high] == pytest.approx([0.94 * 13.4, 1.07 * 13.4])
    ratio = table.loc[("greedy, n-gram drafts", float("nan"), "speed_up")].squeeze()
    assert [ratio.low, ratio.value, ratio.high] == pytest.approx([share * 24.9 / 13.4 for share in (0.9, 1, 1.1)])
    assert table.loc[("greedy, n-gram drafts", "code", "steps_per_target_pass")].squeeze().value == 2.31 * 1.5
    third = table.loc[("greedy, n-gram drafts", float("nan"), "acceptance_at_3")].squeeze()
    assert third.n == 600
    assert third.low < third.value < third.high
    tex = (folder / "tables" / "methods.tex").read_text()
    rows = [line for line in tex.splitlines() if line.endswith("\\\\")]
    assert len(rows) == 1 + len(METHODS)
    headings = [heading.strip(" \\") for heading in rows[0].split("&")]
    shown = ["tokens/s", "speed-up", "same text", "tokens per pass", "accepted, \\%", "ROUGE-L", "perplexity"]
    assert headings == ["", *shown]  # the default columns that were measured
    assert len(shown) == tex.split("{tabular}{l")[1].split("}")[0].count("r")
    assert r"1.86$\times$ (1.67--2.04)" in rows[2]
    assert tex.split(r"\caption{")[1].startswith(
        "A study: means with 95\\% bootstrap intervals over prompts, n=24. Speed-ups are paired with greedy by prompt.}"
    )


def test_columns_for_latex_are_chosen_and_the_caption_tells_every_n():
    summary = study(["greedy", "beam search, 4 beams", "sampling"])["summary"]
    greedy, beam, _ = summary["methods"]
    beam["metrics"] = {name: figure | {"n": 20} for name, figure in beam["metrics"].items()}
    greedy["metrics"]["perplexity"]["n"] = 9
    tex = tables.latex(summary, "50% & more", ["perplexity", "new_tokens", "bleu"])
    header = next(line for line in tex.splitlines() if line.endswith("\\\\"))
    assert header == r" & perplexity & new tokens & BLEU \\"
    caption = "n=24 (n=20 for beam search, 4 beams; n=9 for perplexity of greedy)."
    assert rf"\caption{{50\% \& more: means with 95\% bootstrap intervals over prompts, {caption}}}" in tex


def test_a_metric_of_ones_own_is_a_column_without_its_module():
    summary = study(["greedy"])["summary"]
    summary["methods"][0]["metrics"] |= {"mine:score": around(0.5), "mine:f1": around(0.7), "other:f1": around(0.9)}
    (quality,) = [table for table in tables.tables(summary) if table.name == "Quality"]
    assert quality.headings[:4] == ["score", "mine:f1", "other:f1", "ROUGE-L"]
    assert "score & mine:f1 & other:f1" in tables.latex(summary, "A study")


def test_quality_and_diversity_are_in_sight(report_of):
    html = report_of("everything")[1]
    shown = html[html.index('<h2 id="methods">') : html.index("<details>")]
    assert re.findall(r"<h3>(.*?)</h3>", shown) == ["Speed", "Quality"]
    summary = study()["summary"]
    summary["methods"][0]["metrics"] |= {"bleu": around(30.0), "self_bleu": around(90.0), "peak_memory": around(1e9)}
    summary["methods"][0]["corpus"] = {"bleu": 31.0}
    found = {table.name: table.headings for table in tables.tables(summary)}
    assert [*found] == ["Speed", "Quality", "Diversity", "Other metrics"]
    assert {"BLEU", "corpus BLEU"} < {*found["Quality"]}
    assert found["Diversity"] == ["self-BLEU"]
    assert found["Other metrics"] == ["ms per token", "peak memory, GB", "new tokens"]


def test_tasks_come_before_perplexity_and_the_page_says_what_that_rewards(report_of):
    _, html, page = report_of("everything")
    (headings,) = [row for row in re.findall(r"<thead>(.*?)</thead>", html) if "ROUGE-L" in row]
    assert headings.index("ROUGE-L") < headings.index("perplexity")
    assert html.index("Speed and ROUGE-L") < html.index("Speed and perplexity")
    assert "Beam search looks for likely text, so it is ahead here by construction" in page.text


def axes_of(plot, monkeypatch):
    """The axes of the wide drawing of a plot."""
    drawn = []
    monkeypatch.setattr(plots, "_plot", lambda *given: drawn.append(given[-1]))
    plot()
    figure = Figure()
    FigureCanvasAgg(figure)
    drawn[0](figure, False)
    return figure.axes[0]


def test_points_of_a_frontier_fill_its_axes(monkeypatch):
    summary = study()["summary"]
    for method in summary["methods"]:
        method["metrics"]["tokens_per_second"] = around(100 + method["metrics"]["tokens_per_second"]["mean"])
    axes = axes_of(lambda: plots.frontiers(summary, dict.fromkeys(METHODS, "blue")), monkeypatch)
    left, right = axes.get_xlim()
    ends = [method["metrics"]["tokens_per_second"] for method in summary["methods"]]
    assert left < min(end["low"] for end in ends) < max(end["high"] for end in ends) < right
    assert max(end["high"] for end in ends) - min(end["low"] for end in ends) > 0.75 * (right - left)


def test_acceptance_has_its_counts_and_intervals(monkeypatch):
    summary = {"acceptance_by_position": {"speculative": [place(1, 1200, 900), place(2, 3, 3)]}}
    axes = axes_of(lambda: plots.acceptance(summary, {"speculative": "blue"}), monkeypatch)
    assert {"1,200", "3"} <= {text.get_text() for text in axes.texts}
    (bars,) = [collection.get_segments() for collection in axes.collections]
    assert bars[1][:, 1] == pytest.approx([0.438, 1], abs=0.001)  # 3 of 3 may be a share of 44%


def test_nothing_is_asked_of_the_network_and_ids_are_unique(report_of):
    _, _, page = report_of("everything")
    for tag, attributes in page.tags:
        assert tag not in ("script", "iframe", "object")
        for name in ("src", "href", "xlink:href", "data"):
            assert not re.match("https?:|//", attributes.get(name) or "")
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len({*ids})
    for table_head in (attributes for tag, attributes in page.tags if tag == "th"):
        assert table_head.get("scope") in ("col", "row", "rowgroup")


def test_texts_are_escaped_wherever_they_come_from(report_of):
    _, html, page = report_of("everything is strange")
    assert not [tag for tag, _ in page.tags if tag in ("script", "img")]
    assert "<img src=x" not in html
    assert BAD in page.text


def test_a_sample_tells_what_was_proposed_verified_and_replaced(tmp_path, no_plots):
    report_data = study(["greedy", "greedy, n-gram drafts"])
    html, page = written(tmp_path, **report_data)
    for heading in ("what it proposed", "which tokens it verified", "what replaced the rest", "the text"):
        assert heading in page.text
    assert "target’s own choice" in page.text
    assert "in place of" in page.text
    assert '<span class="drafted"> add</span>' in html
    assert page.text.count("rejected") >= 2
    (chain,) = {one.method for one in samples.samples(report_data["records"])}
    assert chain == "greedy, n-gram drafts"


def test_rounds_of_a_chain():
    one = samples.sample(generation("greedy, n-gram drafts"), "")
    assert [r.number for r in one.rounds] == [2, 3]
    first = one.rounds[0]
    (branch,) = first.branches
    assert [(g.text, g.accepted) for g in branch.tokens] == [(" add", True), ("(", True), ("x", False), (")", False)]
    assert first.target_tokens == [samples.TargetTokens(None, ["a"], ["x"])]
    assert one.rounds[1].target_tokens == [samples.TargetTokens(None, [" b"], [])]
    pieces = [("def", False), (" add", True), ("(", True), ("a", False), (",", True), (" b", False)]
    assert one.pieces == pieces


def test_rounds_of_beams():
    one = samples.sample(generation("beam search, 4 beams, drafts"), "")
    assert one.beams
    (round,) = one.rounds
    assert [(b.beam, [g.text for g in b.tokens]) for b in round.branches] == [(1, [" sky", " is"]), (2, [" cat"])]
    assert round.target_tokens == [
        samples.TargetTokens(1, [" dog"]),
        samples.TargetTokens(2, [" was"]),
        samples.TargetTokens(3, [" blue", " red"]),
    ]
    assert one.pieces == [("The", False), (" sky", True), (" is", True), (" blue", False)]


def test_a_round_without_a_step_shows_the_tokens_that_are_ahead():
    def beam(node, after, text, drafted=False):
        return {"node": node, "after": after, "text": text, "drafted": drafted}

    def own(steps):
        entry = {"drafted": [], "steps": steps, "ahead": [beam(5, 4, "a"), beam(6, 4, "b"), beam(7, 5, "c", True)]}
        return [(one.step, one.tokens) for one in samples.shown_round(1, entry, beams=True).target_tokens]

    assert own([]) == [(1, ["a", "b"])]
    assert own([[beam(4, 3, "d")]]) == [(1, ["d"]), (2, ["a", "b"])]


def test_branches_of_a_tree_share_what_they_begin_with():
    drafted = [draft("a", True, beam=0), draft("b", False, 0), draft("c", True, 0), draft("d", False, 2)]
    found = samples.branches(drafted, beams=False)
    assert [("".join(g.text for g in b.tokens), b.shared) for b in found] == [("acd", 0), ("ab", 1)]


@pytest.mark.parametrize(
    ("tokens", "text", "pieces"),
    [
        ([("\ufffd", True), ("\ufffd", True), (" fly", False)], "🦋 fly", [("🦋", True), (" fly", False)]),
        ([("\ufffd", True), ("\ufffd", False)], "🦋", [("🦋", False)]),
        ([("Hello", False), ("world", True)], "Hello world", [("Hello", False), (" world", True)]),
        ([("a", True), ("<eos>", False)], "a", [("a", True)]),
        ([], "a", [("a", False)]),
    ],
)
def test_tokens_are_found_in_the_text(tokens, text, pieces):
    assert samples.align(tokens, text) == pieces


def test_samples_are_a_handful_of_many():
    records = [
        generation(method, row, category=str(row % 12)) for row in range(250) for method in ("greedy", "sampling")
    ]
    assert len(samples.samples(records)) == samples.MAX_SAMPLES
    records += [generation("greedy, n-gram drafts", 300, category="x"), generation("beam search, 4 beams, drafts", 301)]
    found = samples.samples(records)
    assert {one.method for one in found} == {"greedy, n-gram drafts", "beam search, 4 beams, drafts"}


def test_numbers():
    assert [*map(statistics.number, [0, 0.01234, 4.0, 13.44, 213.4, 64123.7, None, float("nan")])] == [
        "0", "0.0123", "4.00", "13.4", "213", "64,124", "–", "–"
    ]  # fmt: skip


@pytest.mark.parametrize("which", STUDIES)
def test_a_study_may_lack_things(report_of, which):
    _, _, page = report_of(which)
    assert "How the numbers were made" in page.text
    if which == "all failed":
        assert "No generation succeeded" in page.text
        assert page.text.count("out of memory") == report.MAX_FAILURES_LISTED
        assert "And 10 more." in page.text


def test_a_report_replaces_the_one_before_and_leaves_no_pieces(report_of, tmp_path, request):
    shutil.copytree(report_of("everything")[0], tmp_path, dirs_exist_ok=True)
    assert (tmp_path / "plots" / "acceptance.png").exists()
    request.getfixturevalue("no_plots")  # the one above may be the first report of this process, and has plots
    written(tmp_path, **study(["greedy"]))
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "plots", "tables"}
    assert [*(tmp_path / "plots").iterdir()] == []


def test_frontier():
    assert plots.pareto([(1, 5), (2, 4), (2, 3), (3, 1), (0, 0)]) == [0, 1, 3]
    assert plots.pareto([(1, 1), (1, 1)]) == [0, 1]


@pytest.mark.parametrize("which", ["everything", "everything is strange", "all failed"])
def test_the_page_in_a_browser(report_of, browser, which):
    address = (report_of(which)[0] / "report.html").as_uri()
    context = browser.new_context(bypass_csp=True)
    page = context.new_page()
    wrong, asked = [], []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("requestfailed", lambda request: wrong.append(request.url))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(address)
    for details in page.locator("summary").all():
        details.click()
    for width, height in ((1440, 900), (390, 844)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator("figure svg:visible").count() == page.locator("figure").count()  # one of the two drawings
        if which == "everything" and width == 1440:
            hidden = (
                "[...document.querySelectorAll('.scroll')].filter((one) => one.scrollWidth > one.clientWidth).length"
            )
            assert page.evaluate(hidden) == 0
    for scheme, colour in (("light", "rgb(253, 252, 250)"), ("dark", "rgb(21, 23, 26)")):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == colour
        if AXE.is_file():
            page.evaluate(AXE.read_text(encoding="utf-8"))
            found = page.evaluate("async () => (await axe.run()).violations")
            assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == []
    context.close()
    assert wrong == []
    assert [url for url in asked if not url.startswith("data:")] == [address]
