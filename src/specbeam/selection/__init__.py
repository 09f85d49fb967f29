"""Selection requests and selections: the few numbers that a strategy needs of the logits at some nodes.

Strategies make requests, the engine collects the requests of a forward pass, and a backend selects where the logits
are. :func:`select` and :func:`choose` do so in PyTorch on any device. They are the reference for other backends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.selection.noise import gumbel
from specbeam.selection.transfer import Values, to_cpu, to_device
from specbeam.selection.warpers import MASKED, min_p, only_the_likeliest, temperature, top_k, top_p, typical_p

BLOCK_SIZE = 128
"""The highest of many scores are searched in blocks of this size."""


@dataclass(frozen=True)
class Edit:
    """A change of single scores. All scores are read before any is changed, so a score may be named twice.

    Attributes:
        kind: "add" adds a value. "repeat" divides a positive score by the value, and multiplies a negative score by it
            (CTRL, Keskar et al. 2019, 4.1). "ban" sets -inf, and "set" sets the value. "raise" adds the score's
            absolute value times the value, unless the score is not finite.
        rows, tokens: which scores, int32 [m] each. Tokens that the logits lack are ignored.
        values: float32 [m]; empty for a ban.
    """

    kind: Literal["add", "repeat", "ban", "set", "raise"]
    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))


@dataclass(slots=True)
class Noise:
    """Gumbel noise for draws. It is the same for the same seed, stream, position and token, whatever else happens.

    Attributes:
        seed: below 2**64.
        streams: tell the sequences of one request apart, uint32 [n].
        positions: of the tokens to be drawn, in their sequences, uint32 [n].
    """

    seed: int
    streams: NDArray[np.uint32]
    positions: NDArray[np.uint32]


@dataclass(slots=True)
class SelectionRequest:
    """The numbers that a strategy needs of the logits at its n nodes.

    The logits are changed in the order of the attributes from ``normalize`` to ``renormalize``. Then noise is added,
    and the highest are selected. Of equal ones, the lower token ids come first.

    Attributes:
        top: how many of the highest tokens of each row; 0 for none.
        given: tokens whose log-probabilities are needed, too, int64 [n, m].
        vocab: use the logits of the first ``vocab`` tokens only, as if there were no others; None for all.
        normalize: change log-probabilities (beams), not logits.
        edits: changes of single scores, in this order.
        allowed: packed bits, the lowest bit first, uint8 [n, at least ceil(vocab / 8)]. Tokens with bit 0 become -inf.
            A mask of the target's vocabulary serves a draft that has fewer tokens, too.
        functions: take all scores, float32 [n, vocab], and return new ones. They run in PyTorch.
        one_of: in each row only the likeliest of these tokens keeps its score.
        temperature, top_k, top_p, min_p, typical_p: the warpers of transformers; None for none.
        renormalize: make log-probabilities of the changed scores.
        noise: rank by score and noise. The highest is then a draw from the softmax of the scores (Gumbel-max). The k
            highest are k draws without replacement (Kool et al. 2019, "Stochastic Beams and Where to Find Them", 2.3).
        total: ask for the logsumexp of the changed scores, too.
    """

    top: int = 1
    given: NDArray[np.int64] | None = None
    vocab: int | None = None
    normalize: bool = False
    edits: tuple[Edit, ...] = ()
    allowed: NDArray[np.uint8] | None = None
    functions: tuple[Callable[[Tensor], Tensor], ...] = ()
    one_of: tuple[int, ...] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    renormalize: bool = False
    noise: Noise | None = None
    total: bool = False


@dataclass(frozen=True, slots=True)
class Beams:
    """How the n nodes of a request go on as beams. Continuations are ranked by the score of the beam plus the token's.

    The next beams are the n best continuations, ties resolved by the beam, then by the token's rank in its row. If one
    of them is an end token, the strategy has to look.

    Attributes:
        scores: of the beams, float32 [n].
        best_above: the strategy has to look if the best next beam scores no more than this.
        all_above: the strategy has to look if some next beam scores no more than this.
    """

    scores: NDArray[np.float32]
    best_above: float
    all_above: float


@dataclass(eq=False, slots=True)
class Selection:
    """The result of a selection request at n nodes. Arrays are on the CPU.

    If the backend has gone ahead, there are n rows for each pass, and only the last pass has rows of logits.

    The rows of logits exist only until the strategy has taken its step, so a strategy that keeps selections keeps no
    logits alive.

    Attributes:
        tokens: the highest ones, the highest first, int64 [n, top].
        log_probs: their log-probabilities by the model itself, before any change, float32 [n, top].
        scores: their scores after all changes, without noise, float32 [n, top].
        normalizers: the logsumexp of the logits, float32 [n]. A log-probability is a logit minus this.
        noise: the noise of these tokens, float64 [n, top], if there was any.
        given: the log-probabilities of the tokens that were given, float32 [n, m].
        totals: the logsumexp of the scores after all changes, float32 [n].
        sources: where the rows of logits are: tensors, and rows of each, in this order. Empty after the step.
    """

    tokens: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    scores: NDArray[np.float32]
    normalizers: NDArray[np.float32]
    noise: NDArray[np.float64] | None
    given: NDArray[np.float32] | None
    totals: NDArray[np.float32] | None
    sources: tuple[tuple[Tensor, slice], ...]

    @property
    def logits(self) -> Tensor:
        """The rows of logits, float32 [n, vocab], on the backend's device. They are gathered when they are asked for.

        Raises:
            RuntimeError: the step is over.
        """
        if not self.sources:
            raise RuntimeError("a selection has its rows of logits only until the strategy has taken its step")
        rows = [logits[which] for logits, which in self.sources]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    @property
    def finite(self) -> bool:
        """Whether each row of logits has probabilities: no logit is NaN or +inf, and not all are -inf."""
        return bool(np.isfinite(self.normalizers).all())

    def passes(self, n: int) -> Iterator[Selection]:
        """The selections of the passes, at n nodes each."""
        for first in range(0, len(self.tokens), n):
            rows = slice(first, first + n)
            yield Selection(
                self.tokens[rows],
                self.log_probs[rows],
                self.scores[rows],
                self.normalizers[rows],
                None if self.noise is None else self.noise[rows],
                None if self.given is None else self.given[rows],
                None if self.totals is None else self.totals[rows],
                self.sources if rows.stop == len(self.tokens) else (),
            )

    def take(self, rows: NDArray[np.int64]) -> Selection:
        """The selection at some of the nodes, given by their rows, int64 [k]."""
        return gather([(self, row) for row in rows.tolist()])

    def copy(self, row: int) -> Selection:
        """The selection at one of the nodes, with a copy of its row of logits."""
        own = gather([(self, row)])
        own.sources = ((own.logits.clone(), slice(0, 1)),)
        return own

    def source(self, row: int) -> tuple[Tensor, slice]:
        """Where one of the rows of logits is."""
        for logits, which in self.sources:
            if row < (count := which.stop - which.start):
                return logits, slice(which.start + row, which.start + row + 1)
            row -= count
        raise IndexError("no such row")


def gather(rows: Sequence[tuple[Selection, int]]) -> Selection:
    """One selection of rows of several, whose requests must be of one kind."""

    def gathered(name: str) -> Any:
        if getattr(first, name) is None:
            return None
        return getattr(first, name)[numbers] if same else np.stack([getattr(one, name)[row] for one, row in rows])

    first, numbers = rows[0][0], [row for _, row in rows]
    same = all(selection is first for selection, _ in rows)
    all_there = all(selection.sources for selection, _ in rows)
    sources = tuple(selection.source(row) for selection, row in rows) if all_there else ()
    names = ("tokens", "log_probs", "scores", "normalizers", "noise", "given", "totals")
    return Selection(**{name: gathered(name) for name in names}, sources=sources)


def select(logits: Tensor, request: SelectionRequest, normalizers: NDArray[np.float32] | None = None) -> Selection:
    """Serve one request about all rows of logits, float32 [n, vocab] on any device.

    Args:
        normalizers: of the logits (:class:`Selection`), if a backend has computed them already, float32 [n].
    """
    (values,) = to_cpu([_select(logits, request, _seeds(request), normalizers)])
    return _split(values, [(logits, request)])[0]


def choose(logits: Tensor, requests: Sequence[tuple[slice, SelectionRequest]]) -> list[Selection]:
    """Serve the requests of a pass, each about a slice of the rows of its logits, float32 [rows, vocab].

    Requests of one kind are served together. All selections come to the CPU in one copy, so a GPU waits once.
    """
    parts = [(logits[rows], request) for rows, request in requests]
    kinds: dict[Any, list[int]] = {}
    for number, (_, request) in enumerate(requests):
        kinds.setdefault(_kind(request), []).append(number)
    values = []
    for same in kinds.values():
        slices = [requests[number][0] for number in same]
        adjacent = all(one.stop == other.start for one, other in pairwise(slices))
        whole = slice(slices[0].start, slices[-1].stop)
        rows = logits[whole] if adjacent else torch.cat([parts[number][0] for number in same])
        values.append(_select(rows, *_merged([parts[number] for number in same])))
    found: dict[int, Selection] = {}
    for same, arrays in zip(kinds.values(), to_cpu(values), strict=True):
        found.update(zip(same, _split(arrays, [parts[number] for number in same]), strict=True))
    return [found[i] for i in range(len(parts))]


def _select(
    logits: Tensor, request: SelectionRequest, seeds: NDArray[np.uint64], given: NDArray[np.float32] | None = None
) -> Values:
    """The values of a selection, as tensors on the device of the logits.

    Args:
        seeds: of each row's noise, uint64 [n].
        given: the normalizers, if they are known.
    """
    logits = logits[:, : request.vocab]
    normalizers = normalizers_of(logits) if given is None else to_device(given, logits.device)
    scores = changed(logits, request, normalizers)
    noise = None
    if request.noise is not None:
        noise = gumbel(seeds, request.noise.streams, request.noise.positions, logits.shape[-1], logits.device)
    tokens = highest(scores if noise is None else scores + noise, min(request.top, logits.shape[-1]))
    given_tokens = None if request.given is None else to_device(request.given, logits.device)
    return [
        tokens,
        logits.gather(-1, tokens) - normalizers[:, None],
        scores.gather(-1, tokens),
        normalizers,
        None if noise is None else noise.gather(-1, tokens),
        None if given_tokens is None else logits.gather(-1, given_tokens) - normalizers[:, None],
        scores.logsumexp(-1) if request.total else None,
    ]


def normalizers_of(logits: Tensor) -> Tensor:
    """The logsumexp of each row of logits, float32 [n, vocab]: its bits do not depend on the other rows.

    ``log_softmax`` has this property, ``logsumexp`` has not.
    """
    return logits.amax(-1) - logits.log_softmax(-1).amax(-1)


def changed(logits: Tensor, request: SelectionRequest, normalizers: Tensor) -> Tensor:
    """The scores that a request makes of logits, float32 [n, vocab] both, without noise. The logits are not changed.

    Args:
        normalizers: of the logits, float32 [n].
    """
    scores = logits - normalizers[:, None] if request.normalize else logits
    if request.edits and not request.normalize:
        scores = scores.clone()
    for edit in request.edits:
        apply(edit, scores)
    if request.allowed is not None:
        bits = to_device(request.allowed, logits.device)[..., None] >> torch.arange(8, device=logits.device)
        allowed = (bits & 1).flatten(-2)[:, : logits.shape[-1]].bool()
        scores = scores.masked_fill(~allowed, MASKED)
    for function in request.functions:
        scores = function(scores)
    if one_of := [token for token in request.one_of if token < logits.shape[-1]]:
        scores = only_the_likeliest(scores, one_of)
    for warp in (temperature, top_k, top_p, min_p, typical_p):
        if (value := getattr(request, warp.__name__)) is not None:
            scores = warp(scores, value)
    if request.renormalize:
        some = scores.amax(-1, keepdim=True) > MASKED  # else they would become NaN
        scores = torch.where(some, scores.log_softmax(-1), scores)
    return scores


def apply(edit: Edit, scores: Tensor) -> None:
    """Change scores, float32 [n, vocab], in place."""
    inside = edit.tokens < scores.shape[-1]
    rows, tokens = (to_device(a[inside].astype(np.int64), scores.device) for a in (edit.rows, edit.tokens))
    if edit.kind == "ban":
        scores[rows, tokens] = MASKED
        return
    values = to_device(edit.values[inside], scores.device)
    before = scores[rows, tokens]
    if edit.kind == "set":
        scores[rows, tokens] = values
    elif edit.kind == "add":
        scores[rows, tokens] = before + values
    elif edit.kind == "raise":
        scores[rows, tokens] = torch.where(before.isfinite(), before + before.abs() * values, before)
    else:
        scores[rows, tokens] = torch.where(before < 0, before * values, before / values)


def highest(scores: Tensor, k: int) -> Tensor:
    """The indices of the k highest scores of each row, the highest first, int64 [n, k]. Of equals the lower first.

    ``Tensor.topk`` orders equals as it likes, and is slow for long rows. So rows are searched in blocks: the k highest
    scores are in the k blocks with the highest maxima.
    """
    if k == 1:
        return scores.argmax(-1, keepdim=True)
    n, size = scores.shape
    if size > 4 * BLOCK_SIZE * max(1, k):
        padded = torch.nn.functional.pad(scores, (0, -size % BLOCK_SIZE), value=MASKED).view(n, -1, BLOCK_SIZE)
        blocks = padded.amax(-1).sort(dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values
        inside = padded.gather(1, blocks[..., None].expand(-1, -1, BLOCK_SIZE)).flatten(1)
        places = (blocks[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=scores.device)).flatten(1)
        return places.gather(-1, highest(inside, k))
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _seeds(request: SelectionRequest) -> NDArray[np.uint64]:
    if request.noise is None:
        return np.empty(0, np.uint64)
    return np.full(len(request.noise.streams), request.noise.seed, np.uint64)


def _kind(request: SelectionRequest) -> tuple[Any, ...]:
    """Equal for requests that can be served together. A request with functions of a caller is served alone."""
    warpers = request.temperature, request.top_k, request.top_p, request.min_p, request.typical_p
    flags = request.top, request.vocab, request.normalize, request.renormalize, request.total
    has_none = request.noise is None, request.allowed is None
    given = None if request.given is None else request.given.shape[1]
    edits = tuple(edit.kind for edit in request.edits)
    return (*flags, *has_none, given, edits, request.one_of, *warpers, id(request) if request.functions else None)


def _merged(parts: Sequence[tuple[Tensor, SelectionRequest]]) -> tuple[SelectionRequest, NDArray[np.uint64]]:
    """Requests of one kind as one request about all their rows, and the seeds of these rows."""
    first, seeds = parts[0][1], np.concatenate([_seeds(request) for _, request in parts])
    if len(parts) == 1:
        return first, seeds
    starts = np.cumsum([0, *(len(logits) for logits, _ in parts)])

    def joined(name: str) -> Any:
        return None if getattr(first, name) is None else np.concatenate([getattr(one, name) for _, one in parts])

    edits = []
    for number, edit in enumerate(first.edits):
        same = [request.edits[number] for _, request in parts]
        rows = [(one.rows + start).astype(np.int32) for one, start in zip(same, starts, strict=False)]
        values = [np.concatenate([getattr(one, name) for one in same]) for name in ("tokens", "values")]
        edits.append(Edit(edit.kind, np.concatenate(rows), *values))
    noise = None
    if first.noise is not None:
        noises = [request.noise for _, request in parts if request.noise is not None]
        noise = Noise(0, *(np.concatenate([getattr(one, name) for one in noises]) for name in ("streams", "positions")))
    merged = replace(first, given=joined("given"), edits=tuple(edits), allowed=joined("allowed"), noise=noise)
    return merged, seeds


def _split(values: Values, parts: Sequence[tuple[Tensor, SelectionRequest]]) -> list[Selection]:
    """The selections of requests of one kind."""
    selections, start = [], 0
    for logits, request in parts:
        end = start + len(logits)
        own: list[Any] = [None if array is None else array[start:end] for array in values]
        own.append(((logits[:, : request.vocab], slice(0, len(logits))),))
        selections.append(Selection(*own))
        start = end
    return selections
