"""Selections in native code, for requests of ``specbeam.core.selection``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.backends.cpu.library import address, library
from specbeam.core.callers import returned_scores
from specbeam.core.selection import MASKED, Edit, Selection, SelectionRequest
from specbeam.options.declared import SHAPING

JOINED = ("edit_rows", "edit_tokens", "edit_values", "given", "allowed", "streams", "positions")
"""The arrays of a ``Choice`` that join parts of all requests."""
NOTHING = np.empty(0, np.uint8)
NO_WARPERS = SHAPING | {"typical_p": 0.0}  # where 1 would not be exact


class Choice:
    """The native structure of the selection requests of a pass, and the arrays that it points into.

    Args:
        logits: float32 [rows, vocab], in one piece.
        passes: make room for the results of this many passes.

    Attributes:
        packed: the structure, for native code.

    Raises:
        ValueError: a request does not fit the logits.
    """

    def __init__(
        self, logits: NDArray[np.float32], requests: Sequence[tuple[slice, SelectionRequest]], passes: int = 1
    ) -> None:
        self.logits, self.requests, self.passes = logits, requests, passes
        self._columns = logits.shape[1]
        native = library()
        structure = native.structures["Choice"]
        dtypes = structure.dtypes
        self._joined = {name: Joined(dtypes[name]) for name in JOINED}
        self._edit_kinds = native.enums["EditKind"]
        self._edits: list[dict[str, int]] = []
        self._one_of: list[int] = []
        self._top_count = self._row_count = 0
        self._fields = [self._add(rows, request) for rows, request in requests]
        inputs: dict[str, NDArray[Any]] = {
            "logits": logits,
            "requests": np.frombuffer(bytearray(native.structures["SelectionRequest"].pack(self._fields)), np.uint8),
            "edits": np.frombuffer(bytearray(native.structures["Edit"].pack(self._edits)), np.uint8),
            "one_of": np.array(self._one_of, dtypes["one_of"]),
            **{name: joined.array() for name, joined in self._joined.items()},
        }
        top, rows_of_all, given = self._top_count, self._row_count, len(inputs["given"])
        noises = top if len(inputs["streams"]) else 0
        # Arrays of 8-byte numbers are first, so that all have their alignment.
        sizes = {"tokens": top, "noise": noises, "log_probs": top, "scores": top, "given_log_probs": given}
        sizes |= {"normalizers": rows_of_all, "totals": rows_of_all}
        space = Space(8 * passes * sum(sizes.values()))
        outputs = {name: space.take(passes * size, dtypes[name]) for name, size in sizes.items()}
        values = {
            "logit_rows": logits.shape[0],
            "logit_columns": self._columns,
            "request_count": len(requests),
            "edit_count": len(self._edits),
            "entry_count": len(inputs["edit_rows"]),
            "value_count": len(inputs["edit_values"]),
            "one_of_count": len(self._one_of),
            "given_count": given,
            "allowed_bytes": len(inputs["allowed"]),
            "noise_count": len(inputs["streams"]),
            "top_count": top,
            "row_count": rows_of_all,
            **{name: address(array) for name, array in inputs.items()},
            **{name: at for name, (_, at) in outputs.items()},
        }
        self.packed = structure.pack([values])
        self._inputs = inputs
        self._outputs = [array for array, _ in outputs.values()]

    def selections(self, done: int = 1) -> list[Selection]:
        """The selections from the logits of the passes that were done. Only the last one has its logits."""
        by_pass = [array.reshape(self.passes, -1) for array in self._outputs]
        tokens, noise, log_probs, scores, given_log_probs, normalizers, totals = by_pass
        selections = []
        for (rows, request), fields in zip(self.requests, self._fields, strict=True):
            n, vocab, top, width = fields["rows"], fields["vocab"], fields["top"], fields["given"]
            at, row, given = fields["top_place"], fields["row_place"], fields["given_place"]
            here = self.logits if vocab == self._columns else self.logits[:, :vocab]
            of_rows = slice(row, row + n)
            found, shape = slice(at, at + n * top), (done * n, top)
            selections.append(
                Selection(
                    tokens[:done, found].reshape(shape),
                    log_probs[:done, found].reshape(shape),
                    scores[:done, found].reshape(shape),
                    normalizers[:done, of_rows].reshape(-1),
                    None if request.noise is None else noise[:done, found].reshape(shape),
                    None
                    if request.given is None
                    else given_log_probs[:done, given : given + n * width].reshape(done * n, width),
                    totals[:done, of_rows].reshape(-1) if request.total else None,
                    ((here, rows),),
                )
            )
        return selections

    def _add(self, rows: slice, request: SelectionRequest) -> dict[str, Any]:
        """Add a request's parts. Returns the fields of its structure."""
        joined, columns, n = self._joined, self._columns, rows.stop - rows.start
        vocab = columns if request.vocab is None else min(request.vocab, columns)
        top = min(request.top, vocab)
        top_place, row_place = self._top_count, self._row_count
        self._top_count += n * top
        self._row_count += n
        given = given_place = edits = one_of = seed = 0
        allowed_place = noise_place = -1
        if request.given is not None:
            given = request.given.shape[1]
            given_place = joined["given"].add(request.given, (n, given))
        if request.edits:
            edits = len(self._edits)
            for edit in request.edits:
                begin, values = joined["edit_rows"].add(edit.rows), joined["edit_values"].size
                joined["edit_tokens"].add(edit.tokens, edit.rows.shape)
                if edit.kind != "ban":
                    joined["edit_values"].add(edit.values, edit.rows.shape)
                kind, end = self._edit_kinds[edit.kind], joined["edit_rows"].size
                self._edits.append({"kind": kind, "begin": begin, "end": end, "values": values})
        if request.one_of:
            one_of = len(self._one_of)
            self._one_of += request.one_of
        if request.allowed is not None:
            width = -(-vocab // 8)  # a mask of the target's tokens may be about a draft with fewer
            allowed_place = joined["allowed"].add(request.allowed[:, :width], (n, width))
        if request.noise is not None:
            seed, noise_place = request.noise.seed, joined["streams"].add(request.noise.streams, (n,))
            joined["positions"].add(request.noise.positions, (n,))
        together_begin, together_end = request.together or (0, 0)
        return {
            "first_row": rows.start,
            "rows": n,
            "vocab": vocab,
            "top": top,
            "top_place": top_place,
            "given": given,
            "given_place": given_place,
            "row_place": row_place,
            "edits_begin": edits,
            "edits_end": edits + len(request.edits),
            "one_of_begin": one_of,
            "one_of_end": one_of + len(request.one_of),
            "together_begin": together_begin,
            "together_end": together_end,
            "allowed_place": allowed_place,
            "noise_place": noise_place,
            "normalize": request.normalize,
            "renormalize": request.renormalize,
            "total": request.total,
            **NO_WARPERS,
            **dict(request.warpers),
            "seed": seed,
        }


class Space:
    """Memory for arrays. Its address is asked for once. Arrays of 8-byte numbers are taken first."""

    def __init__(self, size: int) -> None:
        self._bytes = np.empty(size, np.uint8)
        self._address = address(self._bytes)
        self._taken = 0

    def take(self, count: int, dtype: Any) -> tuple[NDArray[Any], int]:
        """An array of this many numbers, and its address."""
        array = np.frombuffer(self._bytes, dtype, count, self._taken) if count else np.empty(0, dtype)
        at = self._address + self._taken
        self._taken += array.nbytes
        return array, at


class Joined:
    """Arrays of one number type, one after another."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.size = dtype, 0
        self.arrays: list[NDArray[Any]] = []

    def add(self, array: NDArray[Any], shape: tuple[int, ...] | None = None) -> int:
        """Returns the place of the array's first number.

        Raises:
            ValueError: the array has another shape.
        """
        if shape is not None and array.shape != shape:
            raise ValueError(f"a part of a selection request has the shape {array.shape}, not {shape}")
        place = self.size
        self.arrays.append(array.ravel())
        self.size += array.size
        return place

    def array(self) -> NDArray[Any]:
        if not self.arrays:
            return NOTHING
        return np.concatenate(self.arrays, dtype=self.dtype, casting="same_kind")


# A caller's functions: all scores are changed here up to them, and native code selects from the returned scores.


def normalizers_alone(request: SelectionRequest) -> SelectionRequest:
    return SelectionRequest(top=0, vocab=request.vocab)


def changed(
    logits: NDArray[np.float32], request: SelectionRequest, normalizers: NDArray[np.float32]
) -> NDArray[np.float32]:
    """The scores that a request makes of logits, float32 [n, vocab] both, up to its functions and with them.

    Args:
        normalizers: of the logits, float32 [n].
    """
    scores = logits - normalizers[:, None] if request.normalize else logits.copy()
    with np.errstate(all="ignore"):
        for edit in request.edits:
            apply(edit, scores)
    if request.allowed is not None:
        allowed = np.unpackbits(request.allowed, axis=1, bitorder="little")[:, : scores.shape[1]]
        scores[allowed == 0] = MASKED
    for function in request.functions:
        scores = returned_scores(function, scores)
    return scores


def apply(edit: Edit, scores: NDArray[np.float32]) -> None:
    """Change scores, float32 [n, vocab], in place."""
    inside = edit.tokens < scores.shape[1]
    at = edit.rows[inside], edit.tokens[inside]
    before, values = scores[at], edit.values[inside] if edit.kind != "ban" else np.float32(MASKED)
    match edit.kind:
        case "add":
            scores[at] = before + values
        case "repeat":
            scores[at] = np.where(before < 0, before * values, before / values)
        case "raise":
            scores[at] = np.where(np.isfinite(before), before + np.abs(before) * values, before)
        case "ban" | "set":
            scores[at] = values


def with_own_log_probs(found: Selection, own: Selection, given: NDArray[np.int64] | None) -> Selection:
    """A selection from changed scores, with the log-probabilities by the model itself.

    Args:
        own: has the logits and their normalizers.
        given: tokens whose log-probabilities are needed, too.
    """

    def log_probs(tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        return np.take_along_axis(own.logits, tokens, -1) - own.normalizers[:, None]

    return replace(
        found,
        log_probs=log_probs(found.tokens),
        normalizers=own.normalizers,
        given=None if given is None else log_probs(given),
        sources=own.sources,
    )
