"""The strategy of a request, by its options."""

from __future__ import annotations

from specbeam.core.strategy import Strategy
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.beam_search import beam_search
from specbeam.decoding.diverse_beam import DiverseBeamSearch
from specbeam.decoding.greedy import greedy
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.decoding.sampling import sample_several
from specbeam.decoding.setup import Setup
from specbeam.decoding.speculative import speculative
from specbeam.drafting.copies import Copies
from specbeam.drafting.drafter import Chains, Drafter
from specbeam.drafting.forced import MAX_FORCED_TOKENS, ForcedTokens
from specbeam.drafting.policy.controller import Controller, Sizes
from specbeam.drafting.policy.deferring import LikelyNeeded

MIN_LAZY_BEAMS = 16
"""Without drafts, fewer beams are all evaluated: passes over few nodes cost nearly as much."""


def make_strategy(setup: Setup, drafter: Drafter | None) -> Strategy:
    """Greedy search, sampling or beam search, speculative with a drafter."""
    options, tree, selector, stop, record = setup.options, setup.tree, setup.selector, setup.stop, setup.record
    if options.num_beams == 1 and options.num_return_sequences > 1:
        return sample_several(tree, selector, stop, record, options.num_return_sequences)
    is_worthwhile = options.num_beams >= MIN_LAZY_BEAMS if drafter is None else drafter.tree is tree
    forcing = with_forced_tokens(setup, drafter)
    if is_worthwhile and LazyBeamSearch.fits(setup):
        copies = make_copies(setup, drafter)
        return beam_search(LazyBeamSearch.of(setup), record, forcing, make_policy(setup, drafter, copies), copies)
    if options.num_beam_groups > 1:
        return beam_search(DiverseBeamSearch.of(setup), record, forcing)
    if options.num_beams > 1:
        return beam_search(BeamSearch.of(setup), record, forcing)
    if forcing is not None:
        return speculative(tree, selector, stop, record, forcing)
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


def make_policy(setup: Setup, drafter: Drafter | None, copies: Copies | None) -> LikelyNeeded:
    """Decides which beams a lazy search defers."""
    return LikelyNeeded(
        setup.stop.max_length - setup.tree.prompt_length,
        setup.options.num_beams,
        setup.cost,
        setup.plain_cost,
        None if drafter is None else drafter.controller,
        setup.options.num_return_sequences,
        None if copies is None else copies.rounds,
    )
