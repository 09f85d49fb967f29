"""Processors and warpers change the model's scores before a token is chosen, with transformers' semantics.

*Processors* (penalties, forbidden tokens) hold for every method. *Warpers* shape the distribution that is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Integral
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.decoding.constraint_mask import ConstraintMask
from specbeam.decoding.top import top
from specbeam.errors import SpecbeamError
from specbeam.options import NEUTRAL_VALUES, Options
from specbeam.tree import Nodes, Tree

MASKED = float("-inf")
FORCES_AND_FORBIDS = (
    "bad_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
)
"""Options that a checkpoint's generation_config.json may set, in the order in which transformers applies them."""


Bans = Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.int64]]]
"""Of texts, int64 [n, length]: the rows and the token ids that may not follow there, int64 [m] each."""


class Processors:
    """The processors of one request, applied to the scores at some nodes: penalties, then masks, then functions.

    Args:
        of_checkpoint: processors of transformers that the checkpoint asks for (:func:`processors_of_checkpoint`).

    Attributes:
        forbids: some tokens may be forbidden whatever their scores, so a drafter can avoid them.
        raises: a log-probability may be raised above 0, by a bias, a negative penalty or the caller's functions.
    """

    def __init__(
        self, options: Options, eos_token_ids: frozenset[int], of_checkpoint: Sequence[Callable[..., Tensor]] = ()
    ) -> None:
        self.repetition_penalty = options.repetition_penalty or 1.0
        self.frequency_penalty, self.presence_penalty = options.frequency_penalty, options.presence_penalty
        self.logit_bias = options.logit_bias or {}
        self.min_new_tokens = options.min_new_tokens
        self.eos_token_ids = sorted(eos_token_ids)
        self.bans: list[Bans] = []
        if options.no_repeat_ngram_size:
            self.bans.append(partial(repeated_ngrams, size=options.no_repeat_ngram_size))
        if options.bad_words_ids:
            self.bans.append(BadWords(options.bad_words_ids, eos_token_ids))
        self.constraint = None if options.constraint is None else ConstraintMask(options.constraint, eos_token_ids)
        self.has_one_end = self.constraint is not None and options.num_beams > 1
        self.prefix_allowed_tokens_fn = options.prefix_allowed_tokens_fn
        self.num_texts = options.num_texts
        self.functions = (*of_checkpoint, *options.logits_processor)
        lowest = min(0.0, self.frequency_penalty, self.presence_penalty)
        self.raises = bool(options.logits_processor) or lowest < 0 or max(self.logit_bias.values(), default=0.0) > 0
        self.forbids = bool(self.bans) or self.constraint is not None or self.prefix_allowed_tokens_fn is not None

    def __call__(self, tree: Tree, nodes: Any, scores: Tensor, drafting: bool = False) -> Tensor:
        """Scores [n, vocab] at n nodes in, processed scores [n, vocab] out; the input is not changed.

        Args:
            drafting: the nodes are guesses. The target may never choose such a text, and no token may be allowed there.

        Raises:
            SpecbeamError: a function of the caller returned scores of another shape, NaN, or no tokens.
        """
        nodes = np.asarray(nodes, dtype=np.int64)
        if self.logit_bias:
            scores = scores.clone()
            scores[:, [*self.logit_bias]] += torch.tensor([*self.logit_bias.values()], device=scores.device)
        if self.repetition_penalty != 1.0:
            seen = torch.from_numpy(tree.tokens(tree.paths(nodes))).to(scores.device)
            scores = repetition_penalty(scores, seen, self.repetition_penalty)
        if self.frequency_penalty or self.presence_penalty:
            scores = self._penalize_counts(tree, nodes, scores)
        if self.eos_token_ids and self.min_new_tokens:
            early = tree.depths(nodes) + 1 - tree.prompt_length < self.min_new_tokens
            if early.any():
                scores = scores.clone()
                scores[np.flatnonzero(early)[:, None], self.eos_token_ids] = MASKED
        scores = self.forbid(tree, nodes, scores, drafting)
        if self.functions:
            scores = self._call(tree, nodes, scores, drafting)
        if self.has_one_end:
            scores = only_the_likeliest(scores, self.eos_token_ids)
        complete = len(nodes) == self.num_texts and not drafting
        if self.prefix_allowed_tokens_fn is not None and complete and not (scores > MASKED).any():
            raise SpecbeamError(
                "prefix_allowed_tokens_fn allows only tokens that other options forbid: allow another token there"
            )
        return scores

    def forbid(self, tree: Tree, nodes: Nodes, scores: Tensor, drafting: bool = False) -> Tensor:
        """Scores [n, vocab] with -inf where a token may not follow, whatever its score."""
        if self.bans:
            scores = self._ban(tree, nodes, scores)
        if self.constraint is not None:
            scores = self.constraint(tree, nodes, scores)
        if self.prefix_allowed_tokens_fn is not None:
            texts = [torch.from_numpy(tree.tokens(tree.path(node))).to(scores.device) for node in nodes.tolist()]
            scores = only(scores, [self.prefix_allowed_tokens_fn(0, ids) for ids in texts], some=not drafting)
        return scores

    def _penalize_counts(self, tree: Tree, nodes: Nodes, scores: Tensor) -> Tensor:
        """Frequency and presence penalty, for the tokens of the text without the prompt (OpenAI's API reference)."""
        scores, vocab = scores.clone(), scores.shape[-1]
        for rows, ids in _by_length(tree, nodes):
            pairs, counts = np.unique(rows[:, None] * vocab + ids[:, tree.prompt_length :], return_counts=True)
            row, token = np.divmod(pairs, vocab)
            penalties = torch.from_numpy(self.frequency_penalty * counts + self.presence_penalty)
            scores[row, token] -= penalties.to(scores)
        return scores

    def _ban(self, tree: Tree, nodes: Nodes, scores: Tensor) -> Tensor:
        scores = scores.clone()
        for rows, ids in _by_length(tree, nodes):
            for bans in self.bans:
                row, token = bans(ids)
                inside = token < scores.shape[-1]
                scores[rows[row[inside]], token[inside]] = MASKED
        return scores

    def _call(self, tree: Tree, nodes: Nodes, scores: Tensor, drafting: bool) -> Tensor:
        """Call the functions on all nodes of one depth at once, since their texts are equally long.

        A guess that no token may follow keeps its scores: functions may count on some token that is allowed.
        """
        scores = scores.clone()
        alive = np.flatnonzero((scores > MASKED).any(-1).cpu().numpy() | (not drafting))
        for rows, ids in _by_length(tree, nodes[alive]):
            input_ids = torch.from_numpy(ids).to(scores.device)
            at = torch.from_numpy(alive[rows]).to(scores.device)
            here = scores[at]
            for function in self.functions:
                here = function(input_ids, shaped := here)
                if not isinstance(here, Tensor) or here.shape != shaped.shape or here.isnan().any():
                    got = f"of shape {[*here.shape]}" if isinstance(here, Tensor) else type(here).__name__
                    raise SpecbeamError(
                        f"logits_processor returned a value {got}: give scores of shape {[*shaped.shape]} without NaN"
                    )
            scores[at] = here
        return scores


