"""What a run says of its methods, and what two runs say of a change between them.

Rows are what is compared: a turn of a row of the data is measured by all methods. Its repeats are averaged before, or
they would count as if they were as different as rows are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.study.execution import pass_at_k
from specbeam.study.metrics import acceptance_by_position, finished, of_corpus, of_record, time_by_component
from specbeam.study.results import Record
from specbeam.study.statistics import Comparison, bootstrap_mean, holm, paired_ratio

Unit = tuple[str, int]
"""A row of the data and a turn of it."""
BY_CATEGORY = ("tokens_per_second", "steps_per_target_pass", "new_tokens")
LEVEL = 0.05
SMALLEST_EFFECT = 0.03
"""A change of speed that is no larger is not worth reporting: the next build of a kernel may move it as much."""


def summarize(
    records: Iterable[Record],
    scores: Mapping[str, Mapping[str, Any]],
    *,
    baseline: str | None = None,
    twins: Mapping[str, str] = {},
    confidence: float = 0.95,
) -> dict[str, Any]:
    """The methods of a run, in the order in which they first come, as plain data.

    Args:
        scores: what was found out about texts, by the keys of their generations: "perplexity" by the names of the
            models that judged ("target" is the one that generated), and whether a program "passed".
        baseline: the method that the others' speed is compared with.
        twins: for a method, the one whose tokens it should give, and so is counted how often it does.

    Returns:
        "methods", "categories", "acceptance_by_position" and "time" (seconds by component), the last two by method.
        A failed generation is counted, and left out of all else.
    """
    by_method = _by_method(records)
    told: dict[str, Any] = {"methods": [], "categories": {}, "acceptance_by_position": {}, "time": {}}
    speeds = {method: _speeds(some) for method, some in by_method.items()}
    for method, some in by_method.items():
        good = finished(some)
        measured = [(record, of_record(record) | _perplexities(scores.get(record["key"], {}))) for record in good]
        by_unit = _averaged(measured)
        against = None
        if baseline is not None and baseline in speeds and method != baseline:
            found = _faster(speeds[method], speeds[baseline], confidence)
            against = found and {"baseline": baseline, "tokens_per_second": asdict(found)}
        told["methods"].append(
            {
                "method": method,
                "mode": some[0]["mode"],
                "generations": len(some),
                "failed": len(some) - len(good),
                "metrics": {
                    name: asdict(mean)
                    for name, values in by_unit.items()
                    if (mean := bootstrap_mean([*values.values()], confidence))
                },
                "corpus": of_corpus(good),
                "pass_at_1": _pass_at_1(good, scores),
                "agreement": _agreement(good, by_method.get(twins.get(method, ""), []), twins.get(method)),
                "against": against,
            }
        )
        for category, by_name in _by_category(good, by_unit).items():
            told["categories"].setdefault(category, {})[method] = by_name
        told["acceptance_by_position"][method] = acceptance_by_position(good)
        told["time"][method] = time_by_component(good)
    return told


def diff(a_records: Iterable[Record], b_records: Iterable[Record], *, confidence: float = 0.95) -> dict[str, Any]:
    """How the speed of the methods of run A differs in run B.

    A machine that was slower while one run was going on was slower for all methods. So what counts is "relative": a
    method's ratio, on each row, by that of most methods (which did not change, if this is to tell anything). Where
    fewer than three methods are in both runs there is no telling the two apart, and "relative" is "raw".

    Returns:
        "methods": of each that is in both runs, the ratios B / A of tokens_per_second over the rows that both have,
        "raw" and "relative" (None without rows); "p", the relative one's, adjusted for the number of methods;
        "significant", if p is below 0.05, the interval excludes 1 and the effect is over 3 %; and how many texts of
        those in both runs are "identical". "only_in_a", "only_in_b": other methods. "note": what to bear in mind.
    """
    a, b = _by_method(a_records), _by_method(b_records)
    common = [method for method in a if method in b]
    before = [_speeds(a[method]) for method in common]
    after = [_speeds(b[method]) for method in common]
    units = sorted(set().union(*before) & set().union(*after))
    ratios = np.log(_table(after, units)) - np.log(_table(before, units))
    note = None
    if len(common) < 3:
        note = f"{len(common)} methods in both runs: a change of the machine cannot be told from one of a method"
    methods: list[dict[str, Any]] = []
    relatives: list[Comparison | None] = []
    for i, method in enumerate(common):
        raw = relative = _ratio(ratios[i], confidence)
        if len(common) >= 3:
            relative = _ratio(ratios[i] - _drift(ratios, i), confidence)
        relatives.append(relative)
        same, of = _identical(finished(a[method]), finished(b[method]))
        methods.append(
            {
                "method": method,
                "raw": raw and asdict(raw),
                "relative": relative and asdict(relative),
                "identical": {"same": same, "of": of, "share": same / of if of else None},
            }
        )
    adjusted = holm([1.0 if relative is None else relative.p for relative in relatives])
    for told, relative, p in zip(methods, relatives, adjusted, strict=True):
        told["p"] = p
        told["significant"] = relative is not None and _significant(relative, p)
    return {
        "methods": methods,
        "only_in_a": [method for method in a if method not in b],
        "only_in_b": [method for method in b if method not in a],
        "note": note,
    }


def _significant(relative: Comparison, p: float) -> bool:
    outside = relative.low > 1 or relative.high < 1
    return p < LEVEL and outside and abs(relative.ratio - 1) > SMALLEST_EFFECT


def _ratio(logs: NDArray[np.float64], confidence: float) -> Comparison | None:
    """The ratio whose logarithms, on some rows, are these; NaN where it is not known."""
    ratios = np.exp(logs[np.isfinite(logs)])
    return paired_ratio(ratios.tolist(), [1.0] * len(ratios), confidence)


def _drift(logs: NDArray[np.float64], i: int) -> NDArray[np.float64]:
    """By how much the machine changed on each row, as far as method i can tell: logarithms [methods, rows] to [rows].

    It is the median over the methods of their means, plus, row by row, the median over the others of how far each is
    from its own mean. Plainly the median over the others, row by row, would be drawn by the one method that did change:
    of those that are left, it leaves one more on one side than on the other.
    """
    known = np.ma.masked_invalid(logs)
    own = known.mean(axis=1, keepdims=True)
    others = np.ma.median((known - own)[np.arange(len(logs)) != i], axis=0)  # type: ignore[no-untyped-call]
    drift = np.ma.median(own) + others  # type: ignore[no-untyped-call]
    return np.asarray(np.ma.filled(drift, np.nan), dtype=np.float64)


def _table(speeds: Sequence[Mapping[Unit, float]], units: Sequence[Unit]) -> NDArray[np.float64]:
    """Speeds [methods, units]; NaN where there is none."""
    rows = [[some.get(unit, np.nan) for unit in units] for some in speeds]
    return np.array(rows, dtype=np.float64).reshape(len(speeds), len(units))


def _by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    by_method: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_method[record["method"]].append(record)
    return by_method


def _unit(record: Record) -> Unit:
    return record["row"], record["turn"]


def _averaged(measured: Iterable[tuple[Record, Mapping[str, float | None]]]) -> dict[str, dict[Unit, float]]:
    """The metrics, by name, of each row and turn: means over its repeats."""
    every: dict[str, dict[Unit, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record, metrics in measured:
        for name, value in metrics.items():
            if value is not None:
                every[name][_unit(record)].append(value)
    return {name: {unit: fmean(some) for unit, some in by_unit.items()} for name, by_unit in every.items()}


def _speeds(records: Iterable[Record]) -> dict[Unit, float]:
    """Tokens a second of each row and turn; without those that gave no token."""
    told = [(record, {"speed": record["stats"]["tokens_per_second"]}) for record in finished(records)]
    return {unit: speed for unit, speed in _averaged(told).get("speed", {}).items() if speed > 0}


def _faster(speeds: Mapping[Unit, float], others: Mapping[Unit, float], confidence: float) -> Comparison | None:
    both = [unit for unit in speeds if unit in others]
    return paired_ratio([speeds[unit] for unit in both], [others[unit] for unit in both], confidence)


def _perplexities(score: Mapping[str, Any]) -> dict[str, float | None]:
    by_model = score.get("perplexity") or {}
    return {"perplexity" if name == "target" else f"perplexity {name}": value for name, value in by_model.items()}


def _pass_at_1(records: Iterable[Record], scores: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The mean over rows; None if no program was run."""
    passed: dict[Unit, list[bool]] = defaultdict(list)
    for record in records:
        if (one := scores.get(record["key"], {}).get("passed")) is not None:
            passed[_unit(record)].append(one)
    return fmean(pass_at_k(len(some), sum(some), 1) for some in passed.values()) if passed else None


