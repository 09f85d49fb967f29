"""Imports form no cycle: neither between the layers of the package, nor between modules. Paths to files count, too."""

import ast
import os
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import specbeam

ROOT = Path(specbeam.__file__).parent


def imported_names(path, source):
    """Full names that a file imports, also in functions and for type checkers only: they are dependencies too.

    So are the packages whose files it reads, but not those around it: ``files("specbeam.server")``, and paths that
    begin at ``__file__``.
    """
    package = ["specbeam", *path.relative_to(ROOT).parts[:-1]]
    has_paths = "__file__" in source
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.expr):
            for name in filter(None, [read_package(node), has_paths and read_folder(node, path)]):
                if package[: name.count(".") + 1] != name.split("."):
                    yield name


def read_package(node):
    """The name in ``files("specbeam.server")`` and ``import_module("specbeam.server")``, else None."""
    match node:
        case ast.Call(ast.Name(function) | ast.Attribute(_, function), [ast.Constant(str(name)), *_]):
            return name if function in ("files", "import_module") and name.startswith("specbeam.") else None


def read_folder(node, path):
    """The package with the file or folder that an expression with ``__file__`` leads to; None for other expressions."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    if "__file__" not in names or not names <= {"__file__", "Path", "os"}:
        return None
    try:
        found = Path(eval(ast.unparse(node), {"__file__": str(path), "Path": Path, "os": os})).resolve()
    except (TypeError, ValueError, OSError):  # not a path, but a method of one, or the content of a file
        return None
    if not found.is_relative_to(ROOT):
        return None
    while not (found / "__init__.py").is_file():
        found = found.parent
    return ".".join(["specbeam", *found.relative_to(ROOT).parts])


def layer_of(name):
    """The top-level folder or module that a full name lies in; "specbeam" for the names of the package itself."""
    first = name.split(".")[1] if "." in name else ""
    return first if (ROOT / first / "__init__.py").is_file() or (ROOT / f"{first}.py").is_file() else "specbeam"


def layers():
    """The layers that each layer imports, by name."""
    graph = {}
    for importer, imported in modules().items():
        if importer != "specbeam":  # which imports a module when a name of it is used
            graph.setdefault(layer_of(importer), set()).update(map(layer_of, imported))
    return {importer: imported - {importer} for importer, imported in graph.items()}


@cache
def modules():
    """The modules that each module imports, by full name."""
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(["specbeam", *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    graph = {}
    for importer, path in names.items():
        graph[importer] = set()
        for name in imported_names(path, path.read_text(encoding="utf-8")):
            while name and name not in names:  # a class or a function
                name = name.rpartition(".")[0]
            graph[importer] |= {name} - {importer, ""}
    return graph


@pytest.mark.parametrize(
    ("graph", "importer", "imported"),
    [(layers, "decoding", "drafting"), (modules, "specbeam.engine.model_state", "specbeam.cache.slots")],
)
def test_no_two_layers_and_no_two_modules_import_each_other(graph, importer, imported):
    assert imported in graph()[importer]  # imports are found at all
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        _, (*cycle, _) = error.args
        pytest.fail(f"an import cycle: {' <- '.join(cycle)} <- {cycle[0]}")


@pytest.mark.parametrize(
    ("reader", "read"),
    [
        ("replay.py", 'files("specbeam.server") / "page"'),
        ("replay.py", 'importlib.resources.files("specbeam.server")'),
        ("replay.py", 'Path(__file__).parent / "server" / "page"'),
        ("study/report.py", 'Path(__file__).parents[1].joinpath("server", "page.py")'),
        ("study/report.py", 'os.path.join(os.path.dirname(__file__), "../server/page")'),
    ],
)
def test_the_files_of_another_package_are_a_dependency(reader, read):
    assert {*imported_names(ROOT / reader, f"folder = {read}")} == {"specbeam.server"}
    own = 'Path(__file__).parent / "page", files("specbeam.server")'
    assert not {*imported_names(ROOT / "server" / "page.py", own)}


def test_the_lowest_layers_stay_low():
    """A constraint or a tree can be used, and read, without the rest."""
    graph = layers()
    assert graph["errors"] == set()
    assert graph["system"] == {"errors"}
    assert graph["core"] == graph["text"] == {"errors", "system"}
    assert graph["structured"] == {"core", "errors", "system"}
    assert graph["options"] == {"errors", "structured", "system"}
    assert graph["logits"] == {"core", "errors", "options", "structured", "text"}
    assert graph["cache"] == {"backends", "core", "errors"}
    assert graph["decoding"] <= {"core", "drafting", "errors", "logits", "options", "recording"}


def test_the_architecture_page_has_the_layers_in_their_order():
    """Its table of rooms has all packages, and each imports only rooms above it."""
    page = (Path(__file__).parents[1] / "docs/architecture.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]*) \|", page[: page.index("\n## ", page.index("\n## The rooms") + 1)], re.MULTILINE)
    rooms = re.findall(r"`(\w+)[^`]*`", " ".join(cells))
    graph = layers()
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} <= {*rooms}
    for index, room in enumerate(rooms):
        assert {*rooms[index + 1 :]} & graph[room] == set(), room
