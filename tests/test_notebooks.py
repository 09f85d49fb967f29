"""The notebooks of the documentation run from top to bottom. The tutorial is kept with outputs, and they come again.

    python -m tests.test_notebooks

runs the tutorial and stores its outputs. Cells with the tag "model" need the model: without it, they run on a tiny one,
and their outputs are not compared. Cells with the tag "varies" print seconds.
"""

import ast
import contextlib
import io
import re
import tomllib
from importlib.metadata import requires

import matplotlib
import nbclient
import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs.hooks import pages_of
from specbeam import ladder
from specbeam.cli import main
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, needs_torch, random_model, reference_model
from tests.pages import ROOT

TUTORIAL, EXPLORE = ROOT / "docs/tutorial/tutorial.ipynb", ROOT / "docs/study/explore.ipynb"
SIZE = 150_000
"""Bytes of a notebook with outputs, at most. Every change of an output is kept in the repository for ever."""
HOW_TO_STORE = "if the new outputs are right, store them with: python -m tests.test_notebooks"


def code_cells(notebook, without=frozenset()):
    return [c for c in notebook.cells if c.cell_type == "code" and not {*c.metadata.get("tags", ())} & without]


def run_here(path):
    """Run a notebook's code in this process, without a kernel. Returns its variables, and it with outputs."""
    notebook, variables = nbformat.read(path, as_version=4), {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            program = ast.parse(cell.source, f"{path.name}, cell {number}")
            last = ast.Expression(program.body.pop().value) if isinstance(program.body[-1], ast.Expr) else None
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(program, f"{path.name}, cell {number}", "exec"), variables)  # cells assert what they claim
                value = last and eval(compile(last, f"{path.name}, cell {number}", "eval"), variables)
            shown = {"text/markdown": value.data} if hasattr(value, "_repr_markdown_") else {}
            if hasattr(value, "_repr_svg_"):
                shown = {"image/svg+xml": value.data}
            cell.outputs = [nbformat.v4.new_output("stream", text=printed.getvalue())] if printed.getvalue() else []
            cell.outputs += [nbformat.v4.new_output("execute_result", data=shown)] if shown else []
    return variables, notebook


def run_in_a_kernel(path):
    """Run a notebook as Jupyter does. Returns it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    nbclient.NotebookClient(notebook, timeout=1200, kernel_name="python3", record_timing=False).execute()
    notebook.metadata = metadata  # without the version of Python
    return notebook


def shown(cell):
    """The outputs of a cell: texts, and the kinds of pictures, which differ between versions of matplotlib."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.name, output.text
        else:
            kind = next(kind for kind in ("text/markdown", "image/svg+xml", "text/plain") if kind in output.data)
            yield kind, "" if kind.startswith("image/") else output.data[kind]


NUMBER = re.compile(r"-?\d+\.\d+")


def assert_equal_outputs(stored, came, without):
    """Texts and counts are equal. Numbers with a point were rounded, on this machine or on another one."""
    for cell, now in zip(code_cells(stored, without), code_cells(came, without), strict=True):
        (*old,), (*new,) = shown(cell), shown(now)
        blanked = [[(kind, NUMBER.sub("_", text)) for kind, text in outputs] for outputs in (old, new)]
        assert blanked[0] == blanked[1], f"{cell.source}\n\n{HOW_TO_STORE}"
        numbers = [[float(n) for _, text in outputs for n in NUMBER.findall(text)] for outputs in (old, new)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.011), f"{cell.source}\n\n{HOW_TO_STORE}"


def test_the_tutorial_is_kept_as_it_runs_from_top_to_bottom():
    notebook = nbformat.read(TUTORIAL, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], HOW_TO_STORE
    assert {name for cell in cells for name, _ in shown(cell)} == {"stdout", "text/markdown", "image/svg+xml"}
    assert TUTORIAL.stat().st_size < SIZE


def test_the_site_shows_code_outputs_and_the_plot_in_the_colours_of_the_page():
    page = pages_of(TUTORIAL)
    assert "\n```text\nhello world world world <UNK> <UNK>\n```" in page
    assert "\n```python\ndef greedy(" in page
    (svg,) = re.findall(r"<figure>\n(<svg .*?</svg>)\n</figure>", page, re.DOTALL)
    assert re.search(r"<title>\w", svg)
    assert "currentColor" in svg
    assert not re.search(r"<style|#000000|fill: #ffffff", svg)


