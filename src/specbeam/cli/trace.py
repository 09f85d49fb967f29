"""A trace the way people like to read it: what was accepted, what was rejected, what came in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def show_trace(rounds: list[dict[str, Any]], colour: bool) -> Iterator[str]:
    """Lines for ``Result.trace``.

    Accepted guesses are green, the first rejected ones of a round red, and the model's own token follows them plain;
    where there is no colour, ``+accepted+`` and ``-rejected-``. Beams are listed with their scores, step by step.
    """
    accepted, rejected = ("\033[32m{}\033[0m", "\033[31m{}\033[0m") if colour else ("+{}+", "-{}-")
    beams: list[str] = [""]
    for number, told in enumerate(rounds, 1):
        guesses = told["drafted"]
        single = all(len(step) == 1 for step in told["steps"])
        if single:
            line = "".join(_text(step[0], accepted) for step in told["steps"][:-1])
            last = told["steps"][-1][0]
            wrong = "" if last["drafted"] else "".join(rejected.format(show(g["text"])) for g in _beside(told))
            yield f"round {number:3}  {line}{wrong}{_text(last, accepted)}"
            continue
        good = sum(guess["accepted"] for guess in guesses)
        yield f"round {number:3}  {len(guesses)} guesses, {good} accepted, {len(told['steps'])} steps"
        for step in told["steps"]:
            beams = [(beams[b["beam"]] if b["beam"] is not None else "") + show(b["text"]) for b in step]
            for text, beam in zip(beams, step, strict=True):
                before = text[: len(text) - len(show(beam["text"]))]
                yield f"  {beam['score']:9.3f}  {before[-60:]}{_text(beam, accepted)}"
            yield ""


def _text(beam: dict[str, Any], accepted: str) -> str:
    text = show(beam["text"])
    return accepted.format(text) if beam["drafted"] else text


def _beside(told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rejected guesses at the place of the round's last token."""
    guesses = told["drafted"]
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
