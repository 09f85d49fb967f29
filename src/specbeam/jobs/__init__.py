"""Jobs: many independent pieces of work, done here or on a Ray cluster, whose results survive an interruption.

``specbeam batch`` and the study bench use this package; it knows nothing of models.

A *job* is one piece of work, such as one generation. A *worker* is one process: it loads its models once and then does
one job after the other. A *launcher* hands jobs to workers. A *journal* keeps each result on the disk as soon as it is
there.
"""

from collections.abc import Callable
from typing import Any

Job = Any
"""Anything that can be pickled."""
Result = Any
"""The value that the work returned, or the exception that it raised."""
Work = Callable[[Job], Result]
"""Does one job. It keeps its models loaded between jobs."""
MakeWork = Callable[[], Work]
"""Makes the work, in the worker's process: it loads the models."""
OnResult = Callable[[Job, Result], None]
"""Takes each job and its result as it comes, in the thread that launched the jobs."""


class WorkerDied(RuntimeError):
    """A job ended the process of every worker that tried it."""
