"""One server in front of several processes: each has the complete application, as a replica of a Ray Serve deployment.

The front checks and logs requests, and passes them on. Ray Serve starts replicas, monitors them and replaces dead ones.
Ray's own HTTP proxy is not used. When a replica dies it ends a stream without a word, and it gives its requests to no
other replica. While there is none, requests wait in it forever.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import os
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.request_router import RequestRouter
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from specbeam.errors import SpecbeamError
from specbeam.jobs.cluster import capacity_on, joined_cluster, nodes_of
from specbeam.server.app import GENERATING_PATHS, make_app, protect
from specbeam.server.errors import Refusal, stopping
from specbeam.server.http import ClientGone, error_frame, json_response, while_connected
from specbeam.server.limits import AUDIO_PATHS, Access, Limits
from specbeam.server.models import Load, Models
from specbeam.server.request_log import KEY, RequestLog
from specbeam.server.usage import Metrics, Tally

logger = logging.getLogger("specbeam.server")

MAX_LEAD_REQUESTS = 4
"""The replica with a request's prefix may have this many more requests than another, and still gets the request."""
BLOCK_BYTES = 128
"""Prefixes are compared in blocks of this size."""
MAX_BLOCKS = 512
"""Only the first blocks of a prompt are compared."""
MAX_OWNED_BLOCKS = 100_000
"""The router drops the blocks that were used longest ago."""
MAX_ONGOING_REQUESTS = 1_000_000
"""Ray Serve's limit for a replica. The application has its own, and answers with status 429."""
MAX_UNCOUNTED = 10_000
"""A replica keeps the costs of this many requests that the front has not counted. The oldest are forgotten first."""
ATTEMPTS = 2
"""A request is given to this many replicas, one after the other, if they die before they answer."""
ASSIGN_SECONDS = 10.0
"""A request waits this long for a replica that takes it."""
STATE_SECONDS = 5.0
"""Replicas have this time to report their states."""
HEALTH_CHECK_SECONDS = 1.0
"""Ray looks this often for replicas that died."""
LOG = "specbeam.log"
"""The type of a message to the front, before the last one of an answer. It has the request's log."""

MakeModels = Callable[..., Models]
"""Loads the models of a replica. It takes ``sharers``, as :class:`specbeam.server.models.Models` does."""


@dataclass(frozen=True)
class ForwardedRequest:
    """A client's request, as it goes to a replica.

    Attributes:
        scope: of ASGI, without values that cannot go to another process. Its log has the id of the request.
        blocks: hashes of the prefixes of the prompt, each one block longer than the one before.
    """

    scope: dict[str, Any]
    body: bytes
    blocks: Sequence[bytes]


class State(NamedTuple):
    """The state of a replica.

    Attributes:
        ended: the models whose engines have ended.
        loads: of the engines.
        uncounted: the costs of requests whose clients went away, each in one state only.
    """

    ended: list[str]
    loads: list[Load]
    uncounted: list[Tally]


