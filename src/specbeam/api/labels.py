"""The probabilities of labels after a prompt: exact, over all labels, however many there are.

A label's probability is that the model's text begins with it, divided by the sum of that over all labels. Where a label
goes on as a longer one ("good", "good enough"), the longer one's part is not counted for the shorter one as well. So no
token has to end a label, and no two labels share a text.

A model may prefer a label whatever the prompt says, such as the label of the last example. Contextual calibration (Zhao
et al., "Calibrate Before Use", 2021) divides the probabilities by those after prompts without content.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.api.scoring import Text, check_length, score_by_owner
from specbeam.errors import SpecbeamError, located, shown_counts
from specbeam.models.model import LanguageModel
from specbeam.models.prompts import as_list, encode_answers

MIN_LABELS = 2
CONTENT_FREE = ("N/A", "", "[MASK]")
"""The texts without content of Zhao et al. A template that is filled with them shows which labels it favours."""
COLLAPSE_ROWS, COLLAPSE_SHARE = 50, 0.9
"""If of this many rows, or more, one label takes this share, the labels have collapsed."""


@dataclass(frozen=True)
class Question:
    """The labels after one prompt, as texts to be scored.

    Attributes:
        texts: one for each label.
        shorter: of each label, the number of the longest other one that it begins with; None if there is none.
    """

    texts: list[Text]
    shorter: list[int | None]

    def probabilities(self, log_probs: Sequence[float]) -> NDArray[np.float64]:
        """The probabilities of the labels, float64 [labels], from the log-probabilities of the texts. They sum to 1."""
        own = np.array(log_probs, dtype=np.float64)
        longer = np.zeros(len(own))  # the part of a label's probability that is that of longer ones
        for number, shorter in enumerate(self.shorter):
            if shorter is not None:
                longer[shorter] += np.exp(own[number] - own[shorter])
        own += np.log1p(-np.minimum(longer, 1 - np.finfo(np.float64).eps))  # rounding may make it exceed 1
        weights: NDArray[np.float64] = np.exp(own - own.max())
        return weights / weights.sum()


def check_labels(labels: Sequence[str]) -> None:
    """Refuse labels among which nothing can be chosen.

    Raises:
        SpecbeamError: fewer than two labels, an empty one, or one that is there twice.
    """
    if len(labels) < MIN_LABELS:
        raise SpecbeamError(f"the labels are {', '.join(labels) or 'none'}: give at least {MIN_LABELS}")
    seen = set()
    for label in labels:
        if not label.strip():
            raise SpecbeamError(f"the label {label!r} is empty: give each at least one character")
        if label in seen:
            raise SpecbeamError(f"the label {label!r} is there twice: give it once")
        seen.add(label)


def question(
    lm: LanguageModel, prompt: Any, labels: Sequence[str], *, system: str | None = None, raw: bool = False
) -> Question:
    """What has to be scored for the labels after a prompt. Arguments and errors as for :func:`probabilities`."""
    context, tokens = encode_answers(lm, prompt, labels, system=system, raw=raw)
    check_length(lm, context, tokens)
    indices: dict[tuple[int, ...], int] = {}
    for index, ids in enumerate(map(tuple, tokens)):
        if not ids:
            raise SpecbeamError(f"the label {labels[index]!r} has no tokens for {lm.source}: change it")
        if (other := indices.setdefault(ids, index)) != index:
            both = f"{labels[other]!r} and {labels[index]!r}"
            raise SpecbeamError(f"the labels {both} have the same tokens for {lm.source}: change one")
    beginnings = ([ids[:length] for length in range(len(ids) - 1, 0, -1)] for ids in indices)
    shorter = [next((indices[ids] for ids in prefixes if ids in indices), None) for prefixes in beginnings]
    return Question([(context, [*ids]) for ids in indices], shorter)


def prior(
    lm: LanguageModel,
    content_free: Iterable[Any],
    labels: Sequence[str],
    *,
    system: str | None = None,
    raw: bool = False,
    max_contexts: int = 8,
) -> NDArray[np.float64]:
    """The probabilities of the labels after prompts without content, float64 [labels]: the mean over the prompts.

    Arguments and errors as for :func:`probabilities`.
    """
    with located("content_free"):
        if not (prompts := _listed("content_free", content_free)):
            raise SpecbeamError("there are no prompts: give at least one, or leave it out")
        return _shares(lm, prompts, labels, system, raw, max_contexts).mean(axis=0)


def calibrated(shares: NDArray[np.float64], prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities of labels [..., labels] divided by those without content, so that they sum to 1 again."""
    weights = shares / np.maximum(prior, np.finfo(np.float64).tiny)
    return weights / weights.sum(axis=-1, keepdims=True)


