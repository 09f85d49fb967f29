"""Hub ids: huggingface_hub itself over a cache on disk, with no network."""

import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import filter_repo_objects

import specbeam
from specbeam import SpecbeamError
from specbeam.checkpoints import locate
from specbeam.checkpoints.sources import packed
from specbeam.cli import main
from tests.backends.test_whisper import random_whisper
from tests.checkpoints.test_ctranslate2 import write
from tests.checkpoints.test_gguf import write_gguf
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
    monkeypatch.setenv("HF_HUB_CACHE", str(hub / "hub"))


@pytest.mark.parametrize(
    ("revision", "commit"), [(None, "a" * 40), ("main", "a" * 40), ("old", "b" * 40), ("b" * 40, "b" * 40)]
)
def test_a_hub_id_is_found_in_the_cache(hub, offline, revision, commit):
    assert locate("some/model", revision) == hub / "hub" / "models--some--model" / "snapshots" / commit


def test_a_hub_id_is_loaded(offline):
    lms = [specbeam.load("some/model", revision=revision) for revision in ("main", "old")]
    one, other = (specbeam.generate(lm, "abc", max_new_tokens=8).token_ids for lm in lms)
    assert one != other
    assert [pickle.loads(pickle.dumps(lm)).weights for lm in lms] == [lm.weights for lm in lms]  # of its revision


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


PULL = "import sys; from specbeam.cli import main; print([main(['models', 'pull', one]) for one in sys.argv[1:]])"


@pytest.mark.parametrize(
    ("listens", "offline", "sources"),
    [
        (True, "0", ["org/m"]),
        (False, "0", ["some/model", "org/m", "org/m:Q8_0", "org/m:m.gguf"]),
        (False, "1", ["some/model"]),
    ],
)
def test_a_hub_that_does_not_answer_is_asked_once_and_the_cache_is_used(hub, listens, offline, sources):
    """The cache that the environment of huggingface_hub names, which is read by a process that begins.

    huggingface_hub writes a line for each further time that it asks, and waits for seconds, or without end.
    """
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        address = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "NO_PROXY": "127.0.0.1"}
        how = {"HF_HOME": str(hub), "HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_OFFLINE": offline}
        environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_CACHE"} | address | how
        command = [sys.executable, "-c", PULL, *sources]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    kept = [source == "some/model" for source in sources]
    assert done.stdout.splitlines()[-1] == str([0 if found else 2 for found in kept])
    assert ("a" * 40 in done.stdout) is any(kept)
    lines = done.stderr.splitlines()
    assert len(lines) == kept.count(False)
    says = r"org/m is not in the local cache and cannot be fetched \(\w+: .*\): check the network"
    assert all(re.search(says, line) for line in lines)


# What is downloaded


@pytest.fixture
def repository(save, tmp_path, monkeypatch):
    """Serves a folder as the repository some/model, in place of the network. Returns the folder."""
    folder = save(random_model("llama"), max_shard_size="20KB")
    cache = tmp_path / "snapshots" / ("c" * 40)

    def model_info(name, revision=None, timeout=None):
        assert timeout is not None

    def list_repo_files(name, revision=None):
        assert (name, revision) in (("some/model", None), ("some/model", cache.name))
        return [str(file.relative_to(folder)) for file in folder.rglob("*")]

    def snapshot_download(name, revision=None, allow_patterns=None, local_files_only=False):
        for file in filter_repo_objects(list_repo_files(name, revision), allow_patterns=allow_patterns):
            (cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / file, cache / file)
        return str(cache)

    def hf_hub_download(name, file, revision=None, local_files_only=False):
        if file not in list_repo_files(name, revision):
            raise EntryNotFoundError(f"404: no file {file}")
        snapshot_download(name, revision, [file])
        return str(cache / file)

    for function in (model_info, list_repo_files, snapshot_download, hf_hub_download):
        monkeypatch.setattr(huggingface_hub, function.__name__, function)
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


def test_one_file_of_weights_is_downloaded_in_place_of_the_files_of_an_index_as_in_transformers(repository):
    random_model("llama").save_pretrained(one := repository.parent / "one")
    shutil.copy(one / "model.safetensors", repository)
    assert (repository / "model.safetensors.index.json").is_file()
    assert [file.name for file in locate("some/model").glob("*.safetensors")] == ["model.safetensors"]


