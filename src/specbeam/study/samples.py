"""The samples of a report: a few texts, with the tokens that were drafted, verified and chosen instead."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specbeam.study.metrics import finished
from specbeam.study.results import Record
from specbeam.study.statistics import several

MAX_SAMPLES = 5
MAX_ROUNDS_PER_SAMPLE = 3
MAX_BRANCHES_PER_ROUND = 5
MAX_PIECES_PER_SAMPLE = 400


@dataclass(frozen=True)
class DraftToken:
    text: str
    accepted: bool


@dataclass(frozen=True)
class Branch:
    """Draft tokens that follow one another.

    Attributes:
        beam: the number of the beam that they follow, from 1; None for a single text.
        shared: how many of the tokens an earlier branch shows.
    """

    beam: int | None
    tokens: list[DraftToken]
    shared: int = 0


@dataclass(frozen=True)
class TargetTokens:
    """Tokens that the target chose and no draft proposed.

    Attributes:
        step: the step of beam search, from 1; None for a single text.
        replaced: the rejected draft tokens that they replace.
    """

    step: int | None
    tokens: list[str]
    replaced: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    number: int
    branches: list[Branch]
    branches_more: int
    target_tokens: list[TargetTokens]


@dataclass(frozen=True)
class Sample:
    """A generation that is shown.

    Attributes:
        rounds: a few of its rounds; none for a method without drafts.
        pieces: its text in pieces, each with whether a draft proposed it.
        pieces_more: how many pieces are left out at the end.
        lookup: whether the drafts came from a lookup, without a model.
    """

    method: str
    category: str | None
    why: str
    prompt: str
    facts: str
    rounds: list[Round]
    pieces: list[tuple[str, bool]]
    pieces_more: int
    beams: bool
    lookup: bool


def samples(records: Iterable[Record]) -> list[Sample]:
    """The samples to show."""
    return [sample(record, why) for why, record in chosen(records)]


def chosen(records: Iterable[Record]) -> list[tuple[str, Record]]:
    """The generations to show, each with why.

    In each category it is the one whose drafts gained most, methods in turn. The last one is the worst.
    """
    good = [record for record in finished(records) if record["text"]]
    drafted = [record for record in good if record["stats"]["drafted"]]
    shown: Counter[str] = Counter()
    selected: list[tuple[str, Record]] = []
    pool = drafted or good
    limit = MAX_SAMPLES - 1 if drafted else MAX_SAMPLES
    for category in dict.fromkeys(record["category"] for record in pool):
        if len(selected) == limit:
            break
        here = [record for record in pool if record["category"] == category]
        best = min(here, key=lambda record: (shown[record["method"]], -gain(record)))
        shown[best["method"]] += 1
        selected.append(("", best))
    for method in dict.fromkeys(record["method"] for record in drafted):  # where there are few categories
        if not shown[method] and len(selected) < limit:
            here = [record for record in drafted if record["method"] == method]
            selected.append(("", max(here, key=gain)))
    if drafted:
        worst = min(drafted, key=lambda record: record["stats"]["acceptance_rate"])
        if all(record is not worst for _, record in selected):
            selected.append(("the fewest draft tokens accepted", worst))
    return selected


def gain(record: Record) -> float:
    """Tokens per pass. A high acceptance rate alone says little: there may be few draft tokens."""
    return record["stats"]["steps_per_target_pass"] or 0.0


def sample(record: Record, why: str) -> Sample:
    """The sample that shows a generation.

    The trace shows a generation of its own, which may draft differently, since drafts adapt to measured times. So its
    passes and draft tokens are counted in the trace.
    """
    trace, stats = record["trace"] or [], record["stats"]
    beams = any(len(step) > 1 for entry in trace for step in entry["steps"])
    passes = len(trace) or stats["target_passes"]
    facts = [several(stats["new_tokens"], "token"), f"{passes:,} {'pass' if passes == 1 else 'passes'} of the target"]
    if accepted := [token["accepted"] for entry in trace for token in entry["drafted"]]:
        facts.append(f"{sum(accepted):,} of {len(accepted):,} draft tokens accepted")
    rounds = sorted((i for i, entry in enumerate(trace) if entry["drafted"]), key=lambda i: -instructive(trace[i]))
    pieces = align(origins(record), record["text"])
    return Sample(
        method=record["method"],
        category=record["category"],
        why=why,
        prompt=record["prompt"],
        facts=", ".join(facts),
        rounds=[shown_round(i + 1, trace[i], beams) for i in sorted(rounds[:MAX_ROUNDS_PER_SAMPLE])],
        pieces=pieces[:MAX_PIECES_PER_SAMPLE],
        pieces_more=max(0, len(pieces) - MAX_PIECES_PER_SAMPLE),
        beams=beams,
        lookup=not stats["draft_passes"],
    )


def instructive(entry: Mapping[str, Any]) -> int:
    """How instructive a round is: most if it has accepted and rejected draft tokens, and several steps."""
    return len({token["accepted"] for token in entry["drafted"]}) + (len(entry["steps"]) > 1)


def shown_round(number: int, entry: Mapping[str, Any], beams: bool) -> Round:
    """One pass of the target: the draft tokens as branches, and the tokens that no draft proposed."""
    tree = branches(entry["drafted"], beams)
    target_tokens = []
    for step, ends in enumerate([*entry["steps"], *ahead(entry)], 1):
        tokens = [*dict.fromkeys(visible(end["text"]) for end in ends if not end["drafted"])]
        if tokens:
            rejected = [] if beams else [visible(token["text"]) for token in beside(entry["drafted"])]
            target_tokens.append(TargetTokens(step if beams else None, tokens, rejected))
    return Round(number, tree[:MAX_BRANCHES_PER_ROUND], max(0, len(tree) - MAX_BRANCHES_PER_ROUND), target_tokens)


def ahead(entry: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """The beams that are ahead of the steps of a round, shortest first."""
    lengths: dict[int, int] = {}
    by_length: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for beam in entry["ahead"]:
        length = lengths[beam["node"]] = lengths.get(beam["after"], -1) + 1
        by_length[length].append(beam)
    return [*by_length.values()]


def branches(drafted: list[Mapping[str, Any]], beams: bool) -> list[Branch]:
    """A tree of draft tokens as its paths from root to leaf, the paths with the most accepted tokens first."""
    below: dict[int | None, list[int]] = {}
    for index, token in enumerate(drafted):
        below.setdefault(token["parent"], []).append(index)
    leaves: list[list[int]] = []
    paths = [[root] for root in reversed(below.get(None, []))]
    while paths:
        path = paths.pop()
        paths += [[*path, child] for child in reversed(below.get(path[-1], []))]
        if path[-1] not in below:
            leaves.append(path)
    leaves.sort(key=lambda path: -sum(drafted[index]["accepted"] for index in path))
    shown_branches = []
    seen: set[int] = set()
    for path in leaves:
        beam = drafted[path[0]]["beam"] if beams else None
        tokens = [DraftToken(visible(drafted[index]["text"]), drafted[index]["accepted"]) for index in path]
        shown_branches.append(Branch(None if beam is None else beam + 1, tokens, sum(index in seen for index in path)))
        seen.update(path)
    return shown_branches


def beside(drafted: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rejected draft tokens that follow the last accepted one."""
    last = max((index for index, token in enumerate(drafted) if token["accepted"]), default=None)
    return [token for token in drafted if not token["accepted"] and token["parent"] == last]


