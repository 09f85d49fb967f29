"""A request: one submitted prompt, with its tree, its strategy and its text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbeam.backends.contract import Backend, Segment
from specbeam.decoding import Hypothesis, Strategy
from specbeam.decoding.alternatives import Alternatives
from specbeam.decoding.processors import Processors, Warpers, check_token_ids, processors_of_checkpoint
from specbeam.decoding.record import Record
from specbeam.decoding.sampling import seeded
from specbeam.decoding.stopping import Stopping
from specbeam.drafting.retokenizing import RetokenizingDrafter
from specbeam.engine.costs import SharedCost, pass_times
from specbeam.engine.drafters import Draft, make_drafter
from specbeam.engine.failures import forget_frames, is_out_of_memory
from specbeam.engine.model_state import ModelState
from specbeam.engine.prefixes import Prefixes
from specbeam.engine.strategies import MakeStrategy, Setup, make_strategy
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.options import Options
from specbeam.results import Piece, Result, Sequence, Stats, TopLogProbs
from specbeam.streaming import TextStream
from specbeam.tree import NO_NODES, Nodes, Tree


class Request:
    """The handle of a submitted prompt.

    Attributes:
        prompt_ids: the prompt's token ids.
        max_length: the most tokens of prompt and text together.
        pieces: streamed pieces of text that nobody has taken yet.
        found: finished sequences that nobody has taken yet, best first. Each comes as soon as it is certain.
        done: there is a result or an error.
        number: the engine numbers requests in the order of submission.
        overtaken: how many later requests have started while it waited.
        last_turn: when it last took part in a pass. Requests with lower numbers come first.
    """

    def __init__(
        self,
        lm: LanguageModel,
        prompt_ids: list[int],
        options: Options,
        draft: Draft | None = None,
        strategy: MakeStrategy | None = None,
        *,
        cancellations: deque[Request],
        prefixes: Prefixes,
    ) -> None:
        self.prompt_ids = prompt_ids
        self.pieces: deque[Piece] = deque()
        self.found: deque[Sequence] = deque()
        self.done = False
        self.number = self.overtaken = self.last_turn = 0
        self.drafting = False  # whether the pending nodes are for the draft model
        self.pending = NO_NODES  # nodes still to be evaluated, ancestors first
        self._lm = lm
        self._setup = setup = _make_setup(lm, prompt_ids, options)
        self.max_length = setup.stop.max_length
        self._target_cost = SharedCost(pass_times(lm.backend), setup.options.num_beams)
        self._draft_cost = SharedCost(pass_times(draft.backend), 1) if isinstance(draft, LanguageModel) else None
        costs = self._target_cost, self._draft_cost
        self._drafter = None if draft is None else make_drafter(setup, lm, draft, len(prompt_ids), *costs)
        pace = None if self._drafter is None else self._drafter.pace
        size = prompt_ids, self.max_length - setup.tree.prompt_length, setup.options.num_texts
        self._target = ModelState(lm.backend, setup.tree, *size, guesses=0 if pace is None else pace.most_guesses)
        self._draft: ModelState | None = None
        if isinstance(draft, LanguageModel) and self._drafter is not None and pace is not None:
            length = self._drafter.prompt_length if isinstance(self._drafter, RetokenizingDrafter) else len(prompt_ids)
            self._draft = ModelState(draft.backend, self._drafter.tree, *size, pace.most_drafted, length)
        self._states = [self._target] if self._draft is None else [self._target, self._draft]
        self._make_strategy = strategy or make_strategy
        self._strategy: Strategy | None = None
        self._text = TextStream(lm.decode, setup.options.stop_strings)
        self._streamed = setup.tree.prompt_length  # tokens that were handed out
        k = setup.options.top_logprobs
        self._alternatives = None if k is None else Alternatives(setup.tree, k)
        self._wanted = NO_NODES  # nodes whose logits the strategy asked for
        self._vocab: int | None = None  # how many of the first tokens' logits it asked for
        self._received: list[Tensor] = []
        self.cancellations = cancellations  # the engine's queue of requests to end
        self._prefixes = prefixes  # the engine's kept caches
        self._is_torn = False  # whether an interrupt came between the beginning and the end of its own work
        self._result: Result | None = None
        self._error: Exception | None = None
        self._submitted = time.perf_counter()
        self._first_token: float | None = None  # seconds after submission

    @property
    def most_rows(self) -> int:
        """The most nodes whose logits it needs at once."""
        return max(state.most_rows for state in self._states)

    @property
    def least_bytes(self) -> int:
        """Bytes that its caches need for one text of full length."""
        return sum(state.least_bytes for state in self._states)

    @property
    def needed_bytes(self) -> int:
        """Bytes that its caches need for one more round."""
        return sum(state.needed_bytes for state in self._states)

    @property
    def held_bytes(self) -> int:
        """Bytes that its caches hold."""
        return sum(state.held_bytes for state in self._states)

    @property
    def surplus_bytes(self) -> int:
        """Bytes that its caches would not hold, had they not been taken over. Zero after a pause."""
        return sum(state.surplus_bytes for state in self._states)

    def growth_bytes(self, nodes: Nodes) -> int:
        """Bytes by which a pass over some of its pending nodes makes a cache grow."""
        return self._state.growth_bytes(nodes)

    @property
    def used_slots(self) -> int:
        """Slots in use on the target."""
        return self._target.used_slots

    def cancel(self) -> None:
        """End the request before the next pass. Its result is the text so far. May be called from any thread."""
        self.cancellations.append(self)

    def result(self) -> Result:
        """The result, once done.

        Raises:
            SpecbeamError: the request is not finished.
            Exception: the error that ended the request.
        """
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise SpecbeamError("the request is not finished: call Engine.run() or step() until it is done")
        return self._result

    # The rest is between the engine and the request.

    @property
    def backend(self) -> Backend[Any]:
        """The backend that is to evaluate the pending nodes."""
        return self._state.backend

    @property
    def _state(self) -> ModelState:
        if self.drafting:
            assert self._draft is not None
            return self._draft
        return self._target

    def open(self) -> None:
        """Take caches, and begin the strategy or, after a pause, evaluate again the nodes that it needs."""
        if all(state.is_open for state in self._states):
            return
        with self._failing_alone():
            begins = self._strategy is None
            kept = self._prefixes.take(self.prompt_ids, self._target.may_take) if begins else []
            for state, prefix in zip_longest(self._states, kept[: len(self._states)]):
                state.open(prefix)
            if begins:
                self._strategy = self._make_strategy(self._setup, self._drafter)
                self._advance(None)
            else:
                self._received = []
                self.pending = self._state.slots.missing(self._wanted)

    def pause(self) -> None:
        """Give up the caches until :meth:`open`."""
        for state in self._states:
            state.close()

    def end_if_cancelled(self) -> None:
        """Make the text so far the result."""
        self.end_if_torn()
        if not self.done:
            tree = self._setup.tree
            with self._failing_alone():
                self._finish([Hypothesis(tree.tip, float(tree.scores(tree.tip)), "cancelled")])

    def end_if_torn(self) -> None:
        """End the request if an interrupt, such as Ctrl-C, came in the middle of its own work."""
        if self._is_torn:
            if self._result is None and self._error is None:
                self._error = SpecbeamError("the request was interrupted while it chose its tokens: submit it again")
            self._release()
            self._is_torn = False

    def segment(self, nodes: Nodes) -> Segment[Any]:
        """The request's part of a pass over some of its pending nodes."""
        wanted = np.flatnonzero(np.isin(nodes, self._wanted))
        with self._tearing():
            return self._state.slots.segment(nodes, wanted, self._vocab)

    def spend(self, seconds: float, other_nodes: int, requests: int) -> None:
        """Take in its latest pass.

        Args:
            seconds: its share of the pass's time.
            other_nodes: the nodes that other requests are expected to bring to the next pass.
            requests: the number of requests in the pass.
        """
        self._state.seconds += seconds
        cost = self._draft_cost if self.drafting else self._target_cost
        if cost is not None:
            cost.join(other_nodes, requests)

    def receive(self, nodes: Nodes, logits: Tensor) -> None:
        """Take the logits at the wanted ones among some pending nodes. After the last one, let the strategy go on."""
        with self._failing_alone():
            state = self._state
            state.passes += 1
            state.nodes += len(nodes)
            self.pending = self.pending[len(nodes) :]
            if len(self.pending):
                if len(logits):  # a view would keep the logits of the whole pass
                    self._received.append(logits[:, : self._vocab].clone())
                return
            self._received.append(logits[:, : self._vocab])
            state.answered += 1
            logits = self._received[0] if len(self._received) == 1 else torch.cat(self._received)
            self._received = []
            if (np.diff(self._wanted) <= 0).any():  # rows come in the order of nodes, the strategy may have another
                logits = logits[np.searchsorted(np.unique(self._wanted), self._wanted)]
            if self._alternatives is not None and not self.drafting:
                self._alternatives.add(self._wanted, logits)
            self._advance(logits)

    def fail(self, error: Exception) -> None:
        """End the request with an error."""
        if is_out_of_memory(error):
            error = SpecbeamError(
                f"out of memory with {len(self._setup.tree)} nodes in the request's tree: ask for fewer new tokens, a "
                "shorter prompt, or a smaller dtype"
            )
        with self._tearing():
            self._error = forget_frames(error)
            self._release()

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        """An interrupt in here leaves work half done. Other errors do not."""
        self._is_torn = True
        try:
            yield
        except Exception:
            self._is_torn = False
            raise
        self._is_torn = False

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """An error in here ends this request, and no other. So does an interrupt, before the next pass."""
        self._is_torn = True
        try:
            yield
        except Exception as error:
            self.fail(error)
        self._is_torn = False

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
        dropped = {tree: tree.take_dropped() for tree in {state.tree for state in self._states}}
        for state in self._states:
            state.slots.release(dropped[state.tree])
        self.drafting = wish.drafting
        self._wanted, self._vocab = np.asarray(wish.nodes, dtype=np.int64), wish.vocab
        self.pending = self._state.slots.missing(self._wanted)
        self._stream(self._setup.tree.trunk[self._streamed :])

    def _stream(self, nodes: Nodes) -> None:
        """Hand out nodes that are certain."""
        if len(nodes):
            text = self._take(nodes)
            self.pieces.append(Piece(text, *self._tokens(nodes)))

    def _take(self, nodes: Nodes) -> str:
        """Note that nodes are certain. Return the text that is certain now."""
        if len(nodes) and self._first_token is None:
            self._first_token = time.perf_counter() - self._submitted
        self._streamed += len(nodes)
        return self._text.push(self._setup.tree.tokens(nodes).tolist())

    def _finish(self, hypotheses: list[Hypothesis]) -> None:
        if not hypotheses:
            raise SpecbeamError(
                "no text is possible: constraint, prefix_allowed_tokens_fn, logits_processor, bans and length limits "
                "together allow none, or length_penalty puts all scores out of range"
            )
        best, *others = hypotheses
        rest = self._setup.tree.path(best.node)[self._streamed :]
        text = self._take(rest) + self._text.finish(cancelled=best.finish_reason == "cancelled")
        sequences = [self._sequence(best, self._text.text), *map(self._sequence, others)]
        trace = self._setup.record.trace(self._lm.decode_token)
        self._result = Result(sequences, self._stats(len(sequences[0].token_ids)), trace)
        self.pieces.append(Piece(text, *self._tokens(rest), self._result))
        self._keep_prefixes(best.node)
        self._release()

    def _keep_prefixes(self, node: int) -> None:
        """Leave the keys and values of the best text to requests that begin with it."""
        is_open = all(state.is_open for state in self._states)
        if self._prefixes.most and is_open and self._lm.backend.start_token_ids is None:
            self._prefixes.keep(
                [
                    state.prefix(
                        node if state.tree is self._setup.tree else None,
                        self.pending if state is self._state else NO_NODES,
                    )
                    for state in self._states
                ]
            )

    def _sequence(self, hypothesis: Hypothesis, text: str | None = None) -> Sequence:
        tree = self._setup.tree
        token_ids, log_probs, top_logprobs = self._tokens(tree.path(hypothesis.node)[tree.prompt_length :])
        if text is None:
            stream = TextStream(self._lm.decode, self._setup.options.stop_strings)
            stream.push(token_ids)
            stream.finish()
            text = stream.text
        log_prob = float(tree.scores(hypothesis.node))
        return Sequence(text, token_ids, log_probs, log_prob, hypothesis.score, hypothesis.finish_reason, top_logprobs)

    def _tokens(self, nodes: Nodes) -> tuple[list[int], list[float], TopLogProbs | None]:
        """Token ids and log-probabilities of nodes on one path, and of the alternatives if these were asked for."""
        tree = self._setup.tree
        tokens: list[int] = tree.tokens(nodes).tolist()
        log_probs: list[float] = tree.log_probs(nodes).tolist()
        if self._alternatives is None:
            return tokens, log_probs, None
        top_logprobs = []
        for before, token, log_prob in zip(tree.parents(nodes).tolist(), tokens, log_probs, strict=True):
            row = self._alternatives.after(before)
            # A token has one log-probability. Beam search may round it in another way than the row.
            top_logprobs.append({**row, token: log_prob} if token in row else {**row})
        return tokens, log_probs, top_logprobs

    def _stats(self, new_tokens: int) -> Stats:
        target, draft, record = self._target, self._draft, self._setup.record
        seconds = time.perf_counter() - self._submitted
        return Stats(
            prompt_tokens=len(self.prompt_ids),
            new_tokens=new_tokens,
            seconds=seconds,
            tokens_per_second=new_tokens / seconds,
            time_to_first_token=self._first_token,
            forward_passes=sum(state.passes for state in self._states),
            target_passes=target.passes,
            draft_passes=0 if draft is None else draft.passes,
            target_seconds=target.seconds,
            draft_seconds=0.0 if draft is None else draft.seconds,
            nodes_evaluated=target.nodes,
            peak_slots=target.peak_slots,
            drafted=record.drafted,
            accepted=record.accepted,
            acceptance_rate=record.accepted / record.drafted if record.drafted else None,
            steps_per_target_pass=record.steps / target.answered if target.answered else None,
            peak_memory=self._lm.backend.peak_memory(),
            precision=self._lm.precision,
            draft_note=None if self._drafter is None else record.draft_note(),
            reused_tokens=target.reused_tokens,
        )

    def _release(self) -> None:
        """Let go of all memory but the result."""
        self.done = True
        for state in self._states:
            state.close()
        self.pending = NO_NODES
        self._received = []
        self._strategy = None
        self._drafter = None
        self._prefixes = Prefixes(0)  # whoever has the handle keeps alive no caches of other requests


