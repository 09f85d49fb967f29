"""The notebooks of the documentation run from top to bottom, and are kept without outputs."""

from pathlib import Path

import nbclient
import nbformat
import pytest

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


@pytest.mark.models
def test_the_tutorial_runs(monkeypatch):
    monkeypatch.setenv("SPECBEAM_TUTORIAL_MODEL", str(reference_model("smollm2-135m-instruct")))
    notebook = nbformat.read(TUTORIAL, as_version=4)
    # Cells assert what they claim. Compiling is the slowest of them.
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    printed = [output.text for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output]
    assert any("hello world world world <UNK> <UNK>" in text for text in printed)


def test_a_run_is_explored(save, tmp_path, monkeypatch):
    model = save(random_model("llama", initializer_range=0.1), byte_tokenizer(CHAT_TEMPLATE))
    words = [f"target_model={model}", f"output={tmp_path / 'run'}", "decode.max_tokens=12", "prompts=[one,two]"]
    assert main(["study", *words]) == 0
    monkeypatch.setenv("SPECBEAM_RUN", str(tmp_path / "run"))
    notebook = nbformat.read(EXPLORE, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output for output in shown)
    assert any("hybrid" in output for output in shown)
