"""The application: its routes, and its life from the first request to the last."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from types import NoneType
from typing import Any, Literal, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException

import specbeam
from specbeam.server import ollama
from specbeam.server.audio import FORM, Transcribers, TranscriptionCall, TranscriptionRequest
from specbeam.server.call import BatchingWindow, Call
from specbeam.server.chat import ChatRequest
from specbeam.server.completions import CompletionRequest
from specbeam.server.errors import Refusal, failed, refusal_of_body, refusal_of_json, stopping
from specbeam.server.http import OLLAMA_PATHS, ClientGone, EventStream, error_response, json_response, while_connected
from specbeam.server.limits import AUDIO_PATHS, Access, Limits
from specbeam.server.messages import MessagesRequest, TokensRequest
from specbeam.server.middleware import MAX_SHOWN_PATH, REQUEST_ID, Middleware
from specbeam.server.models import Models, ServedModel
from specbeam.server.ollama import OllamaChat, OllamaGenerate, ShowRequest
from specbeam.server.page import RoundsRequest, add_page_to
from specbeam.server.request_log import RequestLog
from specbeam.server.responses import ResponseRequest
from specbeam.server.tokenizing import DetokenizeRequest, TokenizeRequest, tokenizer_info
from specbeam.server.usage import Metrics

T = TypeVar("T")

logger = logging.getLogger("specbeam.server")
CLIENT_CLOSED_REQUEST = 499
"""nginx's status in the log for a client that went away. Nobody receives it."""
MAX_SHORT_BODY_BYTES = 8192
"""Tokenizing such a prompt takes less time than a thread takes to begin. Other prompts are tokenized in a thread.

So requests that come together are submitted together, and their prompts share a pass.
"""
LONG_BODY_BYTES, MAX_LONG_BODIES = 1 << 18, 2
"""Of longer bodies, two are tokenized at a time. Each may take seconds and hundreds of megabytes."""
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
GENERATING_PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/rounds/chat", "/rounds/completions"),
    *("/v1/messages", "/api/chat", "/api/generate"),
)
"""The endpoints that generate texts."""


class ErrorBody(BaseModel):
    """Why a request was refused."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """OpenAI's shape of errors."""

    error: ErrorBody


class AnthropicError(Error):
    """Anthropic's shape of errors."""

    type: Literal["error"]


class OllamaError(BaseModel):
    """ollama's shape of errors."""

    error: str


