"""The sample outputs of a report: which are shown, and what was drafted for them, verified, and put in its place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specbeam.study.words import several

MOST_SAMPLES, MOST_ROUNDS, MOST_BRANCHES, MOST_PIECES = 5, 3, 5, 400


@dataclass(frozen=True)
class Guess:
    text: str
    accepted: bool


@dataclass(frozen=True)
class Branch:
    """Guesses that follow one another.

    Attributes:
        beam: the number of the beam they follow, from 1; None for a single text.
        shared: how many of them were shown in a branch before.
    """

    beam: int | None
    guesses: list[Guess]
    shared: int = 0


@dataclass(frozen=True)
class Own:
    """Tokens the target chose that no draft proposed.

    Attributes:
        step: the step of beam search, from 1; None for a single text.
        place: the rejected guesses in whose place it stands.
    """

    step: int | None
    tokens: list[str]
    place: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    number: int
    branches: list[Branch]
    branches_more: int
    own: list[Own]


@dataclass(frozen=True)
class Sample:
    """A generation that is shown.

    Attributes:
        rounds: a few of its rounds; none for a method without drafts.
        pieces: its text, and of each piece whether a draft proposed it.
        pieces_more: tokens that are left out at the end.
        lookup: whether drafts came from a look-up, with no model.
    """

    method: str
    category: str
    why: str
    prompt: str
    facts: str
    rounds: list[Round]
    pieces: list[tuple[str, bool]]
    pieces_more: int
    beams: bool
    lookup: bool


def samples(records: list[dict[str, Any]]) -> list[Sample]:
    """A handful that teaches most: where drafts gained most in each category, methods in turn, and the worst."""
    good = [record for record in records if not record.get("error") and record.get("text")]
    drafted = [record for record in good if any(told["drafted"] for told in record.get("trace") or [])]
    shown: Counter[str] = Counter()
    chosen: list[tuple[str, dict[str, Any]]] = []
    pool = drafted or good
    most = MOST_SAMPLES - 1 if drafted else MOST_SAMPLES
    for category in dict.fromkeys(record.get("category") for record in pool):
        if len(chosen) == most:
            break
        here = [record for record in pool if record.get("category") == category]
        best = min(here, key=lambda record: (shown[record["method"]], -gain(record)))
        shown[best["method"]] += 1
        chosen.append(("", best))
    for method in dict.fromkeys(record["method"] for record in drafted):  # where there are few categories
        if not shown[method] and len(chosen) < most:
            here = [record for record in drafted if record["method"] == method]
            shown[method] += 1
            chosen.append(("", max(here, key=gain)))
    if drafted:
        worst = min(drafted, key=accepted_share)
        if all(record is not worst for _, record in chosen):
            chosen.append(("the fewest guesses accepted", worst))
    return [sample(record, why) for why, record in chosen]


def accepted_share(record: Mapping[str, Any]) -> float:
    return (record.get("stats") or {}).get("acceptance_rate") or 0.0


def gain(record: Mapping[str, Any]) -> float:
    """How many tokens a pass gave: most of the guesses accepted is little if there were few."""
    return (record.get("stats") or {}).get("steps_per_target_pass") or 0.0


def sample(record: Mapping[str, Any], why: str) -> Sample:
    """What is shown of a generation."""
    trace = record.get("trace") or []
    stats = record.get("stats") or {}
    beams = any(len(step) > 1 for told in trace for step in told["steps"])
    told = [several(stats["new_tokens"], "token")] if stats.get("new_tokens") else []
    if stats.get("target_passes"):
        passes = stats["target_passes"]
        told.append(f"{passes:,} {'pass' if passes == 1 else 'passes'} of the target")
    if stats.get("drafted"):
        told.append(f"{stats.get('accepted', 0):,} of {stats['drafted']:,} guesses accepted")
    rounds = sorted((i for i, one in enumerate(trace) if one["drafted"]), key=lambda i: -instructive(trace[i]))
    pieces = align(origins(record), record["text"])
    return Sample(
        method=record["method"],
        category=record.get("category") or "",
        why=why,
        prompt=str(record.get("prompt") or ""),
        facts=", ".join(told),
        rounds=[shown_round(i + 1, trace[i], beams) for i in sorted(rounds[:MOST_ROUNDS])],
        pieces=pieces[:MOST_PIECES],
        pieces_more=max(0, len(pieces) - MOST_PIECES),
        beams=beams,
        lookup=not stats.get("draft_passes"),
    )


def instructive(told: Mapping[str, Any]) -> int:
    """Most where some guesses were accepted, saving a pass, and others were not."""
    return len({guess["accepted"] for guess in told["drafted"]}) + (len(told["steps"]) > 1)


def shown_round(place: int, told: Mapping[str, Any], beams: bool) -> Round:
    """One pass of the target: the guesses as branches, and what was chosen beside them."""
    found = branches(told["drafted"], beams)
    own = []
    for step, ends in enumerate(told["steps"], 1):
        tokens = [*dict.fromkeys(visible(end["text"]) for end in ends if not end["drafted"])]
        if tokens:
            rejected = [] if beams else [visible(guess["text"]) for guess in beside(told["drafted"])]
            own.append(Own(step if beams else None, tokens, rejected))
    return Round(place, found[:MOST_BRANCHES], max(0, len(found) - MOST_BRANCHES), own)


def branches(drafted: list[Mapping[str, Any]], beams: bool) -> list[Branch]:
    """A tree of guesses as its paths from root to leaf, those with most accepted guesses first."""
    below: dict[int | None, list[int]] = {}
    for place, guess in enumerate(drafted):
        below.setdefault(guess["parent"], []).append(place)
    leaves: list[list[int]] = []
    paths = [[root] for root in reversed(below.get(None, []))]
    while paths:
        path = paths.pop()
        paths += [[*path, child] for child in reversed(below.get(path[-1], []))]
        if path[-1] not in below:
            leaves.append(path)
    leaves.sort(key=lambda path: -sum(drafted[place]["accepted"] for place in path))
    found = []
    seen: set[int] = set()
    for path in leaves:
        beam = drafted[path[0]]["beam"] if beams else None
        guesses = [Guess(visible(drafted[place]["text"]), drafted[place]["accepted"]) for place in path]
        found.append(Branch(None if beam is None else beam + 1, guesses, sum(place in seen for place in path)))
        seen.update(path)
    return found


def beside(drafted: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rejected guesses that follow the last accepted one."""
    last = max((place for place, guess in enumerate(drafted) if guess["accepted"]), default=None)
    return [guess for guess in drafted if not guess["accepted"] and guess["parent"] == last]


