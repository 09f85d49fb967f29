"""The parts of a model's layers in PyTorch, one file for each of :mod:`specbeam.checkpoints.parts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbeam.backends.torch.parts.attention import Attention, CrossAttention
from specbeam.backends.torch.parts.mlp import MLP
from specbeam.backends.torch.parts.part import PartModule
from specbeam.backends.torch.parts.short_convolution import ShortConvolution
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts import attention, mlp, short_convolution
from specbeam.checkpoints.parts.part import Part

MODULES: dict[type[Part], Callable[[Any, Config], PartModule]] = {
    attention.Attention: Attention,
    attention.CrossAttention: CrossAttention,
    mlp.MLP: MLP,
    short_convolution.ShortConvolution: ShortConvolution,
}
"""The module of each description of a part."""
