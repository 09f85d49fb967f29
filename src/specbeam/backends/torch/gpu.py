"""The ``torch`` backend on a CUDA device: passes in Triton kernels, replayed as CUDA graphs.

A pass over few nodes is captured once for each of a few sizes, and replayed after one copy of its numbers. So nearly no
Python runs between its kernels. Passes over many nodes launch the same kernels. No bit depends on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.contract import TreeBatch, logits_wanted
from specbeam.backends.devices import DTYPES
from specbeam.backends.torch import TorchBackend
from specbeam.backends.torch.ahead import PASSES_IN_FLIGHT, Flags, Group, Suffixes, go_ahead
from specbeam.backends.torch.kernels import (
    TILE_POSITIONS,
    Addend,
    Ancestors,
    Greedy,
    add_and_norm,
    attend,
    attention_bytes,
    gumbel,
    highest,
    partial_products,
    product,
    queries_of,
    rotate_and_store,
    shared_bytes,
    summarize,
)
from specbeam.backends.torch.modules import Norm, Weights
from specbeam.backends.torch.parts.attention import Attention
from specbeam.backends.torch.parts.mlp import MLP
from specbeam.backends.torch.parts.part import Rotations
from specbeam.backends.torch.sampling import Operations, kinds_of
from specbeam.backends.torch.tensors import Values, to_cpu, to_device
from specbeam.checkpoints.checkpoint import Checkpoint
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts import attention, mlp
from specbeam.core.selection import NextBeams, Selection, SelectionRequest

MAX_CAPTURED_NODES = 64
"""Passes over more nodes are not captured: their kernels take longer than the launches of these."""
MAX_GRAPHS = 64
"""Captured passes. Each holds about a megabyte."""
MAX_SHARED_TILES = 4096
"""Nodes times tiles of positions. Up to this many, several programs share a sequence, and memory holds their parts."""
MAX_NUMBERS = 1 << 20
"""Numbers of a captured pass. Most are slots of ancestors."""
MIN_CAPACITY = 1024
"""Slots. When the KV cache moves, passes have to be captured again."""
PASSES_AT_ONCE = 32
"""The engine's work between two calls is short beside this many passes."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass that is ready to run: its numbers on the device.

    Attributes:
        may_be_captured: whether they are at the addresses that captured passes read.
    """

    numbers: Tensor
    sizes: Sizes
    may_be_captured: bool


class GpuBackend(TorchBackend):
    """A checkpoint on a CUDA device. Arguments and errors as for :class:`TorchBackend`."""

    passes_at_once = PASSES_AT_ONCE

    def __init__(self, checkpoint: Checkpoint, device: str = "auto", dtype: str = "auto") -> None:
        super().__init__(checkpoint, device, dtype)
        (self._group,) = _groups(checkpoint.config)
        self._numbers = torch.zeros(MAX_NUMBERS, dtype=torch.int32, device=self.device)
        self._captures = self._numbers.is_cuda
        self._pool = torch.cuda.graph_pool_handle() if self._captures else None
        self._graphs: dict[tuple[Sizes, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._greedy: Greedy | None = None

    @staticmethod
    def fits(config: Config, device: str, dtype: str) -> bool:
        """Whether the kernels fit all parts of a model.

        Each layer is an attention and an MLP, which read normed hidden states, and whose outputs are not scaled. Each
        attention has keys and values of its own, no norm of values, no sinks and no gate. Queries and keys are normed
        by heads before the rotation, and queries do not grow with their positions. As many heads share a key head in
        all layers.
        The other numbers may differ. A device's programs have memory enough for tiles of keys and values.
        """
        layers_fit = all(
            tuple(map(type, layer)) == (attention.Attention, mlp.MLP)
            and not (layer[0].parallel or getattr(layer[0], "sinks", False) or getattr(layer[0], "output_gate", False))
            for layer in config.layers
        )
        norms_fit = config.final_norm and all(
            (part.norm or part.parallel)
            and not (part.sum_norm or part.sum_scale)
            and part.output_scale == 1.0
            and getattr(part, "qk_norm", None) in (None, "head")
            and not getattr(part, "query_growth", None)
            for part in config.parts
        )
        keys_fit = all(
            part.shares_keys_of is None and not (part.keys_are_values or part.value_norm)
            for part in config.parts
            if isinstance(part, attention.Attention)
        )
        if config.encoder is not None or not (layers_fit and norms_fit and keys_fit) or len(_groups(config)) > 1:
            return False
        head_dim = max(part.head_dim for part in config.parts if isinstance(part, attention.Attention))
        return attention_bytes(head_dim, DTYPES[dtype]) <= shared_bytes(torch.device(device))

    def reserve(self, slots: int) -> None:
        with self._one_pass:
            if slots > self._store.capacity:
                self._graphs.clear()
                self._store.reserve(max(slots, MIN_CAPACITY))

    @torch.inference_mode()
    def forward(self, segments: list[TreeBatch]) -> Tensor:
        starts = accumulate((len(s.tokens) for s in segments), initial=0)
        wanted = np.concatenate([start + s.wanted for start, s in zip(starts, segments, strict=False)])
        inputs, queries = self._inputs(segments)
        with self._one_pass, self._current():
            features = self.features(self._ready(inputs, queries))
            if not np.array_equal(wanted, np.arange(len(wanted))):
                features = features[to_device(wanted, self.device)]
            return self.logits(features[: len(wanted)], logits_wanted(segments, self.vocab_size))

    def choose(self, logits: Tensor, requests: Sequence[tuple[slice, SelectionRequest]]) -> list[Selection]:
        with self._current():
            return super().choose(logits, requests)

    @property
    def operations(self) -> Operations:
        return OPERATIONS

    def _current(self) -> AbstractContextManager[object]:
        """Triton launches kernels on the current device."""
        return torch.cuda.device(self.device) if self._captures else nullcontext()

    @torch.inference_mode()
    def forward_ahead(
        self,
        segments: list[TreeBatch],
        requests: Sequence[SelectionRequest],
        beams: Sequence[NextBeams | None],
        passes: int,
        ends: Collection[int],
        halt: NDArray[np.int32],
    ) -> list[Selection]:
        vocab = logits_wanted(segments, self.vocab_size)
        rows = [slice(*both) for both in pairwise(accumulate((len(s.tokens) for s in segments), initial=0))]
        if any(request.functions or request.top > vocab for request in requests):
            return self.choose(self.forward(segments), list(zip(rows, requests, strict=True)))
        passes = min(passes, PASSES_AT_ONCE)
        later_slots = [s.ahead[: (passes - 1) * len(s.tokens)] for s in segments]
        segments = [replace(s, ahead=slots) for s, slots in zip(segments, later_slots, strict=True)]
        last = to_device(np.array([*ends], np.int64), self.device)
        inputs, queries = self._inputs(segments, more=passes - 1)
        is_plain = not any(beams) and all(_is_plain(request) for request in requests)
        flags = Flags(passes, len(segments), self.device)
        with self._one_pass, self._current():
            ready = self._ready(inputs, queries)
            if is_plain and ready.may_be_captured and len({request.vocab for request in requests}) == 1:
                likeliest = Likeliest(self, ready, segments, passes, last, vocab)
                selections = go_ahead(likeliest, passes, flags, halt)
                if all(selection.finite for selection in selections):
                    return selections
                ready, flags = self._ready(inputs, queries), Flags(passes, len(segments), self.device)  # for the logits
            chosen = Chosen(self, ready, segments, requests, beams, inputs.suffixes, last, vocab)
            return go_ahead(chosen, passes, flags, halt)

    def _inputs(self, segments: list[TreeBatch], more: int = 0) -> tuple[Inputs, int]:
        """The numbers of a pass, and how many queries read keys together at most."""
        queries = queries_of(max(len(s.tokens) for s in segments), self._group, self.dtype)
        return make_inputs(segments, queries // self._group, more), queries

    def _ready(self, inputs: Inputs, queries: int) -> Pass:
        """Bring the numbers of a pass to the device, in one copy."""
        n, b = inputs.nodes.shape[1], len(inputs.blocks)
        padded = _power_of_two(n), _power_of_two(b), _power_of_two(inputs.tiles)
        size = 4 * (padded[0] + padded[1]) + len(inputs.slots) + TILE_POSITIONS * padded[2]
        fits = n <= MAX_CAPTURED_NODES and size <= MAX_NUMBERS
        nodes, blocks, tiles = padded if fits else (n, b, inputs.tiles)
        branch = any(suffix is not None for suffix in inputs.suffixes)
        sizes = Sizes(nodes, blocks, tiles if nodes * tiles <= MAX_SHARED_TILES else None, branch, queries)
        numbers = inputs.numbers(sizes)
        if not fits:  # programs read the slots of whole tiles
            return Pass(to_device(np.pad(numbers, (0, TILE_POSITIONS * tiles)), self.device), sizes, False)
        self._numbers[: len(numbers)].copy_(torch.from_numpy(numbers), non_blocking=True)
        return Pass(self._numbers, sizes, True)

    def features(self, ready: Pass) -> Tensor:
        """Run a pass. Returns what the head makes logits of, [nodes, hidden_size]. The next pass may overwrite it."""
        if not ready.may_be_captured:
            return self._run(ready)
        return self._replayed((ready.sizes, 0), lambda: self._run(ready))

    def follow(self, ready: Pass, vocab: int, greedy: Greedy) -> None:
        """Run a pass, and let its sequences go on to their likeliest tokens."""

        def run() -> Tensor:
            logits = self.logits(self._run(ready), vocab)
            summarize(logits, greedy)
            return logits

        self._replayed((ready.sizes, vocab), run)

    def _replayed(self, key: tuple[Sizes, int], run: Callable[[], Tensor]) -> Tensor:
        """The result of a function that launches kernels on arrays at fixed addresses. It is captured once."""
        if not self._captures:
            return run()
        if key not in self._graphs:
            while len(self._graphs) >= MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            numbers = self._numbers.clone()
            run()  # compiles the kernels
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
            self._graphs[key] = graph, result
            self._numbers.copy_(numbers)
            if self._greedy is not None:
                self._greedy.counters.zero_()
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def greedy(self, nodes: Tensor) -> Greedy:
        """Arrays for sequences that go on by their likeliest tokens, and have found none yet.

        Args:
            nodes: [4, n].
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        if self._greedy is None:
            shape = PASSES_AT_ONCE, MAX_CAPTURED_NODES
            self._greedy = Greedy(
                nodes,
                later=zeros(*shape),
                ends=zeros(self.vocab_size, dtype=torch.int8),
                counters=zeros(MAX_CAPTURED_NODES),
                tokens=zeros(*shape),
                scores=zeros(*shape, dtype=torch.float32),
                normalizers=zeros(*shape, dtype=torch.float32),
                goes_on=zeros(*shape, dtype=torch.int8),
            )
        self._greedy.counters.zero_()
        return replace(self._greedy, nodes=nodes)

    def _run(self, ready: Pass) -> Tensor:
        model, eps = self.model, self.model.config.norm_eps
        (tokens, positions, slots, _), ancestors = ready.sizes.views(ready.numbers)
        at = positions.clamp(min=0)
        x = normed = model.begin(tokens, at)
        angles = {rope: at[:, None] * frequencies for rope, frequencies in model.frequencies.items()}
        rotations = {rope: (a.cos() * rope.scale, a.sin() * rope.scale) for rope, a in angles.items()}
        addend: Addend | None = None
        for module, norm, output_norm, *_ in model.steps:
            if norm is None:
                x, _ = add_and_norm(x, addend, None, eps)
            elif module.part.parallel:
                _, normed = add_and_norm(x, None, _of(norm), eps)
                x, _ = add_and_norm(x, addend, None, eps)
            else:
                x, normed = add_and_norm(x, addend, _of(norm), eps)
            if isinstance(module, Attention):
                attended = self._attended(module, normed, slots, ancestors, rotations)
                addend = _added(module.output, attended, output_norm)
            elif isinstance(module, MLP):
                into = module.gate_up if module.part.gated else module.up
                inner = product(normed, into.weight, into.bias, module.part.activation, module.part.gated)
                addend = _added(module.down, inner, output_norm)
        assert isinstance(model.norm, Norm)
        return add_and_norm(x, addend, _of(model.norm), eps)[1]

    def _attended(
        self, module: Attention, normed: Tensor, slots: Tensor, ancestors: Ancestors, rotations: Rotations
    ) -> Tensor:
        """What the heads of an attention read, [n, heads * head_dim]."""
        part = module.part
        keys, values = self._store.tensors(module.memory)
        rotation = None if part.rope is None else rotations[part.rope]
        norms = (module.q_norm.weight, module.k_norm.weight) if part.qk_norm else None
        qkv, bias, eps = partial_products(normed, module.qkv.weight), module.qkv.bias, self.model.config.norm_eps
        q = rotate_and_store(qkv, bias, keys, values, slots, part.num_heads, rotation, norms, eps)
        return attend(q, keys, values, ancestors, part.scale, part.softcap, part.window)

    def logits(self, features: Tensor, vocab: int) -> Tensor:
        """Logits of the first tokens, float32 [n, vocab]."""
        if not len(features):  # a chunk inside a prompt
            return features.new_empty(0, vocab, dtype=torch.float32)
        head: Weights = self.model.head
        bias = None if head.bias is None else head.bias[:vocab]
        logits = product(features, head.weight[:vocab], bias, dtype=torch.float32)
        return self.model.scaled(logits)


