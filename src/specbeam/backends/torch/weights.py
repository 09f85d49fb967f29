"""A checkpoint's tensors into a transformer's parameters, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specbeam.backends.torch.transformer import Transformer
from specbeam.checkpoints.checkpoint import Checkpoint, Piece, read_all
from specbeam.checkpoints.finite import are_finite, not_finite
from specbeam.errors import SpecbeamError

PIECE_ELEMENTS = 1 << 20
"""Elements read at once: they stay in a processor's cache while they are dequantized."""


def load_weights(model: Transformer, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
    """Fill a model that lies on the meta device.

    The parameters are made in their dtype on their device and filled piece by piece. So memory holds them and a few
    pieces, never a second copy.

    Raises:
        SpecbeamError: a tensor is missing, unknown or has another shape than the configuration asks for, or its weights
            are not finite.
    """
    checkpoint.check_tensors({name: tuple(p.shape) for name, p in model.named_parameters()})
    model.to(dtype).to_empty(device=device)
    model.frequencies = {rope: frequencies.to(device) for rope, frequencies in model.frequencies.items()}
    pieces = [piece for name, p in model.named_parameters() for piece in _pieces(checkpoint, name, p.data)]
    read_all(pieces, "loading weights")


def _pieces(checkpoint: Checkpoint, name: str, parameter: torch.Tensor) -> Iterator[Piece]:
    """Jobs that each fill some rows of a parameter."""
    row = 0
    for source in checkpoint.sources(name):
        rows = checkpoint.shape(source)[0]
        step = checkpoint.piece_rows(source, PIECE_ELEMENTS)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            target = parameter[row + start : row + stop]

            def fill(source: str = source, start: int = start, stop: int = stop, target: torch.Tensor = target) -> None:
                weights = checkpoint.read(source, start, stop)
                target.copy_(weights)
                if are_finite(target):
                    return
                if are_finite(weights):
                    name = str(target.dtype).removeprefix("torch.")
                    raise SpecbeamError(
                        f"{checkpoint.path}: tensor {source} has weights of up to {weights.abs().max():.3g}, too "
                        f"large for {name}: load it with dtype='bfloat16' or 'float32'"
                    )
                raise not_finite(*checkpoint.place(source))

            yield target.numel(), fill
        row += rows