def blocks_of(body: bytes) -> list[bytes]:
    """Hashes of the prefixes of a request's prompt, as vLLM's prefix cache chains the hashes of its blocks.

    A turn of a conversation repeats the messages before it. So it has their hashes, too.
    """
    try:
        fields = json.loads(body)
        prompt = next(fields[name] for name in ("messages", "prompt", "input") if fields.get(name))
        parts = [fields.get("model"), fields.get("instructions"), prompt]
    except (ValueError, AttributeError, StopIteration, RecursionError):
        return []  # the replica refuses it
    text = json.dumps(parts).encode()[: BLOCK_BYTES * MAX_BLOCKS]
    running, hashes = hashlib.blake2b(digest_size=16), []
    for begin in range(0, len(text) - BLOCK_BYTES + 1, BLOCK_BYTES):
        running.update(text[begin : begin + BLOCK_BYTES])
        hashes.append(running.digest())
    return hashes


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Routes a request to the replica with the longest prefix of its prompt, unless that one is too busy.

    Without such a replica, the one with the fewest requests gets it. The router runs in the front's process.
    """

    def initialize_state(self) -> None:
        self._owners: OrderedDict[bytes, Any] = OrderedDict()  # the replica that last had a block
        self._ongoing: Counter[Any] = Counter()
        self._last_sent: Counter[Any] = Counter()
        self._clock = itertools.count(1)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        def load(replica: Any) -> tuple[int, int]:
            return self._ongoing[replica.replica_id], self._last_sent[replica.replica_id]

        by_load = sorted(candidate_replicas, key=load)
        limit = self._ongoing[by_load[0].replica_id] + MAX_LEAD_REQUESTS
        allowed = {each.replica_id: each for each in by_load if self._ongoing[each.replica_id] <= limit}
        ranked = [[replica] for replica in by_load]
        for block in reversed(_blocks(pending_request)):
            if (owner := allowed.get(self._owners.get(block))) is not None:
                return [[owner], *ranked]
        return ranked

    def on_send_request(self, replica_id: Any) -> None:
        super().on_send_request(replica_id)
        self._ongoing[replica_id] += 1
        self._last_sent[replica_id] = next(self._clock)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self._ongoing[replica_id] -= 1

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        for block in _blocks(pending_request):
            self._owners[block] = replica_id
            self._owners.move_to_end(block)
        while len(self._owners) > MAX_OWNED_BLOCKS:
            self._owners.popitem(last=False)


def _blocks(pending_request: Any) -> Sequence[bytes]:
    forwarded = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return forwarded.blocks if isinstance(forwarded, ForwardedRequest) else ()


class Replica:
    """The application in another process.

    Args:
        make_models: loads the models.
        limits, logs_prompts: as for :func:`specbeam.server.app.make_app`.
        sharers: the replicas that share the memory of this machine.
        threads: for models that are loaded without a number of threads.
    """

    def __init__(self, make_models: MakeModels, limits: Limits, sharers: int, threads: int, logs_prompts: bool) -> None:
        os.environ.setdefault("SPECBEAM_THREADS", str(threads))  # other replicas use the other processors
        self._models = make_models(sharers=sharers)
        self._app = make_app(self._models, limits, logs_prompts=logs_prompts)
        self._uncounted: deque[Tally] = deque(maxlen=MAX_UNCOUNTED)
        self._models.start()

    async def answer(self, forwarded: ForwardedRequest) -> AsyncIterator[list[Message]]:
        """The messages of the application's answer, all new ones at a time. The first list is empty."""
        yield []
        bodies = [forwarded.body]
        messages: list[Message] = []
        has_chunks, has_left = asyncio.Event(), asyncio.Event()

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            messages.append(message)
            if message.get("more_body", False):  # the last message goes with the log
                has_chunks.set()

        scope, log = forwarded.scope, RequestLog.of(forwarded.scope)
        answering = asyncio.ensure_future(self._app(scope, receive, send))
        answering.add_done_callback(lambda _: has_chunks.set())
        try:
            while not answering.done():
                await has_chunks.wait()
                has_chunks.clear()
                if messages and not answering.done():
                    taken, messages[:] = [*messages], []
                    yield taken
            if answering.exception() is not None:
                logger.error("request %s failed", log.id, exc_info=answering.exception())
            log.settle(scope, self._uncounted.append)
            yield [{"type": LOG, "log": log}, *messages]
        finally:  # Ray cancels this when the client goes away
            has_left.set()
            with suppress(Exception):
                await answering
            if log.call is not None:  # nobody waits for the log
                log.settle(scope, self._uncounted.append)
                assert log.tally is not None
                self._uncounted.append(log.tally)

    async def state(self) -> State:
        """The state of this replica. The front counts the costs in it."""
        uncounted = [*self._uncounted]
        self._uncounted.clear()
        return State(self._models.ended, self._models.loads, uncounted)

    async def cache_limits(self) -> list[str]:
        return self._models.cache_limits

    async def transcribes(self) -> bool:
        return self._models.transcribes

    async def stop(self, grace: float | None) -> None:
        """Finish all requests. After ``grace`` seconds the requests that are left end with the text so far."""
        self._app.state.is_stopping = True
        await self._models.stop(grace)

    def check_health(self) -> None:
        """Ray calls this, and replaces the replica if it raises an exception."""
        if self._models.ended and not self._app.state.is_stopping:
            raise RuntimeError(f"an error ended the engine of {', '.join(self._models.ended)}")


