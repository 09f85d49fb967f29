"""The output of a request for its caller: pieces of text that are certain, finished sequences, and the result."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from collections.abc import Sequence as Sequential
from typing import Any

from specbeam.core.selection import Selection
from specbeam.core.strategy import Hypothesis
from specbeam.core.tree import Nodes
from specbeam.decoding.setup import Setup
from specbeam.engine.costs import MIN_PASS_SECONDS
from specbeam.engine.model_state import ModelState
from specbeam.engine.request import Request
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel
from specbeam.options.declared import OBJECTS, names_where
from specbeam.recording.log_probs import AllowedMass, Alternatives, NodeLogProbs
from specbeam.results import Piece, Result, Sequence, Stats, TopLogProbs
from specbeam.text.detokenizer import TextStream

logger = logging.getLogger("specbeam")

WHY_FEWER = (
    "there are no more, or beams went to other spellings of these texts in tokens, so ask for more beams than texts"
)
FORBIDDING = names_where(lambda option: option.forbids)
MAY_FORBID = dict.fromkeys((*OBJECTS, "eos_token_id", *FORBIDDING, "length_penalty", "max_new_tokens"))
"""The options that can leave no text possible. ``length_penalty`` can put all scores out of range."""


class Output:
    """Fills a request's handle.

    Args:
        request: the handle.
        inputs: all that the result depends on.

    Attributes:
        alternatives: the likeliest tokens after each node, if they were asked for.
        allowed_mass: after each node, for a constraint that measures.
        node_log_probs: both, as far as they are wanted.
    """

    def __init__(self, lm: LanguageModel, setup: Setup, request: Request, inputs: dict[str, Any]) -> None:
        self._lm = lm
        self._setup = setup
        self._request = request
        self._inputs = inputs
        self._text = TextStream(setup.stop.new_text, setup.stop.begin(setup.tree))
        self._streamed = setup.tree.prompt_length  # tokens that were handed out
        k = setup.options.top_logprobs
        self.alternatives = None if k is None else Alternatives(setup.tree, k)
        constraint = setup.selector.process.constraint
        self.allowed_mass = AllowedMass(setup.tree) if constraint is not None and constraint.measures else None
        wanted: tuple[NodeLogProbs[Any] | None, ...] = (self.alternatives, self.allowed_mass)
        self.node_log_probs = [one for one in wanted if one is not None]
        self._submitted = time.perf_counter()
        self._first_token: float | None = None  # seconds after submission

    def stream(self, target: ModelState, draft: ModelState | None) -> None:
        """Hand out the nodes that have become certain, and for a trace the round."""
        tree, trace = self._setup.tree, self._setup.record.trace
        nodes = tree.prefix[self._streamed :]
        if len(nodes) or (trace is not None and trace.is_open):
            tokens, log_probs, top_logprobs = self._tokens(nodes)
            text = self._take(tokens)
            rounds = self._end_round(nodes, tree.finished, text, target, draft)
            self._request.give(Piece(text, tokens, log_probs, top_logprobs, trace=rounds))

    def show(self, held: Sequential[Selection]) -> None:
        """Hand out tokens that were chosen for a sequence, before its strategy adds them to the tree.

        Args:
            held: the selections since the tip of the sequence, each of one token.
        """
        new = held[self._streamed - self._setup.tree.prefix_length :]
        tokens = [int(selection.tokens[0, 0]) for selection in new]
        self._request.give(Piece(self._take(tokens), tokens, [float(selection.log_probs[0, 0]) for selection in new]))

    def find(self, hypothesis: Hypothesis) -> None:
        """Hand out a sequence that is certain to be the next best."""
        self._request.found.append(self._sequence(hypothesis))

    def finish(self, hypotheses: list[Hypothesis], target: ModelState, draft: ModelState | None, drafted: bool) -> None:
        """Hand out the result.

        Args:
            hypotheses: best first.
            target, draft: their counts go into the statistics.
            drafted: whether there was a drafter.
        """
        if not hypotheses:
            given = [name for name in MAY_FORBID if getattr(self._setup.options, name)]
            if self._setup.selector.process.of_checkpoint.may_forbid:
                given.append(f"the model's {self._lm.generation_defaults.file}")
            says = f"no text is possible under {', '.join(given)} together: change one of them"
            raise SpecbeamError(says, option=given)
        best, *others = hypotheses
        asked, is_cut = self._setup.options.num_return_sequences, best.finish_reason in ("cancelled", "timeout")
        if len(hypotheses) < asked and self._setup.options.is_distinct and not is_cut:
            logger.warning("%d texts were asked for, and %d came: %s", asked, len(hypotheses), WHY_FEWER)
        rest = self._setup.tree.path(best.node)[self._streamed :]
        tokens, log_probs, top_logprobs = self._tokens(rest)
        text = self._take(tokens) + self._text.finish(cancelled=is_cut)
        sequences = [self._sequence(best, self._text.text), *map(self._sequence, others)]
        rounds = self._end_round(rest, [hypothesis.node for hypothesis in hypotheses], text, target, draft)
        all_rounds = None if (trace := self._setup.record.trace) is None else trace.rounds
        stats = self._stats(len(sequences[0].token_ids), target, draft, drafted)
        result = self._request.outcome = Result(sequences, stats, all_rounds, self._inputs)
        self._request.give(Piece(text, tokens, log_probs, top_logprobs, result, rounds))

    def _end_round(
        self, certain: Nodes, ended: Iterable[int], text: str, target: ModelState, draft: ModelState | None
    ) -> list[dict[str, Any]] | None:
        """The round of the trace that has ended, a list of one, or of none. None for no trace.

        Args:
            certain, ended, text: as for :meth:`Trace.end_round`.
        """
        if (trace := self._setup.record.trace) is None:
            return None
        if not trace.is_open:
            return []
        seconds = time.perf_counter() - self._submitted
        return [trace.end_round(certain, ended, text, _spent(target, draft), seconds, self.alternatives)]

    def _take(self, tokens: list[int]) -> str:
        """Note that tokens are certain. Return the text that is certain now."""
        if tokens and self._first_token is None:
            self._first_token = time.perf_counter() - self._submitted
        self._streamed += len(tokens)
        return self._text.push(tokens)

    def _sequence(self, hypothesis: Hypothesis, text: str | None = None) -> Sequence:
        tree = self._setup.tree
        nodes = tree.path(hypothesis.node)[tree.prompt_length :]
        token_ids, log_probs, top_logprobs = self._tokens(nodes)
        allowed = None
        if self.allowed_mass is not None:
            allowed = [self.allowed_mass.after(before) for before in tree.parents(nodes).tolist()]
        if text is None:
            text = self._setup.stop.new_text.of(self._setup.stop.begin(tree), token_ids)
        log_prob = float(tree.scores(hypothesis.node))
        return Sequence(
            text,
            token_ids,
            log_probs,
            log_prob,
            hypothesis.score,
            hypothesis.finish_reason,
            top_logprobs,
            self._is_complete(hypothesis),
            allowed,
        )

    def _is_complete(self, hypothesis: Hypothesis) -> bool | None:
        """Whether a sequence satisfies the constraint. A stop string takes away from its text."""
        tree, node = self._setup.tree, hypothesis.node
        if (constraint := self._setup.selector.process.constraint) is None:
            return None
        if int(tree.tokens(node)) in self._setup.stop.eos_token_ids:
            return True
        return hypothesis.finish_reason != "stop" and constraint.complete(tree, node)

    def _tokens(self, nodes: Nodes) -> tuple[list[int], list[float], TopLogProbs | None]:
        """Token ids and log-probabilities of nodes on one path, and of the alternatives if these were asked for."""
        tree = self._setup.tree
        tokens: list[int] = tree.tokens(nodes).tolist()
        log_probs: list[float] = tree.log_probs(nodes).tolist()
        if self.alternatives is None:
            return tokens, log_probs, None
        top_logprobs = []
        for before, token, log_prob in zip(tree.parents(nodes).tolist(), tokens, log_probs, strict=True):
            row = self.alternatives.after(before)
            # A token has one log-probability, which beam search may round differently from the row.
            top_logprobs.append({**row, token: log_prob} if token in row else {**row})
        return tokens, log_probs, top_logprobs

    def _stats(self, new_tokens: int, target: ModelState, draft: ModelState | None, drafted: bool) -> Stats:
        record = self._setup.record
        seconds = max(time.perf_counter() - self._submitted, MIN_PASS_SECONDS)
        return Stats(
            prompt_tokens=len(self._request.prompt_ids),
            new_tokens=new_tokens,
            seconds=seconds,
            tokens_per_second=new_tokens / seconds,
            time_to_first_token=self._first_token,
            forward_passes=target.passes + (0 if draft is None else draft.passes),
            target_passes=target.passes,
            draft_passes=0 if draft is None else draft.passes,
            target_seconds=target.seconds,
            draft_seconds=0.0 if draft is None else draft.seconds,
            nodes_evaluated=target.nodes,
            peak_slots=target.peak,
            drafted=record.drafted,
            accepted=record.accepted,
            acceptance_rate=record.accepted / record.drafted if record.drafted else None,
            steps_per_target_pass=record.steps / target.completed if target.completed else None,
            peak_memory=self._lm.backend.peak_memory(),
            precision=self._lm.precision,
            draft_note=record.draft_note() if drafted else None,
            reused_tokens=target.slots.reused,
            acceptance_histogram=record.acceptance_histogram(),
            evaluated_beams=record.evaluated(self._setup.options.num_beams),
            acceptance_by_position=record.positions or None,
        )


def _spent(target: ModelState, draft: ModelState | None) -> dict[str, float]:
    """A request's passes so far, its share of their seconds, and the nodes that the target evaluated for it."""
    draft_passes, draft_seconds = (0, 0.0) if draft is None else (draft.passes, draft.seconds)
    return {
        "target_passes": target.passes,
        "draft_passes": draft_passes,
        "target_seconds": target.seconds,
        "draft_seconds": draft_seconds,
        "nodes": target.nodes,
    }
