"""Lazy beam search returns what beam search returns, bit for bit, whichever beams it evaluates first.

Its trace has the steps of the plain search, and says which beams were evaluated.
"""

import string
import zlib
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, Options
from specbeam.backends.torch.selecting import select
from specbeam.core.strategy import Evaluate, Hypothesis
from specbeam.core.tree import Tree
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.beam_search import beam_search
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.drafting.copies import Copies
from specbeam.drafting.drafter import Chains
from specbeam.drafting.policy import DraftTokens
from specbeam.drafting.policy.acceptance import Rounds
from specbeam.drafting.policy.deferring import Deferred, LikelyNeeded
from specbeam.engine import CostTable
from specbeam.logits.processors import Processors
from specbeam.logits.selector import Selector
from specbeam.logits.stopping import Stopping
from specbeam.recording.record import Record, Trace
from tests.conftest import examples, head_of, random_model
from tests.engine.conftest import ended
from tests.recording.test_record import Replayed

PROMPT = [0, 1]


def logits_after(tokens, vocab_size, seed, kind):
    """The logits of a model that is a table of random numbers, float32 [vocab]."""
    random = np.random.default_rng([seed, zlib.crc32(np.array(tokens).tobytes())])
    sharpness = {"flat": 0.3, "usual": 2.0, "peaked": 8.0, "ties": 1.0}[kind]
    logits = sharpness * random.standard_normal(vocab_size)
    return np.round(logits) if kind == "ties" else logits


def decode(ids, skip_special_tokens=True):
    """The text of tokens. Each token is a letter."""
    return "".join(string.ascii_lowercase[i] for i in ids)


class Searched:
    """A search in a table of logits: its tree, its record with a trace, and what it found."""

    def __init__(self, kind, options, vocab_size, eos, logits_of, **more):
        self.logits_of, self.tree = logits_of, Tree(PROMPT)
        self.stop = Stopping(frozenset(eos), len(PROMPT) + options.max_new_tokens, options.stop_strings, decode)
        self.process = Processors(options, frozenset(eos), vocab_size)
        selector = Selector(self.process)
        names = ("num_beams", "num_return_sequences", "length_penalty", "early_stopping")
        self.search = kind(self.tree, selector, self.stop, *(getattr(options, name) for name in names), **more)
        self.record = Record(self.tree, Trace(self.tree, lambda token: decode([token])))
        self.found, self.yielded, self.sizes = [], [], []  # hypotheses, and the number of nodes in each pass

    def run(self, drafter=None, policy=None, copies=None, more=0):
        """Run the search as an engine does. It ends rounds, and no strategy can use the rows of earlier passes.

        Args:
            more: selections have this many more tokens than the search asked for.
        """
        strategy = beam_search(self.search, self.record, drafter, policy, copies)
        times, selection, streamed = Counter(), None, len(PROMPT)
        try:
            while True:
                step = strategy.send(selection)
                if selection is not None:
                    selection.sources = ()
                selection = None
                if isinstance(step, Hypothesis):
                    self.yielded.append(self.described(step))
                    continue
                assert isinstance(step, Evaluate)
                self.end_round(self.tree.prefix[streamed:], self.tree.finished)
                streamed = self.tree.prefix_length
                self.sizes.append(len(step.nodes))
                times.update({*step.nodes.tolist()})
                assert max(times.values()) <= 20  # again where scores are equal, but there is no loop
                rows = [self.logits_of(self.tree.tokens(self.tree.path(node)).tolist()) for node in step.nodes]
                step.selection_request.top = min(len(rows[0]), step.selection_request.top + more)
                selection = select(torch.tensor(np.stack(rows), dtype=torch.float32), step.selection_request)
        except StopIteration as end:
            nodes = [hypothesis.node for hypothesis in end.value]
            if nodes:
                self.end_round(self.tree.path(nodes[0])[streamed:], nodes)
                self.replayed = Replayed(self.rounds, len(PROMPT))
            self.found = [self.described(hypothesis) for hypothesis in end.value]
        return self

    def end_round(self, certain, ended):
        if self.record.trace.is_open:
            self.record.trace.end_round(certain, ended, "", {}, 0.0)

    def copies(self, cost):
        return Copies(self.tree, Chains(self.tree, self.process, self.stop, max_draft_tokens=64), cost)

    def described(self, hypothesis):
        return hypothesis.node, self.tree.new_tokens(hypothesis.node), hypothesis.score, hypothesis.finish_reason

    @property
    def rounds(self):
        return self.record.trace.rounds

    @property
    def steps(self):
        """The tokens and the score of each beam of each step."""
        return [[self.shown(beam) for beam in step] for one in self.rounds for step in one["steps"]]

    def shown(self, beam):
        return self.replayed.path(beam["node"]), beam["score"]


