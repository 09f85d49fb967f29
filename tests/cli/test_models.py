"""``specbeam models``."""

from pathlib import Path

from specbeam.checkpoints import registry
from specbeam.cli import main
from tests.checkpoints.test_registry import WHOLE, index  # noqa: F401  (a fixture)
from tests.conftest import random_model


def test_list_names_the_aliases(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path))
    assert main(["models", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(registry.ALIASES)
    assert "98 MB" in lines[0]
    assert "not fetched" in lines[0]


def test_pull_prints_the_path_of_the_model(capsys, index):  # noqa: F811
    assert main(["models", "pull", "toy"]) == 0
    assert Path(capsys.readouterr().out.strip()).read_bytes() == WHOLE


def test_show_describes_a_folder(capsys, save):
    folder = save(random_model("qwen3"))
    assert main(["models", "show", str(folder)]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert rows["architecture"] == "qwen3"
    assert rows["parameters"] == f"{random_model('qwen3').num_parameters():,}"
    assert (rows["context"], rows["quantization"], rows["license"]) == ("256", "float32", "not stated")


def test_show_of_a_damaged_file_is_refused(capsys, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"hello")
    assert main(["models", "show", str(tmp_path / "x.gguf")]) == 2
    assert "not a GGUF file" in capsys.readouterr().err
