"""Metrics of one generation, and of many together.

A new metric is a name in :func:`of_record`, or a user-defined function (:class:`CustomMetrics`).

A generation is a :data:`specbeam.study.results.Record`. Speed is the speed that a user sees. Diversity compares the
beams of a generation. Quality compares texts with references, by the field's own implementations (sacrebleu,
rouge_score).
"""

from __future__ import annotations

import copy
import logging
import math
import numbers
from collections.abc import Iterable, Sequence
from itertools import combinations, zip_longest
from statistics import fmean
from typing import Any

import numpy as np

from specbeam.errors import SpecbeamError
from specbeam.plugins import failure, named, resolve, takes
from specbeam.study.results import Record
from specbeam.study.statistics import share_interval
from specbeam.study.tables import custom_name

logger = logging.getLogger("specbeam")


def finished(records: Iterable[Record]) -> list[Record]:
    """The generations that did not fail."""
    return [record for record in records if not record["error"]]


def of_record(record: Record) -> dict[str, float | None]:
    """The metrics of one generation, which did not fail.

    Returns:
        FROM_STATS as in :class:`specbeam.results.Stats`. The metrics of :func:`pieces`. repetition, distinct_1 and
        distinct_2: of the text, as :func:`repetition` and :func:`distinct` compute them. If there are several beams,
        the metrics of :func:`diversity`. If there is a constraint, valid: the share of the texts that satisfy it. If
        there are references, the metrics of :func:`quality`. None where there is nothing to measure.
    """
    stats = record["stats"]
    metrics = {name: stats[name] for name in FROM_STATS}
    metrics |= pieces(record["times"], record["piece_tokens"])
    metrics["repetition"] = repetition(record["token_ids"])
    metrics |= {f"distinct_{n}": distinct([record["token_ids"]], n) for n in (1, 2)}
    if len(record["beams"]) > 1:
        metrics |= diversity(record["beams"])
    complete = [beam["is_complete"] for beam in record["beams"] if beam.get("is_complete") is not None]
    if complete:
        metrics["valid"] = fmean(complete)
    if record["references"]:
        metrics |= quality(record["text"], record["references"])
    return metrics


FROM_STATS = (
    "tokens_per_second",
    "time_to_first_token",
    "seconds",
    "target_passes",
    "draft_passes",
    "acceptance_rate",
    "evaluated_beams",
    "steps_per_target_pass",
    "peak_memory",
    "new_tokens",
)


def pieces(times: Sequence[float], tokens: Sequence[int]) -> dict[str, float | None]:
    """How steadily a text came, in milliseconds.

    Methods that deliver several tokens at once have longer gaps and as many tokens per second. So time is counted per
    token: the tokens of a piece share the time since the piece before. The first piece has the time to the first token.

    Args:
        times: when each piece of text came, in seconds.
        tokens: the tokens of each piece.

    Returns:
        time_per_token: the mean. time_per_token_p95: of all tokens, the 95th percentile. gap_p50 and gap_p95:
        percentiles of the times between pieces.
    """
    gaps = np.diff(times) * 1000
    of_tokens = np.repeat(gaps / tokens[1:], tokens[1:])
    return {
        "time_per_token": float(of_tokens.mean()) if len(of_tokens) else None,
        "time_per_token_p95": float(np.percentile(of_tokens, 95)) if len(of_tokens) else None,
        **{f"gap_p{share}": float(np.percentile(gaps, share)) if len(gaps) else None for share in (50, 95)},
    }


def ngrams(token_ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(token_ids[start:] for start in range(n)), strict=False))


def repetition(token_ids: Sequence[int]) -> float | None:
    """The share of 4-grams that occurred before (seq-rep-4, Welleck et al. 2020, 6.1); None without a 4-gram."""
    seen = ngrams(token_ids, 4)
    return 1 - len(set(seen)) / len(seen) if seen else None


def distinct(texts: Iterable[Sequence[int]], n: int) -> float | None:
    """The share of different n-grams in texts together (distinct-n, Li et al. 2016, 5.3); None without an n-gram.

    It falls with the number of texts, so only values of equally many texts compare.
    """
    every = [gram for token_ids in texts for gram in ngrams(token_ids, n)]
    return len(set(every)) / len(every) if every else None


