"""A trace records each round as it happened."""

import json
import re

import pytest

import specbeam
from specbeam.cli.trace import show_trace
from specbeam.engine.costs import CostTable, nominal_cost
from tests.conftest import run_alone, table_of_costs

HOW = {
    "greedy": {},
    "drafted": {"draft": "suffix", "num_draft_tokens": 4, "draft_width": 2},
    "drafted by a model": {"num_draft_tokens": 4, "draft_width": 2},
    "sampled": {"draft": "ngram", "temperature": 0.05, "seed": 3},
    "beams": {"num_beams": 3, "length_penalty": 0.0},
    "lazy beams": {"num_beams": 16, "length_penalty": 0.0},
    "lazy beams with a lookup": {"num_beams": 4, "length_penalty": 0.0, "draft": "ngram"},
    "drafted beams": {"num_beams": 3, "length_penalty": 0.0, "num_draft_tokens": 3, "draft_width": 5},
}


class Replayed:
    """The tree that a trace describes, and the beams in it. Nodes are added, evaluated and dropped, in this order."""

    def __init__(self, trace, prompt_length):
        self.root = prompt_length - 1
        self.after, self.token, self.log_prob = {self.root: None}, {}, {}
        self.beams, self.drafted, self.dropped = [], set(), set()
        for entry in trace:
            beams = [beam for step in [*entry["steps"], entry["ahead"]] for beam in step]
            for one in [*entry["drafted"], *beams, *entry["ended"]]:
                self._add(one)
            assert all(beam["drafted"] == (beam["node"] in self.drafted) for beam in beams)
            assert {*entry["evaluated"]} <= {*self.after} - self.dropped
            assert {*entry["dropped"]} <= {*self.after} - self.dropped
            self.dropped.update(entry["dropped"])
            self.beams += beams
        self.certain = [self.token[node] for entry in trace for node in entry["certain"]]

    def _add(self, entry):
        node, after = entry["node"], entry["after"]
        assert node in self.after or (after in self.after and after not in self.dropped)
        assert self.after.setdefault(node, after) == after
        assert self.token.setdefault(node, entry["token_id"]) == entry["token_id"]
        if "log_prob" in entry:
            self.log_prob[node] = entry["log_prob"]
        else:
            self.drafted.add(node)

    def _nodes(self, node):
        while node != self.root:
            yield node
            node = self.after[node]

    def path(self, node):
        return [self.token[node] for node in self._nodes(node)][::-1]

    def score(self, node):
        return sum(self.log_prob[node] for node in self._nodes(node))


@pytest.fixture(scope="module", params=HOW)
def result(request, tiny, confident):
    is_lazy = "lazy" in request.param
    lm = confident if is_lazy else tiny("llama", initializer_range=0.1)[1]  # both like to repeat themselves
    options = {"max_new_tokens": 30, "eos_token_id": [], "trace": True, **HOW[request.param]}
    draft = options.pop("draft", None)
    if "model" in request.param or request.param == "drafted beams":
        draft = tiny("llama", initializer_range=0.102)[1]
    costs = table_of_costs(lambda nodes: 1 + 0.2 * nodes) if is_lazy else None
    result = run_alone(lm, [1, 2, 3, 1, 2], options, draft, costs=costs)
    assert is_lazy == any(entry["ahead"] for entry in result.trace)
    return result


def test_the_steps_lead_to_the_text(result):
    beams = [[]]
    for entry in result.trace:
        for step in entry["steps"]:
            beams = [[*beams[b["beam"]], b["token_id"]] for b in step]
            scores = [b["score"] for b in step]
    assert beams[0] == result.token_ids
    assert scores[0] == pytest.approx(result.sequences[0].score, abs=1e-4)
    assert sum(len(entry["steps"]) for entry in result.trace) == 30