def origins(record: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The tokens of the text as a trace tells them, and whether each was drafted.

    A text of beam search is the path of beams whose tokens are its own; the trace need not have the last of them, since
    a beam that ends is a beam no more.
    """
    ids = record.get("token_ids") or []
    on_path: set[int | None] = {0, None}
    found: list[tuple[str, bool]] = []
    for step in (step for told in record.get("trace") or [] for step in told["steps"]):
        if len(found) == len(ids):
            break
        here = {i: b for i, b in enumerate(step) if b["beam"] in on_path and b["token_id"] == ids[len(found)]}
        if not here:
            break
        beam = next(iter(here.values()))
        found.append((beam["text"], beam["drafted"]))
        on_path = {*here}
    return found


def align(tokens: list[tuple[str, bool]], text: str) -> list[tuple[str, bool]]:
    """The text in pieces, each with whether it was drafted.

    Tokens are decoded one by one, so those that are parts of a character, or that drop the space they begin with, are
    not what the text has at their place: then the text between the tokens around them is theirs.
    """
    pieces: list[tuple[str, bool]] = []
    at = 0
    unclear: list[bool] = []
    for token, drafted in tokens:
        found = text.find(token, at) if token and "\ufffd" not in token else -1
        if found < 0 or (text[at:found].strip() and not unclear):
            unclear.append(drafted)
            continue
        if unclear:
            pieces.append((text[at:found], all(unclear)))
            at, unclear = found, []
        at, piece = found + len(token), text[at : found + len(token)]
        pieces.append((piece, drafted))
    if at < len(text):
        pieces.append((text[at:], bool(unclear) and all(unclear)))
    return [piece for piece in pieces if piece[0]]


def visible(text: str) -> str:
    """A token on one line, with nothing that cannot be seen."""
    return text.replace("\r", "␍").replace("\n", "↵").replace("\t", "⇥") or "∅"
