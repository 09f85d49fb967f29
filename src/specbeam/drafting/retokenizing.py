"""Draft tokens of a model with another vocabulary, by way of text (universal assisted generation)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from specbeam.core.selection import SelectionRequest
from specbeam.core.strategy import Evaluate
from specbeam.core.tree import Nodes, Tree
from specbeam.drafting.drafter import Chains, Proposal
from specbeam.drafting.policy import SKIPPED, DraftTokens
from specbeam.drafting.policy.controller import Controller
from specbeam.errors import SpecbeamError
from specbeam.models.model import LanguageModel
from specbeam.text.detokenizer import INCOMPLETE, Detokenizer, TextEnd, shared_length

MIN_WINDOW_CHARACTERS = 64
"""Encode at least this much text again."""


@dataclass(frozen=True)
class Place:
    """Where the text down to a node of the target's tree stands in the draft's tree.

    Attributes:
        end: of the text, as the target's tokens make it.
        node: of the draft's tree. The path to it is the text without its unread part.
        encoded: the end of that path's text, with the draft's token ids.
        unread: text that is not in the draft's tree yet.
    """

    end: TextEnd
    node: int
    encoded: EncodedEnd
    unread: str = ""


class RetokenizingDrafter:
    """Continues the text at a tip greedily with the draft.

    The text is encoded with the draft's tokenizer, and the continuation with the target's. The second encoding may be
    a poor draft, but never leads to a wrong text, because draft tokens are verified. Each round decodes and encodes the
    end of the text only, where the target's new tokens are.

    Args:
        tree, chains, controller: of the request.

    Raises:
        SpecbeamError: a tokenizer does not reproduce the prompt from its tokens, so the draft would continue another
            text.
    """

    def __init__(
        self, tree: Tree, chains: Chains, controller: Controller, target: LanguageModel, draft: LanguageModel
    ) -> None:
        if target.tokenizer is None or draft.tokenizer is None:
            raise SpecbeamError(
                f"draft and target have different vocabularies ({draft.backend.vocab_size} and "
                f"{target.backend.vocab_size} tokens), which without their tokenizers cannot be bridged"
            )
        self.text_tree = tree
        self.chains = chains
        self.controller = controller
        self.encode, self.decode = both_ways(target)
        self.draft_encode, self.draft_decode = both_ways(draft)
        self.context = draft.backend.context_length
        prompt = self.decode(tree.tokens(tree.prefix).tolist())
        for name, lm in (("target", target), ("draft", draft)):
            encode, decode = both_ways(lm)
            if decode(encode(prompt)) != prompt:
                raise SpecbeamError(
                    "draft and target have different tokenizers, and text cannot bridge them: the "
                    f"{name}'s does not give back the prompt. Use a draft with the target's tokenizer, or a lookup "
                    "(ngram, suffix)"
                )
        ids = self.draft_encode(prompt)
        # The draft's BOS token, if its texts begin with one.
        bos: list[int] = [bos for bos in draft.tokenizer("a").input_ids[:1] if bos == draft.tokenizer.bos_token_id]
        self.tree = Tree([*bos, *ids, 0][:1])  # a prompt without any text still needs a root
        self._before_text = len(bos) - 1  # the node before the first token of each text; -1 is the root's parent
        self._detokenizer = Detokenizer(self.decode)
        self._places: dict[int, Place] = {}  # by node of the target's tree: of the last tips, which all later are below

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        width, depth = self.controller.shape(len(tips))
        if not depth:
            return SKIPPED
        tips = np.unique(tips)
        if not self._places:
            self._places = {self.text_tree.prompt_length - 1: self._place_of_prompt()}
        self._places = {tip: self._read(tip, depth) for tip in tips.tolist()}
        continuable = {tip: place for tip, place in self._places.items() if self._can_continue(place, depth)}
        if not continuable:
            return DraftTokens()
        places = self._places.values()
        # New text may change the tokens of a window, so the shared prefix must not grow into it.
        windows = [self._above(place.node, len(place.encoded.ids) - place.encoded.apart) for place in places]
        self.tree.keep([*(place.node for place in places), *(max(node, 0) for node in windows)])
        frontier = np.array([place.node for place in continuable.values()])
        tokens: list[NDArray[np.int64]] = []
        for _ in range(depth):
            selection = yield Evaluate(frontier, SelectionRequest(), drafting=True)
            tokens.append(selection.tokens[:, 0])
            frontier = self.tree.draft(frontier, tokens[-1])
        continued = dict(zip(continuable, np.stack(tokens, axis=1).tolist(), strict=True))
        chains = [
            [self._continuation(continuable[tip].encoded, continued[tip])] if tip in continuable else []
            for tip in tips.tolist()
        ]
        return self.chains.draft(tips, chains, width)

    def _can_continue(self, place: Place, depth: int) -> bool:
        """The text ends with a character, and the draft's context holds this many more tokens."""
        length = int(self.tree.depths(place.node)) + 1
        return not place.end.text.endswith(INCOMPLETE) and length + depth <= self.context

    def _read(self, tip: int, depth: int) -> Place:
        """The place of a tip. The new text goes into the draft's tree, if the draft can continue it."""
        place = self._arrive(tip)
        if not place.unread or not self._can_continue(place, depth):
            return place
        node, encoded = self._put(place.node, place.encoded, place.unread)
        return Place(place.end, node, encoded)

    def _arrive(self, node: int) -> Place:
        """The place of a node of the target's tree. Text after its nearest known ancestor is unread."""
        path = []
        while node not in self._places:
            path.append(node)
            node = int(self.text_tree.parents(node))
        place = self._places[node]
        for node in reversed(path):
            end = self._detokenizer.push(place.end, int(self.text_tree.tokens(node)))
            place = self._places[node] = replace(place, end=end, unread=place.unread + end.added)
        return place

    def _place_of_prompt(self) -> Place:
        tokens: list[int] = self.text_tree.tokens(np.arange(self.text_tree.prompt_length)).tolist()
        end = self._detokenizer.end_of(tokens)
        text = self.decode(tokens)
        node, encoded = self._put(self._before_text, EncodedEnd(), text[: len(text) - len(end.unsettled)])
        return Place(end, node, encoded)

    def _put(self, node: int, before: EncodedEnd, new: str) -> tuple[int, EncodedEnd]:
        """Put new text into the draft's tree, after text that ends at a node. Return its last node and its end."""
        if extended := extend(self.draft_encode, before, new):
            after, unchanged = extended
            above, ids = self._above(node, len(before.ids) - unchanged), after.ids[unchanged:]
            if above < 0 and ids[:1] == tuple(self.tree.tokens([0]).tolist()):
                above, ids = 0, ids[1:]
            if above >= 0:
                return self._descend(above, ids), shorten(self.draft_encode, after)
        # The tokens before the window would change, or the root. These must stay, so the new text has its own tokens.
        ids = tuple(self.draft_encode(new))
        return self._descend(max(node, 0), ids), shorten(self.draft_encode, EncodedEnd(new, ids))

    def _above(self, node: int, levels: int) -> int:
        for _ in range(levels):
            node = int(self.tree.parents(node))
        return node

    def _descend(self, node: int, ids: tuple[int, ...]) -> int:
        for token in ids:
            node = int(self.tree.draft(node, token)[0])
        return node

    def _continuation(self, end: EncodedEnd, more: list[int]) -> list[int]:
        """The target's tokens for the draft's continuation."""
        ids = [*end.ids]
        new = self.draft_decode(ids + more)[len(self.draft_decode(ids)) :].rstrip(INCOMPLETE)
        before, extended = self.encode(end.text), self.encode(end.text + new)
        return extended[len(before) :] if extended[: len(before)] == before else self.encode(new)


