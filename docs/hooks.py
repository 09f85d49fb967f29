"""Parts of the site that come from the program itself: helps of commands, the options, and the tutorial notebook."""

import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
HELP = re.compile(r"^<!-- help: (.*) -->$", re.MULTILINE)
NOTEBOOK = re.compile(r"^<!-- notebook: (.*) -->$", re.MULTILINE)
OPTIONS = "<!-- options -->"
ROLE = re.compile(r":(?:func|class|meth|mod|data):<code>([\w.]+)</code>")


def on_page_markdown(markdown, **_):
    from specbeam.options.surfaces import table

    markdown = markdown.replace(OPTIONS, table())
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
    """The cells of a notebook and their outputs as Markdown, with headings one level further down."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = []
    for cell in cells:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            shown += [fenced(source, "python"), *map(shown_output, cell["outputs"])]
        else:
            shown.append(re.sub(r"^#", "##", source, flags=re.MULTILINE))
    return "\n\n".join(shown)


def shown_output(output):
    """An output of a cell as Markdown."""
    if output["output_type"] == "stream":
        return fenced("".join(output["text"]), "text")
    data = {kind: "".join(text) for kind, text in output["data"].items()}
    if "text/markdown" in data:
        return data["text/markdown"]
    if "image/svg+xml" in data:
        return f"<figure>\n{adapted(data['image/svg+xml'])}\n</figure>"
    return fenced(data["text/plain"], "text")


def adapted(svg):
    """A plot of matplotlib in the colours of the page: no background, and the colour of the text in place of black."""
    svg = re.sub(r"<(style|metadata).*?</\1>", "", svg, flags=re.DOTALL)  # the style would hold for the whole page
    svg = svg.replace("fill: #ffffff", "fill: none").replace("#000000", "currentColor")
    return svg.replace("<svg ", '<svg role="img" fill="currentColor" style="max-width: 100%; height: auto" ', 1)


def fenced(text, language):
    return f"```{language}\n{text.rstrip()}\n```"