class SomeBeams:
    """A policy that evaluates random beams, and defers none in random steps."""

    def __init__(self, seed, eagerness, plain=0.0):
        self.random = np.random.default_rng(seed)
        self.eagerness, self.plain = eagerness, plain

    def should_defer(self, scores, length):
        return self.random.random() >= self.plain

    def choose(self, deferred):
        chosen = self.random.random(len(deferred.nodes)) < self.eagerness
        chosen[self.random.integers(len(chosen))] = True
        return chosen

    def should_draft(self, deferred, count):
        return self.random.random() < 0.8


class BestFirst:
    """Go on with the best beam; else evaluate the best of the beams that decide whether that may be done."""

    def should_defer(self, scores, length):
        return True

    def choose(self, deferred):
        scores = np.where(deferred.leading | ~deferred.leading.any(), deferred.scores, -np.inf)
        chosen = np.zeros(len(scores), bool)
        chosen[scores.argmax()] = True
        return chosen

    def should_draft(self, deferred, count):
        return True


def drafts_of(seconds=0.3, reading_seconds=0.0, **more):
    """The statistics of drafts that a policy asks for."""
    how = {"reading_seconds": reading_seconds, "seconds_per_step": lambda steps: seconds, "skip": lambda: None}
    return SimpleNamespace(**how, **more)


class Drafter:
    """Drafts chains below the best beam, and below all beams.

    Args:
        seed: of chains of up to four tokens, half of which are the likeliest. None for four tokens that are all right.
        seconds: per step with drafts.
    """

    def __init__(self, searched, seed=None, seconds=0.3):
        self.tree, self.stop, self.logits_of = searched.tree, searched.stop, searched.logits_of
        self.random = None if seed is None else np.random.default_rng(seed)
        self.controller = drafts_of(seconds, learn=self.learn)

    def propose(self, tips, scores):
        nodes, self.length = [], int(self.tree.depths(tips).max())
        for end in np.unique(tips).tolist():
            for _ in range(4 if self.random is None else self.random.integers(5)):
                logits = self.logits_of(self.tree.tokens(self.tree.path(end)).tolist())
                is_right = self.random is None or self.random.random() < 0.5
                token = int(logits.argmax() if is_right else self.random.integers(len(logits)))
                if token in self.stop.eos_token_ids or self.tree.depths([end])[0] + 2 >= self.stop.max_length:
                    break
                end = int(self.tree.draft(np.array([end]), np.array([token]))[0])
                nodes.append(end)
        return DraftTokens(np.unique(np.array(nodes, dtype=np.int64)))
        yield

    def learn(self, draft_tokens, tree, steps):
        """The steps are those after the tips."""
        assert [int(tree.depths(ends).max()) - self.length for ends in steps] == [*range(1, len(steps) + 1)]


LENGTH_PENALTIES = [1.0, 0.0, 2.0, -1.0, 0.5]
STOP_STRINGS = [(), (), ("ab",), ("a", "cc"), ("b", "c", "d", "e", "f")]
POLICIES = ["best first", "one", "few", "many", "in parts", "ours"]
COSTS = [lambda nodes: 1.0, lambda nodes: 1 + 0.2 * nodes, float]


