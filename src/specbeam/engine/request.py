"""A request: one submitted prompt, with its tree, its strategy, its slots and its text."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from specbeam.backends.contract import Backend, EncodingBackend, Segment
from specbeam.decoding import Hypothesis, Strategy
from specbeam.decoding.beam import BeamSearch, DiverseBeamSearch, Search, beam_search, draw_without_replacement
from specbeam.decoding.greedy import greedy
from specbeam.decoding.processors import Processors, Warpers, processors_of_checkpoint
from specbeam.decoding.record import Record
from specbeam.decoding.sampling import sample, seeded
from specbeam.decoding.speculative import reject_or_accept, speculative
from specbeam.decoding.speculative_beam import speculative_beam_search
from specbeam.decoding.stopping import Stopping
from specbeam.drafting import Drafter
from specbeam.drafting.chains import Chains
from specbeam.drafting.model import ModelDrafter
from specbeam.drafting.ngram import NgramDrafter
from specbeam.drafting.pace import Pace
from specbeam.drafting.retokenizing import RetokenizingDrafter
from specbeam.drafting.sizes import Cost
from specbeam.drafting.suffix import SuffixAutomaton, SuffixDrafter
from specbeam.engine.costs import nominal_cost
from specbeam.engine.slots import Slots
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.options import MOST_DRAFTED, Options
from specbeam.results import Piece, Result, Sequence, Stats
from specbeam.streaming import TextStream
from specbeam.tree import NO_NODES, Nodes, Tree

Draft = LanguageModel | SuffixAutomaton | str
"""A draft model, "ngram", "suffix", or an automaton over earlier texts."""


class Request:
    """The handle of a submitted prompt.

    Attributes:
        prompt_ids: the prompt's token ids, int.
        max_length: the most tokens of prompt and text together.
        most_slots: the most cache slots it may come to need.
        pieces: streamed pieces of text that nobody has taken yet.
        found: finished sequences, best first, as they become certain; nobody has taken them yet.
        done: there is a result or an error.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt_ids: list[int],
        options: Options,
        draft: Draft | None = None,
        cost: Callable[[Backend], Cost] | None = None,
    ) -> None:
        context, start = lm.backend.context_length, lm.backend.start_token_ids
        begin = prompt_ids if start is None else start  # with an encoder the text does not follow the prompt
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
        self.max_length = min(len(begin) + options.max_new_tokens, context)
        if options.constraint is not None and not self._eos_token_ids:
            raise SpecbeamError(
                "a constraint needs a token that ends the text, and the model has none: give eos_token_id"
            )
        self.pieces: deque[Piece] = deque()
        self.found: deque[Sequence] = deque()
        self.done = False
        self.drafting = False  # whether what is pending is for the draft model
        self.pending = NO_NODES  # what is still to be evaluated, ancestors first
        self._lm = lm
        self._draft = draft
        self._options = options
        self._tree = Tree(begin)
        self._record = Record(self._tree, options.trace)
        forced = processors_of_checkpoint(
            lm.generation_defaults, self._eos_token_ids, len(begin), self.max_length, lm.backend.device
        )
        self._process = Processors(options, self._eos_token_ids, forced)
        self._stop = Stopping(self._eos_token_ids, self.max_length, options.stop_strings, lm.decode)
        self._draws = Warpers(options), seeded(options.seed)
        self._drafter = None if draft is None else self._make_drafter(draft, cost or (lambda backend: nominal_cost))
        self._slots: dict[bool, Slots] = {}  # of the draft model, and of the target
        self._text = TextStream(lm.decode, options.stop_strings)
        self._streamed = len(begin)
        self._wanted = NO_NODES
        self._vocab: int | None = None  # of how many first tokens logits are wanted
        self._received: list[Tensor] = []
        self._cancelled = False
        self._strategy: Strategy | None = None
        self._result: Result | None = None
        self._error: Exception | None = None
        self._submitted = time.perf_counter()
        self._first_token: float | None = None
        self._passes = {False: 0, True: 0}  # of the target, and of the draft model
        self._seconds = {False: 0.0, True: 0.0}  # what their passes took
        self._answered = 0  # of the target's, those that returned logits
        self._evaluated = 0

    @property
    def backend(self) -> Backend:
        """What is to evaluate the pending nodes."""
        return self._backend(self.drafting)

    def _backend(self, drafting: bool) -> Backend:
        if drafting:
            assert isinstance(self._draft, LanguageModel)
            return self._draft.backend
        return self._lm.backend

    @property
    def most_slots(self) -> int:
        """The most cache slots it may come to need, those of a draft model counted by what they take."""
        pace = None if self._drafter is None else self._drafter.pace
        most = self._most_nodes(0 if pace is None else pace.most_guesses)
        if isinstance(self._draft, LanguageModel) and pace is not None:
            share = self._draft.backend.slot_bytes / self._lm.backend.slot_bytes
            most += round(self._most_nodes(pace.most_drafted) * share)
        return most

    def _most_nodes(self, guesses: int) -> int:
        """The most nodes that may come to be in a cache at once, with so many guesses a round."""
        new = self.max_length - self._tree.prompt_length
        # Beams may share nothing but the prompt; guesses may last for two rounds. What an encoder read is kept too.
        return len(self.prompt_ids) + new * self._options.num_beams + 2 * guesses

    @property
    def used_slots(self) -> int:
        """Slots in use on the target."""
        return self._slots[False].used if self._slots else 0

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
            pace = None if self._drafter is None else self._drafter.pace
            most = self._most_nodes(0 if pace is None else pace.most_guesses)
            self._slots[False] = Slots(self._tree, self._lm.backend, most)
            if isinstance(self._draft, LanguageModel) and self._drafter is not None:
                most = self._most_nodes(self._drafter.pace.most_drafted)
                self._slots[True] = Slots(self._drafter.tree, self._draft.backend, most)
            for drafting, slots in self._slots.items():
                backend = self._backend(drafting)
                if backend.start_token_ids is not None:
                    cast(EncodingBackend, backend).encode(slots.cache, self.prompt_ids)
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
        wanted = np.flatnonzero(np.isin(nodes, self._wanted))
        return self._slots[self.drafting].segment(nodes, wanted, self._vocab)

    def spend(self, seconds: float) -> None:
        """A pass took the request's part of it so long."""
        self._seconds[self.drafting] += seconds

    def receive(self, nodes: Nodes, logits: Tensor) -> None:
        """Take the logits at the wanted ones among some pending nodes; go on when all there are have come."""
        self._passes[self.drafting] += 1
        self._evaluated += 0 if self.drafting else len(nodes)
        self.pending = self.pending[len(nodes) :]
        self._received.append(logits[:, : self._vocab])
        if not len(self.pending):
            self._answered += not self.drafting
            with self._failing_alone():
                logits = self._received[0] if len(self._received) == 1 else torch.cat(self._received)
                self._received = []
                if (np.diff(self._wanted) <= 0).any():  # they come ordered by node; the strategy has its own order
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
        options, tree, process, stop, record = self._options, self._tree, self._process, self._stop, self._record
        warp, generator = self._draws
        if options.num_beams > 1:
            search = self._make_search()
            if self._drafter is not None:
                return speculative_beam_search(tree, search, record, self._drafter)
            return beam_search(tree, search, record)
        if self._drafter is not None:
            choose = reject_or_accept(tree, warp, generator) if options.samples else None
            return speculative(tree, process, stop, record, self._drafter, choose)
        if options.samples:
            return sample(tree, process, stop, record, warp, generator)
        return greedy(tree, process, stop, record)

    def _make_search(self) -> Search:
        options, process = self._options, self._process
        warp, generator = self._draws
        search = partial(
            BeamSearch,
            self._tree,
            (lambda *at: warp(process(*at))) if options.samples else process,
            self._stop,
            num_return_sequences=options.num_return_sequences,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            select=draw_without_replacement(generator) if options.samples else None,
            constrained=options.constraint is not None,
        )
        groups = options.num_beam_groups
        if groups == 1:
            return search(options.num_beams, bounded=options.bound_rule and not options.samples and not process.raises)
        size = options.num_beams // groups
        return DiverseBeamSearch([search(size, bounded=False) for _ in range(groups)], options.diversity_penalty)

    def _make_drafter(self, draft: Draft, cost: Callable[[Backend], Cost]) -> Drafter:
        options, lm = self._options, self._lm
        if options.samples:  # costs that are measured would make a seed's text depend on the machine's mood
            cost = lambda backend: nominal_cost if backend is lm.backend else lambda n: 0.2 * nominal_cost(n)  # noqa: E731
        direct = isinstance(draft, LanguageModel) and draft.shares_tokenizer(lm)
        pace = Pace(
            num_draft_tokens=options.draft_size("num_draft_tokens"),
            draft_width=options.draft_size("draft_width"),
            draft_budget=options.draft_size("draft_budget"),
            num_beams=options.num_beams,
            target=cost(lm.backend),
            draft=cost(draft.backend) if isinstance(draft, LanguageModel) else None,
            chains=not direct,
            unread=len(self.prompt_ids),
        )
        vocab_size = lm.backend.vocab_size
        chains = Chains(self._tree, self._process, self._stop, vocab_size, pace)
        if isinstance(draft, LanguageModel):
            if direct:
                draws = (self._draft_warpers(), self._draws[1]) if options.samples and options.num_beams == 1 else None
                context = draft.backend.context_length
                added = {} if lm.tokenizer is None else lm.tokenizer.added_tokens_decoder
                special = [token_id for token_id, token in added.items() if token.special]
                return ModelDrafter(self._tree, self._process, self._stop, vocab_size, context, special, pace, draws)
            return RetokenizingDrafter(self._tree, chains, lm, draft)
        if draft == "ngram":
            return NgramDrafter(self._tree, chains)
        return SuffixDrafter(self._tree, chains, draft if isinstance(draft, SuffixAutomaton) else None)

    def _draft_warpers(self) -> Warpers:
        """What shapes the distribution that guesses are drawn from."""
        options = self._options
        warmth = options.temperature if options.draft_temperature is None else options.draft_temperature
        top_k = options.top_k if options.draft_top_k is None else options.draft_top_k
        return Warpers(replace(options, temperature=warmth, top_k=top_k))

    def _advance(self, logits: Tensor | None) -> None:
        """Let the strategy take logits and name the next nodes, or finish."""
        assert self._strategy is not None
        try:
            wish = next(self._strategy) if logits is None else self._strategy.send(logits)
            while isinstance(wish, Hypothesis):
                self.found.append(self._sequence(wish))
                wish = next(self._strategy)
        except StopIteration as finished:
            self._finish(finished.value)
            return
        dropped = {tree: tree.take_dropped() for tree in {slots.tree for slots in self._slots.values()}}
        for slots in self._slots.values():
            slots.release(dropped[slots.tree])
        self.drafting = wish.drafting
        self._wanted, self._vocab = np.asarray(wish.nodes, dtype=np.int64), wish.vocab
        self.pending = self._slots[self.drafting].missing(self._wanted)
        self._stream(self._tree.trunk[self._streamed :])

    def _stream(self, nodes: Nodes) -> None:
        """Hand out the text of nodes that are certain."""
        if len(nodes) and self._first_token is None:
            self._first_token = time.perf_counter() - self._submitted
        self._streamed += len(nodes)
        if text := self._text.push(self._tree.tokens(nodes).tolist()):
            self.pieces.append(Piece(text))

    def _finish(self, hypotheses: list[Hypothesis]) -> None:
        if not hypotheses:
            raise SpecbeamError(
                "no text came of it: the constraint, prefix_allowed_tokens_fn, logits_processor, min_new_tokens and "
                "max_new_tokens together allow none, or length_penalty puts all scores out of range"
            )
        best, *others = hypotheses
        self._stream(self._tree.path(best.node)[self._streamed :])
        if text := self._text.finish():
            self.pieces.append(Piece(text))
        sequences = [self._sequence(best, self._text.text), *map(self._sequence, others)]
        self._result = Result(
            sequences, self._stats(len(sequences[0].token_ids)), self._record.trace(self._lm.decode_token)
        )
        self._release()

    def _stats(self, new_tokens: int) -> Stats:
        record = self._record
        seconds = time.perf_counter() - self._submitted
        return Stats(
            prompt_tokens=len(self.prompt_ids),
            new_tokens=new_tokens,
            seconds=seconds,
            tokens_per_second=new_tokens / seconds,
            time_to_first_token=self._first_token,
            forward_passes=sum(self._passes.values()),
            target_passes=self._passes[False],
            draft_passes=self._passes[True],
            target_seconds=self._seconds[False],
            draft_seconds=self._seconds[True],
            nodes_evaluated=self._evaluated,
            peak_slots=self._slots[False].peak if self._slots else 0,
            drafted=record.drafted,
            accepted=record.accepted,
            acceptance_rate=record.accepted / record.drafted if record.drafted else None,
            steps_per_target_pass=record.steps / self._answered if self._answered else None,
            peak_memory=self._lm.backend.peak_memory(),
        )

    def _sequence(self, hypothesis: Hypothesis, text: str | None = None) -> Sequence:
        token_ids = self._tree.new_tokens(hypothesis.node)
        if text is None:
            stream = TextStream(self._lm.decode, self._options.stop_strings)
            stream.push(token_ids)
            stream.finish()
            text = stream.text
        return Sequence(text, token_ids, hypothesis.score, hypothesis.finish_reason)

    def _release(self) -> None:
        """Let go of all memory but the result."""
        self.done = True
        self._slots = {}
        self.pending = NO_NODES
        self._received = []
        self._strategy = None
        self._drafter = None


