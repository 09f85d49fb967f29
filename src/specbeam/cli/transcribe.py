"""``specbeam transcribe``: what is said in files of sound, as text or subtitles."""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbeam.cli.arguments import (
    OFFERED,
    add_option_to,
    add_placement_to,
    add_revision_to,
    add_source_to,
    check_sources,
    completer,
    load_draft,
    load_model,
)
from specbeam.cli.printing import json_line, one_line, print_lines
from specbeam.cli.rows import fingerprint
from specbeam.errors import BAD_INPUT, FAILED, SpecbeamError
from specbeam.options.names import LOOKUPS, TRANSCRIPT_FORMATS

if TYPE_CHECKING:
    from specbeam.jobs.finished import FinishedFiles
    from specbeam.speech import Segment, Transcript, TranscriptStream
    from specbeam.speech.audio import Decoding, Samples
    from specbeam.speech.subtitles import Layout

MODEL = "whisper-base"
OF_WINDOWS = ("max_new_tokens", "num_return_sequences")
"""Options that mean something else for the windows of a file."""
DEFAULTS = {"num_beams": 5, "seed": 0}
"""Of Settings, which the command's help does not import, where they are not the options' own."""
JOURNAL, LOCK = ".specbeam-transcribe.jsonl", ".specbeam-transcribe.lock"
"""In the folder of the results: a line for each finished file, and what one process at a time holds."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "transcribe",
        help="write down what is said in files of sound",
        description="Write down what is said in files of sound or videos. The text of one file goes to standard output "
        "while it comes. With --output each file gets a result in a folder. Finished files are noted there: "
        "if the command is interrupted, the same command goes on with the others.",
    )
    parser.add_argument("audio", nargs="+", metavar="FILE", help="files of sound or videos; - reads standard input")
    add = parser.add_argument
    about = f"{', '.join(TRANSCRIPT_FORMATS)} (default %(default)s)"
    add("--format", choices=TRANSCRIPT_FORMATS, default="txt", metavar="FORMAT", help=about)
    add("--output", metavar="DIR", help="the folder of the results, which have the names of the files")
    add_layout_to(parser)
    model = parser.add_argument_group("model")
    add_source_to(model)
    add_revision_to(model)
    add_placement_to(model)
    about = "proposes the next tokens: a smaller Whisper, ngram or suffix. The text stays the same"
    source = model.add_argument("--draft", metavar="SOURCE", help=about)
    source.completer = completer(*LOOKUPS)
    add_options_to(parser)
    parser.set_defaults(run=run, model=MODEL, raw=True, adapter=None, draft_corpus=None)


def add_layout_to(parser: argparse.ArgumentParser) -> None:
    """The fields of Layout, under the same names."""
    layout = parser.add_argument_group("subtitles (srt and vtt, with --word-timestamps)")
    add = partial(layout.add_argument, type=int, metavar="N")
    about = "show each subtitle once for each word, which is underlined while it is spoken"
    layout.add_argument("--highlight-words", action="store_true", default=None, help=about)
    add("--max-line-width", help="characters of a line")
    add("--max-line-count", help="lines of a subtitle, filled across segments; needs --max-line-width")
    add("--max-words-per-line", help="words of a subtitle")


def add_options_to(parser: argparse.ArgumentParser) -> None:
    """The fields of Settings, under the same names. Settings has the defaults."""
    options = parser.add_argument_group("transcription (faster-whisper's names; see specbeam.speech.Settings)")
    add = options.add_argument
    yes_or_no = partial(add, action=argparse.BooleanOptionalAction)
    add("--language", metavar="NAME", help="the spoken language, such as en or English (default: the likeliest)")
    add("--task", metavar="TASK", help="transcribe, or translate into English (default transcribe)")
    for option in OFFERED:
        if option.speech and option.name not in OF_WINDOWS:
            add_option_to(options, option, usual=DEFAULTS.get(option.name))
    add(
        "--best-of",
        type=int,
        metavar="N",
        help="draw N texts at a temperature over 0, and take the likeliest (default 5)",
    )
    about = "0 searches; a text that is rejected is drawn again at the next one (default 0,0.2,0.4,0.6,0.8,1)"
    add("--temperature", type=numbers, metavar="T,T,...", help=about)
    limit = partial(add, type=number_or_none, action=Given, metavar="X")
    limit("--compression-ratio-threshold", help="reject texts that repeat themselves more than this (default 2.4)")
    limit("--log-prob-threshold", help="reject texts less likely than this, per token (default -1)")
    limit("--no-speech-threshold", help="windows less likely to be speech are silent (default 0.6)")
    yes_or_no("--condition-on-previous-text", help="go on from the text before (default)")
    about = "do not go on from a text that was drawn at a temperature above this (default 0.5)"
    add("--prompt-reset-on-temperature", type=float, metavar="T", help=about)
    add("--initial-prompt", metavar="TEXT", help="a text that the file goes on from")
    add("--hotwords", metavar="TEXT", help="words that are likely in all of the file")
    yes_or_no("--suppress-blank", help="no text begins with a space (default)")
    about = "ids of tokens that never follow; -1 for symbols that nobody speaks (default -1)"
    add("--suppress-tokens", type=integers, metavar="ID,ID,...", help=about)
    yes_or_no("--without-timestamps", help="write one segment for each window")
    add("--max-initial-timestamp", type=float, metavar="S", help="the latest start of a window's text (default 1)")
    add("--max-new-tokens", type=int, metavar="N", help="of a window of 30 seconds (default 224)")
    yes_or_no("--word-timestamps", help="find words and their times; json has them")
    add("--prepend-punctuations", metavar="MARKS", help="marks that belong to the next word")
    add("--append-punctuations", metavar="MARKS", help="marks that belong to the word before")
    about = "leave out text that nobody seems to have said, with silence of more than this around it"
    limit("--hallucination-silence-threshold", help=about)
    about = "list up to K different texts of each window, the best first; json has them (default 1)"
    add("--num-return-sequences", type=int, metavar="K", help=about)
    add("--top-logprobs", type=int, metavar="N", help="list the N likeliest tokens at each place; json has them")
    yes_or_no("--vad-filter", help="leave out silence (default)")
    add("--clip-timestamps", metavar="S,S,...", help="only these parts: start, end, start, end, ... in seconds")


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


numbers.__name__ = integers.__name__ = "list of numbers"


def number_or_none(text: str) -> float | None:
    return None if text == "none" else float(text)


number_or_none.__name__ = "number"


class Given(argparse.Action):
    """Keeps that an option was given, whose value may be None."""

    def __call__(self, parser: Any, args: argparse.Namespace, value: Any, option: str | None = None) -> None:
        setattr(args, self.dest, (value,))


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line gives, by the names of Settings.

    Raises:
        SpecbeamError: an option is wrong.
    """
    from specbeam.speech import Settings

    values: dict[str, Any] = {one.name: getattr(args, one.name, None) for one in fields(Settings)}
    values = {name: value for name, value in values.items() if value is not None}
    values = {name: value[0] if isinstance(value, tuple) else value for name, value in values.items()}
    Settings.of(values)
    return values


