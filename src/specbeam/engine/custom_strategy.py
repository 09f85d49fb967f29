"""User-defined strategies. What they yield and return is checked, and their errors name them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from specbeam import plugins
from specbeam.core.strategy import DeadEnd, Evaluate, Hypothesis, Strategy
from specbeam.decoding.setup import MakeStrategy, Setup
from specbeam.drafting.drafter import Drafter
from specbeam.errors import PluginError, SpecbeamError, not_allowed, shown

OURS = "specbeam."
"""The modules whose strategies are no user's: they let a caller's errors through as they are."""


def load_strategy(given: Any) -> MakeStrategy | None:
    """The strategy that a caller means: a function, or the text that names one."""
    if isinstance(given, str):
        given = plugins.resolve(given, "strategy")
    if given is None or isinstance(given, CustomStrategy):
        return given
    if not callable(given):
        allowed = "a function of the setup and the drafter, module:name, or the name of an entry point"
        raise not_allowed("strategy", given, allowed)
    if not plugins.takes(given, 2):
        raise SpecbeamError(
            f"the strategy {plugins.described(given)} takes {plugins.parameters(given)}, but it is called with the "
            "setup and the drafter: give it these two parameters, or call it first if it makes a strategy"
        )
    make: MakeStrategy = given
    return make if plugins.qualified_name(given).startswith(OURS) else CustomStrategy(given)


class CustomStrategy:
    """A user-defined strategy. An error in it becomes one that names it, and ends its request alone.

    Args:
        make: a function of the setup and the drafter or None that returns the strategy.
    """

    def __init__(self, make: MakeStrategy) -> None:
        self._make = make

    @property
    def name(self) -> str:
        """``module:name``."""
        return plugins.qualified_name(self._make)

    def __call__(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        tree, answer = setup.tree, None
        checked = len(tree)  # nodes with a token of the vocabulary
        problem: SpecbeamError | None = None
        strategy = self._begin(setup, drafter)
        while True:
            try:
                step = strategy.send(answer) if problem is None else strategy.throw(problem)
            except StopIteration as finished:
                checked = self._check_tokens(setup, checked)
                return self._check_end(setup, finished.value)
            except (DeadEnd, SpecbeamError):
                raise
            except Exception as error:
                raise plugins.failed(f"the strategy {plugins.described(self._make)}", error) from error
            checked = self._check_tokens(setup, checked)
            if isinstance(step, Hypothesis):
                self._check_hypothesis(setup, step)
            elif not isinstance(step, Evaluate):
                raise self._wrong(f"yielded {plugins.named(step)}", "yield Evaluate(nodes, request), or a Hypothesis")
            elif not step.drafting:
                self._check_nodes(setup, step.nodes)
            try:
                answer, problem = (yield step), None
            except SpecbeamError as thrown:
                problem = thrown

    def _begin(self, setup: Setup, drafter: Drafter | None) -> Strategy:
        try:
            found: Any = self._make(setup, drafter)
        except Exception as error:
            raise plugins.failed(f"the strategy {plugins.described(self._make)}", error) from error
        if isinstance(found, Generator):
            return found
        what = f"returned {plugins.named(found)}, and no generator"
        if callable(found):
            raise self._wrong(what, "it makes a strategy, so call it: strategy=f(...) in place of strategy=f")
        raise self._wrong(what, "ask for selections with yield, as in: selection = yield Evaluate(nodes, request)")

    def _check_tokens(self, setup: Setup, checked: int) -> int:
        """Check the tokens of nodes that are new in the tree. Returns the number of nodes."""
        new = np.arange(checked, len(setup.tree))
        tokens, size = setup.tree.tokens(new), setup.selector.process.vocab_size
        if (strange := tokens[(tokens < 0) | (tokens >= size)]).size:
            raise self._wrong(
                f"added the token {strange[0]} to the tree, and the vocabulary has {size:,}",
                f"add token ids from 0 to {size - 1}",
            )
        return checked + len(new)

    def _check_nodes(self, setup: Setup, nodes: Any) -> None:
        tree, asked = setup.tree, np.asarray(nodes)
        if asked.dtype.kind not in "iu" or asked.ndim != 1 or not asked.size:
            raise self._wrong(f"asked for the nodes {shown(nodes)}", "give a list of at least one node of the tree")
        if (strange := asked[(asked < 0) | (asked >= len(tree))]).size:
            raise self._wrong(
                f"asked for the node {strange[0]}, and the tree has the nodes 0 to {len(tree) - 1}",
                "give nodes, as tree.tip and tree.append return them, and no tokens",
            )
        if int(tree.depths(asked).max()) >= (maximum := setup.stop.max_length):
            raise self._wrong(
                f"goes on after {maximum} tokens, all that max_new_tokens or the context allows",
                "end a sequence where setup.stop(tree, node) gives a reason",
            )

    def _check_end(self, setup: Setup, found: Any) -> list[Hypothesis]:
        """Check what the strategy returned."""
        instead = "return a list of Hypothesis(node, score, finish_reason), the best first"
        if not isinstance(found, list | tuple):
            raise self._wrong(f"returned {plugins.named(found)}", instead)
        if not found:
            raise self._wrong("returned no hypothesis", f"{instead}, or change the options that leave no text possible")
        for one in found:
            if not isinstance(one, Hypothesis):
                raise self._wrong(f"returned a list with {plugins.named(one)}", instead)
            self._check_hypothesis(setup, one)
        return [*found]

    def _check_hypothesis(self, setup: Setup, one: Hypothesis) -> None:
        size = len(setup.tree)
        if not isinstance(one.node, int | np.integer) or not 0 <= one.node < size:
            raise self._wrong(f"returned the node {shown(one.node)}", f"give the last node of a sequence, below {size}")

    def _wrong(self, what: str, instead: str) -> PluginError:
        return PluginError(f"the strategy {plugins.described(self._make)} {what}: {instead}")
