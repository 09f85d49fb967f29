"""User-defined objects, named by text: strategies, drafters, metrics and trackers.

A name is ``module:name``, or the name of an entry point that an installed package declares::

    [project.entry-points."specbeam.drafters"]
    dates = "my_package.dates:propose"

Naming a module runs it. So names come from the caller of a function, the command line or a configuration, and never
from a client of the server.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.errors import PluginError, SpecbeamError, shown

if TYPE_CHECKING:  # it imports forty modules
    from importlib.metadata import EntryPoint

GROUPS = {
    "strategy": "specbeam.strategies",
    "drafter": "specbeam.drafters",
    "metric": "specbeam.metrics",
    "tracker": "specbeam.trackers",
}
"""The group of entry points of each kind."""
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
"""``module:name``, both maybe with dots. A hub id has a slash, so it is none."""

UNGUARDED = "put what only a script does below if __name__ == '__main__'"


def is_name(text: str) -> bool:
    """Whether a text is ``module:name``."""
    return NAME.fullmatch(text) is not None


@cache
def points(kind: str) -> tuple[EntryPoint, ...]:
    """The entry points of a kind. They are looked up once, since that reads a file of each installed package."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=GROUPS[kind]))


def entry_point_names(kind: str) -> list[str]:
    """The names of the entry points of a kind, in the order of the alphabet."""
    return sorted({point.name for point in points(kind)})


def resolve(text: str, kind: str, *, from_here: bool = False) -> Any:
    """The object that a text names.

    Args:
        text: ``module:name``, or the name of an entry point of the kind.
        kind: "strategy", "drafter", "metric" or "tracker".
        from_here: modules in the current directory can be imported from now on, after all others. This is for the
            command line, where Python leaves them out. Entry points do not need it.

    Raises:
        SpecbeamError: there is no such module, name or entry point, or the module fails. The message says which.
    """
    if is_name(text):
        return _import(text, kind, from_here)
    found = [point for point in points(kind) if point.name == text]
    if len(values := {point.value for point in found}) > 1:
        several = " and ".join(sorted(values))
        raise SpecbeamError(f"{kind} {text!r} is {several}, from two packages: give the one that you mean")
    if not found:
        raise SpecbeamError(f"unknown {kind} {shown(text)}: {_how_to_name(text, kind)}")
    return _load(found[0], kind)


def _import(text: str, kind: str, from_here: bool) -> Any:
    module_name, _, path = text.partition(":")
    if from_here and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last, so that a file there takes no installed module's place
    try:
        importlib.invalidate_caches()  # the file may be newer than Python's list of the directory
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):  # a module that theirs imports
            raise SpecbeamError(f"{kind} {text!r}: {failure(error)}") from error
        where = "in the current directory or " if from_here else ""
        raise SpecbeamError(
            f"{kind} {text!r}: there is no module {error.name!r} {where}on Python's path: check its name"
            f"{_near(error.name, _modules_here()) if from_here else ', or add its folder to PYTHONPATH'}"
        ) from error
    except SystemExit as error:
        raise SpecbeamError(f"{kind} {text!r}: the module ends Python when it is imported: {UNGUARDED}") from error
    except Exception as error:
        raise SpecbeamError(f"{kind} {text!r}: {failure(error)}") from error
    module = found
    for part in path.split("."):
        if not hasattr(found, part):
            file = getattr(module, "__file__", None) or "a folder without __init__.py"
            names = [name for name in vars(found) if not name.startswith("_")] if hasattr(found, "__dict__") else []
            raise SpecbeamError(
                f"{kind} {text!r}: the module {module_name} ({file}) has no {part!r}{_near(part, names)}: check the "
                "name, or rename the file if another module has its name"
            )
        found = getattr(found, part)
    return found


def _load(point: EntryPoint, kind: str) -> Any:
    try:
        return point.load()
    except SystemExit as error:
        ends = f"the entry point {point.value} ends Python when it is imported"
        raise SpecbeamError(f"{kind} {point.name!r}: {ends}: {UNGUARDED}") from error
    except Exception as error:
        raise SpecbeamError(
            f"{kind} {point.name!r}, the entry point {point.value}: {failure(error)}; install its package again"
        ) from error


def _how_to_name(text: str, kind: str) -> str:
    """What to give in place of a name that is none."""
    there = entry_point_names(kind)
    known = f"the entry points of {GROUPS[kind]} are {', '.join(there)}" if there else f"no package declares a {kind}"
    return f"{known}{_near(text, there)}; give one of your own as module:name, such as my_module:my_{kind}"


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, [*names], n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _modules_here() -> list[str]:
    return [path.stem for path in Path.cwd().glob("*.py")]


def names_one(text: str, kind: str) -> bool:
    """Whether a text is ``module:name``, or the name of an entry point of a kind."""
    return is_name(text) or text in entry_point_names(kind)


def qualified_name(plugin: Any) -> str:
    """The name of a user-defined object as receipts show it: ``module:name``."""
    plugin = getattr(plugin, "func", plugin)  # of functools.partial
    named = plugin if hasattr(plugin, "__qualname__") else type(plugin)
    return f"{named.__module__}:{named.__qualname__}"


def described(plugin: Any) -> str:
    """The name of a user-defined object as messages show it, with its file and line where Python knows them."""
    function = getattr(plugin, "func", plugin)
    if not hasattr(function, "__qualname__"):
        function = type(function).__call__
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    place = f" ({code.co_filename}, line {code.co_firstlineno})" if code is not None else ""
    return f"{qualified_name(plugin)}{place}"


def source_file(plugin: Any) -> Path | None:
    """The file of the module that defines a user-defined object; None if it has none."""
    module = sys.modules.get(qualified_name(plugin).partition(":")[0])
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file)


def takes(plugin: Any, count: int) -> bool:
    """Whether something can be called with this many arguments, as far as Python knows its signature."""
    try:
        inspect.signature(plugin).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # no signature
        return True
    return True


def parameters(plugin: Any) -> str:
    """The parameters of a function as they are written, such as "(tokens)"."""
    return str(inspect.signature(plugin))


def named(value: Any) -> str:
    """A value with its type, as messages show it."""
    return "None" if value is None else f"the {type(value).__name__} {shown(value)}"


def failed(what: str, error: Exception) -> PluginError:
    """The error for a caller when a user-defined object raised one. Its note has the traceback.

    Args:
        what: the kind and the name of the object.
    """
    found = PluginError(f"{what} failed: {failure(error)}")
    found.add_note("".join(traceback.format_exception(error)))
    return found


def failure(error: BaseException) -> str:
    """An error of user-defined code in one line: its type, its message, and the file and line that raised it."""
    message = " ".join(str(error).split())
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{f': {message}' if message else ''}{place}"


def _is_ours(file: str) -> bool:
    return file.startswith(("<frozen importlib", str(Path(__file__).parent), importlib.__file__))
