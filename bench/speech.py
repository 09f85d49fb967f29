"""Whisper on a CPU against faster-whisper: same weights, same audio, same threads, one run.

    python bench/speech.py MODEL AUDIO... --peer-python FILE [--threads 2] [--repeats 5] [--isa avx2]
        [--whisper-cpp MODEL.bin --whisper-cpp-python FILE] [--json FILE]

MODEL is a folder of CTranslate2, which both read; each computes in int8. FILE is the Python of an environment with
faster-whisper. Each engine has a process of its own, which sleeps while the other one runs, and both take turns. The
language is given, the temperature is 0, there is no earlier text, and no silence is left out. The audio is the first
AUDIO, all of them again and again for 66 seconds, and eight pieces of these of 5 to 60 seconds (drawn by seed 0), which
faster-whisper takes one after another, and in its batches of 8. "Encoder" is one window of 30 seconds through the
encoder, with the keys and values of cross-attention. "Whole process" is ``specbeam transcribe`` beside a program of a
few lines, from their start to their end. Figures are medians of our seconds over theirs, with the worst and the best.
Where the texts differ, times are per token, and the table says so. The eight files have fewer turns, and after the
first one faster-whisper takes them in the way that was faster there.

whisper.cpp reads MODEL.bin in its own format (q8_0), through pywhispercpp in a third environment, and takes a turn of
its own. Its seconds are compared as they are. With ``--isa``, specbeam's kernels and CTranslate2's have this
instruction set. whisper.cpp has what its wheel was compiled for.

With --drafts there is a second table: specbeam's own processor time with each draft over that without one, in turns,
for all AUDIO one after another, and for 66 seconds or more of the first one again and again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from figures import Figures, add_json_option
from isa import add_isa_option, for_ctranslate2, for_specbeam, kernels
from machine import describe
from peers import Peer, foreign_environment

from specbeam.speech.audio import load

RATE = 16_000
LONG_SECONDS = 66
PIECES, SHORTEST, LONGEST, PIECES_REPEATS = 8, 5, 60, 3
ASKED: dict[str, dict[str, Any]] = {
    "encoder": {"task": "encode"},
    "11 s, 1 beam": {"files": ["short"], "beams": 1},
    "11 s, 5 beams": {"files": ["short"], "beams": 5},
    "66 s, 5 beams": {"files": ["long"], "beams": 5},
    "8 files, 5 beams": {"files": [f"piece {i}" for i in range(PIECES)], "beams": 5},
    "whole process, 11 s, 5 beams": {"files": ["short"], "beams": 5},
}
OURS = """
import json, os, sys, time
from pathlib import Path
import numpy as np
from isa import load
from specbeam.speech import transcribe
path, threads = sys.argv[1], int(sys.argv[2])
lm = load(Path(path), os.environ["BENCH_ISA"], "int8", threads)
print("ready", flush=True)
backend = lm.backend
silence = np.zeros(backend.features_shape, np.float32)
slots = np.arange(backend.positions(silence), dtype=np.int64)
backend.reserve(len(slots))
for line in sys.stdin:
    asked = json.loads(line)
    clock = time.process_time if asked.get("processor") else time.perf_counter
    start = clock()
    if asked.get("task") == "encode":
        backend.place(backend.encode([silence], range(backend.encoder_layers), None), [slots])
        texts, tokens = [], 1
    else:
        how = {"temperature": (0.0,), "condition_on_previous_text": False, "vad_filter": False}
        found = transcribe(lm, asked["files"], "en", num_beams=asked["beams"], draft=asked.get("draft"), **how)
        texts = [one.text.strip() for one in found]
        tokens = sum(len(segment.tokens) for one in found for segment in one.segments)
    print(json.dumps([clock() - start, tokens, texts]), flush=True)
"""
THEIRS = """
import json, sys, time
import numpy as np
import ctranslate2
from faster_whisper import BatchedInferencePipeline, WhisperModel
path, threads = sys.argv[1], int(sys.argv[2])
model = WhisperModel(path, device="cpu", compute_type="int8", cpu_threads=threads)
batched = BatchedInferencePipeline(model)
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    start = time.perf_counter()
    texts, tokens = [], 1
    if asked.get("task") == "encode":
        features = ctranslate2.StorageView.from_array(np.zeros((1, model.model.n_mels, 3000), np.float32))
        np.asarray(model.model.encode(features))
    else:
        how = {"language": "en", "beam_size": asked["beams"], "temperature": 0.0, "vad_filter": False}
        tokens = 0
        for file in asked["files"]:
            if asked.get("batched"):
                own = how | {"vad_filter": True, "without_timestamps": False, "batch_size": 8}
                segments, _ = batched.transcribe(file, **own)
            else:
                segments, _ = model.transcribe(file, condition_on_previous_text=False, **how)
            segments = list(segments)
            texts.append("".join(segment.text for segment in segments).strip())
            tokens += sum(len(segment.tokens) for segment in segments)
    print(json.dumps([time.perf_counter() - start, tokens, texts]), flush=True)
