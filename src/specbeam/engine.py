"""The engine: many requests, one forward pass a model a round.

A request is a strategy, a generator that asks for logits at nodes of its tree. Each round the engine gathers what the
live requests ask for, runs it as one batch, and hands the logits back. It alone owns memory and batching.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbeam.backends.contract import Segment
from specbeam.decoding import Evaluate, Hypothesis, Strategy
from specbeam.decoding.beam import beam_search, draw_without_replacement
from specbeam.decoding.greedy import greedy
from specbeam.decoding.processors import Processors, Warpers
from specbeam.decoding.sampling import sample, seeded
from specbeam.decoding.stopping import Stopping
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.options import Options
from specbeam.prompts import encode
from specbeam.results import Piece, Result, Sequence, Stats
from specbeam.slots import Slots
from specbeam.streaming import TextStream
from specbeam.tree import Nodes, Tree


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
    ) -> Request:
        """Queue one prompt (text, chat messages or token ids) and return its handle.

        Options are an :class:`Options` or a mapping of its fields.

        Raises:
            SpecbeamError: a prompt that is empty or longer than the context, or options that do not fit the model.
        """
        request = Request(self.lm, encode(self.lm, prompt, system=system, raw=raw), Options.of(options or {}))
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

    def step(self) -> bool:
        """One round: admit, evaluate, advance. Returns whether anything is left to do."""
        for request in [*self._live, *self._waiting.copy()]:
            request.end_if_cancelled()
        self._admit()
        batch = self._gather()
        if batch:
            for request, nodes, logits in self._evaluate(batch):
                request.receive(nodes, logits)
        self._live = [request for request in self._live if not request.done]
        return bool(self._live or self._waiting)

    @property
    def cache_tokens(self) -> int:
        """Slots in use by live requests."""
        return sum(request.slots.used for request in self._live if request.slots is not None)

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
        """What the next pass evaluates: small wants first, so that a long prompt delays nobody."""
        batch = []
        room = self.max_batch_tokens
        for request in sorted((r for r in self._live if not r.done), key=lambda r: len(r.pending)):
            nodes = request.pending[:room]
            if not len(nodes):
                break
            room -= len(nodes)
            batch.append((request, nodes))
        return batch

    def _evaluate(self, batch: list[tuple[Request, Nodes]]) -> Iterator[tuple[Request, Nodes, Tensor]]:
        """One pass over the batch. If it fails, each request is tried alone, and those that fail alone are ended."""
        try:
            rows = self._forward(batch)
        except Exception as error:
            failure = forget_frames(error)
        else:
            for (request, nodes), row in zip(batch, rows, strict=True):
                yield request, nodes, row
            return
        # Outside of the except block: inside it, Python would hold on to the failed pass's memory.
        if len(batch) == 1:
            batch[0][0].fail(failure)
        else:
            for one in batch:
                yield from self._evaluate([one])

    def _forward(self, batch: list[tuple[Request, Nodes]]) -> tuple[Tensor, ...]:
        segments = [request.segment(nodes) for request, nodes in batch]
        logits = self.lm.backend.forward(segments)
        return torch.split(logits, [len(s.wanted) for s in segments])


class Request:
    """The handle of a submitted prompt.

    Attributes:
        prompt_ids: the prompt's token ids, int.
        max_length: the most tokens of prompt and text together.
        most_slots: the most cache slots it may come to need.
        pieces: streamed pieces of text that nobody has taken yet.
        done: there is a result or an error.
    """

    def __init__(self, lm: LanguageModel, prompt_ids: list[int], options: Options) -> None:
        context = lm.backend.context_length
        if len(prompt_ids) >= context:
            raise SpecbeamError(
                f"the prompt has {len(prompt_ids)} tokens, but {lm.source} has a context of {context}, which must "
                "hold at least one new token too: shorten the prompt"
            )
        options = options.with_defaults(lm.generation_defaults)
        eos = options.eos_token_id
        self._eos_token_ids = lm.eos_token_ids if eos is None else frozenset(eos)
        foreign = [token for token in self._eos_token_ids if token >= lm.backend.vocab_size]
        if foreign:
            raise SpecbeamError(f"eos_token_id {foreign[0]} is not in the vocabulary of {lm.backend.vocab_size}")
        self.prompt_ids = prompt_ids
        self.max_length = min(len(prompt_ids) + options.max_new_tokens, context)
        self.most_slots = len(prompt_ids) + (self.max_length - len(prompt_ids)) * options.num_beams
        self.pieces: deque[Piece] = deque()
        self.done = False
        self.slots: Slots | None = None
        self.pending: Nodes = np.empty(0, dtype=np.int64)  # what is still to be evaluated, ancestors first
        self._lm = lm
        self._options = options
        self._tree = Tree(prompt_ids)
        self._text = TextStream(lm.decode, options.stop_strings)
        self._streamed = len(prompt_ids)
        self._wanted: Nodes = self.pending
        self._received: list[Tensor] = []
        self._cancelled = False
        self._strategy: Strategy | None = None
        self._result: Result | None = None
        self._error: Exception | None = None
        self._submitted = time.perf_counter()
        self._first_token: float | None = None
        self._passes = 0

    def cancel(self) -> None:
        """End the request; its result is what there is so far. Takes effect before the next pass."""
        self._cancelled = True

    def result(self) -> Result:
        """The result, once done. Raises what ended the request if it failed."""
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise SpecbeamError("the request is not finished: call Engine.run() or step() until it is done")
        return self._result

    # What follows is between the engine and the request.

    def start(self) -> None:
        """Begin the strategy: it says what it wants evaluated first."""
        with self._failing_alone():
            self.slots = Slots(self._tree, self._lm.backend, self.most_slots)
            self._strategy = self._make_strategy()
            self._advance(None)

    def end_if_cancelled(self) -> None:
        """Make what there is the result, if the request was cancelled."""
        if self._cancelled and not self.done:
            tip = self._tree.tip
            with self._failing_alone():
                self._finish([Hypothesis(tip, float(self._tree.scores(tip)), "cancelled")])

    def segment(self, nodes: Nodes) -> Segment:
        """The request's part of a pass over some of its pending nodes."""
        assert self.slots is not None
        return self.slots.segment(nodes, wanted=np.flatnonzero(np.isin(nodes, self._wanted)))

    def receive(self, nodes: Nodes, logits: Tensor) -> None:
        """Take the logits at the wanted ones among some pending nodes; go on when all there are have come."""
        self._passes += 1
        self.pending = self.pending[len(nodes) :]
        self._received.append(logits)
        if not len(self.pending):
            with self._failing_alone():
                logits, self._received = torch.cat(self._received), []
                if len(self._wanted) > 1:  # they come ordered by node; the strategy has its own order
                    logits = logits[np.searchsorted(np.unique(self._wanted), self._wanted)]
                self._advance(logits)

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            error = SpecbeamError(
                f"out of memory with {len(self._tree)} nodes in the request's tree: ask for fewer new tokens, a "
                "shorter prompt, or a smaller dtype"
            )
        self._error = forget_frames(error)
        self._release()

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """What goes wrong in here ends this request and no other."""
        try:
            yield
        except Exception as error:
            self.fail(error)

    def _make_strategy(self) -> Strategy:
        options = self._options
        process = Processors(options, self._eos_token_ids)
        stop = Stopping(self._eos_token_ids, self.max_length, options.stop_strings, self._lm.decode)
        warp, generator = Warpers(options), seeded(options.seed)
        if options.num_beams > 1:
            return beam_search(
                self._tree,
                (lambda *at: warp(process(*at))) if options.samples else process,
                stop,
                options.num_beams,
                options.num_return_sequences,
                options.length_penalty,
                options.early_stopping,
                draw_without_replacement(generator) if options.samples else None,
            )
        if options.samples:
            return sample(self._tree, process, stop, warp, generator)
        return greedy(self._tree, process, stop)

    def _advance(self, logits: Tensor | None) -> None:
        """Let the strategy take logits and name the next nodes, or finish."""
        assert self.slots is not None
        assert self._strategy is not None
        try:
            wish: Evaluate = next(self._strategy) if logits is None else self._strategy.send(logits)
        except StopIteration as finished:
            self._finish(finished.value)
            return
        self.slots.release()
        self._tree.dropped.clear()
        self._wanted = np.asarray(wish.nodes, dtype=np.int64)
        self.pending = self.slots.missing(self._wanted)
        self._stream(self._tree.trunk[self._streamed :])

    def _stream(self, nodes: Nodes) -> None:
        """Hand out the text of nodes that are certain."""
        if len(nodes) and self._first_token is None:
            self._first_token = time.perf_counter() - self._submitted
        self._streamed += len(nodes)
        if text := self._text.push(self._tree.tokens(nodes).tolist()):
            self.pieces.append(Piece(text))

    def _finish(self, hypotheses: list[Hypothesis]) -> None:
        best, *others = hypotheses
        self._stream(self._tree.path(best.node)[self._streamed :])
        if text := self._text.finish():
            self.pieces.append(Piece(text))
        sequences = [self._sequence(best, self._text.text)]
        for other in others:
            stream = TextStream(self._lm.decode, self._options.stop_strings)
            stream.push(self._tree.new_tokens(other.node))
            stream.finish()
            sequences.append(self._sequence(other, stream.text))
        seconds = time.perf_counter() - self._submitted
        new = len(sequences[0].token_ids)
        self._result = Result(
            sequences,
            Stats(
                prompt_tokens=len(self.prompt_ids),
                new_tokens=new,
                seconds=seconds,
                tokens_per_second=new / seconds,
                time_to_first_token=self._first_token,
                forward_passes=self._passes,
                peak_memory=self._lm.backend.peak_memory(),
            ),
        )
        self._release()

    def _sequence(self, hypothesis: Hypothesis, text: str) -> Sequence:
        return Sequence(text, self._tree.new_tokens(hypothesis.node), hypothesis.score, hypothesis.finish_reason)

    def _release(self) -> None:
        """Let go of all memory but the result."""
        self.done = True
        self.slots = None
        self.pending = np.empty(0, dtype=np.int64)
        self._received = []
        self._strategy = None


def forget_frames(error: Exception) -> Exception:
    """The error with its traceback as text: frames would keep alive the tensors they worked on."""
    if error.__traceback__ is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)
