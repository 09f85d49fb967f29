"""The cost of a call: OpenAI's usage, and specbeam's statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbeam.engine.output import WHY_FEWER
from specbeam.results import Result
from specbeam.server.call import Call

SUMS = (
    "forward_passes",
    "target_passes",
    "draft_passes",
    "target_seconds",
    "draft_seconds",
    "nodes_evaluated",
    "drafted",
    "accepted",
    "reused_tokens",
)
"""Statistics that add up over the requests of a call."""


def token_counts(call: Call, results: Sequence[Result]) -> tuple[int, int, int]:
    """The tokens of the prompts, of all texts that were generated, and of the prompts in the prefix cache.

    The prompt of several texts counts once.
    """
    first = call.once_per_prompt(results)
    return (
        sum(result.stats.prompt_tokens for result in first),
        sum(len(sequence.token_ids) for result in results for sequence in result.sequences),
        sum(result.stats.reused_tokens for result in first),
    )


def usage(call: Call, results: Sequence[Result]) -> dict[str, Any]:
    """OpenAI's ``usage``."""
    prompt, new, reused = token_counts(call, results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": new,
        "total_tokens": prompt + new,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


def costs(call: Call, results: Sequence[Result]) -> dict[str, Any]:
    """The objects of an answer that OpenAI's answers do not have: vLLM's ``metrics``, and ``specbeam``."""
    return {"metrics": _vllm_metrics(call, results), "specbeam": _statistics(call, results)}


def _vllm_metrics(call: Call, results: Sequence[Result]) -> dict[str, Any] | None:
    """The object ``metrics``, in which vLLM has the speculation of a request that gives one text; else None.

    ``num_spec_tokens`` is None where the length of drafts adapts.
    """
    stats = results[0].stats
    histogram = stats.acceptance_histogram
    if len(results) > 1 or len(results[0].sequences) > 1 or histogram is None:
        return None
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + stats.accepted / sum(histogram),
            "draft_acceptance_rate": stats.acceptance_rate,
            "acceptance_histogram": histogram,
            "num_spec_steps": sum(histogram),
            "num_accepted_draft_tokens": stats.accepted,
            "num_draft_tokens": stats.drafted,
            "num_spec_tokens": call.plan.options.draft_sizes["num_draft_tokens"],
        }
    }


def _statistics(call: Call, results: Sequence[Result]) -> dict[str, Any]:
    """The object ``specbeam`` of an answer, with the names of :class:`specbeam.Stats`.

    Counts and the seconds of passes are sums over the texts that were drawn apart. ``seconds`` is the longest time.
    """
    stats = [result.stats for result in results]
    sums = {name: sum(getattr(one, name) for one in stats) for name in SUMS}
    first_tokens = [one.time_to_first_token for one in stats if one.time_to_first_token is not None]
    made = {
        **sums,
        "acceptance_rate": sums["accepted"] / sums["drafted"] if sums["drafted"] else None,
        "seconds": max(one.seconds for one in stats),
        "time_to_first_token": min(first_tokens, default=None),
        "precision": stats[0].precision,
        "draft_note": stats[0].draft_note,
        "finish_reasons": [sequence.finish_reason for result in results for sequence in result.sequences],
    }
    traces = [result.trace for result in results if result.trace is not None]
    plan = call.plan
    missing = sum(plan.n - len(result.sequences) for result in results) if plan.searches else 0
    if missing and (plan.describe is not None or plan.options.is_distinct):
        made["missing_choices"] = f"{missing}: {WHY_FEWER}"
    return made | ({"trace": traces} if traces else {})