"""
OUR_PROCESS = """-m specbeam transcribe
--quantize int8 --language en --temperature 0 --no-condition-on-previous-text --no-vad-filter"""
THEIR_PROCESS = """
import sys
from faster_whisper import WhisperModel
path, threads, beams, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = WhisperModel(path, device="cpu", compute_type="int8", cpu_threads=threads)
how = {"temperature": 0.0, "vad_filter": False, "condition_on_previous_text": False}
print("".join(segment.text for segment in model.transcribe(file, language="en", beam_size=beams, **how)[0]))
"""
WHISPER_CPP = """
import json, sys, time
from pywhispercpp.model import Model
path, threads = sys.argv[1], int(sys.argv[2])
quiet = {"print_progress": False, "print_realtime": False, "redirect_whispercpp_logs_to": None}
models = [Model(path, params_sampling_strategy=way, n_threads=threads, **quiet) for way in (0, 1)]
print("ready", flush=True)
how = {"language": "en", "temperature": 0.0, "temperature_inc": 0.0, "no_context": True}
for line in sys.stdin:
    asked = json.loads(line)
    start, texts = time.perf_counter(), []
    for file in asked["files"]:
        beams = {"beam_search": {"beam_size": asked["beams"], "patience": -1.0}}
        one = {"greedy": {"best_of": 1}} if asked["beams"] == 1 else beams
        found = models[asked["beams"] > 1].transcribe(file, **how, **one)
        texts.append(" ".join(segment.text.strip() for segment in found))
    print(json.dumps([time.perf_counter() - start, 0, texts]), flush=True)