def _make_setup(lm: LanguageModel, prompt_ids: list[int], options: Options) -> Setup:
    """Check the options against the model, and make what strategy and drafter work with.

    Raises:
        SpecbeamError: a prompt as long as the context, or an option that the model cannot honour.
    """
    backend = lm.backend
    follows = backend.start_token_ids is None  # with an encoder, the text does not follow the prompt
    if len(prompt_ids) + follows > backend.context_length:
        too = ", which must hold at least one new token too" if follows else ""
        raise SpecbeamError(
            f"the prompt has {len(prompt_ids)} tokens, but {lm.source} has a context of {backend.context_length}"
            f"{too}: shorten the prompt"
        )
    if options.stop_strings and lm.tokenizer is None:
        raise SpecbeamError(f"stop_strings need a text to look in, and {lm.source} has no tokenizer: leave them out")
    check_token_ids(options, backend.vocab_size)
    options = options.with_defaults(lm.generation_defaults)
    eos = lm.eos_token_ids if options.eos_token_id is None else frozenset(options.eos_token_id)
    if foreign := [token for token in eos if token >= backend.vocab_size]:
        raise SpecbeamError(f"eos_token_id {foreign[0]} is not in the vocabulary of {backend.vocab_size}")
    if options.constraint is not None and not eos:
        raise SpecbeamError("a constraint needs a token that ends the text, and the model lacks one: give eos_token_id")
    begin = prompt_ids if backend.start_token_ids is None else backend.start_token_ids
    max_length = min(len(begin) + options.max_new_tokens, backend.context_length)
    own = {} if options.bad_words_ids is None else {"bad_words_ids": None}
    defaults = {**lm.generation_defaults, **own}
    forced = processors_of_checkpoint(defaults, eos, len(begin), max_length, backend.vocab_size, backend.device)
    tree = Tree(begin)
    return Setup(
        options=options,
        tree=tree,
        process=Processors(options, eos, forced),
        stop=Stopping(eos, max_length, options.stop_strings, None if lm.tokenizer is None else lm.decode),
        record=Record(tree, options.trace),
        warp=Warpers(options),
        generator=seeded(options.seed),
    )
