"""The experts of a folder's layers as matrices with three dimensions, however the folder stores them.

Folders on the hub have a tensor for each expert and matrix, such as ``experts.7.up_proj.weight``. transformers 5 stacks
them, gate and up together: ``experts.gate_up_proj`` [experts, out, in]. gpt-oss has blocks of MXFP4 and their scales.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, tensor_names
from specbeam.checkpoints.formats.gguf_types import TYPES, dequantize, in_turn
from specbeam.checkpoints.formats.safetensors_file import FLOATS, Floats, StoredTensor
from specbeam.errors import SpecbeamError

ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
ALL_EXPERTS = re.compile(r"(.*\.|)layers\.(\d+)\..*\bexperts\.(gate_up|down)_proj(_bias|_blocks)?")
BLOCKS, SCALES = "_blocks", "_scales"
"""Ends of the names of tensors with floats of 4 bits [experts, out, groups, 16], and of their scales."""
MXFP4 = next(kind for kind in TYPES.values() if kind.name == "MXFP4")
HALVES = {"gate_up": ("gate", "up"), "down": ("down",)}
"""Our matrices in each stacked tensor."""


class Rows(NamedTuple):
    """Which rows of a tensor are an expert's: every ``step``-th one from ``first`` on. Transposed, they are columns."""

    first: int = 0
    step: int = 1
    transposed: bool = False


class ExpertTensor(NamedTuple):
    """The matrices of all experts of a layer, or all of their biases as one vector.

    Attributes:
        experts: the tensor of each expert, [out, in] or [out] but for ``rows``.
        out: rows of each matrix.
    """

    experts: tuple[StoredTensor, ...]
    out: int
    picked: Rows

    @property
    def file(self) -> Path:
        return self.experts[0].file

    @property
    def name(self) -> str:
        return self.experts[0].name

    @property
    def dtype(self) -> str:
        return self.experts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        one = self.experts[0].shape
        if len(one) == 1:
            return (len(self.experts) * self.out,)
        return len(self.experts), self.out, one[0] if self.picked.transposed else one[1]

    def rows(self, start: int, stop: int) -> Floats:
        """Rows ``start`` to ``stop`` of the matrices one below the other, float32 [stop - start, in]."""
        return np.concatenate([self._rows(*piece) for piece in pieces(self.out, start, stop)])

    def _rows(self, expert: int, start: int, stop: int) -> Floats:
        tensor, (first, step, transposed) = self.experts[expert], self.picked
        first, stop = first + start * step, first + (stop - 1) * step + 1
        return (tensor.columns(first, stop).T if transposed else tensor.rows(first, stop))[::step]


