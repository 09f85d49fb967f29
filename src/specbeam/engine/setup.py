"""What a request's options make: its strategy, its drafter, and the objects that both share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from specbeam.core.strategy import Strategy
from specbeam.core.tree import Tree
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.beam_search import beam_search
from specbeam.decoding.diverse_beam import DiverseBeamSearch
from specbeam.decoding.greedy import greedy
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.decoding.sampling import sample_several
from specbeam.decoding.speculative import speculative
from specbeam.drafting.chains import Chains
from specbeam.drafting.copies import Copies
from specbeam.drafting.drafter import Drafter
from specbeam.drafting.forced import MAX_FORCED_TOKENS, ForcedTokens
from specbeam.drafting.lookup import Continued, Lookup, SuffixAutomaton
from specbeam.drafting.model import ModelDrafter
from specbeam.drafting.own import FunctionDrafter, OwnDrafter, Propose
from specbeam.drafting.policy import Cost
from specbeam.drafting.policy.controller import Controller
from specbeam.drafting.policy.deferring import LikelyNeeded
from specbeam.drafting.policy.sizes import Sizes
from specbeam.drafting.retokenizing import RetokenizingDrafter
from specbeam.engine.costs import Costs, SharedCost
from specbeam.engine.drafts import Draft
from specbeam.errors import SpecbeamError
from specbeam.logits.checkpoint_processors import processors_of_checkpoint
from specbeam.logits.processors import Processors, check_token_ids
from specbeam.logits.selector import Selector, some_seed, warpers_of
from specbeam.logits.stopping import Stopping
from specbeam.models.model import LanguageModel
from specbeam.models.prompts import room, too_long
from specbeam.options.options import Options
from specbeam.recording.record import Record
from specbeam.recording.trace import Trace
from specbeam.structured.grammar import Description, GrammarConstraint

MIN_LAZY_BEAMS = 16
"""Without drafts, fewer beams are all evaluated: passes over few nodes cost nearly as much."""


@dataclass(frozen=True)
class Setup:
    """The objects that the strategy and the drafter of one request share.

    Attributes:
        options: with the checkpoint's defaults filled in.
        tree: the prompt, or the start tokens of an encoder-decoder model.
        selector: makes the selection requests at nodes, with the request's processors, warpers and noise.
        stop: decides where sequences end.
        record: counts draft tokens, and remembers rounds for the trace.
        cost: of the target's passes for this request, in which it may evaluate any number of nodes.
        plain_cost: of passes without draft tokens, in which the backend goes ahead if it can.
    """

    options: Options
    tree: Tree
    selector: Selector
    stop: Stopping
    record: Record
    cost: SharedCost
    plain_cost: SharedCost


MakeStrategy = Callable[[Setup, Drafter | None], Strategy]
"""Makes the strategy of a request. The drafter is None without one."""


def make_setup(lm: LanguageModel, prompt_ids: list[int], options: Options, costs: Costs, writes: bool = True) -> Setup:
    """Check the options against the model, and make what strategy and drafter work with.

    Args:
        writes: whether there are new tokens.

    Raises:
        SpecbeamError: a prompt as long as the context, or an option that the model cannot honour.
    """
    backend = lm.backend
    if len(prompt_ids) > (most := room(lm, writes)):
        raise too_long(lm, f"{len(prompt_ids):,}", most)
    if options.stop_strings and lm.tokenizer is None:
        says = f"stop_strings need a text to look in, and {lm.source} has no tokenizer: leave them out"
        raise SpecbeamError(says, option="stop_strings")
    check_token_ids(options, backend.vocab_size)
    begin = prompt_ids if backend.start_token_ids is None else backend.start_token_ids
    defaults = lm.generation_defaults if options.constraint is None else lm.generation_defaults.under_constraint
    options = options.with_defaults(defaults, len(begin))
    eos = lm.eos_token_ids if options.eos_token_id is None else frozenset(options.eos_token_id)
    if foreign := [token for token in eos if token >= backend.vocab_size]:
        says = f"eos_token_id {foreign[0]} is not in the vocabulary of {backend.vocab_size}"
        raise SpecbeamError(says, option="eos_token_id")
    if options.constraint is not None and not eos:
        raise SpecbeamError(
            "a constraint needs a token that ends the text, and the model lacks one: give eos_token_id",
            option=("constraint", "eos_token_id"),
        )
    if isinstance(options.constraint, GrammarConstraint):  # copies share a lexer, and a limit of one of them ends all
        options = replace(options, constraint=options.constraint.description)
    constraint = options.constraint
    if isinstance(constraint, Description):  # a parser of the request's own
        many = options.num_beams > 1 and options.num_return_sequences > 1 and options.is_distinct
        constraint = (constraint.listed(lm) if many else None) or constraint.compile(lm)
    max_length = min(len(begin) + options.max_new_tokens, backend.context_length)
    of_checkpoint = processors_of_checkpoint(
        defaults, options, eos, prompt_ids, len(begin), max_length, backend.vocab_size
    )
    tree = Tree(begin)
    decode = None if lm.tokenizer is None else lm.decode
    # A text that satisfies a constraint would not do so with the text of its end token.
    written = frozenset(end for end in eos if constraint is not None and lm.decode([end]))
    process = Processors(
        replace(options, constraint=constraint), eos, backend.vocab_size, of_checkpoint, backend.device, written
    )
    stop = Stopping(eos, max_length, options.stop_strings, decode, options.min_new_tokens or 0, written)
    warpers, seed = (warpers_of(options), some_seed(options.seed)) if options.samples else (None, None)
    selector = Selector(process, warpers, seed, step_by_step=options.trace or options.top_logprobs is not None)
    draws_beams = options.num_beams > 1 and (options.samples or options.num_beam_groups > 1)
    goes_ahead = hasattr(backend, "forward_ahead") and selector.ahead(tree, tree.tip, stop) > 0 and not draws_beams
    return Setup(
        options=options,
        tree=tree,
        selector=selector,
        stop=stop,
        record=Record(tree, Trace(tree, lm.token_text, process.constraint) if options.trace else None),
        cost=SharedCost(costs(backend)),
        plain_cost=SharedCost(costs(backend, goes_ahead)),
    )


def make_drafter(
    setup: Setup,
    lm: LanguageModel,
    draft: Draft,
    unread: int,
    draft_cost: Cost | None,
    room: int,
) -> Drafter:
    """The drafter of one request.

    Args:
        draft: has passed :func:`check_draft`.
        unread: tokens and positions of sound that a draft model has to read before its first draft token.
        draft_cost: of the draft model's passes for this request; None for lookups.
        room: the most draft tokens whose logits fit into memory.

    Raises:
        SpecbeamError: the draft has another vocabulary, which text cannot bridge.
    """
    shares_tokenizer = isinstance(draft, LanguageModel) and draft.shares_tokenizer(lm)
    is_model, is_own = isinstance(draft, LanguageModel), callable(draft)
    looks_up = getattr(draft, "looks_up", False) if isinstance(draft, type) else not (is_model or is_own)
    sizes = [
        Sizes(
            num_draft_tokens=setup.options.draft_size("num_draft_tokens"),
            draft_width=setup.options.draft_size("draft_width"),
            draft_budget=setup.options.draft_size("draft_budget"),
            num_tips=num_tips,
            chains=not shares_tokenizer,
            one_width=looks_up,
            room=room,
        )
        for num_tips in sorted({setup.options.num_beams} | ({1} if may_be_lazy(setup) else set()))
    ]
    controller = Controller(sizes, setup.cost, setup.plain_cost, draft_cost, unread, matches=looks_up)
    if isinstance(draft, LanguageModel) and shares_tokenizer:
        return _make_model_drafter(setup, lm, draft, controller)
    chains = Chains(setup.tree, setup.selector.process, setup.stop, controller.max_draft_tokens)
    if isinstance(draft, LanguageModel):
        return RetokenizingDrafter(setup.tree, chains, controller, lm, draft)
    if isinstance(draft, type):
        return OwnDrafter(setup.tree, chains, controller, lm, draft)
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
    return ModelDrafter(
        setup.tree,
        selector,
        setup.stop,
        lm.backend.vocab_size,
        draft.backend.context_length,
        [token_id for token_id, token in added.items() if token.special],
        controller,
    )


def make_strategy(setup: Setup, drafter: Drafter | None) -> Strategy:
    """The strategy that the options ask for: greedy search, sampling or beam search, speculative with a drafter."""
    options, tree, selector, stop, record = setup.options, setup.tree, setup.selector, setup.stop, setup.record
    if options.num_beams > 1:
        pays = options.num_beams >= MIN_LAZY_BEAMS if drafter is None else drafter.tree is setup.tree
        if not (pays and may_be_lazy(setup)):
            return beam_search(make_search(setup), record, with_forced_tokens(setup, drafter))
        search = make_search(setup, LazyBeamSearch)
        longest, drafts = stop.max_length - tree.prompt_length, None if drafter is None else drafter.controller
        copies = make_copies(setup, drafter)
        later = None if copies is None else copies.rounds
        policy = LikelyNeeded(
            longest, options.num_beams, setup.cost, setup.plain_cost, drafts, options.num_return_sequences, later
        )
        return beam_search(search, record, with_forced_tokens(setup, drafter), policy, copies)
    if options.num_return_sequences > 1:
        return sample_several(tree, selector, stop, record, options.num_return_sequences)
    if (drafter := with_forced_tokens(setup, drafter)) is not None:
        return speculative(tree, selector, stop, record, drafter)
    return greedy(tree, selector, stop, record)


def with_forced_tokens(setup: Setup, drafter: Drafter | None) -> Drafter | None:
    """The drafter of a request. Under a constraint, it first proposes the tokens that are forced."""
    process = setup.selector.process
    if process.constraint is None:
        return drafter
    if drafter is None:
        sizes = Sizes(None, None, None, num_tips=setup.options.num_beams, chains=True)
        controller = Controller([sizes], setup.cost, setup.plain_cost)
    else:
        controller = drafter.controller
    chains = Chains(setup.tree, process, setup.stop, MAX_FORCED_TOKENS)
    return ForcedTokens(chains, process.constraint, controller, drafter)


def make_copies(setup: Setup, drafter: Drafter | None) -> Copies | None:
    """What drafts below beams that come back. Only requests with a drafter have room for draft tokens."""
    if drafter is None:
        return None
    chains = Chains(setup.tree, setup.selector.process, setup.stop, drafter.controller.max_draft_tokens)
    return Copies(setup.tree, chains, setup.cost)


def may_be_lazy(setup: Setup) -> bool:
    """Whether beams of a search may be left out: no score rises, nothing is drawn, and nothing counts all beams.

    Sizes of drafts that were asked for are sizes below all beams.
    """
    options, process = setup.options, setup.selector.process
    fixed = any(options.draft_size(name) is not None for name in ("num_draft_tokens", "draft_width", "draft_budget"))
    calls = options.prefix_allowed_tokens_fn is not None or bool(process.functions)
    counts = options.early_stopping is True  # finished hypotheses
    return (
        options.bound_rule
        and options.num_beams > 1
        and options.num_beam_groups == 1
        and not (options.samples or process.raises or calls or counts or fixed)
    )


def make_search(setup: Setup, kind: Callable[..., BeamSearch] = BeamSearch) -> BeamSearch | DiverseBeamSearch:
    """The search by beams that the options ask for.

    Args:
        kind: makes a :class:`BeamSearch` of its arguments.
    """
    options = setup.options
    search = partial(
        kind,
        setup.tree,
        setup.selector,
        setup.stop,
        num_return_sequences=options.num_return_sequences,
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        early_stopping=False if options.early_stopping is None else options.early_stopping,
        distinct=options.is_distinct,
    )
    groups = options.num_beam_groups
    if groups == 1:
        bounded = options.bound_rule and not options.samples and not setup.selector.process.raises
        return search(options.num_beams, bounded=bounded)
    size = options.num_beams // groups
    return DiverseBeamSearch([search(size, bounded=False) for _ in range(groups)], options.diversity_penalty)
