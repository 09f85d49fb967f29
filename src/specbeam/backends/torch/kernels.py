"""Triton kernels for passes over the nodes of token trees, on CUDA devices.

The bits of a node's results depend on its own sequence alone: not on the number of nodes in a pass, nor on the others.
A product adds up its terms in one order, whatever the sizes of its tiles. Attention goes through a node's sequence in
tiles of positions, wherever the keys lie.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from specbeam.backends.torch.sampling import highest as by_sorting
from specbeam.backends.torch.tensors import to_device

TILE_POSITIONS = 64
"""Positions of a sequence that attention reads at once."""
TILE_QUERIES, MAX_TILE_QUERIES = 16, 64
"""Queries of attention that read the same keys at once: nodes times the heads that share a key head."""
NO_WINDOW = 1 << 30
CHUNK = 4096
"""Logits that one program summarizes."""
MAX_PARTS, ROWS_AT_ONCE, MIN_PART_COLUMNS = 4, 8192, 512
"""Parts of the columns of a matrix at most, rows of all its parts together, and columns of a part at least."""
PART_STEP = 256
"""The columns of a part are a multiple of this, and of the columns of each tile."""
MAX_TAKEN = 256
"""As many highest scores are taken one after the other. More are sorted."""
MAX_NODES_IN_PARTS = 64
"""More nodes are programs enough: each adds up all parts of the columns."""
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, eq=False)
class Ancestors:
    """Where the keys and values of nodes and their ancestors are, on the device.

    Attributes:
        positions: int32 [n]; -1 for nodes that are padding.
        blocks: int32 [b, 4], of nodes of one segment that read keys together: the first node, their number (0 for
            padding), where the slots of their prefix begin, and the length of the prefix. Where nothing follows the
            prefix, its length is rounded up to whole tiles.
        suffixes: where the slots of a node's own suffix begin, int32 [n].
        slots: slots of prefixes and suffixes by position, int32.
        tiles: how many tiles of positions the longest sequence has at most, if programs share it; None if one program
            goes through all of it. No bit changes.
        branch: whether any segment has suffixes.
        queries: of a block at most, see :func:`queries_of`.
    """

    positions: Tensor
    blocks: Tensor
    suffixes: Tensor
    slots: Tensor
    tiles: int | None
    branch: bool
    queries: int


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    if ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":  # tanh(y) = 2 sigmoid(2 y) - 1
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    if ACTIVATION == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    return x


@triton.jit
def _product(
    x, weight, bias, out, n, rows, columns, part_columns,
    HAS_BIAS: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
    TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A program has one part of the columns, or adds up all parts."""
    node = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)
    is_node, is_row = node < n, row < rows
    x_tile = x + node[:, None] * columns + column[None, :]
    w_tile = weight + row[:, None].to(tl.int64) * columns + column[None, :]
    total = tl.zeros((TILE_N, TILE_ROWS), tl.float32)
    gate = tl.zeros((TILE_N, TILE_ROWS), tl.float32)
    for part in tl.static_range(PARTS):
        begin = (tl.program_id(2) + part) * part_columns
        one = tl.zeros((TILE_N, TILE_ROWS), tl.float32)
        for start in range(begin, tl.minimum(begin + part_columns, columns), TILE_COLUMNS):
            if EVEN:
                a = tl.load(x_tile + start, mask=is_node[:, None], other=0.0)
                w = tl.load(w_tile + start)
            else:
                is_column = (start + column < columns)[None, :]
                a = tl.load(x_tile + start, mask=is_node[:, None] & is_column, other=0.0)
                w = tl.load(w_tile + start, mask=is_row[:, None] & is_column, other=0.0)
            if GATED:
                gate = tl.dot(a, tl.trans(w), gate, input_precision="ieee")
                up = w_tile + start + rows.to(tl.int64) * columns
                if EVEN:
                    w = tl.load(up)
                else:
                    w = tl.load(up, mask=is_row[:, None] & (start + column < columns)[None, :], other=0.0)
            one = tl.dot(a, tl.trans(w), one, input_precision="ieee")
        total = one if part == 0 else total + one
    if HAS_BIAS:
        if GATED:
            gate += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
            total += tl.load(bias + rows + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        else:
            total += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    total = _activated(gate, ACTIVATION) * total if GATED else _activated(total, ACTIVATION)
    place = (tl.program_id(2) * n + node[:, None]).to(tl.int64) * rows + row[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=is_node[:, None] & is_row[None, :])


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "",
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(x weight^T + bias), [n, rows].

    Args:
        x: [n, columns].
        weight: [rows, columns]; if ``gated``, two such matrices, and the activation of the first product gates the
            second (Shazeer 2020).
        dtype: of the result; that of x by default.
    """
    rows = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(1, len(x), rows, dtype=dtype or x.dtype)
    _launch_product(x, weight, bias, out, 1, activation, gated)
    return out[0]


def partial_products(x: Tensor, weight: Tensor) -> Tensor:
    """The products of x [n, columns] and weight [rows, columns] over parts of the columns, float32 [parts, n, rows].

    Few rows are too few programs for a GPU, so several share a row. How many depends on the matrix alone, and their
    products are added up in order. So one part that is already the sum has the same bits. It comes where there are many
    nodes.
    """
    parts = parts_of(*weight.shape)
    out = x.new_empty(parts if len(x) <= MAX_NODES_IN_PARTS else 1, len(x), len(weight), dtype=torch.float32)
    _launch_product(x, weight, None, out, parts)
    return out


def parts_of(rows: int, columns: int) -> int:
    """How many parts of the columns of a matrix have products of their own."""
    return max(1, min(MAX_PARTS, ROWS_AT_ONCE // rows, columns // MIN_PART_COLUMNS))


def _launch_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, parts: int, activation: str = "", gated: bool = False
) -> None:
    """The product of x and weight in parts of the columns, which lie in ``out`` [1 or parts, n, rows]."""
    (together, n, rows), columns = out.shape, x.shape[1]
    tile_n, tile_rows, tile_columns, warps, stages = tiles(n, rows, x.dtype, gated)
    stage_bytes = (tile_n + (1 + gated) * tile_rows) * tile_columns * x.element_size()
    part_columns = -(-columns // (parts * PART_STEP)) * PART_STEP
    _product[(triton.cdiv(n, tile_n), triton.cdiv(rows, tile_rows), together)](
        x, weight, weight if bias is None else bias, out, n, rows, columns, part_columns,
        HAS_BIAS=bias is not None, GATED=gated, ACTIVATION=activation, PARTS=parts // together,
        TILE_N=tile_n, TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns,
        EVEN=rows % tile_rows == 0 and columns % tile_columns == 0, num_warps=warps,
        num_stages=max(1, min(stages, shared_bytes(x.device) // stage_bytes)),
    )  # fmt: skip


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of a device's fast memory that a program may take; an H100's without a device."""
    if device.type != "cuda":
        return 227 * 1024
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def tiles(n: int, rows: int, dtype: torch.dtype, gated: bool) -> tuple[int, int, int, int, int]:
    """Nodes, rows and columns of a product's tile, its warps, and its stages: the fastest on an H200."""
    if dtype == torch.float32:
        return 16, 32, 32, 4, 2
    if n > 64:
        return 128, 64, 64, 8, 3
    nodes = 16 if n <= 16 else 32 if n <= 32 else 64
    if gated:
        return (nodes, 32, 128, 4, 4) if n <= 32 else (nodes, 32, 64, 4, 8)
    if rows <= ROWS_AT_ONCE and (n <= 32 or rows <= ROWS_AT_ONCE // MAX_PARTS):
        return nodes, 32, 128, 4, 6
    return (nodes, 64, 128, 4, 4) if n <= 32 else (nodes, 64, 64, 4, 8)


@triton.jit
def _normed(values, weight, bias, inside, size, eps, LAYER: tl.constexpr):
    if LAYER:
        values = tl.where(inside, values - tl.sum(values) / size, 0.0)
    values *= 1 / tl.sqrt_rn(tl.sum(values * values) / size + eps)
    return values * weight + bias if LAYER else values * weight


@triton.jit
def _vector(start, feature, inside):
    return tl.load(start + feature, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _norm(
    x, parts, parts_bias, post_weight, post_bias, weight, bias, total, out, n, size, eps,
    PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_POST: tl.constexpr, HAS_NORM: tl.constexpr, LAYER: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    feature = tl.arange(0, TILE)
    inside = feature < size
    place = tl.program_id(0).to(tl.int64) * size + feature
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    norm_weight = _vector(weight, feature, inside)  # no load waits for the store below
    norm_bias = _vector(bias, feature, inside)
    if PARTS > 0:
        added = tl.load(parts + place, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            added += tl.load(parts + part * n * size + place, mask=inside, other=0.0)
        if HAS_BIAS:
            added += _vector(parts_bias, feature, inside)
        if HAS_POST:
            own_weight = _vector(post_weight, feature, inside)
            added = _normed(added, own_weight, _vector(post_bias, feature, inside), inside, size, eps, LAYER)
        rounded = (values + added).to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if HAS_NORM:
        values = _normed(values, norm_weight, norm_bias, inside, size, eps, LAYER)
        tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, eq=False)
class Addend:
    """What is added to the residual stream.

    Attributes:
        parts: see :func:`partial_products`.
        bias: of the product, [size].
        norm: weight [size] and perhaps bias of a norm of the sum, before it is added.
    """

    parts: Tensor
    bias: Tensor | None
    norm: tuple[Tensor, Tensor | None] | None


def add_and_norm(
    x: Tensor, addend: Addend | None, norm: tuple[Tensor, Tensor | None] | None, eps: float
) -> tuple[Tensor, Tensor]:
    """x + addend, [n, size] both, and its RMSNorm, or with a bias its LayerNorm; the sum itself without a norm."""
    n, size = x.shape
    total = x if addend is None else torch.empty_like(x)
    out = total if norm is None else torch.empty_like(x)
    post = None if addend is None else addend.norm
    (post_weight, post_bias), (weight, bias) = post or (None, None), norm or (None, None)
    given = (addend and addend.parts, addend and addend.bias, post_weight, post_bias, weight, bias)
    _norm[(n,)](
        x, *(x if one is None else one for one in given), total, out, n, size, eps,
        PARTS=0 if addend is None else len(addend.parts), HAS_BIAS=given[1] is not None, HAS_POST=post is not None,
        HAS_NORM=norm is not None, LAYER=bias is not None or post_bias is not None, TILE=triton.next_power_of_2(size),
        num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip
    return total, out


@triton.jit
def _total(parts, place, step, bias, feature, inside, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr):
    x = tl.load(parts + place + feature, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(parts + part * step + place + feature, mask=inside, other=0.0)
    if HAS_BIAS:
        x += tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _rotate_and_store(
    qkv, bias, q, keys, values, slots, cos, sin, q_weight, k_weight, n, key_stride, heads, kv_heads, head_dim, half,
    eps, PARTS: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    node, head = tl.program_id(0), tl.program_id(1)
    feature = tl.arange(0, TILE)
    inside = feature < head_dim
    width = (heads + 2 * kv_heads) * head_dim
    step = n * width
    place = node.to(tl.int64) * width + head * head_dim
    bias += head * head_dim
    x = _total(qkv, place, step, bias, feature, inside, PARTS, HAS_BIAS)
    slot = tl.load(slots + node)
    inside_cache = feature < tl.where(slot >= 0, head_dim, 0)
    if head < heads + kv_heads:
        other = tl.where(feature < half, feature + half, feature - half)
        is_rotated = feature < 2 * half
        if HAS_ROPE:
            y = _total(qkv, place, step, bias, other, is_rotated, PARTS, HAS_BIAS)
        if HAS_NORM:
            scale = 1 / tl.sqrt_rn(tl.sum(x * x) / head_dim + eps)
            weight = q_weight
            if head >= heads:
                weight = k_weight
            x *= scale * tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
            if HAS_ROPE:
                y *= scale * tl.load(weight + other, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_ROPE:
            angle = node * half + tl.where(feature < half, feature, feature - half)
            c = tl.load(cos + angle, mask=is_rotated, other=1.0)
            s = tl.load(sin + angle, mask=is_rotated, other=0.0)
            x = x * c + tl.where(feature < half, -y, y) * s
        rounded = x.to(q.dtype.element_ty)
        if head < heads:
            tl.store(q + (node * heads + head) * head_dim + feature, rounded, mask=inside)
        else:
            to = (head - heads).to(tl.int64) * key_stride + slot.to(tl.int64) * head_dim
            tl.store(keys + to + feature, rounded, mask=inside_cache)
    else:
        to = (head - heads - kv_heads).to(tl.int64) * key_stride + slot.to(tl.int64) * head_dim
        tl.store(values + to + feature, x.to(q.dtype.element_ty), mask=inside_cache)


def rotate_and_store(
    qkv: Tensor,
    bias: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    heads: int,
    rotation: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Norm and rotate queries and keys, and put keys and values into their slots.

    Args:
        qkv: partial products for each node, float32 [parts, n, (heads + 2 kv_heads) * head_dim].
        bias: of the product.
        keys, values: of the layer, [kv_heads, capacity, head_dim].
        slots: int32 [n]; -1 for nodes that are padding.
        rotation: cosines and sines of the nodes' positions, float32 [n, half]; None for no rotation.
        norms: weights of the RMSNorms of queries and of keys, [head_dim] each.

    Returns: the queries, [n, heads, head_dim].
    """
    kv_heads, _, head_dim = keys.shape
    parts, n, _ = qkv.shape
    q = keys.new_empty(n, heads, head_dim)
    cos, sin = rotation or (qkv, qkv)
    _rotate_and_store[(n, heads + 2 * kv_heads)](
        qkv, qkv if bias is None else bias, q, keys, values, slots, cos, sin, *(norms or (qkv, qkv)), n, keys.stride(0),
        heads, kv_heads, head_dim, cos.shape[-1] if rotation else 0, eps, PARTS=parts,
        HAS_BIAS=bias is not None, HAS_NORM=norms is not None, HAS_ROPE=rotation is not None,
        TILE=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _attended(q, keys, values, slot, is_visible, scale, softcap, head_dim, TILE_D: tl.constexpr, TILE_P: tl.constexpr):
    """The sums of a softmax over a tile of positions, [queries, features] and [queries], and the highest scores."""
    feature = tl.arange(0, TILE_D)
    place = slot[:, None].to(tl.int64) * head_dim + feature[None, :]
    there = (slot >= 0)[:, None] & (feature < head_dim)[None, :]
    k = tl.load(keys + place, mask=there, other=0.0)
    v = tl.load(values + place, mask=there, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if softcap > 0:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))
    highest = tl.max(scores, 1)
    p = tl.exp2(scores - tl.where(highest == float("-inf"), 0.0, highest)[:, None]).to(v.dtype)
    # A product adds up in one order, whatever the number of queries. A sum does not.
    weights = tl.max(tl.dot(p, tl.full((TILE_P, 16), 1.0, v.dtype), input_precision="ieee"), 1)
    return tl.dot(p, v, input_precision="ieee"), weights, highest


@triton.jit
def _merged(total, weights, highest, part, part_weights, part_highest):
    """The sums of an online softmax (Milakov and Gimelshein 2018) after one more tile.

    A tile of which a query sees nothing changes no bit.
    """
    new = tl.maximum(highest, part_highest)
    base = tl.where(new == float("-inf"), 0.0, new)
    shrink, grow = tl.exp2(highest - base), tl.exp2(part_highest - base)
    return total * shrink[:, None] + part * grow[:, None], weights * shrink + part_weights * grow, new


@triton.jit
def _attend_tiles(
    q, keys, values, positions, blocks, suffixes, slots, partial, sums, n, key_stride, heads, head_dim,
    scale, softcap, window, tiles,
    GROUP: tl.constexpr, TILE_D: tl.constexpr, TILE_Q: tl.constexpr, TILE_P: tl.constexpr,
):  # fmt: skip
    """The sums of each tile alone. The first programs have a shared tile each, the others a node and its own tiles."""
    block, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(blocks + 4 * block), tl.load(blocks + 4 * block + 1)
    prefix, shared = tl.load(blocks + 4 * block + 2), tl.load(blocks + 4 * block + 3)
    row = tl.arange(0, TILE_Q)
    feature = tl.arange(0, TILE_D)
    node = first + row // GROUP
    is_row = row < count * GROUP
    start = number * TILE_P
    stop = start + TILE_P
    if number >= tiles:
        is_row = row < tl.where(number - tiles < count, GROUP, 0)
        node = first + number - tiles + row // GROUP
        start = shared // TILE_P * TILE_P
    position = tl.load(positions + node, mask=is_row, other=-1)
    last = tl.max(position)
    if number >= tiles:
        stop = last + 1
    elif stop > shared:  # nodes have tiles of their own
        stop = 0
    query = node * heads + head * GROUP + row % GROUP
    inside = is_row[:, None] & (feature < head_dim)[None, :]
    q_tile = tl.load(q + query[:, None] * head_dim + feature[None, :], mask=inside, other=0.0)
    keys += head.to(tl.int64) * key_stride
    values += head.to(tl.int64) * key_stride
    for at in range(start, stop, TILE_P):
        p = at + tl.arange(0, TILE_P)
        place = prefix + p
        if number >= tiles:
            place = tl.where(p < shared, place, tl.load(suffixes + first + number - tiles) + p - shared)
        slot = tl.where(p <= last, tl.load(slots + place), -1)  # the load does not wait for the positions
        seen = (p[None, :] <= position[:, None]) & (p[None, :] > position[:, None] - window)
        part, weights, highest = _attended(q_tile, keys, values, slot, seen, scale, softcap, head_dim, TILE_D, TILE_P)
        to = at // TILE_P * n * heads + query
        is_stored = is_row & (position >= at)  # nobody merges others
        store = partial + to[:, None].to(tl.int64) * head_dim + feature[None, :]
        tl.store(store, part, mask=inside & is_stored[:, None])
        tl.store(sums + 2 * to, weights, mask=is_stored)
        tl.store(sums + 2 * to + 1, highest, mask=is_stored)


@triton.jit
def _merge_tiles(
    partial, sums, positions, out, n, heads, head_dim, window,
    TILE_D: tl.constexpr, TILE_P: tl.constexpr, UNROLLED: tl.constexpr,
):  # fmt: skip
    node, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + node)
    feature = tl.arange(0, TILE_D)
    inside = (feature < head_dim)[None, :]
    query = node * heads + head
    total = tl.zeros((1, TILE_D), tl.float32)
    weights = tl.zeros((1,), tl.float32)
    highest = tl.full((1,), float("-inf"), tl.float32)
    last = position // TILE_P
    for start in range(tl.maximum(position - window + 1, 0) // TILE_P, last + 1, UNROLLED):
        for i in tl.static_range(UNROLLED):
            tile = start + i + tl.zeros((1,), tl.int32)
            to = tile * n * heads + query
            there = tile <= last
            place = partial + to[:, None].to(tl.int64) * head_dim + feature[None, :]
            part = tl.load(place, mask=there[:, None] & inside, other=0.0)
            part_weights = tl.load(sums + 2 * to, mask=there, other=0.0)
            part_highest = tl.load(sums + 2 * to + 1, mask=there, other=float("-inf"))
            total, weights, highest = _merged(total, weights, highest, part, part_weights, part_highest)
    total = total / weights[:, None]
    tl.store(out + query * head_dim + feature[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_whole(
    q, keys, values, positions, blocks, suffixes, slots, out, key_stride, heads, head_dim, scale, softcap, window,
    GROUP: tl.constexpr, TILE_D: tl.constexpr, TILE_Q: tl.constexpr, TILE_P: tl.constexpr,
):  # fmt: skip
    """The same as tiles that are merged, where there are nodes enough for all processors."""
    block, head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(blocks + 4 * block), tl.load(blocks + 4 * block + 1)
    prefix, shared = tl.load(blocks + 4 * block + 2), tl.load(blocks + 4 * block + 3)
    row = tl.arange(0, TILE_Q)
    node = first + row // GROUP
    is_row = row < count * GROUP
    position = tl.load(positions + node, mask=is_row, other=-1)
    stop = tl.max(position) + 1
    lowest = tl.maximum(tl.min(tl.where(is_row, position, 1 << 30)) - window + 1, 0)
    feature = tl.arange(0, TILE_D)
    query = node * heads + head * GROUP + row % GROUP
    inside = is_row[:, None] & (feature < head_dim)[None, :]
    q_tile = tl.load(q + query[:, None] * head_dim + feature[None, :], mask=inside, other=0.0)
    keys += head.to(tl.int64) * key_stride
    values += head.to(tl.int64) * key_stride
    total = tl.zeros((TILE_Q, TILE_D), tl.float32)
    weights = tl.zeros((TILE_Q,), tl.float32)
    highest = tl.full((TILE_Q,), float("-inf"), tl.float32)
    start = lowest // TILE_P * TILE_P
    whole = tl.maximum(start, tl.minimum(stop, shared // TILE_P * TILE_P))
    for at in range(start, whole, TILE_P):  # all nodes have these ancestors
        p = at + tl.arange(0, TILE_P)
        slot = tl.load(slots + prefix + p, mask=p < stop, other=-1)
        seen = (p[None, :] <= position[:, None]) & (p[None, :] > position[:, None] - window)
        part, part_weights, part_highest = _attended(
            q_tile, keys, values, slot, seen, scale, softcap, head_dim, TILE_D, TILE_P
        )
        total, weights, highest = _merged(total, weights, highest, part, part_weights, part_highest)
    for at in range(whole, stop, TILE_P):  # each node has its own
        p = at + tl.arange(0, TILE_P)
        for i in range(count):
            own = tl.load(positions + first + i)
            place = tl.where(p < shared, prefix + p, tl.load(suffixes + first + i) + p - shared)
            slot = tl.load(slots + place, mask=p <= own, other=-1)
            seen = (p <= own)[None, :] & (p[None, :] > position[:, None] - window) & (row // GROUP == i)[:, None]
            part, part_weights, part_highest = _attended(
                q_tile, keys, values, slot, seen & is_row[:, None], scale, softcap, head_dim, TILE_D, TILE_P
            )
            total, weights, highest = _merged(total, weights, highest, part, part_weights, part_highest)
    total = total / weights[:, None]
    tl.store(out + query[:, None] * head_dim + feature[None, :], total.to(out.dtype.element_ty), mask=inside)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    ancestors: Ancestors,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """Attention of nodes to their ancestors and themselves, [n, heads * head_dim].

    Args:
        q: [n, heads, head_dim].
        keys, values: of the layer, [kv_heads, capacity, head_dim].
    """
    n, heads, head_dim = q.shape
    a, kv_heads = ancestors, len(keys)
    out = q.new_empty(n, heads * head_dim)
    group = heads // kv_heads
    tile_d = max(16, triton.next_power_of_2(head_dim))
    tile_q = max(16, triton.next_power_of_2(a.queries))
    sizes = {"GROUP": group, "TILE_D": tile_d, "TILE_Q": tile_q, "TILE_P": TILE_POSITIONS}
    warps = 8 if tile_q * tile_d > 64 * 128 else 4
    last = window or NO_WINDOW
    if a.tiles is None:
        _attend_whole[(len(a.blocks), kv_heads)](
            q, keys, values, a.positions, a.blocks, a.suffixes, a.slots, out, keys.stride(0), heads, head_dim, scale,
            softcap or 0.0, last, **sizes, num_warps=warps,
            num_stages=2 if 2 * attention_bytes(head_dim, q.element_size()) <= shared_bytes(q.device) else 1,
        )  # fmt: skip
        return out
    partial = q.new_empty(a.tiles * n * heads * head_dim, dtype=torch.float32)
    sums = q.new_empty(a.tiles * n * heads * 2, dtype=torch.float32)
    programs = a.tiles + (a.queries // group if a.branch else 0)
    _attend_tiles[(len(a.blocks), kv_heads, programs)](
        q, keys, values, a.positions, a.blocks, a.suffixes, a.slots, partial, sums, n, keys.stride(0), heads, head_dim,
        scale, softcap or 0.0, last, a.tiles, **sizes, num_warps=warps, num_stages=1,
    )  # fmt: skip
    _merge_tiles[(n, heads)](
        partial, sums, a.positions, out, n, heads, head_dim, last, TILE_D=tile_d, TILE_P=TILE_POSITIONS, UNROLLED=16,
        num_warps=1,
    )  # fmt: skip
    return out


def attention_bytes(head_dim: int, itemsize: int) -> int:
    """Fast memory of a program of attention at most: for a tile of keys and one of values, and half as much again."""
    return 3 * TILE_POSITIONS * triton.next_power_of_2(head_dim) * itemsize


def queries_of(nodes: int, group: int, dtype: torch.dtype) -> int:
    """How many queries of a segment read keys together: whole nodes, but not more than a tile if they fit into one.

    Args:
        nodes: the maximum that a segment has.
        group: the heads that share a key head.
    """
    tile = TILE_QUERIES if nodes * group <= TILE_QUERIES or dtype == torch.float32 else MAX_TILE_QUERIES
    return max(1, tile // group) * group


@triton.jit
def _summarize(logits, maxima, sums, places, vocab, stride, chunks, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row.to(tl.int64) * stride + column, mask=column < vocab, other=float("-inf"))
    highest = tl.max(x)
    at = row * chunks + chunk
    tl.store(maxima + at, highest)
    tl.store(sums + at, tl.sum(tl.exp(x - tl.where(highest == float("-inf"), 0.0, highest))))
    tl.store(places + at, tl.min(tl.where(x == highest, column, vocab - 1)))


@triton.jit
def _finish(
    maxima, sums, places, normalizers, tokens, chunks,
    nodes, later, ends, counters, found_tokens, found_scores, found_normalizers, goes_on, n,
    IS_AHEAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.arange(0, TILE)
    inside = chunk < chunks
    own = tl.load(maxima + row * chunks + chunk, mask=inside, other=float("-inf"))
    highest = tl.max(own)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.load(sums + row * chunks + chunk, mask=inside, other=0.0) * tl.exp(own - base))
    normalizer = base + tl.log(total)
    place = tl.load(places + row * chunks + chunk, mask=inside, other=0)
    token = tl.min(tl.where((own == highest) & inside, place, 1 << 30))
    token = tl.where(token == 1 << 30, 0, token)
    tl.store(normalizers + row, normalizer)
    tl.store(tokens + row, token.to(tl.int64))
    if IS_AHEAD:
        position = tl.load(nodes + n + row)
        if position >= 0:
            number = tl.load(counters + row)
            at = number * n + row
            tl.store(found_tokens + at, token)
            tl.store(found_scores + at, highest)
            tl.store(found_normalizers + at, normalizer)
            is_fine = (highest > float("-inf")) & (tl.abs(normalizer) < float("inf"))
            tl.store(goes_on + at, tl.where(is_fine, 1 - tl.load(ends + token).to(tl.int32), 0).to(tl.int8))
            tl.store(nodes + row, token)
            tl.store(nodes + n + row, position + 1)
            tl.store(nodes + 2 * n + row, tl.load(later + at))
            tl.store(counters + row, number + 1)


@dataclass(frozen=True, eq=False)
class Greedy:
    """What sequences that go on by their likeliest tokens find in each pass, and what they need for that.

    Attributes:
        nodes: tokens, positions and slots of the latest nodes, and another row, int32 [4, n]. A position of -1 is
            padding.
        later: the slots of the nodes of later passes, int32 [passes, n].
        ends: 1 for tokens that end a text, int8 [vocab].
        counters: the number of passes so far, int32 [n].
        tokens, scores, normalizers: found in each pass, int32 and float32 [passes, n].
        goes_on: whether a sequence needs no look at its token, int8 [passes, n].
    """

    nodes: Tensor
    later: Tensor
    ends: Tensor
    counters: Tensor
    tokens: Tensor
    scores: Tensor
    normalizers: Tensor
    goes_on: Tensor


def summarize(logits: Tensor, greedy: Greedy | None = None) -> tuple[Tensor, Tensor]:
    """The logsumexp of each row of logits, float32 [n, vocab], and its likeliest token, int64 [n]; of equals the first.

    Args:
        greedy: go on to the likeliest tokens.
    """
    n, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    maxima, sums = logits.new_empty(n, chunks), logits.new_empty(n, chunks)
    places = logits.new_empty(n, chunks, dtype=torch.int32)
    normalizers, tokens = logits.new_empty(n), logits.new_empty(n, dtype=torch.int64)
    _summarize[(n, chunks)](logits, maxima, sums, places, vocab, logits.stride(0), chunks, CHUNK=CHUNK, num_warps=8)
    given = (places,) * 8 if greedy is None else [getattr(greedy, field.name) for field in fields(greedy)]
    _finish[(n,)](
        maxima, sums, places, normalizers, tokens, chunks, *given, n, IS_AHEAD=greedy is not None,
        TILE=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    return normalizers, tokens


@triton.jit
def _gumbel(seeds, at, out, vocab, TILE: tl.constexpr):
    row = tl.program_id(0)
    quarter = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.uint32)
    position = tl.load(at + 2 * row).to(tl.uint32) + quarter * 0
    stream = tl.load(at + 2 * row + 1).to(tl.uint32) + quarter * 0
    words = tl.philox(tl.load(seeds + row), quarter, position, stream, quarter * 0)
    for i in tl.static_range(4):
        token = 4 * quarter.to(tl.int64) + i
        uniform = (words[i].to(tl.float64) + 0.5) * 2.3283064365386963e-10
        tl.store(out + row.to(tl.int64) * vocab + token, -tl.log(-tl.log(uniform)), mask=token < vocab)


def gumbel(
    seeds: NDArray[np.uint64],
    streams: NDArray[np.uint32],
    positions: NDArray[np.uint32],
    vocab: int,
    device: torch.device | str,
) -> Tensor:
    """The same as :func:`specbeam.backends.torch.sampling.gumbel`."""
    n, tile = len(seeds), 512
    out = torch.empty(n, vocab, dtype=torch.float64, device=device)
    at = np.stack([positions, streams], axis=1).astype(np.int64)
    keys = to_device(seeds.view(np.int64), device)
    _gumbel[(n, triton.cdiv(vocab, 4 * tile))](keys, to_device(at, device), out, vocab, TILE=tile, num_warps=4)
    return out


@triton.jit
def _keys(x, column):
    """Numbers whose order is that of float32 numbers, and of equals the lower column is higher."""
    bits = x.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _take_highest(keys, to, k):
    """Store the k highest of some keys, the highest first. All are different."""
    for i in range(k):
        best = tl.max(keys)
        tl.store(to + i, best)
        keys = tl.where(keys == best, -0x8000000000000000, keys)


@triton.jit
def _highest_of_chunks(x, found, size, stride, chunks, k, CHUNK: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(x + row.to(tl.int64) * stride + column, mask=column < size, other=0.0) + 0.0  # no -0
    keys = tl.where(column < size, _keys(values, column), -0x8000000000000000)
    _take_highest(keys, found + (row * chunks + chunk) * k, k)


@triton.jit
def _highest_of_all(found, sorted_keys, count, k, TILE: tl.constexpr):
    row, place = tl.program_id(0), tl.arange(0, TILE)
    keys = tl.load(found + row * count + place, mask=place < count, other=-0x8000000000000000)
    _take_highest(keys, sorted_keys + row * k, k)


def highest(scores: Tensor, k: int) -> Tensor:
    """The same as :func:`specbeam.backends.torch.sampling.highest`."""
    n, size = scores.shape
    chunks = triton.cdiv(size, CHUNK)
    if k == 1 or k > MAX_TAKEN or chunks * k > MAX_TAKEN * 64 or scores.dtype != torch.float32:
        return by_sorting(scores, k)
    found = torch.empty(n, chunks * k, dtype=torch.int64, device=scores.device)
    _highest_of_chunks[(n, chunks)](scores, found, size, scores.stride(0), chunks, k, CHUNK=CHUNK, num_warps=8)
    if chunks > 1:
        candidates, found = found, torch.empty(n, k, dtype=torch.int64, device=scores.device)
        tile = triton.next_power_of_2(chunks * k)
        _highest_of_all[(n,)](candidates, found, chunks * k, k, TILE=tile, num_warps=8 if tile > 1024 else 4)
    return 0x7FFFFFFF - (found & 0xFFFFFFFF)
