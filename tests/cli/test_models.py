"""``specbeam models``."""

import json
import math
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Type
from huggingface_hub import constants

from specbeam.checkpoints.sources import registry
from specbeam.cli import main
from specbeam.cli import models as command
from specbeam.system.machine import Memory
from tests.checkpoints.test_gguf import write_gguf
from tests.checkpoints.test_registry import WHOLE, arrived, index  # noqa: F401  (fixtures)
from tests.conftest import random_model


@pytest.fixture(autouse=True)
def empty_hub_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def models(capsys):
    """Runs an action that succeeds. Returns its output."""

    def models(*arguments):
        assert main(["models", *map(str, arguments)]) == 0
        return capsys.readouterr().out

    return models


@pytest.fixture
def laptop(monkeypatch):
    """A machine with 8 GB of memory, which reads 10 GB of it per second."""
    monkeypatch.setattr(command, "usable_memory", lambda: Memory(8 * 10**9, 10**9))
    monkeypatch.setattr(command, "reading_speeds", lambda threads, size, repeats: [1e10])


def test_list_begins_with_what_fits_into_memory_the_best_first(models, capsys, laptop, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path))
    assert main(["models", "list"]) == 0
    out, err = capsys.readouterr()
    title, *lines = out.splitlines()
    assert title.split() == ["model", "size", "memory", "tokens/s", "license", "chats"]
    names = [line.split()[0] for line in lines]
    too_large = [line.split()[0] for line in lines if " too large " in line]
    fitting = [name for name in registry.ALIASES if registry.ALIASES[name].memory <= 16e9 / 3]
    assert names == fitting + [name for name in registry.ALIASES if name not in fitting]
    assert too_large == names[len(fitting) :]
    second = "gemma4-e4b-it 4,591 MB 3,376 MB 2 apache-2.0 yes not fetched Gemma 4 E4B Instruct, Q4_0, text only"
    assert " ".join(lines[1].split()) == second
    assert "[memory: 8.0 GB, of which a model should take two thirds at most, read at 10 GB/s]" in err


def test_the_documentation_has_the_list_of_a_laptop_of_8_gb(models, laptop, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path))
    rows = ["| model | to fetch | memory | tokens/s per GB/s | license | |", "| --- | --- | --- | --- | --- | --- |"]
    for name in [line.split()[0] for line in models("list").splitlines()[1:]]:
        alias = registry.ALIASES[name]
        speed = f"{0.8e9 / alias.bytes_per_token:.2g}" if alias.bytes_per_token else ""
        sizes = f"{alias.size / 1e6:,.0f} MB | {alias.memory / 1e6:,.0f} MB"
        rows.append(f"| `{name}` | {sizes} | {speed} | {alias.license} | {alias.description} |")
    assert "\n".join(rows) in (Path(__file__).parents[2] / "docs/models.md").read_text()


def test_what_a_token_reads_of_a_model_on_this_machine_is_listed(models, save, monkeypatch, tmp_path):
    """All matrices, but no embedding that is not the head."""
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path))
    for tied in (True, False):
        model = random_model("llama", tie_word_embeddings=tied, intermediate_size=64)
        write_gguf(tmp_path / f"models/{tied}.gguf", model, Type.Q8_0)
        left_out = "lm_head.weight" if tied else "model.embed_tokens.weight"
        read = sum(math.prod(one.shape) for name, one in model.state_dict().items() if name != left_out)
        (found,) = [one for one in json.loads(models("list", "--json")) if one["name"].endswith(f"{tied}.gguf")]
        assert found["bytes_per_token"] == pytest.approx(read * 34 / 32, rel=0.1)


def test_show_describes_a_folder(models, save):
    rows = dict(line.split(None, 1) for line in models("show", save(random_model("qwen3"))).splitlines())
    assert rows["architecture"] == "qwen3"
    assert rows["parameters"] == f"{random_model('qwen3').num_parameters():,}"
    assert (rows["context"], rows["quantization"], rows["license"]) == ("256", "float32", "not stated")
    assert rows["generation"] == "not stated"


def test_show_lists_the_generation_settings(models, save):
    model = random_model("llama")
    model.generation_config.update(num_beams=4, min_length=56, use_cache=True, no_repeat_ngram_size=3)
    folder = save(model)
    rows = dict(line.split(None, 1) for line in models("show", folder).splitlines())
    assert rows["generation"] == "no_repeat_ngram_size=3, min_length=56, num_beams=4"
    settings = {"min_length": 56, "no_repeat_ngram_size": 3, "num_beams": 4}
    assert json.loads(models("show", folder, "--json"))["generation"] == settings


