"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from specbeam.errors import ConstraintError, NotFinite, PluginError, QueueFull, SpecbeamError
from specbeam.options.declared import OPTIONS
from specbeam.options.names import nearest_name

M = TypeVar("M", bound=BaseModel)

MAX_MESSAGE_CHARACTERS = 2000
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's names, by status. Other errors of the client are an "invalid_request_error"."""
TYPE_NAMES = ("str", "int", "float", "bool")
REMOVE_IT = " is not supported: remove it"
SERVERS_OPTIONS = {"max_cache_tokens": "the server's --max-cache-tokens"}
"""Options that messages name and no request has."""


@dataclass(eq=False)
class Refusal(Exception):
    """A request that is not answered.

    Attributes:
        message: the mistake, and what to do.
        param: the field of the request that was wrong.
        code: a name for programs.
        status: of HTTP.
    """

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 400

    def __post_init__(self) -> None:
        if len(self.message) > MAX_MESSAGE_CHARACTERS:
            self.message = f"{self.message[:MAX_MESSAGE_CHARACTERS]}..."

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The error as JSON data."""
        kind = "server_error" if self.status >= 500 else TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def stopping() -> Refusal:
    return Refusal("the server is stopping: send the request to another one, or again later", None, "stopping", 503)


def failed() -> Refusal:
    """The answer to an error that no client caused. The server's log has the details."""
    return Refusal("the server failed to answer this request, and its log says why", None, "internal_error", 500)


def refusal_of(error: Exception, names: Mapping[str, str], param: str | None = None) -> Refusal:
    """The refusal for an error of the engine.

    Args:
        names: fields of the request by the options that they set, unless they have the same name.
        param: the field, if the error is about no option of a request.
    """
    if isinstance(error, QueueFull):
        return Refusal("the server has as many requests as it takes: try again later", None, "queue_full", 429)
    if not isinstance(error, SpecbeamError) or isinstance(error, PluginError):  # whose message has the server's files
        return failed()
    message = str(error)
    if isinstance(error, NotFinite):
        return Refusal(message, None, "internal_error", 500)
    if isinstance(error, ConstraintError):  # it may name places in a client's schema, and no option
        return Refusal(message, names.get("constraint", param))
    names = {option: option for option in OPTIONS} | dict(names)
    for option in error.options:
        message = message.replace(option, SERVERS_OPTIONS.get(option) or names.get(option, option))
    return Refusal(message, next((names[option] for option in error.options if option in names), param))


def refusal_of_json(error: json.JSONDecodeError) -> Refusal:
    """The refusal of a body that is no JSON."""
    if error.doc.startswith("\ufeff"):
        return Refusal("the body begins with a byte order mark: send UTF-8 without one")
    rest = error.doc[error.pos :].strip()
    if error.msg.startswith("Unterminated string") or any(word.startswith(rest) for word in ("true", "false", "null")):
        line, column = error.doc.count("\n") + 1, len(error.doc) - error.doc.rfind("\n")
        return Refusal(f"the body is cut off: its JSON ends too early, at line {line}, column {column}")
    return Refusal(f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}")


def validated(kind: type[M], given: dict[str, Any]) -> M:
    """The object of a request that some fields give.

    Raises:
        Refusal: fields that are not known, or of another type.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        errors = [one | {"loc": ("body", *one["loc"])} for one in error.errors()]
        raise refusal_of_body(errors, [*kind.model_fields]) from error


def refusal_of_body(errors: list[Any], names: list[str]) -> Refusal:
    """The refusal of a body that does not have the form of a request. It names all fields that are wrong.

    Args:
        errors: pydantic's.
        names: the fields of the request.
    """
    by_field: dict[Any, list[Any]] = {}
    for error in errors:
        _, *place = error["loc"]
        if not place:
            return Refusal("the body must be a JSON object, sent with the header Content-Type: application/json")
        by_field.setdefault(place[0], []).append(error)
    first, *more = refusals = [_refusal_of_field(of_field, names) for of_field in by_field.values()]
    if not more:
        return first
    removed = [one.message.removesuffix(REMOVE_IT) for one in refusals if one.message.endswith(REMOVE_IT)]
    says = [f"{', '.join(removed)} are not supported: remove them"] if len(removed) > 1 else []
    says += [one.message for one in refusals if not says or not one.message.endswith(REMOVE_IT)]
    return Refusal("; ".join(says), first.param, first.code)


def _refusal_of_field(of_field: list[Any], names: list[str]) -> Refusal:
    """The refusal for one field.

    Where a field has several forms, pydantic reports what is wrong with each, and names the form in the place.
    """
    first = of_field[0]
    _, *place = first["loc"]
    param = str(place[0])
    if first["type"] == "extra_forbidden" and len(place) == 1:
        near = nearest_name(param, names)
        says = f"{param} is not supported: did you mean {near}?" if near and near != param else param + REMOVE_IT
        return Refusal(says, param, "unsupported_parameter")
    if first["type"] == "extra_forbidden" and len(of_field) == 1:
        return Refusal(_shown(first["loc"]) + REMOVE_IT, param, "unsupported_parameter")
    if first["type"] == "none_required" or first.get("ctx", {}).get("max_length") == 0:
        return Refusal(f"{place[-1]}{REMOVE_IT}", param, "unsupported_parameter")
    # The form that fits best fails last, and so in the deepest place. There, another type explains other mistakes.
    deepest = max(of_field, key=lambda error: (len(error["loc"]), error["loc"][-1] == "type"))
    where = _shown(deepest["loc"])
    there = [_says(error) for error in of_field if _shown(error["loc"]) == where]
    says = " or ".join(dict.fromkeys(there[:4]))
    return Refusal(f"{where}: {says}", param, "missing_parameter" if deepest["type"] == "missing" else "invalid_value")


def _says(error: Any) -> str:
    """pydantic's message, with a limit as it is: pydantic rounds a limit of 64 bits."""
    says: str = error["msg"].removeprefix("Value error, ")
    limits = [limit for limit in error.get("ctx", {}).values() if isinstance(limit, int)]
    is_rounded = error["type"].startswith(("less", "greater")) and limits
    return f"{says.rpartition(' ')[0]} {limits[0]}" if is_rounded else says


def _shown(place: Any) -> str:
    """A place in a body, such as "messages[0].content", from pydantic's, which also names types."""
    names = [part for part in place[1:] if isinstance(part, int) or (part.isidentifier() and part.islower())]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in names if part not in TYPE_NAMES)
    return "".join(parts)[1:]
