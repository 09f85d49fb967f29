"""What a caller may give as ``draft``, and the checks that it can draft for the model."""

from __future__ import annotations

import os
import sys
from typing import Any, TypeGuard

from specbeam import plugins
from specbeam.drafting.lookup import Continued, SuffixAutomaton
from specbeam.drafting.own import MakeDrafter, Propose
from specbeam.engine.features import described
from specbeam.errors import SpecbeamError, not_allowed
from specbeam.models.model import LanguageModel
from specbeam.options.names import LOOKUPS
from specbeam.options.options import Options

Draft = LanguageModel | SuffixAutomaton | Continued | str | os.PathLike[str] | Propose | MakeDrafter
"""A draft model or its source, "ngram", "suffix", an automaton over earlier texts, one of these three for a text that
goes on from more than its prompt, or a drafter of the caller's own: a function, a class, or the text that names one."""


def load_draft(lm: LanguageModel, draft: Any) -> Any:
    """The draft that a caller means. A source of a model is loaded when it is first used with ``lm``.

    Raises:
        SpecbeamError: there is no such model and no such drafter.
    """
    if not isinstance(draft, str | os.PathLike) or draft in LOOKUPS:
        return draft
    if isinstance(draft, str) and plugins.is_own_drafter(draft):
        return plugins.resolve(draft, "drafter")
    try:
        return lm.draft_model(draft)
    except SpecbeamError as error:
        raise SpecbeamError(
            f'draft={os.fspath(draft)!r}: give "ngram", "suffix", a model or module:name; {error}', option="draft"
        ) from error


def is_lookup(draft: Any) -> TypeGuard[str | SuffixAutomaton]:
    """Whether it proposes what followed in the text so far, or in earlier texts."""
    return isinstance(draft, SuffixAutomaton) or (isinstance(draft, str) and draft in LOOKUPS)


def check_draft(lm: LanguageModel, draft: Any, options: Options) -> None:
    """Refuse a draft that does not fit the model, and options without effect beside it.

    Raises:
        SpecbeamError: says what does not fit, and what to give instead.
    """
    for name in ("draft_temperature", "draft_top_k"):
        if getattr(options, name) is not None and not isinstance(draft, LanguageModel):
            says = f"{name}={getattr(options, name)} has no effect without a draft model: leave it out"
            raise SpecbeamError(says, option=name)
    options.check_drafting(draft is not None)
    if isinstance(draft, LanguageModel):
        _check_draft_model(lm, draft)
    elif isinstance(draft, SuffixAutomaton):
        own = draft.token_ids
        if own is not None and not own.mean_the_same(lm.token_ids):
            raise SpecbeamError(
                f"the automaton has texts in the tokens of {own.source}, and {lm.source} has other tokens: make one "
                "with specbeam.suffix_automaton and this model"
            )
    elif _is_module(draft):
        raise SpecbeamError(
            f"draft is a {type(draft).__name__}, and no loaded model: give what specbeam.load returned, or "
            "specbeam.hf.wrap(model)"
        )
    elif callable(draft):
        _check_own(draft)
    elif not (draft is None or isinstance(draft, Continued) or is_lookup(draft)):
        raise not_allowed(
            "draft",
            draft,
            'a model or its source, "ngram", "suffix", the automaton that specbeam.suffix_automaton returned, or a '
            "function of your own (docs/guides/extend.md)",
        )


def _is_module(draft: Any) -> bool:
    """Whether it is a model of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(draft, torch.nn.Module)


def _check_own(draft: Any) -> None:
    if isinstance(draft, type):
        if not callable(getattr(draft, "propose", None)):
            raise SpecbeamError(
                f"the drafter {plugins.qualified_name(draft)} is a class without the method propose: write it, or give "
                "a function of the token ids so far and the model"
            )
    elif not plugins.takes(draft, 2):
        raise SpecbeamError(
            f"the drafter {plugins.described(draft)} takes {plugins.parameters(draft)}, but it is called with the "
            "token ids so far and the model: give it these two parameters"
        )


def _check_draft_model(lm: LanguageModel, draft: LanguageModel) -> None:
    ours, theirs = lm.backend.device, draft.backend.device
    if ours != theirs:
        raise SpecbeamError(
            f"the draft {draft.source} is on {theirs}, but the model on {ours}: load both on the same device"
        )
    if lm.backend.features_shape != draft.backend.features_shape:
        kinds = " and ".join(f"{one.source} {described(one.backend.features_shape)}" for one in (draft, lm))
        raise SpecbeamError(f"{kinds}: give a draft that reads the same sound")
    if (begins := lm.backend.start_token_ids) != (other := draft.backend.start_token_ids):
        raise SpecbeamError(
            f"the draft {draft.source} begins its sequences with the token ids {other}, but the model with {begins} "
            "(None: with the prompt): give a draft of the same kind"
        )
    has_encoder = begins is not None or lm.backend.features_shape is not None
    if has_encoder and not draft.shares_tokenizer(lm):
        raise SpecbeamError(
            f"the draft {draft.source} has another tokenizer than {lm.source}, and for models with an encoder "
            "they cannot be bridged: give a draft with the same tokenizer"
        )
    if lm.backend.features_shape is not None and (size := lm.backend.vocab_size) != (own := draft.backend.vocab_size):
        raise SpecbeamError(
            f"the draft {draft.source} has {own:,} tokens, but {lm.source} {size:,}: their special tokens "
            "differ, so give a draft of the same version"
        )