def collapse(counts: Counter[str], remedy: str) -> str | None:
    """What to say if nearly all rows have one label; None if they do not.

    Args:
        counts: how many rows have each label.
        remedy: the option that calibrates; empty if it is given.
    """
    rows = counts.total()
    if rows < COLLAPSE_ROWS or max(counts.values()) < COLLAPSE_SHARE * rows:
        return None
    hint = f"the prompt may favour it whatever the row says: try {remedy}" if remedy else "read some of these rows"
    return f"nearly all of {rows:,} rows have one label ({shown_counts(counts)}): {hint}"


def probabilities(
    lm: LanguageModel,
    prompts: Iterable[Any],
    labels: Iterable[str],
    *,
    content_free: Iterable[Any] | None = None,
    system: str | None = None,
    raw: bool = False,
    max_contexts: int = 8,
) -> list[dict[str, float]]:
    """The probability of each label after each prompt.

    Args:
        prompts: a list of texts or lists of messages, as for :func:`specbeam.generate`.
        labels: at least two texts. After a chat template a label begins the answer. After other prompts it follows a
            space, or whatever white space the prompt ends in (docs/guides/batch.md).
        content_free: prompts without content, made like the others: the same template, filled with each text of
            :data:`CONTENT_FREE`. The probabilities are then divided by the mean probabilities after these prompts.
        system, raw: as for :func:`specbeam.generate`.
        max_contexts: the most prompts that share a forward pass.

    Returns:
        For each prompt, in order, the probabilities by label, which sum to 1. All labels are evaluated.

    Warns:
        UserWarning: of 50 prompts or more, nine in ten have the same likeliest label.

    Raises:
        SpecbeamError: labels among which nothing can be chosen, a prompt that cannot be encoded or is too long, or
            logits that are not finite.
    """
    names = _listed("labels", labels)
    check_labels(names)
    shares = _shares(lm, _listed("prompts", prompts), names, system, raw, max_contexts)
    if content_free is not None:
        how: dict[str, Any] = {"system": system, "raw": raw, "max_contexts": max_contexts}
        shares = calibrated(shares, prior(lm, content_free, names, **how))
    counts = Counter(names[best] for best in shares.argmax(axis=1).tolist())
    if found := collapse(counts, "content_free=" if content_free is None else ""):
        warnings.warn(found, stacklevel=2)
    return [dict(zip(names, some, strict=True)) for some in shares.tolist()]


def _shares(
    lm: LanguageModel, prompts: list[Any], labels: Sequence[str], system: str | None, raw: bool, max_contexts: int
) -> NDArray[np.float64]:
    """The probabilities of the labels after each prompt, float64 [prompts, labels]."""
    questions = []
    for number, prompt in enumerate(prompts):
        with located(f"prompt {number}"):
            questions.append(question(lm, prompt, labels, system=system, raw=raw))
    texts = {number: one.texts for number, one in enumerate(questions)}
    scores = dict(score_by_owner(lm, texts, max_contexts=max_contexts))
    shares = [one.probabilities(scores[number]) for number, one in enumerate(questions)]
    return np.array(shares, dtype=np.float64).reshape(-1, len(labels))


def _listed(name: str, given: Any) -> list[Any]:
    listed = as_list(given)
    if not isinstance(listed, list):
        raise SpecbeamError(f"{name} is a list, not {type(given).__name__}")
    return listed