def make_policy(name, seed, options):
    random = {"one": (0.0, 0.0), "few": (0.3, 0.0), "many": (0.7, 0.0), "in parts": (0.2, 0.5)}
    if name in random:
        return SomeBeams(seed, *random[name])
    if name == "best first":
        return BestFirst()
    return LikelyNeeded(options.max_new_tokens, options.num_beams, *[COSTS[seed % len(COSTS)]] * 2)


def without_nodes(found):
    return [described[1:] for described in found]


def assert_lazy_beams_are_beams(options, vocab_size, eos, kind, policy, seed, drafts=False, **more):
    """Compare both searches, and their traces."""
    made = options, vocab_size, eos, lambda tokens: logits_after(tokens, vocab_size, seed, kind)
    plain, lazy = Searched(BeamSearch, *made, **more).run(), Searched(LazyBeamSearch, *made, **more)
    drafter = Drafter(lazy, seed) if drafts else None
    lazy.run(drafter, make_policy(policy, seed, options), lazy.copies(COSTS[seed % len(COSTS)]) if drafts else None)
    assert without_nodes(lazy.found) == without_nodes(plain.found)
    assert lazy.yielded == lazy.found
    assert plain.yielded == plain.found
    if not plain.found:  # no text is possible
        return
    check_steps(plain, lazy, options.num_beams)
    check_evaluated(lazy, options.num_beams, drafts)
    check_tree(lazy)


def check_steps(plain, lazy, num_beams):
    """Only the last round has steps with some of the beams, and perhaps steps after the plain search's last one."""
    last = len(lazy.rounds[-1]["steps"])
    certain = len(lazy.steps) - last
    assert lazy.steps[:certain] == plain.steps[:certain]
    for expected, found in zip(plain.steps[certain:], lazy.steps[certain:], strict=False):
        assert found == expected[: len(found)]
    assert all(len(step) == num_beams for step in lazy.steps[:certain])
    assert all(0 < len(step) <= num_beams for step in lazy.steps)
    ahead = defaultdict(list)  # by length
    for tokens, score in [lazy.shown(beam) for one in lazy.rounds for beam in one["ahead"]]:
        ahead[len(tokens)].append((tokens, score))
    for length, found in ahead.items():
        for step in lazy.steps[length - 1 : length] + plain.steps[length - 1 : length]:
            assert step[: len(found)] == found


def check_evaluated(lazy, num_beams, drafts):
    """The statistics count the same, but for draft tokens whose selections were dropped before they became beams."""
    evaluated = {len(PROMPT) - 1}.union(*(one["evaluated"] for one in lazy.rounds))
    steps = [step for one in lazy.rounds for step in one["steps"]]
    if len(steps) == lazy.record.steps:  # a last step without a known beam is not in the trace
        count = num_beams + sum(beam["node"] in evaluated for step in steps[:-1] for beam in step)
        counted = lazy.record.evaluated(num_beams) * num_beams * len(steps)
        assert counted == pytest.approx(count) or (drafts and counted < count)


def check_tree(lazy):
    assert lazy.replayed.certain == lazy.found[0][1]
    assert {node for node, *_ in lazy.found} <= {*lazy.replayed.after}
    assert all({draft_token["node"] for draft_token in one["drafted"]} <= {*one["evaluated"]} for one in lazy.rounds)
    draft_tokens = [draft_token for one in lazy.rounds for draft_token in one["drafted"]]
    accepted = [draft_token["node"] for draft_token in draft_tokens if draft_token["accepted"]]
    assert {*accepted} == {beam["node"] for beam in lazy.replayed.beams} & lazy.replayed.drafted
    assert len(accepted) == lazy.record.accepted == sum(lazy.record.checks)
    assert len(draft_tokens) == lazy.record.drafted


