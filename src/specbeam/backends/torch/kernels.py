"""Triton kernels for passes over the nodes of token trees, on CUDA devices.

The bits of a node's results depend on its own sequence alone: not on the number of nodes in a pass, nor on the others.
A product adds up its terms in one order, whatever the sizes of its tiles. Attention goes through a node's sequence in
tiles of positions, wherever the keys lie.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_POSITIONS = 64
"""Positions of a sequence that attention reads at once."""
TILE_QUERIES = 16
"""Queries of attention that read the same keys at once: nodes times the heads that share a key head."""
NO_WINDOW = 1 << 30
CHUNK = 4096
"""Logits that one program summarizes."""
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
    """

    positions: Tensor
    blocks: Tensor
    suffixes: Tensor
    slots: Tensor
    tiles: int | None
    branch: bool


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    if ACTIVATION == "gelu":
        return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    if ACTIVATION == "gelu_tanh":  # tanh(y) = 2 sigmoid(2 y) - 1
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _product(
    x, weight, bias, residual, out, n, rows, columns,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, TILE_N: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    node = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    row = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, TILE_COLUMNS)
    is_node, is_row = node < n, row < rows
    x_tile = x + node[:, None] * columns + column[None, :]
    w_tile = weight + row[:, None].to(tl.int64) * columns + column[None, :]
    total = tl.zeros((TILE_N, TILE_ROWS), tl.float32)
    gate = tl.zeros((TILE_N, TILE_ROWS), tl.float32)
    for start in range(0, columns, TILE_COLUMNS):
        if EVEN:
            a = tl.load(x_tile + start, mask=is_node[:, None], other=0.0)
            w = tl.load(w_tile + start)
        else:
            is_column = (start + column < columns)[None, :]
            a = tl.load(x_tile + start, mask=is_node[:, None] & is_column, other=0.0)
            w = tl.load(w_tile + start, mask=is_row[:, None] & is_column, other=0.0)
        if GATED:
            gate = tl.dot(a, tl.trans(w), gate, input_precision=PRECISION)
            up = w_tile + start + rows.to(tl.int64) * columns
            if EVEN:
                w = tl.load(up)
            else:
                w = tl.load(up, mask=is_row[:, None] & (start + column < columns)[None, :], other=0.0)
        total = tl.dot(a, tl.trans(w), total, input_precision=PRECISION)
    if HAS_BIAS:
        if GATED:
            gate += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
            total += tl.load(bias + rows + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
        else:
            total += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    total = _activated(gate, ACTIVATION) * total if GATED else _activated(total, ACTIVATION)
    place = node[:, None].to(tl.int64) * rows + row[None, :]
    inside = is_node[:, None] & is_row[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(x weight^T + bias) + residual, [n, rows].

    Args:
        x: [n, columns].
        weight: [rows, columns]; if ``gated``, two such matrices, and the activation of the first product gates the
            second (Shazeer 2020).
        residual: [n, rows].
        dtype: of the result; that of x by default.
    """
    n, columns = x.shape
    rows = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(n, rows, dtype=dtype or x.dtype)
    tile_n, tile_rows, tile_columns, warps, stages = tiles(n, rows, x.dtype, gated)
    stage_bytes = (tile_n + (1 + gated) * tile_rows) * tile_columns * x.element_size()
    _product[(triton.cdiv(n, tile_n), triton.cdiv(rows, tile_rows))](
        x, weight, weight if bias is None else bias, x if residual is None else residual, out, n, rows, columns,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, GATED=gated, ACTIVATION=activation,
        PRECISION="ieee", TILE_N=tile_n, TILE_ROWS=tile_rows, TILE_COLUMNS=tile_columns,
        EVEN=rows % tile_rows == 0 and columns % tile_columns == 0, num_warps=warps,
        num_stages=max(1, min(stages, shared_bytes(x.device) // stage_bytes)),
    )  # fmt: skip
    return out


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of a device's fast memory that a program may take; an H100's without a device."""
    if device.type != "cuda":
        return 227 * 1024
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def tiles(n: int, rows: int, dtype: torch.dtype, gated: bool) -> tuple[int, int, int, int, int]:
    """Nodes, rows and columns of a product's tile, its warps, and its stages: the fastest on an H100."""
    if dtype == torch.float32:
        return 16, 32, 32, 4, 2
    if n > 64:
        return 128, 64, 64, 8, 3
    nodes = 16 if n <= 16 else 32 if n <= 32 else 64
    if rows <= (4096 if n <= 16 else 2048) and not gated:
        return nodes, 16, 256, 4, 4
    return nodes, 32, 128, 4, 4 if gated and n <= 16 else 6


@triton.jit
def _norm(
    x, weight, bias, residual, out, size, eps,
    LAYER: tl.constexpr, HAS_RESIDUAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    feature = tl.arange(0, TILE)
    inside = feature < size
    place = tl.program_id(0).to(tl.int64) * size + feature
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        values = tl.where(inside, values - tl.sum(values) / size, 0.0)
    values *= 1 / tl.sqrt_rn(tl.sum(values * values) / size + eps)
    values *= tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
    if LAYER:
        values += tl.load(bias + feature, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, values.to(out.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None) -> Tensor:
    """RMSNorm, or with a bias LayerNorm, of x [n, size], plus residual [n, size]."""
    n, size = x.shape
    out = torch.empty_like(x)
    _norm[(n,)](
        x, weight, weight if bias is None else bias, x if residual is None else residual, out, size, eps,
        LAYER=bias is not None, HAS_RESIDUAL=residual is not None, TILE=triton.next_power_of_2(size),
        num_warps=4 if size <= 4096 else 8,
    )  # fmt: skip
    return out


@triton.jit
def _rotate_and_store(
    qkv, q, keys, values, slots, cos, sin, q_weight, k_weight, key_stride, heads, kv_heads, head_dim, half, eps,
    HAS_NORM: tl.constexpr, HAS_ROPE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    node, head = tl.program_id(0), tl.program_id(1)
    feature = tl.arange(0, TILE)
    inside = feature < head_dim
    row = qkv + (node * (heads + 2 * kv_heads) + head) * head_dim
    x = tl.load(row + feature, mask=inside, other=0.0)
    slot = tl.load(slots + node)
    inside_cache = feature < tl.where(slot >= 0, head_dim, 0)
    if head < heads + kv_heads:
        other = tl.where(feature < half, feature + half, feature - half)
        is_rotated = feature < 2 * half
        y = tl.load(row + other, mask=is_rotated, other=0.0).to(tl.float32)
        x = x.to(tl.float32)
        if HAS_NORM:
            scale = 1 / tl.sqrt_rn(tl.sum(x * x) / head_dim + eps)
            weight = q_weight
            if head >= heads:
                weight = k_weight
            x *= scale * tl.load(weight + feature, mask=inside, other=0.0).to(tl.float32)
            y *= scale * tl.load(weight + other, mask=is_rotated, other=0.0).to(tl.float32)
        if HAS_ROPE:
            angle = node * half + tl.where(feature < half, feature, feature - half)
            c = tl.load(cos + angle, mask=is_rotated, other=1.0)
            s = tl.load(sin + angle, mask=is_rotated, other=0.0)
            x = x * c + tl.where(feature < half, -y, y) * s
        x = x.to(q.dtype.element_ty)
        if head < heads:
            tl.store(q + (node * heads + head) * head_dim + feature, x, mask=inside)
        else:
            place = (head - heads).to(tl.int64) * key_stride + slot.to(tl.int64) * head_dim
            tl.store(keys + place + feature, x, mask=inside_cache)
    else:
        place = (head - heads - kv_heads).to(tl.int64) * key_stride + slot.to(tl.int64) * head_dim
        tl.store(values + place + feature, x, mask=inside_cache)


def rotate_and_store(
    qkv: Tensor,
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
        qkv: of each node, [n, (heads + 2 kv_heads) * head_dim].
        keys, values: of the layer, [kv_heads, capacity, head_dim].
        slots: int32 [n]; -1 for nodes that are padding.
        rotation: cosines and sines of the nodes' positions, float32 [n, half]; None for no rotation.
        norms: weights of the RMSNorms of queries and of keys, [head_dim] each.

    Returns: the queries, [n, heads, head_dim].
    """
    kv_heads, _, head_dim = keys.shape
    q = qkv.new_empty(len(qkv), heads, head_dim)
    cos, sin = rotation or (slots, slots)
    _rotate_and_store[(len(qkv), heads + 2 * kv_heads)](
        qkv, q, keys, values, slots, cos, sin, *(norms or (qkv, qkv)), keys.stride(0), heads, kv_heads, head_dim,
        cos.shape[-1] if rotation else 0, eps, HAS_NORM=norms is not None, HAS_ROPE=rotation is not None,
        TILE=triton.next_power_of_2(head_dim), num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _attended(
    q, keys, values, slot, is_visible, scale, softcap, head_dim, PRECISION: tl.constexpr, TILE_D: tl.constexpr
):
    """The sums of a softmax over a tile of positions, [queries, features] and [queries], and the highest scores."""
    feature = tl.arange(0, TILE_D)
    place = slot[:, None].to(tl.int64) * head_dim + feature[None, :]
    there = (slot >= 0)[:, None] & (feature < head_dim)[None, :]
    k = tl.load(keys + place, mask=there, other=0.0)
    v = tl.load(values + place, mask=there, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    if softcap > 0:
        scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
    scores = tl.where(is_visible, scores * LOG2_E, float("-inf"))
    highest = tl.max(scores, 1)
    p = tl.exp2(scores - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
    return tl.dot(p.to(v.dtype), v, input_precision=PRECISION), tl.sum(p, 1), highest


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
    GROUP: tl.constexpr, PRECISION: tl.constexpr, TILE_D: tl.constexpr, TILE_Q: tl.constexpr, TILE_P: tl.constexpr,
):  # fmt: skip
    """The sums of each tile alone. The first programs have a shared tile each, the others a node and its own tiles."""
    block, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, count = tl.load(blocks + 4 * block), tl.load(blocks + 4 * block + 1)
    prefix, shared = tl.load(blocks + 4 * block + 2), tl.load(blocks + 4 * block + 3)
    row = tl.arange(0, TILE_Q)
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
    if start <= last:
        feature = tl.arange(0, TILE_D)
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
            slot = tl.load(slots + place, mask=p <= last, other=-1)
            seen = (p[None, :] <= position[:, None]) & (p[None, :] > position[:, None] - window)
            part, weights, highest = _attended(
                q_tile, keys, values, slot, seen, scale, softcap, head_dim, PRECISION, TILE_D
            )
            to = at // TILE_P * n * heads + query
            tl.store(partial + to[:, None].to(tl.int64) * head_dim + feature[None, :], part, mask=inside)
            tl.store(sums + 2 * to, weights, mask=is_row)
            tl.store(sums + 2 * to + 1, highest, mask=is_row)


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
    GROUP: tl.constexpr, PRECISION: tl.constexpr, TILE_D: tl.constexpr, TILE_Q: tl.constexpr, TILE_P: tl.constexpr,
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
            q_tile, keys, values, slot, seen, scale, softcap, head_dim, PRECISION, TILE_D
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
                q_tile, keys, values, slot, seen & is_row[:, None], scale, softcap, head_dim, PRECISION, TILE_D
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
    sizes = {"TILE_D": max(16, triton.next_power_of_2(head_dim)), "TILE_P": TILE_POSITIONS}
    how = sizes | {"GROUP": group, "PRECISION": "ieee", "TILE_Q": max(TILE_QUERIES, triton.next_power_of_2(group))}
    last = window or NO_WINDOW
    if a.tiles is None:
        _attend_whole[(len(a.blocks), kv_heads)](
            q, keys, values, a.positions, a.blocks, a.suffixes, a.slots, out, keys.stride(0), heads, head_dim, scale,
            softcap or 0.0, last, **how, num_warps=4,
        )  # fmt: skip
        return out
    partial = q.new_empty(a.tiles * n * heads * head_dim, dtype=torch.float32)
    sums = q.new_empty(a.tiles * n * heads * 2, dtype=torch.float32)
    programs = a.tiles + (nodes_per_block(group) if a.branch else 0)
    _attend_tiles[(len(a.blocks), kv_heads, programs)](
        q, keys, values, a.positions, a.blocks, a.suffixes, a.slots, partial, sums, n, keys.stride(0), heads, head_dim,
        scale, softcap or 0.0, last, a.tiles, **how, num_warps=4,
    )  # fmt: skip
    _merge_tiles[(n, heads)](
        partial, sums, a.positions, out, n, heads, head_dim, last, **sizes, UNROLLED=8, num_warps=1,
    )  # fmt: skip
    return out


def attention_bytes(head_dim: int, itemsize: int) -> int:
    """Fast memory of a program of attention at most: for a tile of keys and one of values, and half as much again."""
    return 3 * TILE_POSITIONS * triton.next_power_of_2(head_dim) * itemsize


def nodes_per_block(group: int) -> int:
    """How many nodes of a segment read keys together.

    Args:
        group: the heads that share a key head.
    """
    return max(1, TILE_QUERIES // group)


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
