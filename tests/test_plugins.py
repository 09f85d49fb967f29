"""Names of user-defined objects: what they find, and what is said if they find nothing."""

import sys
from importlib.metadata import EntryPoint

import pytest

from specbeam import SpecbeamError, plugins
from tests.conftest import needs_torch

GROUPS = {"strategy", "drafter", "metric", "tracker"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with a module, which Python does not look into by itself."""
    (tmp_path / "own_module.py").write_text("def propose(): return []\nclass Tool:\n    part = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in ("own_module", "own_broken", "own_importing"):
        sys.modules.pop(name, None)


def declare(monkeypatch, *points):
    monkeypatch.setattr(plugins, "points", lambda kind: tuple(EntryPoint(*one, plugins.GROUPS[kind]) for one in points))


def test_an_installed_entry_point_is_found(tmp_path, monkeypatch):
    (about := tmp_path / "own_package-1.0.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own_package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[specbeam.metrics]\nordered = collections:OrderedDict\n")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.points.cache_clear()
    assert plugins.resolve("ordered", "metric").__name__ == "OrderedDict"
    assert not plugins.names_one("ordered", "tracker")
    plugins.points.cache_clear()


def test_a_module_of_the_current_directory_is_found_by_the_command_line_alone(here):
    with pytest.raises(SpecbeamError, match=r"no module 'own_module' on Python's path.*PYTHONPATH"):
        plugins.resolve("own_module:propose", "drafter")
    assert plugins.resolve("own_module:propose", "drafter", from_here=True)() == []
    assert plugins.resolve("own_module:Tool.part", "metric", from_here=True) == 7


@pytest.mark.parametrize(
    ("text", "source", "expected"),
    [
        ("own_modul:propose", "", r"no module 'own_modul' in the current directory.*did you mean 'own_module'\?"),
        ("own_module:propse", "", r"the module own_module \(.*own_module.py\) has no 'propse' \(did you mean 'propose"),
        ("own_broken:f", "x = 1\nx.y\n", r"AttributeError: .*has no attribute 'y' \(.*own_broken.py, line 2\)"),
        ("own_broken:f", "def f(:\n", r"SyntaxError: .*\(.*own_broken.py, line 1\)"),
        pytest.param(
            "own_importing:f",
            "import own_missing\n",
            r"No module named 'own_missing' \(.*own_importing.py, line 1\)",
            marks=needs_torch,  # without it, tests/absent.py is in the traceback
        ),
    ],
)
def test_what_is_wrong_with_a_module_is_said(here, text, source, expected):
    if source:
        (here / f"{text.partition(':')[0]}.py").write_text(source)
    with pytest.raises(SpecbeamError, match=expected):
        plugins.resolve(text, "drafter", from_here=True)


@pytest.mark.parametrize("kind", sorted(GROUPS))
def test_entry_points_are_found_by_their_names(monkeypatch, kind):
    declare(monkeypatch, ("ordered", "collections:OrderedDict"))
    assert plugins.resolve("ordered", kind).__name__ == "OrderedDict"
    with pytest.raises(SpecbeamError, match=rf"unknown {kind} 'orderd': .* are ordered \(did you mean 'ordered'\?\)"):
        plugins.resolve("orderd", kind)


def test_an_entry_point_of_two_packages_or_none_is_refused(monkeypatch):
    declare(monkeypatch, ("mine", "collections:Counter"), ("mine", "collections:deque"))
    with pytest.raises(SpecbeamError, match="collections:Counter and collections:deque, from two packages"):
        plugins.resolve("mine", "drafter")
    declare(monkeypatch)
    with pytest.raises(SpecbeamError, match=r"no package declares a metric; .*as module:name, such as my"):
        plugins.resolve("mine", "metric")
    declare(monkeypatch, ("mine", "collections:gone"))
    with pytest.raises(SpecbeamError, match=r"the entry point collections:gone: .*install its package again"):
        plugins.resolve("mine", "metric")


def test_a_hub_id_is_no_module():
    assert plugins.is_name("my_module.part:name")
    assert not plugins.is_name("org/name:Q4_K_M")
    assert not plugins.is_name("ngram")
