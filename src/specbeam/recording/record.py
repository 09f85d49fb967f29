"""What a strategy reports of its rounds: counts for the statistics, and a trace if one was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from specbeam.core.tree import NO_NODES, Nodes, Tree
from specbeam.recording.log_probs import Alternatives
from specbeam.structured.constraint_mask import ConstraintMask


class Record:
    """Counts of one request.

    Attributes:
        steps: tokens added to a sequence, or steps of beam search.
        drafted: draft tokens that the target verified.
        accepted: draft tokens that became part of the sequence, or of a beam.
        rounds: forward passes of the target that the strategy waited for.
        left_out: beams of steps that the target did not evaluate.
        skipped: rounds that skipped drafting, because it would have saved no time.
        checks: for each round with draft tokens, how many were accepted in it.
        positions: for each position after the known tokens, how many draft tokens the target verified, and how many of
            them were accepted.
        trace: of the rounds; None if it was not asked for.
    """

    def __init__(self, tree: Tree, trace: Trace | None = None) -> None:
        self.steps = self.drafted = self.accepted = self.left_out = self.rounds = self.skipped = 0
        self.checks: list[int] = []
        self.positions: list[list[int]] = []
        self.trace = trace
        self._tree = tree
        self._draft_tokens: dict[int, int] = {}  # positions of tokens that may still be accepted, by node

    def round(self, draft_tokens: Nodes = NO_NODES, skipped: bool = False, evaluated: Any = None) -> None:
        """Begin a round, in which the target verifies these draft tokens.

        Args:
            skipped: the drafter skipped it, because drafting would have saved no time.
            evaluated: the nodes of the pass, draft tokens included. None for the ends of the sequences.
        """
        self.rounds += 1
        self.skipped += skipped
        if self._draft_tokens:
            self._draft_tokens = {node: at for node, at in self._draft_tokens.items() if self._tree.is_live(node)}
        if len(draft_tokens):
            self.drafted += len(draft_tokens)
            self.checks.append(0)
            for node, parent in zip(draft_tokens.tolist(), self._tree.parents(draft_tokens).tolist(), strict=True):
                at = self._draft_tokens[node] = self._draft_tokens.get(parent, -1) + 1
                if at == len(self.positions):
                    self.positions.append([0, 0])
                self.positions[at][0] += 1
        if self.trace is not None:
            self.trace.begin_round(draft_tokens, evaluated)

    def step(self, nodes: Any, scores: Any = None) -> None:
        """Record one step: the sequences now end at these nodes. A single sequence is one beam.

        Args:
            scores: of the sequences. None for the sums of their log-probabilities.
        """
        self.steps += 1
        self._accept(nodes)
        if self.trace is not None and len(nodes):
            self.trace.step(nodes, self._tree.scores(nodes) if scores is None else scores)

    def ahead(self, nodes: Nodes, scores: Any) -> None:
        """Record the known beams of a step that is not final yet, int64 [n], and their scores, float32 [n].

        They are the step's first beams, in its order. The trace has each of them once.
        """
        self._accept(nodes)
        if self.trace is not None:
            self.trace.ahead(nodes, scores)

    def acceptance_histogram(self) -> list[int] | None:
        """How many rounds with draft tokens accepted 0 of them, 1, 2, and so on; None without such rounds."""
        return np.bincount(self.checks).tolist() if self.checks else None

    def evaluated(self, num_beams: int) -> float | None:
        """The share of the beams of all steps that the target evaluated; None without beams, or without a step."""
        return 1 - self.left_out / (num_beams * self.steps) if num_beams > 1 and self.steps else None

    def draft_note(self) -> str | None:
        """Why a drafter proposed no tokens, or hardly any; None if it was used, and before the first round."""
        if not self.rounds:
            return None
        if not self.drafted:
            if self.skipped:
                return "draft proposed no tokens: that would have saved no time"
            return "draft proposed no tokens: it found no likely continuation"
        if 2 * self.skipped > self.rounds:
            return f"draft proposed no tokens in {self.skipped} of {self.rounds} passes: that would have saved no time"
        return None

    def _accept(self, beams: Any) -> None:
        if self._draft_tokens:
            accepted = self._draft_tokens.keys() & {*map(int, beams)}
            self.accepted += len(accepted)
            self.checks[-1] += len(accepted)
            for node in accepted:
                self.positions[self._draft_tokens.pop(node)][1] += 1


class Trace:
    """The rounds of a strategy. A step is in the trace once it is final, beams ahead of it as soon as they are known.

    Args:
        token_text: the text of a token.
        constraint: says which of the likeliest tokens it masks.

    Attributes:
        rounds: all of them, as :class:`specbeam.Result` has them.
    """

    def __init__(self, tree: Tree, token_text: Callable[[int], str], constraint: ConstraintMask | None = None) -> None:
        self.rounds: list[dict[str, Any]] = []
        self._tree = tree
        self._text = cache(token_text)
        self._constraint = constraint
        self._drafted: dict[int, dict[str, Any]] = {}  # all draft tokens, by node
        self._shown: set[int] = set()  # nodes that may still be dropped
        self._ended: set[int] = set()
        self._ends = {tree.prompt_length - 1: 0}  # the number of the beam that ends at a node, after the last step
        self._ahead: dict[int, int] = {}  # the same for beams whose steps were not final
        self._listed: set[int] = set()  # nodes whose likeliest next tokens are there
        self._spent: dict[str, float] = {}  # until the last round
        self._num_complete = 0  # rounds

    @property
    def is_open(self) -> bool:
        """Whether a round has begun that is not complete."""
        return self._num_complete < len(self.rounds)

    def begin_round(self, draft_tokens: Nodes, evaluated: Any) -> None:
        """Begin a round. Arguments are as for :meth:`specbeam.recording.record.Record.round`."""
        nodes = sorted(self._ends) if evaluated is None else np.unique(evaluated).tolist()
        drafted = self._draft_tokens(draft_tokens)
        self.rounds.append({"evaluated": nodes, "drafted": drafted, "steps": [], "ahead": []})

    def step(self, nodes: Any, scores: Any) -> None:
        """Add the beams of a step, by their nodes and scores."""
        beams = [self._beam(int(node), float(score)) for node, score in zip(nodes, scores, strict=True)]
        self.rounds[-1]["steps"].append(beams)
        self._ends = {int(node): i for i, node in reversed([*enumerate(nodes)])}

    def ahead(self, nodes: Nodes, scores: Any) -> None:
        """Add the known beams of a step that is not final yet. The trace has each of them once."""
        new = [i for i, node in enumerate(nodes.tolist()) if node not in self._ahead]
        self.rounds[-1]["ahead"] += [self._beam(int(nodes[i]), float(scores[i])) for i in new]
        self._ahead.update((int(nodes[i]), i) for i in new)

    def end_round(
        self,
        certain: Nodes,
        ended: Iterable[int],
        text: str,
        spent: Mapping[str, float],
        seconds: float,
        alternatives: Alternatives | None = None,
    ) -> dict[str, Any]:
        """Complete the round that is open, and return a copy of it.

        Args:
            certain: the nodes that joined the sequence to be returned.
            ended: the ends of finished hypotheses.
            text: that became final.
            spent: passes, their seconds and nodes, of all rounds so far.
            seconds: since the request was submitted.
            alternatives: the likeliest tokens after nodes, if they were asked for.
        """
        entry = self.rounds[-1]
        self._num_complete = len(self.rounds)
        new = sorted({*ended} - self._ended)
        self._ended.update(new)
        entry["ended"] = [self._token(node) | self._log_prob(node) for node in new]
        self._shown.update(new)
        entry["dropped"] = sorted(node for node in self._shown if not self._tree.is_live(node))
        entry["certain"] = certain.tolist()
        self._shown.difference_update(entry["dropped"], entry["certain"])
        if alternatives is not None:
            beams = [*entry["ahead"], *(beam for step in entry["steps"] for beam in step)]
            listed = [node for node in dict.fromkeys(beam["after"] for beam in beams) if node not in self._listed]
            entry["likeliest"] = [{"after": node, "tokens": self._likeliest(node, alternatives)} for node in listed]
            self._listed.update(listed)
        entry["text"] = text
        own = {name: now - self._spent.get(name, 0) for name, now in spent.items()}
        entry["pass"] = {**own, "seconds": seconds}
        self._spent = {**spent}
        # Draft tokens of a round may still be accepted later: the caller's copy stays as it is.
        return {**entry, "drafted": [{**draft_token} for draft_token in entry["drafted"]]}

    def _likeliest(self, node: int, alternatives: Alternatives) -> list[dict[str, Any]]:
        """The likeliest tokens after a node. Under a constraint, whether it masks each."""
        log_probs = alternatives.after(node)
        likeliest = {i: {"token_id": i, "text": self._text(i), "log_prob": value} for i, value in log_probs.items()}
        if self._constraint is not None:
            for i, allowed in self._constraint.allows(self._tree, node, log_probs).items():
                likeliest[i]["masked"] = not allowed
        return [*likeliest.values()]

    def _token(self, node: int) -> dict[str, Any]:
        token = int(self._tree.tokens(node))
        return {"token_id": token, "text": self._text(token), "node": node, "after": int(self._tree.parents(node))}

    def _log_prob(self, node: int) -> dict[str, Any]:
        return {"log_prob": float(self._tree.log_probs(node))}

    def _draft_tokens(self, draft_tokens: Nodes) -> list[dict[str, Any]]:
        number = {node: i for i, node in enumerate(draft_tokens.tolist())}
        traced = []
        for node in number:
            draft_token = self._token(node)
            parent = draft_token["after"]
            draft_token |= {"parent": number.get(parent), "beam": self._number(parent), "accepted": False}
            traced.append(draft_token)
            self._drafted[node] = draft_token
        self._shown.update(number)
        return traced

    def _beam(self, node: int, score: float) -> dict[str, Any]:
        draft_token = self._drafted.get(node)
        if draft_token is not None:
            draft_token["accepted"] = True
        if self._tree.is_live(node):  # a beam may be dropped before its step is final
            self._shown.add(node)
        beam = self._token(node) | self._log_prob(node)
        return beam | {"beam": self._number(beam["after"]), "drafted": draft_token is not None, "score": score}

    def _number(self, node: int) -> int | None:
        return self._ends.get(node, self._ahead.get(node))
