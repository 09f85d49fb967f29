"""Lazy beam search: exactly what beam search returns, but only beams that can matter are evaluated.

No continuation of a hypothesis scores above it. So the known part of a step may decide its best candidates, although
some beams before it are *deferred*: known, and not evaluated. See Meister, Vieira and Cotterell 2020, "Best-First Beam
Search", 3. docs/exactness.md has the proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from specbeam.core.tree import NO_NODES, Nodes
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.candidates import Candidates, Continuations, Finished, Mask, normalized, possible
from specbeam.decoding.search import Known, Step
from specbeam.decoding.setup import Setup
from specbeam.drafting.policy.deferring import Deferred

NOTHING = float("-inf")
"""The bound of unknown hypotheses if there are none."""


@dataclass
class Level(Step):
    """The known part of one step of the plain search: its first beams, in their order.

    Attributes:
        candidates: the first candidates, in their order.
        expanded: which of the beams are known, bool [b].
        bound: upper bound on the score of any unknown candidate.
        complete: no candidate is unknown.
        closed: no unknown candidate is a beam, or is kept as a finished hypothesis.
        finished: the known ones of the finished hypotheses that are kept.
        best: the best continuations of the expanded beams. None if no beam is known.
        hidden: upper bound on the score of any unknown finished hypothesis up to this length.
    """

    candidates: Candidates
    expanded: Mask
    bound: float
    complete: bool
    closed: bool
    finished: Finished
    best: Continuations | None = None
    hidden: float = NOTHING

    def equals(self, other: Level) -> bool:
        """Whether as much is known of another version of this level."""
        same = len(self.candidates.nodes) == len(other.candidates.nodes) and self.complete == other.complete
        bounds = self.bound == other.bound and self.hidden == other.hidden
        return same and bounds and np.array_equal(self.finished.nodes, other.finished.nodes)


class LazyBeamSearch(BeamSearch):
    """A :class:`BeamSearch` that can also take steps where only some of the beams are known.

    Decisions stay when more beams become known: the candidates and the beams of a level only grow.

    Attributes:
        levels: the last step that is known completely, and those after it. Empty while no beam is deferred.
        stops: whether the plain search stops after the last level. None if unknown hypotheses decide that.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.levels: list[Level] = []
        self.stops: bool | None = None

    @staticmethod
    def fits(setup: Setup) -> bool:
        """Whether beams may be left out: no score rises, nothing is drawn, and nothing counts all beams.

        Draft sizes that were asked for are sizes below all beams.
        """
        options, process = setup.options, setup.selector.process
        sizes = options.draft_sizes.values()
        return (
            options.bound_rule
            and options.num_beams > 1
            and options.num_beam_groups == 1
            and options.early_stopping is not True  # which counts finished hypotheses
            and options.prefix_allowed_tokens_fn is None
            and all(size is None for size in sizes)
            and not (options.samples or process.raises or process.functions)
        )

    def defer(self) -> None:
        """Begin to defer beams."""
        none, expanded = self.candidates_at(self.beams[:0], self.scores[:0]), np.zeros(self.num_beams, bool)
        now = Level(self.length, self.beams, self.scores, none, expanded, NOTHING, True, True, self.finished)
        self.levels = [now]
        self._decide()

    def restart(self) -> None:
        """Go on with all beams from the last step that is known completely."""
        if self.levels:
            level = self.levels[0]
            self.beams, self.scores = level.beams, level.scores
            self.length, self.finished = level.length, level.finished
            self.levels = []

    def advance(self, known: Known, new: Nodes) -> Sequence[Step]:
        if not self.levels:
            return super().advance(known, new)
        first, lengths = self.levels[0].length, self.tree.depths(new) + 1 - self.tree.prompt_length
        evaluated, index, changed = {*(lengths - first).tolist()}, int(lengths.min()) - first, False
        while index < len(self.levels) and self._stops(level := self.levels[index]) is False:
            changed |= index in evaluated
            index += 1
            if not changed:
                continue
            before = self.levels[index] if index < len(self.levels) else None
            self._expand(level, known)
            if before is not None and before.closed:
                after = replace(before)
            elif level.best is not None:
                after = self._next(level, level.best, before)
            else:
                break
            self._compete(level, after)
            changed = before is None or not after.equals(before)
            if changed:
                self.levels[index : index + 1] = [after]
        del self.levels[index + 1 :]  # with more known, the search may be found to stop earlier
        self._decide()
        return self._close()

    def _close(self) -> list[Level]:
        """Drop the levels before the last one that is known completely. Return the levels that became certain."""
        open_levels = [] if self.done else [index for index, level in enumerate(self.levels) if not level.closed]
        last = open_levels[0] - 1 if open_levels else len(self.levels) - 1
        self.left_out += sum(self.num_beams - int(level.expanded.sum()) for level in self.levels[:last])
        closed = self.levels[1 : last + 1]
        if not self.done:
            self.levels = self.levels[last:]
            if not open_levels:
                self.restart()
        return closed

    def _expand(self, level: Level, known: Known) -> None:
        """Take in the continuations of the beams that became known."""
        new = ~level.expanded
        new[new] = known.among(level.beams[new])
        if new.any():
            self.beams, self.scores = level.beams, level.scores
            best = self._best(known.at(level.beams[new]), np.flatnonzero(new))
            level.best = best if level.best is None else level.best.merged_with(best, self.num_candidates)
            level.expanded = level.expanded | new

    def _next(self, level: Level, best: Continuations, before: Level | None) -> Level:
        """The part of the next level that the best continuations of a level's expanded beams decide.

        Args:
            before: the part that was known before.
        """
        complete, bound = bool(level.expanded.sum() == self.num_beams), NOTHING
        if not complete:
            bound = self._unknown(level)
            best = best.take(slice(int(np.count_nonzero(best.scores > bound))))
            complete = len(best.scores) >= self.num_candidates
        candidates = self._grown(level, best, None if before is None else before.candidates)
        length = level.length + 1
        if complete:
            survivors, scores = self._survivors(candidates)
        else:
            unended = candidates.first if length == self.max_new_tokens else ~candidates.ended  # as in _survivors
            survivors = np.flatnonzero(unended & candidates.possible)[: self.num_beams]  # ended ones may precede others
            scores = candidates.scores[survivors]
        beams = candidates.nodes[survivors]
        closed = complete or len(beams) >= self.num_beams
        expanded = np.zeros(len(beams), bool)
        after = Level(length, beams, scores, candidates, expanded, bound, complete, closed, level.finished)
        if before is not None and np.array_equal(before.beams, beams[: len(before.beams)]):
            after.best = before.best
            expanded[: len(before.beams)] = before.expanded
        return after

    def _unknown(self, level: Level) -> float:
        """Upper bound on continuations of the beams of this level that are unknown, or not expanded."""
        unknown = level.bound if len(level.beams) < self.num_beams else NOTHING
        return max([unknown, *level.scores[~level.expanded][:1].tolist()])

    def _grown(self, level: Level, best: Continuations, before: Candidates | None) -> Candidates:
        """The candidates that were known before, and then the new ones below a level's beams."""
        if before is not None and len(before.nodes) == len(best.scores):
            return before
        new = best.take(slice(0 if before is None else len(before.nodes), None))
        more = self.candidates_at(new.add(self.tree, level.beams), new.scores)
        return more if before is None else before.followed_by(more)

    def _compete(self, level: Level, after: Level) -> None:
        """Let the known candidates of a level compete with the finished hypotheses of the level before it."""
        after.finished, after.hidden = level.finished, level.hidden
        if not after.complete and after.candidates.first.sum() < self.num_beams:
            penalty = after.finished.length_penalty
            after.hidden = max(after.hidden, float(normalized(np.float32(after.bound), after.length, penalty)))
        if after.candidates.any_ended:
            after.finished = level.finished.copy()
            after.finished.compete(after.candidates, after.length)

    def _stops(self, level: Level) -> bool | None:
        """Whether the plain search stops after a level. None if unknown hypotheses decide that."""
        if level is self.levels[0]:
            return False
        if level.length == self.max_new_tokens or (level.complete and bool(level.candidates.ended.all())):
            return True
        if not len(level.beams):
            return None
        finished, best, nothing_hidden = level.finished, level.scores[0], level.hidden == NOTHING
        if self.only_possible and not possible(best):
            return True
        if finished.settled(best, level.length, self.max_new_tokens):
            return True if finished.full or nothing_hidden else None
        if nothing_hidden:
            return bool(finished.scores[self.num_return_sequences - 1] > self._reach(level))
        return False if finished.hope(best, level.length, self.max_new_tokens) > level.hidden else None

    def _reach(self, level: Level) -> float:
        """Upper bound on the final score of any hypothesis that is unknown or unfinished after a level."""
        unfinished = max([NOTHING if level.closed else level.bound, *level.scores[:1].tolist()])
        return max(level.hidden, self._best_score_of(np.float32(unfinished), level.length))

    @property
    def reach(self) -> float:
        if not self.levels:
            return super().reach
        return self.levels[-1].hidden if self.stops else self._reach(self.levels[-1])

    def _decide(self) -> None:
        """Compare the known hypotheses with the bounds of the unknown ones."""
        last = self.levels[-1]
        self.finished, self.stops = last.finished, self._stops(last)
        known = bool(self.finished.scores[self.num_return_sequences - 1] > self.reach)
        self.done = known or (self.stops is True and last.hidden == NOTHING)

    @property
    def open(self) -> list[Level]:
        """The levels whose beams matter: the next level is not closed."""
        return [level for level, after in pairwise(self.levels) if not after.closed]

    @property
    def deferred(self) -> Deferred:
        """The beams that may have to be evaluated."""
        levels = [*self.open, *self.levels[-1:]] if self.stops is False else self.open
        nodes, scores, expanded = (
            np.concatenate([getattr(level, name) for level in levels]) for name in ("beams", "scores", "expanded")
        )
        lengths = np.repeat([level.length for level in levels], [len(level.beams) for level in levels])
        nodes, scores, lengths = nodes[~expanded], scores[~expanded], lengths[~expanded]
        return Deferred(nodes, scores, lengths, lengths == self.levels[-1].length)

    @property
    def settled(self) -> Nodes:
        """The beams whose next level is closed."""
        levels = [level.beams for level, after in pairwise(self.levels) if after.closed]
        return np.concatenate([NO_NODES, *levels])

    @property
    def growing(self) -> Nodes:
        """Beams, and candidates: where few of these are unfinished, others fill up the beams.

        A search that stops needs no beam of its last level. Once it was found to stop there, some may be gone: levels
        after it that were known have dropped them.
        """
        if not self.levels:
            return self.beams
        last = [] if self.stops else [self.levels[-1].beams]
        candidates = [level.candidates.nodes for level in self.levels if not level.closed]
        return np.concatenate([NO_NODES, *last, *(level.beams for level in self.open), *candidates])

    @property
    def finished_nodes(self) -> Nodes:
        """With the nodes of the first level, which are kept again if the search goes on from there."""
        if not self.levels:
            return super().finished_nodes
        first = self.levels[0].finished
        nodes = np.union1d(first.nodes[first.ended], super().finished_nodes)
        return nodes[[*map(self.tree.is_live, nodes.tolist())]]  # one may be dropped, and come back below the returned