"""


class Process:
    """A program that is started for each task, and ends with it. It writes the text of one file."""

    def __init__(self, command: list[str | Path], environment: Mapping[str, str]) -> None:
        self._command, self._environment = command, environment  # the command lacks the number of beams, and the file

    def ask(self, task: dict[str, Any]) -> tuple[float, int, list[str]]:
        """Seconds, no tokens, and the text."""
        command = [*self._command, str(task["beams"]), task["files"][0]]
        start = time.perf_counter()
        text = subprocess.run(command, env=self._environment, check=True, capture_output=True, text=True).stdout
        return time.perf_counter() - start, 0, [" ".join(text.split())]


class Engine:
    """An engine in a process of its own."""

    def __init__(
        self, python: str | Path, program: str, model: Path, threads: int, environment: Mapping[str, str]
    ) -> None:
        command = [python, "-c", program, str(model), str(threads)]
        self._peer = Peer(command, environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)
        self._read()
        self._peer.pause()

    def _read(self) -> str:
        assert self._peer.process.stdout is not None
        line = self._peer.process.stdout.readline()
        if not line:
            raise SystemExit("an engine ended")
        return line

    def ask(self, task: dict[str, Any]) -> tuple[float, int, list[str]]:
        """Seconds, tokens and texts."""
        with self._peer.running():
            assert self._peer.process.stdin is not None
            self._peer.process.stdin.write(json.dumps(task) + "\n")
            self._peer.process.stdin.flush()
            seconds, tokens, texts = json.loads(self._read())
        time.sleep(0.3)
        return seconds, tokens, texts

    def end(self) -> None:
        self._peer.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("audio", type=Path, nargs="+")
    parser.add_argument("--peer-python", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", nargs="*", choices=ASKED, default=[*ASKED])
    parser.add_argument("--drafts", nargs="+", default=[], metavar="DRAFT", help="ngram, suffix or a smaller Whisper")
    parser.add_argument("--whisper-cpp", type=Path, metavar="MODEL.bin")
    parser.add_argument("--whisper-cpp-python", type=Path, metavar="FILE")
    add_isa_option(parser)
    add_json_option(parser)
    given = parser.parse_args()
    print(describe(), kernels(given.isa))
    threads = str(given.threads)
    figures = Figures.of_this_run()
    with tempfile.TemporaryDirectory() as folder:
        files = sounds(given.audio, Path(folder))
        ours = {**os.environ, "BENCH_ISA": given.isa, "PYTHONPATH": str(Path(__file__).parent)}
        (libraries := Path(folder) / "libraries").mkdir()
        theirs = foreign_environment(OMP_NUM_THREADS=threads, **for_ctranslate2(given.isa))
        engines = [
            Engine(sys.executable, OURS, given.model, given.threads, ours),
            Engine(given.peer_python, THEIRS, given.model, given.threads, theirs),
        ]
        command = [sys.executable, *OUR_PROCESS.split(), "--model", given.model, "--threads", threads, "--num-beams"]
        processes = [
            Process(command, {**os.environ, **for_specbeam(given.isa, libraries)}),
            Process([given.peer_python, "-c", THEIR_PROCESS, given.model, threads], theirs),
        ]
        third = None
        if given.whisper_cpp is not None:
            third = Engine(
                given.whisper_cpp_python, WHISPER_CPP, given.whisper_cpp, given.threads, foreign_environment()
            )
            engines.append(third)
        if given.parts:
            print("\n| | ours over faster-whisper | ours, s | theirs, s | texts | ours over whisper.cpp |")
            print("| --- | --- | --- | --- | --- | --- |")
        try:
            for part in given.parts:
                task = ASKED[part] | {"files": [files[name] for name in ASKED[part].get("files", ())]}
                ways = [task, task | {"batched": True}] if part.startswith("8") else [task]
                both = processes if part.startswith("whole") else engines[:2]
                repeats = min(given.repeats, PIECES_REPEATS) if part.startswith("8") else given.repeats
                rows, texts = measured(both, task, ways, repeats)
                ratio = figures.add(part, "ours over faster-whisper", unit="times", samples=[one[0] for one in rows])
                own, other = (statistics.median(one[i] for one in rows) for i in (1, 2))
                about = f"{ratio.value:.2f} ({ratio.max:.2f} to {ratio.min:.2f})"
                beside = ""
                if third is not None and both is not processes and part != "encoder":
                    rows, says = measured([engines[0], third], task, [task], given.repeats)
                    ratio = figures.add(part, "ours over whisper.cpp", unit="times", samples=[one[0] for one in rows])
                    beside = f"{ratio.value:.2f} ({ratio.max:.2f} to {ratio.min:.2f}), texts {says}"
                print(f"| {part} | {about} | {own:.3f} | {other:.3f} | {texts} | {beside} |", flush=True)
            if given.drafts:
                compare_drafts(engines[0], files, given.drafts, given.repeats, figures)
        finally:
            for engine in engines:
                engine.end()
    figures.write(given.json)


def measured(
    engines: Sequence[Engine | Process], task: dict[str, Any], ways: list[dict[str, Any]], repeats: int
) -> tuple[list[tuple[float, float, float]], str]:
    """Ratios and seconds of turns, ours first, and whether the texts agree. The first turn warms up, and finds out the
    faster of their ways."""
    rows, says = [], ""
    for number in range(repeats + 1):
        own, own_tokens, own_texts = engines[0].ask(task)
        answers = [engines[1].ask(way) for way in ways]
        best = min(range(len(ways)), key=lambda i: answers[i][0] / max(answers[i][1], 1))
        other, tokens, texts = answers[best]
        ways = [ways[best]]
        differ = f"per token: {own_tokens} and {tokens}" if tokens else "differ"
        says = "equal" if own_texts == texts else differ
        scale = tokens / max(own_tokens, 1) if own_texts != texts and tokens else 1.0
        if number:
            rows.append((own / other * scale, own, other))
    return rows, says


def compare_drafts(engine: Engine, files: dict[str, str], drafts: list[str], repeats: int, figures: Figures) -> None:
    """Print the processor time with drafts over that without one. Texts must be equal."""
    print("\n| audio | beams | draft | processor time over that without a draft | s |\n| --- | --- | --- | --- | --- |")
    for name, about in (("once", "all, each once"), ("again", "the first, again and again")):
        for beams in (1, 5):
            task = {"files": [files[name]], "beams": beams, "processor": True}
            turns = []
            for number in range(repeats + 1):  # the first turn warms up
                ways = [None, *drafts] if number % 2 else [*drafts[::-1], None]
                answers = {draft: engine.ask(task | {"draft": draft}) for draft in ways}
                if any(texts != answers[None][2] for _, _, texts in answers.values()):
                    raise SystemExit("a draft changed a text")
                turns += [answers] if number else []
            for draft in drafts:
                samples = [answers[draft][0] / answers[None][0] for answers in turns]
                ratio = figures.add(f"{about}, {beams} beams, {draft}", "over no draft", unit="times", samples=samples)
                seconds = statistics.median(answers[draft][0] for answers in turns)
                shown = f"{ratio.value:.2f} ({ratio.max:.2f} to {ratio.min:.2f})"
                print(f"| {about} | {beams} | {draft} | {shown} | {seconds:.3f} |", flush=True)


def sounds(audio: list[Path], folder: Path) -> dict[str, str]:
    """The files of the tasks by their names."""
    samples = [np.asarray(load(path)) for path in audio]
    rng, everything = random.Random(0), np.concatenate(samples)
    long = np.tile(everything, -(-LONG_SECONDS * RATE // len(everything)))
    made = {"short": samples[0], "long": long[: LONG_SECONDS * RATE], "once": everything}
    made["again"] = np.tile(samples[0], -(-LONG_SECONDS * RATE // len(samples[0])))
    for i in range(PIECES):
        length, start = round(rng.uniform(SHORTEST, LONGEST) * RATE), rng.randrange(len(everything))
        made[f"piece {i}"] = np.tile(np.roll(everything, -start), 3)[:length]
    for name, own in made.items():
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(own.tobytes())
    return {name: str(folder / f"{name}.wav") for name in made}


if __name__ == "__main__":
    main()