def forget_frames(error: Exception) -> Exception:
    """The error with its traceback as text: frames would keep alive the tensors they worked on."""
    if error.__traceback__ is not None:
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def check_draft_sizes(options: Options) -> None:
    """Refuse sizes of drafts where nothing drafts."""
    for name in MOST_DRAFTED:
        if options.draft_size(name) is not None:
            raise SpecbeamError(
                f"{name}={options.draft_size(name)} has no effect without a draft: give one, or leave it out"
            )


def check_draft(lm: LanguageModel, draft: Any, options: Options) -> None:
    """Refuse what cannot draft for a model."""
    for name in ("draft_temperature", "draft_top_k"):
        if getattr(options, name) is not None and not isinstance(draft, LanguageModel):
            raise SpecbeamError(f"{name}={getattr(options, name)} has no effect without a draft model: leave it out")
    if draft is None:
        check_draft_sizes(options)
    elif isinstance(draft, LanguageModel):
        ours, theirs = lm.backend.device, draft.backend.device
        if ours != theirs:
            raise SpecbeamError(
                f"the draft {draft.source} is on {theirs}, but the model on {ours}: load both on the same device"
            )
        if (begins := lm.backend.start_token_ids) != (other := draft.backend.start_token_ids):
            raise SpecbeamError(
                f"the draft {draft.source} begins its texts with the token ids {other}, but the model with {begins} "
                "(None: with the prompt): give a draft of the same kind"
            )
        if begins is not None and not draft.shares_tokenizer(lm):
            raise SpecbeamError(
                f"the draft {draft.source} has another tokenizer than {lm.source}, and for models with an encoder "
                "they cannot be bridged: give a draft with the same tokenizer"
            )
    elif not (isinstance(draft, SuffixAutomaton) or (isinstance(draft, str) and draft in ("ngram", "suffix"))):
        raise SpecbeamError(
            f'draft={draft!r} is not allowed: give a loaded model (specbeam.load), "ngram", "suffix" or what '
            "specbeam.suffix_automaton returned"
        )
