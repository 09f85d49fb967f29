"""``specbeam demo``: the page of the server in the browser, on a small model."""

from __future__ import annotations

import argparse
import os
import sys
import webbrowser
from typing import Any

from specbeam.cli import serve
from specbeam.cli.arguments import add_source_to

MAX_BEAMS = 64


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="watch beams grow and drafts get accepted, in the browser",
        description="Start the server on this machine with a small model, and open its page. Ctrl-C ends it.",
    )
    add_source_to(parser)
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 takes any free one (default %(default)s)"
    )
    parser.add_argument(
        "--browser", action=argparse.BooleanOptionalAction, default=True, help="open the page in the browser (default)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    parser = argparse.ArgumentParser()
    serve.add_to(parser.add_subparsers())
    words = ["--draft", "ngram", "--draft", "suffix", "--max-beams", str(MAX_BEAMS), "--port", str(args.port)]
    return serve.run(parser.parse_args(["serve", "--model", args.model, *words]), open_page if args.browser else None)


def open_page(url: str) -> None:
    """Open a page in a window. Without windows, its address on the terminal must do."""
    if sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        webbrowser.open(url)
