"""Results of generation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

INPUTS_FORMAT = 1
"""The number of the form of ``Result.inputs``. Another form gets another number."""
DIGITS = 16
"""Hexadecimal digits of a digest in a receipt."""
TopLogProbs = list[dict[int, float]]
"""For each token of a sequence, the log-probabilities of the likeliest tokens at its position, by token id, the
likeliest first."""


@dataclass(frozen=True)
class Sequence:
    """One generated sequence.

    Log-probabilities are natural logarithms. They are the model's own: at temperature 1, before penalties, constraints,
    truncation and the caller's processors.

    Attributes:
        text: the new text, without special tokens and without the stop string that ended it. It goes on from the
            prompt: a space between the two is its first character. A last character that is incomplete is U+FFFD, as
            the tokenizer decodes it. A cancelled text ends before such a character.
        token_ids: the new tokens, including the one that ended the sequence.
        log_probs: the log-probability of each new token given what precedes it.
        log_prob: the sum of ``log_probs``, so the log-probability of the sequence under the model. It compares
            sequences of all methods.
        score: the number that the method ranks by. For greedy search and samples it is ``log_prob``. For beam search it
            is transformers' ``sequences_scores``: the sum of processed log-probabilities, divided by
            length ** length_penalty. A beam search that was cancelled has no ranking: its score is ``log_prob``.
        finish_reason: "stop" (an end-of-sequence token or a stop string), "length" (max_new_tokens, or the context
            is full), "cancelled", or "timeout".
        is_complete: whether the text satisfies the request's constraint, whatever ended it. None without one.
        top_logprobs: with ``top_logprobs=k``, one dictionary per new token: the log-probabilities of the k likeliest
            tokens at its position, by token id, the likeliest first. The new token need not be among them. A dictionary
            is empty where a strategy of the caller added a token without the model's logits. Otherwise None.
        allowed_log_probs: for each new token, the log-probability of all tokens together that the constraint allowed at
            its position, if the constraint measures it (:class:`specbeam.constraints.Constraint`). Otherwise None.
    """

    text: str
    token_ids: list[int]
    log_probs: list[float]
    log_prob: float
    score: float
    finish_reason: str
    top_logprobs: TopLogProbs | None = None
    is_complete: bool | None = None
    allowed_log_probs: list[float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The object for one sequence in ``specbeam generate --json``: ``log_probs`` only beside ``top_logprobs``."""
        asked: dict[str, Any] = {} if self.is_complete is None else {"is_complete": self.is_complete}
        if self.top_logprobs is not None:
            asked |= {"log_probs": self.log_probs, "top_logprobs": self.top_logprobs}
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "log_prob": self.log_prob,
            "score": self.score,
            "finish_reason": self.finish_reason,
            **asked,
        }