def layout_of(args: argparse.Namespace) -> Layout:
    """How words become subtitles.

    Raises:
        SpecbeamError: a number out of its range, another format, or no words.
    """
    from specbeam.speech.subtitles import Layout

    values = {one.name: getattr(args, one.name) for one in fields(Layout) if getattr(args, one.name) is not None}
    if values:
        name = f"--{next(iter(values)).replace('_', '-')}"
        if args.format not in ("srt", "vtt"):
            raise SpecbeamError(f"{name} is for subtitles: give --format srt or vtt, not {args.format}")
        if not args.word_timestamps:
            raise SpecbeamError(f"{name} needs words: give --word-timestamps")
    return Layout(**values)


def run(args: argparse.Namespace) -> int:
    settings, layout = settings_of(args), layout_of(args)  # wrong input is refused before a model is loaded
    check_sources(args)
    if args.output is not None:
        return run_into_folder(args, settings, layout)
    if len(args.audio) > 1:
        raise SpecbeamError(f"there are {len(args.audio)} files, and standard output takes one: give --output DIR")
    (path,) = args.audio
    began_at = time.perf_counter()
    with begun(path) as decoding:
        transcribe = transcriber(args, settings)
        transcript = print_while_it_comes(path, transcribe(decoding.samples()), args.format, layout)
    seconds = time.perf_counter() - began_at
    language = transcript.language or "no speech"
    print_lines(f"[{transcript.duration:,.1f} s of sound ({language}) in {seconds:,.1f} s]", file=sys.stderr)
    return 0


