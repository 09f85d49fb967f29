"""Models by their id on the Hugging Face hub, through ``huggingface_hub`` and its cache."""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from logging import ERROR
from pathlib import Path
from typing import NamedTuple

from specbeam.checkpoints.files import ADAPTER, ADAPTER_WEIGHTS, MODEL, PART, WEIGHTS, check_no_link, weight_map
from specbeam.errors import SpecbeamError

DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "*.spm", "*.tiktoken", "merges.txt", "vocab.txt", "README.md"]
DESCRIPTIONS += ["vocabulary.txt"]
"""The files beside the weights that are read. The index is among them."""
CTRANSLATE2_VOCABULARIES = ("vocabulary.json", "vocabulary.txt")
"""CTranslate2 writes one of them beside a model.bin. Elsewhere a file of that name may be a pickle."""
ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<pick>\w[\w.+-]*(/\w[\w.+-]*)*))?", re.ASCII)
"""A hub id, with the name of a GGUF file or its quantization after a colon: ``org/name:Q4_K_M``."""
PREFIX = "models--"
"""Begins the name of a model's folder in the cache. Data sets have another one."""


class Kept(NamedTuple):
    """A repository in the cache.

    Attributes:
        size: bytes on disk, of all its revisions and of unfinished downloads.
    """

    repository: str
    path: Path
    size: int


def fetch(repository: str, revision: str | None = None, pick: str | None = None, *, download: bool = True) -> Path:
    """The folder of a repository's snapshot, or one of its GGUF files. It is downloaded first if the cache lacks it.

    Of the weights only model.safetensors is downloaded, or for an adapter adapter_model.safetensors. Without that file
    the files that the index names are. A repository without them may have one GGUF file.
    ``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and the rest of huggingface_hub's environment hold.

    Args:
        pick: the name of a GGUF file, or the quantization in its name, such as "Q4_K_M".
        download: False to look only into the cache.

    Raises:
        SpecbeamError: no such repository, revision or file, no access, no network and not in the cache, or a full disk.
            Also for an index that names files outside the repository.
    """
    silence = no_answer(repository, revision) if download else None
    try:
        return _fetch(repository, revision, pick, download and silence is None)
    except SpecbeamError:
        raise
    except Exception as error:
        raise _explained(silence or error, repository, revision, download) from error


def no_answer(repository: str, revision: str | None = None, kind: str = "model") -> Exception | None:
    """Why no hub answers a question about a model or a "dataset"; None if one does.

    huggingface_hub repeats some requests for half a minute, and waits for others without end. So one request of its own
    finds out first. A hub that refuses it answers, too. The requests that follow report its reasons.
    """
    from huggingface_hub import constants, dataset_info, model_info
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    ask = dataset_info if kind == "dataset" else model_info
    try:
        ask(repository, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, HFValidationError):
        return None
    except Exception as error:
        return error
    return None


def _fetch(repository: str, revision: str | None, pick: str | None, download: bool) -> Path:
    from huggingface_hub import snapshot_download

    if pick is not None:
        return _fetch_gguf(repository, revision, pick, download)
    from_cache = not download
    folder = Path(
        snapshot_download(repository, revision=revision, allow_patterns=DESCRIPTIONS, local_files_only=from_cache)
    )
    # The name of a snapshot is its commit: a branch may have moved meanwhile.
    weights = ADAPTER_WEIGHTS if (folder / ADAPTER).is_file() else WEIGHTS
    snapshot_download(repository, revision=folder.name, allow_patterns=[weights], local_files_only=from_cache)
    if (folder / weights).is_file():
        return folder
    if shards := {file.relative_to(folder).as_posix() for file in weight_map(folder).values()}:
        patterns = [glob.escape(name) for name in shards]
        snapshot_download(repository, revision=folder.name, allow_patterns=patterns, local_files_only=from_cache)
        if any((folder / name).is_file() for name in shards):
            return folder
    if any((folder / name).is_file() for name in CTRANSLATE2_VOCABULARIES):
        snapshot_download(repository, revision=folder.name, allow_patterns=[MODEL], local_files_only=from_cache)
        if (folder / MODEL).is_file():
            return folder
    if _gguf_files(repository, folder.name, download):
        return _fetch_gguf(repository, folder.name, None, download)
    return folder


def kept() -> list[Kept]:
    """The models in the cache, by name. Other programs may have fetched some of them."""
    folders = cache_folder().glob(f"{PREFIX}*")
    models = [
        Kept(folder.name.removeprefix(PREFIX).replace("--", "/"), folder, sum(_sizes(folder).values()))
        for folder in folders
    ]
    return sorted(model for model in models if model.size)


def cache_folder() -> Path:
    """The folder of the hub's cache, by huggingface_hub's environment variables. Its import takes half a second."""
    default = os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    home = os.path.expandvars(os.path.expanduser(os.environ.get("HF_HOME", default)))
    older = os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    return Path(os.path.expandvars(os.path.expanduser(os.environ.get("HF_HUB_CACHE", older))))


