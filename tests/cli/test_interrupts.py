"""What ends commands early: Ctrl-C, passes that fail, readers that go away, and a full disk."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest

from specbeam import Engine
from specbeam.cli import generate
from specbeam.cli.generate import CtrlCCancels
from tests.calls import check_interrupts, press_within
from tests.cli.conftest import fail_on_long_prompts


@pytest.fixture
def handler():
    """Sets what happens on Ctrl-C, until the end of the test."""
    before = signal.getsignal(signal.SIGINT)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def submit(engine, n):
    return [engine.submit([i + 1], {"max_new_tokens": 9, "min_new_tokens": 9}) for i in range(n)]


def test_the_first_ends_all_requests_and_the_second_interrupts(lm, handler):
    handler(signal.default_int_handler)
    engine = Engine(lm)
    requests = submit(engine, 2)
    with CtrlCCancels(requests) as ctrl_c:
        engine.step()
        assert not ctrl_c.pressed
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.pressed
        engine.run()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [request.result().finish_reason for request in requests] == ["cancelled"] * 2
    assert all(len(request.result().token_ids) < 9 for request in requests)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("presses", [1, 2])
def test_at_each_moment_the_first_cancels_and_the_handler_comes_back(handler, presses):
    def work():
        with CtrlCCancels([request]) as ctrl_c:
            cancelled.append(ctrl_c)

    handler(signal.default_int_handler)
    request, places = mock.Mock(), [generate, contextlib]
    for moment in range(press_within(places, work)[0]):
        cancelled = []
        request.reset_mock()
        error = press_within(places, work, [moment] * presses)[1]
        check_interrupts()
        if presses == 2:
            assert error is KeyboardInterrupt
        elif error is None:
            assert request.cancel.called == cancelled[0].pressed == True  # noqa: E712


def test_a_background_job_goes_on(lm, handler):
    handler(signal.SIG_IGN)
    engine = Engine(lm)
    (request,) = submit(engine, 1)
    with CtrlCCancels([request]) as ctrl_c:
        signal.raise_signal(signal.SIGINT)
        engine.run()
    assert not ctrl_c.pressed
    assert len(request.result().token_ids) == 9


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["generate", "--prompts", "p.jsonl", "--json"], "p.jsonl line 1 failed"),
        (["compare", "x" * 80, "one", "--json"], "prompt 1 failed"),
        (["batch", "p.jsonl", "out.jsonl"], "1 of 2 rows failed, first row 1"),
    ],
)
def test_a_prompt_that_fails_does_not_take_the_others_along(
    specbeam_command, folder, tmp_path, monkeypatch, before_passes, command, says
):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "x" * 80}, {"prompt": "one"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before_passes(fail_on_long_prompts)
    status, out, err = specbeam_command(*command, "--max-new-tokens", "4", "--model", folder)
    assert (status, err.splitlines()[0]) == (1, f"specbeam: {says}: RuntimeError: it broke")
    if command[0] == "batch":
        out = (tmp_path / "out.jsonl").read_text()
    answers = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in answers if row.get("error") is None] == ["one"]
    assert [row["error"] for row in answers if row.get("error")] == ["RuntimeError: it broke"] * (command[0] == "batch")


@pytest.mark.parametrize(("command", "writes"), [(["generate", "--stream"], 2), (["compare"], 0)])
def test_a_reader_that_goes_away_is_no_crash(specbeam_command, folder, closed_terminal, command, writes):
    closed_terminal(after=writes)
    status, _, err = specbeam_command(*command, "hi", "--max-new-tokens", "200", "--model", folder)
    assert (status, err) == (1, "")


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("words", [["generate", "--help"], ["compare", "hi", "--json"]])
def test_a_full_disk_is_said(folder, tmp_path, words):
    """The disk takes a part of the last write. io.TextIOWrapper does not see that where it writes to a raw file."""
    import resource

    more = ["--max-new-tokens", "4", "--model", folder]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100, 100))
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", "from specbeam.cli import main; import sys; sys.exit(main())", *words, *more],
            env=os.environ | {"PYTHONUNBUFFERED": "1", "SPECBEAM_HOME": str(tmp_path)},
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "specbeam: cannot write the output: File too large"
    assert (tmp_path / "out").stat().st_size == 100


@pytest.mark.skipif(os.name == "nt", reason="pipes")
@pytest.mark.parametrize("arguments", ["generate --help", "models list"])
def test_output_that_nobody_reads_is_no_error(arguments):
    command = f"({sys.executable} -m specbeam {arguments}; echo $? >&2) | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.stderr.strip() in ("0", "1")