def begun(path: str) -> Decoding:
    """Begin to decode a file, or standard input."""
    from specbeam.speech import audio

    if path == "-":
        return audio.begin(sys.stdin.buffer, name="standard input")
    return audio.begin(path)


def transcriber(args: argparse.Namespace, settings: dict[str, Any]) -> Callable[[Samples], TranscriptStream]:
    """Load the model. Returns what transcribes samples.

    Raises:
        SpecbeamError: the model is no Whisper, or does not go with the options.
    """
    import numpy as np

    from specbeam.speech import speech_engine, transcribe_stream

    lm = load_model(args)
    draft, engine = load_draft(args, lm), speech_engine(lm)

    def transcribe(samples: Samples) -> TranscriptStream:
        return transcribe_stream(lm, samples, draft=draft, engine=engine, **settings)

    transcribe(np.zeros(0, np.int16))  # wrong options are reported once, and not for each file
    return transcribe


def print_while_it_comes(path: str, stream: TranscriptStream, form: str, layout: Layout) -> Transcript:
    """Print a transcript, piece by piece where the format allows it."""
    from specbeam.speech.subtitles import STREAMED, document

    segments = with_progress(path, stream)
    if form in STREAMED:
        for piece in STREAMED[form](segments, layout):
            print_lines(piece, end="")
    else:
        for _ in segments:
            pass
        print_lines(json_line(document(stream.transcript)))
    return stream.transcript


def with_progress(name: str, stream: TranscriptStream) -> Iterator[Segment]:
    """The segments, while their progress is shown."""
    from specbeam.jobs.progress import Progress

    def line(progress: Progress) -> str:
        return f"specbeam: {name}: {progress.done:,} of {progress.total:,} s"

    with Progress(line, desc=name, unit="s", leave=False) as progress:
        for segment in stream:
            progress.total = round(stream.transcript.duration)
            progress.show(round(segment.end))
            yield segment


def run_into_folder(args: argparse.Namespace, settings: dict[str, Any], layout: Layout) -> int:
    """Write a result for each file that has none. Returns the exit status."""
    from specbeam.jobs.files import locked
    from specbeam.jobs.finished import FinishedFiles
    from specbeam.speech.subtitles import written

    folder, results = Path(args.output), results_of(args.audio, args.format)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecbeamError(f"--output {folder}: the folder cannot be made: {error.strerror}") from error
    with (
        locked(folder / LOCK, folder, "another --output"),
        FinishedFiles(folder / JOURNAL, fingerprint("", [settings], args)) as finished,
    ):
        todo = {path: name for path, name in results.items() if not finished.has(name, Path(path))}
        summary = Summary(len(results), earlier=len(results) - len(todo))
        if todo:
            with closing(begun_ahead(todo)) as files:
                try:
                    write = partial(written, form=args.format, layout=layout)
                    transcribe_files(files, todo, transcriber(args, settings), write, finished, summary)
                except KeyboardInterrupt:
                    raise KeyboardInterrupt(summary.so_far(folder)) from None
    print_lines(summary.line(folder), file=sys.stderr)
    return summary.status


