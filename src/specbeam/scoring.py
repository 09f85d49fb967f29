"""Log-probabilities of given continuations.

The continuations of one context form a tree: the context is evaluated once, and so is every shared beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbeam.backends.contract import Segment
from specbeam.engine.slots import Slots
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.prompts import encode
from specbeam.tree import Nodes, Tree

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
        SpecbeamError: a text has no context, or a token that is not in the model's vocabulary.
    """
    # Taken from the end, the longest first: a lack of memory shows at once.
    waiting = sorted(_shared(texts, max_batch_tokens), key=lambda some: sum(map(len, texts[some[0]])))
    live: list[Continuations] = []
    while waiting or live:
        while waiting and len(live) < max_contexts:
            numbers = waiting.pop()
            live.append(Continuations(lm, numbers, [texts[number] for number in numbers]))
        batch: list[tuple[Continuations, Nodes]] = []
        room = max_batch_tokens
        for tree in live:
            if len(nodes := tree.pending[:room]):
                batch.append((tree, nodes))
                room -= len(nodes)
        if batch:
            segments = [tree.segment(nodes) for tree, nodes in batch]
            logits = torch.split(lm.backend.forward(segments), [len(segment.wanted) for segment in segments])
            for (tree, nodes), rows in zip(batch, logits, strict=True):
                tree.receive(nodes, rows)
        for tree in live:
            if not len(tree.pending):
                yield from zip(tree.numbers, tree.log_probs.tolist(), tree.greedy.tolist(), strict=True)
        live = [tree for tree in live if len(tree.pending)]


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
        pending: nodes still to be evaluated, ancestors first.
        log_probs: sums over the tokens evaluated so far, float64 [texts].
        greedy: whether all these tokens were the likeliest, bool [texts].
    """

    def __init__(self, lm: LanguageModel, numbers: list[int], texts: list[Text]) -> None:
        self.numbers = numbers
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
        self._slots = Slots(tree, lm.backend, len(tree))
        self.pending = self._slots.missing(self._after) if scored else self._after

    def segment(self, nodes: Nodes) -> Segment[Any]:
        """The tree's part of a pass over some of its pending nodes."""
        return self._slots.segment(nodes, wanted=np.flatnonzero(np.isin(nodes, self._after)))

    def receive(self, nodes: Nodes, logits: Tensor) -> None:
        """Take the logits at the wanted ones among some pending nodes, float32 [w, vocab]."""
        self.pending = self.pending[len(nodes) :]
        start, stop = np.searchsorted(self._after, [nodes[0], nodes[-1] + 1])
        after, tokens, texts = self._after[start:stop], self._tokens[start:stop], self._texts[start:stop]
        rows = np.unique(after, return_inverse=True)[1]
        likeliest = logits.argmax(-1)[rows].cpu().numpy()
        log_probs = logits[rows, tokens] - logits.logsumexp(-1)[rows]
        np.add.at(self.log_probs, texts, log_probs.double().cpu().numpy())
        np.logical_and.at(self.greedy, texts, likeliest == tokens)
