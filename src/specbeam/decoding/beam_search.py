"""The loop of beam search. A policy chooses the beams of a forward pass, and a drafter the draft tokens below them.

Plain beam search evaluates all beams. Speculative beam search also evaluates draft tokens, and lazy beam search only
beams that may matter. Both return exactly what the plain search returns.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from specbeam.core.strategy import Evaluate, Strategy
from specbeam.core.tree import NO_NODES, Nodes
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.decoding.search import Known, Search, Step
from specbeam.drafting.copies import Copies
from specbeam.drafting.drafter import Drafter
from specbeam.drafting.forced import ForcedTokens
from specbeam.drafting.policy import SKIPPED, DraftTokens
from specbeam.drafting.policy.deferring import LikelyNeeded
from specbeam.errors import NotFinite, TooManyNodes
from specbeam.recording.record import Record

Round = Generator[Evaluate, Any, None]
"""A part of the strategy: a forward pass, and the steps that it allows."""


def beam_search(
    search: Search,
    record: Record,
    drafter: Drafter | None = None,
    policy: LikelyNeeded | None = None,
    copies: Copies | None = None,
) -> Strategy:
    """Take steps until the outcome is final.

    Draft tokens go below all beams, or below the best one while others are deferred. Where the memory cannot hold them
    or the deferred levels, or logits are not finite, the search goes on with all beams and without draft tokens.

    Args:
        drafter: proposes draft tokens.
        policy: decides when a lazy search defers beams, and which.
        copies: proposes draft tokens below deferred beams that come back.
    """
    known = Known()
    while not search.done:
        yield from search.certain()
        try:
            if isinstance(search, LazyBeamSearch) and policy is not None:
                if not search.levels and policy.should_defer(search.scores, search.length):
                    search.defer()
                    known = Known()
                if search.levels:
                    yield from lazy_round(search, record, known, policy, drafter, copies)
                    if not search.levels:
                        known = Known()
                    continue
            if drafter is not None:
                yield from speculative_round(search, record, known, drafter)
            else:
                yield from plain_round(search, record)
        except (TooManyNodes, NotFinite):
            if drafter is None and policy is None:
                raise
            drafter = policy = None
            if isinstance(search, LazyBeamSearch):
                search.restart()
            search.tree.keep(search.beams, search.finished_nodes)
    yield from search.certain()
    return search.hypotheses()


def plain_round(search: Search, record: Record, drafter: Drafter | None = None) -> Round:
    """Evaluate all beams. Take a step with their selection, and the steps of passes that went ahead.

    Args:
        drafter: it skipped this round, because drafting would have saved no time.
    """
    selection = yield search.evaluation()
    for one in selection.passes(len(search.beams)):
        if not search.step(one):
            raise RuntimeError("all beams are known, but the search took no step")
        record.round(skipped=drafter is not None)
        record.step(search.beams, search.scores)
        if drafter is not None:
            drafter.controller.learn(SKIPPED, search.tree, steps=[])
        if search.done:
            break
    search.tree.keep(search.beams, search.finished_nodes)


def speculative_round(search: Search, record: Record, known: Known, drafter: Drafter) -> Round:
    """Evaluate all beams, and draft tokens below them."""
    draft_tokens = yield from drafter.propose(search.beams, search.scores.astype(np.float64))
    if draft_tokens.skipped and not len(known.nodes):  # then the backend can go ahead
        yield from plain_round(search, record, drafter)
        return
    steps = yield from verify(search, record, known, known.missing(search.beams), draft_tokens)
    drafter.controller.learn(draft_tokens, search.tree, [step.beams for step in steps])


def lazy_round(
    search: LazyBeamSearch,
    record: Record,
    known: Known,
    policy: LikelyNeeded,
    drafter: Drafter | None,
    copies: Copies | None,
) -> Round:
    """Evaluate the beams that the policy chooses.

    Tokens that a constraint forces below all of them are sure to save passes. Other draft tokens go below the best
    beam, or below beams that come back.
    """
    deferred, leading = search.deferred, search.levels[-1]
    wanted, tip = np.unique(deferred.nodes[policy.choose(deferred)]), leading.beams[:1]
    drafted = copied = DraftTokens()
    if isinstance(drafter, ForcedTokens):
        drafted = drafter.below(wanted)
    if not drafted.certain:
        if drafter is not None and not (np.isin(tip, wanted).any() and policy.should_draft(deferred, len(wanted))):
            drafter = None  # draft tokens go where the search may go on
        if drafter is not None:
            drafted = yield from drafter.propose(tip, leading.scores[:1].astype(np.float64))
    if len(drafted.nodes):
        copies = None
    if copies is not None:
        best = next(level.beams.item(0) for level in reversed(search.levels) if len(level.beams))
        copied = copies.propose(wanted, best)
    steps = yield from verify(search, record, known, wanted, copied if len(copied.nodes) else drafted)
    now = [*steps, *search.levels]
    if copies is not None:
        copies.learn(np.concatenate([step.beams for step in now]) if now else NO_NODES, len(steps))
    if drafter is not None:
        ahead = {step.length: step.beams[:1] for step in now if step.length > leading.length}
        drafter.controller.learn(drafted, search.tree, [beam for beam in ahead.values() if len(beam)])


def verify(
    search: Search, record: Record, known: Known, beams: Nodes, draft_tokens: DraftTokens
) -> Generator[Evaluate, Any, Sequence[Step]]:
    """Evaluate beams and draft tokens in one forward pass. Take every step that the known selections decide.

    Each is a step of the plain search. Draft tokens that may still become beams keep their selections.
    """
    tree, drafted = search.tree, np.setdiff1d(known.missing(draft_tokens.nodes), beams)
    nodes = np.union1d(beams, drafted)
    known.add(nodes, (yield Evaluate(nodes, search.selection_request(nodes, drafted), or_fewer=True)))
    record.round(drafted, draft_tokens.skipped, nodes)
    steps = search.advance(known, nodes)
    record.left_out = search.left_out
    for step in steps:
        record.step(step.beams, step.scores)
    shortest = int(tree.depths(nodes).min()) + 1 - tree.prompt_length
    for level in [] if search.done else search.levels[1:]:
        if level.length > shortest:  # the levels before it are as they were
            record.ahead(level.beams, level.scores)
    known.forget(search.settled)
    growing, evaluated = search.growing, known.nodes
    promising = evaluated[tree.below(evaluated, growing)]
    known.keep(promising, search.needs_rows)
    tree.keep(np.concatenate([growing, promising]), search.finished_nodes)
    return steps
