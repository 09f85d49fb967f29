"""A request's options as selection requests, by which a backend chooses tokens."""

from __future__ import annotations

import secrets
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.core.selection import Noise, SelectionRequest
from specbeam.core.tree import Nodes, NodeStates, Tree
from specbeam.logits.processors import Processors
from specbeam.logits.stopping import Stopping
from specbeam.options.declared import SHAPING
from specbeam.options.options import Options


class Selector:
    """Makes the selection requests of one request.

    Args:
        process: the request's processors.
        warpers: shape the distribution that is sampled from (:func:`warpers_of`).
        seed: of the noise for draws, below 2**64. None if nothing is drawn.
        step_by_step: each selection is looked at before the next one is made.
    """

    def __init__(
        self,
        process: Processors,
        warpers: tuple[tuple[str, Any], ...] = (),
        seed: int | None = None,
        step_by_step: bool = False,
    ) -> None:
        self.process = process
        self.step_by_step = step_by_step
        self.warpers = warpers
        self.seed = seed
        self._is_plain = process.is_plain and not self.warpers and seed is None
        self._plain: dict[tuple[Any, ...], SelectionRequest] = {}  # the same at all nodes, by their wants
        self._checksums = NodeStates(lambda _: 0, lambda sum, token: zlib.crc32(token.to_bytes(8, "little"), sum))

    def __call__(
        self, tree: Tree, nodes: Any, draft_tokens: Any = (), streams: Any = 0, **wants: Any
    ) -> SelectionRequest:
        """The selection request at nodes, int [n].

        Args:
            draft_tokens: which of the nodes are draft tokens. The target may never choose such a sequence, and no token
                may be allowed there.
            streams: of the noise, a number or int [n]. Sequences with different numbers are drawn independently.
            wants: attributes of the request, such as ``top``.

        Raises:
            SpecbeamError: a function of the caller returned something that it may not return.
        """
        if self._is_plain:
            key = tuple(wants.items())
            if key not in self._plain:
                self._plain[key] = SelectionRequest(**wants)
            return self._plain[key]
        noise = None
        if self.seed is not None:
            positions = np.asarray(tree.depths(nodes) + 1, dtype=np.uint32)
            numbers = np.zeros_like(positions)
            numbers[:] = streams
            noise = Noise(self.seed, numbers, positions)
        changes = self.process(tree, nodes, draft_tokens)
        renormalizes = self.process.of_checkpoint.renormalizes and bool(wants.get("normalize"))  # else without effect
        return SelectionRequest(**changes, warpers=self.warpers, noise=noise, renormalize=renormalizes, **wants)

    def ahead(self, tree: Tree, node: int, stop: Stopping) -> int:
        """For how many further tokens below a node the same request holds, and only an end token ends the sequence."""
        return 0 if self.step_by_step else min(self.process.unchanged(tree, node), stop.unchanged(tree, node))

    def streams(self, tree: Tree, nodes: Nodes) -> NDArray[np.uint32] | int:
        """Checksums of the sequences' new tokens, uint32 [n], so that a beam's noise does not depend on its rank.

        0 if nothing is drawn.
        """
        if self.seed is None:
            return 0
        return np.array([self._checksums.at(tree, node) for node in nodes.tolist()], dtype=np.uint32)


def warpers_of(options: Options) -> tuple[tuple[str, Any], ...]:
    """The warpers that options ask for."""
    values = ((name, getattr(options, name)) for name in SHAPING)
    return tuple((name, value) for name, value in values if value not in (None, SHAPING[name]))


def some_seed(seed: int | None) -> int:
    """The seed of a request's draws: the one that was given, or any."""
    return secrets.randbits(63) if seed is None else seed
