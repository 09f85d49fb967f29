"""Processors change the model's scores before a token is chosen, with transformers' semantics.

They (penalties, forbidden tokens) hold for every method. Here they become data where they can: edits of single scores,
and masks. Only user-defined functions see all scores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbeam.core import callers
from specbeam.core.selection import MASKED, Edit, Selection
from specbeam.core.tree import Nodes, NodeStates, Tree
from specbeam.errors import SpecbeamError
from specbeam.logits.bans import BadWords, BannedTokens, Bans, RepeatedNgrams, SequenceBias
from specbeam.logits.checkpoint_processors import CheckpointProcessors
from specbeam.options.options import Options
from specbeam.structured.constraint_mask import ConstraintMask, packed


class Processors:
    """The processors of one request at some nodes: biases, penalties and bans, then masks, then functions.

    Args:
        vocab_size: of the target.
        of_checkpoint: what the checkpoint asks for.
        device: of the tensors that functions of the caller get.
        written_ends: end tokens that are text.

    Attributes:
        forbids: some tokens may be forbidden whatever their scores, so a drafter can avoid them.
        raises: a log-probability may be raised above 0, by a bias, a negative penalty or the caller's functions.
        is_plain: the request has no processors.
    """

    def __init__(
        self,
        options: Options,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        of_checkpoint: CheckpointProcessors = CheckpointProcessors(),  # noqa: B008 (it is never changed)
        device: str = "cpu",
        written_ends: frozenset[int] = frozenset(),
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.repetition_penalty = options.repetition_penalty or 1.0
        self.frequency_penalty, self.presence_penalty = options.frequency_penalty, options.presence_penalty
        self._counts = NodeStates(Counts.of, Counts.push)
        self.logit_bias = options.logit_bias or {}
        self.of_checkpoint = of_checkpoint
        self.bans: list[Bans] = [*of_checkpoint.bans]
        if options.no_repeat_ngram_size:
            self.bans.append(RepeatedNgrams(options.no_repeat_ngram_size))
        if options.bad_words_ids:
            self.bans.append(BadWords(options.bad_words_ids, eos_token_ids))
        if options.min_new_tokens and eos_token_ids:
            self.bans.append(BannedTokens(sorted(eos_token_ids), last=options.min_new_tokens - 1))
        self.constraint: ConstraintMask | None = None
        if options.constraint is not None:
            self.constraint = ConstraintMask(options.constraint, eos_token_ids, vocab_size, written_ends)
        self._eos = tuple(sorted(eos_token_ids))
        self.has_one_end = self.constraint is not None and options.num_beams > 1 and len(eos_token_ids) > 1
        self.prefix_allowed_tokens_fn = options.prefix_allowed_tokens_fn
        self.functions = options.logits_processor
        lowest = min(0.0, self.frequency_penalty, self.presence_penalty)
        has_raise = lowest < 0 or max(self.logit_bias.values(), default=0.0) > 0
        self.raises = bool(self.functions) or has_raise or of_checkpoint.raises
        self.forbids = bool(self.bans) or self.constraint is not None or self.prefix_allowed_tokens_fn is not None
        self._penalizes = self.repetition_penalty != 1.0 or bool(self.frequency_penalty or self.presence_penalty)
        masks = self.constraint is not None or self.prefix_allowed_tokens_fn is not None
        self._looks_at_texts = bool(self._penalizes or masks or self.functions)
        edits = self.logit_bias or of_checkpoint.biases or of_checkpoint.prompt_penalty
        self.is_plain = not (self._looks_at_texts or self.bans or edits or of_checkpoint.changes)
        self._dead_ends: set[int] = set()  # draft tokens after which prefix_allowed_tokens_fn allows no token

    def __call__(self, tree: Tree, nodes: Any, draft_tokens: Any = ()) -> dict[str, Any]:
        """The processors at nodes, int [n], as attributes of a selection request.

        Args:
            draft_tokens: which of the nodes are draft tokens. The target may never choose such a sequence, and no token
                may be allowed there.

        Raises:
            SpecbeamError: ``prefix_allowed_tokens_fn`` gave something that is no token ids.
        """
        if self.is_plain:
            return {}
        nodes = np.asarray(nodes, dtype=np.int64)
        allowed = self._allowed(tree, nodes, draft_tokens)
        edits, allowed = self._change([*self._edits(tree, nodes)], allowed, tree, nodes)
        changes: dict[str, Any] = {"edits": tuple(edits)}
        if allowed is not None:
            changes["allowed"] = allowed
        if self.functions:
            changes["functions"] = (partial(self._call, tree, nodes, np.isin(nodes, draft_tokens)),)
        if self.has_one_end:
            changes["one_of"] = self._eos
        if self.constraint is not None and self.constraint.together is not None:
            changes["together"] = self.constraint.together
        return changes

    def unchanged(self, tree: Tree, node: int) -> int:
        """For how many further tokens below this node, whatever they are, the processors change scores alike."""
        if self.is_plain:
            return sys.maxsize
        if self._looks_at_texts:
            return 0
        new = int(tree.depths(node)) + 1 - tree.prompt_length
        parts: list[Bans | SequenceBias] = [*self.bans]
        if self.of_checkpoint.biases is not None:
            parts.append(self.of_checkpoint.biases)
        ahead = [max(0, change.first - new - 1) for change in self.of_checkpoint.changes if new <= change.last]
        return min([sys.maxsize, *ahead, *(part.unchanged(new) for part in parts)])

    def forbidden(self, tree: Tree, nodes: Nodes, tokens: Nodes) -> NDArray[np.bool_]:
        """Which tokens may not follow drafted nodes, whatever their scores, bool [n]: a token for each of n nodes."""
        forbidden = np.zeros(len(nodes), dtype=bool)
        allowed = self._allowed(tree, nodes, nodes)
        if allowed is not None:
            forbidden |= allowed[np.arange(len(nodes)), tokens // 8] >> tokens % 8 & 1 == 0
        for bans in self.bans:
            rows, banned = bans(tree, nodes)
            forbidden[rows[banned == tokens[rows]]] = True
        return forbidden

    def check(self, nodes: Nodes, selection: Selection) -> None:
        """Refuse accepted draft tokens after which a function allowed no token or returned NaN.

        Raises:
            SpecbeamError: one of the beams, int64 [n], is left without any by the function alone, or all of them are by
                the processors together; or a function returned NaN for one.
        """
        if self.functions and np.isnan(selection.scores[:, :1]).any():
            raise _not_a_number("logits_processor")
        if self.prefix_allowed_tokens_fn is None:
            return
        if not self._dead_ends.isdisjoint(nodes.tolist()):
            raise _no_token_ids("no tokens", self.vocab_size)
        if not (selection.scores[:, :1] > MASKED).any():
            raise SpecbeamError(
                "prefix_allowed_tokens_fn allows only tokens that other options forbid: allow another token there",
                option="prefix_allowed_tokens_fn",
            )

    def _edits(self, tree: Tree, nodes: Nodes) -> Iterator[Edit]:
        n = len(nodes)
        if self.logit_bias:
            values = np.array([*self.logit_bias.values()], dtype=np.float32)
            yield Edit("add", *_each([*self.logit_bias], np.arange(n)), np.tile(values, n))
        if (biases := self.of_checkpoint.biases) is not None:
            rows, tokens, sums = biases(tree, nodes)
            yield Edit("add", rows.astype(np.int32), tokens.astype(np.int32), sums)
        if (of_prompt := self.of_checkpoint.prompt_penalty) is not None:
            where = _each(of_prompt[0], np.arange(n))
            yield Edit("repeat", *where, np.full(len(where[0]), of_prompt[1], np.float32))
        if self._penalizes:
            yield from self._penalties(tree, nodes)
        for bans in self.bans:
            rows, tokens = bans(tree, nodes)
            if len(rows):
                yield Edit("ban", rows.astype(np.int32), tokens.astype(np.int32))

    def _penalties(self, tree: Tree, nodes: Nodes) -> Iterator[Edit]:
        """Repetition penalty for all tokens of the sequence, then frequency and presence penalty for the new ones.

        The latter two are OpenAI's (its API reference).
        """
        states = [self._counts.at(tree, node) for node in nodes.tolist()]
        rows = np.repeat(np.arange(len(nodes), dtype=np.int32), [len(state.tokens) for state in states])
        tokens = np.concatenate([state.tokens for state in states])
        if self.repetition_penalty != 1.0:
            yield Edit("repeat", rows, tokens, np.full(len(rows), self.repetition_penalty, np.float32))
        if self.frequency_penalty or self.presence_penalty:
            counts = np.concatenate([state.counts for state in states])
            there = np.flatnonzero(counts)
            penalties = -(self.frequency_penalty * counts[there] + self.presence_penalty)
            yield Edit("add", rows[there], tokens[there], penalties.astype(np.float32))

    def _allowed(self, tree: Tree, nodes: Nodes, draft_tokens: Any) -> NDArray[np.uint8] | None:
        """Which tokens the masks allow, as packed bits, uint8 [n, ceil(vocab / 8)]; None if there are no masks."""
        allowed = None if self.constraint is None else self.constraint(tree, nodes)
        if self.prefix_allowed_tokens_fn is None:
            return allowed
        by_function, drafted = [], np.isin(nodes, draft_tokens)
        for row, node in enumerate(nodes.tolist()):
            input_ids = tree.tokens(tree.path(node))
            tokens = callers.call("prefix_allowed_tokens_fn", self.prefix_allowed_tokens_fn, self.device, 0, input_ids)
            index = _token_ids(tokens, self.vocab_size, some=not drafted[row])
            by_function.append(packed(index, self.vocab_size))
            if not len(index):
                self._dead_ends.add(node)
        return np.stack(by_function) if allowed is None else np.stack(by_function) & allowed

    def _change(
        self, edits: list[Edit], allowed: NDArray[np.uint8] | None, tree: Tree, nodes: Nodes
    ) -> tuple[list[Edit], NDArray[np.uint8] | None]:
        """Edits and masks with the checkpoint's changes at nodes. Tokens that it forces are allowed in any case."""
        for change in self.of_checkpoint.changes:
            new = tree.depths(nodes) + 1 - tree.prompt_length
            rows = np.flatnonzero((new >= change.first) & (new <= change.last))
            if len(rows):
                values = np.repeat(change.values(new[rows]), len(change.tokens))
                edits.append(Edit(change.kind, *_each(change.tokens, rows), values))
                if change.only:
                    mask = packed(change.tokens, self.vocab_size)
                    allowed = np.full((len(nodes), len(mask)), 255, np.uint8) if allowed is None else allowed.copy()
                    allowed[rows] = mask
        return edits, allowed

    def _call(
        self, tree: Tree, nodes: Nodes, drafted: NDArray[np.bool_], scores: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """Call the functions on all nodes of one depth at once, since their sequences are equally long.

        A draft token that no token may follow keeps its scores: functions may count on some token that is allowed. If
        one function forbids all tokens, later ones may return NaN. A draft token keeps that: it is an error once it is
        accepted. A draft model may have fewer tokens than the target. Functions see the others as forbidden.

        Raises:
            SpecbeamError: a function of the caller returned scores of another shape, NaN, or no numbers, or used an
                array as a tensor.
        """
        columns = scores.shape[-1]
        missing = max(0, self.vocab_size - columns)
        scores = np.concatenate([scores, np.full((len(scores), missing), MASKED, np.float32)], axis=1)
        alive = np.flatnonzero((scores > MASKED).any(-1) | ~drafted)
        for rows, input_ids in _by_length(tree, nodes[alive]):
            at = alive[rows]
            here = scores[at]
            for function in self.functions:
                option = getattr(function, "option", "logits_processor")
                here = callers.as_scores(
                    "logits_processor", callers.call(option, function, self.device, input_ids, here), here.shape
                )
                if (np.isnan(here).any(-1) & ~drafted[at]).any():
                    raise _not_a_number(option)
            scores[at] = here
        return scores[:, :columns]


def _not_a_number(option: str) -> SpecbeamError:
    return SpecbeamError(
        f"{option} gives NaN: scores must be numbers, and before it the other options must allow some token, with a "
        "finite score",
        option=option,
    )


def _each(tokens: Any, rows: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """The indices of some tokens in each of n rows: the rows and the tokens, int32 [n * tokens] each."""
    return np.repeat(rows.astype(np.int32), len(tokens)), np.tile(np.array(tokens, dtype=np.int32), len(rows))


def _by_length(tree: Tree, nodes: Nodes) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each length of the sequences down to nodes: their rows, int64 [n], and their tokens, int64 [n, length]."""
    depths = tree.depths(nodes)
    for depth in np.unique(depths):
        rows = np.flatnonzero(depths == depth)
        yield rows, tree.tokens(tree.paths(nodes[rows]))


def check_token_ids(options: Options, vocab_size: int) -> None:
    """Refuse token ids that the vocabulary lacks."""
    words = [token for word in options.bad_words_ids or () for token in word]
    for name, tokens in {"logit_bias": options.logit_bias or (), "bad_words_ids": words}.items():
        if foreign := [token for token in tokens if token >= vocab_size]:
            says = f"{name}: the token id {foreign[0]} is not in the vocabulary of {vocab_size}"
            raise SpecbeamError(says, option=name)


class Counts(NamedTuple):
    """The distinct tokens of a sequence, and how often each came after the prompt. Arrays are never changed.

    Attributes:
        tokens: ascending, int32 [n].
        counts: int64 [n].
    """

    tokens: NDArray[np.int32]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, prompt: NDArray[np.int64]) -> Counts:
        tokens = np.unique(prompt).astype(np.int32)
        return cls(tokens, np.zeros(len(tokens), dtype=np.int64))

    def push(self, token: int) -> Counts:
        """The counts after one more token."""
        at = int(self.tokens.searchsorted(token))
        if at < len(self.tokens) and self.tokens[at] == token:
            counts = self.counts.copy()
            counts[at] += 1
            return Counts(self.tokens, counts)
        tokens, counts = np.empty(len(self.tokens) + 1, np.int32), np.empty(len(self.tokens) + 1, np.int64)
        tokens[:at], tokens[at], tokens[at + 1 :] = self.tokens[:at], token, self.tokens[at:]
        counts[:at], counts[at], counts[at + 1 :] = self.counts[:at], 1, self.counts[at:]
        return Counts(tokens, counts)


def _token_ids(tokens: Any, vocab_size: int, some: bool) -> NDArray[np.int64]:
    """The token ids that ``prefix_allowed_tokens_fn`` returned.

    Args:
        some: there must be at least one.

    Raises:
        SpecbeamError: there is none, or a value that is no token id.
    """
    try:
        index = np.atleast_1d(np.asarray(tokens.cpu() if hasattr(tokens, "cpu") else tokens)).ravel()
    except (TypeError, ValueError):
        index = np.array([None])
    if not len(index) and not some:
        return np.empty(0, dtype=np.int64)
    is_integer = np.issubdtype(index.dtype, np.integer)
    if not len(index) or not is_integer or index.min() < 0 or index.max() >= vocab_size:
        raise _no_token_ids(str(tokens)[:60] if len(index) else "no tokens", vocab_size)
    return index.astype(np.int64)


def _no_token_ids(returned: str, vocab_size: int) -> SpecbeamError:
    return SpecbeamError(
        f"prefix_allowed_tokens_fn returned {returned}: "
        f"give token ids below {vocab_size}, at least one, such as the end token",
        option="prefix_allowed_tokens_fn",
    )
