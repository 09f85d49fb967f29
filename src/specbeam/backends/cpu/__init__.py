"""The ``cpu`` backend: whole passes in native code, with int8, int4 or float32 weights. See docs/cpu.md.

A node's logits have the same bits in any pass, with any number of threads, and for any chunks of the prompt. The
kernels add in an order that depends on the node alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.contract import Backend, Source, TreeBatch, logits_wanted
from specbeam.backends.cpu.choosing import Choice, changed, normalizers_alone, with_own_log_probs
from specbeam.backends.cpu.library import Library, address, choose_isa, library
from specbeam.backends.cpu.model import new_model
from specbeam.backends.cpu.weights import MODES, Weights, load_weights
from specbeam.checkpoints.checkpoint import Checkpoint
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.description import description
from specbeam.checkpoints.parameters import expert_use
from specbeam.core.selection import AttentionProbe, NextBeams, Selection, SelectionRequest
from specbeam.errors import SpecbeamError, not_allowed, wrong_value
from specbeam.system.fork_guard import fork_guard
from specbeam.system.machine import usable_processors

logger = logging.getLogger("specbeam")

INT64_BYTES = 8
NO_SOURCE = np.empty(0, np.int64)
NO_FEATURES = np.empty(0, np.int64)
NODE_ARRAYS = ("tokens", "positions", "slots")
"""The arrays of a segment with a number for each node."""
NO_PROBE = (0, 0, 0, 0, 0)
MAX_THREADS = 1024
"""As in native/model.h."""


class CpuBackend(Backend):
    """A checkpoint packed for the native kernels.

    Args:
        quantize: "keep" (the values of a quantized GGUF file), "int8", "int4", "float32" or "auto". "auto" is "keep"
            for a quantized GGUF file, else "int8". Both keep MXFP4's values.
        threads: the number of threads per pass [$SPECBEAM_THREADS, else the processors this process may use].
        isa: the instruction set, "avx512", "avxvnni", "avx2", "neon" or "portable" [the best of this machine].

    Raises:
        SpecbeamError: an argument is not allowed, the kernels were not built, or the checkpoint cannot be loaded.
    """

    name = "cpu"
    has_threads = True
    device = "cpu"
    passes_at_once = 8
    encoder_batch = 1
    sources_in_slots = True

    def __init__(
        self, checkpoint: Checkpoint, quantize: str = "auto", threads: int | None = None, isa: str = ""
    ) -> None:
        self.threads = choose_threads(threads)
        self.quantize = choose_mode(quantize, checkpoint)
        self.precision = checkpoint.facts.quantization if self.quantize == "keep" else self.quantize
        config = checkpoint.config
        self._library = library(choose_isa(isa))
        self._config, self._isa = config, isa
        self._weights = load_weights(checkpoint, self.quantize)
        self.weights_digest = hashlib.sha256(f"{self._weights.digest} {description(config)}".encode()).hexdigest()
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        self.window = config.window
        self.expert_use = expert_use(config)
        # Exact weights deserve an exact cache. Quantized weights are rounded already, so integers are enough.
        integer_cache = self.quantize != "float32"
        try:
            self._model = new_model(self._library, config, self.threads, integer_cache)
        except SpecbeamError as error:
            raise SpecbeamError(f"{checkpoint.path}: {error}") from error
        # Not at exit: there a daemon thread may still be using it.
        weakref.finalize(self, self._library.specbeam_model_delete, self._model).atexit = False
        encoder = config.encoder
        self.features_shape = config.features_shape
        self.cross_heads = config.cross_heads
        self._encoder = encoder
        if encoder is not None:
            self.encoder_reads = "audio"
            self.encoder_layers, self.encoder_size = encoder.num_layers, encoder.hidden_size
        self.slot_bytes: int = self._library.specbeam_cache_slot_bytes(self._model)
        self._one_pass = threading.Lock()
        self._fill(config)
        if (started := self._library.specbeam_model_threads(self._model)) < self.threads:
            problem = "only %d of %d threads could be started: a limit on processes or on memory is reached"
            logger.warning(problem, started, self.threads)
            self.threads = started

    def reserve(self, slots: int) -> None:
        with self._one_pass:
            if wrong := self._library.specbeam_cache_reserve(self._model, slots):
                raise MemoryError(wrong.decode())

    def positions(self, source: Source) -> int:
        return source.shape[1] // 2

    @cached_property
    def encoder_digest(self) -> str:
        """Of its encoder's configuration and packed weights."""
        about = "" if self._encoder is None else description(self._encoder)
        return hashlib.sha256(f"{self._weights.digest_of('encoder.')} {about}".encode()).hexdigest()

    @fork_guard
    def encode(
        self, sources: Sequence[Source], layers: range, begun: Sequence[NDArray[np.float32]] | None
    ) -> list[NDArray[np.float32]]:
        """What some layers make of each source, after those before them, float32 [positions, hidden]."""
        assert self._encoder is not None
        found = []
        for number, source in enumerate(sources):
            features = np.ascontiguousarray(source, np.float32)
            shape = self._encoder.context_length, self._encoder.hidden_size
            states = np.empty(shape, np.float32) if begun is None else begun[number].copy()
            with self._one_pass:
                wrong = self._library.specbeam_encode(
                    self._model, features.ctypes.data, *features.shape, layers.start, layers.stop, address(states)
                )
            if wrong:
                raise RuntimeError(f"a pass of the encoder was refused: {wrong.decode()}")
            found.append(states)
        return found

    def place(
        self, states: Sequence[NDArray[np.float32]], slots: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[np.int64]]:
        """Let slots hold the keys and values of the encoder's output, [positions, hidden] each. Returns the slots."""
        return [self._place(*one) for one in zip(states, slots, strict=True)]

    @fork_guard
    def _place(self, states: NDArray[np.float32], slots: NDArray[np.int64]) -> NDArray[np.int64]:
        slots = np.ascontiguousarray(slots, np.int64)
        if len(slots) != len(states):
            raise RuntimeError("a source was refused: it has another number of slots than of states")
        with self._one_pass:
            wrong = self._library.specbeam_place(self._model, states.ctypes.data, address(slots), len(slots))
        if wrong:
            raise RuntimeError(f"a source was refused: {wrong.decode()}")
        return slots

    @fork_guard
    def forward(self, segments: list[TreeBatch]) -> NDArray[np.float32]:
        starts = accumulate((len(s.tokens) for s in segments), initial=0)
        wanted = np.concatenate([start + s.wanted for start, s in zip(starts, segments, strict=False)], dtype=np.int64)
        vocab = logits_wanted(segments, self.vocab_size)
        logits = np.empty((len(wanted), vocab), np.float32)
        structs, kept = _pack_segments(self._library, segments)
        with self._one_pass:
            wrong = self._library.specbeam_forward(
                self._model, structs, len(segments), address(wanted), len(wanted), vocab, address(logits)
            )
        del kept  # until here this frame kept alive all that the pass reads: self, the segments and their arrays
        if wrong:
            raise RuntimeError(f"a pass was refused: {wrong.decode()}")
        return logits

    @fork_guard
    def forward_ahead(
        self,
        segments: list[TreeBatch],
        requests: Sequence[SelectionRequest],
        beams: Sequence[NextBeams | None],
        passes: int,
        ends: Collection[int],
        halt: NDArray[np.int32],
    ) -> list[Selection]:
        rows = [slice(*both) for both in pairwise(accumulate((len(s.tokens) for s in segments), initial=0))]
        asked = list(zip(rows, requests, strict=True))
        vocab = logits_wanted(segments, self.vocab_size)
        if any(request.functions or request.top > vocab for request in requests):
            return self.choose(self.forward(segments), asked)
        logits = np.empty((rows[-1].stop, vocab), np.float32)
        choice = Choice(logits, asked, passes)
        structs, kept = _pack_segments(self._library, segments)
        ahead, kept_ahead = _pack_ahead(self._library, segments, beams, passes)
        last, done = np.array([*ends], np.int64), np.zeros(1, np.int64)
        with self._one_pass:
            wrong = self._library.specbeam_forward_ahead(
                self._model,
                structs,
                len(segments),
                ahead,
                address(logits),
                choice.packed,
                passes,
                address(last),
                len(last),
                address(halt),
                address(done),
            )
        del kept, kept_ahead
        if wrong:
            raise RuntimeError(f"passes were refused: {wrong.decode()}")
        return choice.selections(int(done[0]))

    def choose(
        self, logits: NDArray[np.float32], requests: Sequence[tuple[slice, SelectionRequest]]
    ) -> list[Selection]:
        natively = [(rows, normalizers_alone(one) if one.functions else one) for rows, one in requests]
        found = self._choose(logits, natively) if natively else []
        for number, (_, request) in enumerate(requests):
            if request.functions:
                found[number] = self._choose_by_functions(found[number], request)
        return found

    def _choose_by_functions(self, own: Selection, request: SelectionRequest) -> Selection:
        """The selection of a request with functions of the caller.

        Args:
            own: has the rows and their normalizers.
        """
        scores = changed(own.logits, request, own.normalizers)
        warped = replace(request, vocab=None, given=None, normalize=False, edits=(), allowed=None, functions=())
        (found,) = self._choose(scores, [(slice(0, len(scores)), warped)])
        found.scores[np.isnan(scores).any(-1), :1] = np.nan  # the processors look for it there
        return with_own_log_probs(found, own, request.given)

    def join(self, rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        return np.concatenate(rows)

    def array(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits

    def _choose(
        self, logits: NDArray[np.float32], requests: Sequence[tuple[slice, SelectionRequest]]
    ) -> list[Selection]:
        choice = Choice(np.ascontiguousarray(logits), requests)
        with self._one_pass:
            wrong = self._library.specbeam_choose(self._model, choice.packed)
        if wrong:
            raise RuntimeError(f"a selection request was refused: {wrong.decode()}")
        return choice.selections()

    def _fill(self, config: Config) -> None:
        """Give the native model the addresses of its parameters."""
        for name in self._weights.parts:
            self._parameter(name, self._weights, name)
        for name, (table, data) in self._weights.tables.items():
            if self._library.specbeam_model_table(
                self._model, name.encode(), table.kind, *table.shape, data.ctypes.data, data.size
            ):
                raise RuntimeError(f"{name} does not fit into the native model")
        for name, (weights, source) in self._shared(config).items():
            self._parameter(name, weights, source)
        if missing := self._library.specbeam_model_incomplete(self._model):
            raise RuntimeError(f"the native model lacks {missing.decode()}")

    def _shared(self, config: Config) -> dict[str, tuple[Weights, str]]:
        """Parameters that are others, too: where those lie, and their names there."""
        return {"head.weight": (self._weights, "embedding.weight")} if config.tied_head else {}

    def _parameter(self, name: str, weights: Weights, source: str) -> None:
        """Give the native model the weights of ``source`` under a name."""
        layer, own = -1, name
        if block := re.fullmatch(r"(.*)\bblocks\.(\d+)\.(.*)", name):
            layer, own = int(block[2]), block[1] + block[3]
        parts = weights.parts[source]
        if parts[0].is_vector:
            vector = weights.vector(source)
            status = self._library.specbeam_model_vector(
                self._model, layer, own.encode(), vector.ctypes.data, len(vector)
            )
        else:
            status = any(
                self._library.specbeam_model_matrix(
                    self._model,
                    layer,
                    own.encode(),
                    p.format,
                    p.matrices,
                    p.rows,
                    p.columns,
                    weights.address(p),
                    p.size,
                )
                for p in parts
            )
        if status:
            raise RuntimeError(f"{name} does not fit into the native model")


def choose_threads(threads: int | None) -> int:
    """The number of threads to use. Raises SpecbeamError unless it is a number from 1 to 1024."""
    given: Any = threads if threads is not None else os.environ.get("SPECBEAM_THREADS") or None
    if given is None:
        return min(usable_processors(), MAX_THREADS)
    try:
        number = int(given)
    except ValueError:
        number = 0
    if not 1 <= number <= MAX_THREADS:
        name = "threads" if threads is not None else "SPECBEAM_THREADS"
        raise not_allowed(name, given, f"1 to {MAX_THREADS}")
    return number


def choose_mode(quantize: str, checkpoint: Checkpoint) -> str:
    """How weights are kept, one of ``MODES``."""
    if quantize not in ("auto", *MODES):
        raise not_allowed("quantize", quantize, f"auto, {', '.join(MODES)}")
    if quantize == "keep" and not checkpoint.quantized:
        needs = f"needs a quantized GGUF file, and {checkpoint.path} is not quantized: give int8, int4 or float32"
        raise wrong_value("quantize", quantize, needs)
    if quantize == "auto":
        # Of a folder, only experts are quantized (MXFP4), which int8 keeps. Other matrices would become float32.
        return "keep" if checkpoint.quantized and not checkpoint.path.is_dir() else "int8"
    return quantize


def _pack_segments(native: Library, segments: Sequence[TreeBatch]) -> tuple[bytes, list[NDArray[Any]]]:
    """The segments as native structures, and the arrays that they point into."""
    kept: list[NDArray[Any]] = [
        np.concatenate([getattr(s, name) for s in segments], dtype=np.int64) for name in NODE_ARRAYS
    ]
    tokens, positions, slots = map(address, kept)
    rows, start = [], 0
    for s in segments:
        n, columns = s.suffixes.shape
        if not len(s.tokens) == len(s.positions) == len(s.slots) == n:
            raise RuntimeError("a pass was refused: a segment has arrays of different lengths")
        prefix = np.ascontiguousarray(s.prefix, np.int64)
        suffixes = np.ascontiguousarray(s.suffixes, np.int64)
        source = NO_SOURCE if s.source is None else np.ascontiguousarray(s.source, np.int64)
        features = NO_FEATURES if s.features is None else np.ascontiguousarray(s.features, np.int64)
        if len(features) not in (0, n):
            raise RuntimeError("a pass was refused: a segment has features of another number of nodes")
        kept += [prefix, suffixes, source, features]
        watched, watched_rows, shown, heads, scores = NO_PROBE if s.probe is None else _probe_fields(s.probe, kept)
        rows.append(
            {
                "nodes": n,
                "prefix_length": len(prefix),
                "suffix_columns": columns,
                "source_length": len(source),
                "tokens": tokens + start,
                "positions": positions + start,
                "slots": slots + start,
                "prefix": address(prefix),
                "suffixes": address(suffixes),
                "source": address(source),
                "features": address(features),
                "watched": watched,
                "rows": watched_rows,
                "shown": shown,
                "heads": heads,
                "scores": scores,
            }
        )
        start += n * INT64_BYTES
    return native.structures["Segment"].pack(rows), kept


def _probe_fields(probe: AttentionProbe, kept: list[NDArray[Any]]) -> tuple[int, int, int, int, int]:
    """The heads, rows and positions whose scores a pass writes, and where. The arrays are added to the kept ones."""
    scores = probe.scores
    if scores.dtype != np.float32 or not scores.flags.c_contiguous or len(scores) != len(probe.heads):
        raise RuntimeError("a pass was refused: the scores of probed heads are no array of float32 for each head")
    kept.append(heads := np.array(probe.heads, np.int64))
    watched, rows, shown = scores.shape
    return watched, rows, shown, address(heads), address(scores)


def _pack_ahead(
    native: Library, segments: Sequence[TreeBatch], beams: Sequence[NextBeams | None], passes: int
) -> tuple[bytes, list[NDArray[Any]]]:
    """How the segments go on, as native structures, and the arrays that they point into."""
    rows: list[dict[str, float]] = []
    kept: list[NDArray[Any]] = []
    for s, own in zip(segments, beams, strict=True):
        if len(s.ahead) != (passes - 1) * len(s.tokens):
            raise RuntimeError("passes were refused: a segment lacks slots of the nodes to come, or has more")
        kept.append(slots := np.ascontiguousarray(s.ahead, np.int64))
        if own is None:
            rows.append({"slots": address(slots), "scores": 0, "best_above": 0.0, "all_above": 0.0})
        elif len(own.scores) != len(s.tokens):
            raise RuntimeError("passes were refused: the beams have no scores, or too many")
        else:
            kept.append(scores := np.ascontiguousarray(own.scores, np.float32))
            above = {"best_above": own.best_above, "all_above": own.all_above}
            rows.append({"slots": address(slots), "scores": address(scores), **above})
    return native.structures["Ahead"].pack(rows), kept
