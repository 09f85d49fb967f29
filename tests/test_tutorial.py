"""The tutorial runs from top to bottom, and is kept without outputs."""

from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.conftest import reference_model

NOTEBOOK = Path(__file__).parents[1] / "docs/tutorial/tutorial.ipynb"


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


@pytest.mark.models
def test_it_runs(monkeypatch):
    monkeypatch.setenv("SPECBEAM_TUTORIAL_MODEL", str(reference_model("smollm2-135m-instruct")))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    # Cells assert what they claim. Compiling is the slowest of them.
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    assert any("hello world world world <UNK> <UNK>" in text for text in printed)
