"""What is measured of generations: of one, and of many together.

A generation is a :data:`specbeam.study.results.Record`. Speed is as the user meets it; diversity is that of a
generation's beams; quality is against references, by the field's own implementations (sacrebleu, rouge_score).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations, zip_longest
from statistics import fmean
from typing import Any

import numpy as np

from specbeam.study.results import Record


def finished(records: Iterable[Record]) -> list[Record]:
    """The generations that did not fail."""
    return [record for record in records if not record["error"]]


def of_record(record: Record) -> dict[str, float | None]:
    """The metrics of one generation, which did not fail.

    Returns:
        tokens_per_second, time_to_first_token, seconds, target_passes, draft_passes, acceptance_rate,
        steps_per_target_pass, peak_memory and new_tokens as in :class:`specbeam.results.Stats`; gap_p50 and gap_p95,
        milliseconds between pieces of streamed text; what :func:`repetition` and :func:`diversity` tell; and, if there
        are references, what :func:`quality` tells. None where there is nothing to measure.
    """
    stats = record["stats"]
    metrics = {name: stats[name] for name in FROM_STATS}
    gaps = np.diff(record["times"]) * 1000
    for percentile in (50, 95):
        metrics[f"gap_p{percentile}"] = float(np.percentile(gaps, percentile)) if len(gaps) else None
    metrics["repetition"] = repetition(record["token_ids"])
    metrics |= diversity(record["beams"])
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
    "steps_per_target_pass",
    "peak_memory",
    "new_tokens",
)


def ngrams(token_ids: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(token_ids[start:] for start in range(n)), strict=False))


def repetition(token_ids: Sequence[int]) -> float | None:
    """The share of 4-grams that the text had before (seq-rep-4 of Welleck et al. 2020, 6.1); None without any."""
    seen = ngrams(token_ids, 4)
    return 1 - len(set(seen)) / len(seen) if seen else None


def diversity(beams: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """How much the beams of one generation differ.

    Returns:
        distinct_1 and distinct_2: different tokens, and pairs of them, among all those of the beams (Li et al. 2016,
        5.3); self_bleu: BLEU, 0 to 100, of a beam with the others as references, its mean over the beams (Zhu et al.
        2018, 3.2.2); edit_distance: of two beams, the tokens to be inserted, deleted or replaced, by the longer one's
        length, its mean over all pairs (Levenshtein 1966). The last two are None for a single beam.
    """
    told: dict[str, float | None] = {}
    for n in (1, 2):
        every = [gram for beam in beams for gram in ngrams(beam["token_ids"], n)]
        told[f"distinct_{n}"] = len(set(every)) / len(every) if every else None
    texts, ids = [beam["text"] for beam in beams], [beam["token_ids"] for beam in beams]
    told["self_bleu"] = _self_bleu(texts) if len(texts) > 1 else None
    told["edit_distance"] = _edit_distance(ids) if len(ids) > 1 else None
    return told


def _self_bleu(texts: list[str]) -> float:
    from sacrebleu import sentence_bleu

    return fmean(sentence_bleu(text, texts[:i] + texts[i + 1 :]).score for i, text in enumerate(texts))


def _edit_distance(beams: list[list[int]]) -> float:
    from rapidfuzz.distance import Levenshtein

    return fmean(Levenshtein.normalized_distance(a, b) for a, b in combinations(beams, 2))


def quality(text: str, references: Sequence[str]) -> dict[str, float | None]:
    """How near a text is to references.

    Returns:
        rouge1, rouge2 and rougeL: F1, 0 to 1, with the reference where it is best, without stemming (Lin 2004;
        rouge_score sees only the letters a to z and digits); bleu and chrf of a sentence, 0 to 100, with sacrebleu's
        defaults (Papineni et al. 2002, Popović 2015).
    """
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu import sentence_bleu, sentence_chrf

    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"]).score_multi(references, text)
    scores: dict[str, float | None] = {name: float(score.fmeasure) for name, score in rouge.items()}
    return scores | {"bleu": sentence_bleu(text, references).score, "chrf": sentence_chrf(text, references).score}


def of_corpus(records: Iterable[Record]) -> dict[str, float]:
    """BLEU and chrF, 0 to 100, of all texts that have references as one corpus; empty if none has.

    They are no means over texts: n-grams are counted over the whole corpus (Post 2018).
    """
    from sacrebleu import corpus_bleu, corpus_chrf

    judged = [record for record in finished(records) if record["references"]]
    if not judged:
        return {}
    texts = [record["text"] for record in judged]
    # sacrebleu wants the first references of all texts, then the second ones, and None where a text has fewer.
    streams: Any = [*map(list, zip_longest(*(record["references"] for record in judged)))]
    return {"bleu": corpus_bleu(texts, streams).score, "chrf": corpus_chrf(texts, streams).score}


def acceptance_by_position(records: Iterable[Record]) -> list[dict[str, int]]:
    """Of the guesses at each depth below the text, or beam, how many were drafted and how many accepted.

    Position 1 is directly below. Guesses below those of an earlier round are left out: a trace does not tell how deep
    they are.
    """
    drafted: dict[int, int] = defaultdict(int)
    accepted: dict[int, int] = defaultdict(int)
    for record in finished(records):
        for told in record["trace"] or []:
            depths: list[int | None] = []  # of the round's guesses; a guess comes after the one it is below
            for guess in told["drafted"]:
                above = 0 if guess["beam"] is not None else None
                if guess["parent"] is not None:
                    above = depths[guess["parent"]]
                depth = None if above is None else above + 1
                depths.append(depth)
                if depth is not None:
                    drafted[depth] += 1
                    accepted[depth] += guess["accepted"]
    return [{"position": depth, "drafted": drafted[depth], "accepted": accepted[depth]} for depth in sorted(drafted)]


def time_by_component(records: Iterable[Record]) -> dict[str, float]:
    """Seconds in passes of the target, in passes of the draft model, and in the rest, waiting included."""
    every = [record["stats"] for record in finished(records)]
    target = sum(stats["target_seconds"] for stats in every)
    draft = sum(stats["draft_seconds"] for stats in every)
    rest = sum(max(0.0, stats["seconds"] - stats["target_seconds"] - stats["draft_seconds"]) for stats in every)
    return {"target": float(target), "draft": float(draft), "rest": float(rest)}