@dataclass(frozen=True)
class Stats:
    """The cost of one request.

    Attributes:
        prompt_tokens: tokens of the prompt.
        new_tokens: tokens of the best sequence.
        seconds: from submission to the last token, waiting and prefill included.
        tokens_per_second: new_tokens / seconds.
        time_to_first_token: seconds from submission to the first new token; None without new tokens.
        forward_passes: forward passes of the target and of the draft model that this request took part in, with the
            prefill.
        target_passes: passes of the target alone.
        draft_passes: passes of the draft model alone.
        target_seconds: time of the target's passes. Requests that share a pass divide its time by their nodes.
        draft_seconds: time of the draft model's passes, divided likewise.
        nodes_evaluated: nodes of the tree that the target evaluated, including the prompt's that were not reused.
        peak_slots: the most cache slots in use at once on the target. A slot holds the keys and values of one token, or
            of one position of the audio that an encoder has read.
        drafted: draft tokens that the target verified. The tokens that a constraint forces are such, too.
        accepted: draft tokens that became part of the sequence, or of a beam.
        acceptance_rate: accepted / drafted; None without drafts. The draft tokens of a tree cannot all be accepted.
        evaluated_beams: the share of the beams of all steps that the target evaluated; None without beams. It is below
            1 where beams were left out, because they could not change the outcome.
        steps_per_target_pass: new tokens, or steps of beam search, per pass of the target. Chunks of a long prompt do
            not count. 1 without drafts.
        peak_memory: bytes. On a GPU it is the most device memory allocated so far, on a CPU the most memory that the
            process has held so far. None if the system does not report it.
        precision: the number type of the model's weights, and the device, such as "int8 on cpu". Only "float32" can
            give transformers' own numbers.
        draft_note: why a draft that was given proposed no tokens, or none in most passes; else None.
        reused_tokens: tokens of the prompt that the target did not evaluate, because another request of the engine had
            cached them (``share_prefix`` of :class:`specbeam.Options`).
        acceptance_histogram: how many of the passes that verified draft tokens accepted 0 of them, 1, 2, and so on;
            None without such passes.
        acceptance_by_position: for each position, how many draft tokens the target verified there, and how many of them
            were accepted. The first position is directly after the known tokens of a sequence or a beam. None without
            draft tokens.
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
    precision: str
    draft_note: str | None = None
    reused_tokens: int = 0
    acceptance_histogram: list[int] | None = None
    evaluated_beams: float | None = None
    acceptance_by_position: list[list[int]] | None = None


@dataclass(frozen=True)
class Result:
    """The result of one prompt.

    Attributes:
        sequences: best first.
        stats: the cost.
        trace: with ``trace=True``, one dictionary per round (a pass of the target).

            "drafted" lists the draft tokens that were verified, each with "token_id", "text" and "accepted". It also
            has the place of each: "parent" is the number of another draft token of the round, and "beam" the number of
            a beam (0 for a single sequence). A draft token below one of an earlier round has neither. A draft token may
            be verified again.

            "steps" lists the beams after each step, best first; a single sequence is one beam. A beam has its last
            token ("token_id", "text", "log_prob") and its "score". "beam" is the number of the beam it continues, in
            the step before. "drafted" is whether its last token was drafted. The last steps may lack beams: the result
            can be certain before these are known.

            "ahead" lists beams of later steps as soon as they are known. Lazy beams go on with the likeliest
            hypotheses, and a step is certain once all its beams are known. The list has the order of the steps, and of
            the beams of each step. A beam is listed once. "steps" has it again when its step is certain.

            Draft tokens and beams have a "node", the number of their last token in the tree, and the node that it comes
            "after". The prompt's last token has the number of the prompt's tokens less 1. By these numbers, "certain"
            lists the nodes that all sequences share from now on. "dropped" lists the nodes that no sequence needs any
            more. "ended" lists the last tokens of finished hypotheses. "evaluated" lists the nodes after which the
            target computed the next tokens in this round, draft tokens included. A beam that no round lists was never
            evaluated. "text" is the text that became certain.

            "pass" has the cost: "target_passes", "draft_passes", "target_seconds", "draft_seconds" and "nodes", the
            nodes that the target evaluated. "seconds" is the time since submission.

            With ``top_logprobs``, "likeliest" lists the likeliest "tokens" "after" each node that a beam came after.
            Under a constraint each of them has "masked": whether the constraint forbids it there.
        inputs: all that the sequences depend on, as plain data: the version, the model with a digest of its weights,
            the prompt's token ids, and the options with the checkpoint's own (docs/exactness.md, "Receipts"). None for
            a result that no engine made.
    """

    sequences: list[Sequence]
    stats: Stats
    trace: list[dict[str, Any]] | None = None
    inputs: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.sequences[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.sequences[0].finish_reason

    @property
    def receipt(self) -> str | None:
        """One line with the version, and digests of weights, prompt, options and tokens.

        None without ``inputs``, and for a model that specbeam has not loaded itself, whose weights have no digest.

        Results with equal receipts have equal sequences, made of equal inputs. ``specbeam verify`` makes them again.
        """
        if self.inputs is None or self.inputs["weights"] is None:
            return None
        return receipt_of(self.inputs, self.sequences)

    def to_dict(self) -> dict[str, Any]:
        """The object ``specbeam generate --json`` prints."""
        trace = {} if self.trace is None else {"trace": self.trace}
        made = {} if self.inputs is None else {"receipt": self.receipt, "inputs": self.inputs}
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "sequences": [sequence.to_dict() for sequence in self.sequences],
            "finish_reason": self.finish_reason,
            "stats": asdict(self.stats),
            **made,
            **trace,
        }


def receipt_of(inputs: Mapping[str, Any], sequences: Iterable[Sequence]) -> str:
    """The receipt of sequences that were made of inputs (see :class:`Result`)."""
    names = ("backend", "numbers", "start_token_ids", "options", "generation_config", "objects")
    request = [inputs[name] for name in names]
    tokens = [[sequence.token_ids, sequence.finish_reason] for sequence in sequences]
    return (
        f"specbeam {inputs['specbeam']} weights={inputs['weights'][:DIGITS]} prompt={_digest(inputs['prompt_ids'])} "
        f"options={_digest(request)} tokens={_digest(tokens)}"
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:DIGITS]


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed text.

    Tokens come in the piece in which they became certain. Their characters may come in a later piece, so ``text`` may
    be empty. With ``trace=True`` each round has a piece, even if it makes nothing certain. All pieces together have
    the text, the tokens and the log-probabilities of the finished result.

    Attributes:
        text: whole characters, never part of a stop string. Only the last piece may end with an incomplete one, as the
            result's text does.
        token_ids: new tokens. Without any, the piece is the last, or it has only a round.
        log_probs, top_logprobs: of these tokens, as in :class:`Sequence`.
        result: the finished result, with its statistics, in the last piece. None in all others.
        trace: with ``trace=True``, the round as in :class:`Result`. Its draft tokens may still be accepted later.
    """

    text: str
    token_ids: list[int]
    log_probs: list[float]
    top_logprobs: TopLogProbs | None = None
    result: Result | None = None
    trace: list[dict[str, Any]] | None = None
