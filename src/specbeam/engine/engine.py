"""The engine: many requests, one forward pass a model a round.

A request is a strategy, a generator that asks for logits at nodes of its tree. Each round the engine gathers what the
live requests ask for, runs it as one batch, and hands the logits back. It alone owns memory and batching.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from specbeam.engine.costs import pass_times
from specbeam.engine.request import Draft, Request, check_draft, forget_frames
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.options import Options
from specbeam.prompts import encode
from specbeam.tree import Nodes

Key = TypeVar("Key")


class Engine:
    """Runs requests on a loaded model.

    Args:
        lm: the model.
        max_requests: so many requests share a pass; the others wait their turn.
        max_batch_tokens: a pass evaluates at most so many nodes. Longer prompts are read in chunks, so that they do
            not hold up the requests that are generating.
        max_cache_tokens: slots for keys and values of all live requests together. Not given: what a quarter of the
            machine's memory, or four fifths of the GPU's free memory, has room for.

    ``submit`` and ``Request.cancel`` may be called from any thread; ``step`` and ``run`` from one thread at a time.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_requests: int = 8,
        max_batch_tokens: int = 512,
        max_cache_tokens: int | None = None,
    ) -> None:
        if max_cache_tokens is None:
            max_cache_tokens = max(1, lm.backend.memory_for_caches() // lm.backend.slot_bytes)
        limits = {
            "max_requests": max_requests,
            "max_batch_tokens": max_batch_tokens,
            "max_cache_tokens": max_cache_tokens,
        }
        for name, value in limits.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecbeamError(f"{name}={value!r} is not allowed: give at least 1")
        self.lm = lm
        self.max_requests = max_requests
        self.max_batch_tokens = max_batch_tokens
        self.max_cache_tokens = max_cache_tokens
        self._waiting: deque[Request] = deque()
        self._live: list[Request] = []

    def submit(
        self,
        prompt: Any,
        options: Options | Mapping[str, Any] | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        draft: Draft | None = None,
    ) -> Request:
        """Queue one prompt (text, chat messages or token ids) and return its handle.

        Args:
            options: an :class:`Options` or a mapping of its fields.
            draft: what guesses how the text goes on, so that a pass of the model can check many tokens: a loaded model,
                "ngram" or "suffix" (lookups in the text so far), or what :func:`specbeam.suffix_automaton` made of
                earlier texts. It changes how fast the text comes, not which (docs/exactness.md).

        Raises:
            SpecbeamError: a prompt that is empty or longer than the context, options that do not fit the model, or a
                draft that cannot be used with it.
        """
        chosen = Options.of(options or {})
        check_draft(self.lm, draft, chosen)
        ids = encode(self.lm, prompt, system=system, raw=raw)
        request = Request(self.lm, ids, chosen, draft, lambda backend: pass_times(backend).expected)
        if request.most_slots > self.max_cache_tokens:
            raise SpecbeamError(
                f"prompt and max_new_tokens need {request.most_slots} cache slots, the engine has "
                f"{self.max_cache_tokens}: ask for fewer new tokens or raise max_cache_tokens"
            )
        self._waiting.append(request)
        return request

    def run(self) -> None:
        """Work until no request is left."""
        while self.step():
            pass

    def as_completed(self, submissions: Iterable[tuple[Key, Request]]) -> Iterator[tuple[Key, Request]]:
        """Keep the engine full, and yield each request with its key in the order in which they finish.

        Args:
            submissions: keys and submitted requests. An item is taken only when fewer than ``max_requests`` are
                unfinished: a generator that calls ``submit`` holds no memory for later requests, and their seconds do
                not count the time before their turn.
        """
        submissions = iter(submissions)
        unfinished: list[tuple[Key, Request]] = []
        while True:
            unfinished += islice(submissions, self.max_requests - len(unfinished))
            if not unfinished:
                return
            self.step()
            finished = [(key, request) for key, request in unfinished if request.done]
            unfinished = [(key, request) for key, request in unfinished if not request.done]
            yield from finished

    def step(self) -> bool:
        """One round: admit, evaluate, advance. Returns whether anything is left to do."""
        for request in [*self._live, *self._waiting.copy()]:
            request.end_if_cancelled()
        self._admit()
        batch = self._gather()
        if batch:
            for request, nodes, logits in self._evaluate(batch):
                with _one_torch_thread(self.lm.backend.has_threads):
                    request.receive(nodes, logits)
        self._live = [request for request in self._live if not request.done]
        return bool(self._live or self._waiting)

    @property
    def cache_tokens(self) -> int:
        """Slots in use by live requests."""
        return sum(request.used_slots for request in self._live)

    def _admit(self) -> None:
        """Start waiting requests, first come first served, as far as their greatest size fits beside the others'."""
        self._live = [request for request in self._live if not request.done]
        room = self.max_cache_tokens - sum(request.most_slots for request in self._live)
        while self._waiting and len(self._live) < self.max_requests:
            request = self._waiting[0]
            if not request.done and request.most_slots > room:
                return
            self._waiting.popleft()
            if not request.done:
                room -= request.most_slots
                self._live.append(request)
                request.start()

    def _gather(self) -> list[tuple[Request, Nodes]]:
        """What the next pass evaluates: small wants first, so that a long prompt delays nobody.

        While anybody waits for a draft model, the target waits for them: then one pass of it serves all.
        """
        waiting = [request for request in self._live if not request.done]
        if any(request.drafting for request in waiting):
            waiting = [request for request in waiting if request.drafting]
        batch: list[tuple[Request, Nodes]] = []
        room = self.max_batch_tokens
        for request in sorted(waiting, key=lambda r: len(r.pending)):
            nodes = request.pending[:room]
            if not len(nodes):
                break
            if batch and request.backend is not batch[0][0].backend:  # another draft model: its turn comes
                continue
            room -= len(nodes)
            batch.append((request, nodes))
        return batch

    def _evaluate(self, batch: list[tuple[Request, Nodes]]) -> Iterator[tuple[Request, Nodes, Tensor]]:
        """One pass over the batch. If it fails, each request is tried alone, and those that fail alone are ended."""
        backend, start = batch[0][0].backend, time.perf_counter()
        try:
            rows = self._forward(batch)
        except Exception as error:
            failure = forget_frames(error)
        else:
            for (request, nodes), row in zip(batch, rows, strict=True):
                yield request, nodes, row
            # With what became of the logits: choosing among them costs too, and drafts should bring in all they cost.
            pass_times(backend).add(sum(len(nodes) for _, nodes in batch), time.perf_counter() - start)
            return
        # Outside of the except block: inside it, Python would hold on to the failed pass's memory.
        if len(batch) == 1:
            batch[0][0].fail(failure)
        else:
            for one in batch:
                yield from self._evaluate([one])

    def _forward(self, batch: list[tuple[Request, Nodes]]) -> tuple[Tensor, ...]:
        segments = [request.segment(nodes) for request, nodes in batch]
        backend = batch[0][0].backend
        start = time.perf_counter()
        logits = backend.forward(segments)
        if logits.is_cuda:
            torch.cuda.synchronize(logits.device)
        seconds = time.perf_counter() - start
        together = sum(len(s.tokens) for s in segments)
        for request, nodes in batch:
            request.spend(seconds * len(nodes) / together)
        return torch.split(logits, [len(s.wanted) for s in segments])


@contextmanager
def _one_torch_thread(wanted: bool) -> Iterator[None]:
    """Keep PyTorch's threads out of the way of a backend's own: they would spin on its cores when they are done."""
    before = torch.get_num_threads()
    if not wanted or before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
