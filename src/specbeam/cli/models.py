"""``specbeam models``: list models, fetch one, describe one, and show the packed weights that are kept."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from typing import Any


def add_to(commands: Any) -> None:
    parser = commands.add_parser("models", help="list, fetch and describe models, and clear their packed weights")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    action = actions.add_parser("list", help="the models with a short name")
    action.set_defaults(run=list_models)
    action = actions.add_parser("pull", help="fetch a model and print its path")
    action.add_argument("name", metavar="NAME", help="an alias or a hub id")
    action.add_argument("--revision", help="a branch, tag or commit of a hub id")
    action.set_defaults(run=pull)
    action = actions.add_parser("show", help="describe a model, which is fetched first if necessary")
    action.add_argument("source", metavar="SOURCE", help="an alias, a folder, a .gguf file or a hub id")
    action.add_argument("--revision", help="a branch, tag or commit of a hub id")
    action.set_defaults(run=show)
    action = actions.add_parser("packed", help="the packed weights that the cpu backend keeps, and their limit")
    action.add_argument("--clear", action="store_true", help="remove them all")
    action.set_defaults(run=show_packed)


def list_models(given: argparse.Namespace) -> int:
    from specbeam.checkpoints.registry import ALIASES, location

    width = max(map(len, ALIASES))
    for name, alias in ALIASES.items():
        here = "here" if location(name).is_file() else "not fetched"
        print(f"{name:{width}}  {alias.size / 1e6:5.0f} MB  {alias.license:10}  {here:11}  {alias.description}")
    return 0


def pull(given: argparse.Namespace) -> int:
    from specbeam.checkpoints import locate

    print(locate(given.name, given.revision))
    return 0


def show(given: argparse.Namespace) -> int:
    from specbeam.checkpoints import locate, open_checkpoint

    checkpoint = open_checkpoint(locate(given.source, given.revision))
    facts = checkpoint.facts
    rows = {
        "source": given.source,
        "path": checkpoint.path,
        **({} if checkpoint.adapter is None else {"adapter": checkpoint.adapter.path}),
        "architecture": facts.architecture,
        "parameters": f"{facts.parameters:,}",
        "context": "unknown" if facts.context is None else f"{facts.context:,}",
        "quantization": facts.quantization,
        "size": f"{facts.size / 1e6:,.0f} MB",
        "license": facts.license or "not stated",
    }
    for name, value in rows.items():
        print(f"{name:13} {value}")
    return 0


def show_packed(given: argparse.Namespace) -> int:
    from specbeam.checkpoints import packed

    if given.clear:
        print(f"removed {packed.clear() / 1e6:,.0f} MB from {packed.folder()}")
    files = packed.files()
    width = max((len(file.path.stem) for file in files), default=0)
    for file in reversed(files):
        used = datetime.fromtimestamp(file.used).strftime("%Y-%m-%d %H:%M")
        print(f"{file.path.stem:{width}}  {file.size / 1e6:8,.0f} MB  used {used}")
    total = sum(file.size for file in files)
    print(f"[{total / 1e6:,.0f} MB of at most {packed.limit() / 1e6:,.0f} MB in {packed.folder()}]", file=sys.stderr)
    return 0
