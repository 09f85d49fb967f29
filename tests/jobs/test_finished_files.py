"""Results in a folder: after a crash each is whole or not there, and only what is missing is made again."""

import pytest

from specbeam import SpecbeamError
from specbeam.jobs.finished import FinishedFiles
from tests.jobs.faults import crashes

NAMES = ("one", "two", "three")


@pytest.fixture
def sources(tmp_path):
    for name in NAMES:
        (tmp_path / name).write_bytes(name.encode() * 5)
    (tmp_path / "out").mkdir()
    return {f"{name}.txt": tmp_path / name for name in NAMES}


def make(folder, sources, run="run"):
    """Make the results that are not there. Returns their names."""
    made = []
    with FinishedFiles(folder / "journal", run) as finished:
        for result, source in sources.items():
            if not finished.has(result, source):
                finished.add(result, source, source.read_text() * 2)
                made.append(result)
    return made


@pytest.mark.parametrize("power", [False, True])
def test_a_crash_loses_at_most_the_result_in_work(tmp_path, sources, power):
    for crash_at in crashes(lambda at: make(folder(tmp_path, at), sources), power, lambda at: folder(tmp_path, at)):
        out = folder(tmp_path, crash_at)
        there = [name for name in sources if (out / name).exists()]
        assert make(out, sources) == [name for name in sources if name not in there]
        assert [(out / name).read_text() for name in sources] == [name * 10 for name in NAMES]
        assert make(out, sources) == []
    assert crash_at >= 3 * 5  # of each result: the entry is written and synced, and the file written, synced and named


def folder(tmp_path, number):
    (path := tmp_path / f"out-{number}").mkdir(exist_ok=True)
    return path


def test_what_another_run_or_somebody_else_wrote_is_not_replaced(tmp_path, sources):
    out = tmp_path / "out"
    assert make(out, sources) == [*sources]
    for change in (
        lambda: make(out, sources, "with another model"),
        lambda: ((tmp_path / "two").write_bytes(b"another sound"), make(out, sources))[1],
    ):
        with pytest.raises(SpecbeamError, match="is there already, and not from this run"):
            change()
    (out / "two.txt").unlink()
    assert make(out, sources) == ["two.txt"]
    (out / "journal").write_bytes(b"damaged\n")
    with pytest.raises(SpecbeamError, match=r"one\.txt is there already"):
        make(out, sources)


def test_a_folder_without_results_has_no_journal(tmp_path):
    assert make(tmp_path, {}) == []
    assert not [*tmp_path.iterdir()]
    with pytest.raises(SpecbeamError, match="nowhere/journal cannot be written: No such file"):
        make(tmp_path / "nowhere", {})
