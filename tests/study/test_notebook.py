"""The notebook that explores a run does so, and is kept without outputs."""

from pathlib import Path

import nbclient
import nbformat

from specbeam.cli import main
from tests.conftest import CHAT_TEMPLATE, byte_tokenizer, random_model

NOTEBOOK = Path(__file__).parents[2] / "docs/study/explore.ipynb"


def test_it_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)


def test_it_explores_a_run(save, tmp_path, monkeypatch):
    model = save(random_model("llama", initializer_range=0.1), byte_tokenizer(CHAT_TEMPLATE))
    words = [f"target_model={model}", f"output={tmp_path / 'run'}", "decode.max_tokens=12", "prompts=[one,two]"]
    assert main(["study", *words]) == 0
    monkeypatch.setenv("SPECBEAM_RUN", str(tmp_path / "run"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output for output in shown)
    assert any("hybrid" in output for output in shown)
