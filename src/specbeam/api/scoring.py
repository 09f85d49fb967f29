"""The log-probabilities of given tokens: of continuations of a context, or of a prompt's own tokens.

The continuations of one context form a tree: the context is evaluated once, and so is every shared prefix. Contexts
that begin alike, with the same examples for instance, share the slots of their prefix.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.core.selection import Selection, SelectionRequest
from specbeam.core.strategy import Evaluate, Hypothesis, Strategy
from specbeam.core.tree import Tree
from specbeam.engine import Engine, Request, Setup
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel
from specbeam.models.prompts import as_list, encode

Text = tuple[list[int], list[int]]
"""The token ids of a context and of a continuation."""
NODES_PER_QUESTION = 64
"""Logits are held for this many nodes at once."""


def score(
    lm: LanguageModel, texts: Sequence[Text], *, max_contexts: int = 8, max_batch_tokens: int = 512
) -> Iterator[tuple[int, float, bool]]:
    """Log-probabilities of continuations given their contexts.

    Args:
        texts: contexts and continuations. A context has at least one token. Both together may have one token more than
            the model's context, because the last token is not evaluated.
        max_contexts: the maximum number of contexts that share a forward pass.
        max_batch_tokens: the maximum of nodes per pass. Logits of more are never held. Longer texts are prefilled in
            chunks.

    Yields:
        A tuple for each text, as soon as its score is known: (number, score, greedy). The number is its index in
        ``texts``. The score is the sum of the log-probabilities of the continuation's tokens (natural logarithm), 0
        without tokens. For a generated text it is ``Sequence.log_prob`` up to rounding, and not a beam's ``score``.
        Greedy is whether each token was the likeliest at its position.

    Raises:
        SpecbeamError: a text has no context, too many tokens, or a token that is not in the model's vocabulary. Also
            logits that are not finite.
    """
    texts = [(as_list(context), as_list(continuation)) for context, continuation in texts]
    # In the order of their tokens, each context shares most with the one before. The longest one is the first, so that
    # a lack of memory shows early.
    groups = deque(sorted(_shared(texts, max_batch_tokens), key=lambda group: texts[group[0]][0]))
    if not groups:
        return
    lengths = [sum(map(len, texts[group[0]])) for group in groups]
    groups.rotate(-lengths.index(max(lengths)))
    # A context that is done stays cached only as long as there is room beside the contexts of live requests.
    sizes = [len(texts[group[0]][0]) + max(1, sum(len(texts[index][1]) for index in group)) for group in groups]
    engine = Engine(
        lm,
        max_requests=max_contexts,
        max_batch_tokens=max_batch_tokens,
        max_cache_tokens=max_contexts * max(sizes),
    )
    submissions = (_submit(engine, group, [texts[index] for index in group]) for group in groups)
    for (indices, scores), request in engine.as_completed(submissions):
        request.result()
        yield from zip(indices, scores.log_probs.tolist(), scores.greedy.tolist(), strict=True)


def score_by_owner(
    lm: LanguageModel, texts: Mapping[int, list[Text]], *, max_contexts: int = 8
) -> Iterator[tuple[int, list[float]]]:
    """The scores of all texts of each owner, as soon as they are known. Arguments and errors as for :func:`score`."""
    owners = [(owner, position) for owner, owned in texts.items() for position in range(len(owned))]
    scores = {owner: [0.0] * len(owned) for owner, owned in texts.items()}
    left = Counter(owner for owner, _ in owners)
    for index, log_prob, _ in score(lm, [*chain.from_iterable(texts.values())], max_contexts=max_contexts):
        owner, position = owners[index]
        scores[owner][position] = log_prob
        left[owner] -= 1
        if not left[owner]:
            yield owner, scores[owner]


def _submit(
    engine: Engine, indices: list[int], texts: list[Text]
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
    return (indices, scores), engine.submit(context, options, strategy=strategy, writes=False)


def check_length(lm: LanguageModel, context: Sequence[int], continuations: Sequence[Sequence[int]]) -> None:
    """Raise SpecbeamError if a context and one of its continuations are too long to be scored."""
    longest = max(1, *map(len, continuations))
    length, maximum = len(lm.backend.start_token_ids or context) + longest, lm.backend.context_length + 1
    if length > maximum:
        raise SpecbeamError(
            f"a text to be scored has {length:,} tokens, but {lm.source} can score at most {maximum:,}, its context "
            "and one token that follows: shorten the text"
        )


def _shared(texts: Sequence[Text], max_tokens: int) -> list[list[int]]:
    """Groups of texts, by index, that share a context and have at most ``max_tokens`` tokens below it together.

    A node's attention runs over the slots of its whole tree, also over masked ones. In larger groups, sharing a short
    context would cost more than prefilling it again.
    """
    groups: list[list[int]] = []
    open_for: dict[tuple[int, ...], tuple[list[int], int]] = {}
    for index, (context, continuation) in enumerate(texts):
        indices, size = open_for.get(key := tuple(context), ([], 0))
        if not indices or size + len(continuation) > max_tokens:
            indices, size = [], 0
            groups.append(indices)
        indices.append(index)
        open_for[key] = indices, size + len(continuation)
    return groups


@dataclass
class ContinuationScores:
    """How likely some continuations of a prompt are.

    Attributes:
        log_probs: the sum over the tokens of each, float64 [n].
        greedy: whether all these tokens are the likeliest at their positions, bool [n].
    """

    log_probs: NDArray[np.float64]
    greedy: NDArray[np.bool_]


def score_continuations(
    tree: Tree, continuations: list[list[int]], scores: ContinuationScores
) -> Generator[Evaluate, Selection, None]:
    """A strategy: evaluate continuations of the prompt, each shared beginning once, and sum their log-probabilities.

    Args:
        scores: filled here.
    """
    scored: list[tuple[int, int, int]] = []  # for each token: the node that it follows, its id, and its continuation
    for index, tokens in enumerate(continuations):
        node = tree.tip
        for position, token in enumerate(tokens):
            scored.append((node, token, index))
            if position + 1 < len(tokens):
                (node,) = tree.draft(node, token).tolist()
    after, ids, indices = np.array(sorted(scored), dtype=np.int64).reshape(-1, 3).T
    nodes, first, rows = np.unique(after, return_index=True, return_inverse=True)
    columns = np.arange(len(after)) - first[rows]
    given = np.zeros((len(nodes), columns.max(initial=-1) + 1), dtype=np.int64)
    given[rows, columns] = ids
    for part in _parts(len(nodes)):
        selection = yield Evaluate(nodes[part], SelectionRequest(top=1, given=given[part]))
        assert selection.given is not None
        in_part = (part.start <= rows) & (rows < part.stop)
        row = rows[in_part] - part.start
        np.add.at(scores.log_probs, indices[in_part], selection.given[row, columns[in_part]].astype(np.float64))
        np.logical_and.at(scores.greedy, indices[in_part], selection.tokens[row, 0] == ids[in_part])


@dataclass
class PromptScores:
    """How likely the tokens of a prompt are. The first token follows nothing, so it has no entry in the lists.

    Attributes:
        log_probs: the log-probability of each token given the tokens before it, as in :class:`specbeam.Sequence`.
        top_logprobs: the log-probabilities of the likeliest tokens at its position, by token id, the likeliest first.
    """

    log_probs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)


def score_prompt(tree: Tree, k: int, scores: PromptScores) -> Generator[Evaluate, Selection, None]:
    """The first part of a strategy: evaluate the prompt, and collect its log-probabilities.

    It evaluates all tokens, because cached prefixes have no logits. The request should have ``share_prefix=False``.
    Otherwise its forward passes overwrite keys and values of other requests, and may round them differently.

    Args:
        k: how many of the likeliest tokens at each position to collect.
        scores: filled here.
    """
    before, tokens = tree.prefix[:-1], tree.tokens(tree.prefix[1:])
    for part in _parts(len(before)):
        selection = yield Evaluate(before[part].copy(), SelectionRequest(top=k, given=tokens[part, None].copy()))
        assert selection.given is not None
        scores.log_probs += selection.given[:, 0].tolist()
        for *row, token, log_prob in zip(
            selection.tokens.tolist(),
            selection.log_probs.tolist(),
            tokens[part].tolist(),
            selection.given[:, 0].tolist(),
            strict=True,
        ):
            likeliest = dict(zip(*row, strict=True))
            if token in likeliest:
                likeliest[token] = log_prob  # a token has one log-probability
            scores.top_logprobs.append(likeliest)


def _parts(count: int) -> Iterator[slice]:
    return (slice(start, start + NODES_PER_QUESTION) for start in range(0, count, NODES_PER_QUESTION))
