"""The engine: requests of many kinds share forward passes.

A request is a strategy, a generator that asks for selections at nodes of its tree. In each iteration the engine gathers
the nodes that live requests ask for, runs one forward pass, and hands back the selections. It alone owns memory and
batching.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

from specbeam.cache.budget import Budget
from specbeam.decoding.setup import MakeStrategy
from specbeam.engine.clients import Clients
from specbeam.engine.costs import Costs, pass_times
from specbeam.engine.custom_strategy import load_strategy
from specbeam.engine.drafts import Draft, check_draft, load_draft
from specbeam.engine.engine_thread import EngineThread
from specbeam.engine.passes import run_pass
from specbeam.engine.request import Request
from specbeam.engine.request_state import RequestState
from specbeam.engine.scheduler import Scheduler
from specbeam.engine.shared_source import check_features
from specbeam.errors import SpecbeamError, not_allowed
from specbeam.models.model import LanguageModel
from specbeam.models.prompts import Prompt, encode, max_prompt_length
from specbeam.options.options import Options
from specbeam.system.fork_guard import fork_guard
from specbeam.system.interrupts import HeldInterrupts
from specbeam.system.numbers import is_integer

Key = TypeVar("Key")


class Engine:
    """Runs requests on a loaded model.

    Args:
        lm: the model.
        max_requests: the maximum number of requests that share a pass. The others wait their turn.
        max_batch_tokens: the maximum of nodes per pass. Longer prompts are prefilled in chunks, so that requests that
            are generating do not wait for them.
        max_cache_tokens: cache slots for the keys and values of all live requests together. When they would not
            suffice, the newest request is preempted: it gives up its slots, and they are recomputed later, to the same
            result. One sequence of full length has to fit: then a request finishes, whatever its beams and its draft
            would need. By default all engines of the process share a quarter of its memory, or four fifths of the GPU's
            free memory.
        max_waiting: how many requests may wait beside ``max_requests`` others. ``submit`` refuses further requests.
        max_pass_seconds: about how long a pass with prefill may take while other requests are live. Prompts are then
            prefilled in smaller chunks, by the times of the latest passes. A chunk has at least 8 tokens. Beside many
            requests it may take as long as they do. An encoder's pass over audio is divided by its layers. No result
            changes. By default only ``max_batch_tokens`` counts.
        costs: the cost model, by which the engine decides how far to draft, which beams to defer, and how many passes
            to run at once. No result depends on it. By default passes are measured, and all engines of the process
            share the measurements. With a :class:`specbeam.engine.CostTable` for each backend, counts of passes and
            nodes are the same in every run, too: ``costs=lambda backend, ahead=False: CostTable(seconds)``.

    A request begins with the longest prefix of its prompt that an earlier or a live request of the engine has computed.
    This may be a system prompt, a conversation so far, or a document that is asked about twice. The request shares the
    keys and values of these tokens, and no result changes (``Stats.reused_tokens``, ``Options.share_prefix``). Cached
    prefixes stay in memory that no live request needs, and the least recently used one is evicted first.

    An iteration is one pass of each draft model in use, and one of the target model. Where requests need only the token
    that was chosen, a backend may run several passes: new and cancelled requests still wait for one. Every live request
    advances in each pass of the model that it waits for, unless more than ``max_batch_tokens`` requests take turns. The
    target waits for drafts while they are made, which takes at most as many passes as the longest draft has tokens.

    ``submit`` and ``Request.cancel`` may be called from any thread, ``step`` and ``run`` from one thread at a time.
    ``with engine:`` runs it in a thread of its own (:meth:`start`). Then threads and tasks of asyncio wait for their
    requests, and nobody calls ``step`` or ``run``.

    Raises:
        SpecbeamError: lm is no loaded model, costs is no function, or a limit is not at least 1. ``max_waiting`` and
            ``max_pass_seconds`` may be 0.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        max_requests: int = 8,
        max_batch_tokens: int = 512,
        max_cache_tokens: int | None = None,
        max_waiting: int | None = None,
        max_pass_seconds: float | None = None,
        costs: Costs | None = None,
    ) -> None:
        limits = {
            "max_requests": (max_requests, 1),
            "max_batch_tokens": (max_batch_tokens, 1),
            "max_cache_tokens": (max_cache_tokens, 1),
            "max_waiting": (max_waiting, 0),
        }
        for name, (value, minimum) in limits.items():
            if value is None and name in ("max_cache_tokens", "max_waiting"):
                continue
            if not is_integer(value) or value < minimum:
                raise not_allowed(name, value, f"at least {minimum}")
        if max_pass_seconds is not None and not (
            isinstance(max_pass_seconds, int | float) and 0 <= max_pass_seconds < math.inf
        ):
            raise not_allowed("max_pass_seconds", max_pass_seconds, "seconds, at least 0")
        if costs is not None and not callable(costs):
            raise not_allowed("costs", costs, "a function such as lambda backend, ahead=False: CostTable(seconds)")
        if not isinstance(lm, LanguageModel):
            raise SpecbeamError(
                f"{type(lm).__name__} is no loaded model: give what specbeam.load returned, or specbeam.hf.wrap(model)"
            )
        if lm.backend.target is not None:
            raise SpecbeamError(f"{lm.source} is a draft head and no model: give it as the draft of its model")
        self.lm = lm
        self._budget = Budget(lm.backend, max_batch_tokens, max_cache_tokens)
        self._clients: Clients[RequestState] = Clients()
        self._scheduler = Scheduler(
            max_requests,
            max_batch_tokens,
            max_waiting,
            max_pass_seconds,
            self._budget,
            pass_times if costs is None else costs,
            self._clients,
        )
        self._thread = EngineThread(self._scheduler)

    def submit(
        self,
        prompt: Prompt,
        options: Options | Mapping[str, Any] | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        draft: Draft | None = None,
        strategy: MakeStrategy | str | None = None,
        priority: int = 0,
        timeout: float | None = None,
        source: Any = None,
        features: Any = None,
        writes: bool = True,
    ) -> Request:
        """Queue one prompt (text, chat messages or token ids) and return its handle.

        Args:
            options: an :class:`Options` or a mapping of its fields.
            system: a system message to put before text or messages.
            raw: do not apply the model's chat template.
            draft: proposes how the text goes on, so that one pass of the model can verify many tokens. Give a loaded
                model or its source, "mtp" (the model's own head for multi-token prediction), "ngram" or "suffix"
                (lookups in the text so far), or the automaton that :func:`specbeam.suffix_automaton` made of earlier
                texts. A source may be a folder with an EAGLE-3 head of the model. It is loaded at its first use, and
                kept with this model. A drafter of your own is a function of the token ids so far and the model that
                returns the token ids that may follow, or a class (docs/guides/extend.md); "module:name" and the name of
                an entry point of the group ``specbeam.drafters`` stand for one. A draft changes how fast the text
                comes, not which text comes (docs/exactness.md).
            strategy: a decoding method of your own, used in place of the one that the options name. It is called with a
                :class:`specbeam.engine.Setup` and the drafter or None, and returns a
                :data:`specbeam.core.strategy.Strategy`. It keeps at most ``num_beams`` unfinished sequences.
                "module:name" and the name of an entry point of the group ``specbeam.strategies`` stand for one.
            priority: waiting requests with lower numbers start first, and equal ones in the order of submission. Yet
                one start in eight belongs to the request that has waited longest. Live requests share passes equally.
            timeout: seconds after which the request ends before the next pass, with the text so far and the
                ``finish_reason`` "timeout". They count from now, waiting included.
            source: goes to the backend with each pass of the request, in place of its encoder's output
                (:attr:`specbeam.backends.contract.TreeBatch.source`). The request shares no keys and values then.
            features: of the audio that the model's encoder reads, float32 [mel bins, frames]
                (:attr:`specbeam.backends.contract.Backend.features_shape`): for Whisper, log-mel features of 30 seconds
                as ``WhisperFeatureExtractor`` makes them. The prompt is then the beginning of the transcript: its start
                token, language and task. The request shares no keys and values.
            writes: whether a strategy of your own adds new tokens. If it only scores, the prompt may fill the context.

        Raises:
            QueueFull: ``max_requests`` and ``max_waiting`` allow no further request at present.
            SpecbeamError: a prompt that is empty or longer than the context, or options or a draft that do not fit the
                model. Features that the model does not read, or none for
                one that reads some. A strategy or a drafter that is not there, or takes other arguments. A priority or
                a timeout that is no number. The engine is stopping.
            RuntimeError: an error ended the engine or its thread, and nobody has started it again.
        """
        self._scheduler.check_capacity()  # before all the work
        if not is_integer(priority):
            raise not_allowed("priority", priority, "an integer")
        if timeout is not None and not (isinstance(timeout, int | float) and timeout >= 0):
            raise not_allowed("timeout", timeout, "seconds, at least 0")
        if not writes and strategy is None:
            raise SpecbeamError("writes=False needs a strategy that adds no tokens: give one, or leave it out")
        audio = None if source is not None else check_features(self.lm, features)
        own: dict[str, Any] = {"strategy": load_strategy(strategy), "priority": priority, "timeout": timeout}
        own |= {"source": source, "features": audio}
        state = self._state(prompt, options, system, raw, draft, writes, **own)
        with HeldInterrupts():
            self._thread.add(state)
        return state.request

    def check(
        self,
        prompt: Prompt,
        options: Options | Mapping[str, Any] | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        draft: Draft | None = None,
        strategy: MakeStrategy | str | None = None,
    ) -> list[int]:
        """The token ids of a prompt that :meth:`submit` would take. Arguments and errors as there."""
        state = self._state(prompt, options, system, raw, draft, strategy=load_strategy(strategy))
        return state.request.prompt_ids

    def _state(
        self,
        prompt: Prompt,
        options: Options | Mapping[str, Any] | None,
        system: str | None,
        raw: bool,
        draft: Draft | None,
        writes: bool = True,
        **own: Any,
    ) -> RequestState:
        chosen = Options.of(options or {})
        draft = load_draft(self.lm, draft)
        check_draft(self.lm, draft, chosen)
        ids = encode(self.lm, prompt, system=system, raw=raw, max_tokens=max_prompt_length(self.lm, writes))
        state = RequestState(
            self.lm,
            ids,
            chosen,
            draft,
            clients=self._clients,
            budget=self._budget,
            costs=self._scheduler.costs,
            writes=writes,
            **own,
        )
        self._budget.check(state.min_bytes, state.max_rows)
        return state

    def run(self) -> None:
        """Work until no request is left."""
        while self.step():
            pass

    def as_completed(self, submissions: Iterable[tuple[Key, Request]]) -> Iterator[tuple[Key, Request]]:
        """Keep the engine full, and yield each request with its key in the order in which they finish.

        Args:
            submissions: keys, and requests submitted to this engine. An item is taken only when fewer than
                ``max_requests`` are unfinished. So a generator that calls ``submit`` holds no memory for later
                requests, and their seconds do not count the time before their turn. If it raises an error, that error
                comes from here. The requests that are live then stay: :meth:`run` finishes them.
        """
        submissions = iter(submissions)
        unfinished: list[tuple[Key, Request]] = []
        while True:
            for key, request in islice(submissions, self._scheduler.max_requests - len(unfinished)):
                if request.clients is not self._clients:
                    raise SpecbeamError("a request was submitted to another engine: submit all to this one")
                unfinished.append((key, request))
            if not unfinished:
                return
            self.step()
            finished = [(key, request) for key, request in unfinished if request.done]
            unfinished = [(key, request) for key, request in unfinished if not request.done]
            yield from finished

    def step(self) -> bool:
        """One iteration: admit requests, evaluate nodes, advance strategies. Returns whether there is more to do.

        Raises:
            SpecbeamError: the engine runs in a thread of its own.
        """
        if self._clients.engine_runs:
            raise SpecbeamError(
                "the engine runs in a thread of its own: wait for its requests, or stop it before you call run() or "
                "step()"
            )
        with self._scheduler.interrupts:
            try:
                return self._iterate()
            except BaseException as error:
                if self._scheduler.is_changing:
                    found = type(error).__name__
                    self._thread.end(f"{found} ended the engine in the middle of its own work: make a new Engine")
                raise
            finally:
                self._clients.call()

    def start(self) -> Engine:
        """Run the engine in a thread of its own, which sleeps while there are no requests. Returns the engine.

        ``with engine:`` starts it, and stops it at the end of the block. If the block ends with an error, requests are
        cancelled.

        Raises:
            SpecbeamError: it runs already.
        """
        self._thread.start(self._iterate)
        return self

    def stop(self, grace: float | None = None) -> None:
        """Finish all requests, and end the engine's thread. Meanwhile ``submit`` refuses new requests.

        Afterwards the engine can be started again, or run by hand.

        Args:
            grace: seconds after which the requests that are left are cancelled: each ends before the next pass, with
                the text so far. 0 cancels all requests at once; None waits for them.

        Raises:
            SpecbeamError: a callback in the engine's thread calls this.
        """
        self._thread.stop(grace)

    def __enter__(self) -> Engine:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop(None if error is None else 0)

    @fork_guard
    def _iterate(self) -> bool:
        """The work of an iteration, after which clients are called."""
        scheduler = self._scheduler
        scheduler.is_changing = True
        scheduler.take_new()
        scheduler.end_requests()
        scheduler.admit()
        for batch in scheduler.gather():
            run_pass(batch, scheduler, one_torch_thread=self.lm.backend.has_threads)
        scheduler.drop_done()
        scheduler.is_changing = False
        return not scheduler.is_empty

    @property
    def is_running(self) -> bool:
        """Whether it runs in a thread of its own, which no error has ended."""
        return self._clients.engine_runs

    @property
    def live(self) -> int:
        """Requests that share passes."""
        return self._scheduler.live

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return self._scheduler.waiting

    @property
    def cache_tokens(self) -> int:
        """Cache slots of the target in use by live requests. Slots that they share count once."""
        return self._budget.target.used

    @property
    def kept_tokens(self) -> int:
        """Cache slots of the target with cached prefixes that no request holds. Live requests take them if needed."""
        return self._budget.target.kept

    @property
    def kept_bytes(self) -> int:
        """Bytes of cached prefixes that no request holds, on the target and on draft models."""
        return self._budget.kept_bytes

    @property
    def max_cache_tokens(self) -> int:
        """The maximum number of cache slots that live requests and cached prefixes may take together."""
        return self._budget.cache_tokens
