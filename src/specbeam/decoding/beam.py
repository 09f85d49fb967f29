"""Beam search, beam sampling and diverse beam search, with transformers' rules for what is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.decoding import Evaluate, Hypothesis, Strategy
from specbeam.decoding.record import Record
from specbeam.decoding.sampling import gumbel
from specbeam.decoding.stopping import Stopping
from specbeam.decoding.top import top
from specbeam.tree import NO_NODES, Nodes, Tree

NEVER = -1e9
"""The score of what must not be chosen: finite, and in float32 as in transformers, so that ties fall as there."""

Process = Callable[[Tree, Nodes, Tensor], Tensor]
Select = Callable[[Tensor, int], Tensor]


class Search(Protocol):
    """What a search by beams is between two steps."""

    @property
    def beams(self) -> Nodes:
        """The unfinished texts, int64 [b]."""

    @property
    def scores(self) -> Tensor:
        """Their log-probabilities, float32 [b] on the CPU."""

    @property
    def done(self) -> bool:
        """No step can change the outcome any more."""

    def step(self, logits: Tensor, known: NDArray[np.bool_] | None = None) -> bool:
        """Replace every beam by continuations of beams, given the logits at those known, float32 [k, vocab].

        Returns False, and leaves the search as it was, if the outcome depends on a beam that is not known.
        """

    @property
    def finished_nodes(self) -> Nodes:
        """Where the finished texts end."""

    def certain(self) -> Iterator[Hypothesis]:
        """The finished texts that became certain to be the next best since the last call."""

    def hypotheses(self) -> list[Hypothesis]:
        """The finished texts that are the outcome, best first."""


def beam_search(tree: Tree, search: Search, record: Record) -> Strategy:
    """Take steps until the outcome is certain."""
    while not search.done:
        search.step((yield Evaluate(search.beams)))
        record.round()
        record.step(search.beams, search.scores)
        tree.keep(search.beams, search.finished_nodes)
        yield from search.certain()
    return search.hypotheses()


class BeamSearch:
    """Keep the num_beams likeliest unfinished texts; return the best finished ones.

    A step takes the likeliest candidates, enough of them that num_beams are unfinished whatever the others are. Those
    among the first num_beams that are finished compete, by log-probability / length ** length_penalty, for the
    num_beams places of finished texts.

    Args:
        process: makes processed log-probabilities of log-probabilities [n, vocab] at nodes.
        early_stopping: True stops when num_beams texts are finished; False when the best beam, if it ended now, could
            not beat the worst of them; "never" when no length it can still reach would make it beat that.
        select: indices of k candidates, best first, from their scores [num_beams * vocab]; the k highest if not given.
        bounded: what follows a beam never scores above it: candidates are taken by score, and ``process`` raises no
            log-probability above 0. Then a step can do without beams that score too low to matter, and the search is
            over once the num_return_sequences best finished texts score above what any beam may reach (the monotonicity
            of best-first beam search, Meister et al. 2020, 3).
        constrained: there may be fewer texts than beams. Then only texts that may be take a place; by transformers'
            rules others take one too where candidates are few, and end the search under ``early_stopping``.
    """

    def __init__(
        self,
        tree: Tree,
        process: Process,
        stop: Stopping,
        num_beams: int,
        num_return_sequences: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        select: Select | None = None,
        bounded: bool = True,
        constrained: bool = False,
    ) -> None:
        self.tree = tree
        self.process = process
        self.stop = stop
        self.num_beams = num_beams
        self.select = select or (lambda scores, k: top(scores, k)[1])
        self.bounded = bounded
        self.constrained = constrained
        self.beams: Nodes = np.full(num_beams, tree.tip)
        self.scores = torch.full((num_beams,), NEVER)  # at first all beams are the prompt, and only one counts
        self.scores[0] = 0.0
        self.candidates = max(2, 1 + len(stop.eos_token_ids)) * num_beams
        self.length = 0  # of the beams, in new tokens
        self.longest = stop.max_length - tree.prompt_length
        self.finished = Finished(num_beams, length_penalty, early_stopping)
        self.returned = num_return_sequences
        self.told = 0
        self.done = False

    def step(self, logits: Tensor, known: NDArray[np.bool_] | None = None) -> bool:
        rows = np.arange(self.num_beams) if known is None else np.flatnonzero(known)
        missing = len(rows) < self.num_beams
        if missing and not (self.bounded and len(rows)):
            return False
        beams = self.beams[rows]
        vocab = logits.shape[-1]
        scores = self.scores[torch.from_numpy(rows)].to(logits.device)
        log_probs = (self.process(self.tree, beams, logits.log_softmax(-1)) + scores[:, None]).flatten()
        if len(log_probs) < self.num_beams:
            return False
        chosen = self.select(log_probs, min(self.candidates, len(log_probs)))
        top, index = log_probs[chosen].cpu(), chosen.cpu().numpy()
        nodes = self.tree.add(beams[index // vocab], index % vocab)
        ended = torch.from_numpy(self.stop.ended(self.tree, nodes))
        # At the greatest length all have ended; the likeliest are then the beams that groups and traces want to see.
        scores, running = (top if ended.all() else top + ended * NEVER).topk(self.num_beams)
        if missing:
            # The bound rule: a continuation of a missing beam scores at most what the beam does, so it comes after all
            # that matter here: the candidates down to the last of the new beams.
            if ended.all() and not (self.tree.depths(nodes) + 1 >= self.stop.max_length).all():
                return False  # it is not known to be the end: the missing beams' candidates may go on
            others = np.delete(np.arange(self.num_beams), rows)
            if not bool(scores[-1] > self.scores[torch.from_numpy(others)].max()):
                return False
        self.length += 1
        self.beams, self.scores = nodes[running.numpy()], scores
        self.finished.compete(nodes, top, ended & (top > NEVER / 2) if self.constrained else ended, self.length)
        self.done = bool(ended.all()) or self._settled()
        return True

    def _settled(self) -> bool:
        if self.finished.settled(self.scores[0], self.length, self.longest):
            return True
        if self.constrained and self.scores[0] <= NEVER / 2:
            return True  # every text there may be is finished
        return self.bounded and bool(self.finished.scores[self.returned - 1] > self._reachable())

    def _reachable(self) -> float:
        """No text that is unfinished now will score above this."""
        penalty = self.finished.length_penalty
        length = self.longest if penalty > 0 else self.length + 1
        return float(self.scores[0] / length**penalty)

    @property
    def finished_nodes(self) -> Nodes:
        return self.finished.nodes[self.finished.nodes >= 0]

    def certain(self) -> Iterator[Hypothesis]:
        reachable = float("-inf") if self.done else self._reachable() if self.bounded else float("inf")
        for hypothesis in self.hypotheses()[self.told :]:
            if hypothesis.score <= reachable:
                break
            self.told += 1
            yield hypothesis

    def hypotheses(self) -> list[Hypothesis]:
        real = np.flatnonzero(self.finished.real)[: self.returned]
        ends = zip(self.finished.nodes[real].tolist(), self.finished.scores[real].tolist(), strict=True)
        return [Hypothesis(node, score, self.stop(self.tree, node) or "length") for node, score in ends]


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
        """Whether the best beam, with this log-probability at this length, ends the search by transformers' rules."""
        if self.early_stopping is True and self.full:
            return True
        hopeful = longest if self.early_stopping == "never" and self.length_penalty > 0 else length
        worst = float(self.scores[-1]) if self.full else NEVER
        return float(best_running / hopeful**self.length_penalty) <= worst


