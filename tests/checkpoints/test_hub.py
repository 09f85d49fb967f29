"""Hub ids: huggingface_hub itself over a cache on disk, with no network."""

import json
import os
import shutil
import subprocess
import sys

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

import specbeam
from specbeam import SpecbeamError
from specbeam.checkpoints import locate
from tests.conftest import random_model


@pytest.fixture(scope="module")
def hub(save, tmp_path_factory):
    """HF_HOME with two revisions of one repository in its cache."""
    home = tmp_path_factory.mktemp("hf")
    repository = home / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    for branch, commit, seed in (("main", "a" * 40, 0), ("old", "b" * 40, 1)):
        (repository / "refs" / branch).write_text(commit)
        shutil.copytree(save(random_model("llama", seed=seed)), repository / "snapshots" / commit)
    return home


@pytest.fixture
def offline(hub, monkeypatch):
    """huggingface_hub without network in this process, where it has read its environment long ago."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub / "hub"))


@pytest.mark.parametrize(
    ("revision", "commit"), [(None, "a" * 40), ("main", "a" * 40), ("old", "b" * 40), ("b" * 40, "b" * 40)]
)
def test_a_hub_id_is_found_in_the_cache(hub, offline, revision, commit):
    assert locate("some/model", revision) == hub / "hub" / "models--some--model" / "snapshots" / commit


def test_a_hub_id_is_loaded(offline):
    texts = [
        specbeam.generate(specbeam.load("some/model", revision=r), "abc", max_new_tokens=8) for r in ("main", "old")
    ]
    assert texts[0].token_ids != texts[1].token_ids


def test_the_environment_of_huggingface_hub_holds_on_the_command_line(hub):
    environment = os.environ | {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "specbeam", "models", "show", "some/model", "--revision", "b" * 40]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "b" * 40 in done.stdout
    assert "llama" in done.stdout


@pytest.mark.parametrize(
    ("name", "revision", "says"),
    [
        ("other/model", None, "other/model is not in the local cache"),
        ("some/model", "never", "at revision 'never' is not in the local cache"),
    ],
)
def test_a_model_that_is_not_in_the_cache_is_named_in_one_line(offline, name, revision, says):
    with pytest.raises(SpecbeamError, match=says) as raised:
        locate(name, revision)
    assert "HF_HUB_OFFLINE is set" in str(raised.value)
    assert "\n" not in str(raised.value)


# What is downloaded


@pytest.fixture
def repository(save, tmp_path, monkeypatch):
    """Serves a folder as the repository some/model, in place of the network. Returns the folder."""
    folder = save(random_model("llama"), max_shard_size="20KB")
    cache = tmp_path / "snapshots" / ("c" * 40)

    def snapshot_download(name, revision=None, allow_patterns=None):
        assert name == "some/model"
        assert revision in (None, cache.name)
        files = [str(file.relative_to(folder)) for file in folder.rglob("*")]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, cache / file)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return folder


def test_only_the_weights_that_the_index_names_are_downloaded(repository):
    shards = {file.name for file in repository.glob("*.safetensors")}
    assert len(shards) > 3
    for extra in ("consolidated.safetensors", "model[1].safetensors", "pytorch_model.bin", "model.fp16.safetensors"):
        (repository / extra).write_bytes(b"a second copy of the weights")
    folder = locate("some/model")
    assert {file.name for file in folder.glob("*.safetensors")} == shards
    assert not (folder / "pytorch_model.bin").exists()
    assert (folder / "tokenizer.json").exists()
    assert specbeam.load("some/model").backend.vocab_size == 259


def test_without_an_index_one_file_of_weights_is_downloaded(repository, save):
    for file in repository.glob("model*"):
        file.unlink()
    random_model("llama").save_pretrained(repository)
    (repository / "consolidated.safetensors").write_bytes(b"a second copy of the weights")
    assert [file.name for file in locate("some/model").glob("*.safetensors")] == ["model.safetensors"]


def test_an_index_that_names_other_files_is_refused_before_they_are_asked_for(repository):
    index = repository / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../../other/model/model.safetensors"}}))
    with pytest.raises(SpecbeamError, match="Only files inside the folder are read"):
        locate("some/model")
