"""Transcription of several things at once: their requests share the passes of an engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from specbeam.drafting.lookup import Continued
from specbeam.engine import Engine, Request
from specbeam.engine.drafts import Draft, is_lookup
from specbeam.results import Result
from specbeam.speech.attempts import Attempt
from specbeam.speech.results import Segment

MAX_SAID_TOKENS = 1 << 14
"""The tokens of a file that lookups look in: about an hour of speech. More would take longer to search than a pass."""


@dataclass(eq=False)
class Task:
    """Work whose steps wait for the engine.

    Attributes:
        steps: attempts, whose results it is sent; segments that are certain; and tasks to begin, before others.
        file: the number of the file that it is about.
        part: its number among the tasks of the file; None for the one that begins them.
    """

    steps: Steps
    file: int
    part: int | None = None


Steps = Generator[Attempt | Segment | list[Task], Any, None]


def run_together(
    engine: Engine, tasks: Iterable[Task], most: int, draft: Draft | None = None
) -> Iterator[tuple[Task, Segment | None]]:
    """Let tasks share an engine's passes.

    A task is begun when fewer than ``most`` others are. If the caller leaves, or an error comes up, all requests are
    cancelled.

    Yields:
        Each segment as soon as it is certain, with its task. At the end of a task, the task and None.
    """
    later, next_tasks = iter(tasks), deque[Task]()
    waiting: dict[Request, Task] = {}
    answered: SimpleQueue[Request] = SimpleQueue()

    def go_on(task: Task, result: Result | None) -> Iterator[tuple[Task, Segment | None]]:
        """Let a task take steps until it waits for the engine, or ends."""
        while True:
            try:
                step = task.steps.send(result)
            except StopIteration:
                yield task, None
                return
            result = None
            if isinstance(step, Attempt):
                request = _submit(engine, step, draft)
                waiting[request] = task
                request.add_done_callback(answered.put)
                return
            if isinstance(step, Segment):
                yield task, step
            else:
                next_tasks.extend(step)

    try:
        while True:
            while len(waiting) < most and (task := next_tasks.popleft() if next_tasks else next(later, None)):
                yield from go_on(task, None)
            if not waiting:
                return
            while answered.empty() and not engine.is_running:
                engine.step()
            request = answered.get()
            yield from go_on(waiting.pop(request), request.result())
    finally:
        for request in waiting:
            request.cancel()
        with suppress(Exception):
            while not (engine.is_running or all(request.done for request in waiting)):
                engine.step()


def _submit(engine: Engine, attempt: Attempt, draft: Draft | None) -> Request:
    if is_lookup(draft):
        draft = Continued(draft, attempt.said[-MAX_SAID_TOKENS:])
    return engine.submit(
        attempt.prompt,
        attempt.options,
        draft=draft if attempt.drafts else None,
        strategy=attempt.strategy,
        features=attempt.sound,
        writes=attempt.writes,
    )