def test_an_index_that_names_other_files_is_refused_before_they_are_asked_for(repository):
    index = repository / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../../other/model/model.safetensors"}}))
    with pytest.raises(SpecbeamError, match="Only files inside the folder are read"):
        locate("some/model")


# Repositories of CTranslate2


@pytest.fixture
def converted(repository):
    """The repository, as CTranslate2 has converted a Whisper, with other files that nobody reads."""
    for file in repository.glob("*"):
        file.unlink()
    write(repository, random_whisper(), "float16")
    for name in ("tokenizer.json", "preprocessor_config.json", "README.md"):
        (repository / name).write_text("{}")
    for name in ("pytorch_model.bin", "model.pt", "optimizer.bin", "vocabulary.pkl"):
        (repository / name).write_bytes(b"never read")
    return repository


@pytest.mark.parametrize("vocabulary", ["vocabulary.txt", "vocabulary.json"])
def test_of_a_repository_of_ctranslate2_what_is_read_is_downloaded(converted, vocabulary):
    (converted / "vocabulary.txt").rename(converted / vocabulary)
    folder = locate("some/model")
    read = {"config.json", "model.bin", "tokenizer.json", "preprocessor_config.json", "README.md", vocabulary}
    assert {file.name for file in folder.iterdir()} == read
    if vocabulary == "vocabulary.txt":
        (folder / "tokenizer.json").unlink()
        assert specbeam.load(folder).backend.features_shape is not None


def test_a_model_bin_is_downloaded_of_a_repository_of_ctranslate2_without_safetensors_alone(converted):
    (converted / "vocabulary.txt").unlink()  # this may be a pickle
    assert not (locate("some/model") / "model.bin").exists()
    (converted / "vocabulary.txt").write_text("a")
    (converted / "model.safetensors").write_bytes(b"as today")
    folder = locate("some/model")
    assert (folder / "model.safetensors").exists()
    assert not (folder / "model.bin").exists()


# GGUF files


@pytest.fixture
def quantized(repository):
    """The repository, with GGUF files in place of other weights."""
    for file in repository.glob("*.safetensors*"):
        file.unlink()
    (repository / "old").mkdir(exist_ok=True)
    for name in ("m-Q4_K_M", "m-Q4_K_S", "m-IQ4_K_M", "m.Q8_0", "old/m-F16", "mmproj-Q4_K_M", "old/m.Q8_0"):
        (repository / f"{name}.gguf").write_bytes(name.encode())
    (repository / "m-BF16-00001-of-00002.gguf").write_bytes(b"half")
    yield repository
    shutil.rmtree(repository / "old")


@pytest.mark.parametrize(
    ("pick", "file"),
    [
        ("m-Q4_K_M.gguf", "m-Q4_K_M"),
        ("Q4_K_M", "m-Q4_K_M"),
        ("q4_k_s", "m-Q4_K_S"),
        ("IQ4_K_M", "m-IQ4_K_M"),
        ("old/m-F16.gguf", "old/m-F16"),
        ("F16", "old/m-F16"),
    ],
)
def test_one_gguf_file_is_downloaded_by_name_or_quantization(quantized, pick, file):
    path = locate(f"some/model:{pick}")
    assert path.read_bytes() == file.encode()
    assert [other.name for other in path.parent.rglob("*.gguf")] == [path.name]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("some/model:Q4_K", "has no GGUF file of Q4_K: give some/model:FILE or .* m-Q4_K_M.gguf, m-Q4_K_S.gguf"),
        ("some/model:Q8_0", "has 2 GGUF files of Q8_0: .*m.Q8_0.gguf, old/m-F16.gguf, old/m.Q8_0.gguf"),
        ("some/model", "has 7 GGUF files: give some/model:FILE or some/model:QUANTIZATION"),
        ("some/model:BF16", "m-BF16-00001-of-00002.gguf is one part of a split model"),
        ("some/model:other.gguf", "has no such file: 404: no file other.gguf"),
        ("some/model:../../other.gguf", "there is no file or folder"),
    ],
)
def test_a_file_that_cannot_be_picked_is_refused_with_the_choices(quantized, source, says):
    with pytest.raises(SpecbeamError, match=says):
        locate(source)


