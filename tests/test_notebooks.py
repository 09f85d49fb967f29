"""The notebooks of the documentation run from top to bottom, and are kept without outputs."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from specbeam import ladder
from specbeam.cli import main
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, random_model, reference_model

DOCS = Path(__file__).parents[1] / "docs"
TUTORIAL, EXPLORE = DOCS / "tutorial/tutorial.ipynb", DOCS / "study/explore.ipynb"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.ipynb")), ids=lambda path: path.stem)
def test_they_are_kept_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


def run_here(path):
    """Run a notebook's code in this process, without a kernel. Returns its variables."""
    notebook, variables = nbformat.read(path, as_version=4), {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            exec(compile(cell.source, f"{path.name}, cell {number}", "exec"), variables)  # cells assert what they claim
    return variables


def run_in_a_kernel(path):
    """Run a notebook as Jupyter does. Returns it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    return notebook


@pytest.fixture
def model(save):
    return save(random_model("llama", initializer_range=0.1), byte_tokenizer(CHAT_TEMPLATE))


def test_the_tutorial_runs_on_a_tiny_model(model, monkeypatch, capsys):
    monkeypatch.setenv("SPECBEAM_TUTORIAL_MODEL", str(model))
    climb = ladder.climb  # compiling is the slowest part: tests/test_ladder.py does it
    monkeypatch.setattr(ladder, "climb", lambda *given, **named: climb(*given, **named | {"rungs": [3], "runs": 1}))
    run_here(TUTORIAL)
    assert "hello world world world <UNK> <UNK>" in capsys.readouterr().out


@pytest.mark.thorough
@pytest.mark.models
def test_the_tutorial_runs(monkeypatch):
    monkeypatch.setenv("SPECBEAM_TUTORIAL_MODEL", str(reference_model("smollm2-135m-instruct")))
    notebook = run_in_a_kernel(TUTORIAL)
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    assert any("hello world world world <UNK> <UNK>" in text for text in printed)


@pytest.fixture
def run_folder(model, no_plots, tmp_path, monkeypatch):
    """A study's folder, where the notebook looks for it."""
    words = [f"target_model={model}", f"output={tmp_path / 'run'}", "decode.max_new_tokens=12", "prompts=[one,two]"]
    assert main(["study", *words, "decode.mode=[greedy,speculative,speculative-beam]"]) == 0
    monkeypatch.setenv("SPECBEAM_RUN", str(tmp_path / "run"))


def test_a_run_is_explored(run_folder, monkeypatch, capsys):
    import matplotlib

    matplotlib.use("agg")
    variables = run_here(EXPLORE)
    assert [*variables["ratios"].columns] == ["greedy", "speculative", "speculative-beam"]
    (axes,) = variables["figure"].axes
    assert len(axes.lines) == 4  # three methods, and the line at 1
    assert "speculative-beam: " in capsys.readouterr().out


@pytest.mark.thorough
def test_a_run_is_explored_in_jupyter(run_folder):
    notebook = run_in_a_kernel(EXPLORE)
    shown = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output for output in shown)
    assert any("speculative-beam" in output for output in shown)
