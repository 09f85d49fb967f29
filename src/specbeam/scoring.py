"""Log-probabilities of given continuations.

The continuations of one context form a tree: the context is evaluated once, and so is every shared prefix. Contexts
that begin alike, with the same examples for instance, share the slots of their prefix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specbeam.decoding import Hypothesis, Strategy
from specbeam.decoding.token_scores import ContinuationScores, score_continuations
from specbeam.engine import Engine, Request, Setup
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.prompts import encode

Text = tuple[list[int], list[int]]
"""The token ids of a context and of a continuation."""


def score(
    lm: LanguageModel, texts: Sequence[Text], *, max_contexts: int = 8, max_batch_tokens: int = 512
) -> Iterator[tuple[int, float, bool]]:
    """Log-probabilities of continuations given their contexts.

    Args:
        texts: contexts and continuations. A context has at least one token. Both together may have one token more than
            the model's context, because the last token is not evaluated.
        max_contexts: the most contexts that share a forward pass.
        max_batch_tokens: the most nodes per pass. Logits of more nodes are never held. Longer texts are prefilled in
            chunks.

    Yields:
        A tuple for each text, as soon as its score is known: (number, score, greedy). The number is its index in
        ``texts``. The score is the sum of the log-probabilities of the continuation's tokens (natural logarithm), 0
        without tokens. For a generated text it is ``Sequence.log_prob`` up to rounding, and not a beam's ``score``.
        Greedy is whether each token was the likeliest at its place.

    Raises:
        SpecbeamError: a text has no context, too many tokens, or a token that is not in the model's vocabulary. Also
            logits that are not finite.
    """
    # In the order of their tokens, each context shares most with the one before. The longest one is the first, so that
    # a lack of memory shows early.
    groups = deque(sorted(_shared(texts, max_batch_tokens), key=lambda numbers: texts[numbers[0]][0]))
    if not groups:
        return
    lengths = [sum(map(len, texts[numbers[0]])) for numbers in groups]
    groups.rotate(-lengths.index(max(lengths)))
    # A context that is done stays cached only as long as there is room beside the contexts of live requests.
    largest = max(len(texts[some[0]][0]) + max(1, sum(len(texts[number][1]) for number in some)) for some in groups)
    engine = Engine(
        lm,
        max_requests=max_contexts,
        max_batch_tokens=max_batch_tokens,
        max_cache_tokens=max_contexts * largest,
    )
    submissions = (_submit(engine, numbers, [texts[number] for number in numbers]) for numbers in groups)
    for (numbers, scores), request in engine.as_completed(submissions):
        request.result()
        yield from zip(numbers, scores.log_probs.tolist(), scores.greedy.tolist(), strict=True)


def _submit(
    engine: Engine, numbers: list[int], texts: list[Text]
) -> tuple[tuple[list[int], ContinuationScores], Request]:
    """Submit a request that scores the continuations of one context."""
    lm = engine.lm
    if not all(context for context, _ in texts):
        raise SpecbeamError("a text to be scored needs a context: give at least one token, such as the model's BOS")
    context, continuations = texts[0][0], [encode(lm, tokens) if tokens else [] for _, tokens in texts]
    check_length(lm, context, continuations)
    scores = ContinuationScores(np.zeros(len(texts)), np.ones(len(texts), dtype=bool))

    def strategy(setup: Setup, _: Any) -> Strategy:
        yield from score_continuations(setup.tree, continuations, scores)
        return [Hypothesis(setup.tree.tip, 0.0, "length")]

    longest = max(1, *map(len, continuations))
    options = {"max_new_tokens": longest, "eos_token_id": []}  # nothing is generated, so nothing ends a text
    return (numbers, scores), engine.submit(context, options, strategy=strategy, writes=False)


def check_length(lm: LanguageModel, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
    """Raise SpecbeamError if a context and one of its continuations are too long to be scored."""
    longest = max(1, *map(len, continuations))
    length, most = len(lm.backend.start_token_ids or context) + longest, lm.backend.context_length + 1
    if length > most:
        raise SpecbeamError(
            f"a text to be scored has {length:,} tokens, but {lm.source} can score at most {most:,}, its context and "
            "one token that follows: shorten the text"
        )


def _shared(texts: Sequence[Text], most: int) -> list[list[int]]:
    """Groups of texts, by number, that share a context and have at most ``most`` tokens below it together.

    A node's attention runs over the slots of its whole tree, also over masked ones. In larger groups, sharing a short
    context would cost more than prefilling it again.
    """
    together: list[list[int]] = []
    open_for: dict[tuple[int, ...], tuple[list[int], int]] = {}
    for number, (context, continuation) in enumerate(texts):
        numbers, size = open_for.get(key := tuple(context), ([], 0))
        if not numbers or size + len(continuation) > most:
            numbers, size = [], 0
            together.append(numbers)
        numbers.append(number)
        open_for[key] = numbers, size + len(continuation)
    return together
