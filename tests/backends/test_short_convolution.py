"""Short convolutions on the cpu backend, by LFM2: nearer to transformers than all models have to be, and bit for bit.

tests/backends/test_conformance.py has the trees, beams and drafts of these models, and tests/cases.py their requests.
"""

import random

import numpy as np
import pytest
import torch

import specbeam
from specbeam.cache.slots import Slots
from specbeam.core.tree import Tree
from tests.backends.test_conformance import FAMILIES
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model

NUM_TOKENS, NUM_SEQUENCES, LARGEST_PIECE = 200, 3, 70
CONVOLUTIONS = [family for family, (architecture, _) in FAMILIES.items() if architecture == "lfm2"]


def sequences():
    draw = np.random.default_rng(1)
    return [draw.integers(0, 256, NUM_TOKENS).tolist() for _ in range(NUM_SEQUENCES)]


def logits(lm, tokens, pieces=(NUM_TOKENS,)):
    """Logits after each token of a sequence, evaluated in pieces of these sizes."""
    slots, rows, start = Slots(Tree(tokens), lm.backend), [], 0
    for size in pieces:
        nodes = np.arange(start, min(start + size, len(tokens)))
        rows.append(np.array(lm.backend.forward([slots.tree_batch(nodes, np.arange(len(nodes)))])))
        start += size
        slots.evaluated(np.arange(min(start, len(tokens)), len(tokens)))
    return np.concatenate(rows)


@pytest.mark.parametrize("family", CONVOLUTIONS)
def test_logits_are_within_1e_4_of_the_logits_of_transformers(save, family):
    architecture, changes = FAMILIES[family]
    model = random_model(architecture, **changes)
    lm = specbeam.load(save(model), backend="cpu", quantize="float32")
    for tokens in sequences():
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].numpy()
        assert expected.std() > 0.5  # else closeness says nothing
        assert np.abs(logits(lm, tokens) - expected).max() < 1e-4


@pytest.mark.parametrize("quantize", ["float32", "int8", "int4"])
@pytest.mark.parametrize("family", CONVOLUTIONS)
def test_the_pieces_in_which_a_prompt_is_read_change_no_bit(save, family, quantize):
    """A piece may be shorter than a filter, and may begin anywhere."""
    architecture, changes = FAMILIES[family]
    lm = specbeam.load(save(random_model(architecture, **changes)), backend="cpu", quantize=quantize)
    draw = random.Random(2)
    for tokens in sequences():
        pieces = [1, 1, 2]
        while sum(pieces) < len(tokens):
            pieces.append(draw.randint(1, LARGEST_PIECE))
        assert logits(lm, tokens, pieces).tobytes() == logits(lm, tokens).tobytes()


@pytest.mark.parametrize("family", CONVOLUTIONS)
def test_a_gguf_file_has_the_bits_of_its_folder(save, tmp_path, family):
    """llama.cpp's converter reorders no rows of this architecture."""
    architecture, changes = FAMILIES[family]
    model = random_model(architecture, **changes)
    folder = specbeam.load(save(model), backend="cpu", quantize="float32")
    file = specbeam.load(write_gguf(tmp_path / "m.gguf", model), backend="cpu", quantize="float32")
    tokens = sequences()[0]
    assert logits(file, tokens).tobytes() == logits(folder, tokens).tobytes()
