"""The highest scores, against Tensor.topk."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbeam.decoding.top import top


@given(
    n=st.sampled_from([1, 100, 2048, 5000, 70_001]),
    rows=st.sampled_from([(), (1,), (3,)]),
    k=st.integers(0, 40),
    masked=st.sampled_from([0.0, 0.5, 0.9999]),
    tied=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_highest_scores_are_those_of_topk(n, rows, k, masked, tied, seed):
    generator = torch.Generator().manual_seed(seed)
    k = min(k, n)
    scores = torch.randn((*rows, n), generator=generator)
    if tied:
        scores = scores.bfloat16().float()
    scores[torch.rand(scores.shape, generator=generator) < masked] = float("-inf")
    values, indices = top(scores, k)
    assert torch.equal(values, scores.topk(k).values)
    assert torch.equal(indices, scores.topk(k).indices)
    assert all(len(set(row)) == k for row in indices.reshape(scores.numel() // n, k).tolist())


def test_more_than_there_are_is_refused():
    with pytest.raises(RuntimeError):
        top(torch.zeros(3), 4)
