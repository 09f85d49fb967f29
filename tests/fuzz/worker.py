"""Fuzzes with one harness for a while: ``python -m tests.fuzz.worker HARNESS FOLDER SECONDS``.

It goes on after a finding. Findings with the same traceback count once. The folder gets the corpus, and for each
finding the input and the traceback. ``python -m tests.fuzz`` starts it, and reports what it found.
"""

import hashlib
import importlib
import json
import os
import pkgutil
import resource
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import atheris

MAX_CPU_SECONDS = 3.0
"""Of one input. More is a finding."""
MAX_GROWTH_KB = 300 << 10
"""How much one input may add to the peak memory of the process. More is a finding."""
HANG_SECONDS = 60
"""After this many seconds libFuzzer ends the process."""
RSS_LIMIT_MB = 4096
"""Beyond this much memory libFuzzer ends the process."""
LONGEST_INPUT_BYTES = 1 << 17


class Watch:
    """Runs inputs, and keeps the findings and the counts.

    Attributes:
        executions, loaded, refused: the numbers of all inputs, accepted inputs, and inputs with a SpecbeamError.
        findings: the name of each finding, and how often it came up.
    """

    def __init__(self, run: Any, folder: Path) -> None:
        from specbeam import SpecbeamError

        self.expected = SpecbeamError
        self.run = run
        self.folder = folder
        self.executions = self.loaded = self.refused = 0
        self.findings: dict[str, int] = {}
        self.saved = time.monotonic()
        self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def __call__(self, data: bytes) -> None:
        self.executions += 1
        begin = time.process_time()
        try:
            self.run(data)
            self.loaded += 1
        except self.expected:
            self.refused += 1
        except BaseException as error:  # SystemExit too, and the panics of Rust
            self.keep(_place(error), data, "".join(traceback.format_exception(error)))
        seconds = time.process_time() - begin
        if seconds > MAX_CPU_SECONDS and self.executions > 1:  # the first input imports
            self.keep("slow", data, f"{seconds:.1f} CPU seconds")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if peak - self.peak > MAX_GROWTH_KB and self.executions > 1:
            self.keep("memory", data, f"{(peak - self.peak) / 1024:.0f} MB more than before")
        self.peak = max(self.peak, peak)
        if time.monotonic() - self.saved > 1:
            self.save()

    def keep(self, name: str, data: bytes, why: str) -> None:
        self.findings[name] = self.findings.get(name, 0) + 1
        if self.findings[name] == 1:
            (self.folder / f"{name}.input").write_bytes(data)
            (self.folder / f"{name}.txt").write_text(why, errors="backslashreplace")
        self.save()

    def save(self) -> None:
        self.saved = time.monotonic()
        counts = {name: getattr(self, name) for name in ("executions", "loaded", "refused", "findings")}
        (self.folder / f"counts-{os.getpid()}.json").write_text(json.dumps(counts))


def _place(error: BaseException) -> str:
    """A name for an error: its type, the innermost line of specbeam, and a hash of the innermost lines of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/specbeam/" in frame.filename] or frames
    last = f"{Path(ours[-1].filename).stem}-{ours[-1].lineno}"
    inner = hashlib.sha256(str([(f.filename, f.lineno) for f in frames[-2:]]).encode()).hexdigest()[:6]
    return f"{type(error).__name__}-{last}-{inner}"


def mutated(mutate: Any, data: bytes, longest: int, seed: int) -> bytes:
    """The input as a harness changes it, or with changed bytes."""
    changed = mutate(data, longest, seed)
    return atheris.Mutate(data, longest) if changed is None else changed


def import_everything() -> None:
    """Import all of specbeam but its integrations: many of its imports wait for their first use."""
    import specbeam

    for module in pkgutil.walk_packages(specbeam.__path__, "specbeam."):
        if not module.name.startswith(("specbeam.integrations", "specbeam.__main__")):
            with suppress(ImportError):  # the native library looks like a module, and is not
                importlib.import_module(module.name)


def main() -> None:
    name, folder, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    corpus = folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["specbeam"]):
        import_everything()
        harness = importlib.import_module(f"tests.fuzz.{name}")
        for number, seed in enumerate(harness.seeds()):
            (corpus / f"seed-{number}").write_bytes(seed)
        mutator = {"custom_mutator": partial(mutated, harness.mutate)} if hasattr(harness, "mutate") else {}
        options = {
            "max_total_time": seconds,
            "timeout": HANG_SECONDS,
            "rss_limit_mb": RSS_LIMIT_MB,
            "max_len": LONGEST_INPUT_BYTES,
            "len_control": 0,
            "mutate_depth": 1 if mutator else 5,
            "artifact_prefix": f"{folder}/",
        }
        arguments = [sys.argv[0], *(f"-{key}={value}" for key, value in options.items()), str(corpus)]
        atheris.Setup(arguments, Watch(harness.run, folder), **mutator)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
