"""The trace of a request: its rounds as plain data (see :class:`specbeam.Result`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np

from specbeam.core.tree import Nodes, Tree
from specbeam.recording.node_notes import Alternatives
from specbeam.structured.constraint_mask import ConstraintMask


class Trace:
    """The rounds of a strategy. A step is in the trace once it is certain, beams ahead of it as soon as they are known.

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
        self._ahead: dict[int, int] = {}  # the same for beams whose steps were not certain
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
        """Add the known beams of a step that is not certain yet. The trace has each of them once."""
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
            text: that became certain.
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
        if self._tree.is_live(node):  # a beam may be dropped before its step is certain
            self._shown.add(node)
        beam = self._token(node) | self._log_prob(node)
        return beam | {"beam": self._number(beam["after"]), "drafted": draft_token is not None, "score": score}

    def _number(self, node: int) -> int | None:
        return self._ends.get(node, self._ahead.get(node))