class Replicas:
    """The replicas, as the front sees them.

    Attributes:
        metrics: the front's.
        transcribes: whether one of their models transcribes.
    """

    def __init__(self, handle: Any) -> None:
        self.metrics = Metrics()
        self._handle = handle
        self._stream = handle.options(method_name="answer", stream=True)
        self.transcribes: bool = handle.broadcast("transcribes").results(timeout_s=STATE_SECONDS)[0]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        log = RequestLog.of(scope)
        log.endpoint = scope["path"] if scope["path"] in (*GENERATING_PATHS, *AUDIO_PATHS) else "other"
        log.turn.close()
        try:
            body = await Request(scope, receive).body()
            blocks = blocks_of(body) if scope["method"] == "POST" else ()
            forwarded = ForwardedRequest(_picklable(scope), body, blocks)
            await while_connected(receive, self._answer(forwarded, log, send))
        except (ClientGone, ClientDisconnect):
            log.outcome = "cancelled"

    async def _answer(self, forwarded: ForwardedRequest, log: RequestLog, send: Send) -> None:
        """Let a replica answer. If it dies before it wrote anything, another one has the request."""
        for _ in range(ATTEMPTS):
            start: Message | None = None
            has_begun, has_ended = False, False
            response = self._stream.remote(forwarded)
            try:
                await _assigned(response)
                async for messages in response:
                    for message in messages:
                        if message["type"] == LOG:
                            log.take(message["log"])
                        elif message["type"] == "http.response.start":
                            start = message  # as long as it is not sent, another replica may begin again
                        else:
                            if start is not None:
                                await send(start)
                                start, has_begun = None, True
                            has_ended = not message.get("more_body", False)
                            await send(message)
                            if has_ended:
                                return
            except Exception as error:
                has_died = isinstance(error, RayActorError)
                if has_died:
                    logger.warning("a replica died while it had a request")
                if has_begun:
                    log.outcome = "failed"
                    frame = error_frame(_lost() if has_died else error, forwarded.scope["path"])
                    await send({"type": "http.response.body", "body": frame, "more_body": False})
                    return
                if not has_died:
                    raise
            finally:
                if not has_ended:
                    with suppress(Exception):
                        response.cancel()
        log.outcome = "failed"
        raise _lost()

    async def states(self) -> list[State]:
        """The states of the replicas that answer. The costs in them are counted."""
        try:
            response = self._handle.broadcast("state")
            answers = await response.results_async(timeout_s=STATE_SECONDS, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError, RayActorError):
            return []
        states = [answer for answer in answers if isinstance(answer, State)]
        for tally in itertools.chain.from_iterable(state.uncounted for state in states):
            self.metrics.add(tally)
        return states

    def cache_limits(self) -> list[str]:
        """A sentence for the operator about each model."""
        answers = self._handle.broadcast("cache_limits").results(timeout_s=STATE_SECONDS)
        return [f"in each replica, {sentence}" for sentence in answers[0]]

    async def stop(self, grace: float | None) -> None:
        """Finish all requests. After ``grace`` seconds the requests that are left end with the text so far."""
        with suppress(DeploymentUnavailableError, RayActorError):
            await self._handle.broadcast("stop", grace).results_async(return_exceptions=True)


def make_front(replicas: Replicas, limits: Limits, access: Access) -> Starlette:
    """The application that clients see."""

    async def health(request: Request) -> Response:
        if request.app.state.is_stopping:
            raise stopping()
        ready = [state for state in await replicas.states() if not state.ended]
        if not ready:
            raise _none_ready()
        return json_response({"status": "ok", "replicas": len(ready)})

    async def read_metrics(_: Request) -> Response:
        loads = [load for state in await replicas.states() for load in state.loads]
        return replicas.metrics.response(loads)

    front = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            Route("/metrics", read_metrics, methods=["GET"]),
            Route("/{path:path}", replicas),
        ]
    )
    front.router.redirect_slashes = False
    front.state.models = replicas
    protect(front, limits, access, replicas.metrics)
    return front


