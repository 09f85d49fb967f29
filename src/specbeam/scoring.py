"""Log-probabilities of given continuations.

The continuations of one context form a tree: the context is evaluated once, and so is every shared beginning. Contexts
that begin alike, with the same examples for instance, share the slots of that beginning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Segment
from specbeam.cache.pool import EngineCache
from specbeam.cache.slots import Slots
from specbeam.errors import NotFinite, SpecbeamError
from specbeam.model import LanguageModel
from specbeam.prompts import encode
from specbeam.selection import Answer, Wish
from specbeam.tree import Nodes, Tree
from specbeam.whole_steps import whole_step

Text = tuple[list[int], list[int]]
"""The token ids of a context and of a continuation."""


def score(
    lm: LanguageModel, texts: Sequence[Text], *, max_contexts: int = 8, max_batch_tokens: int = 512
) -> Iterator[tuple[int, float, bool]]:
    """Log-probabilities of continuations given their contexts.

    Args:
        texts: contexts and continuations. A context has at least one token. Both together may have one token more than
            the model's context, because the last token is not evaluated.
        max_contexts: the most contexts that share a pass.
        max_batch_tokens: the most nodes per pass. Logits of more nodes are never held. Longer texts are read in chunks.

    Yields:
        A tuple for each text, as soon as its score is known: (number, score, greedy). The number is its index in
        ``texts``. The score is the sum of the log-probabilities of the continuation's tokens (natural logarithm), 0
        without tokens. For a generated text it is ``Sequence.log_prob`` up to rounding, and not a beam's ``score``.
        Greedy is whether each token was the likeliest at its place.

    Raises:
        SpecbeamError: a text has no context, or a token that is not in the model's vocabulary. Also logits that are
            not finite.
    """
    # In the order of their tokens, each context shares most with the one before. The longest one is the first, so that
    # a lack of memory shows early.
    waiting = deque(sorted(_shared(texts, max_batch_tokens), key=lambda numbers: texts[numbers[0]][0]))
    lengths = [sum(map(len, texts[numbers[0]])) for numbers in waiting]
    waiting.rotate(-lengths.index(max(lengths)) if lengths else 0)
    live: list[Continuations] = []
    cache = EngineCache(lm.backend)
    while waiting or live:
        for tree in _round(lm, texts, waiting, live, cache, max_contexts, max_batch_tokens):
            yield from zip(tree.numbers, tree.log_probs.tolist(), tree.greedy.tolist(), strict=True)


@whole_step
def _round(
    lm: LanguageModel,
    texts: Sequence[Text],
    waiting: deque[list[int]],
    live: list[Continuations],
    cache: EngineCache,
    max_contexts: int,
    max_batch_tokens: int,
) -> list[Continuations]:
    """Begin waiting trees, run one pass, and return the trees that are finished."""
    while waiting and len(live) < max_contexts:
        numbers = waiting.popleft()
        live.append(Continuations(lm, numbers, [texts[number] for number in numbers], cache))
    batch: list[tuple[Continuations, Nodes]] = []
    room = max_batch_tokens
    for place, tree in enumerate(live):
        if not tree.await_prefix(live[:place]) and len(nodes := tree.pending[:room]):
            batch.append((tree, nodes))
            room -= len(nodes)
    if batch:
        segments = [tree.segment(nodes) for tree, nodes in batch]
        logits = lm.backend.forward(segments)
        ends = np.cumsum([len(segment.wanted) for segment in segments]).tolist()
        rows = [slice(end - len(segment.wanted), end) for end, segment in zip(ends, segments, strict=True)]
        wishes = [(part, tree.wish(nodes)) for part, (tree, nodes) in zip(rows, batch, strict=True)]
        answers = lm.backend.choose(logits, wishes)
        if not all(answer.finite for answer in answers):
            raise NotFinite(
                f"a text has no score, because logits of {lm.source} are not finite: check its weights, or give "
                "dtype='float32' if numbers overflow"
            )
        for (tree, nodes), answer in zip(batch, answers, strict=True):
            tree.receive(nodes, answer)
    finished = [tree for tree in live if not len(tree.pending)]
    live[:] = [tree for tree in live if len(tree.pending)]
    for tree in finished:
        tree.close()
    if finished:  # the next context may begin as the last one does
        cache.evict(cache.kept - max(tree.context_length for tree in finished))
    return finished


def _shared(texts: Sequence[Text], most: int) -> list[list[int]]:
    """Groups of texts, by number, that share a context and have at most ``most`` tokens below it together.

    A node's attention runs over the slots of its whole tree, also over masked ones. In larger groups, sharing a short
    context would cost more than reading it again.
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


