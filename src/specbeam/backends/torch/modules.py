"""The modules that every part of a model in PyTorch is made of: products and norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts.part import Parameters

MAX_ROWS_TRANSPOSED = 64
"""Up to this many rows, a product of float32 on a CPU is formed transposed: see :func:`linear`."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [n, in] times weight [out, in] transposed, plus bias [out].

    For a few rows of float32 on a CPU this forms weight times x transposed, with at least two columns. BLAS libraries
    then stream the weight at the speed of memory. Their matrix-vector product and their products with a short left side
    do not (MKL on AMD EPYC: 35 GB/s against 11 GB/s for one row).
    """
    n = len(x)
    if n > MAX_ROWS_TRANSPOSED or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = x if n > 1 else x.expand(2, -1).contiguous()
    product = torch.mm(weight, rows.t()).t()[:n]
    return product.contiguous() if bias is None else product + bias


def cap(x: Tensor, softcap: float | None) -> Tensor:
    """x kept between -softcap and softcap, smoothly (Gemma 2; Bello et al. 2017)."""
    return x if softcap is None else softcap * torch.tanh(x / softcap)


class Weights(nn.Module):
    """A matrix [out, in] and perhaps a bias [out], without the initialization that nn.Linear would spend time on."""

    def __init__(self, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None

    def forward(self, x: Tensor, rows: int | None = None) -> Tensor:
        """The product [..., out], or its first rows."""
        return linear(x, self.weight[:rows], None if self.bias is None else self.bias[:rows])


class ExpertWeights(nn.Module):
    """A matrix [out, in] for each expert, and perhaps a bias [out]."""

    def __init__(self, experts: int, rows: int, columns: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(experts * rows), requires_grad=False) if bias else None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """The product [n, out] of an expert."""
        bias = None if self.bias is None else self.bias.view(len(self.weight), -1)[expert]
        return linear(x, self.weight[expert], bias)


class Vector(nn.Module):
    """Numbers [n] that are no norm's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich 2019), or LayerNorm (Ba et al. 2016), over the last dimension."""

    def __init__(self, size: int, config: Config) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if config.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Scale(nn.Module):
    """A number that all others are multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def add_modules(module: nn.Module, parameters: Parameters, config: Config) -> None:
    """Give a module the products, norms and vectors that have these parameters, each under its own name.

    Tables that stay in the checkpoint's file are no parameters here.
    """
    shapes = {name: parameter.shape for name, parameter in parameters if not parameter.mapped}
    for name, shape in shapes.items():
        own, _, kind = name.partition(".")
        if kind != "weight":
            continue
        has_bias = f"{own}.bias" in shapes
        if len(shape) == 1:
            module.add_module(own, Norm(*shape, config) if own.endswith("norm") else Vector(*shape))
        elif len(shape) == 2:
            module.add_module(own, Weights(shape[0], shape[1], has_bias))
        else:
            module.add_module(own, ExpertWeights(shape[0], shape[1], shape[2], has_bias))
