"""The numbers that Prometheus reads from ``/metrics``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specbeam.engine import Request
from specbeam.results import Result, Stats
from specbeam.server.call import Call
from specbeam.server.models import Load

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
    "specbeam_max_cache_tokens": "The most slots of the KV cache, live and cached together.",
}
"""The fields of :class:`specbeam.server.models.Load`."""


@dataclass(frozen=True)
class Tally:
    """The cost of a call, for the log and the counts.

    Attributes:
        model: the model's name.
        prompt_tokens: tokens of its prompts. The prompt of several texts counts once.
        results: the statistics of each request that has a result, and the tokens of its texts.
    """

    model: str
    prompt_tokens: int
    results: list[tuple[Stats, int]]

    @classmethod
    def of(cls, call: Call, left: Sequence[Request] = ()) -> Tally:
        """The cost of a call without the requests that are left, because they have not ended."""
        outcomes = [request.outcome for request in call.requests if request not in left]
        done = [outcome for outcome in outcomes if isinstance(outcome, Result)]
        return cls(
            call.model.name,
            sum(len(request.prompt_ids) for request in call.requests[:: call.plan.draws]),
            [(result.stats, new_tokens_of(result)) for result in done],
        )

    @classmethod
    def later(cls, call: Call, left: Sequence[Request], take: Callable[[Tally], object]) -> None:
        """Give the cost of the requests that are left of a call to ``take``, once the engine has ended all of them."""
        unfinished = {*left}

        def end(request: Request) -> None:
            unfinished.remove(request)
            if not unfinished:
                done = [outcome for one in left if isinstance(outcome := one.outcome, Result)]
                take(cls(call.model.name, 0, [(result.stats, new_tokens_of(result)) for result in done]))

        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        for request in left:
            request.add_done_callback(end, call_soon)

    @property
    def new_tokens(self) -> int:
        return sum(tokens for _, tokens in self.results)


def new_tokens_of(result: Result) -> int:
    """The tokens of all texts of a request."""
    return sum(len(text.token_ids) for text in result.sequences)


class Metrics:
    """The numbers of one server. Each server of a process has its own."""

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
        """Count a request that has ended, and what its texts took."""
        self._requests.labels(endpoint, outcome).inc()
        if tally is not None:
            self.add(tally)

    def add(self, tally: Tally) -> None:
        """Count what texts took."""
        for stats, new_tokens in tally.results:
            self._count_result(tally.model, stats, new_tokens)

    def _count_result(self, model: str, stats: Stats, new_tokens: int) -> None:
        for name, counter in self._counts.items():
            counter.labels(model).inc(getattr(stats, name))
        self._new_tokens.labels(model).inc(new_tokens)
        if stats.time_to_first_token is not None:
            self._first.labels(model).observe(stats.time_to_first_token)
            if stats.new_tokens > 1:
                seconds = (stats.seconds - stats.time_to_first_token) / (stats.new_tokens - 1)
                self._between.labels(model).observe(seconds)

    def text(self, loads: Iterable[Load]) -> bytes:
        """All numbers in Prometheus's format.

        Args:
            loads: of this moment. The loads of replicas of a model add up.
        """
        for gauge in self._loads.values():
            gauge.clear()
        for load in loads:
            for name, gauge in self._loads.items():
                gauge.labels(load.model).inc(getattr(load, name.removeprefix("specbeam_")))
        return generate_latest(self._registry)
