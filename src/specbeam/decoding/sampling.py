"""Ancestral sampling: each token is drawn from the distribution that the warpers leave."""

from __future__ import annotations

import torch
from torch import Tensor

from specbeam.decoding import Strategy
from specbeam.decoding.greedy import greedy
from specbeam.decoding.processors import Processors, Warpers
from specbeam.decoding.record import Record
from specbeam.decoding.stopping import Stopping
from specbeam.tree import Tree


def sample(
    tree: Tree, process: Processors, stop: Stopping, record: Record, warp: Warpers, generator: torch.Generator
) -> Strategy:
    """The loop of greedy search, with each token drawn."""
    return greedy(tree, process, stop, record, pick=lambda scores: draw(warp(scores), generator))


def seeded(seed: int | None) -> torch.Generator:
    """A request's own generator, on the CPU: its draws depend on the seed alone, not on device or batch."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def flip(probability: float, generator: torch.Generator) -> bool:
    """True with this probability."""
    return float(torch.rand((), dtype=torch.float64, generator=generator)) < probability


def gumbel(n: int, generator: torch.Generator) -> Tensor:
    """n draws from the standard Gumbel distribution, float64 [n] on the CPU."""
    return -torch.empty(n, dtype=torch.float64).exponential_(generator=generator).log()


def draw(scores: Tensor, generator: torch.Generator) -> int:
    """Draw an index from the softmax of scores [vocab]: the highest after adding Gumbel noise (the Gumbel-max trick).

    Each token has its own noise. So rounding differences of the scores change the draw only where two tokens nearly
    tie. Inverting the cumulative probabilities would add up the differences over the whole vocabulary.
    """
    noise = gumbel(scores.shape[-1], generator)
    return int((scores.double() + noise.to(scores.device)).argmax())
