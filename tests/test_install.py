"""Which PyTorch an installation gets: real pip and small wheels in folders, laid out as indexes."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PINNED = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def write_index(folder, version, requires=()):
    """A package index, as files, that has PyTorch in one version."""
    (project := folder / "torch").mkdir(parents=True)
    file = f"torch-{version}-py3-none-any.whl"
    needed = "".join(f"Requires-Dist: {one}\n" for one in requires)
    with zipfile.ZipFile(project / file, "w") as wheel:
        info = f"torch-{version}.dist-info"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{needed}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (project / "index.html").write_text(f'<a href="{file}">{file}</a>')
    return folder.as_uri()


@pytest.fixture
def pypi(tmp_path):
    """The environment of a machine whose pip knows one index, which has PyTorch with CUDA alone, as PyPI has it."""
    index = write_index(tmp_path / "pypi", PINNED, ["nvidia-cudnn-cu13; platform_system == 'Linux'"])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return kept | {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index}


@pytest.fixture
def cpu_index(tmp_path):
    return write_index(tmp_path / "cpu", f"{PINNED}+cpu")


def torch_plan(environment, *arguments):
    """Runs .ci/torch-plan. Returns its exit code, and what it prints."""
    command = [sys.executable, str(ROOT / ".ci/torch-plan"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere PyPI's PyTorch is the one for the CPU")
def test_pip_prefers_the_wheel_for_the_cpu_where_an_index_has_it(pypi, cpu_index):
    status, says = torch_plan(pypi)
    assert (status, "several gigabytes" in says, "TORCH_INDEX=ADDRESS" in says) == (1, True, True)
    both = pypi | {"PIP_EXTRA_INDEX_URL": cpu_index}
    assert torch_plan(both) == (0, "")
    # As the documentation installs: at the version that the constraints pin, without the suffix.
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "torch"]
    command += ["-c", str(ROOT / "constraints.txt")]
    done = subprocess.run(command, env=both, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines()[-1] == f"Would install torch-{PINNED}+cpu"


def test_without_an_index_nothing_is_checked_and_this_is_said(pypi):
    nowhere = pypi | {"PIP_NO_INDEX": "1"}
    assert torch_plan(nowhere) == (3, f"pip finds no torch {PINNED}, or reaches no package index: not checked\n")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_gives_pip_the_index_that_it_is_given():
    """With another makefile that shows the environment of a recipe."""
    show = "include Makefile\nshow:\n\t@echo [$$PIP_EXTRA_INDEX_URL]\n"
    for given, index in ((["TORCH_INDEX=https://x/cpu"], "https://x/cpu https://y"), ([], "https://y")):
        command = ["make", "--no-print-directory", "-f", "-", "show", *given]
        environment = os.environ | {"PIP_EXTRA_INDEX_URL": "https://y"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, input=show, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == f"[{index}]"


def test_the_image_has_a_tested_python_and_no_pytorch():
    image = (ROOT / "Dockerfile").read_text().replace("\\\n", "")
    (python,) = set(re.findall(r"^FROM python:([\d.]+)-slim", image, re.MULTILINE))
    (tested,) = re.findall(
        r"every change runs `make test` with Python (\d.\d+)", (ROOT / "docs/stability.md").read_text()
    )
    assert python == tested
    assert "'/source[server]'" in image  # without the extra torch


def test_the_documentation_names_the_way_to_the_wheel_for_the_cpu():
    page = (ROOT / "docs/index.md").read_text()
    commands = "pip install --extra-index-url ADDRESS -c constraints.txt '.[torch]'\nmake test TORCH_INDEX=ADDRESS\n"
    assert commands in page


LARGE = ("torch", "transformers", "gguf", "threadpoolctl", "nvidia", "accelerate")


@pytest.mark.parametrize("extra", ["", "[chat]", "[server]", "[completion]", "[speech]"])
def test_an_installation_has_none_of_the_large_packages(extra):
    """Of all requirements of the package, and of their own requirements."""
    left, seen = [(f"specbeam{extra}")], set()
    while left:
        wanted = Requirement(left.pop())
        if wanted.name in seen and not wanted.extras:
            continue
        seen.add(wanted.name.lower())
        for line in requires(wanted.name) or ():
            one = Requirement(line)
            if any(one.marker is None or one.marker.evaluate({"extra": e}) for e in (wanted.extras or {""})):
                left.append(f"{one.name}[{','.join(one.extras)}]" if one.extras else one.name)
    assert seen.isdisjoint(LARGE)
    assert {"numpy", "tokenizers", "jinja2"} <= seen
