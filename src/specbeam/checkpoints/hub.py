"""Models by their id on the Hugging Face hub, through ``huggingface_hub`` and its cache."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from specbeam.checkpoints.files import ADAPTER, ADAPTER_WEIGHTS, WEIGHTS, weight_map
from specbeam.errors import SpecbeamError

DESCRIPTIONS = [
    "*.json",
    "*.jinja",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
    "README.md",
]
"""The files beside the weights that are read. The index is among them."""


def fetch(repository: str, revision: str | None = None) -> Path:
    """The folder of a repository's snapshot, downloaded first if the cache lacks it.

    Of the weights only the files that the index names are downloaded. Without an index that is model.safetensors, or
    for an adapter adapter_model.safetensors.
    ``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and the rest of huggingface_hub's environment hold.

    Raises:
        SpecbeamError: no such repository or revision, no access, no network and not in the cache, or a full disk. Also
            for an index that names files outside the repository.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    at = f" at revision {revision!r}" if revision else ""
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=DESCRIPTIONS))
        if (folder / ADAPTER).is_file():
            weights = {ADAPTER_WEIGHTS}
        else:
            weights = {file.relative_to(folder).as_posix() for file in weight_map(folder).values()} or {WEIGHTS}
        # The name of a snapshot is its commit: a branch may have moved meanwhile.
        return Path(
            snapshot_download(repository, revision=folder.name, allow_patterns=[glob.escape(name) for name in weights])
        )
    except SpecbeamError:
        raise
    except GatedRepoError as error:
        raise SpecbeamError(f"{repository} is gated: accept its terms on its page and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise SpecbeamError(
            f"the hub has no {repository}, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise SpecbeamError(f"the hub has no {repository}{at}") from error
    except HFValidationError as error:
        raise SpecbeamError(f"{repository!r} is no hub id: {str(error).splitlines()[0]}") from error
    except Exception as error:  # every HTTP library has its own ways to say that there is no network
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
        first = next(iter(str(error).strip().splitlines()), "")
        why = "HF_HUB_OFFLINE is set" if offline else f"{type(error).__name__}: {first}"
        raise SpecbeamError(
            f"{repository}{at} is not in the local cache and cannot be fetched ({why}): check the network, or give a "
            "folder or a .gguf file"
        ) from error