def find(repository: str, file: str) -> Path | None:
    """A file of a repository's main branch in the cache; None if it is not there. Nobody is asked."""
    folder = cache_folder() / (PREFIX + repository.replace("/", "--"))
    try:
        path = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8") / file
        return path if path.is_file() else None
    except (OSError, ValueError):
        return None


def files(model: Kept) -> list[str]:
    """The names of a repository's GGUF files in the cache, of all revisions."""
    snapshots = model.path.glob("snapshots/*")
    return sorted({file.relative_to(one).as_posix() for one in snapshots for file in one.rglob("*.gguf")})


def remove(model: Kept) -> int:
    """Remove a repository from the cache: all revisions and unfinished downloads. Returns the bytes that this frees."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.utils.logging import get_verbosity, set_verbosity

    check_no_link(model.path)
    sizes = _sizes(model.path)
    cache = scan_cache_dir(cache_folder())
    repositories = [one for one in cache.repos if (one.repo_id, one.repo_type) == (model.repository, "model")]
    # Two repositories can have one commit, such as gpt2 and openai-community/gpt2: offer only this one for removal.
    alone = replace(cache, repos=frozenset(repositories))
    verbosity = get_verbosity()
    set_verbosity(ERROR)  # if a file cannot be removed, it only warns, with a traceback
    try:
        alone.delete_revisions(*(revision.commit_hash for one in repositories for revision in one.revisions)).execute()
        if model.path.exists():  # no download was finished, or a part could not be removed
            shutil.rmtree(model.path)
    except OSError as error:
        raise SpecbeamError(f"{model.path} cannot be removed whole: {error}") from error
    finally:
        set_verbosity(verbosity)
    return sum(size for file, size in sizes.items() if not file.exists())


def _sizes(repository: Path) -> dict[Path, int]:
    """The bytes of each file of a repository in the cache. Several revisions can share a file."""
    sizes = {}
    for file in (*repository.glob("blobs/*"), *repository.glob("snapshots/*/**/*")):
        with suppress(OSError):  # another process has just removed it
            if file.is_file():
                sizes[file.resolve()] = file.stat().st_size
    return sizes


def _fetch_gguf(repository: str, revision: str | None, pick: str | None, download: bool) -> Path:
    from huggingface_hub import hf_hub_download

    if pick is not None and pick.endswith(".gguf"):
        name = pick
    else:
        name = _choose(repository, _gguf_files(repository, revision, download), pick)
    if PART.search(name):
        raise SpecbeamError(f"{repository}: {name} is one part of a split model: choose a file that is whole")
    return Path(hf_hub_download(repository, name, revision=revision, local_files_only=not download))


def _gguf_files(repository: str, revision: str | None, download: bool) -> list[str]:
    """The names of a repository's GGUF files, from the hub or else from the cache."""
    from huggingface_hub import list_repo_files, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    names: Iterable[str]
    try:
        if not download:
            raise ConnectionError
        names = list_repo_files(repository, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError):  # a gated repository is among them
        raise
    except Exception as error:  # no network, or the hub is down or refuses more requests
        try:
            folder = Path(snapshot_download(repository, revision=revision, allow_patterns=[], local_files_only=True))
        except LocalEntryNotFoundError:
            raise error from None
        names = (file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf"))
    return sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name)


def _choose(repository: str, names: list[str], pick: str | None) -> str:
    """The file that a quantization stands for; without one, the only file."""
    word = rf"(?<![a-z0-9]){re.escape(pick.lower())}(?![a-z0-9_])" if pick is not None else ""
    fits = [name for name in names if re.search(word, name.lower().removesuffix(".gguf"))]
    if len(fits) != 1:
        number = f"{len(fits)} GGUF files" if fits else "no GGUF file"
        of = f" of {pick}" if pick is not None else ""
        raise SpecbeamError(
            f"{repository} has {number}{of}: give {repository}:FILE or {repository}:QUANTIZATION for one of "
            f"{', '.join(names) or 'its files'}"
        )
    return fits[0]


def _explained(error: Exception, repository: str, revision: str | None, download: bool) -> SpecbeamError:
    """An error of huggingface_hub as one line."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision!r}" if revision else ""
    reason = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, GatedRepoError):
        return SpecbeamError(f"{repository} is gated: accept its terms on its page and set HF_TOKEN")
    if isinstance(error, RepositoryNotFoundError):
        return SpecbeamError(f"the hub has no {repository}, or it is private: check the name, or set HF_TOKEN")
    if isinstance(error, RevisionNotFoundError):
        return SpecbeamError(f"the hub has no {repository}{at}")
    if isinstance(error, HFValidationError):
        return SpecbeamError(f"{repository!r} is no hub id: {reason}")
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return SpecbeamError(f"{repository}{at} has no such file: {reason}")
    # Every HTTP library has its own ways to say that there is no network.
    if not download:
        return SpecbeamError(
            f"{repository}{at} is not in the local cache: fetch it with specbeam models pull {repository}"
        )
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    why = "HF_HUB_OFFLINE is set" if offline else f"{type(error).__name__}: {reason}"
    return SpecbeamError(
        f"{repository}{at} is not in the local cache and cannot be fetched ({why}): check the network, or give a "
        "folder or a .gguf file"
    )
