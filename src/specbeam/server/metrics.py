"""The numbers that Prometheus reads from ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from specbeam.results import Result
from specbeam.server.call import Call
from specbeam.server.models import Models

FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
BETWEEN_TOKENS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
COUNTS = {
    "prompt_tokens": "Tokens of prompts.",
    "reused_tokens": "Tokens of prompts that another request had read.",
    "target_passes": "Passes of the model, counted for each request that took part.",
    "draft_passes": "Passes of draft models, counted for each request that took part.",
    "drafted": "Guesses that the model checked.",
    "accepted": "Guesses that became part of a text, or of a beam.",
}
"""Statistics of a request (:class:`specbeam.Stats`) that are added up."""


class Metrics:
    """The numbers of one server. Each server of a process has its own."""

    def __init__(self, models: Models) -> None:
        self._models = models
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
        self._registry.register(self)

    def count(self, endpoint: str, outcome: str, call: Call | None) -> None:
        """Count a request that has ended, and what its texts took."""
        self._requests.labels(endpoint, outcome).inc()
        for request in [] if call is None else call.requests:
            if call is not None and isinstance(request.outcome, Result):
                self._count_result(call.model.name, request.outcome)

    def _count_result(self, model: str, result: Result) -> None:
        stats = result.stats
        for name, counter in self._counts.items():
            counter.labels(model).inc(getattr(stats, name))
        self._new_tokens.labels(model).inc(sum(len(text.token_ids) for text in result.sequences))
        if stats.time_to_first_token is not None:
            self._first.labels(model).observe(stats.time_to_first_token)
            if stats.new_tokens > 1:
                seconds = (stats.seconds - stats.time_to_first_token) / (stats.new_tokens - 1)
                self._between.labels(model).observe(seconds)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The numbers of this moment. The registry calls this."""
        live = GaugeMetricFamily("specbeam_live_requests", "Requests that share passes now.", labels=["model"])
        waiting = GaugeMetricFamily("specbeam_waiting_requests", "Requests that wait for a place.", labels=["model"])
        cache = GaugeMetricFamily(
            "specbeam_cache_tokens", "Slots of the KV cache that live requests use.", labels=["model"]
        )
        for model in self._models:
            live.add_metric([model.name], model.engine.live)
            waiting.add_metric([model.name], model.engine.waiting)
            cache.add_metric([model.name], model.engine.cache_tokens)
        yield from (live, waiting, cache)

    def text(self) -> bytes:
        """All numbers in Prometheus's format."""
        return generate_latest(self._registry)
