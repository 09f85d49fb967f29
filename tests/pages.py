"""The pages of the documentation, the code in them, and the files that they name."""

import re
import shlex
from itertools import groupby
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COOKBOOK = [page for page in PAGES if page.parent.name == "cookbook"]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
FILES = ROOT / "docs/cookbook/data"
"""Small files that pages read."""


def named(pages):
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def text_of(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    """(language, code) of each block of a page."""
    return [(language, dedent(code)) for _, language, code in BLOCK.findall(text_of(page))]


def files(page):
    """The content of the files that a page shows, by name: each block below a line that ends with the name."""
    name = r"`([\w./-]+\.\w+)`[^`\n]*:\n\n```text"
    module = r"`(\w+\.py)`[^`\n]*:\n\n```python"
    return {
        found[1]: found[2]
        for begin in (name, module)
        for found in re.finditer(rf"{begin}\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    }


def prose(page):
    """The text of a page without its blocks."""
    return BLOCK.sub("", text_of(page))


def inline_code(page):
    """The code spans of a page."""
    return re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))


def program(page):
    """The Python of a page, at the lines where it stands there."""
    text, lines = text_of(page), {}
    for found in BLOCK.finditer(text):
        if found[2] == "python":
            lines |= dict(enumerate(dedent(found[3]).splitlines(), text.count("\n", 0, found.start(3))))
    return "\n".join(lines.get(number, "") for number in range(max(lines) + 1))


def commands(code):
    """The commands of a shell block, as words, without comments and with continued lines joined."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        for is_and, command in groupby(words, lambda word: word == "&&"):
            if not is_and:
                yield list(command)


def shell(page):
    """The commands of a page: its shell blocks, and the lines after a "$ " in its transcripts."""
    for language, code in blocks(page):
        if language == "sh":
            yield from commands(code)
        if language == "text":
            joined = code.replace("\\\n", " ")
            yield from commands("\n".join(re.findall(r"^\$ (.*)", joined, re.MULTILINE)))
