"""What requests cost: OpenAI's usage and specbeam's statistics in answers, and the counts that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.responses import Response

from specbeam.engine import Request
from specbeam.engine.output import WHY_FEWER
from specbeam.results import Result, Stats
from specbeam.server.call import Call
from specbeam.server.models import Load

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
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
BETWEEN_TOKENS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
COUNTS = {
    "prompt_tokens": "Tokens of prompts.",
    "reused_tokens": "Tokens of prompts that were in the prefix cache.",
    "target_passes": "Forward passes of the model, counted for each request that took part.",
    "draft_passes": "Forward passes of draft models, counted for each request that took part.",
    "drafted": "Draft tokens that the target model verified.",
    "accepted": "Draft tokens that were accepted.",
}
"""Statistics of a request (:class:`specbeam.Stats`) that are added up."""
LOADS = {
    "specbeam_live_requests": "Requests that share passes now.",
    "specbeam_waiting_requests": "Requests that wait for a place.",
    "specbeam_cache_tokens": "Slots of the KV cache that live requests use.",
    "specbeam_kept_tokens": "Slots of the KV cache that hold cached prefixes.",
    "specbeam_kept_bytes": "Bytes of the cached prefixes, also of draft models.",
    "specbeam_max_cache_tokens": "The maximum number of slots of the KV cache, live and cached together.",
}
"""The fields of :class:`specbeam.server.models.Load`."""


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
        "completion_tokens_details": {"reasoning_tokens": call.thought_tokens(results)},
    }


def costs(call: Call, results: Sequence[Result]) -> dict[str, Any]:
    """The further objects of an answer: vLLM's ``metrics``, and ``specbeam``."""
    return {"metrics": _vllm_metrics(call, results), "specbeam": _statistics(call, results)}


def _vllm_metrics(call: Call, results: Sequence[Result]) -> dict[str, Any] | None:
    """vLLM's ``metrics`` of speculation, which only a request for one text has.

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
    sums = {name: sum(getattr(each, name) for each in stats) for name in SUMS}
    first_tokens = [each.time_to_first_token for each in stats if each.time_to_first_token is not None]
    statistics = {
        **sums,
        "acceptance_rate": sums["accepted"] / sums["drafted"] if sums["drafted"] else None,
        "seconds": max(each.seconds for each in stats),
        "time_to_first_token": min(first_tokens, default=None),
        "precision": stats[0].precision,
        "draft_note": stats[0].draft_note,
        "finish_reasons": [sequence.finish_reason for result in results for sequence in result.sequences],
    }
    traces = [result.trace for result in results if result.trace is not None]
    plan = call.plan
    missing = sum(plan.n - len(result.sequences) for result in results) if plan.searches else 0
    if missing and (plan.output_spec is not None or plan.options.is_distinct):
        statistics["missing_choices"] = f"{missing}: {WHY_FEWER}"
    return statistics | ({"trace": traces} if traces else {})


@dataclass(frozen=True)
class Tally:
    """The cost of a call, for the log and the counts.

    Attributes:
        model: the model's name.
        prompt_tokens: the prompt of several texts counts once.
        results: the statistics of each request that has a result, and the number of its texts' tokens.
    """

    model: str
    prompt_tokens: int
    results: list[tuple[Stats, int]]

    @classmethod
    def of(cls, call: Call, requests: Iterable[Request]) -> Tally:
        results = [outcome for request in requests if isinstance(outcome := request.outcome, Result)]
        return cls(
            call.model.name,
            sum(len(request.prompt_ids) for request in call.once_per_prompt(call.requests)),
            [(result.stats, sum(len(text.token_ids) for text in result.sequences)) for result in results],
        )

    @property
    def new_tokens(self) -> int:
        return sum(tokens for _, tokens in self.results)


class Metrics:
    """The counts of one server, for Prometheus. Each server of a process has its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        by_model: dict[str, Any] = {"labelnames": ["model"], "registry": self._registry}
        self._requests = Counter(
            "specbeam_requests", "Requests by endpoint and outcome.", ["endpoint", "outcome"], registry=self._registry
        )
        self._counts = {name: Counter(f"specbeam_{name}", text, **by_model) for name, text in COUNTS.items()}
        self._new_tokens = Counter("specbeam_generation_tokens", "Tokens that were generated.", **by_model)
        self._first = Histogram(
            "specbeam_time_to_first_token_seconds",
            "From the submission of a request to its first token.",
            buckets=FIRST_TOKEN_SECONDS,
            **by_model,
        )
        self._between = Histogram(
            "specbeam_time_between_tokens_seconds",
            "The mean time between two tokens of a request.",
            buckets=BETWEEN_TOKENS_SECONDS,
            **by_model,
        )
        self._loads = {name: Gauge(name, text, **by_model) for name, text in LOADS.items()}

    def count(self, endpoint: str, outcome: str, tally: Tally | None) -> None:
        """Count a request that has ended."""
        self._requests.labels(endpoint, outcome).inc()
        if tally is not None:
            self.add(tally)

    def add(self, tally: Tally) -> None:
        """Count the cost of texts."""
        model = tally.model
        for stats, new_tokens in tally.results:
            for name, counter in self._counts.items():
                counter.labels(model).inc(getattr(stats, name))
            self._new_tokens.labels(model).inc(new_tokens)
            if stats.time_to_first_token is not None:
                self._first.labels(model).observe(stats.time_to_first_token)
                if stats.new_tokens > 1:
                    seconds = (stats.seconds - stats.time_to_first_token) / (stats.new_tokens - 1)
                    self._between.labels(model).observe(seconds)

    def response(self, loads: Iterable[Load]) -> Response:
        """All counts in Prometheus's format. The loads of replicas of a model add up."""
        for gauge in self._loads.values():
            gauge.clear()
        for load in loads:
            for name, gauge in self._loads.items():
                gauge.labels(load.model).inc(getattr(load, name.removeprefix("specbeam_")))
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")
