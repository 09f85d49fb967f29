"""Lazy beam search returns what beam search returns, bit for bit, whichever beams it evaluates first."""

import string
import zlib
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam import Engine, Options, TokenTrie
from specbeam.decoding import Evaluate, Hypothesis
from specbeam.decoding.beam import BeamSearch
from specbeam.decoding.beam_search import beam_search
from specbeam.decoding.candidates import Continuations, highest_indices
from specbeam.decoding.deferring import Deferred, LikelyNeeded
from specbeam.decoding.drafter import DraftTokens
from specbeam.decoding.lazy_beam import LazyBeamSearch
from specbeam.decoding.processors import Processors
from specbeam.decoding.record import Record
from specbeam.decoding.selector import Selector
from specbeam.decoding.stopping import Stopping
from specbeam.engine import CostTable
from specbeam.engine.strategies import make_search
from specbeam.selection import select
from specbeam.tree import Tree
from tests.conftest import (
    assert_are_beams_of_transformers,
    beams_of_transformers,
    examples,
    in_thorough_mode,
    prompt_and_beam_options,
    random_model,
)

PROMPT = [0, 1]


def logits_after(tokens, vocab_size, seed, kind):
    """The logits of a model that is a table of random numbers, float32 [vocab]."""
    random = np.random.default_rng([seed, zlib.crc32(np.array(tokens).tobytes())])
    sharpness = {"flat": 0.3, "usual": 2.0, "peaked": 8.0, "ties": 1.0}[kind]
    logits = sharpness * random.standard_normal(vocab_size)
    return np.round(logits) if kind == "ties" else logits


def run(strategy, tree, logits_of):
    """The hypotheses of a strategy with their tokens, those it yielded, and the number of nodes in each pass."""
    yielded, sizes, times, selection = [], [], Counter(), None
    try:
        while True:
            step = strategy.send(selection)
            if selection is not None:
                selection.sources = ()  # as the engine does it: no strategy can use the rows of earlier passes
            selection = None
            if isinstance(step, Hypothesis):
                yielded.append((tree.new_tokens(step.node), step.score, step.finish_reason))
            else:
                assert isinstance(step, Evaluate)
                sizes.append(len(step.nodes))
                times.update({*step.nodes.tolist()})
                assert max(times.values()) <= 20  # again where scores are equal, but there is no loop
                rows = [logits_of(tree.tokens(tree.path(node)).tolist()) for node in step.nodes]
                selection = select(torch.tensor(np.stack(rows), dtype=torch.float32), step.selection_request)
    except StopIteration as end:
        found = [(tree.new_tokens(h.node), h.score, h.finish_reason) for h in end.value]
        return found, yielded, sizes


def decode(ids, skip_special_tokens=True):
    """The text of tokens. Each token is a letter."""
    return "".join(string.ascii_lowercase[i] for i in ids)


def searched(kind, options, vocab_size, eos, logits_of, **more):
    """A tree, a search over it, and its record."""
    tree = Tree(PROMPT)
    stop = Stopping(frozenset(eos), len(PROMPT) + options.max_new_tokens, options.stop_strings, decode)
    selector = Selector(Processors(options, frozenset(eos), vocab_size))
    search = kind(
        tree,
        selector,
        stop,
        options.num_beams,
        options.num_return_sequences,
        options.length_penalty,
        options.early_stopping,
        **more,
    )
    record = Record(tree)
    return tree, search, record


class SomeBeams:
    """A policy that evaluates random beams, and defers none in random steps."""

    def __init__(self, seed, eagerness, plain=0.0):
        self.random = np.random.default_rng(seed)
        self.eagerness, self.plain = eagerness, plain

    def pays(self, scores, length):
        return self.random.random() >= self.plain

    def choose(self, deferred):
        chosen = self.random.random(len(deferred.nodes)) < self.eagerness
        chosen[self.random.integers(len(chosen))] = True
        return chosen

    def drafts_pay(self, deferred, count):
        return self.random.random() < 0.8


class BestFirst:
    """Go on with the best beam; else evaluate the best of the beams that decide whether that may be done."""

    def pays(self, scores, length):
        return True

    def choose(self, deferred):
        scores = np.where(deferred.leading | ~deferred.leading.any(), deferred.scores, -np.inf)
        chosen = np.zeros(len(scores), bool)
        chosen[scores.argmax()] = True
        return chosen

    def drafts_pay(self, deferred, count):
        return True


