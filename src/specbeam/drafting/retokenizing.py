"""Guesses of a model with another vocabulary, by way of text (universal assisted generation)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from specbeam.decoding import Evaluate
from specbeam.drafting import DECLINED, Guesses, Proposal
from specbeam.drafting.chains import Chains
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.tree import Nodes, Tree


class RetokenizingDrafter:
    """Continues the text at a tip greedily with the draft.

    The text is encoded with the draft's tokenizer, and the continuation with the target's. The second encoding may be
    a poor guess, but never leads to a wrong text, because guesses are checked.

    Args:
        tree, chains: of the request.

    Raises:
        SpecbeamError: a tokenizer does not reproduce the prompt from its tokens, so the draft would continue another
            text.
    """

    def __init__(self, tree: Tree, chains: Chains, target: LanguageModel, draft: LanguageModel) -> None:
        if target.tokenizer is None or draft.tokenizer is None:
            raise SpecbeamError(
                f"draft and target have different vocabularies ({draft.backend.vocab_size} and "
                f"{target.backend.vocab_size} tokens), which without their tokenizers cannot be bridged"
            )
        self.text_tree = tree
        self.chains = chains
        self.pace = chains.pace
        self.encode, self.decode = both_ways(target)
        self.draft_encode, self.draft_decode = both_ways(draft)
        self.context = draft.backend.context_length
        prompt = self.decode(tree.tokens(tree.trunk).tolist())
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
        self.bos: list[int] = [bos for bos in draft.tokenizer("a").input_ids[:1] if bos == draft.tokenizer.bos_token_id]
        self.tree = Tree([*self.bos, *ids, 0][:1])  # a prompt without any text still needs a root
        self._path: Nodes = self.tree.trunk.copy()  # from the root to the end of the text placed last

    def propose(self, tips: Nodes, scores: NDArray[np.float64]) -> Proposal:
        self.pace.begin_round()
        width, depth = self.pace.shape()
        if not depth:
            return DECLINED
        tips = np.unique(tips)
        texts = [self.decode(self.text_tree.tokens(self.text_tree.path(tip)).tolist()) for tip in tips.tolist()]
        drafted = [[*self.bos, *self.draft_encode(text)] for text in texts]
        able = [
            not text.endswith("\ufffd")
            and ids[:1] == self.tree.tokens([0]).tolist()
            and len(ids) + depth <= self.context
            for text, ids in zip(texts, drafted, strict=True)
        ]
        places = [self._place(ids) if ok else 0 for ids, ok in zip(drafted, able, strict=True)]
        going = np.array(places, dtype=np.int64)[able]
        if not len(going):
            return Guesses()
        self.tree.keep([0, *going.tolist()])  # with the root, so that the trunk never grows: texts may be retokenized
        tokens: list[NDArray[np.int64]] = []
        for _ in range(depth):
            logits = yield Evaluate(going, drafting=True)
            tokens.append(logits.argmax(-1).cpu().numpy())
            going = self.tree.guess(going, tokens[-1])
        continued = iter(np.stack(tokens, axis=1).tolist())
        found = [
            [self._continuation(tip, text, ids, next(continued))] if ok else []
            for tip, text, ids, ok in zip(tips.tolist(), texts, drafted, able, strict=True)
        ]
        return self.chains.guess(tips, found, width)

    def _place(self, ids: list[int]) -> int:
        """The node of the draft's tree at which this text ends. The beginning shared with the last text is reused."""
        length = min(len(ids), len(self._path))
        differs = np.flatnonzero(self.tree.tokens(self._path[:length]) != ids[:length])
        shared = int(differs[0]) if len(differs) else length
        path: list[int] = self._path[:shared].tolist()
        for token in ids[shared:]:
            path += self.tree.guess(path[-1], token).tolist()
        self._path = np.array(path)
        return path[-1]

    def _continuation(self, tip: int, text: str, ids: list[int], more: list[int]) -> list[int]:
        """The target's tokens for the draft's continuation."""
        new = self.draft_decode(ids + more)[len(self.draft_decode(ids)) :].rstrip("\ufffd")
        path: list[int] = self.text_tree.tokens(self.text_tree.path(tip)).tolist()
        whole = self.encode(text + new)
        return whole[len(path) :] if whole[: len(path)] == path else self.encode(new)


def both_ways(lm: LanguageModel) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Encode and decode with special tokens written out, and none added."""
    return (
        lambda text: lm.tokenizer(text, add_special_tokens=False, verbose=False).input_ids,
        lambda ids: lm.decode(ids, skip_special_tokens=False),
    )
