"""Processors and warpers change the model's scores before a token is chosen, with transformers' semantics.

*Processors* (penalties, forbidden tokens) hold for every method. *Warpers* shape the distribution that is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbeam.decoding.constraint_mask import ConstraintMask
from specbeam.decoding.top import top
from specbeam.errors import SpecbeamError
from specbeam.options import Options
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


class Processors:
    """The processors of one request, applied to the scores at some nodes: penalties, then masks, then functions.

    Args:
        of_checkpoint: processors of transformers that the checkpoint asks for (:func:`processors_of_checkpoint`).

    Attributes:
        forbids: some tokens may be forbidden whatever their scores, so a drafter can avoid them.
        raises: the caller gave functions. These may raise scores too.
    """

    def __init__(
        self, options: Options, eos_token_ids: frozenset[int], of_checkpoint: Sequence[Callable[..., Tensor]] = ()
    ) -> None:
        self.repetition_penalty = options.repetition_penalty or 1.0
        self.min_new_tokens = options.min_new_tokens
        self.eos_token_ids = sorted(eos_token_ids)
        self.constraint = None if options.constraint is None else ConstraintMask(options.constraint, eos_token_ids)
        self.prefix_allowed_tokens_fn = options.prefix_allowed_tokens_fn
        self.num_texts = options.num_texts
        self.functions = (*of_checkpoint, *options.logits_processor)
        self.raises = bool(options.logits_processor)
        self.forbids = self.constraint is not None or self.prefix_allowed_tokens_fn is not None

    def __call__(self, tree: Tree, nodes: Any, scores: Tensor, drafting: bool = False) -> Tensor:
        """Scores [n, vocab] at n nodes in, processed scores [n, vocab] out; the input is not changed.

        Args:
            drafting: the nodes are guesses. The target may never choose such a text, and no token may be allowed there.

        Raises:
            SpecbeamError: a function of the caller returned scores of another shape, NaN, or no tokens.
        """
        nodes = np.asarray(nodes, dtype=np.int64)
        if self.repetition_penalty != 1.0:
            seen = torch.from_numpy(tree.tokens(tree.paths(nodes))).to(scores.device)
            scores = repetition_penalty(scores, seen, self.repetition_penalty)
        if self.eos_token_ids and self.min_new_tokens:
            early = tree.depths(nodes) + 1 - tree.prompt_length < self.min_new_tokens
            if early.any():
                scores = scores.clone()
                scores[np.flatnonzero(early)[:, None], self.eos_token_ids] = MASKED
        scores = self.forbid(tree, nodes, scores, drafting)
        if self.functions:
            scores = self._call(tree, nodes, scores, drafting)
        complete = len(nodes) == self.num_texts and not drafting
        if self.prefix_allowed_tokens_fn is not None and complete and not (scores > MASKED).any():
            raise SpecbeamError(
                "prefix_allowed_tokens_fn allows only tokens that other options forbid: allow another token there"
            )
        return scores

    def forbid(self, tree: Tree, nodes: Nodes, scores: Tensor, drafting: bool = False) -> Tensor:
        """Scores [n, vocab] with -inf where a token may not follow, whatever its score."""
        if self.constraint is not None:
            scores = self.constraint(tree, nodes, scores)
        if self.prefix_allowed_tokens_fn is not None:
            texts = [torch.from_numpy(tree.tokens(tree.path(node))).to(scores.device) for node in nodes.tolist()]
            scores = only(scores, [self.prefix_allowed_tokens_fn(0, ids) for ids in texts], some=not drafting)
        return scores

    def _call(self, tree: Tree, nodes: Nodes, scores: Tensor, drafting: bool) -> Tensor:
        """Call the functions on all nodes of one depth at once, since their texts are equally long.

        A guess that no token may follow keeps its scores: functions may count on some token that is allowed.
        """
        scores = scores.clone()
        depths = tree.depths(nodes)
        alive = (scores > MASKED).any(-1).cpu().numpy() | (not drafting)
        for depth in np.unique(depths[alive]):
            (rows,) = np.nonzero((depths == depth) & alive)
            input_ids = torch.from_numpy(tree.tokens(tree.paths(nodes[rows]))).to(scores.device)
            at = torch.from_numpy(rows).to(scores.device)
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
    """Temperature, then top-k, top-p and min-p, in transformers' order."""

    def __init__(self, options: Options) -> None:
        self.steps: list[Callable[[Tensor], Tensor]] = []
        given = {
            temperature: (options.temperature, 1.0),
            top_k: (options.top_k, 0),
            top_p: (options.top_p, 1.0),
            min_p: (options.min_p, 0.0),
        }
        for step, (value, neutral) in given.items():
            if value is not None and value != neutral:
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