class Continuations:
    """The tree of a context and some of its continuations, and the scores so far.

    Attributes:
        numbers: the texts' numbers.
        context_length: the number of the context's tokens.
        pending: nodes still to be evaluated, ancestors first.
        log_probs: sums over the tokens evaluated so far, float64 [texts].
        greedy: whether all these tokens were the likeliest, bool [texts].
    """

    def __init__(self, lm: LanguageModel, numbers: list[int], texts: list[Text], cache: EngineCache) -> None:
        self.numbers = numbers
        self.context_length = len(texts[0][0])
        self.log_probs = np.zeros(len(texts))
        self.greedy = np.ones(len(texts), dtype=bool)
        if not all(context for context, _ in texts):
            raise SpecbeamError("a text to be scored needs a context: give at least one token, such as the model's BOS")
        wholes = [encode(lm, context + continuation) for context, continuation in texts]
        trunk = wholes[0] if len(wholes) == 1 else texts[0][0]
        tree = Tree(trunk)
        # For each token to be scored: the node that it follows, its id, and the number of its text.
        scored: list[tuple[int, int, int]] = []
        for text, ((context, _), whole) in enumerate(zip(texts, wholes, strict=True)):
            node = len(context) - 1
            for depth in range(len(context), len(whole)):
                scored.append((node, whole[depth], text))
                if depth < len(trunk):
                    node = depth
                elif depth + 1 < len(whole):
                    (node,) = tree.guess(node, whole[depth]).tolist()
        self._after, self._tokens, self._texts = np.array(sorted(scored), dtype=np.int64).reshape(-1, 3).T
        self._slots = Slots(tree, lm.backend, cache, shares=True)
        self.pending = self._slots.prepare(self._after) if scored else self._after

    def await_prefix(self, others: Sequence[Continuations]) -> bool:
        """Wait for another tree that is about to read the same tokens. Returns whether to wait.

        Args:
            others: trees that began before this one.
        """
        if self._slots.is_fresh:
            if self._slots.await_prefix(other._slots for other in others):
                return True
            self.pending = self._slots.prepare(self._after)
        return False

    def segment(self, nodes: Nodes) -> Segment:
        """The tree's part of a pass over some of its pending nodes."""
        return self._slots.segment(nodes, wanted=np.flatnonzero(np.isin(nodes, self._after)))

    def wish(self, nodes: Nodes) -> Wish:
        """The log-probabilities of the tokens to be scored after some pending nodes, and the likeliest tokens there."""
        tokens, _, rows, columns = self._scored(nodes)
        given = np.zeros((rows.max(initial=-1) + 1, columns.max(initial=-1) + 1), dtype=np.int64)
        given[rows, columns] = tokens
        return Wish(most=1, given=given)

    def receive(self, nodes: Nodes, answer: Answer) -> None:
        """Take the answer about some pending nodes."""
        tokens, texts, rows, columns = self._scored(nodes)
        self.pending = self.pending[len(nodes) :]
        self._slots.evaluated(self.pending)
        if len(tokens):
            assert answer.given is not None
            np.add.at(self.log_probs, texts, answer.given[rows, columns].astype(np.float64))
            np.logical_and.at(self.greedy, texts, answer.tokens[rows, 0] == tokens)

    def close(self) -> None:
        """Give back all slots."""
        self._slots.close()

    def _scored(self, nodes: Nodes) -> tuple[NDArray[np.int64], ...]:
        """The tokens to be scored after some pending nodes, their texts, and their rows and columns in the wish."""
        start, stop = np.searchsorted(self._after, [nodes[0], nodes[-1] + 1])
        _, first, rows = np.unique(self._after[start:stop], return_index=True, return_inverse=True)
        return self._tokens[start:stop], self._texts[start:stop], rows, np.arange(stop - start) - first[rows]
