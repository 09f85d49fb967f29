"""The trace of a lazy search has the steps of the plain search, and says which beams were evaluated."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specbeam import Options
from specbeam.decoding import Hypothesis
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.beam_search import beam_search
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.decoding.record import Record
from specbeam.selection import select
from tests.conftest import examples
from tests.decoding.test_lazy_beam import (
    LENGTH_PENALTIES,
    POLICIES,
    PROMPT,
    STOP_STRINGS,
    SomeDraftTokens,
    decode,
    logits_after,
    make_policy,
    searched,
)


class Traced:
    """A search that has run, its record, and the nodes of its trace."""

    def __init__(self, kind, make_strategy, options, vocab_size, eos, logits_of, **more):
        self.tree, self.search, _ = searched(kind, options, vocab_size, eos, logits_of, **more)
        self.record = Record(self.tree, decode)
        self.hypotheses = self._run(make_strategy(self.search, self.record), logits_of)
        self.rounds = self.record.trace

    def _run(self, strategy, logits_of):
        """Ends rounds as an engine does."""
        selection, streamed = None, len(PROMPT)
        try:
            while True:
                step = strategy.send(selection)
                if selection is not None:
                    selection.sources = ()
                selection = None
                if isinstance(step, Hypothesis):
                    continue
                self.record.end_round(self.tree.prefix[streamed:], self.tree.finished)
                streamed = self.tree.prefix_length
                rows = [logits_of(self.tree.tokens(self.tree.path(node)).tolist()) for node in step.nodes]
                selection = select(torch.tensor(np.stack(rows), dtype=torch.float32), step.selection_request)
        except StopIteration as end:
            rest = self.tree.path(end.value[0].node)[streamed:]
            self.record.end_round(rest, [hypothesis.node for hypothesis in end.value])
            return end.value

    @property
    def steps(self):
        """The tokens and the score of each beam of each step."""
        return [[self.shown(beam) for beam in step] for one in self.rounds for step in one["steps"]]

    def shown(self, beam):
        return self.new_tokens(beam["node"]), beam["score"]

    def new_tokens(self, node):
        tokens = []
        while node >= len(PROMPT):
            tokens.append(int(self.tree.tokens(node)))
            node = int(self.tree.parents(node))
        return tuple(tokens[::-1])


def both(options, vocab_size, eos, kind, policy, seed, drafts=False, **more):
    """The plain search and the lazy search, with traces."""

    def logits_of(tokens):
        return logits_after(tokens, vocab_size, seed, kind)

    def lazily(search, record):
        drafter = SomeDraftTokens(search.tree, search.stop, logits_of, seed) if drafts else None
        return beam_search(search, record, drafter, make_policy(policy, seed, options))

    made = options, vocab_size, eos, logits_of
    plain = Traced(BeamSearch, beam_search, *made, **more)
    return plain, Traced(LazyBeamSearch, lazily, *made, **more)


@settings(max_examples=examples(5))
@given(
    vocab_size=st.integers(3, 12),
    kind=st.sampled_from(["flat", "usual", "peaked", "ties"]),
    policy=st.sampled_from(POLICIES),
    num_beams=st.integers(2, 8),
    max_new_tokens=st.integers(1, 9),
    more=st.fixed_dictionaries({"distinct": st.booleans(), "drafts": st.booleans()}),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_steps_are_those_of_plain_search(vocab_size, kind, policy, num_beams, max_new_tokens, more, seed, data):
    token = st.integers(0, vocab_size - 1)
    options = Options(
        num_beams=num_beams,
        num_return_sequences=data.draw(st.integers(1, num_beams)),
        max_new_tokens=max_new_tokens,
        min_new_tokens=data.draw(st.integers(0, max_new_tokens)),
        length_penalty=data.draw(st.sampled_from(LENGTH_PENALTIES)),
        early_stopping=data.draw(st.sampled_from([False, "never"])),
        stop_strings=data.draw(st.sampled_from(STOP_STRINGS)),
    )
    eos = data.draw(st.sets(token, min_size=0, max_size=vocab_size - 2))
    plain, lazy = both(options, vocab_size, eos, kind, policy, seed, **more)
    check_steps(plain, lazy, num_beams)
    check_evaluated(lazy, num_beams, more["drafts"])
    check_nodes(lazy)
    check_draft_tokens(lazy)


def check_steps(plain, lazy, num_beams):
    """Only the last round has steps with some of the beams, and perhaps steps after the plain search's last one."""
    last = len(lazy.rounds[-1]["steps"])
    certain = len(lazy.steps) - last
    assert lazy.steps[:certain] == plain.steps[:certain]
    for expected, found in zip(plain.steps[certain:], lazy.steps[certain:], strict=False):
        assert found == expected[: len(found)]
    assert all(len(step) == num_beams for step in lazy.steps[:certain])
    assert all(0 < len(step) <= num_beams for step in lazy.steps)
    ahead = {}  # by length
    for one in lazy.rounds:
        for beam in one["ahead"]:
            ahead.setdefault(len(lazy.new_tokens(beam["node"])), []).append(lazy.shown(beam))
    for length, found in ahead.items():
        for step in lazy.steps[length - 1 : length]:
            assert step[: len(found)] == found
        for step in plain.steps[length - 1 : length]:
            assert step[: len(found)] == found


def check_evaluated(lazy, num_beams, drafts):
    """The statistics count the same, but for draft tokens whose selections were dropped before they became beams."""
    evaluated = {len(PROMPT) - 1}.union(*(one["evaluated"] for one in lazy.rounds))
    assert all({draft_token["node"] for draft_token in one["drafted"]} <= {*one["evaluated"]} for one in lazy.rounds)
    steps = [step for one in lazy.rounds for step in one["steps"]]
    if len(steps) == lazy.record.steps:  # a last step without a known beam is not in the trace
        count = num_beams + sum(beam["node"] in evaluated for step in steps[:-1] for beam in step)
        counted = lazy.record.evaluated(num_beams) * num_beams * len(steps)
        assert counted == pytest.approx(count) or (drafts and counted < count)


def check_nodes(lazy):
    after, dropped, certain = {len(PROMPT) - 1: -1}, set(), []
    for one in lazy.rounds:
        assert dropped.isdisjoint(one["evaluated"])
        beams = [beam for step in one["steps"] for beam in step]
        for entry in [*one["drafted"], *beams, *one["ahead"], *one["ended"]]:
            if entry["node"] not in after:
                assert entry["after"] in {*after} - dropped
                after[entry["node"]] = entry["after"]
        assert {*one["evaluated"]} <= {*after}
        assert {*one["dropped"]} <= {*after} - dropped
        dropped.update(one["dropped"])
        certain += one["certain"]
    assert [int(lazy.tree.tokens(node)) for node in certain] == lazy.tree.new_tokens(lazy.hypotheses[0].node)
    assert {hypothesis.node for hypothesis in lazy.hypotheses} <= {*after}


def check_draft_tokens(lazy):
    beams = [beam for one in lazy.rounds for step in [*one["steps"], one["ahead"]] for beam in step]
    draft_tokens = [draft_token for one in lazy.rounds for draft_token in one["drafted"]]
    drafted = {draft_token["node"] for draft_token in draft_tokens}
    assert all(beam["drafted"] == (beam["node"] in drafted) for beam in beams)
    accepted = [draft_token["node"] for draft_token in draft_tokens if draft_token["accepted"]]
    assert {*accepted} == {beam["node"] for beam in beams} & drafted
    assert len(accepted) == lazy.record.accepted == sum(lazy.record.checks)
    assert len(draft_tokens) == lazy.record.drafted
