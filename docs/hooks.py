"""Parts of the site that come from the program itself: the help of each command, and the tutorial notebook."""

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
HELP = re.compile(r"^<!-- help: (.*) -->$", re.MULTILINE)
NOTEBOOK = re.compile(r"^<!-- notebook: (.*) -->$", re.MULTILINE)
ROLE = re.compile(r":(?:func|class|meth|mod|data):<code>([\w.]+)</code>")


def on_page_markdown(markdown, **_):
    markdown = HELP.sub(lambda found: fenced(help_of(found[1].split()), "text"), markdown)
    return NOTEBOOK.sub(lambda found: pages_of(DOCS / found[1]), markdown)


def on_page_content(html, **_):
    """Docstrings link as Sphinx does, :func:`specbeam.load`: make links of that."""
    return ROLE.sub(r'<autoref identifier="\1" optional><code>\1</code></autoref>', html)


def help_of(words):
    """The output of ``specbeam WORDS --help``, 80 characters wide."""
    import contextlib
    import io
    import os

    from specbeam.cli import main

    os.environ["COLUMNS"] = "80"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return printed.getvalue()


def pages_of(notebook):
    """The cells of a notebook as Markdown, with headings one level further down."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = []
    for cell in cells:
        source = "".join(cell["source"])
        code = cell["cell_type"] == "code"
        shown.append(fenced(source, "python") if code else re.sub(r"^#", "##", source, flags=re.MULTILINE))
    return "\n\n".join(shown)


def fenced(text, language):
    return f"```{language}\n{text.rstrip()}\n```"