class SomeDraftTokens:
    """Drafts chains below the best beam, and below all beams. Half of their tokens are the likeliest."""

    def __init__(self, tree, stop, logits_of, seed):
        self.tree, self.stop, self.logits_of = tree, stop, logits_of
        self.random = np.random.default_rng(seed)
        self.controller = self
        self.seconds = 0.3

    def propose(self, tips, scores):
        nodes, self.length = [], int(self.tree.depths(tips).max())
        for end in np.unique(tips).tolist():
            for _ in range(self.random.integers(5)):
                logits = self.logits_of(self.tree.tokens(self.tree.path(end)).tolist())
                token = int(logits.argmax() if self.random.random() < 0.5 else self.random.integers(len(logits)))
                if token in self.stop.eos_token_ids or self.tree.depths([end])[0] + 2 >= self.stop.max_length:
                    break
                end = int(self.tree.draft(np.array([end]), np.array([token]))[0])
                nodes.append(end)
        return DraftTokens(np.unique(np.array(nodes, dtype=np.int64)))
        yield

    def learn(self, draft_tokens, tree, steps):
        """The steps are those after the tips."""
        lengths = [int(tree.depths(ends).max()) - self.length for ends in steps]
        assert lengths == [*range(1, len(steps) + 1)]

    def seconds_per_step(self, steps):
        return self.seconds

    def skip(self):
        pass


class RightDraftTokens(SomeDraftTokens):
    """Four draft tokens below each tip, which are the likeliest tokens."""

    def propose(self, tips, scores):
        nodes, self.length = [], int(self.tree.depths(tips).max())
        for end in np.unique(tips).tolist():
            room = self.stop.max_length - 2 - int(self.tree.depths([end])[0])
            for _ in range(min(4, room)):
                token = int(self.logits_of(self.tree.tokens(self.tree.path(end)).tolist()).argmax())
                end = int(self.tree.draft(np.array([end]), np.array([token]))[0])
                nodes.append(end)
        return DraftTokens(np.array(nodes, dtype=np.int64))
        yield