def _agreement(records: list[Record], twins: list[Record], twin: str | None) -> dict[str, Any] | None:
    if twin is None:
        return None
    same, of = _identical(records, finished(twins))
    return {"twin": twin, "same": same, "of": of}


def _identical(some: Iterable[Record], others: Iterable[Record]) -> tuple[int, int]:
    """How many have the same tokens, in all beams, as the other of their row, turn and repeat; and of how many."""
    there = {(*_unit(record), record["repeat"]): _tokens(record) for record in others}
    pairs = [
        _tokens(record) == there[place] for record in some if (place := (*_unit(record), record["repeat"])) in there
    ]
    return sum(pairs), len(pairs)


def _tokens(record: Record) -> list[list[int]]:
    return [record["token_ids"], *(beam["token_ids"] for beam in record["beams"])]


def _by_category(records: Iterable[Record], by_unit: Mapping[str, Mapping[Unit, float]]) -> dict[str, dict[str, Any]]:
    """Means over the rows and turns of each category; None where nothing was measured."""
    units: dict[str, set[Unit]] = defaultdict(set)
    for record in records:
        if record["category"] is not None:
            units[record["category"]].add(_unit(record))
    told: dict[str, dict[str, Any]] = {}
    for category, members in units.items():
        told[category] = {"n": len(members)}
        for name in BY_CATEGORY:
            values = [value for unit, value in by_unit.get(name, {}).items() if unit in members]
            told[category][name] = fmean(values) if values else None
    return told
