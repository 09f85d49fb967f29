"""Ancestral sampling: each token is drawn from the distribution the warpers leave."""

from __future__ import annotations

import torch
from torch import Tensor

from specbeam.decoding import Strategy
from specbeam.decoding.greedy import greedy
from specbeam.decoding.processors import Processors, Warpers
from specbeam.decoding.stopping import Stopping
from specbeam.tree import Tree


def sample(tree: Tree, process: Processors, stop: Stopping, warp: Warpers, generator: torch.Generator) -> Strategy:
    """Greedy's walk, with each token drawn."""
    return greedy(tree, process, stop, pick=lambda scores: draw(warp(scores).softmax(-1), generator))


def seeded(seed: int | None) -> torch.Generator:
    """A request's own source of randomness, on the CPU: draws depend on the seed alone, not on device or batch."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def draw(probabilities: Tensor, generator: torch.Generator) -> int:
    """Draw an index with the given probabilities [vocab] by inverting their cumulative sum.

    The sum is in float64: in float32 the tail of a large vocabulary would be rounded away.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    uniform = torch.rand((), generator=generator, dtype=torch.float64).to(cumulative.device)
    # right=True: a token of probability 0 has an empty interval and is never drawn.
    index = torch.searchsorted(cumulative, uniform * cumulative[-1], right=True)
    return int(index.clamp(max=int(probabilities.nonzero()[-1])))
