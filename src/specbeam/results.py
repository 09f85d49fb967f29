"""What generation returns."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Sequence:
    """One generated sequence.

    Attributes:
        text: the new text, without special tokens and without the stop string that ended it.
        token_ids: the new tokens, the one that ended the text included.
        score: the sum of the tokens' log-probabilities under the model (natural logarithm, temperature 1, before
            penalties and truncation), so that methods can be compared. For beam search it is transformers'
            ``sequences_scores``: processed log-probabilities over length ** length_penalty.
        finish_reason: "stop" (an end-of-sequence token or a stop string), "length" (max_new_tokens, or the context
            is full), or "cancelled".
    """

    text: str
    token_ids: list[int]
    score: float
    finish_reason: str


@dataclass(frozen=True)
class Stats:
    """What one request took.

    Attributes:
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens of the best sequence.
        seconds: from submission to the last token, waiting and prefill included.
        tokens_per_second: new_tokens / seconds.
        time_to_first_token: seconds from submission to the first new token; None if there was none.
        forward_passes: passes of the target and the draft model this request took part in, prefill included.
        target_passes: those of the target.
        draft_passes: those of the draft model.
        target_seconds: what the target's passes took; of a pass that requests share, a request's part by its nodes.
        draft_seconds: the same of the draft model's.
        nodes_evaluated: nodes of the tree the target evaluated, those of the prompt included.
        peak_slots: the most cache slots on the target in use at once: the keys and values of so many tokens.
        drafted: guesses the target was asked about.
        accepted: guesses that became part of the text, or a beam.
        acceptance_rate: accepted / drafted; None without drafts. A tree of guesses cannot all be accepted.
        steps_per_target_pass: new tokens, or steps of beam search, a pass of the target, chunks of a long prompt not
            counted. 1 without drafts.
        peak_memory: bytes. On a GPU the most device memory allocated so far, on a CPU the most memory the process
            has held so far; None where the system does not tell.
    """

    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    time_to_first_token: float | None
    forward_passes: int
    target_passes: int
    draft_passes: int
    target_seconds: float
    draft_seconds: float
    nodes_evaluated: int
    peak_slots: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    steps_per_target_pass: float | None
    peak_memory: int | None


@dataclass(frozen=True)
class Result:
    """What one prompt gave: its sequences, best first, and what they took.

    Attributes:
        trace: with ``trace=True``, a dictionary a round (a pass of the target). "drafted" lists the guesses put to it:
            "token_id", "text", "accepted", and where they hang: "parent", the number of another guess of the round, or
            "beam", the number of the beam (0 for a single text), or neither when it hangs below a guess of an earlier
            round. "steps" lists what was then decided: after each step the beams, best first (a single text is one
            beam), each with its last token ("token_id", "text"), the number of the "beam" of the step before that it
            continues, whether the token was "drafted", and its "score".
    """

    sequences: list[Sequence]
    stats: Stats
    trace: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.sequences[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.sequences[0].finish_reason

    def to_dict(self) -> dict[str, Any]:
        """The object ``specbeam generate --json`` prints."""
        told = {} if self.trace is None else {"trace": self.trace}
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "sequences": [{"text": s.text, "token_ids": s.token_ids, "score": s.score} for s in self.sequences],
            "finish_reason": self.finish_reason,
            "stats": asdict(self.stats),
            **told,
        }


@dataclass(frozen=True)
class Piece:
    """A piece of streamed text: whole characters, never part of a stop string."""

    text: str
