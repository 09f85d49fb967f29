"""The parameters of a model by its configuration, and that all of their weights are finite numbers."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts.experts import Experts, ExpertUse
from specbeam.checkpoints.parts.part import Parameter, Parameters, Part, norm
from specbeam.errors import SpecbeamError


def parameters(config: Config) -> dict[str, Parameter]:
    """Each parameter by its name, in the order in which packed weights have them.

    Matrices are [out, in], and the matrices of experts are [experts, out, in]. Query, key and value weights are stacked
    into one matrix, and so are gate and up.
    """
    own = dict(_parameters(config))
    if not config.tied_head:
        own["head.weight"] = Parameter((config.head_size or config.vocab_size, config.hidden_size), min_bits=8)
    if config.encoder is not None:
        own |= {f"encoder.{name}": parameter for name, parameter in _parameters(config.encoder)}
    return own


def _parameters(config: Config) -> Parameters:
    """The parameters of a decoder without its head, or of an encoder."""
    yield from config.stem.parameters(config)
    for _, name, parameter in _of_layers(config):
        yield name, parameter
    if config.final_norm:
        yield from norm("norm", config.hidden_size, config)


def _of_layers(config: Config) -> Iterator[tuple[Part, str, Parameter]]:
    for number, layer in enumerate(config.layers):
        for part in layer:
            for name, parameter in part.parameters(config):
                yield part, f"blocks.{number}.{name}", parameter


def parts_by_parameter(config: Config) -> dict[str, Part]:
    """The part that each parameter of a layer belongs to, by its name."""
    parts = {name: part for part, name, _ in _of_layers(config)}
    if config.encoder is not None:
        parts |= {f"encoder.{name}": part for name, part in parts_by_parameter(config.encoder).items()}
    return parts


def shares_read(config: Config) -> dict[str, float]:
    """Of each parameter of a decoder, the share that a pass over one node reads.

    A pass reads the experts of the node, and nearly nothing of an embedding that is not the head.
    """
    owners = parts_by_parameter(config)
    shares = {}
    for name, (shape, *_) in parameters(config).items():
        part = owners.get(name)
        shares[name] = 1.0
        if isinstance(part, Experts) and len(shape) == 3:
            shares[name] = part.experts_per_token / part.num_experts
        if name.startswith("encoder.") or (name == "embedding.weight" and not config.tied_head):
            shares[name] = 0.0
    return shares


def expert_use(config: Config) -> ExpertUse | None:
    """What a pass of a decoder reads of its experts; None without any."""
    layers = [part for part in config.parts if isinstance(part, Experts)]
    if not layers:
        return None
    owners, shares = parts_by_parameter(config), shares_read(config)
    of_experts = others = 0.0
    for name, (shape, *_) in parameters(config).items():
        if isinstance(owners.get(name), Experts) and len(shape) == 3:
            of_experts += prod(shape) * shares[name]
        else:
            others += prod(shape) * shares[name]
    count, used = (mean(getattr(part, name) for part in layers) for name in ("num_experts", "experts_per_token"))
    return ExpertUse(of_experts / (of_experts + others), count, used)


def are_finite(weights: NDArray[np.float32]) -> bool:
    """Whether all of some weights are finite numbers. ``isfinite`` of each would make an array of the same length."""
    with np.errstate(invalid="ignore"):
        return not weights.size or bool(np.isfinite((weights.min(), weights.max())).all())


def not_finite(place: str | Path, tensor: str) -> SpecbeamError:
    """The error for a tensor with weights that are not finite."""
    return SpecbeamError(
        f"{place}: tensor {tensor} has weights that are not finite numbers (NaN or infinite): fetch it again, or ask "
        "who made it for an undamaged one"
    )
