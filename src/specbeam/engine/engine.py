"""The engine: requests of many kinds share forward passes.

A request is a strategy, a generator that asks for logits at nodes of its tree. Each round the engine gathers the nodes
that live requests ask for, runs one forward pass, and hands back the logits. It alone owns memory and batching.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

from specbeam.engine.drafters import Draft, check_draft
from specbeam.engine.passes import run_pass
from specbeam.engine.request import Request
from specbeam.engine.scheduler import Scheduler
from specbeam.engine.strategies import MakeStrategy
from specbeam.errors import SpecbeamError
from specbeam.model import LanguageModel
from specbeam.options import Options
from specbeam.prompts import Prompt, encode

Key = TypeVar("Key")


class Engine:
    """Runs requests on a loaded model.

    Args:
        lm: the model.
        max_requests: the most requests that share a pass. The others wait their turn.
        max_batch_tokens: the most nodes per pass. Longer prompts are read in chunks, so that they do not hold up the
            requests that are generating.
        max_cache_tokens: cache slots for the keys and values of all live requests together. By default they fill a
            quarter of the machine's memory, or four fifths of the GPU's free memory.

    ``submit`` and ``Request.cancel`` may be called from any thread, ``step`` and ``run`` from one thread at a time.

    Raises:
        SpecbeamError: a limit is not at least 1.
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
        self._scheduler = Scheduler(**limits)

    def submit(
        self,
        prompt: Prompt,
        options: Options | Mapping[str, Any] | None = None,
        *,
        system: str | None = None,
        raw: bool = False,
        draft: Draft | None = None,
        strategy: MakeStrategy | None = None,
    ) -> Request:
        """Queue one prompt (text, chat messages or token ids) and return its handle.

        Args:
            options: an :class:`Options` or a mapping of its fields.
            system: a system message to put before text or messages.
            raw: do not apply the model's chat template.
            draft: guesses how the text goes on, so that one pass of the model can check many tokens. Give a loaded
                model, "ngram" or "suffix" (lookups in the text so far), or the automaton that
                :func:`specbeam.suffix_automaton` made of earlier texts. It changes how fast the text comes, not which
                text comes (docs/exactness.md).
            strategy: a decoding method of your own, used in place of the one that the options name. It is called with a
                :class:`specbeam.engine.Setup` and the drafter or None, and returns a
                :data:`specbeam.decoding.Strategy`. It keeps at most ``num_beams`` unfinished texts.

        Raises:
            SpecbeamError: a prompt that is empty or longer than the context, options that do not fit the model, or a
                draft that cannot draft for it.
        """
        chosen = Options.of(options or {})
        check_draft(self.lm, draft, chosen)
        request = Request(self.lm, encode(self.lm, prompt, system=system, raw=raw), chosen, draft, strategy)
        if request.most_slots > self.max_cache_tokens:
            raise SpecbeamError(
                f"prompt and max_new_tokens need {request.most_slots} cache slots, the engine has "
                f"{self.max_cache_tokens}: ask for fewer new tokens or raise max_cache_tokens"
            )
        self._scheduler.add(request)
        return request

    def run(self) -> None:
        """Work until no request is left."""
        while self.step():
            pass

    def as_completed(self, submissions: Iterable[tuple[Key, Request]]) -> Iterator[tuple[Key, Request]]:
        """Keep the engine full, and yield each request with its key in the order in which they finish.

        Args:
            submissions: keys, and requests submitted to this engine. An item is taken only when fewer than
                ``max_requests`` are unfinished. So a generator that calls ``submit`` holds no memory for later
                requests, and their seconds do not count the time before their turn.
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
        """One round: admit requests, evaluate nodes, advance strategies. Returns whether there is more to do."""
        scheduler = self._scheduler
        scheduler.end_cancelled()
        scheduler.admit()
        if batch := scheduler.gather():
            run_pass(batch, one_torch_thread=self.lm.backend.has_threads)
        scheduler.drop_done()
        return not scheduler.is_empty

    @property
    def cache_tokens(self) -> int:
        """Cache slots of the target in use by live requests."""
        return self._scheduler.used_slots