def errors_as(shape: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The errors of an endpoint, for ``/openapi.json``."""
    return {status: {"model": shape} for status in (400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 503)}


class StrictRequest(Request):
    """A request whose body must be JSON in UTF-8, without an object that has a name twice."""

    async def json(self) -> Any:
        try:
            return json.loads((await self.body()).decode(), object_pairs_hook=_object)
        except json.JSONDecodeError as error:
            raise refusal_of_json(error) from error
        except (ValueError, RecursionError) as error:
            raise Refusal("the body cannot be read: send JSON in UTF-8, with numbers of a sane size") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. One of two values with the same name would be ignored."""
    values = dict(pairs)
    if len(values) < len(pairs):
        name = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise Refusal(f"{name} is given twice: leave one out", name, "invalid_value")
    return values


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            strict = StrictRequest(request.scope, request.receive)
            if self.body_field is not None and not (await strict.body()).strip():
                raise Refusal("the body is empty: send a JSON object, with the header Content-Type: application/json")
            return await handler(strict)

        return handle


def make_app(
    models: Models, limits: Limits | None = None, access: Access | None = None, *, logs_prompts: bool = False
) -> FastAPI:
    """The application of a server.

    Args:
        models: their engines start with the application, and stop with it.
        logs_prompts: the log has the prompts, too.
    """
    limits, access = limits or Limits(), access or Access()
    metrics, window = Metrics(), BatchingWindow()
    long_bodies = ThreadPoolExecutor(MAX_LONG_BODIES, "specbeam-tokenizing")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        models.start()
        yield
        await models.stop(0)

    app = FastAPI(
        title="specbeam",
        version=specbeam.__version__,
        openapi_url="/openapi.json",
        docs_url=None,  # the pages would load scripts from other hosts
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        responses=errors_as(Error),
    )
    app.state.models = models
    app.router.route_class = StrictRoute
    protect(app, limits, access, metrics)

    async def tokenizing(request: Request, work: Callable[[], T]) -> T:
        """The outcome of work that tokenizes a request's body, in a thread."""
        if len(await request.body()) <= LONG_BODY_BYTES:
            return await asyncio.to_thread(work)
        RequestLog.of(request.scope).turn.close()  # so that short requests do not wait for it
        return await asyncio.get_running_loop().run_in_executor(long_bodies, work)

    async def generate(fields: Generation, request: Request) -> Response:
        log = RequestLog.of(request.scope)
        call = log.call = fields.call(_models(request).get(fields.model), limits)
        if logs_prompts:
            log.prompts = call.prompts
        is_quick = call.is_quick and len(await request.body()) <= MAX_SHORT_BODY_BYTES
        if is_quick:
            call.encode()  # before the window, which is for requests that only need to be submitted
        await window.wait()
        if is_quick:
            call.submit()
        else:
            await while_connected(request.receive, tokenizing(request, call.submit), call)
        log.turn.close()
        answer = fields.answer(call)
        if fields.stream:
            has_lines = request.scope["path"].startswith(OLLAMA_PATHS)
            return EventStream(answer.frames(), call, LINES if has_lines else EVENTS)
        return json_response(answer.body(await while_connected(request.receive, call.results(), call)))

    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    stream: Any = {200: {"content": {EVENTS: {"schema": event}}}}
    of_messages, of_ollama = errors_as(AnthropicError), errors_as(OllamaError)

    async def chat(fields: ChatRequest, request: Request) -> Response:
        return await generate(fields, request)

    async def completions(fields: CompletionRequest, request: Request) -> Response:
        return await generate(fields, request)

    async def responses(fields: ResponseRequest, request: Request) -> Response:
        return await generate(fields, request)

    async def rounds_of_chat(fields: ChatRequest, request: Request) -> Response:
        return await generate(RoundsRequest(fields), request)

    async def rounds_of_completion(fields: CompletionRequest, request: Request) -> Response:
        return await generate(RoundsRequest(fields), request)

    async def messages(fields: MessagesRequest, request: Request) -> Response:
        return await generate(fields, request)

    async def ollama_chat(fields: OllamaChat, request: Request) -> Response:
        return await generate(fields, request)

    async def ollama_generate(fields: OllamaGenerate, request: Request) -> Response:
        return await generate(fields, request)

    lines: Any = {200: {"content": {LINES: {}}}} | of_ollama
    endpoints: Any = (chat, completions, responses, rounds_of_chat, rounds_of_completion)
    shapes = [*[stream] * len(endpoints), stream | of_messages, lines, lines]
    endpoints += (messages, ollama_chat, ollama_generate)
    for path, endpoint, shape in zip(GENERATING_PATHS, endpoints, shapes, strict=True):
        app.add_api_route(path, endpoint, methods=["POST"], responses=shape)

    @app.post("/v1/messages/count_tokens", responses=of_messages)
    async def count_tokens(fields: TokensRequest, request: Request) -> Response:
        call = fields.call(_models(request).get(fields.model), limits)
        await tokenizing(request, call.encode)
        return json_response({"input_tokens": call.num_prompt_tokens})

    @app.get("/api/tags", responses=of_ollama)
    @app.get("/api/ps", responses=of_ollama)
    async def ollama_models(request: Request) -> Response:
        return json_response(ollama.tags(_models(request)))

    @app.post("/api/show", responses=of_ollama)
    async def ollama_show(fields: ShowRequest, request: Request) -> Response:
        return json_response(ollama.show(_models(request).get(fields.model.removesuffix(":latest"))))

    @app.get("/api/version", responses=of_ollama)
    async def ollama_version() -> Response:
        return json_response(ollama.version())

    transcribers = Transcribers(limits)

    def transcribing(task: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        async def transcribe(request: Request) -> Response:
            fields, file = await TranscriptionRequest.of(request)
            call = TranscriptionCall(fields, task, _models(request).get(fields.model), limits, transcribers)
            RequestLog.of(request.scope).turn.close()
            await while_connected(request.receive, call.prepare(file.file), call)
            if fields.stream:
                return EventStream(call.frames(), call)
            return call.answer(await while_connected(request.receive, call.transcript(), call))

        return transcribe

    for path, task in AUDIO_PATHS.items():
        app.add_api_route(path, transcribing(task), methods=["POST"], responses=stream, openapi_extra=FORM)

    @app.post("/tokenize")
    async def tokenize(fields: TokenizeRequest, request: Request) -> Response:
        return json_response(await tokenizing(request, partial(fields.answer, _models(request).get(fields.model))))

    @app.post("/detokenize")
    async def detokenize(fields: DetokenizeRequest, request: Request) -> Response:
        return json_response(await tokenizing(request, partial(fields.answer, _models(request).get(fields.model))))

    @app.get("/tokenizer_info")
    async def about_tokenizer(request: Request, model: str | None = None) -> Response:
        return json_response(tokenizer_info(_models(request).get(model)))

    @app.get("/v1/models")
    async def list_models(request: Request) -> Response:
        return json_response({"object": "list", "data": [_about(model) for model in _models(request)]})

    @app.get("/v1/models/{name:path}")
    async def retrieve_model(name: str, request: Request) -> Response:
        return json_response(_about(_models(request).get(name)))

    @app.get("/health")
    async def health(request: Request) -> Response:
        if request.app.state.is_stopping:
            raise stopping()
        if ended := _models(request).ended:
            raise Refusal(f"an error ended the engine of {', '.join(ended)}: start the server again", None, None, 503)
        return json_response({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics(request: Request) -> Response:
        return metrics.response(_models(request).loads)

    add_page_to(app)

    for operations in app.openapi()["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)  # FastAPI's status for a body of the wrong form, which is 400 here
    for route in app.routes:  # HTTP asks for HEAD wherever there is GET. The interface need not list it
        if isinstance(route, StrictRoute) and "GET" in (methods := route.methods or set()):
            methods.add("HEAD")

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        field = request.scope["route"].body_field
        known = {} if field is None else field.field_info.annotation.model_fields
        names = [name for name, one in known.items() if one.annotation is not NoneType]  # which may only be null
        return error_response(refusal_of_body([*error.errors()], names), request.scope["path"])

    return app


def protect(app: Starlette, limits: Limits, access: Access, metrics: Metrics) -> None:
    """Check the requests to an application, log and count them, and answer errors in OpenAI's shape.

    New requests are refused from when ``app.state.is_stopping`` is true.
    """
    app.state.is_stopping = False
    app.add_middleware(Middleware, limits=limits, access=access, metrics=metrics)
    if access.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )

    async def refuse(request: Request, refusal: Refusal) -> Response:
        if request.app.state.is_stopping and refusal.status < 500:
            refusal = stopping()
        elif refusal.status == 500:
            logger.error("request %s failed", RequestLog.of(request.scope).id, exc_info=refusal)
        return error_response(refusal, request.scope["path"])

    async def refuse_http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, Refusal):  # of the body
            return error_response(error.__cause__, request.scope["path"])
        says = str(error.detail)
        if error.status_code == 404:
            path = request.scope["path"][:MAX_SHOWN_PATH]
            says = f"there is nothing at {path}: the API begins with /v1, as in /v1/models, and /openapi.json has all"
        elif error.status_code == 405:
            says = f"{request.method} is not allowed here: use {(error.headers or {}).get('Allow', 'another method')}"
        response = error_response(Refusal(says, None, None, error.status_code), request.scope["path"])
        response.headers.update(error.headers or {})
        return response

    async def fail(request: Request, _: Exception) -> Response:
        response = error_response(failed(), request.scope["path"])
        response.headers[REQUEST_ID] = RequestLog.of(request.scope).id  # it does not pass through the middleware
        return response

    async def leave(request: Request, _: ClientGone) -> Response:
        RequestLog.of(request.scope).outcome = "cancelled"
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    handlers: dict[Any, Any] = {Refusal: refuse, HTTPException: refuse_http, ClientGone: leave, Exception: fail}
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


class Generation(Protocol):
    """A request for texts."""

    model: str | None
    stream: bool | None

    def call(self, model: ServedModel, limits: Limits) -> Call:
        """Its requests to the engine. They are not submitted yet."""

    def answer(self, call: Call) -> Any: ...


def _models(request: Request) -> Models:
    """The models of the application that has a request.

    No endpoint holds them itself: FastAPI remembers endpoints after their application is gone.
    """
    models: Models = request.app.state.models
    return models


def _about(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "specbeam",
        "max_model_len": model.lm.backend.context_length,
        "has_chat_template": bool(model.lm.tokenizer.chat_template),
        "drafts": [*model.drafts],
        "sampling": model.sampling.settings,
    }
