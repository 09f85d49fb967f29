"""Ancestral sampling: each token is drawn from the distribution that the warpers leave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specbeam.decoding import Evaluate, Hypothesis, Strategy
from specbeam.decoding.greedy import greedy, log_prob
from specbeam.decoding.processors import Processors, Warpers
from specbeam.decoding.record import Record
from specbeam.decoding.stopping import Stopping
from specbeam.tree import Tree


def sample(
    tree: Tree, process: Processors, stop: Stopping, record: Record, warp: Warpers, generator: torch.Generator
) -> Strategy:
    """The loop of greedy search, with each token drawn."""
    return greedy(tree, process, stop, record, pick=lambda scores: draw(warp(scores), generator))


def sample_several(
    tree: Tree,
    process: Processors,
    stop: Stopping,
    record: Record,
    warp: Warpers,
    generators: Sequence[torch.Generator],
) -> Strategy:
    """Independent samples, one per generator. Texts that agree so far share their nodes, first of all the prompt's."""
    tips = np.full(len(generators), tree.tip)
    growing = np.arange(len(generators))
    hypotheses: dict[int, Hypothesis] = {}
    while True:
        nodes, rows = np.unique(tips[growing], return_inverse=True)
        logits = yield Evaluate(nodes)
        scores = process(tree, nodes, logits)
        warped = warp(scores)
        tokens = [draw(warped[row], generators[i]) for row, i in zip(rows, growing.tolist(), strict=True)]
        drawn, texts = np.unique(np.stack([rows, tokens]), axis=1, return_inverse=True)
        log_probs = [log_prob(logits[row], token, scores[row]) for row, token in drawn.T.tolist()]
        del logits, scores, warped  # they would take memory until the next logits come
        tips[growing] = tree.add(nodes[drawn[0]], drawn[1], log_probs)[texts.ravel()]
        record.round()
        record.step(tips[growing], tree.scores(tips[growing]))
        for i in growing.tolist():
            if reason := stop(tree, tips[i]):
                hypotheses[i] = Hypothesis(int(tips[i]), float(tree.scores(tips[i])), reason)
        if len(hypotheses) == len(generators):
            return [hypotheses[i] for i in range(len(generators))]
        growing = np.array([i for i in growing.tolist() if i not in hypotheses])
        tree.keep(tips[growing], tips[[*hypotheses]])


def spawn(generator: torch.Generator, n: int) -> list[torch.Generator]:
    """n independent generators. The first is the given one, and the others come from its seed."""
    seeds = np.random.SeedSequence(generator.initial_seed()).spawn(n - 1)
    return [generator, *(seeded(int(seed.generate_state(1, np.uint64)[0]) >> 1) for seed in seeds)]


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