def test_show_of_a_damaged_file_is_refused(capsys, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"hello")
    assert main(["models", "show", str(tmp_path / "x.gguf")]) == 2
    assert "not a GGUF file" in capsys.readouterr().err


def test_an_alias_is_shown_without_fetching_it(capsys, index, tmp_path):  # noqa: F811
    assert main(["models", "show", "toy"]) == 0
    out, err = capsys.readouterr()
    rows = {name: value.strip() for name, value in (line.split("  ", 1) for line in out.splitlines())}
    facts = {"size to fetch": "0 MB", "memory": "3 MB", "license": "mit", "chats": "no", "description": "a toy"}
    assert rows == {"source": "toy", **facts}
    assert "specbeam models pull toy" in err
    assert not (tmp_path / "home" / "models").exists()


def test_sizes_on_disk_and_as_json(models, arrived, folder):  # noqa: F811
    def listed():
        (toy,) = [model for model in json.loads(models("list", "--json")) if model["name"] == "toy"]
        return toy["path"], toy["bytes_on_disk"], toy["bytes_to_fetch"]

    assert listed() == (None, 0, len(WHOLE))
    arrived()
    path = models("pull", "toy").strip()
    assert Path(path).read_bytes() == WHOLE
    assert listed() == (path, len(WHOLE), 0)
    shown = json.loads(models("show", folder, "--json"))
    assert shown["memory"] > 0
    assert (shown["size"], shown["packed_weights"]) == ((Path(folder) / "model.safetensors").stat().st_size, 0)


def test_rm_removes_a_fetched_alias_and_nothing_else(models, capsys, arrived, tmp_path, folder):  # noqa: F811
    arrived()
    models("pull", "toy")
    packed = tmp_path / "home/packed" / f"toy-keep-{'0' * 16}.weights"
    packed.parent.mkdir()
    packed.write_bytes(b"z" * 2_000_000)
    assert models("rm", "toy").splitlines() == [
        f"removed toy: 0 MB from {tmp_path / 'home/models'}",
        f"removed its packed weights: 2 MB from {packed.parent}",
    ]
    assert [file for file in (tmp_path / "home").rglob("*") if file.is_file() and file.suffix != ".lock"] == []
    assert main(["models", "rm", "toy"]) == 2
    assert "toy is not on this machine" in capsys.readouterr().err
    assert main(["models", "rm", str(folder)]) == 2
    assert "Files and folders of your own are yours to remove" in capsys.readouterr().err
    assert (Path(folder) / "config.json").exists()


@pytest.mark.parametrize("linked", ["toy.gguf", "toy.wheels"])
def test_rm_of_an_alias_removes_nothing_if_a_part_is_a_link(models, capsys, arrived, tmp_path, linked):  # noqa: F811
    arrived()
    models("pull", "toy")
    folder, disk = tmp_path / "home/models", tmp_path / "disk"
    (folder / "toy.wheels").mkdir(exist_ok=True)
    (folder / linked).rename(disk)
    (folder / linked).symlink_to(disk)
    assert main(["models", "rm", "toy"]) == 2
    assert f"{linked} is a link to {disk}: remove both yourself. Nothing was removed" in capsys.readouterr().err
    assert (folder / "toy.gguf").read_bytes() == WHOLE


def test_list_shows_files_that_somebody_has_put_into_the_folder(models, monkeypatch, tmp_path):
    """Also under the name of an alias that the hub has, and a damaged one."""
    (folder := tmp_path / "models").mkdir()
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path))
    write_gguf(folder / "qwen3-4b.gguf", random_model("qwen3"))
    (folder / "damaged.gguf").write_bytes(b"hello")
    found = {model["name"]: model for model in json.loads(models("list", "--json"))}
    mine, damaged = found[str(folder / "qwen3-4b.gguf")], found[str(folder / "damaged.gguf")]
    assert (mine["from"], mine["bytes_on_disk"]) == ("file", (folder / "qwen3-4b.gguf").stat().st_size)
    assert mine["description"].startswith("qwen3, ")
    assert mine["memory"] > 0
    assert found["qwen3-4b"]["path"] is None
    assert damaged["memory"] is None
    assert "cannot be loaded: " in damaged["description"]
    assert str(folder / "damaged.gguf") in models("list")
