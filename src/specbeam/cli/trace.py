"""A trace for people: accepted guesses, rejected guesses, and the tokens in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def show_trace(rounds: list[dict[str, Any]], colour: bool) -> Iterator[str]:
    """Lines for ``Result.trace``.

    Accepted guesses are green, the first rejected guesses of a round are red, and the model's own token follows.
    Without colour they are ``+accepted+`` and ``-rejected-``. Beams are listed with their scores after each step.
    """
    accepted, rejected = ("\033[32m{}\033[0m", "\033[31m{}\033[0m") if colour else ("+{}+", "-{}-")
    beams: list[str] = [""]
    for number, one_round in enumerate(rounds, 1):
        guesses = one_round["drafted"]
        single = all(len(step) == 1 for step in one_round["steps"])
        if single:
            line = "".join(_text(step[0], accepted) for step in one_round["steps"][:-1])
            last = one_round["steps"][-1][0]
            others = [] if last["drafted"] else _rejected_at_the_end(one_round)
            wrong = "".join(rejected.format(show(guess["text"])) for guess in others)
            yield f"round {number:3}  {line}{wrong}{_text(last, accepted)}"
            continue
        good = sum(guess["accepted"] for guess in guesses)
        yield f"round {number:3}  {len(guesses)} guesses, {good} accepted, {len(one_round['steps'])} steps"
        for step in one_round["steps"]:
            beams = [(beams[b["beam"]] if b["beam"] is not None else "") + show(b["text"]) for b in step]
            for text, beam in zip(beams, step, strict=True):
                before = text[: len(text) - len(show(beam["text"]))]
                yield f"  {beam['score']:9.3f}  {before[-60:]}{_text(beam, accepted)}"
            yield ""


def _text(beam: dict[str, Any], accepted: str) -> str:
    text = show(beam["text"])
    return accepted.format(text) if beam["drafted"] else text


def _rejected_at_the_end(one_round: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rejected guesses in the place of the round's last token."""
    guesses = one_round["drafted"]
    above = None
    for number, guess in enumerate(guesses):
        if guess["accepted"]:
            above = number
    for guess in guesses:
        if not guess["accepted"] and guess["parent"] == above:
            yield guess


def show(text: str) -> str:
    """A token on one line."""
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
