"""The decoding strategy that a request's options ask for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from specbeam.decoding import Strategy
from specbeam.decoding.beam import BeamSearch, DiverseBeamSearch, beam_search, draw_without_replacement
from specbeam.decoding.drafter import Drafter
from specbeam.decoding.greedy import greedy
from specbeam.decoding.sampling import sample, sample_several, spawn
from specbeam.decoding.speculative import speculative, speculative_sampling
from specbeam.decoding.speculative_beam import speculative_beam_search
from specbeam.engine.setup import Setup

MakeStrategy = Callable[[Setup, Drafter | None], Strategy]


def make_strategy(setup: Setup, drafter: Drafter | None) -> Strategy:
    """The strategy that the options ask for: greedy search, sampling or beam search, speculative with a drafter."""
    options, tree, process, stop, record = setup.options, setup.tree, setup.process, setup.stop, setup.record
    if options.num_beams > 1:
        if drafter is not None:
            return speculative_beam_search(tree, make_search(setup), record, drafter)
        return beam_search(tree, make_search(setup), record)
    if drafter is not None:
        if options.samples:
            return speculative_sampling(tree, process, stop, record, drafter, setup.warp, setup.generator)
        return speculative(tree, process, stop, record, drafter)
    if options.num_return_sequences > 1:
        generators = spawn(setup.generator, options.num_return_sequences)
        return sample_several(tree, process, stop, record, setup.warp, generators)
    if options.samples:
        return sample(tree, process, stop, record, setup.warp, setup.generator)
    return greedy(tree, process, stop, record)


def make_search(setup: Setup) -> BeamSearch | DiverseBeamSearch:
    """The search by beams that the options ask for."""
    options, process, warp = setup.options, setup.process, setup.warp
    search = partial(
        BeamSearch,
        setup.tree,
        (lambda *at: warp(process(*at))) if options.samples else process,
        setup.stop,
        num_return_sequences=options.num_return_sequences,
        length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
        early_stopping=False if options.early_stopping is None else options.early_stopping,
        select=draw_without_replacement(setup.generator) if options.samples else None,
        constrained=options.constraint is not None,
        distinct=options.is_distinct,
    )
    groups = options.num_beam_groups
    if groups == 1:
        return search(options.num_beams, bounded=options.bound_rule and not options.samples and not process.raises)
    size = options.num_beams // groups
    return DiverseBeamSearch([search(size, bounded=False) for _ in range(groups)], options.diversity_penalty)