def test_a_repository_with_one_gguf_file_is_that_file(quantized, tmp_path):
    for file in quantized.rglob("*.gguf"):
        file.unlink()
    write_gguf(quantized / "m-Q8_0.gguf", random_model("llama"))
    assert specbeam.load("some/model").backend.vocab_size == 259


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A cache with two models, one of them a GGUF file as huggingface_hub keeps it. Returns the folder."""
    for name, content in (("org--m", b"x" * 3_000_000), ("org--m-7b", b"y" * 1_000_000)):
        repository, commit = tmp_path / f"models--{name}", "d" * 40
        for folder in ("refs", "blobs", f"snapshots/{commit}"):
            (repository / folder).mkdir(parents=True)
        (repository / "refs/main").write_text(commit)
        (repository / "blobs/1").write_bytes(content)
        (repository / f"snapshots/{commit}/m-Q4_K_M.gguf").symlink_to("../../blobs/1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "home"))
    return tmp_path


def test_without_network_a_gguf_file_is_found_in_the_cache_and_one_that_is_not_there_is_named(kept):
    for pick in (":Q4_K_M", ":m-Q4_K_M.gguf", ""):
        assert locate(f"org/m-7b{pick}").read_bytes() == b"y" * 1_000_000
    with pytest.raises(SpecbeamError, match="org/m has no GGUF file of Q8_0"):
        locate("org/m:Q8_0")
    with pytest.raises(SpecbeamError, match="org/m is not in the local cache and cannot be fetched"):
        locate("org/m:m-Q8_0.gguf")


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        *((HfHubHTTPError, status, None) for status in (429, 500, 503)),
        (GatedRepoError, 404, "org/m-7b is gated"),
        (RepositoryNotFoundError, 404, "the hub has no org/m-7b, or it is private"),
        (RevisionNotFoundError, 404, "the hub has no org/m-7b"),
    ],
)
def test_the_cache_is_used_while_the_hub_is_down_and_not_if_it_says_more(kept, monkeypatch, error, status, says):
    response = httpx.Response(status, request=httpx.Request("GET", "https://hub"))

    def refuse(name, revision=None, timeout=None):
        raise error(f"{status} for {name}", response=response)

    for function in ("model_info", "list_repo_files"):
        monkeypatch.setattr(huggingface_hub, function, refuse)
    if says is None:
        assert locate("org/m-7b:Q4_K_M").read_bytes() == b"y" * 1_000_000
    source = "org/m-7b:Q4_K_M" if says else "other/m:Q4_K_M"
    with pytest.raises(SpecbeamError, match=says or rf"cannot be fetched \(HfHubHTTPError: {status} for other/m\)"):
        locate(source)


@pytest.fixture
def models(capsys):
    """Runs a command about models. Returns what it prints, or how it refuses."""

    def models(*words, refuses=False):
        status = main(["models", *words])
        out, err = capsys.readouterr()
        assert (status, bool(out)) == ((2, False) if refuses else (0, True))
        return err if refuses else out

    return models


def write_packed_weights(kept, labels):
    """Files of 500 kB in the folder of packed weights. Returns them."""
    (folder := kept / "home/packed").mkdir(parents=True)
    files = [folder / f"{label}-int8-{'0' * 32}.weights" for label in labels]
    for file in files:
        file.write_bytes(b"z" * 500_000)
    return files


def test_models_of_the_hub_are_listed_and_removed_with_their_packed_weights(kept, models):
    files = write_packed_weights(kept, [f"models--org--{name}" for name in ("m", "m--m-Q4_K_M", "m-7b")])
    found = {model["name"]: model for model in json.loads(models("list", "--json"))}
    assert [found[name]["bytes_on_disk"] // 1_000_000 for name in ("org/m", "org/m-7b")] == [3, 1]
    first, second = models("rm", "org/m").splitlines()
    assert first == f"removed org/m: 3 MB from {kept / 'models--org--m'}"
    assert second == f"removed its packed weights: 1 MB from {kept / 'home/packed'}"
    assert not (kept / "models--org--m").exists()
    assert (kept / "models--org--m-7b/blobs/1").exists()
    assert [file.exists() for file in files] == [False, False, True]
    assert "org/m is no fetched model" in models("rm", "org/m", refuses=True)


def test_only_the_named_repository_is_removed_of_several_with_one_commit(tmp_path, monkeypatch, models):
    """Each in turn, of many: huggingface_hub looks for a commit in a set, whose order is by chance."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    names = ["gpt2", *(f"org-{i}/gpt2" for i in range(8))]
    left = {name: tmp_path / f"models--{name.replace('/', '--')}" for name in names}
    data = [tmp_path / f"datasets--org-{i}--gpt2" for i in range(8)]
    for folder in [*left.values(), *data]:
        (snapshot := folder / "snapshots" / ("c" * 40)).mkdir(parents=True)
        (snapshot / "model.safetensors").write_bytes(bytes(1_000_000))
    for name in names:
        assert models("rm", name) == f"removed {name}: 1 MB from {left.pop(name)}\n"
        assert {*tmp_path.iterdir()} == {*left.values(), *data}