def test_positions_of_draft_tokens_are_counted_as_the_trace_shows_them(result):
    """A draft token below one that may still be accepted is one position further."""
    place, counts = {}, []
    for entry in result.trace:
        for draft_token in entry["drafted"]:
            place[draft_token["node"]] = at = place.get(draft_token["after"], -1) + 1
            counts += [[0, 0]] * (at == len(counts))
            counts[at] = [counts[at][0] + 1, counts[at][1]]
        for beam in [*(beam for step in entry["steps"] for beam in step), *entry["ahead"]]:
            if (at := place.pop(beam["node"], None)) is not None:
                counts[at] = [counts[at][0], counts[at][1] + 1]
    assert result.stats.acceptance_by_position == (counts or None)
    assert sum(accepted for _, accepted in counts) == result.stats.accepted


def test_rounds_and_their_costs_add_up_to_the_statistics(result):
    stats, costs = result.stats, [entry["pass"] for entry in result.trace]
    for name in ("target_passes", "draft_passes"):
        assert sum(cost[name] for cost in costs) == getattr(stats, name)
    assert sum(cost["nodes"] for cost in costs) == stats.nodes_evaluated
    for name in ("target_seconds", "draft_seconds"):
        assert sum(cost[name] for cost in costs) == pytest.approx(getattr(stats, name))
    times = [cost["seconds"] for cost in costs]
    assert times == sorted(times)
    assert times[-1] <= stats.seconds
    draft_tokens = [g for entry in result.trace for g in entry["drafted"]]
    assert len(result.trace) == stats.target_passes
    assert len(draft_tokens) == stats.drafted
    assert sum(g["accepted"] for g in draft_tokens) == stats.accepted
    assert stats.steps_per_target_pass == pytest.approx(30 / stats.target_passes)
    if stats.drafted:
        assert stats.acceptance_rate == stats.accepted / stats.drafted
        assert stats.accepted
    for entry in result.trace:
        for i, draft_token in enumerate(entry["drafted"]):
            assert draft_token["parent"] is None or draft_token["parent"] < i


def test_nodes_make_a_tree_whose_paths_are_the_sequences(result):
    tree = Replayed(result.trace, 5)
    for beam in tree.beams:
        assert beam["score"] == pytest.approx(tree.score(beam["node"]), abs=1e-4)
    assert tree.certain == result.token_ids
    assert "".join(entry["text"] for entry in result.trace) == result.text
    for sequence in result.sequences:
        assert sequence.token_ids in [tree.path(node) for node in tree.after]


def test_pieces_have_the_rounds_as_they_come(tiny):
    lm, options = tiny("llama", initializer_range=0.1)[1], {"num_beams": 3, "draft": "suffix", "num_draft_tokens": 3}
    pieces = [*specbeam.stream(lm, [1, 2, 3, 1, 2], max_new_tokens=30, eos_token_id=[], trace=True, **options)]
    rounds = [entry for piece in pieces for entry in piece.trace]
    result = pieces[-1].result
    assert len(rounds) == len(result.trace) > len([piece for piece in pieces if piece.token_ids]) > 3
    for entry, final in zip(rounds, result.trace, strict=True):
        assert entry | {"drafted": None} == final | {"drafted": None}
        for draft_token, judged in zip(entry["drafted"], final["drafted"], strict=True):
            assert draft_token | {"accepted": None} == judged | {"accepted": None}
            assert draft_token["accepted"] <= judged["accepted"]
    assert all(piece.trace is None for piece in specbeam.stream(lm, [1], max_new_tokens=2))


def test_the_likeliest_tokens_are_those_of_the_text(tiny):
    result = specbeam.generate(tiny("llama")[1], [1, 2, 3], max_new_tokens=8, num_beams=2, top_logprobs=4, trace=True)
    rows = [row for entry in result.trace for row in entry["likeliest"]]
    likeliest = {row["after"]: {one["token_id"]: one["log_prob"] for one in row["tokens"]} for row in rows}
    tree = Replayed(result.trace, 3)
    (end,) = [node for node in tree.after if tree.path(node) == result.token_ids]
    for expected in reversed(result.sequences[0].top_logprobs):
        end = tree.after[end]
        assert likeliest[end] == pytest.approx(expected, abs=1e-5)


