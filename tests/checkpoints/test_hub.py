"""Hub ids: huggingface_hub itself over a cache on disk, with no network."""

import os
import shutil
import subprocess
import sys

import pytest

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


def run(hub, *arguments):
    environment = os.environ | {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-m", "specbeam", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_hub_id_is_found_in_the_cache(hub):
    generate = ("generate", "abc", "--model", "some/model", "--max-new-tokens", "8")
    main = run(hub, *generate)
    assert main.returncode == 0, main.stderr
    old = run(hub, *generate, "--revision", "old")
    assert old.returncode == 0, old.stderr
    assert main.stdout != old.stdout
    show = run(hub, "models", "show", "some/model", "--revision", "b" * 40)
    assert "b" * 40 in show.stdout
    assert "llama" in show.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("models", "pull", "other/model"), "other/model is not in the local cache"),
        (("models", "pull", "some/model", "--revision", "never"), "at revision 'never' is not in the local cache"),
    ],
)
def test_what_is_not_in_the_cache_is_said_in_one_line(hub, arguments, says):
    done = run(hub, *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert len(done.stderr.splitlines()) == 1