class Likeliest:
    """Passes of sequences that go on by their likeliest tokens. A pass and its choice are one captured graph.

    Its selections have no logits.

    Args:
        ends: token ids, int64.
    """

    def __init__(
        self, backend: GpuBackend, ready: Pass, segments: Sequence[TreeBatch], passes: int, ends: Tensor, vocab: int
    ) -> None:
        self._backend, self._ready, self._vocab, self._count = backend, ready, vocab, len(segments)
        nodes, _ = ready.sizes.views(ready.numbers)
        self._greedy = backend.greedy(nodes)
        shape = passes, nodes.shape[1]
        slots = np.zeros(shape, np.int32)
        slots[:-1, : self._count] = np.stack([s.ahead for s in segments], axis=1)
        self._places = slice(0, slots.size), shape
        self._place(self._greedy.later).copy_(torch.from_numpy(slots), non_blocking=True)
        self._greedy.ends.zero_()
        self._greedy.ends[ends] = 1

    def _place(self, array: Tensor) -> Tensor:
        """The part of an array that these passes use, [passes, nodes]."""
        part, shape = self._places
        return array.view(-1)[part].view(shape)

    def run(self, number: int) -> Tensor:
        self._backend.follow(self._ready, self._vocab, self._greedy)
        return self._place(self._greedy.goes_on)[number, : self._count]

    def selections(self, count: int) -> list[Selection]:
        arrays = self._greedy.tokens.long(), self._greedy.scores.clone(), self._greedy.normalizers.clone()
        ((tokens, scores, normalizers),) = to_cpu([[self._place(one)[:count, : self._count] for one in arrays]])
        log_probs = scores - normalizers
        columns = [np.s_[:, i : i + 1] for i in range(self._count)]
        return [
            Selection(tokens[i], log_probs[i], scores[i], normalizers[i][:, 0], None, None, None, ()) for i in columns
        ]


