"""The figures of a run's methods, and the change of methods between two runs.

Methods are compared on units: a unit is one turn of one row of the data. The repeats of a unit are averaged first:
they differ less than units do, and would make intervals too narrow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.study.metrics import acceptance_by_position, finished, of_corpus, of_record, time_by_component
from specbeam.study.results import Record
from specbeam.study.statistics import Comparison, bootstrap_mean, holm, paired_ratio

Unit = tuple[str, int]
"""The id of a row, and one of its turns."""
CATEGORY_METRICS = ("tokens_per_second", "steps_per_target_pass", "new_tokens")
SIGNIFICANCE_LEVEL = 0.05
MIN_EFFECT_SHARE = 0.03
"""A smaller change of speed is not reported: another build of the same kernel may change it as much."""


def summarize(
    records: Iterable[Record],
    scores: Mapping[str, Mapping[str, Any]],
    *,
    baseline: str | None = None,
    twins: Mapping[str, str] = {},
    confidence: float = 0.95,
    failed_metrics: Mapping[str, Mapping[str, str]] = {},
) -> dict[str, Any]:
    """The methods of a run, in the order in which they first come, as plain data.

    Args:
        scores: measured on texts after their generation, by the keys of generations: "perplexity" by model ("target"
            is the model that generated), and whether a program "passed".
        baseline: the method that the others' speed is compared with.
        twins: for a method, the method whose tokens it must return. The summary counts how often it does.
        failed_metrics: as :attr:`specbeam.study.metrics.CustomMetrics.failures`, kept as it is.

    Returns:
        "methods", "categories", "acceptance_by_position" by method, and "time" (seconds by component) by method.
        "confidence": of the intervals. "failed_metrics": as given. "fastest": as :func:`_fastest` returns it. Failed
        generations are counted, and left out of all other figures.
    """
    by_method = _by_method(records)
    speeds = {method: _speeds(some) for method, some in by_method.items()}
    summary: dict[str, Any] = {
        "confidence": confidence,
        "failed_metrics": failed_metrics,
        "methods": [],
        "fastest": _fastest(speeds, confidence),
        "categories": {},
        "acceptance_by_position": {},
        "time": {},
    }
    for method, some in by_method.items():
        good = finished(some)
        by_unit = _averaged(
            (record, of_record(record) | _perplexities(scores.get(record["key"], {})) | record.get("own", {}))
            for record in good
        )
        base = speeds.get(baseline) if baseline is not None and baseline != method else None
        faster = None if base is None else _faster(speeds[method], base, confidence)
        summary["methods"].append(
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
                "agreement": _agreement(good, twins.get(method), by_method),
                "against": faster and {"baseline": baseline, "tokens_per_second": asdict(faster)},
            }
        )
        for category, units in _categories(good).items():
            figures: dict[str, Any] = {"n": len(units)}
            for name in CATEGORY_METRICS:
                values = [value for unit, value in by_unit.get(name, {}).items() if unit in units]
                figures[name] = fmean(values) if values else None
            if base is not None:
                here = {unit: speed for unit, speed in speeds[method].items() if unit in units}
                faster = _faster(here, base, confidence)
                figures["against"] = faster and asdict(faster)
            summary["categories"].setdefault(category, {})[method] = figures
        summary["acceptance_by_position"][method] = acceptance_by_position(good, confidence)
        summary["time"][method] = time_by_component(good)
    return summary


def _fastest(speeds: Mapping[str, Mapping[Unit, float]], confidence: float) -> dict[str, Any] | None:
    """The method with the highest mean speed, and whether the measurements settle that it is the fastest.

    They do if it is faster than each other method, each by its own interval. Then the confidence holds for the whole
    statement (the intersection-union test, Berger 1982), and no correction for the number of methods is needed.

    Returns:
        "method", and "rivals": the other methods by their ratio's :class:`Comparison` (the fastest method's speed over
        theirs), None where they have no unit in common. "unsettled": the names of the rivals that may be as fast. None
        without speeds.
    """
    means = {method: fmean(some.values()) for method, some in speeds.items() if some}
    if not means:
        return None
    best = max(means, key=means.__getitem__)
    rivals = {method: _faster(speeds[best], speeds[method], confidence) for method in means if method != best}
    unsettled = [m for m, ratio in rivals.items() if ratio is None or not ratio.settled or ratio.ratio < 1]
    return {
        "method": best,
        "rivals": {method: ratio and asdict(ratio) for method, ratio in rivals.items()},
        "unsettled": unsettled,
    }


def diff(a_records: Iterable[Record], b_records: Iterable[Record]) -> dict[str, Any]:
    """How the speed of methods differs between run A and run B.

    A machine that is slower during one run is slower for all methods. The "relative" ratio removes this: on each unit,
    it divides a method's ratio by the typical ratio of the methods. Most methods must not have changed. With fewer
    than three methods in both runs this cannot be done, and "relative" is "raw".

    Returns:
        "methods": for each method in both runs, these values. "raw" and "relative": the ratios B / A of
        tokens_per_second over common units (None without common units). "p": of the relative ratio, adjusted for the
        number of methods. "significant": whether p is below 0.05, the interval excludes 1 and the effect is over 3 %.
        "identical": how many of the common texts are equal.
        "only_in_a", "only_in_b": the other methods. "note": a caveat, or None.
    """
    a, b = _by_method(a_records), _by_method(b_records)
    common = [method for method in a if method in b]
    before = [_speeds(a[method]) for method in common]
    after = [_speeds(b[method]) for method in common]
    units = sorted(set().union(*before) & set().union(*after))
    ratios = np.log(_table(after, units)) - np.log(_table(before, units))
    raws = relatives = [_ratio(logs) for logs in ratios]
    note = None
    if len(common) < 3:
        note = f"{len(common)} methods in both runs: a change of the machine looks like one of a method"
    else:
        relatives = [_ratio(ratios[i] - _drift(ratios, i)) for i in range(len(common))]
    adjusted = holm([1.0 if relative is None else relative.p for relative in relatives])
    methods = []
    for method, raw, relative, p in zip(common, raws, relatives, adjusted, strict=True):
        same, of = _identical(finished(a[method]), finished(b[method]))
        methods.append(
            {
                "method": method,
                "raw": raw and asdict(raw),
                "relative": relative and asdict(relative),
                "identical": {"same": same, "of": of, "share": same / of if of else None},
                "p": p,
                "significant": relative is not None and _significant(relative, p),
            }
        )
    return {
        "methods": methods,
        "only_in_a": [method for method in a if method not in b],
        "only_in_b": [method for method in b if method not in a],
        "note": note,
    }


def _significant(relative: Comparison, p: float) -> bool:
    return p < SIGNIFICANCE_LEVEL and relative.settled and abs(relative.ratio - 1) > MIN_EFFECT_SHARE


def _ratio(logs: NDArray[np.float64]) -> Comparison | None:
    """The ratio with these logarithms, one per unit; NaN where it is not known."""
    ratios = np.exp(logs[np.isfinite(logs)])
    return paired_ratio(ratios.tolist(), [1.0] * len(ratios))


def _drift(logs: NDArray[np.float64], i: int) -> NDArray[np.float64]:
    """The change of the machine's speed on each unit, as method i must be corrected for it.

    It is the median of all methods' means, plus, on each unit, the median over the other methods of the distance from
    their own means. The plain median over the other methods would be biased by a method that did change. Without method
    i, more methods lie on one side of the median than on the other.

    Args:
        logs: logarithms of speed ratios [methods, units].

    Returns:
        Logarithms [units].
    """
    known = np.ma.masked_invalid(logs)
    means = known.mean(axis=1, keepdims=True)
    others = np.ma.median((known - means)[np.arange(len(logs)) != i], axis=0)  # type: ignore[no-untyped-call]
    drift = np.ma.median(means) + others  # type: ignore[no-untyped-call]
    return np.asarray(np.ma.filled(drift, np.nan), dtype=np.float64)


def _table(speeds: Sequence[Mapping[Unit, float]], units: Sequence[Unit]) -> NDArray[np.float64]:
    """Speeds [methods, units]; NaN where a method has no speed on a unit."""
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
    """The metrics by name, then by unit: means over the repeats."""
    every: dict[str, dict[Unit, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record, metrics in measured:
        for name, value in metrics.items():
            if value is not None:
                every[name][_unit(record)].append(value)
    return {name: {unit: fmean(some) for unit, some in by_unit.items()} for name, by_unit in every.items()}


def _speeds(records: Iterable[Record]) -> dict[Unit, float]:
    """Tokens per second by unit, without units that gave no token."""
    measured = [(record, {"speed": record["stats"]["tokens_per_second"]}) for record in finished(records)]
    return {unit: speed for unit, speed in _averaged(measured).get("speed", {}).items() if speed > 0}


def _faster(speeds: Mapping[Unit, float], others: Mapping[Unit, float], confidence: float) -> Comparison | None:
    both = [unit for unit in speeds if unit in others]
    return paired_ratio([speeds[unit] for unit in both], [others[unit] for unit in both], confidence)


def _perplexities(score: Mapping[str, Any]) -> dict[str, float | None]:
    by_model = score.get("perplexity") or {}
    return {"perplexity" if name == "target" else f"perplexity {name}": value for name, value in by_model.items()}


def _pass_at_1(records: Iterable[Record], scores: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The mean over rows of the share of samples that pass (Chen et al. 2021, 2.1); None if no program was run."""
    passed: dict[Unit, list[bool]] = defaultdict(list)
    for record in records:
        if (score := scores.get(record["key"], {}).get("passed")) is not None:
            passed[_unit(record)].append(score)
    return fmean(map(fmean, passed.values())) if passed else None


def _agreement(records: list[Record], twin: str | None, by_method: Mapping[str, list[Record]]) -> dict[str, Any] | None:
    if twin is None:
        return None
    same, of = _identical(records, finished(by_method.get(twin, [])))
    return {"twin": twin, "same": same, "of": of}


def _identical(some: Iterable[Record], others: Iterable[Record]) -> tuple[int, int]:
    """How many have the same tokens, in all beams, as the other of their row, turn and repeat; and of how many."""
    others_by_key = {(*_unit(record), record["repeat"]): _tokens(record) for record in others}
    pairs = [
        _tokens(record) == others_by_key[key]
        for record in some
        if (key := (*_unit(record), record["repeat"])) in others_by_key
    ]
    return sum(pairs), len(pairs)


def _tokens(record: Record) -> list[list[int]]:
    return [record["token_ids"], *(beam["token_ids"] for beam in record["beams"])]


def _categories(records: Iterable[Record]) -> dict[str, set[Unit]]:
    """The rows and turns of each category."""
    units: dict[str, set[Unit]] = defaultdict(set)
    for record in records:
        if record["category"] is not None:
            units[record["category"]].add(_unit(record))
    return units
