"""Results and errors as single lines, on terminals of any encoding."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from specbeam.errors import SpecbeamError


def json_line(value: Any, default: Callable[[Any], str] | None = None) -> str:
    """A value as JSON. Characters beyond ASCII are escaped unless standard output takes UTF-8."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(value, default=default, ensure_ascii=not utf8)


def one_line(error: Exception) -> str:
    """An error's message, after its type unless the error is for people."""
    kind = "" if isinstance(error, SpecbeamError) else f"{type(error).__name__}: "
    return kind + " ".join(str(error).split())