@settings(max_examples=examples(8))
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
def test_lazy_beams_are_beams_and_their_trace_has_the_steps_of_plain_search(
    vocab_size, kind, policy, num_beams, max_new_tokens, more, seed, data
):
    token = st.integers(0, vocab_size - 1)
    words = st.lists(st.lists(token, min_size=1, max_size=2), max_size=3)
    eos = data.draw(st.sets(token, min_size=0, max_size=vocab_size - 2))
    options = Options(
        num_beams=num_beams,
        num_return_sequences=data.draw(st.integers(1, num_beams)),
        max_new_tokens=max_new_tokens,
        min_new_tokens=data.draw(st.integers(0, max_new_tokens)),
        length_penalty=data.draw(st.sampled_from(LENGTH_PENALTIES)),
        early_stopping=data.draw(st.sampled_from([False, "never"])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.0, 1.4])),
        bad_words_ids=data.draw(words) or None,
        stop_strings=data.draw(st.sampled_from(STOP_STRINGS)),
    )
    assert_lazy_beams_are_beams(options, vocab_size, eos, kind, policy, seed, **more)


def test_a_search_may_stop_at_a_level_whose_beams_were_dropped():
    """Where scores fall fast with the length, a hypothesis may beat all longer ones after these were found."""
    how = {"length_penalty": -3.0, "early_stopping": "never", "no_repeat_ngram_size": 3}
    options = Options(num_beams=12, num_return_sequences=2, max_new_tokens=6, **how)
    assert_lazy_beams_are_beams(options, 12, {9}, "peaked", "best first", seed=537217540)


class Confident:
    """A model whose best hypothesis loses little with each token. Every other token loses about 6 more.

    Args:
        falls: one token of this many costs the best hypothesis as much as the others: then deferred beams are needed.
    """

    def __init__(self, falls=10**9):
        self.falls = falls

    def __call__(self, tokens):
        logits = np.where(np.arange(12) == (tokens[-1] + 5) % 12, 6.0, 0.0) + logits_after(tokens, 12, 0, "flat")
        return 0.01 * logits if len(tokens) % self.falls == 0 else logits


def passes_of_our_policy(logits_of, cost, max_new_tokens=20, num_beams=8, drafts=False, seconds=0.3):
    """The numbers of nodes in the passes of our policy, and in the passes of plain search.

    Args:
        drafts: propose the next four tokens of the best hypothesis, all right.
        seconds: per step with drafts.
    """
    options = Options(num_beams=num_beams, max_new_tokens=max_new_tokens, length_penalty=1.0, early_stopping=False)
    made = options, 12, set(), logits_of
    plain, lazy = Searched(BeamSearch, *made).run(), Searched(LazyBeamSearch, *made)
    drafter = Drafter(lazy, seconds=seconds) if drafts else None
    lazy.run(drafter, LikelyNeeded(max_new_tokens, num_beams, cost, cost, drafter and drafter.controller))
    assert without_nodes(lazy.found) == without_nodes(plain.found)
    if not drafts:  # no beam is evaluated twice, or in vain; at first all beams are the prompt
        evaluated = num_beams + sum(lazy.sizes[1:])
        assert lazy.record.evaluated(num_beams) == pytest.approx(evaluated / sum(plain.sizes), abs=0.02)
    return lazy.sizes, plain.sizes


def test_a_confident_model_evaluates_few_of_its_beams_unless_passes_over_all_cost_no_more():
    sizes, of_plain = passes_of_our_policy(Confident(), float)
    assert sum(of_plain) == 8 * 20
    assert sum(sizes) < 40
    sizes, of_plain = passes_of_our_policy(Confident(), lambda nodes: 1.0)
    assert sizes == of_plain


@pytest.mark.parametrize("num_beams", [2, 4, 8])
def test_with_drafts_a_confident_hypothesis_goes_on_alone(num_beams):
    """Although passes over all beams cost no more: each of its passes takes several steps."""
    sizes, of_plain = passes_of_our_policy(Confident(), lambda nodes: 1.0, num_beams=num_beams, drafts=True)
    assert len(of_plain) == 20
    assert len(sizes) <= 7


