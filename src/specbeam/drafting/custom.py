"""User-defined drafters: a function of the sequence and the model, or a class with all that our own drafters have."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam import plugins
from specbeam.core.tree import Nodes, Tree
from specbeam.drafting.drafter import Chains, Drafter, Proposal
from specbeam.drafting.policy import DraftTokens
from specbeam.drafting.policy.controller import Controller
from specbeam.errors import PluginError, SpecbeamError
from specbeam.models.model import LanguageModel
from specbeam.system.numbers import is_integer

Propose = Callable[[list[int], LanguageModel], Sequence[int] | Sequence[Sequence[int]]]
"""A function of the token ids of a sequence, prompt included, and the model. It returns the token ids that may follow,
or several such lists, the likeliest first."""
MakeDrafter = Callable[[Tree, Chains, Controller, LanguageModel], Drafter]
"""A class of drafters. One is made for each request.

Its attribute ``looks_up`` says whether it gives the controller the length of a match, as :class:`Lookup` does.
"""


class FunctionDrafter:
    """For each tip, proposes the tokens that a function returns for its sequence.

    The controller decides before each call how many of them are worth a pass. It does not call the function where
    drafting would not pay.

    Args:
        propose: see :data:`Propose`. What it returns is checked, and an error that it raises ends the request.
    """

    def __init__(self, tree: Tree, chains: Chains, controller: Controller, lm: LanguageModel, propose: Propose) -> None:
        self.tree = tree
        self.chains = chains
        self.controller = controller
        self._lm = lm
        self._propose = propose

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        width, depth = self.controller.shape(len(tips))
        if not depth:
            return self.controller.no_draft()
        tips = np.unique(tips)
        found = [[chain[:depth] for chain in self._continuations(tip)[:width]] for tip in tips.tolist()]
        return self.chains.draft(tips, found, width)
        yield  # never reached: it makes this a generator, as every drafter's propose is

    def _continuations(self, tip: int) -> list[list[int]]:
        tokens = self.tree.tokens(self.tree.path(tip)).tolist()
        try:
            found = self._propose(tokens, self._lm)
        except Exception as error:
            raise plugins.failed(f"the drafter {plugins.described(self._propose)}", error) from error
        return self._checked(found)

    def _checked(self, found: Any) -> list[list[int]]:
        """What the function returned, as lists of token ids."""
        if hasattr(found, "tolist"):  # of NumPy or PyTorch
            found = found.tolist()
        if not isinstance(found, list | tuple):
            raise self._wrong(f"returned {plugins.named(found)}", "return a list of token ids, [] for none")
        found = [one.tolist() if hasattr(one, "tolist") else one for one in found]
        several = any(isinstance(one, list | tuple) for one in found)
        chains = [one if isinstance(one, list | tuple) else [one] for one in found] if several else [found]
        for chain in chains:
            for token in chain:
                if not is_integer(token):
                    raise self._wrong(f"proposed {plugins.named(token)}", "return whole numbers, the ids of tokens")
                if not 0 <= int(token) < (size := self._lm.backend.vocab_size):
                    raise self._wrong(
                        f"proposed the token {token}, and the vocabulary has {size:,}",
                        f"return token ids from 0 to {size - 1}, by the tokenizer of {self._lm.source}",
                    )
        return [[int(token) for token in chain] for chain in chains]

    def _wrong(self, what: str, instead: str) -> PluginError:
        return PluginError(f"the drafter {plugins.described(self._propose)} {what}: {instead}")


class CustomDrafter:
    """A drafter of a user-defined class. An error in it becomes one that names it.

    Args:
        make: the class.

    Raises:
        SpecbeamError: the class cannot be called with these arguments, or its drafter lacks an attribute.
    """

    def __init__(
        self, tree: Tree, chains: Chains, controller: Controller, lm: LanguageModel, make: MakeDrafter
    ) -> None:
        self._name = f"the drafter {plugins.qualified_name(make)}"
        self._text_tree, self._vocab_size = tree, lm.backend.vocab_size
        try:
            self._drafter = made = make(tree, chains, controller, lm)
        except Exception as error:
            raise plugins.failed(self._name, error) from error
        for name in ("tree", "controller", "propose"):
            if not hasattr(made, name):
                raise PluginError(f"{self._name} has no attribute {name}: set it as specbeam.drafting.lookup does")
        self.tree, self.controller = made.tree, made.controller

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        checked = len(self._text_tree)
        try:
            found: Any = self._drafter.propose(tips, scores)
            if isinstance(found, Generator):  # one that asks no model needs no yield
                found = yield from found
        except SpecbeamError:
            raise
        except Exception as error:
            raise plugins.failed(self._name, error) from error
        if not isinstance(found, DraftTokens):
            raise PluginError(f"{self._name} proposed {plugins.named(found)}: return DraftTokens from propose")
        tokens = self._text_tree.tokens(np.arange(checked, len(self._text_tree)))
        if (strange := tokens[(tokens < 0) | (tokens >= self._vocab_size)]).size:
            raise PluginError(
                f"{self._name} proposed the token {strange[0]}, and the vocabulary has {self._vocab_size:,}: draft "
                "with chains.draft, which leaves out such tokens, or check them"
            )
        return found
