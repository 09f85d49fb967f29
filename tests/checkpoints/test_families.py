"""The families of architectures: found by their files, and each checked against transformers."""

import pytest
import torch
from gguf.constants import MODEL_ARCH_NAMES
from transformers import CONFIG_MAPPING

from specbeam.checkpoints import families
from specbeam.checkpoints.architecture import SIZES, tensor_names
from tests.backends.test_conformance import FAMILIES
from tests.conftest import ARCHITECTURES, random_model
from tests.written import random_tensors

HEADS = {"eagle3"}
"""Draft heads, which transformers does not have: tests/drafting/test_heads.py."""


def test_every_architecture_is_compared_with_transformers():
    compared = {ARCHITECTURES[architecture].get("model_type", architecture) for architecture, _ in FAMILIES.values()}
    with_encoders = {name for name, one in families.ARCHITECTURES.items() if "encoder.norm" in one.folder_tensors}
    assert compared | with_encoders | HEADS == set(families.ARCHITECTURES)
    assert with_encoders == {"whisper"}  # tests/backends/test_whisper.py


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_the_core_suite_have_the_tensors_of_transformers(family):
    """Without PyTorch, tests run on tensors that NumPy draws."""
    architecture, changes = FAMILIES[family]
    model = random_model(architecture, **changes)
    given = model.config.to_dict() | {"model_type": model.config.model_type}
    tensors = {name: torch.from_numpy(tensor) for name, tensor in random_tensors(given, seed=0).items()}
    how = {"config": model.config, "state_dict": tensors, "output_loading_info": True}
    _, report = type(model).from_pretrained(None, **how)
    assert not any(report.values())


@pytest.mark.parametrize("name", [name for name, one in families.ARCHITECTURES.items() if one.sizes])
def test_sizes_that_a_text_config_leaves_out_are_those_of_transformers(name):
    default = CONFIG_MAPPING[name]()
    assert [getattr(default, size) for size in SIZES] == [*families.ARCHITECTURES[name].sizes]


def test_names_are_names_of_transformers_and_of_llama_cpp():
    assert set(families.ARCHITECTURES) - HEADS <= set(CONFIG_MAPPING)
    assert set(families.GGUF_ARCHITECTURES) <= set(MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize(
    ("parameter", "names"),
    [
        ("embedding.weight", ["embed.weight"]),
        ("blocks.12.mlp.down.bias", ["h.12.N_down.bias"]),
        ("blocks.3.attention.qkv.weight", ["h.3.q_x.weight", "h.3.k_x.weight", "h.3.v_x.weight"]),
    ],
)
def test_names_of_tensors(parameter, names):
    modules = {"embedding": "embed", "blocks.N.mlp.down": "h.N.N_down", "blocks.N.attention.qkv": "h.N.{q,k,v}_x"}
    assert tensor_names(parameter, modules) == names