class Chosen:
    """Passes of sequences and beams whose next nodes are chosen by selections. Their graphs end before the head.

    Args:
        suffixes: see :class:`Inputs`.
        ends: token ids, int64.
    """

    def __init__(
        self,
        backend: GpuBackend,
        ready: Pass,
        segments: Sequence[TreeBatch],
        requests: Sequence[SelectionRequest],
        beams: Sequence[NextBeams | None],
        suffixes: Sequence[tuple[tuple[int, int], int] | None],
        ends: Tensor,
        vocab: int,
    ) -> None:
        self._backend, self._ready, self._vocab, device = backend, ready, vocab, backend.device
        rows = [slice(*both) for both in pairwise(accumulate((len(s.tokens) for s in segments), initial=0))]
        nodes, ancestors = ready.sizes.views(ready.numbers)
        self._nodes, self._slots, self._count = nodes[:3, : rows[-1].stop], ancestors.slots, len(segments)
        later = [s.ahead.reshape(-1, len(s.tokens)) for s in segments]
        self._later = to_device(np.concatenate(later, axis=1).astype(np.int32), device)
        self._kinds = kinds_of(list(zip(rows, requests, strict=True)))
        self._groups: list[list[tuple[Tensor, Group]]] = []
        for kind in self._kinds:
            same: dict[int, list[tuple[int, slice]]] = {}
            for number, rows_of_request in zip(kind.numbers, kind.own_rows(), strict=True):
                width = 0 if beams[number] is None else rows_of_request.stop - rows_of_request.start
                same.setdefault(width, []).append((number, rows_of_request))
            groups = []
            for some in same.values():
                searches = [how for i, _ in some if (how := beams[i]) is not None]
                group = Group(
                    _places(part for _, part in some), _places(rows[i] for i, _ in some), searches or None, ends
                )
                groups.append((to_device(np.array([i for i, _ in some]), device), group))
            self._groups.append(groups)
        self._suffixes = Suffixes(segments, suffixes, device) if any(suffixes) else None
        self._found: list[list[Values]] = []
        self._logits: list[Tensor] = []

    def run(self, number: int) -> Tensor:
        """As :meth:`Passes.run`."""
        features = self._backend.features(self._ready)
        logits = self._backend.logits(features[: self._nodes.shape[1]], self._vocab)
        kinds = [replace(kind, request=kind.request.after(number)) for kind in self._kinds]
        values = [kind.select(logits, self._backend.operations) for kind in kinds]
        self._found.append(values)
        self._logits.append(logits)
        self._logits[: -PASSES_IN_FLIGHT - 1] = [logits[:0]] * max(0, len(self._logits) - PASSES_IN_FLIGHT - 1)
        flags = torch.empty(self._count, dtype=torch.bool, device=logits.device)
        parents = torch.arange(self._nodes.shape[1], device=logits.device)
        for (tokens, _, scores, normalizers, *_), groups in zip(values, self._groups, strict=True):
            for which, group in groups:
                highest = self._backend.operations.highest
                next_tokens, of, is_fine = group.choose(tokens, scores, normalizers, highest)
                flags[which], parents[group.nodes] = is_fine, of
                self._nodes[0, group.nodes] = next_tokens.int()
        if number < len(self._later):
            self._nodes[1] += 1
            self._nodes[2] = self._later[number]
            if self._suffixes is not None:
                self._suffixes.grow(self._slots, parents, self._later[number])
        return flags

    def selections(self, count: int) -> list[Selection]:
        """As :meth:`Passes.selections`."""
        passes = [
            [None if one[0] is None else torch.stack(one) for one in zip(*values, strict=True)]
            for values in zip(*self._found[:count], strict=True)
        ]
        last, of = self._logits[count - 1], dict[int, Selection]()
        for kind, values in zip(self._kinds, to_cpu(passes), strict=True):
            of.update(kind.selections(values, last))
        return [of[i] for i in range(self._count)]


