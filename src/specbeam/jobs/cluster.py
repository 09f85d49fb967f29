"""Joining a Ray cluster, or starting one on this machine."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from specbeam.errors import SpecbeamError

CONNECT_TIMEOUT_SECONDS = 10.0
"""How long a cluster may take to answer."""
OBJECT_STORE_BYTES = 256 * 2**20
"""Shared memory of a cluster that is started here. Jobs and results are small; Ray moves the rest to the disk."""


@contextmanager
def joined_cluster(address: str | None) -> Iterator[Any]:
    """The module ``ray``, connected to a cluster. A cluster that was started for it is stopped afterwards.

    Args:
        address: as for :func:`specbeam.jobs.launchers.crew_on_ray`.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address is None:
            _choose_token()
            ray.init("local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
        else:
            _check_address(address)
            with _SingleConnectionAttempt():
                ray.init(address, **quiet)
    except SpecbeamError:
        raise
    except Exception as error:  # ConnectionError, RuntimeError, ValueError or Ray's own: it depends on the failure
        where = "cannot be started here" if address is None else f"at {address} cannot be joined"
        raise SpecbeamError(f"a Ray cluster {where}: {reason_of(error)}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """The module ``ray``, which then sends no statistics and prints no pages."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # the default; while unset, Ray warns of a change
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # otherwise Ray prints a page for each worker that dies
    try:
        import ray
    except ImportError as error:
        raise SpecbeamError("workers on a cluster need Ray: pip install 'specbeam[ray]'") from error
    return ray


def nodes_of(ray: Any) -> list[Mapping[str, float]]:
    """The resources of the cluster's nodes, such as "CPU" and "GPU"."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def capacity_on(nodes: Iterable[Mapping[str, float]], cpus: float, gpus: float) -> list[int]:
    """How many processes of this size each node has room for, if nobody else used it. What needs nothing fits once."""
    needs = [(kind, need) for kind, need in (("CPU", cpus), ("GPU", gpus)) if need]
    return [min([int(node.get(kind, 0) / need + 1e-6) for kind, need in needs], default=1) for node in nodes]


def _choose_token() -> None:
    """Choose the token that processes need to join a cluster that is started here.

    Otherwise Ray writes one into the home folder, where every user of the machine may read it. A service has no home.
    """
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def reason_of(error: BaseException) -> str:
    """The reason in one of Ray's messages, as one line; the messages go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if "because" in line), lines[0])
    return line.partition(" Some common causes")[0].partition(" Last connection error")[0].rstrip(".:")


class _SingleConnectionAttempt:
    """Lets Ray try once. Where something else than Ray answers, one attempt takes 40 s, and Ray makes twenty."""

    name = "RAY_gcs_server_port_wait_time_s"

    def __enter__(self) -> None:
        self.is_set = self.name not in os.environ
        os.environ.setdefault(self.name, "1")

    def __exit__(self, *_: object) -> None:
        if self.is_set:
            os.environ.pop(self.name, None)


def _check_address(address: str) -> None:
    """Raise SpecbeamError if nothing listens at an address: Ray itself would try for minutes."""
    if address == "auto":
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():
        raise SpecbeamError(f'{address!r} is no address of a Ray cluster: give "auto", host:port or ray://host:port')
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecbeamError(
            f"no Ray cluster answers at {address} ({reason}): start one with ray start --head, or leave the address out"
        ) from error
