"""Journals and whole files: a crash at any operation on the disk loses only what was being written."""

import contextlib
import json
import os

import pytest

import specbeam
from specbeam import jobs
from specbeam.errors import SpecbeamError
from specbeam.jobs.files import locked, replacing, write_whole
from specbeam.jobs.finished import FinishedRows
from specbeam.jobs.journal import Journal, entries_in, json_line
from tests.calls import check_interrupts, press_within
from tests.conftest import in_thorough_mode
from tests.jobs.faults import crashes

ENTRIES = [{"n": n, "text": "ö" * n} for n in range(4)]


def opened(path, **how):
    """A journal, and the entries that it held."""
    entries = []
    return Journal(path, lambda entry, _: entries.append(entry), **how), entries


@pytest.mark.parametrize("power", [False, True])
def test_a_journal_keeps_each_entry_that_was_appended(tmp_path, power):
    kept = []

    def write(crash_at):
        kept.clear()
        journal, _ = opened(tmp_path / f"{crash_at}.jsonl")
        for entry in ENTRIES:
            journal.append(entry)
            kept.append(entry)

    for crash_at in crashes(write, power):
        path = tmp_path / f"{crash_at}.jsonl"
        found = [entry for entry, _ in entries_in(path)]
        assert found in (kept, ENTRIES[: len(kept) + 1])  # the last may be whole before append returns
        journal, entries = opened(path)
        assert entries == found
        for entry in ENTRIES[len(found) :]:
            journal.append(entry)
        journal.close()
        assert path.read_bytes() == b"".join(map(json_line, ENTRIES))
    assert crash_at == 2 * len(ENTRIES)  # each append writes and syncs


@pytest.mark.parametrize("power", [False, True])
def test_a_torn_line_is_dropped_on_a_disk_that_crashes_again(tmp_path, power):
    whole = b"".join(map(json_line, ENTRIES))

    def tear(crash_at):
        (tmp_path / f"{crash_at}.jsonl").write_bytes(whole[:-5])

    def resume(crash_at):
        opened(tmp_path / f"{crash_at}.jsonl")[0].append(ENTRIES[-1])

    for crash_at in crashes(resume, power, tear):
        path = tmp_path / f"{crash_at}.jsonl"
        journal, entries = opened(path)
        if entries == ENTRIES[:-1]:
            journal.append(ENTRIES[-1])
        journal.close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("before", [None, b"what was there"])
def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, power, before):
    path = tmp_path / "whole"

    def restore(crash_at):
        for file in tmp_path.iterdir():  # a process that ended may have left its unfinished file
            file.unlink()
        if before is not None:
            path.write_bytes(before)

    def write(crash_at):
        with replacing(path) as file:
            file.write(b"new ")
            file.flush()
            file.write(b"content")

    for _ in crashes(write, power, restore):
        assert (path.read_bytes() if path.exists() else None) == before
    assert path.read_bytes() == b"new content"
    assert [*tmp_path.iterdir()] == [path]


def test_at_each_moment_an_interrupt_leaves_a_whole_file_and_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)  # it takes milliseconds
    path, lock, outcomes = tmp_path / "whole", tmp_path / "lock", set()

    def work():
        with locked(lock, path, "another"), replacing(path) as file:
            file.write(b"new")

    generators = filter(callable, vars(contextlib._GeneratorContextManager).values())
    places = [jobs.files, specbeam.system.interrupts, *generators, work]
    for moment in range(0, press_within(places, work)[0], 1 if in_thorough_mode() else 3):
        path.write_bytes(b"before")
        assert press_within(places, work, [moment])[1] is KeyboardInterrupt
        check_interrupts()
        assert [*tmp_path.iterdir()] == [path]
        outcomes.add(path.read_bytes())
        with locked(lock, path, "another"):
            pass
    assert outcomes == {b"before", b"new"}


def test_two_that_write_one_file_do_not_mix(tmp_path):
    path = tmp_path / ("long" * 60)
    with replacing(path) as first, replacing(path) as second:
        first.write(b"first " * 10_000)
        second.write(b"second " * 10_000)
    assert path.read_bytes() == b"first " * 10_000
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.skipif(os.name == "nt", reason="permissions")
def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path):
    path = tmp_path / "whole"
    for mode in (0o400, 0o600, 0o664):
        path.touch()
        path.chmod(mode)
        with replacing(path) as file:
            (unfinished,) = {*tmp_path.iterdir()} - {path}
            assert unfinished.stat().st_mode & 0o777 == mode
            file.write(b"new")
        assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", mode)
    umask = os.umask(0o027)
    try:
        write_whole(tmp_path / "other", "ö")
    finally:
        os.umask(umask)
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "other").read_bytes() == "ö".encode()


@pytest.mark.parametrize("power", [False, True])
def test_rows_are_finished_once_whenever_the_process_ends(tmp_path, power):
    rows = [[{"row": n, "text": "a", "error": None}, {"row": n + 1, "text": "b", "error": None}] for n in (0, 2, 4)]

    def work(output):
        with FinishedRows(output, "x", 6) as finished:
            before = [*finished]
            for job in rows:
                if not all(row["row"] in finished for row in job):
                    finished.add(job[::-1])
                    acknowledged[output] = [*finished]
            return before, [*finished]

    acknowledged = {}
    for crash_at in crashes(lambda crash_at: work(tmp_path / str(crash_at)), power):
        output = tmp_path / str(crash_at)
        acknowledged_rows = acknowledged.get(output, [])
        before, after = work(output)
        assert all(row in before for row in acknowledged_rows)
        assert after == [row for job in rows for row in job]


def test_a_damaged_line_is_an_error_or_ends_the_journal(tmp_path):
    path = tmp_path / "j.jsonl"
    for damage in (b"\0\0\n", b"[1]\n", b'{"n": \n', b"\xff\n"):
        content = json_line({"n": 1}) + damage + json_line({"n": 2})
        path.write_bytes(content)
        with pytest.raises(SpecbeamError, match=r"is damaged before byte \d+ .*: restore it, or start anew"):
            opened(path)
        assert path.read_bytes() == content
        journal, entries = opened(path, drop_damaged=True)
        assert entries == [{"n": 1}]
        journal.append({"n": 3})
        journal.close()
        assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [1, 3]


def test_any_text_is_an_entry(tmp_path):
    texts = ["ö\u2028", "\ud83d", 'a\n"b"', "\0"]
    journal, _ = opened(tmp_path / "j.jsonl")
    journal.append(*({"text": text} for text in texts))
    journal.close()
    assert [entry["text"] for entry, _ in entries_in(tmp_path / "j.jsonl")] == texts
    assert [*entries_in(tmp_path / "missing")] == []