def both_ways(lm: LanguageModel) -> tuple[Callable[[str], list[int]], Callable[..., str]]:
    """Encode and decode with special tokens written out, and none added."""
    return (
        lambda text: lm.tokenizer(text, add_special_tokens=False, verbose=False).input_ids,
        partial(lm.decode, skip_special_tokens=False),
    )


@dataclass(frozen=True)
class EncodedEnd:
    """The end of a text, and its token ids.

    Attributes:
        text: the window: the last characters, as many as are encoded again. At first the whole text.
        ids: of the window alone.
        apart: the number of first ids that the whole text may not have. It has all ids after them.
    """

    text: str = ""
    ids: tuple[int, ...] = ()
    apart: int = 0


def extend(encode: Callable[[str], list[int]], end: EncodedEnd, new: str) -> tuple[EncodedEnd, int] | None:
    """The end of the text after new text, and how many ids of the end before stay as they are.

    None if the new text changes ids before the window.
    """
    ids = tuple(encode(end.text + new))
    unchanged = shared_length([end.ids, ids])
    return (EncodedEnd(end.text + new, ids, end.apart), unchanged) if unchanged >= end.apart else None


def shorten(encode: Callable[[str], list[int]], end: EncodedEnd) -> EncodedEnd:
    """Let the window begin later, if the whole text surely has at least half of its ids then."""
    length = MIN_WINDOW_CHARACTERS
    while 2 * length <= len(end.text):
        text = end.text[-length:]
        ids = tuple(encode(text))
        same = min(shared_length([ids[::-1], end.ids[::-1]]), len(end.ids) - end.apart)
        if same and 2 * same >= len(ids):
            return EncodedEnd(text, ids, len(ids) - same)
        length *= 2
    return end