def _by_length(tree: Tree, nodes: Nodes) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each length of the texts down to nodes: the indices of these nodes, int64 [n], and the texts [n, length]."""
    depths = tree.depths(nodes)
    for depth in np.unique(depths):
        rows = np.flatnonzero(depths == depth)
        yield rows, tree.tokens(tree.paths(nodes[rows]))


def check_token_ids(options: Options, vocab_size: int) -> None:
    """Refuse token ids that the vocabulary lacks.

    Raises:
        SpecbeamError: names the option and the token id.
    """
    words = [token for word in options.bad_words_ids or () for token in word]
    for name, tokens in {"logit_bias": options.logit_bias or (), "bad_words_ids": words}.items():
        if foreign := [token for token in tokens if token >= vocab_size]:
            raise SpecbeamError(f"{name}: the token id {foreign[0]} is not in the vocabulary of {vocab_size}")


def processors_of_checkpoint(
    defaults: Mapping[str, Any],
    eos_token_ids: frozenset[int],
    prompt_length: int,
    max_length: int,
    vocab_size: int,
    device: torch.device,
) -> list[Callable[..., Tensor]]:
    """Transformers' own processors for the tokens that a checkpoint's generation_config.json forces and forbids.

    No processor among these raises a log-probability above 0. A negative token id stands for no token.

    Args:
        prompt_length: the number of tokens that the text begins with. With an encoder these are its start tokens.

    Raises:
        SpecbeamError: the file has a value that transformers refuses, or forces a token that the model lacks.
    """
    given = {name: value for name in FORCES_AND_FORBIDS if (value := defaults.get(name)) is not None}
    try:
        given = {name: kept for name, value in given.items() if (kept := _in_vocabulary(name, value, vocab_size))}
        if not given:
            return []

        from transformers import generation

        eos = torch.tensor(sorted(eos_token_ids), device=device) if eos_token_ids else None
        begin = prompt_length + (prompt_length == 1 and "forced_bos_token_id" in given)
        make: dict[str, Callable[[Any], Callable[..., Tensor]]] = {
            "bad_words_ids": lambda words: generation.NoBadWordsLogitsProcessor(words, eos),
            "forced_bos_token_id": lambda ids: generation.ForcedBOSTokenLogitsProcessor(ids),
            "forced_eos_token_id": lambda ids: generation.ForcedEOSTokenLogitsProcessor(max_length, ids, device),
            "suppress_tokens": lambda ids: generation.SuppressTokensLogitsProcessor(ids, device),
            "begin_suppress_tokens": lambda ids: generation.SuppressTokensAtBeginLogitsProcessor(ids, begin, device),
        }
        return [make[name](value) for name, value in given.items()]
    except Exception as error:  # transformers lets any exception pass
        raise SpecbeamError(f"the model's generation_config.json: {error}") from error


def _in_vocabulary(name: str, value: Any, vocab_size: int) -> list[Any]:
    """The token ids of an option, or its words, without tokens that no text can contain.

    Raises:
        ValueError: a value is no token id, or a token is to be forced, and the vocabulary lacks it.
    """
    words = value if name == "bad_words_ids" else [[value] if isinstance(value, int) else value]
    if not all(isinstance(token, Integral) and not isinstance(token, bool) for word in words for token in word):
        raise ValueError(f"{name} {value!r} holds a value that is no token id")
    if name == "bad_words_ids":
        return [word for word in words if all(0 <= token < vocab_size for token in word)]
    tokens = [token for token in words[0] if token >= 0]
    if name.startswith("forced") and max(tokens, default=0) >= vocab_size:
        raise ValueError(f"{name} {max(tokens)} is not in the vocabulary of {vocab_size}")
    return tokens


class Warpers:
    """Temperature, then top-k, top-p, min-p and typical sampling, in transformers' order."""

    def __init__(self, options: Options) -> None:
        self.steps: list[Callable[[Tensor], Tensor]] = []
        for step in (temperature, top_k, top_p, min_p, typical_p):
            value = getattr(options, step.__name__)
            if value is not None and value != NEUTRAL_VALUES[step.__name__]:
                self.steps.append(lambda scores, step=step, value=value: step(scores, value))  # type: ignore[misc]

    def __call__(self, scores: Tensor) -> Tensor:
        """Scores [..., vocab] in, scores of the distribution to draw from out: -inf where a probability is 0."""
        for step in self.steps:
            scores = step(scores)
        return scores