def origins(record: Record) -> list[tuple[str, bool]]:
    """The tokens of the text according to the trace, and whether each was drafted.

    A text of beam search is a path of beams with its tokens. The trace may lack the last one: a beam that ends is no
    beam of that step.
    """
    ids = record["token_ids"]
    on_path: set[int | None] = {0, None}
    tokens: list[tuple[str, bool]] = []
    for step in (step for entry in record["trace"] or [] for step in entry["steps"]):
        if len(tokens) == len(ids):
            break
        here = {i: b for i, b in enumerate(step) if b["beam"] in on_path and b["token_id"] == ids[len(tokens)]}
        if not here:
            break
        beam = next(iter(here.values()))
        tokens.append((beam["text"], beam["drafted"]))
        on_path = {*here}
    return tokens


def align(tokens: list[tuple[str, bool]], text: str) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it was drafted.

    Tokens are decoded one by one. Part of a character, or a token that loses its leading space, differs from the text
    at its position. Then it gets the text between the tokens around it.
    """
    pieces: list[tuple[str, bool]] = []
    at = 0
    unclear: list[bool] = []
    for token, drafted in tokens:
        begin = text.find(token, at) if token and "\ufffd" not in token else -1
        if begin < 0 or (text[at:begin].strip() and not unclear):
            unclear.append(drafted)
            continue
        if unclear:
            pieces.append((text[at:begin], all(unclear)))
            at, unclear = begin, []
        at, piece = begin + len(token), text[at : begin + len(token)]
        pieces.append((piece, drafted))
    if at < len(text):
        pieces.append((text[at:], bool(unclear) and all(unclear)))
    return [piece for piece in pieces if piece[0]]


def visible(text: str) -> str:
    """A token on one line, with symbols for characters that cannot be seen."""
    return text.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥") or "∅"
