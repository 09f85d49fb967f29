"""A request: one submitted prompt, with its tree, its strategy, its slots and its text."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

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
from specbeam.results import Piece, Result, Sequence, Stats
from specbeam.slots import Slots
from specbeam.streaming import TextStream
from specbeam.tree import Nodes, Tree


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
        if options.stop_strings and lm.tokenizer is None:
            raise SpecbeamError(
                f"stop_strings need a text to look in, and {lm.source} has no tokenizer: leave them out"
            )
        options = options.with_defaults(lm.generation_defaults)
        eos = options.eos_token_id
        self._eos_token_ids = lm.eos_token_ids if eos is None else frozenset(eos)
        foreign = [token for token in self._eos_token_ids if token >= lm.backend.vocab_size]
        if foreign:
            raise SpecbeamError(f"eos_token_id {foreign[0]} is not in the vocabulary of {lm.backend.vocab_size}")
        self.prompt_ids = prompt_ids
        self.max_length = min(len(prompt_ids) + options.max_new_tokens, context)
        # Beams and as many finished texts, which the tree keeps, may share nothing but the prompt.
        texts = 1 if options.num_beams == 1 else 2 * options.num_beams
        self.most_slots = len(prompt_ids) + (self.max_length - len(prompt_ids)) * texts
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