def repetition_penalty(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative scores [n, vocab] of tokens seen, int64 [n, length] (CTRL, 2019, 4.1)."""
    chosen = scores.gather(-1, seen)
    return scores.scatter(-1, seen, torch.where(chosen < 0, chosen * penalty, chosen / penalty))


def repeated_ngrams(ids: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The tokens that would end an n-gram that the text has already: a ban (Paulus et al. 2018, 2.5)."""
    n, length = ids.shape
    if length < size:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    begun = ids[:, length - size + 1 :]
    same = np.ones((n, length - size + 1), dtype=bool)
    for column in range(size - 1):
        same &= ids[:, column : length - size + 1 + column] == begun[:, column : column + 1]
    rows, at = np.nonzero(same)
    return rows, ids[rows, at + size - 1]


class BadWords:
    """Bans the last token of each word where the text ends with the word's other tokens.

    Args:
        words: token ids of each. A word that is one end token alone is left out, as in transformers.
    """

    def __init__(self, words: Sequence[Sequence[int]], eos_token_ids: frozenset[int]) -> None:
        kept = [word for word in words if not (len(word) == 1 and word[0] in eos_token_ids)]
        self.groups = []  # of words of one length: the tokens before the last, int64 [n, length - 1], and the last [n]
        for length in sorted({len(word) for word in kept}):
            table = np.array([word for word in kept if len(word) == length], dtype=np.int64)
            self.groups.append((table[:, :-1], table[:, -1]))

    def __call__(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows, tokens = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for begins, last in self.groups:
            if begins.shape[1] <= ids.shape[1]:
                ends = ids[:, ids.shape[1] - begins.shape[1] :]
                row, word = np.nonzero((ends[:, None] == begins).all(-1))
                rows.append(row)
                tokens.append(last[word])
        return np.concatenate(rows), np.concatenate(tokens)


def only_the_likeliest(scores: Tensor, tokens: Sequence[int]) -> Tensor:
    """Scores [n, vocab] with -inf for all of some tokens but the likeliest of them, in each row."""
    among = scores[:, tokens]
    best = among.argmax(-1, keepdim=True)
    scores = scores.clone()
    scores[:, tokens] = torch.full_like(among, MASKED).scatter(-1, best, among.gather(-1, best))
    return scores


def only(scores: Tensor, allowed: Sequence[Any], some: bool = True) -> Tensor:
    """Scores [n, vocab] with -inf for all tokens but the allowed ones.

    Args:
        allowed: token ids for each of the n rows.
        some: each row must allow at least one token.

    Raises:
        SpecbeamError: a row has no tokens, or values that are not token ids.
    """
    masked = torch.full_like(scores, MASKED)
    for row, tokens in enumerate(allowed):
        try:
            index = np.atleast_1d(np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)).ravel()
        except (TypeError, ValueError):
            index = np.array([None])
        if not len(index) and not some:
            continue
        whole = np.issubdtype(index.dtype, np.integer)
        if not len(index) or not whole or index.min() < 0 or index.max() >= scores.shape[-1]:
            raise SpecbeamError(
                f"prefix_allowed_tokens_fn returned {'no tokens' if not len(index) else str(tokens)[:60]}: "
                f"give token ids below {scores.shape[-1]}, at least one, such as the end token"
            )
        at = torch.from_numpy(index.astype(np.int64)).to(scores.device)
        masked[row, at] = scores[row, at]
    return masked


def temperature(scores: Tensor, value: float) -> Tensor:
    """Divide by the temperature."""
    return scores / value


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k highest scores, and those equal to the lowest of them (Fan et al. 2018, 5.4)."""
    lowest = top(scores, min(k, scores.shape[-1]))[0][..., -1:]
    return scores.masked_fill(scores < lowest, MASKED)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens whose probabilities first sum to p (nucleus sampling, Holtzman et al. 2020, 3.1)."""
    ascending, order = scores.sort(dim=-1)
    below = ascending.softmax(-1).cumsum(-1) <= 1 - p
    below[..., -1] = False  # the likeliest always stays
    return scores.masked_fill(torch.zeros_like(below).scatter(-1, order, below), MASKED)


def min_p(scores: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the likeliest (Nguyen et al. 2024, 3)."""
    probabilities = scores.softmax(-1)
    return scores.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), MASKED)


def typical_p(scores: Tensor, p: float) -> Tensor:
    """Keep the tokens whose surprise is nearest to the expected one, until they sum to p (Meister et al. 2023, 4)."""
    log_probs = scores.log_softmax(-1)
    expected = -(log_probs * log_probs.exp()).nansum(-1, keepdim=True)  # impossible tokens are 0 * -inf
    ascending, order = (-log_probs - expected).abs().sort(dim=-1)
    number = (scores.gather(-1, order).softmax(-1).cumsum(-1) < p).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    far = ascending > ascending.gather(-1, number)
    return scores.masked_fill(torch.zeros_like(far).scatter(-1, order, far), MASKED)
