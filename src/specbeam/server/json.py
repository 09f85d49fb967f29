"""JSON as the server writes it: in UTF-8, without spaces, and without NaN and infinity."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as an answer. Half a surrogate pair, which no encoding can write, becomes a question mark."""
    return Response(to_json(value).encode(errors="replace"), status, headers, "application/json")