class MXFP4Tensor(NamedTuple):
    """The matrices of all experts of a layer, in groups of 32 floats of 4 bits with a scale.

    Attributes:
        blocks, scales: of each expert, bytes [out, groups, 16] and [out, groups] but for ``picked``.
        out: rows of each matrix.
    """

    blocks: tuple[StoredTensor, ...]
    scales: tuple[StoredTensor, ...]
    out: int
    picked: Rows

    @property
    def file(self) -> Path:
        return self.blocks[0].file

    @property
    def name(self) -> str:
        return self.blocks[0].name

    @property
    def dtype(self) -> str:
        return MXFP4.name

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.blocks), self.out, self.blocks[0].shape[1] * MXFP4.size

    def raw(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows ``start`` to ``stop`` of the matrices one below the other, as a GGUF file has them."""
        return np.concatenate([self._raw(*piece) for piece in pieces(self.out, start, stop)])

    def _raw(self, expert: int, start: int, stop: int) -> NDArray[np.uint8]:
        first, step, _ = self.picked
        rows = first + start * step, first + (stop - 1) * step + 1
        scales = self.scales[expert].raw(*rows)[::step]
        numbers = in_turn(self.blocks[expert].raw(*rows)[::step], 4)  # a byte has two neighbours
        low, high = numbers.reshape(*scales.shape, 2, MXFP4.size // 2).transpose(2, 0, 1, 3)  # there, first and 17th
        return np.concatenate([scales[..., None], low | high << np.uint8(4)], axis=-1).reshape(stop - start, -1)

    def rows(self, start: int, stop: int) -> Floats:
        """The same rows, float32 [stop - start, in]."""
        return dequantize(np.ascontiguousarray(self.raw(start, stop)), MXFP4)


Tensor = StoredTensor | ExpertTensor | MXFP4Tensor


def pieces(out: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """The experts that have rows from start to stop of matrices one below the other, and which rows of theirs."""
    for expert in range(start // out, -(-stop // out)):
        yield expert, max(start - expert * out, 0), min(stop - expert * out, out)


def with_stacked_experts(tensors: Mapping[str, StoredTensor], architecture: Architecture) -> dict[str, Tensor]:
    """The tensors of a folder, with its experts' tensors under the names of ``Architecture.folder_tensors``.

    Raises:
        SpecbeamError: an expert is missing, or has another shape than the others.
    """
    found: dict[str, Tensor] = {}
    apart: dict[str, dict[int, StoredTensor]] = defaultdict(dict)
    for stored, tensor in tensors.items():
        name = stored
        for newer, own in architecture.folder_renamed.items():
            name = name.replace(newer, own)
        if one := ONE_EXPERT.fullmatch(name):
            apart[f"{one[1]}.*.{one[3]}"][int(one[2])] = tensor
        elif stacked := ALL_EXPERTS.fullmatch(name):
            before, layer, halves, end = stacked.groups()
            kind = "bias" if end == "_bias" else "weight"
            parts = [f"blocks.{layer}.experts.{half}.{kind}" for half in HALVES[halves]]
            for number, part in enumerate(parts):
                (source,) = tensor_names(part, architecture.folder_tensors)
                source = before + source[source.index("layers.") :]  # a text model may lie within another module
                if end == BLOCKS:
                    scales = tensors.get(stored.removesuffix(BLOCKS) + SCALES)
                    found[source] = _of_blocks(tensor, scales, number, len(parts))
                else:
                    found[source] = _of_stacked(tensor, number, len(parts), architecture.experts_transposed)
        elif stored.endswith(SCALES) and stored.removesuffix(SCALES) + BLOCKS in tensors:
            continue
        else:
            found[name] = tensor
    return found | {name: _of_experts(name, experts) for name, experts in apart.items()}


def _of_experts(name: str, experts: Mapping[int, StoredTensor]) -> ExpertTensor:
    for number in range(len(experts)):
        own = name.replace("*", str(number))
        if number not in experts:
            raise SpecbeamError(f"the folder has no tensor {own}, but one of a later expert: fetch it again")
        if len(shape := experts[number].shape) != 2 or shape != experts[0].shape:
            raise SpecbeamError(f"tensor {own} has shape {list(shape)}, and expert 0 {list(experts[0].shape)}")
    return ExpertTensor(tuple(experts[number] for number in range(len(experts))), experts[0].shape[0], Rows())


def _of_stacked(tensor: StoredTensor, number: int, parts: int, transposed: bool) -> ExpertTensor:
    """One of the parts of a stacked tensor.

    Args:
        transposed: matrices are [in, out], and the rows of the parts alternate.
    """
    if len(tensor.shape) not in (2, 3):
        raise _not_of_experts(tensor)
    experts = _each(tensor)
    out = experts[0].shape[-1 if transposed else 0]
    if out % parts:
        raise _not_of_experts(tensor)
    rows = Rows(number, parts, len(tensor.shape) == 3) if transposed else Rows(number * (out // parts))
    return ExpertTensor(experts, out // parts, rows)


def _of_blocks(blocks: StoredTensor, scales: StoredTensor | None, number: int, parts: int) -> MXFP4Tensor:
    """The same of a tensor in blocks. The rows of the parts alternate."""
    if scales is None:
        raise SpecbeamError(f"{blocks.file}: tensor {blocks.name} has no scales beside it: fetch the folder again")
    for tensor, shape in ((blocks, (*scales.shape, MXFP4.size // 2)), (scales, scales.shape)):
        if tensor.shape != shape or len(scales.shape) != 3 or shape[1] % parts or tensor.dtype != "U8":
            raise _not_of_experts(tensor)
    return MXFP4Tensor(_each(blocks), _each(scales), blocks.shape[1] // parts, Rows(number, parts))


def _each(tensor: StoredTensor) -> tuple[StoredTensor, ...]:
    """The part of a stacked tensor that each expert has."""
    count, *one = tensor.shape
    size = prod(one) * np.dtype(FLOATS.get(tensor.dtype, "u1")).itemsize
    if not count:
        raise _not_of_experts(tensor)
    return tuple(tensor._replace(shape=tuple(one), begin=tensor.begin + i * size) for i in range(count))


def _not_of_experts(tensor: StoredTensor) -> SpecbeamError:
    return SpecbeamError(
        f"{tensor.file}: tensor {tensor.name} has the shape {list(tensor.shape)} and the type {tensor.dtype}, which "
        "no experts have"
    )
