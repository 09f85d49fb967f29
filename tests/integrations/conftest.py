"""Small models of transformers, and ``model.generate`` with and without our ``custom_generate``."""

from functools import cache

import pytest
import torch

from specbeam import hf
from tests.conftest import random_model

VOCAB, PAD = 20, 0
EXTRA = {"custom_generate": hf.generate}
DETAILS = {"return_dict_in_generate": True, "output_scores": True}


@pytest.fixture(scope="session")
def models():
    @cache
    def model(architecture):
        sizes = {"vocab_size": VOCAB, "eos_token_id": 1, "bos_token_id": 2, "initializer_range": 0.25}
        made = random_model(architecture, **sizes | ({"sliding_window": 4} if architecture == "mistral" else {}))
        made.generation_config.pad_token_id = PAD
        return made

    return model


@pytest.fixture(scope="session")
def model(models):
    return models("llama")


@pytest.fixture(scope="session")
def small():
    """A draft model for it."""
    return random_model("llama", seed=1, vocab_size=VOCAB, initializer_range=0.25, num_hidden_layers=1)


def padded(prompts):
    """Prompts as a tokenizer that pads on the left gives them."""
    longest = max(map(len, prompts))
    rows = [[PAD] * (longest - len(p)) + p for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


def both(model, *given, **options):
    """What transformers returns, and what we return."""
    return model.generate(*given, **options), model.generate(*given, **options, **EXTRA)


def assert_same(model, *given, drafts=({},), **options):
    """With each draft we return the tokens of transformers, which are returned here."""
    expected = model.generate(*given, **options)
    for draft in drafts:
        assert model.generate(*given, **options, **draft, **EXTRA).tolist() == expected.tolist()
    return expected
