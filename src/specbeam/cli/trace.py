"""A trace for people: accepted draft tokens, rejected ones, and the tokens in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

END_LENGTH = 60
"""The characters that are shown of a beam's text, before its last token."""


def show_trace(rounds: list[dict[str, Any]], colour: bool) -> Iterator[str]:
    """Lines for ``Result.trace``.

    Accepted draft tokens are green, the first rejected ones of a round are red, and the model's own token follows.
    Without colour they are ``+accepted+`` and ``-rejected-``. Beams are listed with their scores after each step.
    Beams that were not evaluated are pale, or say so.
    """
    accepted, rejected = ("\033[32m{}\033[0m", "\033[31m{}\033[0m") if colour else ("+{}+", "-{}-")
    deferred = "\033[2m{}\033[0m" if colour else "{}  (not evaluated)"
    steps = [step for one_round in rounds for step in one_round["steps"]]
    evaluated = {node for one_round in rounds for node in one_round["evaluated"]}
    evaluated |= {beam["node"] for step in steps[-1:] for beam in step}  # nothing comes after them
    single = all(len(step) == 1 for step in steps)
    texts: dict[int, str] = {}  # their ends, by node
    for number, one_round in enumerate(rounds, 1):
        drafted = one_round["drafted"]
        if single:
            line = "".join(_text(step[0], accepted) for step in one_round["steps"][:-1])
            last = one_round["steps"][-1][0]
            others = [] if last["drafted"] else _rejected_at_the_end(one_round)
            wrong = "".join(rejected.format(show(token["text"])) for token in others)
            yield f"round {number:3}  {line}{wrong}{_text(last, accepted)}"
            continue
        good = sum(token["accepted"] for token in drafted)
        yield f"round {number:3}  {len(drafted)} draft tokens, {good} accepted, {len(one_round['steps'])} steps"
        for step in one_round["steps"]:
            for beam in step:
                line = _line(beam, texts, accepted)
                yield line if beam["node"] in evaluated else deferred.format(line)
            yield ""
        if one_round["ahead"]:
            yield "  ahead of these steps:"
            lines = {beam["node"]: _line(beam, texts, accepted) for beam in one_round["ahead"]}
            inner = {beam["after"] for beam in one_round["ahead"]}
            yield from (line for node, line in lines.items() if node not in inner)
            yield ""


def _line(beam: dict[str, Any], texts: dict[int, str], accepted: str) -> str:
    """The score of a beam, and the end of its text. Note the end."""
    before = texts.get(beam["after"], "")
    texts[beam["node"]] = (before + show(beam["text"]))[-END_LENGTH:]
    return f"  {beam['score']:9.3f}  {before}{_text(beam, accepted)}"


def _text(beam: dict[str, Any], accepted: str) -> str:
    text = show(beam["text"])
    return accepted.format(text) if beam["drafted"] else text


def _rejected_at_the_end(one_round: dict[str, Any]) -> list[dict[str, Any]]:
    """The rejected draft tokens in the place of the round's last token."""
    drafted = one_round["drafted"]
    above = max((number for number, token in enumerate(drafted) if token["accepted"]), default=None)
    return [token for token in drafted if not token["accepted"] and token["parent"] == above]


def show(text: str) -> str:
    """A token on one line."""
    return text.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
