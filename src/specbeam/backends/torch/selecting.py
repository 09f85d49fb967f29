"""Selections in PyTorch, on any device: the reference for other backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import Backend
from specbeam.backends.torch.noise import gumbel
from specbeam.backends.torch.transfer import Values, to_cpu, to_device
from specbeam.backends.torch.warpers import (
    min_p,
    only_the_likeliest,
    only_together,
    temperature,
    top_k,
    top_p,
    typical_p,
)
from specbeam.callers import returned_scores
from specbeam.selection import MASKED, Edit, Noise, Selection, SelectionRequest

BLOCK_SIZE = 128
"""The highest of many scores are searched in blocks of this size."""


class TensorBackend(Backend):
    """A backend whose logits are tensors, float32 [n, vocab] on its device."""

    @torch.inference_mode()
    def choose(self, logits: Tensor, requests: Sequence[tuple[slice, SelectionRequest]]) -> list[Selection]:
        if requests:
            return choose(logits, requests, self.normalizers_of)
        if logits.is_cuda:  # the time of a pass counts until then
            torch.cuda.synchronize(logits.device)
        return []

    def normalizers_of(self, logits: Tensor) -> Tensor:
        """The logsumexp of each row of logits, float32 [n]. A device may have a kernel for it."""
        return normalizers_of(logits)

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.cat([*rows])

    def array(self, logits: Tensor) -> NDArray[np.float32]:
        return logits.cpu().numpy()


def select(logits: Tensor, request: SelectionRequest, normalizers: NDArray[np.float32] | None = None) -> Selection:
    """Serve one request about all rows of logits, float32 [n, vocab] on any device.

    Args:
        normalizers: of the logits (:class:`Selection`), if a backend has computed them already, float32 [n].
    """
    given = None if normalizers is None else to_device(normalizers, logits.device)
    (values,) = to_cpu([_select(logits, request, _seeds(request), given)])
    return _split(values, [(logits, request)])[0]


def choose(
    logits: Tensor,
    requests: Sequence[tuple[slice, SelectionRequest]],
    normalizers: Callable[[Tensor], Tensor] | None = None,
) -> list[Selection]:
    """Serve the requests of a pass, each about a slice of the rows of its logits, float32 [rows, vocab].

    Requests of one kind are served together. All selections come to the CPU in one copy, so a GPU waits once.

    Args:
        normalizers: another function for :func:`normalizers_of`.
    """
    kinds, values = chosen(logits, requests, normalizers or normalizers_of)
    return split(kinds, to_cpu(values), [(logits[rows], request) for rows, request in requests])


def chosen(
    logits: Tensor, requests: Sequence[tuple[slice, SelectionRequest]], normalizers: Callable[[Tensor], Tensor]
) -> tuple[list[list[int]], list[Values]]:
    """What :func:`choose` selects, on the device of the logits.

    Returns:
        The requests of each kind, by their numbers, and the values of all their selections together.
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
        request, seeds = _merged([parts[number] for number in same])
        values.append(_select(rows, request, seeds, normalizers(rows[:, : request.vocab])))
    return list(kinds.values()), values


def split(
    kinds: Sequence[Sequence[int]], values: Sequence[Values], parts: Sequence[tuple[Tensor, SelectionRequest]]
) -> list[Selection]:
    """The selections of requests.

    Args:
        kinds, values: what :func:`chosen` gives, on the device or as arrays.
        parts: the rows of logits of each request, and the request.
    """
    found: dict[int, Selection] = {}
    for same, own in zip(kinds, values, strict=True):
        found.update(zip(same, _split(own, [parts[number] for number in same]), strict=True))
    return [found[i] for i in range(len(parts))]


def _select(
    logits: Tensor, request: SelectionRequest, seeds: NDArray[np.uint64], given: Tensor | None = None
) -> Values:
    """The values of a selection, as tensors on the device of the logits.

    Args:
        seeds: of each row's noise, uint64 [n].
        given: the normalizers, if they are known.
    """
    logits = logits[:, : request.vocab]
    normalizers = normalizers_of(logits) if given is None else given
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
        scores = to_device(returned_scores(function, scores.cpu().numpy().copy()), logits.device)
    if one_of := [token for token in request.one_of if token < logits.shape[-1]]:
        scores = only_the_likeliest(scores, one_of)
    if request.together is not None:
        scores = only_together(scores, *request.together)
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
    return (
        *flags,
        *has_none,
        given,
        edits,
        request.one_of,
        request.together,
        *warpers,
        id(request) if request.functions else None,
    )


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
        own += [((logits[:, : request.vocab], slice(0, len(logits))),), torch.cat]
        selections.append(Selection(*own))
        start = end
    return selections
