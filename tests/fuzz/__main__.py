"""Fuzz with each harness in turn: ``python -m tests.fuzz --seconds 3600 [--only HARNESS ...]``.

A harness that dies (a crash of native code, a hang, all memory) is started again for the rest of its time. Exits with 1
if there are findings.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz import HARNESSES

MEMORY = Path("/dev/shm")
"""A folder in memory, on most Linux machines. The inputs are written there."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3600, help="for all harnesses together (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=HARNESSES, default=HARNESSES, metavar="HARNESS")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"), help="findings (default %(default)s)")
    given = parser.parse_args()
    found = 0
    for name in given.only:
        found += fuzz(name, given.out / name, given.seconds / len(given.only))
    print(f"{found} findings; their inputs and tracebacks are in {given.out}" if found else "no findings")
    return int(found > 0)


def fuzz(name: str, folder: Path, seconds: float) -> int:
    """Fuzz with one harness, and print a line. Returns the number of findings."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    end = time.monotonic() + seconds
    deaths: list[str] = []
    with tempfile.TemporaryDirectory(prefix="specbeam-fuzz-", dir=MEMORY if MEMORY.is_dir() else None) as room:
        while (left := round(end - time.monotonic())) > 0:
            with (folder / "log").open("a") as log:
                command = [sys.executable, "-m", "tests.fuzz.worker", name, str(folder), str(left)]
                status = subprocess.run(command, stdout=log, stderr=log, env=environment(room)).returncode
            if status and not [*folder.glob("counts-*.json")]:
                raise SystemExit(f"{name} does not start: see {folder / 'log'}")
            if status:
                deaths.append(f"the process ended with status {status} (see log)")
    counts = [json.loads(path.read_text()) for path in folder.glob("counts-*.json")]
    findings = sorted({finding for count in counts for finding in count["findings"]}) + deaths
    inputs, loaded, refused = (sum(count[key] for count in counts) for key in ("executions", "loaded", "refused"))
    line = f"{name}: {inputs:,} inputs, {loaded:,} loaded, {refused:,} refused, {len(findings)} findings"
    print(line, *findings, sep="\n    ", flush=True)
    return len(findings)


def environment(room: str) -> dict[str, str]:
    """For a worker: files in the room, one thread, no network, and no notices of transformers."""
    one_thread = {"OMP_NUM_THREADS": "1", "SPECBEAM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "critical", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return os.environ | one_thread | quiet | {"HF_HUB_OFFLINE": "1", "TMPDIR": room}


if __name__ == "__main__":
    sys.exit(main())
