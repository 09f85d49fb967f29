"""``specbeam serve``: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import gc
import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import (
    DEFAULT_MODEL,
    SAMPLING,
    add_placement_to,
    add_sampling_to,
    check_draft_source,
    check_source,
    completer,
    placement_of,
)
from specbeam.drafting.resolve import draft_kind, resolve_draft
from specbeam.errors import SpecbeamError
from specbeam.models.sampling_defaults import FALLBACK
from specbeam.options.names import LOOKUPS, NO_DRAFT
from specbeam.options.options import Options
from specbeam.server.limits import LOOPBACK_ADDRESSES, Access, Limits
from specbeam.text import chat_templates

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from starlette.applications import Starlette

    from specbeam.models.model import LanguageModel
    from specbeam.server.models import Models

KEY_VARIABLE = "SPECBEAM_API_KEY"
GRACE_SECONDS = 30.0
HOST_NAME = re.compile(r"[\w.-]+|\[[0-9a-fA-F:.]+\]", re.ASCII)
"""A name or an address, as clients write it into the header Host, without a port."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer OpenAI's clients over HTTP",
        description="An OpenAI-compatible server: chat, completions, responses. It listens on this machine only unless "
        "--host says otherwise. Ctrl-C or SIGTERM lets it finish the requests that it has.",
    )
    model = parser.add_argument_group("models")
    source = model.add_argument(
        "--model",
        action="append",
        metavar="[NAME=]SOURCE",
        help="an alias, a folder, a .gguf file or a hub id, and the name that clients give (repeatable; "
        f"default {DEFAULT_MODEL})",
    )
    source.completer = completer()
    draft = model.add_argument(
        "--draft",
        action="append",
        metavar="[NAME=]SOURCE",
        help="a draft model, ngram, suffix, mtp (the first model's own draft head), or a drafter of your own as "
        "module:name (repeatable). The first one drafts "
        "for requests that name none; beside a speech model and a text model, the first of each kind",
    )
    draft.completer = completer(*LOOKUPS)
    add_placement_to(model)

    sampling = parser.add_argument_group(
        "sampling (of requests that do not say how; default: as the model or its publisher recommends)"
    )
    add_sampling_to(sampling)

    access = parser.add_argument_group("access")
    add = access.add_argument
    add("--host", default="127.0.0.1", help="the address to listen on (default %(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="0 takes any free one (default %(default)s)")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="clients must send one of these keys as a bearer token (repeatable; default: those in "
        f"${KEY_VARIABLE}, with spaces between them, or none)",
    )
    add(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="a name under which clients reach the server, as through a proxy (repeatable; default: this machine's)",
    )
    add(
        "--trusted-proxy",
        action="append",
        metavar="ADDRESS",
        help="believe X-Forwarded-For and X-Forwarded-Proto from this address or network (repeatable; default: this "
        "machine)",
    )
    add("--cors-origin", action="append", metavar="URL", help="let pages of this site use the server (repeatable)")

    limits = parser.add_argument_group("limits (larger requests are refused)")
    add = partial(limits.add_argument, type=int, metavar="N")
    add("--max-requests", help=f"requests that share a pass (default {Limits.max_requests})")
    add("--max-waiting", help=f"requests that wait beside them (default {Limits.max_waiting})")
    add("--max-tokens", help=f"new tokens of a text (default {Limits.max_tokens})")
    add("--max-prompt-tokens", help="tokens of a prompt (default: the model's context)")
    add("--max-prompts", help=f"prompts in one request (default {Limits.max_prompts})")
    add("--max-beams", help=f"beams or texts for one prompt (default {Limits.max_beams})")
    add("--max-tool-calls", help=f"tool calls in one answer (default {Limits.max_tool_calls})")
    add(
        "--max-cache-tokens",
        help="tokens in the KV cache of each model (default: enough for --max-requests)",
    )
    add("--max-body-bytes", help=f"bytes of a request (default {Limits.max_body_bytes})")
    add("--max-audio-bytes", help=f"bytes of a request with an audio file (default {Limits.max_audio_bytes})")
    add("--max-bodies-bytes", help=f"bytes of the bodies of all requests together (default {Limits.max_bodies_bytes})")
    add("--max-audio-seconds", help=f"seconds of its audio (default {Limits.max_audio_seconds})")
    limits.add_argument(
        "--max-pass-seconds",
        type=float,
        metavar="S",
        help="prefill prompts beside other requests in chunks that take about this long "
        f"(default {Limits.max_pass_seconds})",
    )
    limits.add_argument(
        "--timeout", type=float, metavar="S", help="seconds after which a request ends with the text so far"
    )
    limits.add_argument(
        "--grace",
        type=float,
        default=GRACE_SECONDS,
        metavar="S",
        help="seconds that requests have to finish after SIGTERM (default %(default)s)",
    )

    replicas = parser.add_argument_group("replicas (the server in several processes, on a Ray cluster)")
    add = replicas.add_argument
    add(
        "--launcher", choices=("local", "ray"), default="local", help="in this process, or on Ray (default %(default)s)"
    )
    add("--replicas", type=int, metavar="N", help="processes that have the models (default: one on each node)")
    add("--address", help="the cluster: auto, host:port or ray://host:port (default: one that is started here)")
    parser.add_argument(
        "--allow-control-tokens",
        action="store_true",
        help="let control tokens in chat messages reach the model as such (default: as text)",
    )
    parser.add_argument(
        "--schema-in-prompt",
        action="store_true",
        help="write the JSON schema of an answer into the prompt, too (of chat and responses; default: not)",
    )
    parser.add_argument("--log-prompts", action="store_true", help="write prompts into the log, too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, when_ready: Callable[[str], object] | None = None) -> int:
    """Serve until a signal.

    Args:
        when_ready: called with the address of the page, once the server listens.
    """
    sources = [_named(source) for source in args.model or [DEFAULT_MODEL]]
    drafts = [_named(source) for source in args.draft or []]
    for _, source in sources:
        check_source(source)
    for _, source in drafts:
        check_draft_source(source)
    _check_names("--model", sources)
    _check_names("--draft", drafts)
    if not 0 <= args.port < 2**16:
        raise SpecbeamError(f"--port {args.port} is not allowed: give 0 to 65535")
    if not 0 <= args.grace <= TIMEOUT_MAX:  # nor NaN
        raise SpecbeamError(f"--grace {args.grace} is not allowed: give 0 or more seconds")
    if "" in (args.api_key or ()):  # of a shell's variable that is not set, for example
        raise SpecbeamError("--api-key is empty: give a key, or leave it out for a server that takes all requests")
    for host in args.allowed_host or ():
        if not HOST_NAME.fullmatch(host):
            raise SpecbeamError(f"--allowed-host {host!r} is no name of a host: give one such as llm.example.org")
    for address in args.trusted_proxy or ():
        try:
            ipaddress.ip_network(address)
        except ValueError as error:
            raise SpecbeamError(f"--trusted-proxy {address!r} is no address and no network: {error}") from error
    for option in ("replicas", "address"):
        if args.launcher != "ray" and getattr(args, option) is not None:
            raise SpecbeamError(f"--{option} goes with --launcher ray")
    if args.replicas is not None and args.replicas < 1:
        raise SpecbeamError(f"--replicas {args.replicas} is not allowed: give at least 1")
    sampling = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    Options.of({**FALLBACK.settings, **sampling})  # wrong input is refused before the models load
    try:
        return _serve(args, sources, drafts, sampling, when_ready)
    except ModuleNotFoundError as error:
        if error.name not in ("fastapi", "starlette", "uvicorn", "httptools", "prometheus_client"):
            raise
        raise SpecbeamError(f"the server needs {error.name}: pip install 'specbeam[server]'") from error


def _serve(
    args: argparse.Namespace,
    sources: Sequence[tuple[str, str]],
    drafts: Sequence[tuple[str, str]],
    sampling: dict[str, float],
    when_ready: Callable[[str], object] | None,
) -> int:
    from specbeam.server.app import make_app
    from specbeam.server.serving import Server, accept, listen

    chosen = {field.name: value for field in fields(Limits) if (value := getattr(args, field.name)) is not None}
    limits = Limits(**chosen)
    access = Access(
        api_keys=tuple(args.api_key or os.environ.get(KEY_VARIABLE, "").split()),
        is_local=_is_loopback(args.host),
        allowed_hosts=tuple(host.lower().strip("[]") for host in args.allowed_host or ()),
        trusted_proxies=tuple(args.trusted_proxy or LOOPBACK_ADDRESSES),
        cors_origins=tuple(args.cors_origin or ()),
    )
    bound = listen(args.host, args.port)  # before the models, which take long to load
    make_models = partial(
        _make_models,
        placement_of(args),
        sources,
        drafts,
        default_draft=drafts[0][0] if drafts else NO_DRAFT,
        limits=limits,
        allows_control_tokens=args.allow_control_tokens,
        schema_in_prompt=args.schema_in_prompt,
        sampling=sampling,
    )

    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("specbeam.server").setLevel(logging.INFO)
    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    names = ", ".join(name for name, _ in sources)
    page = f"http://{shown}:{port}/"
    about: list[str] = []
    with ExitStack() as stack:
        if args.launcher == "ray":
            from specbeam.jobs.cluster import import_ray

            import_ray()
            try:
                from specbeam.server.replicas import make_front, replicas_on_ray
            except ImportError as error:
                raise SpecbeamError("--launcher ray needs Ray Serve: pip install 'specbeam[ray]'") from error
            replicas = stack.enter_context(
                replicas_on_ray(
                    make_models,
                    limits,
                    name=f"specbeam-{socket.gethostname()}-{port}",
                    address=args.address,
                    replicas=args.replicas,
                    threads=args.threads,
                    on_gpu=(args.device or "").startswith("cuda"),
                    logs_prompts=args.log_prompts,
                )
            )
            caches = replicas.cache_limits()
            app: Starlette = make_front(replicas, limits, access)
        else:
            models = make_models()
            caches = models.cache_limits
            about = [
                f"{model.name} {model.sampling}; a request may say otherwise"
                for model in models
                if model.lm.backend.encoder_reads != "audio"  # transcription has defaults of its own
            ]
            about += [f"{model.name}: {model.lm.precision}" for model in models]
            app = make_app(models, limits, access, logs_prompts=args.log_prompts)
        accept(bound)
        gc.collect()
        gc.freeze()  # a full collection need not look at models and libraries, while no text goes on
        lines = [
            f"{names} at {page}v1",
            f"the page is {page}",
            *(f"{sentence} (--max-cache-tokens changes that)" for sentence in caches),
            f"beside other requests, prompts are prefilled in chunks of about {limits.max_pass_seconds:g} s "
            "(--max-pass-seconds changes that)",
            *about,
        ]
        for line in lines:
            print(f"specbeam: {line}", file=sys.stderr, flush=True)
        if not access.is_local and not access.api_keys:
            _warn(host, port)
        ready = when_ready and partial(when_ready, page)
        Server(app, args.grace, ready, access.trusted_proxies).run(sockets=[bound])
    return 0


def _named(text: str) -> tuple[str, str]:
    """The name and the source of "NAME=SOURCE", or of a source. A file or a folder is named without its path.

    Paths may have "=", and names may have "/", as hub ids have.
    """
    is_path = text.startswith((".", "/", "~")) or Path(text).exists()
    name, equals, source = text.partition("=")
    if equals and name and not is_path:
        return name, _absolute(source)
    return (Path(text).resolve().name if is_path else text), _absolute(text)


def _absolute(source: str) -> str:
    """A source that does not depend on the working folder, which another process may not have."""
    path = Path(os.path.expanduser(source))  # a shell leaves "~" alone after "NAME="
    return str(path.resolve()) if path.exists() else source


def _check_names(option: str, named: Sequence[tuple[str, str]]) -> None:
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise SpecbeamError(
                f"{option} {name} is given twice: give each its own name, as in {option} {name}-2=SOURCE"
            )
    if option == "--draft":
        for name, source in named:
            if name in (*LOOKUPS, NO_DRAFT) and name != source:
                raise SpecbeamError(f"--draft {name}={source}: {name} has a meaning of its own. Give another name")


def _warn(host: str, port: int) -> None:
    """Say that the server is open to other machines. On a terminal the lines are red."""
    begin, end = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    for line in (
        f"there is no API key, and {host} port {port} is open to other machines: who reaches it can use the models",
        f"set {KEY_VARIABLE} or --api-key, or leave --host out to listen on this machine only",
    ):
        print(f"{begin}specbeam: WARNING: {line}{end}", file=sys.stderr, flush=True)


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _make_models(
    placement: dict[str, Any], sources: Sequence[tuple[str, str]], drafts: Sequence[tuple[str, str]], **how: Any
) -> Models:
    """Load the models and the drafts. ``how``: further arguments of :class:`specbeam.server.models.Models`."""
    chat_templates.render.start()  # while this process imports and loads
    from specbeam.models.model import Placement, load
    from specbeam.server.models import Models, check_memory

    draft_models = [source for _, source in drafts if draft_kind(source) == "model"]
    check_memory([*(source for _, source in sources), *draft_models], Placement(**placement))

    def load_placed(source: str) -> LanguageModel:
        return load(source, **placement)

    lms = {name: load_placed(source) for name, source in sources}
    first = next(iter(lms.values()))

    def load_draft(source: str) -> LanguageModel:
        return first.draft_head(source) or load_placed(source)

    return Models(lms, {name: resolve_draft(source, load_draft, from_here=True) for name, source in drafts}, **how)