@contextmanager
def replicas_on_ray(
    make_models: MakeModels,
    limits: Limits,
    *,
    name: str,
    address: str | None = None,
    replicas: int | None = None,
    threads: int | None = None,
    on_gpu: bool = False,
    logs_prompts: bool = False,
) -> Iterator[Replicas]:
    """Start replicas on a Ray cluster, and wait until all of them have their models. Afterwards they are stopped.

    Args:
        make_models: travels to the replicas pickled. specbeam must be installed where they run.
        name: of the application on the cluster. One that has the name is replaced.
        address: as for :func:`specbeam.jobs.launchers.crew_on_ray`.
        replicas: None for one on each node.
        threads: of each replica. None shares the processors of the nodes out.
        on_gpu: each replica has a GPU of its own.

    Raises:
        SpecbeamError: no cluster answers, it has no room for the replicas, or they cannot load their models.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")  # else Ray gives way to every other process of the machine
    with joined_cluster(address) as ray:
        nodes = nodes_of(ray)
        processors = [int(node["CPU"]) for node in nodes if node.get("CPU", 0) >= 1]
        count = len(processors) or 1 if replicas is None else replicas
        cpus = float(threads) if threads else _cpus_of_each(processors, count)
        capacities = capacity_on(nodes, cpus, int(on_gpu))
        if not cpus or sum(capacities) < count:
            raise SpecbeamError(
                f"the Ray cluster has no room for {count} replicas with {cpus:g} CPUs and {int(on_gpu)} GPUs each: "
                "ask for fewer --replicas or --threads"
            )
        sharers = 1 if on_gpu else min(count, max(capacities))
        deployment = serve.deployment(
            Replica,
            name="replica",
            num_replicas=count,
            ray_actor_options={"num_cpus": cpus, "num_gpus": int(on_gpu)},
            max_ongoing_requests=MAX_ONGOING_REQUESTS,
            health_check_period_s=HEALTH_CHECK_SECONDS,
            graceful_shutdown_timeout_s=0,  # stop() waited
            request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        )
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
        application = deployment.bind(make_models, limits, sharers, max(1, int(cpus)), logs_prompts)
        quiet = {"log_level": "ERROR", "enable_access_log": False}
        try:
            serve.start(proxy_location="Disabled", logging_config=quiet)
            try:
                handle = serve.run(application, name=name, route_prefix=None, logging_config=quiet)
            except RuntimeError as error:
                raise SpecbeamError(f"the replicas cannot start: {_reason_of(name, error)}") from error
            yield Replicas(handle)
        finally:
            with suppress(Exception):
                serve.delete(name)


def _cpus_of_each(processors: Sequence[int], replicas: int) -> float:
    """The maximum of CPUs for each of the replicas. A part of a CPU if there are more replicas than CPUs."""
    for cpus in range(max(processors, default=0), 0, -1):
        if sum(count // cpus for count in processors) >= replicas:
            return cpus
    return sum(processors) / replicas


def _reason_of(name: str, error: Exception) -> str:
    """The error of a replica that could not start, as one line. Ray's messages hold the traceback."""
    deployments = serve.status().applications[name].deployments.values()
    pages = [str(error), *(deployment.message for deployment in deployments)]
    lines = [line.strip() for page in pages for line in page.splitlines() if line.strip()]
    ours = [line.rpartition("SpecbeamError: ")[2] for line in lines if "SpecbeamError: " in line]
    return (ours or lines)[-1]


async def _assigned(response: Any) -> None:
    """Wait until a replica has the request."""
    try:
        await asyncio.wait_for(anext(response), ASSIGN_SECONDS)
    except (TimeoutError, DeploymentUnavailableError) as error:
        raise _none_ready() from error


def _picklable(scope: Scope) -> dict[str, Any]:
    """The part of a scope that can go to another process. Its log has only the id of the request."""
    connection = ("type", "http_version", "scheme", "client", "server", "root_path")
    names = (*connection, "method", "path", "raw_path", "query_string", "headers")
    return {name: scope[name] for name in names if name in scope} | {KEY: RequestLog(RequestLog.of(scope).id)}


def _lost() -> Refusal:
    return Refusal("the replica that had this request died: send it again", None, "replica_died", 503)


def _none_ready() -> Refusal:
    return Refusal("no replica is ready: try again later", None, "not_ready", 503)