class DiverseBeamSearch:
    """Groups of beams that take their steps one after the other, each kept off the tokens of those before it.

    What a group chose at a step is worth diversity_penalty less, a choice, to the groups after it (Vijayakumar et al.
    2018, "Diverse Beam Search", 3, with Hamming diversity). The finished texts of all groups are ranked together.

    Args:
        groups: the groups' searches over one tree, with as many beams each.
    """

    def __init__(self, groups: list[BeamSearch], diversity_penalty: float) -> None:
        self.groups = groups
        self.penalty = diversity_penalty
        self.stepped = groups  # by the last step
        self.told = False

    @property
    def beams(self) -> Nodes:
        return np.concatenate([group.beams for group in self.live])

    @property
    def scores(self) -> Tensor:
        return torch.cat([group.scores for group in self.live])

    @property
    def live(self) -> list[BeamSearch]:
        """The groups that go on; when none does, those that took the last step."""
        return [group for group in self.groups if not group.done] or self.stepped

    @property
    def done(self) -> bool:
        return all(group.done for group in self.groups)

    def step(self, logits: Tensor, known: NDArray[np.bool_] | None = None) -> bool:
        if known is not None and not known.all():
            return False
        chosen: Nodes = NO_NODES
        self.stepped = self.live
        for group, rows in zip(self.stepped, logits.chunk(len(self.stepped)), strict=True):
            plain = group.process
            taken = torch.from_numpy(chosen).to(logits.device)
            # As a process of the group's own: the penalty shows in its scores, as in the paper and in transformers.
            malus = self.penalty * torch.bincount(taken, minlength=logits.shape[-1])
            group.process = lambda *at, plain=plain, malus=malus: plain(*at) - malus
            try:
                group.step(rows)
            finally:
                group.process = plain
            chosen = np.concatenate([chosen, group.tree.tokens(group.beams)])
        return True

    @property
    def finished_nodes(self) -> Nodes:
        return np.concatenate([group.finished_nodes for group in self.groups])

    def certain(self) -> Iterator[Hypothesis]:
        if self.done and not self.told:
            self.told = True
            yield from self.hypotheses()

    def hypotheses(self) -> list[Hypothesis]:
        found = [hypothesis for group in self.groups for hypothesis in group.hypotheses()]
        return sorted(found, key=lambda h: -h.score)[: self.groups[0].returned]


def draw_without_replacement(generator: torch.Generator) -> Select:
    """Beam sampling's selection: candidates are drawn, not taken by score, as from the softmax of all scores.

    The k highest of scores with Gumbel noise are such a draw, in its order (Kool et al. 2019, "Stochastic Beams and
    Where to Find Them", 2.3).
    """

    def select(scores: Tensor, k: int) -> Tensor:
        noise = gumbel(len(scores), generator)
        return top(scores.double() + noise.to(scores.device), k)[1]

    return select
