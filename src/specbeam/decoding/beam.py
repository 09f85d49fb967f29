"""Beam search and beam sampling, with transformers' rules for what counts as finished and when to stop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specbeam.decoding import Evaluate, Hypothesis, Strategy
from specbeam.decoding.sampling import gumbel
from specbeam.decoding.stopping import Stopping
from specbeam.tree import Nodes, Tree

NEVER = -1e9
"""The score of what must not be chosen: finite, and in float32 as in transformers, so that ties fall as there."""

Select = Callable[[Tensor, int], Tensor]


def beam_search(
    tree: Tree,
    process: Callable[[Tree, Nodes, Tensor], Tensor],
    stop: Stopping,
    num_beams: int,
    num_return_sequences: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    select: Select | None = None,
) -> Strategy:
    """Keep the num_beams likeliest unfinished texts; return the best finished ones.

    A step takes the likeliest candidates, enough of them that num_beams are unfinished whatever the others are. Those
    among the first num_beams that are finished compete, by log-probability / length ** length_penalty, for the
    num_beams places of finished texts.

    Args:
        early_stopping: True stops when num_beams texts are finished; False when the best beam, if it ended now, could
            not beat the worst of them; "never" when no length it can still reach would make it beat that.
        select: indices of k candidates, best first, from their scores [num_beams * vocab]; the k highest if not given.
    """
    select = select or (lambda scores, k: scores.topk(k).indices)
    beams: Nodes = np.full(num_beams, tree.tip)
    scores = torch.full((num_beams,), NEVER)  # of the beams; at first they are all the prompt, and only one counts
    scores[0] = 0.0
    finished = Finished(num_beams, length_penalty, early_stopping)
    candidates = max(2, 1 + len(stop.eos_token_ids)) * num_beams
    longest = stop.max_length - tree.prompt_length
    for length in range(1, longest + 1):  # of the candidates, in new tokens
        logits = yield Evaluate(beams)
        vocab = logits.shape[-1]
        log_probs = process(tree, beams, logits.log_softmax(-1)) + scores.to(logits.device)[:, None]
        log_probs = log_probs.flatten()
        chosen = select(log_probs, min(candidates, len(log_probs)))
        top, index = log_probs[chosen].cpu(), chosen.cpu().numpy()

        nodes = tree.add(beams[index // vocab], index % vocab)
        ended = torch.from_numpy(stop.ended(tree, nodes))
        scores, running = (top + ended * NEVER).topk(num_beams)
        beams = nodes[running.numpy()]
        finished.compete(nodes, top, ended, length)
        tree.keep(np.concatenate([beams, finished.nodes[finished.nodes >= 0]]))
        if ended.all() or finished.settled(scores[0], length, longest):
            break
    return [
        Hypothesis(node, score, stop(tree, node) or "length")
        for node, score in zip(
            finished.nodes[finished.real].tolist(), finished.scores[finished.real].tolist(), strict=True
        )
    ][:num_return_sequences]


class Finished:
    """The places for finished texts, best first.

    Attributes:
        nodes: where they end, -1 where a place is empty.
        real: false for empty places, and for texts that took one only because there were fewer candidates than places:
            forbidden ones, and those of the copies of the prompt that fill the beams at first.
    """

    def __init__(self, places: int, length_penalty: float, early_stopping: bool | str) -> None:
        self.nodes: Nodes = np.full(places, -1)
        self.real = np.zeros(places, dtype=bool)
        self.scores = torch.full((places,), NEVER)
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping

    @property
    def full(self) -> bool:
        return bool((self.nodes >= 0).all())

    def compete(self, nodes: Nodes, log_probs: Tensor, ended: Tensor, length: int) -> None:
        """Let the candidates that have ended compete for a place, if they are among the first of all candidates."""
        if self.early_stopping is True and self.full:
            return
        places = len(self.nodes)
        may = ended.clone()
        may[places:] = False  # the others are there only so that enough beams remain
        scores = log_probs / length**self.length_penalty + ~may * NEVER
        self.scores, best = torch.cat([self.scores, scores]).topk(places)
        self.nodes = np.concatenate([self.nodes, np.where(may.numpy(), nodes, -1)])[best.numpy()]
        self.real = np.concatenate([self.real, (may & (log_probs > NEVER / 2)).numpy()])[best.numpy()]

    def settled(self, best_running: Tensor, length: int, longest: int) -> bool:
        """Whether the best beam, with this log-probability at this length, cannot change the outcome any more."""
        if self.early_stopping is True and self.full:
            return True
        hopeful = longest if self.early_stopping == "never" and self.length_penalty > 0 else length
        worst = float(self.scores[-1]) if self.full else NEVER
        return float(best_running / hopeful**self.length_penalty) <= worst


def draw_without_replacement(generator: torch.Generator) -> Select:
    """Beam sampling's selection: candidates are drawn, not taken by score, as from the softmax of all scores.

    The k highest of scores with Gumbel noise are such a draw, in its order (Kool et al. 2019, "Stochastic Beams and
    Where to Find Them", 2.3).
    """

    def select(scores: Tensor, k: int) -> Tensor:
        noise = gumbel(len(scores), generator)
        return (scores.double() + noise.to(scores.device)).topk(k).indices

    return select