def test_drafts_that_would_not_pay_go_below_no_best_beam():
    """This drafter then drafts below all beams, so that passes still take several steps."""
    passes = {"num_beams": 4, "drafts": True}
    cheap, _ = passes_of_our_policy(Confident(), lambda nodes: 1.0, seconds=0.3, **passes)
    dear, _ = passes_of_our_policy(Confident(), lambda nodes: 1.0, seconds=0.95, **passes)
    unsure, _ = passes_of_our_policy(Confident(falls=2), lambda nodes: 1.0, seconds=0.3, **passes)
    assert max(cheap) == 4 + 4
    assert max(dear) == max(unsure) == 4 + 4 * 4


def test_a_draft_model_drafts_below_the_best_beam(save):
    model = random_model("llama", initializer_range=1.0)
    head_of(model)[:] *= 8  # confident
    folder = save(model)
    lm, draft = specbeam.load(folder, backend="cpu"), specbeam.load(folder, backend="cpu")
    seconds = {lm.backend: lambda nodes: 1.0 + 0.1 * nodes, draft.backend: lambda nodes: 0.01 * nodes}
    engine = Engine(lm, costs=lambda backend, ahead=False: CostTable(seconds[backend]))
    options = {"num_beams": 8, "max_new_tokens": 32, "min_new_tokens": 32}
    plain = specbeam.generate(lm, [97, 98, 99], **options, bound_rule=False)
    best = engine.submit([97, 98, 99], options, draft=draft)
    every = engine.submit([97, 98, 99], options | {"num_return_sequences": 8}, draft=draft)
    engine.run()
    drafted = best.result()
    assert drafted.sequences == plain.sequences == every.result().sequences[:1]
    assert drafted.stats.evaluated_beams < 0.7
    assert every.result().stats.evaluated_beams > 0.9  # all of them are needed
    assert drafted.stats.target_passes < 30 < plain.stats.target_passes


class AlsoInOtherWords:
    """A text that may begin with either of two tokens. The likelier beginning loses much at the end.

    Args:
        agrees: the tokens after the beginning are the same. Otherwise each is another one.
    """

    def __init__(self, agrees, end):
        self.agrees, self.end = agrees, end

    def __call__(self, tokens):
        first, place = tokens[len(PROMPT)] if len(tokens) > len(PROMPT) else 0, len(tokens) - len(PROMPT)
        likely = (7 * place + place**2 + (0 if self.agrees else first * place)) % 12
        logits = np.where(np.arange(12) == likely, 12.0, 0.0) + 1e-3 * logits_after(tokens, 12, 0, "flat")
        if place == 0:
            logits[:2] = 14.0, 12.5
        elif place == self.end and first == 0:
            logits = 1e-3 * logits
        return logits


@pytest.mark.parametrize(("agrees", "passes"), [(True, range(1, 12)), (False, range(36, 48))])
def test_beams_that_come_back_copy_from_the_best_hypothesis(agrees, passes):
    """The second beginning is deferred until the first one loses. By then the text after it is known."""
    options = Options(num_beams=2, max_new_tokens=40, length_penalty=1.0, early_stopping=False)
    made = options, 12, set(), AlsoInOtherWords(agrees, end=36)
    plain, lazy = Searched(BeamSearch, *made).run(), Searched(LazyBeamSearch, *made)
    lazy.run(None, BestFirst(), lazy.copies(lambda nodes: 1 + 0.02 * nodes))
    assert without_nodes(lazy.found) == without_nodes(plain.found)
    assert plain.found[0][1][0] == 1  # it came back
    assert len(lazy.sizes) - 37 in passes  # after the pass in which the first hypothesis lost
    assert lazy.record.drafted < 120  # so wrong copies end soon


@pytest.mark.parametrize("falls", [5, 11])
@pytest.mark.parametrize("cost", [lambda nodes: 1.0 + 0.1 * nodes, lambda nodes: float(nodes)])
def test_wrong_expectations_cost_few_steps(falls, cost):
    """The policy loses a few steps at most."""
    sizes, of_plain = passes_of_our_policy(Confident(falls), cost, max_new_tokens=120)
    assert sum(map(cost, sizes)) <= 1.05 * sum(map(cost, of_plain))
    assert cost(2) == 2 or sizes[-60:] == of_plain[-60:]