def test_an_unfinished_first_download_is_listed_and_removed(kept, models):
    repository = kept / "models--org--m"
    shutil.rmtree(repository / "snapshots")
    (repository / "blobs/1").rename(repository / "blobs/1.incomplete")
    (found,) = [model for model in json.loads(models("list", "--json")) if model["name"] == "org/m"]
    assert found["bytes_on_disk"] == 3_000_000
    assert models("rm", "org/m") == f"removed org/m: 3 MB from {repository}\n"
    assert not repository.exists()


def test_what_stays_on_the_disk_is_not_reported_as_removed(kept, tmp_path_factory, monkeypatch, models):
    """A folder behind a link, bytes behind one, and files of another user."""
    elsewhere = tmp_path_factory.mktemp("disk")
    (kept / "models--org--m").rename(elsewhere / "m")
    (kept / "models--org--m").symlink_to(elsewhere / "m")
    says = f"models--org--m is a link to {elsewhere / 'm'}: remove both yourself. Nothing was removed"
    assert says in models("rm", "org/m", refuses=True)
    assert (kept / "models--org--m").is_symlink()
    assert (elsewhere / "m/blobs/1").exists()

    (kept / "models--org--m-7b/blobs").rename(elsewhere / "blobs")
    (kept / "models--org--m-7b/blobs").symlink_to(elsewhere / "blobs")

    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        (line,) = models("rm", "org/m-7b", refuses=True).splitlines()
    assert "models--org--m-7b cannot be removed whole: [Errno 13] Permission denied" in line
    assert "removed org/m-7b: 0 MB" in models("rm", "org/m-7b")
    assert (elsewhere / "blobs/1").exists()


@pytest.mark.parametrize("length", [30, 78, 79, 96])
def test_packed_weights_of_a_long_name_are_removed(kept, models, length):
    name = "org/" + "m" * (length - 4)
    repository = (kept / "models--org--m").rename(kept / f"models--{name.replace('/', '--')}")
    sources = repository / f"snapshots/{'d' * 40}", *repository.rglob("*.gguf")
    files = write_packed_weights(kept, map(packed.label, sources))
    assert "removed its packed weights: 1 MB" in models("rm", name)
    assert [file.exists() for file in files] == [False, False]


def test_show_fetches_nothing(kept, monkeypatch, models):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # it could ask
    monkeypatch.setattr(huggingface_hub, "list_repo_files", None)
    says = "other/model is not in the local cache: fetch it with specbeam models pull"
    assert says in models("show", "other/model", refuses=True)
    assert "is not a GGUF file" in models("show", "org/m", refuses=True)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"XDG_CACHE_HOME": "/somewhere"},
        {"HF_HOME": "~/of-the-hub", "XDG_CACHE_HOME": "/somewhere"},
        {"HF_HOME": "$HOME/of-the-hub"},
        {"HUGGINGFACE_HUB_CACHE": "/older", "HF_HOME": "/home-of-it"},
        {"HF_HUB_CACHE": "~/newer", "HUGGINGFACE_HUB_CACHE": "/older"},
    ],
)
def test_the_cache_is_the_one_of_huggingface_hub(environment):
    names = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    both = "from huggingface_hub import constants; from specbeam.checkpoints.sources import hub; import os; "
    both += "print(constants.HF_HUB_CACHE, os.path.normpath(hub.cache_folder()))"
    run = subprocess.run([sys.executable, "-c", both], env=kept | environment, capture_output=True, text=True)
    theirs, ours = run.stdout.split()
    assert ours == theirs
