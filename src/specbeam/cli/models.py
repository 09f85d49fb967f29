"""``specbeam models``: list, fetch, describe and remove models, and show the packed weights that are kept."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from typing import Any

from specbeam.cli.arguments import add_revision_to, completer
from specbeam.cli.printing import json_line
from specbeam.errors import SpecbeamError, shown


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "models", help="list, fetch, describe and remove models, and clear their packed weights"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    action = actions.add_parser("list", help="the models with a short name, and the models in the hub's cache")
    action.add_argument("--json", action="store_true", help="print a JSON array")
    action.set_defaults(run=list_models)
    action = actions.add_parser("pull", help="fetch a model and print its path")
    name = action.add_argument("name", metavar="NAME", help="an alias or a hub id")
    name.completer = completer()
    add_revision_to(action)
    action.set_defaults(run=pull)
    action = actions.add_parser("show", help="describe a model; nothing is fetched")
    source = action.add_argument("source", metavar="SOURCE", help="an alias, a folder, a .gguf file or a hub id")
    source.completer = completer()
    add_revision_to(action)
    action.add_argument("--json", action="store_true", help="print a JSON object")
    action.set_defaults(run=show)
    action = actions.add_parser("rm", help="remove a fetched model from the disk, with its packed weights")
    name = action.add_argument("name", metavar="NAME", help="an alias or a hub id")
    name.completer = completer()
    action.set_defaults(run=remove)
    action = actions.add_parser("packed", help="the packed weights that the cpu backend keeps, and their limit")
    action.add_argument("--clear", action="store_true", help="remove them all")
    action.set_defaults(run=show_packed)


def list_models(given: argparse.Namespace) -> int:
    from specbeam.checkpoints import hub
    from specbeam.checkpoints.registry import ALIASES, location, size_on_disk

    models = [
        {
            "name": name,
            "from": "alias",
            "path": str(location(name)) if location(name).is_file() else None,
            "bytes_on_disk": size_on_disk(name),
            "bytes_to_fetch": 0 if location(name).is_file() else alias.size,
            "license": alias.license,
            "description": alias.description,
        }
        for name, alias in ALIASES.items()
    ] + [
        {"name": one.repository, "from": "hub", "path": str(one.path), "bytes_on_disk": one.size, "bytes_to_fetch": 0}
        for one in hub.kept()
    ]
    if given.json:
        print(json_line(models))
        return 0
    width = max(len(str(model["name"])) for model in models)
    for model in models:
        here = "on disk" if model["path"] else "not fetched"
        size = megabytes(model["bytes_to_fetch"] or model["bytes_on_disk"])
        about = model.get("description", "from the hub")
        print(f"{model['name']:{width}}  {size:>9}  {here:11}  {model.get('license', ''):10}  {about}")
    return 0


def megabytes(size: Any) -> str:
    return f"{size / 1e6:,.0f} MB"


def pull(given: argparse.Namespace) -> int:
    from specbeam.checkpoints import locate

    print(locate(given.name, given.revision))
    return 0


def show(given: argparse.Namespace) -> int:
    from specbeam.checkpoints.registry import ALIASES, location

    fetched = given.source not in ALIASES or location(given.source).is_file()
    rows = facts_of(given.source, given.revision) if fetched else facts_of_alias(given.source)
    if given.json:
        print(json_line({name.replace(" ", "_"): value for name, value in rows.items()}))
        return 0
    for name, value in rows.items():
        if name in ("size", "packed weights", "size to fetch"):
            value = megabytes(value)
        elif name in ("parameters", "context"):
            value = "unknown" if value is None else f"{value:,}"
        elif value is None:
            value = "not stated"
        elif isinstance(value, dict):
            value = ", ".join(f"{key}={shown(one)}" for key, one in value.items())
        print(f"{name:14} {value}")
    if not fetched:
        print(f"[not on this machine: specbeam models pull {given.source} fetches it]", file=sys.stderr)
    return 0


def facts_of(source: str, revision: str | None) -> dict[str, Any]:
    """The facts of a checkpoint on this machine. Sizes are in bytes."""
    from specbeam.checkpoints import locate, open_checkpoint, packed

    checkpoint = open_checkpoint(locate(source, revision, download=False), download=False)
    facts = checkpoint.facts
    return {
        "source": source,
        "path": str(checkpoint.path),
        **({} if checkpoint.adapter is None else {"adapter": str(checkpoint.adapter.path)}),
        "architecture": facts.architecture,
        "parameters": facts.parameters,
        "context": facts.context,
        "quantization": facts.quantization,
        "size": facts.size,
        "packed weights": sum(file.size for file in packed.files_of(packed.label(checkpoint.path))),
        "license": facts.license,
        "generation": checkpoint.generation_defaults.of_texts or None,
    }


def facts_of_alias(name: str) -> dict[str, Any]:
    """The facts of a model of the registry that has not been fetched."""
    from specbeam.checkpoints.registry import ALIASES

    alias = ALIASES[name]
    return {"source": name, "size to fetch": alias.size, "license": alias.license, "description": alias.description}


def remove(given: argparse.Namespace) -> int:
    from specbeam.checkpoints import hub, packed
    from specbeam.checkpoints.registry import ALIASES, home
    from specbeam.checkpoints.registry import remove as remove_alias

    kept = {one.repository: one for one in hub.kept()}
    if given.name in ALIASES:
        freed, where, label = remove_alias(given.name), home() / "models", given.name
    elif given.name in kept:
        where = kept[given.name].path
        freed, label = hub.remove(kept[given.name]), where.name
    else:
        raise SpecbeamError(
            f"{given.name} is no fetched model: give an alias or a hub id that specbeam models list shows. Files and "
            "folders of your own are yours to remove"
        )
    freed_packed = packed.remove(label)
    if given.name in ALIASES and not freed + freed_packed:
        raise SpecbeamError(f"{given.name} is not on this machine: there is nothing to remove")
    print(f"removed {given.name}: {megabytes(freed)} from {where}")
    if freed_packed:
        print(f"removed its packed weights: {megabytes(freed_packed)} from {packed.folder()}")
    return 0


def show_packed(given: argparse.Namespace) -> int:
    from specbeam.checkpoints import packed

    if given.clear:
        print(f"removed {megabytes(packed.clear())} from {packed.folder()}")
    files = packed.files()
    width = max((len(file.path.stem) for file in files), default=0)
    for file in reversed(files):
        used = datetime.fromtimestamp(file.used).strftime("%Y-%m-%d %H:%M")
        print(f"{file.path.stem:{width}}  {megabytes(file.size):>11}  used {used}")
    total = megabytes(sum(file.size for file in files))
    print(f"[{total} of at most {megabytes(packed.limit())} in {packed.folder()}]", file=sys.stderr)
    return 0
