"""Selections in PyTorch, on any device: the reference for other backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import Backend
from specbeam.backends.torch.tensors import Values, to_cpu, to_device
from specbeam.core.callers import returned_scores
from specbeam.core.selection import MASKED, Edit, Noise, Selection, SelectionRequest

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF
BLOCK_SIZE = 128
"""The highest of many scores are searched in blocks of this size."""


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Four random words for each counter: Philox4x32-10 (Salmon et al. 2011, "Parallel Random Numbers", 3.3).

    Args:
        counter: four words, int64 of one shape, each below 2**32.
        key: two such words.
    """
    c, k = list(counter), list(key)
    for _ in range(ROUNDS):
        low = [word * multiplier for word, multiplier in zip(c[::2], MULTIPLIERS, strict=True)]
        high = [product >> 32 & WORD for product in low]  # products wrap around, and their bits are right
        c = [high[1] ^ c[1] ^ k[0], low[1] & WORD, high[0] ^ c[3] ^ k[1], low[0] & WORD]
        k = [word + step & WORD for word, step in zip(k, KEY_STEPS, strict=True)]
    return c


def gumbel(
    seeds: NDArray[np.uint64],
    streams: NDArray[np.uint32],
    positions: NDArray[np.uint32],
    vocab: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Draws from the standard Gumbel distribution for the first tokens, float64 [n, vocab].

    The key is the seed, and the counter is (token // 4, position, stream, 0). The word's number is token % 4.

    Args:
        seeds, streams, positions: of each row, [n].
    """
    bits = seeds.astype(np.int64)  # torch.compile has no bit operations of uint64
    columns = (bits & WORD, bits >> 32 & WORD, positions, streams)
    low, high, position, stream = to_device(np.stack([c.astype(np.int64) for c in columns])[..., None], device)
    quarter = torch.arange(-(-vocab // 4), device=device)[None]
    words = torch.stack(philox([quarter, position, stream, torch.zeros_like(quarter)], [low, high]), dim=-1)
    uniform = (words.flatten(1)[:, :vocab].double() + 0.5) * 2.0**-32
    return -(-uniform.log()).log()


def only_the_likeliest(scores: Tensor, tokens: Sequence[int]) -> Tensor:
    """Scores [n, vocab] with -inf for all of some tokens but the likeliest of them, in each row."""
    columns = to_device(np.array(tokens), scores.device)
    among = scores[:, columns]
    best = among.argmax(-1, keepdim=True)
    scores = scores.clone()
    scores[:, columns] = torch.full_like(among, MASKED).scatter(-1, best, among.gather(-1, best))
    return scores


def only_together(scores: Tensor, first: int, end: int) -> Tensor:
    """Scores [n, vocab] where the tokens from first to before end are alone if together they beat each other token."""
    among, others = scores[:, first:end], torch.cat([scores[:, :first], scores[:, end:]], dim=-1)
    if not among.shape[-1] or not others.shape[-1]:
        return scores
    alone = (among.logsumexp(-1) > others.amax(-1))[:, None]
    is_other = torch.ones(scores.shape[-1], dtype=torch.bool, device=scores.device)
    is_other[first:end] = False
    return scores.masked_fill(alone & is_other, MASKED)


def temperature(scores: Tensor, value: float) -> Tensor:
    """Divide by the temperature."""
    return scores / value


def top_k(scores: Tensor, k: int) -> Tensor:
    """Keep the k highest scores, and those equal to the lowest of them (Fan et al. 2018, 5.4)."""
    lowest = scores.topk(min(k, scores.shape[-1])).values[..., -1:]
    return scores.masked_fill(scores < lowest, MASKED)


def top_p(scores: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens whose probabilities first sum to p (nucleus sampling, Holtzman et al. 2020, 3.1)."""
    ascending, order = scores.sort(dim=-1)
    below = ascending.softmax(-1).cumsum(-1) <= 1 - p
    below[..., -1] = False  # the likeliest always stays
    return scores.masked_fill(torch.zeros_like(below).scatter(-1, order, below), MASKED)


def min_p(scores: Tensor, p: float) -> Tensor:
    """Keep tokens at least p times as likely as the likeliest (Nguyen et al. 2024, 3)."""
    probabilities = scores.softmax(-1)
    return scores.masked_fill(probabilities < p * probabilities.amax(-1, keepdim=True), MASKED)


def typical_p(scores: Tensor, p: float) -> Tensor:
    """Keep the tokens whose surprise is nearest to the expected one, until they sum to p (Meister et al. 2023, 4)."""
    log_probs = scores.log_softmax(-1)
    expected = -(log_probs * log_probs.exp()).nansum(-1, keepdim=True)  # impossible tokens are 0 * -inf
    ascending, order = (-log_probs - expected).abs().sort(dim=-1)
    number = (scores.gather(-1, order).softmax(-1).cumsum(-1) < p).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    far = ascending > ascending.gather(-1, number)
    return scores.masked_fill(torch.zeros_like(far).scatter(-1, order, far), MASKED)


WARPERS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    warp.__name__: warp for warp in (temperature, top_k, top_p, min_p, typical_p)
}
"""By the options that ask for them."""


class Operations(NamedTuple):
    """The slow operations of selections. A device may have kernels for them."""

    normalizers: Callable[[Tensor], Tensor]
    gumbel: Callable[..., Tensor]
    highest: Callable[[Tensor, int], Tensor]


class TensorBackend(Backend):
    """A backend whose logits are tensors, float32 [n, vocab] on its device."""

    @torch.inference_mode()
    def choose(self, logits: Tensor, requests: Sequence[tuple[slice, SelectionRequest]]) -> list[Selection]:
        if requests:
            return choose(logits, requests, self.operations)
        if logits.is_cuda:  # the time of a pass counts until then
            torch.cuda.synchronize(logits.device)
        return []

    @property
    def operations(self) -> Operations:
        return PLAIN

    def join(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.cat([*rows])

    def array(self, logits: Tensor) -> NDArray[np.float32]:
        return logits.cpu().numpy()


@dataclass(frozen=True, eq=False)
class Kind:
    """Requests of one kind, which are served together.

    Attributes:
        numbers: of the requests.
        parts: the rows of logits of each.
        request: all of them as one request about all their rows.
        seeds: of each row's noise, uint64 [n].
    """

    numbers: Sequence[int]
    parts: Sequence[slice]
    request: SelectionRequest
    seeds: NDArray[np.uint64]

    def rows(self, logits: Tensor) -> Tensor:
        """The logits of all requests, [n, vocab]."""
        if all(one.stop == other.start for one, other in pairwise(self.parts)):
            return logits[self.parts[0].start : self.parts[-1].stop]
        return torch.cat([logits[rows] for rows in self.parts])

    def own_rows(self) -> list[slice]:
        """The rows of each request among the rows of all."""
        return [slice(*both) for both in pairwise(accumulate((p.stop - p.start for p in self.parts), initial=0))]

    def select(self, logits: Tensor, operations: Operations) -> Values:
        """The values of a selection about the rows, as tensors on the device of the logits."""
        rows = self.rows(logits)
        return _select(rows, self.request, self.seeds, operations)

    def selections(self, values: Values, logits: Tensor) -> list[tuple[int, Selection]]:
        """The selection of each request, beside its number.

        Args:
            values: arrays [passes, n, ...].
            logits: of the last pass.
        """
        selections = []
        for number, part, rows in zip(self.numbers, self.parts, self.own_rows(), strict=True):
            arrays: list[Any] = [None if a is None else np.concatenate(a[:, rows]) for a in values]
            arrays += [((logits[part, : self.request.vocab], slice(0, part.stop - part.start)),), torch.cat]
            selections.append((number, Selection(*arrays)))
        return selections


def select(logits: Tensor, request: SelectionRequest, normalizers: NDArray[np.float32] | None = None) -> Selection:
    """Serve one request about all rows of logits, float32 [n, vocab] on any device.

    Args:
        normalizers: of the logits (:class:`Selection`), if a backend has computed them already, float32 [n].
    """
    operations = PLAIN
    if normalizers is not None:
        operations = PLAIN._replace(normalizers=lambda logits: to_device(normalizers, logits.device))
    return choose(logits, [(slice(0, len(logits)), request)], operations)[0]


def choose(
    logits: Tensor, requests: Sequence[tuple[slice, SelectionRequest]], operations: Operations | None = None
) -> list[Selection]:
    """Serve the requests of a pass, each about a slice of the rows of its logits, float32 [rows, vocab].

    Requests of one kind are served together. All selections come to the CPU in one copy, so a GPU waits once.
    """
    kinds = kinds_of(requests)
    selected = [kind.select(logits, operations or PLAIN) for kind in kinds]
    values = to_cpu([[None if one is None else one[None] for one in tensors] for tensors in selected])
    pairs = (pair for kind, arrays in zip(kinds, values, strict=True) for pair in kind.selections(arrays, logits))
    by_number = dict(pairs)
    return [by_number[i] for i in range(len(requests))]


def kinds_of(requests: Sequence[tuple[slice, SelectionRequest]]) -> list[Kind]:
    """The requests of a pass by their kinds."""
    kinds: dict[Any, list[int]] = {}
    for number, (_, request) in enumerate(requests):
        kinds.setdefault(_kind(request), []).append(number)
    return [
        Kind(same, [requests[number][0] for number in same], *_merged([requests[number] for number in same]))
        for same in kinds.values()
    ]


def _select(logits: Tensor, request: SelectionRequest, seeds: NDArray[np.uint64], operations: Operations) -> Values:
    logits = logits[:, : request.vocab]
    normalizers = operations.normalizers(logits)
    scores = changed(logits, request, normalizers)
    noise = None
    if request.noise is not None:
        at = request.noise.streams, request.noise.positions
        noise = operations.gumbel(seeds, *at, logits.shape[-1], logits.device)
    ranked = scores if noise is None else scores + noise
    tokens = operations.highest(ranked, min(request.top, logits.shape[-1]))
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
    for name, value in request.warpers:
        scores = WARPERS[name](scores, value)
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


PLAIN = Operations(normalizers_of, gumbel, highest)


def _seeds(request: SelectionRequest) -> NDArray[np.uint64]:
    if request.noise is None:
        return np.empty(0, np.uint64)
    return np.full(len(request.noise.streams), request.noise.seed, np.uint64)


def _kind(request: SelectionRequest) -> tuple[Any, ...]:
    """Equal for requests that can be served together. A request with functions of a caller is served alone."""
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
        request.warpers,
        id(request) if request.functions else None,
    )


def _merged(parts: Sequence[tuple[slice, SelectionRequest]]) -> tuple[SelectionRequest, NDArray[np.uint64]]:
    """Requests of one kind as one request about all their rows, and the seeds of these rows."""
    first, seeds = parts[0][1], np.concatenate([_seeds(request) for _, request in parts])
    if len(parts) == 1:
        return first, seeds
    starts = np.cumsum([0, *(rows.stop - rows.start for rows, _ in parts)])

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
