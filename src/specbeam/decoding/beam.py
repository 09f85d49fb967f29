"""Beam search and beam sampling. Hypotheses are finished by transformers' rules."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from specbeam.core.selection import NextBeams, Selection, SelectionRequest
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.core.tree import Nodes, Tree
from specbeam.decoding.candidates import (
    FORBIDDEN_SCORE,
    Candidates,
    Continuations,
    Finished,
    Mask,
    Scores,
    Top,
    forbid,
    highest_indices,
    normalized,
    possible,
)
from specbeam.decoding.search import Search
from specbeam.decoding.setup import Setup
from specbeam.logits.selector import Selector
from specbeam.logits.stopping import Stopping

ROUNDING = 1e-5
"""The relative error of comparisons in float32 is far below this."""


class BeamSearch(Search):
    """Keep the num_beams likeliest unfinished hypotheses; return the best finished ones.

    A step takes the best candidates: enough that num_beams of them are unfinished, however many end. The best
    unfinished candidates survive as the new beams. The finished candidates among the first num_beams compete for the
    num_beams finished hypotheses that are kept, by log-probability / length ** length_penalty.

    Ties are resolved in one way, whatever is known of other beams: candidates with equal scores are ranked by their
    beam, then by the score of the token alone, then by its id. Only possible hypotheses are kept as finished ones.

    Args:
        selector: makes the selection requests. With noise it is beam sampling: candidates are drawn from the softmax of
            all scores, without replacement (Kool et al. 2019, "Stochastic Beams and Where to Find Them", 2.3).
        num_return_sequences: the number of finished hypotheses to return.
        early_stopping: True stops when num_beams hypotheses are finished. False stops when the best beam, if it ended
            now, would not beat the worst of them. "never" stops when the best beam cannot beat it at any length.
        bounded: no continuation of a beam scores above the beam: candidates are taken by score, and no processor raises
            a log-probability above 0. Then a step can do without beams whose scores are too low to matter, and the
            search is over once the num_return_sequences best finished hypotheses score above the bound of every beam.
            This is the monotonicity of best-first beam search (Meister et al. 2020, 3).
        distinct: the finished hypotheses that are kept have different texts (:meth:`Stopping.text`), of equal ones the
            best. Each text counts once among the candidates, too.

    Attributes:
        num_candidates: the candidates of a step, enough that ``num_beams`` of them have not ended.
        length: of the beams, in new tokens.
        max_new_tokens: the greatest length.
        finished: the finished hypotheses that are kept.
        top: the indices of the highest scores, with ties in the search's order.
        only_possible: False for transformers' rules. By these, forbidden hypotheses are kept too where candidates are
            few, and end the search under ``early_stopping``.
    """

    top: Top = staticmethod(highest_indices)
    only_possible = True

    def __init__(
        self,
        tree: Tree,
        selector: Selector,
        stop: Stopping,
        num_beams: int,
        num_return_sequences: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        bounded: bool = True,
        distinct: bool = False,
    ) -> None:
        self.tree = tree
        self.selector = selector
        self.stop = stop
        self.num_beams = num_beams
        self.num_return_sequences = num_return_sequences
        self.bounded = bounded
        self.distinct = distinct
        self._beam_numbers = np.arange(num_beams)
        self._none_ended = np.zeros(num_beams, dtype=bool)
        self.beams: Nodes = np.full(num_beams, tree.tip)
        self.scores = np.full(num_beams, FORBIDDEN_SCORE, np.float32)
        self.scores[0] = 0.0  # at first all beams are the prompt: only one counts
        self.num_candidates = max(2, 1 + len(stop.eos_token_ids)) * num_beams
        self.length = 0
        self.max_new_tokens = stop.max_length - tree.prompt_length
        self.finished = Finished(num_beams, length_penalty, early_stopping, self.top)
        self.num_reported = 0
        self.needs_rows = False
        self.done = False

    @classmethod
    def of(cls, setup: Setup, **others: Any) -> Self:
        """The search that a request's options ask for.

        Args:
            others: arguments in place of the options' or beside them.
        """
        options = setup.options
        arguments: dict[str, Any] = {
            "num_beams": options.num_beams,
            "num_return_sequences": options.num_return_sequences,
            "length_penalty": options["length_penalty"],
            "early_stopping": options["early_stopping"],
            "bounded": options.bound_rule and not options.samples and not setup.selector.process.raises,
            "distinct": options.is_distinct,
        }
        return cls(setup.tree, setup.selector, setup.stop, **arguments | others)

    def selection_request(self, nodes: Nodes, draft_tokens: Any = ()) -> SelectionRequest:
        streams = self.selector.streams(self.tree, nodes)
        return self.selector(self.tree, nodes, draft_tokens, streams, top=self.num_candidates, normalize=True)

    def evaluation(self) -> Evaluate:
        beams, request, ahead, first = self.beams, self.selection_request(self.beams), 0, int(self.beams[0])
        if self.length and self.selector.seed is None and not self.needs_rows:
            ahead = self.selector.ahead(self.tree, first, self.stop)
        if not ahead:
            return Evaluate(beams, request)
        how = NextBeams(self.scores, self._unsettled_above(), FORBIDDEN_SCORE / 2)
        return Evaluate(beams, request, ahead=ahead, ends=self.stop.eos_token_ids, beams=how)

    def step(self, selection: Selection | None, known: Mask | None = None) -> bool:
        rows = self._beam_numbers if known is None else np.flatnonzero(known)
        missing = len(rows) < self.num_beams
        if selection is None or (missing and not self.bounded):
            return False
        if not missing:
            self.selector.process.check(self.beams, selection)
        candidates = self._candidates(selection, rows)
        if candidates is None:
            return False
        survivors, scores = self._survivors(candidates)
        if missing and not self._outrank_all_but(rows, candidates, scores[-1]):
            return False
        self.length += 1
        self.beams, self.scores = candidates.nodes[survivors], scores
        self.finished.compete(candidates, self.length)
        self.done = (candidates.any_ended and bool(candidates.ended.all())) or self._settled()
        return True

    def _candidates(self, selection: Selection, rows: NDArray[np.int64]) -> Candidates | None:
        """The best continuations of some of the beams; None if that takes all beams."""
        if selection.scores.size < self.num_beams:
            return None
        best = self._best(selection, rows)
        if selection.noise is None and self._go_on(first := best.take(slice(self.num_beams))):
            nodes, none = first.add(self.tree, self.beams), self._none_ended  # the other candidates do not matter
            return Candidates(nodes, first.scores, none, none, texts=None, any_ended=False)
        return self.candidates_at(best.add(self.tree, self.beams), best.scores)

    def _best(self, selection: Selection, rows: NDArray[np.int64]) -> Continuations:
        """The best continuations of some of the beams."""
        scores = selection.scores + self.scores[rows, None]
        ranks = scores if selection.noise is None else scores + selection.noise
        best = highest_indices(ranks.ravel(), self.num_candidates)
        tokens, log_probs = selection.tokens.ravel()[best], selection.log_probs.ravel()[best]
        return Continuations(rows[best // scores.shape[1]], tokens, scores.ravel()[best], log_probs)

    def candidates_at(self, nodes: Nodes, scores: Scores) -> Candidates:
        """Candidates at nodes, int64 [k], with their scores, float32 [k]."""
        ended = self.stop.ended(self.tree, nodes)
        any_ended = bool(ended.any())
        competing = ended & possible(scores) if self.only_possible and any_ended else ended
        texts = None
        if self.distinct:
            both = zip(nodes.tolist(), competing.tolist(), strict=True)
            texts = [self.text(node) if competes else object() for node, competes in both]
        return Candidates(nodes, scores, ended, competing, texts, any_ended)

    def _go_on(self, first: Continuations) -> bool:
        """Whether the first num_beams continuations are the new beams: none of them ends."""
        no_end = self.stop.unchanged(self.tree, int(self.beams[0])) > 0
        return no_end and self.stop.eos_token_ids.isdisjoint(first.tokens.tolist())

    def text(self, node: int) -> Hashable:
        """Equal for finished hypotheses that may not both be returned."""
        return self.stop.text(self.tree, node) if self.distinct else object()

    def _survivors(self, candidates: Candidates) -> tuple[NDArray[np.int64], Scores]:
        """Indices of the candidates that become the beams, and their scores.

        At the greatest length all candidates have ended. Groups and traces then show the best of them as beams.
        """
        scores = forbid(candidates.scores, ~candidates.first if candidates.ended.all() else candidates.ended)
        survivors = self.top(scores, self.num_beams)
        return survivors, scores[survivors]

    def _outrank_all_but(self, rows: NDArray[np.int64], candidates: Candidates, lowest: np.float32) -> bool:
        """The bound rule: the candidates down to the last survivor outrank the beams that are not among the rows.

        A continuation of such a beam scores at most what the beam scores. So it comes after all candidates that matter
        if the lowest score of the survivors is above the scores of all these beams.
        """
        if candidates.ended.all() and not (self.tree.depths(candidates.nodes) + 1 >= self.stop.max_length).all():
            return False  # the search may not be over: candidates of the other beams may go on
        others = np.delete(np.arange(self.num_beams), rows)
        return bool(lowest > self.scores[others].max())

    def _settled(self) -> bool:
        if self.finished.settled(self.scores[0], self.length, self.max_new_tokens):
            return True
        if self.only_possible and not possible(self.scores[0]):
            return True  # every possible sequence is finished
        return self.bounded and bool(self.finished.scores[self.num_return_sequences - 1] > self.reach)

    @property
    def reach(self) -> float:
        """Upper bound on the final score of any hypothesis that is unfinished now."""
        return self._best_score_of(self.scores[0], self.length) if self.bounded else float("inf")

    def _best_score_of(self, unfinished: np.float32, length: int) -> float:
        """Upper bound on the score of any continuation of a hypothesis with this log-probability and length."""
        penalty = self.finished.length_penalty
        return float(normalized(unfinished, self.max_new_tokens if penalty > 0 else length + 1, penalty))

    def _unsettled_above(self) -> float:
        """The search goes on in any case while its best beam scores above this and no beam ends.

        The rules of :meth:`_settled` compare scores by length. Between two lengths they are never stricter than at
        both.
        """
        finished, last = self.finished, self.max_new_tokens
        of_beam = self.length + 1, last + 1
        worst = finished.scores[-1] if finished.full else FORBIDDEN_SCORE
        never = finished.early_stopping == "never" and finished.length_penalty > 0
        rules = [(worst, length) for length in ((last,) if never else of_beam)]
        if self.bounded:
            best = finished.scores[self.num_return_sequences - 1]
            rules += [(best, length) for length in ((last,) if finished.length_penalty > 0 else of_beam)]
        with np.errstate(all="ignore"):
            scores, lengths = np.array(rules, dtype=np.float64).T
            lowest = float((scores * lengths**finished.length_penalty).max())
        return lowest + ROUNDING * abs(lowest)

    @property
    def finished_nodes(self) -> Nodes:
        return self.finished.nodes[self.finished.ended]

    def certain(self) -> Iterator[Hypothesis]:
        if np.count_nonzero(self.finished.possible) > self.num_reported:
            for hypothesis in self.hypotheses()[self.num_reported :]:
                if not self.done and hypothesis.score <= self.reach:
                    break
                self.num_reported += 1
                yield hypothesis

    def hypotheses(self) -> list[Hypothesis]:
        return self._texts(self.finished.possible)

    def kept(self) -> list[Hypothesis]:
        """The hypotheses to return, best first, with the forbidden ones that transformers fills up with."""
        return self._texts(self.finished.ended)

    def _texts(self, wanted: Mask) -> list[Hypothesis]:
        best = np.flatnonzero(wanted)[: self.num_return_sequences]
        ends = zip(self.finished.nodes[best].tolist(), self.finished.scores[best].tolist(), strict=True)
        return [Hypothesis(node, score, self.stop(self.tree, node) or "length") for node, score in ends]
