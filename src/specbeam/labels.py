"""The probabilities of labels after a prompt: exact, over all labels, however many there are.

A label's probability is that the model's text begins with it, divided by the sum of that over all labels. Where a label
goes on as a longer one ("good", "good enough"), the longer one's part is not counted for the shorter one as well. So no
token has to end a label, and no two labels share a text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.prompts import encode_answers
from specbeam.scoring import Text, check_length, score_by_owner

MIN_LABELS = 2


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
    numbers: dict[tuple[int, ...], int] = {}
    for number, ids in enumerate(map(tuple, tokens)):
        if not ids:
            raise SpecbeamError(f"the label {labels[number]!r} has no tokens for {lm.source}: change it")
        if (other := numbers.setdefault(ids, number)) != number:
            both = f"{labels[other]!r} and {labels[number]!r}"
            raise SpecbeamError(f"the labels {both} have the same tokens for {lm.source}: change one")
    beginnings = ([ids[:length] for length in range(len(ids) - 1, 0, -1)] for ids in numbers)
    shorter = [next((numbers[ids] for ids in some if ids in numbers), None) for some in beginnings]
    return Question([(context, [*ids]) for ids in numbers], shorter)


def probabilities(
    lm: LanguageModel,
    prompts: Sequence[Any],
    labels: Sequence[str],
    *,
    system: str | None = None,
    raw: bool = False,
    max_contexts: int = 8,
) -> list[dict[str, float]]:
    """The probability of each label after each prompt.

    Args:
        prompts: texts or lists of messages, as for :func:`specbeam.generate`.
        labels: at least two texts. After a chat template a label begins the answer. After other prompts it follows a
            space, or whatever white space the prompt ends in (docs/guides/batch.md).
        system, raw: as for :func:`specbeam.generate`.
        max_contexts: the most prompts that share a forward pass.

    Returns:
        For each prompt, in order, the probabilities by label, which sum to 1. All labels are evaluated.

    Raises:
        SpecbeamError: labels among which nothing can be chosen, a prompt that cannot be encoded or is too long, or
            logits that are not finite.
    """
    check_labels(labels)
    questions = [question(lm, prompt, labels, system=system, raw=raw) for prompt in prompts]
    texts = {number: one.texts for number, one in enumerate(questions)}
    scores = dict(score_by_owner(lm, texts, max_contexts=max_contexts))
    shares = [one.probabilities(scores[number]).tolist() for number, one in enumerate(questions)]
    return [dict(zip(labels, some, strict=True)) for some in shares]
