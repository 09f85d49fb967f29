"""A recording as a page of its own: one HTML file, which replays the run without a server, a model or a network.

The file holds the scripts and the style of the server's page, and the recording.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable
from pathlib import Path

from specbeam.options.surfaces import page_script
from specbeam.recording.events import Event, event_line

PAGE = Path(__file__).parents[1] / "page"
"""The files of the server's page. They are here because a replay, too, is made of them, and needs no server."""
IMPORT = re.compile(r'from "\./([\w/.]+)"')
"""An import of another script. A script in a ``data:`` URL has no folder, so there it gets a name without one."""
TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<link rel="icon" href="{icon}">
<style>{style}</style>
<script type="application/jsonl" id="recording">
{recording}</script>
<script type="importmap">{imports}</script>
<script type="module">import "page/app.js";</script>
</head>
<body>
<div id="app"><noscript>This replay needs JavaScript.</noscript></div>
</body>
</html>
"""
POLICY = "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data:"


def replay_page(recording: Iterable[Event], title: str) -> str:
    """The page that replays a recording.

    Args:
        recording: the events, as :func:`specbeam.recording.events.events` yields them.
    """

    def read(name: str) -> str:
        return (PAGE / name).read_text(encoding="utf-8")

    names = ["vendor/preact.js", *sorted(file.name for file in PAGE.glob("*.js"))]
    texts = {"declared.js": page_script(), **{name: read(name) for name in names}}
    scripts = {f"page/{name}": IMPORT.sub(r'from "page/\1"', text) for name, text in texts.items()}
    lines = "".join(f"{event_line(event)}\n" for event in recording)
    return TEMPLATE.format(
        policy=POLICY,
        title=html.escape(title),
        icon=data_url("image/svg+xml", read("icon.svg")),
        style=read("style.css"),
        recording=lines.replace("<", r"\u003c"),  # it stands in strings only, and could end the element
        imports=json.dumps({"imports": {name: data_url("text/javascript", text) for name, text in scripts.items()}}),
    )


def data_url(kind: str, text: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(text.encode()).decode()}"
