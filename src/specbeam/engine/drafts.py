"""What a caller may give as ``draft``: the checks that it can draft for the model, and the drafter that it becomes."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any, TypeGuard, cast

from specbeam import plugins
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.decoding.setup import Setup
from specbeam.drafting.custom import CustomDrafter, FunctionDrafter, MakeDrafter, Propose
from specbeam.drafting.drafter import Chains, Drafter
from specbeam.drafting.head import HeadDrafter
from specbeam.drafting.lookup import Continued, Lookup, SuffixAutomaton
from specbeam.drafting.model import ModelDrafter
from specbeam.drafting.policy import Cost
from specbeam.drafting.policy.controller import Controller, Sizes
from specbeam.drafting.resolve import resolve_draft
from specbeam.drafting.retokenizing import RetokenizingDrafter
from specbeam.engine.shared_source import described
from specbeam.errors import SpecbeamError, not_allowed, wrong_value
from specbeam.logits.selector import Selector, warpers_of
from specbeam.models.model import LanguageModel
from specbeam.options.declared import OPTIONS
from specbeam.options.options import Options

Draft = LanguageModel | SuffixAutomaton | Continued | str | os.PathLike[str] | Propose | MakeDrafter
"""A draft model or its source, "mtp", "ngram", "suffix", an automaton over earlier texts, one of the last three for a
text that goes on from more than its prompt, or a user-defined drafter: a function, a class, or the text that names
one."""


def load_draft(lm: LanguageModel, draft: Any) -> Any:
    """The draft that a caller means. A source of a model is loaded when it is first used with ``lm``.

    Raises:
        SpecbeamError: there is no such model and no such drafter.
    """

    def load(source: str | os.PathLike[str]) -> LanguageModel:
        try:
            return lm.draft_model(source)
        except SpecbeamError as error:
            raise SpecbeamError(
                f'draft={os.fspath(source)!r}: give "ngram", "suffix", "mtp", a model or module:name; {error}',
                option="draft",
            ) from error

    if isinstance(draft, str):
        return resolve_draft(draft, load)
    return load(draft) if isinstance(draft, os.PathLike) else draft


def is_lookup(draft: Draft | None) -> TypeGuard[str | SuffixAutomaton]:
    """Whether a loaded draft proposes what followed in the text so far, or in earlier texts."""
    return isinstance(draft, str | SuffixAutomaton)


def check_draft(lm: LanguageModel, draft: Any, options: Options) -> None:
    """Refuse a draft that does not fit the model, and options without effect beside it.

    Raises:
        SpecbeamError: says what does not fit, and what to give instead.
    """
    for name, option in OPTIONS.items():
        of_model = {"draft", "sampling"} <= option.needs
        if of_model and getattr(options, name) is not None and not isinstance(draft, LanguageModel):
            raise wrong_value(name, getattr(options, name), "has no effect without a draft model: leave it out")
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
            'a model or its source, "ngram", "suffix", "mtp", the automaton that specbeam.suffix_automaton returned, '
            "or a function of your own (docs/guides/extend.md)",
        )


def make_drafter(
    setup: Setup,
    lm: LanguageModel,
    draft: Draft,
    unread: int,
    draft_cost: Cost | None,
    max_rows: int,
) -> Drafter:
    """The drafter of one request.

    Args:
        draft: has passed :func:`check_draft`.
        unread: tokens, and positions of a source, that a draft model has to read before its first draft token.
        draft_cost: of the draft model's passes for this request; None for lookups.
        max_rows: the maximum number of draft tokens whose logits fit into memory.

    Raises:
        SpecbeamError: the draft has another vocabulary, which text cannot bridge.
    """
    shares_tokenizer = isinstance(draft, LanguageModel) and draft.shares_tokenizer(lm)
    is_model, is_custom = isinstance(draft, LanguageModel), callable(draft)
    looks_up = getattr(draft, "looks_up", False) if isinstance(draft, type) else not (is_model or is_custom)
    sizes = [
        Sizes(
            **setup.options.draft_sizes,
            num_tips=num_tips,
            chains=not shares_tokenizer,
            one_width=looks_up,
            max_rows=max_rows,
        )
        for num_tips in sorted({setup.options.num_beams} | ({1} if LazyBeamSearch.fits(setup) else set()))
    ]
    controller = Controller(sizes, setup.cost, setup.plain_cost, draft_cost, unread, matches=looks_up)
    if isinstance(draft, LanguageModel) and shares_tokenizer:
        return _make_model_drafter(setup, lm, draft, controller)
    chains = Chains(setup.tree, setup.selector.process, setup.stop, controller.max_draft_tokens)
    if isinstance(draft, LanguageModel):
        return RetokenizingDrafter(setup.tree, chains, controller, lm, draft)
    if isinstance(draft, type):
        return CustomDrafter(setup.tree, chains, controller, lm, draft)
    if callable(draft):
        return FunctionDrafter(setup.tree, chains, controller, lm, cast(Propose, draft))
    draft, before = (draft.draft, draft.before) if isinstance(draft, Continued) else (draft, ())
    earlier = draft if isinstance(draft, SuffixAutomaton) else None
    return Lookup(setup.tree, chains, controller, latest=draft == "ngram", earlier=earlier, before=before)


def _make_model_drafter(setup: Setup, lm: LanguageModel, draft: LanguageModel, controller: Controller) -> ModelDrafter:
    options, selector = setup.options, setup.selector
    if selector.seed is not None:  # draft tokens are drawn from a distribution of their own
        temperature = options.temperature if options.draft_temperature is None else options.draft_temperature
        top_k = options.top_k if options.draft_top_k is None else options.draft_top_k
        warpers = warpers_of(replace(options, temperature=temperature, top_k=top_k))
        selector = Selector(selector.process, warpers, selector.seed)
    added = {} if lm.tokenizer is None else lm.tokenizer.added_tokens_decoder
    special = [token_id for token_id, token in added.items() if token.special]
    about = (setup.tree, selector, setup.stop, lm.backend.vocab_size, draft.backend.context_length, special, controller)
    return ModelDrafter(*about) if draft.backend.target is None else HeadDrafter(draft.backend.target, *about)


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
    if draft.backend.target is not None and draft.backend.target is not lm.backend:
        raise SpecbeamError(
            f"the draft head {draft.source} was loaded for another model than {lm.source}: give its source as the draft"
        )
    ours, theirs = lm.backend.device, draft.backend.device
    if ours != theirs:
        raise SpecbeamError(
            f"the draft {draft.source} is on {theirs}, but the model on {ours}: load both on the same device"
        )
    if lm.backend.features_shape != draft.backend.features_shape:
        kinds = " and ".join(f"{one.source} {described(one.backend.features_shape)}" for one in (draft, lm))
        raise SpecbeamError(f"{kinds}: give a draft that reads the same audio")
    if (begins := lm.backend.start_token_ids) != (other := draft.backend.start_token_ids):
        raise SpecbeamError(
            f"the draft {draft.source} begins its sequences with the token ids {other}, but the model with {begins} "
            "(None: with the prompt): give a draft of the same kind"
        )
    if lm.backend.encoder_reads is not None and not draft.shares_tokenizer(lm):
        raise SpecbeamError(
            f"the draft {draft.source} has another tokenizer than {lm.source}, and for models with an encoder "
            "they cannot be bridged: give a draft with the same tokenizer"
        )
    if lm.backend.encoder_reads == "audio" and (size := lm.backend.vocab_size) != (own := draft.backend.vocab_size):
        raise SpecbeamError(
            f"the draft {draft.source} has {own:,} tokens, but {lm.source} {size:,}: their special tokens "
            "differ, so give a draft of the same version"
        )