def results_of(paths: Sequence[str], form: str) -> dict[str, str]:
    """The name of each file's result.

    Raises:
        SpecbeamError: two files would have the same one.
    """
    names: dict[str, str] = {}
    for path in dict.fromkeys(paths):
        if path == "-":
            raise SpecbeamError("- reads standard input, which has no name for a result: leave --output out")
        if (other := names.setdefault(name := f"{Path(path).stem}.{form}", path)) != path:
            raise SpecbeamError(
                f"{other} and {path} would both be written to {name}: name two folders, in two commands"
            )
    return {path: name for name, path in names.items()}


def begun_ahead(paths: Iterable[str]) -> Generator[tuple[str, Decoding | SpecbeamError]]:
    """Each file with its decoding, or why it cannot be read. The next one is decoded meanwhile."""
    waiting: deque[tuple[str, Decoding | SpecbeamError]] = deque()
    try:
        for path in paths:
            try:
                waiting.append((path, begun(path)))
            except SpecbeamError as error:
                waiting.append((path, error))
            if len(waiting) > 1:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, decoding in waiting:
            if not isinstance(decoding, SpecbeamError):
                decoding.close()


def transcribe_files(
    files: Iterable[tuple[str, Decoding | SpecbeamError]],
    results: Mapping[str, str],
    transcribe: Callable[[Samples], TranscriptStream],
    write: Callable[[Transcript], str],
    finished: FinishedFiles,
    summary: Summary,
) -> None:
    """Transcribe files one after another. A file that fails gets a line, and the others go on."""
    for path, decoding in files:
        try:
            if isinstance(decoding, SpecbeamError):
                raise decoding
            with decoding:
                stream = transcribe(decoding.samples())
            for _ in with_progress(f"{path} ({summary.number} of {summary.total})", stream):
                pass
            finished.add(results[path], Path(path), write(stream.transcript))
            summary.finished(stream.transcript)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; {summary.so_far(finished.folder)}") from error
        except Exception as error:
            summary.failed(error)
            where = "" if isinstance(error, SpecbeamError) else f"{path} failed: "
            print_lines(f"specbeam: {where}{one_line(error)}", file=sys.stderr)


@dataclass
class Summary:
    """What the last line says.

    Attributes:
        total: files.
        earlier: how many of them were finished before.
        done: how many were finished now.
        bad: how many cannot be transcribed.
        broken: how many failed for another reason.
        seconds: of sound.
    """

    total: int
    earlier: int
    done: int = 0
    bad: int = 0
    broken: int = 0
    seconds: float = 0.0
    began_at: float = field(default_factory=time.perf_counter)

    @property
    def number(self) -> int:
        """Of the file that is next."""
        return self.earlier + self.done + self.bad + self.broken + 1

    @property
    def status(self) -> int:
        """The exit status."""
        return BAD_INPUT if self.bad else FAILED if self.broken else 0

    def finished(self, transcript: Transcript) -> None:
        self.done += 1
        self.seconds += transcript.duration

    def failed(self, error: Exception) -> None:
        if isinstance(error, SpecbeamError):
            self.bad += 1
        else:
            self.broken += 1

    def so_far(self, folder: Path) -> str:
        """How far an interrupted command is."""
        files = f"{self.earlier + self.done:,} of {self.total:,} files are finished"
        return f"{files}, in {folder}. The same command goes on from there"

    def line(self, folder: Path) -> str:
        before = f" ({self.earlier:,} of them earlier)" if self.earlier else ""
        took = f"{self.seconds:,.1f} s of sound in {time.perf_counter() - self.began_at:,.1f} s"
        return f"[{self.total:,} files{before}, {self.bad + self.broken:,} failed, {took}, in {folder}]"
