"""The decoding strategy that a request's options ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from specbeam.control.deferring import LikelyNeeded
from specbeam.decoding import Strategy
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.beam_search import beam_search
from specbeam.decoding.chains import Chains
from specbeam.decoding.copies import Copies
from specbeam.decoding.diverse_beam import DiverseBeamSearch
from specbeam.decoding.drafter import Drafter
from specbeam.decoding.greedy import greedy
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.decoding.sampling import sample_several
from specbeam.decoding.speculative import speculative
from specbeam.engine.setup import Setup

MIN_LAZY_BEAMS = 16
"""Without drafts, fewer beams are all evaluated: passes over few nodes cost nearly as much."""

MakeStrategy = Callable[[Setup, Drafter | None], Strategy]


def make_strategy(setup: Setup, drafter: Drafter | None) -> Strategy:
    """The strategy that the options ask for: greedy search, sampling or beam search, speculative with a drafter."""
    options, tree, selector, stop, record = setup.options, setup.tree, setup.selector, setup.stop, setup.record
    if options.num_beams > 1:
        pays = options.num_beams >= MIN_LAZY_BEAMS if drafter is None else drafter.tree is setup.tree
        if not (pays and may_be_lazy(setup)):
            return beam_search(make_search(setup), record, drafter)
        search = make_search(setup, LazyBeamSearch)
        longest, drafts = stop.max_length - tree.prompt_length, None if drafter is None else drafter.controller
        copies = make_copies(setup, drafter)
        later = None if copies is None else copies.rounds
        policy = LikelyNeeded(
            longest, options.num_beams, setup.cost, setup.plain_cost, drafts, options.num_return_sequences, later
        )
        return beam_search(search, record, drafter, policy, copies)
    if drafter is not None:
        return speculative(tree, selector, stop, record, drafter)
    if options.num_return_sequences > 1:
        return sample_several(tree, selector, stop, record, options.num_return_sequences)
    return greedy(tree, selector, stop, record)


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
