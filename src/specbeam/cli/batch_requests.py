"""``specbeam batch`` with OpenAI's batch files: a line of IN is a request as over HTTP, and a line of OUT its answer.

The application of the server answers them in this process, so a body means the same as over HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import load_draft, load_model
from specbeam.cli.rows import OPTION_NAMES, Answer, Answers, NumberedItem, Task
from specbeam.errors import SpecbeamError, shown
from specbeam.jobs.files import replacing
from specbeam.jobs.formats import ROW_DECODER, JsonlRows, Row, Rows, seekable
from specbeam.jobs.journal import json_line
from specbeam.options.names import NO_DRAFT
from specbeam.system.extras import require

if TYPE_CHECKING:
    from specbeam.jobs.formats import Type

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
KEYS = ("custom_id", "method", "url", "body")
PROBLEM = "problem"
"""The column that says why a line is no request."""
COLUMNS: dict[str, Type] = dict.fromkeys(("id", "response", "status", "new_tokens", "error"), "string")
OF_ROWS = ("column", "template", "choices", "labels", "tokens", "strategy", "system", "raw", "draft_corpus")
MAX_WAITING = 1 << 20
"""Requests that are answered at a time, each with all its texts, wait for a place without an end."""
BATCHES_AT_ONCE = 2
"""Requests that are answered at a time are this many batches: one shares passes while the next is read."""


class RequestRows(JsonlRows):
    """The lines of a batch file. A line that is no JSON object is a row, too."""

    def _rows(self) -> Iterator[Row]:
        for number, line in self._numbered():
            try:
                row = ROW_DECODER.decode(line)
                if not isinstance(row, dict):
                    raise ValueError("it is no JSON object")
            except (ValueError, RecursionError) as error:
                row = {PROBLEM: f"line {number} is no request: {error}"}
            yield row


def has_requests(path: Path) -> bool:
    """Whether a file is one of OpenAI's batch files, by the first line that is a JSON object."""
    if not path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        return False
    with suppress(OSError, ValueError, RecursionError):
        if stat.S_ISREG(path.stat().st_mode):
            with seekable(path) as lines:
                for line in lines:
                    with suppress(ValueError):
                        if isinstance(row := ROW_DECODER.decode(line.decode("utf-8-sig")), dict):
                            return {"custom_id", "url", "body"} <= {*row}
    return False


def check(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Refuse options that the bodies of requests have themselves."""
    require(
        f"{args.input} has requests as over HTTP, and to answer them", "fastapi", "prometheus_client", extra="server"
    )
    if Path(args.output).suffix.lower() != ".jsonl":
        raise SpecbeamError(f"{args.input} has requests, so OUT has lines of JSON: name {args.output} .jsonl")
    for option in (*OPTION_NAMES, *OF_ROWS):
        if getattr(args, option, None) not in (None, False, defaults.get(option)):
            flag = "a constraint" if option == "constraint" else f"--{option.replace('_', '-')}"
            raise SpecbeamError(f"{flag} is for rows, and each request of {args.input} has its own: leave it out")


def task_of(args: argparse.Namespace, rows: Rows) -> Task:
    """What to do with the lines of a batch file."""
    return Task(
        [*KEYS, PROBLEM],
        dict,
        COLUMNS,
        ["requests"],
        partial(make_answers, args),
        counted="status",
        tokens="new_tokens",
        write=partial(write, Path(args.output), rows),
    )


def write(path: Path, rows: Rows, answers: Iterable[Answer]) -> None:
    """Write the answers as OpenAI does. A request without a response has an error."""
    with replacing(path) as file:
        for number, (row, answer) in enumerate(zip(rows.cells(["custom_id"]), answers, strict=True)):
            response, error = answer["response"], {"code": "invalid_request", "message": answer["error"]}
            line = {"id": answer["id"] or f"batch_req_{number}", "custom_id": row["custom_id"], "response": response}
            file.write(json_line(line | {"error": error if response is None else None}))


def make_answers(args: argparse.Namespace) -> Answers:
    """Load the models. Returns the function that makes answers."""
    from specbeam.server.app import make_app
    from specbeam.server.limits import Limits
    from specbeam.server.models import Models

    lm = load_model(args)
    draft = load_draft(args, lm)
    drafts = {} if draft is None else {"draft": draft}
    name = Path(args.model).resolve().name if Path(args.model).exists() else args.model
    limits = Limits(max_requests=args.batch_size, max_waiting=MAX_WAITING)
    models = Models({name: lm}, drafts, next(iter(drafts), NO_DRAFT), limits)
    models.start()
    return partial(answers, make_app(models, limits), asyncio.Runner(), BATCHES_AT_ONCE * args.batch_size)


def answers(app: Any, runner: asyncio.Runner, at_once: int, items: Iterable[NumberedItem]) -> Iterator[Answer]:
    """The answers to numbered lines, in the order in which they are known."""
    loop, left, running = runner.get_loop(), iter(items), set[asyncio.Task[Answer]]()
    while True:
        running |= {loop.create_task(answer(app, number, row)) for number, row in islice(left, at_once - len(running))}
        if not running:
            return
        done, running = runner.run(asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))
        yield from (task.result() for task in done)


async def answer(app: Any, number: int, row: Row) -> Answer:
    """The answer to one line."""
    values = {"row": number, **dict.fromkeys(COLUMNS), "id": f"batch_req_{uuid.uuid4().hex}", "error": problem_of(row)}
    if values["error"] is None:
        status, request_id, body = await ask(app, row["url"], row["body"])
        values["response"] = {"status_code": status, "request_id": request_id, "body": body}
        values["status"] = str(status)
        usage = body.get("usage") or {}
        values["new_tokens"] = usage.get("completion_tokens", usage.get("output_tokens"))
        values["error"] = body["error"]["message"] if status != 200 else None
    return values


def problem_of(row: Row) -> str | None:
    """Why a line is no request that can be answered here; None if it is one."""
    if row[PROBLEM] is not None:
        return str(row[PROBLEM])
    if not isinstance(row["custom_id"], str):
        return f"custom_id={shown(row['custom_id'])} is not allowed: give a text"
    if row["method"] != "POST":
        return f"method={shown(row['method'])} is not allowed: give POST"
    if row["url"] not in URLS:
        return f"url={shown(row['url'])} is not allowed: give {', '.join(URLS)}"
    if not isinstance(row["body"], dict):
        return "the body is no JSON object: give the fields of the request"
    if row["body"].get("stream"):
        return "stream is not supported in a batch: leave it out"
    return None


async def ask(app: Any, url: str, fields: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
    """Send a request to an application (ASGI). Returns the status, the request's id, and the body of the answer."""
    coming = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]
    sent: list[Mapping[str, Any]] = []

    async def receive() -> Any:
        return coming.pop() if coming else await asyncio.Future()

    async def send(message: Mapping[str, Any]) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    about = {
        "http_version": "1.1",
        "scheme": "http",
        "query_string": b"",
        "root_path": "",
        "client": None,
        "server": None,
    }
    scope = {"type": "http", "method": "POST", "path": url, "headers": headers, **about}
    with suppress(Exception):  # of an error, too, there is an answer
        await app(scope, receive, send)
    start, *parts = sent
    answered = dict(start["headers"])
    body = b"".join(part.get("body", b"") for part in parts)
    return start["status"], answered[b"x-request-id"].decode(), json.loads(body)