def test_it_is_plain_data_and_can_be_read(result):
    assert json.loads(json.dumps(result.to_dict()))["trace"] == result.trace
    lines = list(show_trace(result.trace, colour=False))
    evaluated = {node for entry in result.trace for node in entry["evaluated"]}
    steps = [step for entry in result.trace for step in entry["steps"]]
    left_out = sum(beam["node"] not in evaluated for step in steps[:-1] for beam in step)
    assert sum(line.endswith("  (not evaluated)") for line in lines) == left_out
    if all(len(step) == 1 for entry in result.trace for step in entry["steps"]) and result.stats.accepted:
        accepted = next(g for entry in result.trace for g in entry["drafted"] if g["accepted"])
        assert f"+{accepted['text']}+".replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t") in "".join(lines)


COUNTS = ("target_passes", "nodes_evaluated", "peak_slots", "evaluated_beams", "drafted", "accepted")


@pytest.mark.parametrize("draft", [None, "ngram", "suffix"])
@pytest.mark.parametrize("num_beams", [4, 16])
def test_a_trace_changes_no_pass_and_no_bit(confident, give_costs, num_beams, draft):
    """Nothing goes ahead in the ``torch`` backend: there a search without a trace takes the same rounds."""
    give_costs(lambda nodes: 1 + 0.2 * nodes)
    options = {"num_beams": num_beams, "draft": draft, "max_new_tokens": 40}
    plain, traced = (specbeam.generate(confident, [1, 2, 3, 1, 2], trace=trace, **options) for trace in (False, True))
    assert traced.sequences == plain.sequences
    assert [getattr(traced.stats, name) for name in COUNTS] == [getattr(plain.stats, name) for name in COUNTS]
    assert traced.stats.acceptance_histogram == plain.stats.acceptance_histogram
    assert traced.stats.acceptance_by_position == plain.stats.acceptance_by_position
    assert (plain.stats.evaluated_beams < 1) == (num_beams == 16 or draft is not None)
    assert plain.trace is None
    assert "trace" not in plain.to_dict()


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, None),
        ({"draft": "ngram", "num_draft_tokens": 2}, None),
        ({"draft": "itself", "temperature": 1.0, "seed": 1}, "draft proposed no tokens: that would have saved no time"),
        ({"draft": "itself", "temperature": 1.0, "seed": 1, "num_draft_tokens": 2}, None),
        ({"draft": "ngram", "max_new_tokens": 1}, "draft proposed no tokens: it found no likely continuation"),
    ],
    ids=["no draft", "used", "as slow as the target", "a size that was asked for", "no room for a draft token"],
)
def test_the_statistics_say_why_a_draft_was_not_used(lm, options, note, give_costs):
    give_costs(nominal_cost)
    if options.get("draft") == "itself":
        options = {**options, "draft": lm}
    stats = specbeam.generate(lm, [1, 2, 1, 2], **{"max_new_tokens": 20, **options}).stats
    assert stats.draft_note == note
    assert (stats.drafted == 0) == (note is not None or "draft" not in options)


def test_the_statistics_say_that_drafting_was_skipped_in_most_rounds(tiny):
    """The samples have nothing in common with the draft's: draft tokens soon stop paying."""
    lm, other = tiny("llama")[1], tiny("llama", seed=7, num_hidden_layers=8)[1]
    seconds = {lm.backend: 1.0, other.backend: 0.7}

    def costs(backend, ahead=False):
        return CostTable(lambda nodes: seconds[backend] * nominal_cost(nodes))

    options = {"max_new_tokens": 60, "temperature": 2.0, "seed": 1, "eos_token_id": [], "trace": True}
    result = run_alone(lm, [1, 2, 3], options, other, costs=costs)
    undrafted = sum(not entry["drafted"] for entry in result.trace)
    assert result.stats.drafted > 0
    expected = r"draft proposed no tokens in (\d+) of (\d+) passes: that would have saved no time"
    note = re.fullmatch(expected, result.stats.draft_note)
    assert int(note[1]) <= undrafted  # a draft may also end without a token
    assert int(note[2]) == len(result.trace)