@given(seed=st.integers(0, 2**32), count=st.integers(1, 30), parts=st.integers(1, 4), kinds=st.sampled_from([3, 10**6]))
def test_the_best_continuations_are_merged_in_the_order_of_a_stable_sort(seed, count, parts, kinds):
    """Few different scores make many equal ones. Beams become known in any order."""
    random = np.random.default_rng(seed)
    scores = -np.sort(random.integers(0, kinds, (8, 40))).astype(np.float32)
    expected = (-scores).ravel().argsort(kind="stable")[:count]
    merged = None
    for beams in np.array_split(random.permutation(8), parts):
        beams = np.sort(beams)
        best = highest_indices(scores[beams].ravel(), count)
        place = beams[best // 40] * 40 + best % 40
        more = Continuations(beams[best // 40], place, scores.ravel()[place], scores.ravel()[place])
        merged = more if merged is None else merged.merged_with(more, count)
    assert merged.tokens.tolist() == expected.tolist()


LENGTH_PENALTIES = [1.0, 0.0, 2.0, -1.0, 0.5]
STOP_STRINGS = [(), (), ("ab",), ("a", "cc"), ("b", "c", "d", "e", "f")]
POLICIES = ["best first", "one", "few", "many", "in parts", "ours"]
COSTS = [lambda nodes: 1.0, lambda nodes: 1 + 0.2 * nodes, lambda nodes: 1.0 * nodes]


def make_policy(name, seed, options):
    random = {"one": (0.0, 0.0), "few": (0.3, 0.0), "many": (0.7, 0.0), "in parts": (0.2, 0.5)}
    if name in random:
        return SomeBeams(seed, *random[name])
    if name == "best first":
        return BestFirst()
    return LikelyNeeded(options.max_new_tokens, options.num_beams, *[COSTS[seed % len(COSTS)]] * 2)


def assert_lazy_beams_are_beams(options, vocab_size, eos, kind, policy, seed, drafts=False, **more):
    """Compare both searches. Return how many nodes each evaluated."""
    made = vocab_size, eos, lambda tokens: logits_after(tokens, vocab_size, seed, kind)
    tree, search, record = searched(BeamSearch, options, *made, **more)
    plain, nbest, of_all = run(beam_search(search, record), tree, made[2])
    tree, search, lazy_record = searched(LazyBeamSearch, options, *made, **more)
    drafter = SomeDraftTokens(tree, search.stop, made[2], seed) if drafts else None
    strategy = beam_search(search, lazy_record, drafter, make_policy(policy, seed, options))
    lazy, yielded, sizes = run(strategy, tree, made[2])
    assert lazy == plain
    assert yielded == lazy
    assert nbest == plain
    return sum(sizes), sum(of_all)


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
def test_lazy_beams_are_beams(vocab_size, kind, policy, num_beams, max_new_tokens, more, seed, data):
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
    options = Options(
        num_beams=12,
        num_return_sequences=2,
        max_new_tokens=6,
        length_penalty=-3.0,
        early_stopping="never",
        no_repeat_ngram_size=3,
    )
    assert_lazy_beams_are_beams(options, 12, {9}, "peaked", "best first", seed=537217540)


class Counted:
    """A policy that counts the passes in which beams are deferred."""

    def __init__(self, policy):
        self.policy, self.passes = policy, 0
        self.pays = policy.pays

    def choose(self, deferred):
        self.passes += 1
        return self.policy.choose(deferred)


@settings(max_examples=1000 if in_thorough_mode() else examples())
@given(
    vocab_size=st.sampled_from([8, 20, 200]),
    sharpness=st.sampled_from([0.05, 0.25, 0.4]),  # far sharper models amplify the rounding of float32
    policy=st.sampled_from(["best first", "few", "in parts"]),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_lazy_beams_are_those_of_transformers(tiny, vocab_size, sharpness, policy, seed, data):
    model, lm = tiny("llama", vocab_size=vocab_size, eos_token_id=1, bos_token_id=0, initializer_range=sharpness)
    prompt, options = prompt_and_beam_options(data, vocab_size, early_stopping=[False, "never"], least_new_tokens=2)
    counted = []

    def lazily(setup, drafter):
        counted.append(Counted(make_policy(policy, seed, setup.options)))
        return beam_search(make_search(setup, LazyBeamSearch), setup.record, policy=counted[0])

    expected, scores = beams_of_transformers(model, prompt, **options)
    engine = Engine(lm)
    request = engine.submit(prompt, options, strategy=lazily)
    engine.run()
    assert policy == "in parts" or counted[0].passes  # it was lazy
    assert_are_beams_of_transformers(request.result().sequences, expected, scores)


WIDE = [
    {"num_beams": 16, "min_new_tokens": 24},
    {"num_beams": 16, "num_return_sequences": 16, "length_penalty": 0.0},
    {"num_beams": 16, "num_return_sequences": 3, "length_penalty": -1.0, "early_stopping": "never"},
    {"num_beams": 16, "num_return_sequences": 4, "constraint": TokenTrie([[a, b, 5] for a in (5, 6) for b in (8, 9)])},
    {"num_beams": 16, "frequency_penalty": 0.7, "eos_token_id": [1, 3, 5]},
    {"num_beams": 16, "early_stopping": True, "eos_token_id": [1, 3, 5]},
    {"num_beams": 16, "trace": True},
    {"num_beams": 16, "temperature": 0.8, "seed": 1},
    {"num_beams": 16, "presence_penalty": -0.5},
    {"num_beams": 16, "prefix_allowed_tokens_fn": lambda batch, ids: [*range(4, 40)]},
]


@pytest.fixture(scope="module")
def twins(save):
    """A model whose tokens come in pairs that are always equally likely."""
    model = random_model("llama")
    model.lm_head.weight.data[1::2] = model.lm_head.weight.data[:-1:2]
    return specbeam.load(save(model), backend="cpu")


@pytest.mark.parametrize("scale", [0.02, 0.2, 1.0, "twins"])
def test_wide_beams_of_an_engine_are_plain_beams(request, tiny, save, scale):
    """``bound_rule=False`` evaluates all beams. The searches share passes, and are preempted for want of memory."""
    if scale == "twins":
        lm = request.getfixturevalue("twins")
    else:
        lm = specbeam.load(save(random_model("llama", initializer_range=scale)), backend="cpu")
    engine = Engine(lm, max_batch_tokens=50, max_cache_tokens=400)
    pairs = [
        [engine.submit([97, 98, 99], {"max_new_tokens": 24, **options, **how}) for how in ({}, {"bound_rule": False})]
        for options in WIDE
    ]
    engine.run()
    for lazy, plain in pairs:
        assert lazy.result().sequences == plain.result().sequences


@pytest.mark.parametrize("num_beams", [2, 5, 16])
@pytest.mark.parametrize("draft", ["ngram", "suffix", "model", "itself"])
@pytest.mark.parametrize("scale", [0.02, 0.3, 1.0])
def test_beams_with_drafts_are_plain_beams(save, draft, scale, num_beams):
    lm = specbeam.load(save(random_model("llama", initializer_range=scale)), backend="cpu")
    drafts = {"itself": lm}
    if draft == "model":
        drafts["model"] = specbeam.load(save(random_model("llama", seed=1, initializer_range=scale)), backend="cpu")
    engine, pairs = Engine(lm), []
    for options in WIDE[:5]:
        num_return_sequences = min(num_beams, options.get("num_return_sequences", 1))
        beams = {"num_beams": num_beams, "num_return_sequences": num_return_sequences}
        options = {"max_new_tokens": 24, **options, **beams}
        one = engine.submit([97, 98, 99, 97, 98], options, draft=drafts.get(draft, draft))
        pairs.append([one, engine.submit([97, 98, 99, 97, 98], {**options, "bound_rule": False})])
    engine.run()
    for lazy, plain in pairs:
        assert lazy.result().sequences == plain.result().sequences
        assert 0 < lazy.result().stats.evaluated_beams <= plain.result().stats.evaluated_beams == 1


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
    tree, search, record = searched(BeamSearch, options, 12, set(), logits_of)
    plain, _, of_plain = run(beam_search(search, record), tree, logits_of)
    tree, search, record = searched(LazyBeamSearch, options, 12, set(), logits_of)
    drafter = RightDraftTokens(tree, search.stop, logits_of, seed=0) if drafts else None
    if drafter is not None:
        drafter.seconds = seconds
    policy = LikelyNeeded(max_new_tokens, num_beams, cost, cost, None if drafter is None else drafter.controller)
    lazy, _, sizes = run(beam_search(search, record, drafter, policy), tree, logits_of)
    assert lazy == plain
    if not drafts:  # no beam is evaluated twice, or in vain; at first all beams are the prompt
        evaluated = num_beams + sum(sizes[1:])
        assert record.evaluated(num_beams) == pytest.approx(evaluated / sum(of_plain), abs=0.02)
    return sizes, of_plain


def test_a_confident_model_evaluates_few_of_its_beams():
    sizes, of_plain = passes_of_our_policy(Confident(), lambda nodes: float(nodes))
    assert sum(of_plain) == 8 * 20
    assert sum(sizes) < 40


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
    model.lm_head.weight.data *= 8  # confident
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
    assert drafted.stats.evaluated_beams < 0.6
    assert every.result().stats.evaluated_beams > 0.9  # all of them are needed
    assert drafted.stats.target_passes < 24 < plain.stats.target_passes


def test_where_passes_over_all_beams_cost_no_more_all_are_evaluated():
    sizes, of_plain = passes_of_our_policy(Confident(), lambda nodes: 1.0)
    assert sizes == of_plain


@pytest.mark.parametrize("falls", [5, 11])
@pytest.mark.parametrize("cost", [lambda nodes: 1.0 + 0.1 * nodes, lambda nodes: float(nodes)])
def test_wrong_expectations_cost_few_steps(falls, cost):
    """The policy loses a few steps at most."""
    sizes, of_plain = passes_of_our_policy(Confident(falls), cost, max_new_tokens=120)
    assert sum(map(cost, sizes)) <= 1.05 * sum(map(cost, of_plain))
    assert cost(2) == 2 or sizes[-60:] == of_plain[-60:]


def best_first(setup, drafter):
    return beam_search(make_search(setup, LazyBeamSearch), setup.record, drafter, BestFirst())


def test_deferred_beams_take_no_memory(save):
    """A request counts with the nodes that it has evaluated, and not with all beams that it knows."""
    model = random_model("llama")
    model.lm_head.weight.data *= 8  # a confident model
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
    ("strategy", "draft", "sizes"),
    [(best_first, None, {}), (None, "ngram", {"num_draft_tokens": 4})],
)
def test_a_search_without_memory_for_more_than_plain_beams_goes_on_as_plain_beams(save, strategy, draft, sizes):
    """Evaluated beams keep their memory as long as an earlier step is open, and draft tokens take memory, too."""
    lm = specbeam.load(save(random_model("llama", vocab_size=5, eos_token_id=1, bos_token_id=0)), backend="cpu")
    options = {"num_beams": 32, "max_new_tokens": 40, "num_return_sequences": 8, "share_prefix": False}

    def found(engine, **how):
        request = engine.submit([2, 3] * 20, options | how.pop("sizes", {}), **how)
        engine.run()
        return request.result()

    plain = found(Engine(lm), strategy=lambda setup, _: beam_search(make_search(setup), setup.record))
    room, how = plain.stats.peak_slots + 32, {"strategy": strategy, "draft": draft, "sizes": sizes}
    assert found(Engine(lm), **how).stats.peak_slots > room
    assert found(Engine(lm, max_cache_tokens=room), **how).sequences == plain.sequences


def test_chances_of_impossible_beams_are_numbers():
    policy = LikelyNeeded(8, 4, *[COSTS[0]] * 2)
    impossible = np.full(4, -np.inf, np.float32)
    with np.errstate(all="raise"):
        policy.pays(impossible, 2)
        chosen = policy.choose(Deferred(np.arange(4), impossible, np.full(4, 2), np.ones(4, bool)))
    assert chosen.any()


def test_as_many_beams_are_needed_as_are_returned():
    scores = np.array([-1.0, -20.0, -40.0, -60.0], np.float32)  # each is far ahead of the next one
    deferred = Deferred(np.arange(4), scores, np.full(4, 4), np.ones(4, bool))
    for returned in range(1, 5):
        policy = LikelyNeeded(8, 4, *[COSTS[1]] * 2, num_returned=returned)
        assert policy.choose(deferred).tolist() == [rank < returned for rank in range(4)]
        assert policy.pays(scores, 4) == (returned <= 2)