def best_first(setup, drafter):
    return beam_search(LazyBeamSearch.of(setup), setup.record, drafter, BestFirst())


def plain_beams(setup, drafter):
    return beam_search(BeamSearch.of(setup), setup.record)


def test_deferred_beams_take_no_memory(save):
    """A request counts with the nodes that it has evaluated, and not with all beams that it knows."""
    model = random_model("llama")
    head_of(model)[:] *= 8  # a confident model
    lm = specbeam.load(save(model), backend="cpu")
    num_beams, length = 16, 24

    def submit(engine):
        options = {"num_beams": num_beams, "max_new_tokens": length, "min_new_tokens": length}
        return engine.submit([97, 98, 99], options, strategy=best_first)

    alone, used = submit(engine := Engine(lm)), []
    while engine.step():
        used.append(alone.used_slots)
    assert max(used) < num_beams * length / 2
    engine = Engine(lm, max_cache_tokens=max(used) + num_beams + 8)
    wide = submit(engine)
    for _ in range(1 + int(np.argmax(used))):
        engine.step()
    other = engine.submit([5], {"max_new_tokens": 1})
    engine.step()
    assert other.done
    engine.run()
    assert wide.result().sequences == alone.result().sequences


@pytest.mark.parametrize(
    ("strategy", "draft", "sizes", "num_beams"),
    [(best_first, None, {}, 16), (None, "ngram", {"num_draft_tokens": 4}, 32)],
)
def test_a_search_without_memory_for_more_than_plain_beams_goes_on_as_plain_beams(
    save, strategy, draft, sizes, num_beams
):
    """Evaluated beams keep their memory as long as an earlier step is open, and draft tokens take memory, too."""
    lm = specbeam.load(save(random_model("llama", vocab_size=5, eos_token_id=1, bos_token_id=0)), backend="cpu")
    prompt, how = [2, 3] * 20, {"strategy": strategy, "draft": draft}
    options = {"num_beams": num_beams, "max_new_tokens": 40, "share_prefix": False}
    options["num_return_sequences"] = num_beams // 4
    plain = ended(Engine(lm), prompt, options, strategy=plain_beams)
    room = plain.stats.peak_slots + num_beams
    assert room < (40 + num_beams * 40) * 2 / 3  # beams share their prefixes
    assert ended(Engine(lm), prompt, options | sizes, **how).stats.peak_slots > room
    assert ended(Engine(lm, max_cache_tokens=room), prompt, options | sizes, **how).sequences == plain.sequences


@pytest.mark.parametrize(("length", "reading", "should_defer"), [(7, 0.0, True), (7, 0.1, False), (8, 0.1, True)])
def test_a_draft_model_reads_the_prompt_after_eight_tokens_at_the_earliest(length, reading, should_defer):
    policy = LikelyNeeded(64, 4, *[COSTS[0]] * 2, drafts_of(reading_seconds=reading))
    assert policy.should_defer(np.array([-0.01, -9, -9, -9], np.float32), length) == should_defer


@pytest.mark.parametrize(("later", "should_defer"), [(1.0, False), (0.1, True)])
def test_beams_that_may_be_needed_are_deferred_if_copies_make_later_steps_cheap(later, should_defer):
    policy = LikelyNeeded(64, 4, *[COSTS[0]] * 2, drafts_of(), later=Rounds(1e9 * later, 1e9))
    assert policy.should_defer(np.array([-4.0, -4.1, -4.1, -4.1], np.float32), 16) == should_defer


def test_chances_of_impossible_beams_are_numbers():
    policy = LikelyNeeded(8, 4, *[COSTS[0]] * 2)
    impossible = np.full(4, -np.inf, np.float32)
    with np.errstate(all="raise"):
        policy.should_defer(impossible, 2)
        chosen = policy.choose(Deferred(np.arange(4), impossible, np.full(4, 2), np.ones(4, bool)))
    assert chosen.any()