def _places(parts: Iterable[slice]) -> NDArray[np.int64]:
    """Slices of one size as rows of indices."""
    return np.stack([np.arange(part.start, part.stop) for part in parts])


def _is_plain(request: SelectionRequest) -> bool:
    """Whether a request is about the likeliest token alone. Arrays are no parts of a comparison."""
    has_arrays = request.given is not None or request.allowed is not None
    return not has_arrays and request == SelectionRequest(vocab=request.vocab)


def _power_of_two(n: int) -> int:
    """The lowest that is at least n."""
    return 1 << (n - 1).bit_length()


OPERATIONS = Operations(lambda logits: summarize(logits)[0], gumbel, highest)


def _groups(config: Config) -> set[int]:
    """How many heads share a key head, in any layer."""
    heads = (part for part in config.parts if isinstance(part, attention.Attention))
    return {part.num_heads // part.num_kv_heads for part in heads}


def _of(norm: Norm) -> tuple[Tensor, Tensor | None]:
    return norm.weight, norm.bias


def _added(weights: Weights, x: Tensor, post_norm: Norm | None) -> Addend:
    """A product that is added to the residual stream."""
    return Addend(partial_products(x, weights.weight), weights.bias, None if post_norm is None else _of(post_norm))


@dataclass(frozen=True)
class Sizes:
    """The sizes of a pass.

    Attributes:
        nodes, blocks: of the arrays. Passes that are captured have padding.
        tiles, branch, queries: see :class:`Ancestors`.
    """

    nodes: int
    blocks: int
    tiles: int | None
    branch: bool
    queries: int

    def views(self, numbers: Tensor) -> tuple[Tensor, Ancestors]:
        """What lies in one array of numbers: the nodes, [4, nodes], and their ancestors."""
        ends = 4 * self.nodes, 4 * (self.nodes + self.blocks)
        nodes, blocks = numbers[: ends[0]].view(4, -1), numbers[ends[0] : ends[1]].view(-1, 4)
        slots = numbers[ends[1] :]
        return nodes, Ancestors(nodes[1], blocks, nodes[3], slots, self.tiles, self.branch, self.queries)


@dataclass(frozen=True, eq=False)
class Inputs:
    """The numbers of a pass, int32.

    Attributes:
        nodes: tokens, positions, slots, and where the suffixes begin in ``slots``, [4, n].
        blocks, slots: see :class:`Ancestors`.
        suffixes: the shape of the suffixes of each segment's nodes, and where they begin in ``slots``; None if nothing
            follows its prefix.
        tiles: how many tiles of positions the longest sequence has.
    """

    nodes: NDArray[np.int32]
    blocks: NDArray[np.int32]
    slots: NDArray[np.int32]
    suffixes: list[tuple[tuple[int, int], int] | None]
    tiles: int

    def numbers(self, sizes: Sizes) -> NDArray[np.int32]:
        """One array that :meth:`Sizes.views` takes apart. Padding has the position -1 and no slot."""
        nodes = np.zeros((4, sizes.nodes), np.int32)
        nodes[1:3] = -1
        nodes[:, : self.nodes.shape[1]] = self.nodes
        blocks = np.zeros((sizes.blocks, 4), np.int32)
        blocks[: len(self.blocks)] = self.blocks
        return np.concatenate([nodes.ravel(), blocks.ravel(), self.slots])


def make_inputs(segments: Sequence[TreeBatch], per_block: int, more: int = 0) -> Inputs:
    """The numbers of a pass.

    Args:
        per_block: how many nodes of a segment read keys together at most.
        more: for how many later passes the segments have slots.
    """
    starts, slots = list[NDArray[np.int64]](), list[NDArray[np.int64]]()
    blocks, suffixes = list[tuple[int, int, int, int]](), list[tuple[tuple[int, int], int] | None]()
    first = index = longest = 0
    for s in segments:
        n, columns = s.suffixes.shape
        length = int(s.positions.max()) + 1
        longest = max(longest, length + more)
        begin = index
        if columns:
            shared, capacity = len(s.prefix), columns + more
            suffix_slots = np.zeros((n, capacity), np.int64)
            suffix_slots[:, :columns] = s.suffixes
            slots += [s.prefix, suffix_slots.ravel()]
            index += shared + suffix_slots.size
            suffixes.append(((n, capacity), begin + shared))
            starts.append(begin + shared + capacity * np.arange(n))
        else:
            prefix = np.concatenate([s.prefix[:length], s.ahead])
            shared = -(-len(prefix) // TILE_POSITIONS) * TILE_POSITIONS
            slots.append(prefix)
            index += len(prefix)
            suffixes.append(None)
            starts.append(np.zeros(n, np.int64))
        blocks += [(first + i, min(per_block, n - i), begin, shared) for i in range(0, n, per_block)]
        first += n
    nodes = [np.concatenate([getattr(s, name) for s in segments]) for name in ("tokens", "positions", "slots")]
    return Inputs(
        np.stack([*nodes, np.concatenate(starts)]).astype(np.int32),
        np.array(blocks, np.int32),
        np.concatenate(slots).astype(np.int32),
        suffixes,
        -(-longest // TILE_POSITIONS),
    )