def test_every_exercise_has_a_solution_that_runs():
    notebook = nbformat.read(TUTORIAL, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    exercises = re.findall(r"\*\*Exercise (\d+)\.\*\*", text)
    assert exercises == [str(number) for number in range(1, len(exercises) + 1)]
    assert re.findall(r"\(\[Solution\]\(#solution-(\d+)\)\)", text) == exercises
    assert re.findall(r"^### Solution (\d+)$", text, re.MULTILINE) == exercises
    for cell, following in zip(notebook.cells, notebook.cells[1:], strict=False):
        assert "### Solution" not in cell.source or following.cell_type == "code"


def packages(requirements):
    """The names of the packages that these requirements bring here, with all that they require in turn."""
    found, rest = set(), [Requirement(text) for text in requirements]
    while rest:
        one = rest.pop()
        for extra in ("", *one.extras):
            if (key := (canonicalize_name(one.name), extra)) not in found:
                found.add(key)
                more = [Requirement(text) for text in requires(one.name) or ()]
                rest += [r for r in more if r.marker is None or r.marker.evaluate({"extra": extra})]
    return {name for name, _ in found}


@needs_torch
def test_the_extra_brings_as_many_packages_as_the_page_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core, extra = project["dependencies"], project["optional-dependencies"]["tutorial"]
    added = packages([*core, *extra]) - packages(core) - {"specbeam", "setuptools"}  # environments have setuptools
    (said,) = re.findall(r"adds (\d+) packages", (TUTORIAL.parent / "README.md").read_text())
    assert len(added) == int(said), sorted(added)
    pinned = {
        canonicalize_name(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert added <= pinned


def test_the_other_notebook_is_kept_without_outputs():
    """It shows a run of the reader's own."""
    notebook = nbformat.read(EXPLORE, as_version=4)
    nbformat.validate(notebook)
    assert [(cell.outputs, cell.execution_count) for cell in code_cells(notebook)] == [([], None)] * len(
        code_cells(notebook)
    )


@pytest.fixture
def model(save):
    return save(random_model("llama", initializer_range=0.1), byte_tokenizer(CHAT_TEMPLATE))


def test_the_tutorial_runs_on_a_tiny_model(model, monkeypatch):
    """Sources, plots and exercises are shown as they are stored."""
    monkeypatch.setenv("SPECBEAM_TUTORIAL_MODEL", str(model))
    climb = ladder.climb  # compiling is the slowest part: tests/test_ladder.py does it
    monkeypatch.setattr(ladder, "climb", lambda *given, **named: climb(*given, **named | {"rungs": [3], "runs": 1}))
    _, came = run_here(TUTORIAL)
    assert_equal_outputs(nbformat.read(TUTORIAL, as_version=4), came, {"model", "varies"})


@pytest.mark.thorough
@pytest.mark.models
def test_the_outputs_of_the_tutorial_come_again(monkeypatch):
    monkeypatch.setenv("SPECBEAM_TUTORIAL_MODEL", str(reference_model("smollm2-135m-instruct")))
    assert_equal_outputs(nbformat.read(TUTORIAL, as_version=4), run_in_a_kernel(TUTORIAL), {"varies"})


@pytest.fixture
def run_folder(model, no_plots, tmp_path, monkeypatch):
    """A study's folder, where the notebook looks for it."""
    words = [f"target_model={model}", f"output={tmp_path / 'run'}", "decode.max_new_tokens=12", "prompts=[one,two]"]
    assert main(["study", *words, "decode.mode=[greedy,speculative,speculative-beam]"]) == 0
    monkeypatch.setenv("SPECBEAM_RUN", str(tmp_path / "run"))


def test_a_run_is_explored(run_folder):
    matplotlib.use("agg")
    variables, notebook = run_here(EXPLORE)
    assert [*variables["ratios"].columns] == ["greedy", "speculative", "speculative-beam"]
    (axes,) = variables["figure"].axes
    assert len(axes.lines) == 4  # three methods, and the line at 1
    assert "speculative-beam: " in str(notebook.cells[-1].outputs)


@pytest.mark.thorough
def test_a_run_is_explored_in_jupyter(run_folder):
    notebook = run_in_a_kernel(EXPLORE)
    outputs = [str(output) for cell in code_cells(notebook) for output in cell.outputs]
    assert any("image/png" in output for output in outputs)
    assert any("speculative-beam" in output for output in outputs)


if __name__ == "__main__":
    nbformat.write(run_in_a_kernel(TUTORIAL), TUTORIAL)