def diversity(beams: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """How much the beams of one generation differ.

    Args:
        beams: two or more.

    Returns:
        beams_distinct_1 and beams_distinct_2: :func:`distinct` of all beams. self_bleu: the mean over beams of a beam's
        BLEU, 0 to 100. The other beams are its references (Zhu et al. 2018, 3.2.2). edit_distance: the mean over pairs
        of beams of the number of tokens to insert, delete or replace (Levenshtein 1966). It is divided by the length of
        the longer beam.
    """
    from rapidfuzz.distance import Levenshtein
    from sacrebleu import sentence_bleu

    texts, ids = [beam["text"] for beam in beams], [beam["token_ids"] for beam in beams]
    return {
        "beams_distinct_1": distinct(ids, 1),
        "beams_distinct_2": distinct(ids, 2),
        "self_bleu": fmean(sentence_bleu(text, texts[:i] + texts[i + 1 :]).score for i, text in enumerate(texts)),
        "edit_distance": fmean(Levenshtein.normalized_distance(a, b) for a, b in combinations(ids, 2)),
    }


def quality(text: str, references: Sequence[str]) -> dict[str, float | None]:
    """How close a text is to references.

    Returns:
        rouge1, rouge2 and rougeL: F1, 0 to 1, the best over the references, without stemming (Lin 2004). Of a text,
        rouge_score reads only the letters a to z and digits. bleu and chrf: of the sentence, 0 to 100, with
        sacrebleu's defaults (Papineni et al. 2002, Popović 2015).
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import sentence_bleu, sentence_chrf

    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"]).score_multi(references, text)
    scores: dict[str, float | None] = {name: float(score.fmeasure) for name, score in rouge.items()}
    return scores | {"bleu": sentence_bleu(text, references).score, "chrf": sentence_chrf(text, references).score}


class CustomMetrics:
    """User-defined metrics, measured on each generation that did not fail.

    Each is a function that takes a generation, a :data:`specbeam.study.results.Record`. It returns a number, True or
    False (1 or 0), or None where there is nothing to measure. They are measured anew each time a study goes on, so a
    change of their code has its effect.

    Args:
        names: ``module:name``, or names of entry points.

    Attributes:
        values: by the keys of generations, then by the names of metrics. The metric of an entry point is named
            ``specbeam.metrics:NAME``.
        failures: by the names of metrics, the keys of generations on which the metric failed, each with the reason. A
            metric fails if it raises, or returns something else. The first failure of each is a warning.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.values: dict[str, dict[str, float | None]] = {}
        self.failures: dict[str, dict[str, str]] = {}
        self._metrics: dict[str, Any] = {}
        for name in names:
            metric = resolve(name, "metric", from_here=True)
            if not callable(metric) or not takes(metric, 1):
                raise SpecbeamError(f"metric {name!r} is no function of a generation: give def NAME(record)")
            self._metrics[custom_name(name)] = metric

    def measure(self, record: Record) -> None:
        if record["error"]:
            return
        values = self.values[record["key"]] = {}
        for name, metric in self._metrics.items():
            try:
                values[name] = _checked(metric(copy.deepcopy(record)))  # what a metric changes is its own
            except Exception as error:  # the study and the other metrics go on
                why = str(error) if isinstance(error, NoNumber) else failure(error)
                if name not in self.failures:
                    logger.warning("metric %s failed on generation %s: %s", name, record["key"], why)
                self.failures.setdefault(name, {})[record["key"]] = why


class NoNumber(Exception):
    """A metric returned something else than a number or None."""


def _checked(value: Any) -> float | None:
    """What a metric returned, as a number. Raises NoNumber if it is none."""
    if value is None:
        return None
    if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(value):
        raise NoNumber(f"it returned {named(value)}; return a finite number, True or False, or None")
    return float(value)


def of_corpus(records: Iterable[Record]) -> dict[str, float]:
    """BLEU and chrF, 0 to 100, of all texts with references as one corpus; empty without such texts.

    They are not means over texts: n-grams are counted over the whole corpus (Post 2018).
    """
    from sacrebleu import corpus_bleu, corpus_chrf

    judged = [record for record in finished(records) if record["references"]]
    if not judged:
        return {}
    texts = [record["text"] for record in judged]
    # sacrebleu wants the first references of all texts, then the second ones, and None where a text has fewer.
    streams: Any = [*map(list, zip_longest(*(record["references"] for record in judged)))]
    return {"bleu": corpus_bleu(texts, streams).score, "chrf": corpus_chrf(texts, streams).score}


def acceptance_by_position(records: Iterable[Record], confidence: float = 0.95) -> list[dict[str, Any]]:
    """How many tokens were drafted, and how many accepted, at each depth below the text or the beam.

    Position 1 is directly below. "low" and "high" are the ends of Wilson's interval of accepted / drafted (1927), which
    takes draft tokens for independent.
    """
    counts = [record["stats"]["acceptance_by_position"] or [] for record in finished(records)]
    shares = []
    for position, counts_here in enumerate(zip_longest(*counts, fillvalue=(0, 0)), 1):
        drafted, accepted = (sum(some) for some in zip(*counts_here, strict=True))
        low, high = share_interval(accepted, drafted, confidence)
        shares.append({"position": position, "drafted": drafted, "accepted": accepted, "low": low, "high": high})
    return shares


def time_by_component(records: Iterable[Record]) -> dict[str, float]:
    """Seconds in passes of the target, in passes of the draft model, and in the rest, waiting included."""
    every = [record["stats"] for record in finished(records)]
    target = sum(stats["target_seconds"] for stats in every)
    draft = sum(stats["draft_seconds"] for stats in every)
    rest = sum(max(0.0, stats["seconds"] - stats["target_seconds"] - stats["draft_seconds"]) for stats in every)
    return {"target": float(target), "draft": float(draft), "rest": float(rest)}
