"""The parameters of a configuration, against the torch backend's transformer."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbeam.backends.torch.transformer import Transformer
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.parameters import parameters
from specbeam.checkpoints.stems import TokenStem
from tests.backends.test_conformance import FAMILIES
from tests.conftest import random_model


def shapes(config):
    """The backend reads the rows of a mapped table from the checkpoint's file."""
    return [(name, one.shape) for name, one in parameters(config).items() if not one.mapped]


def shapes_of_torch(config):
    with torch.device("meta"):
        return [(name, tuple(p.shape)) for name, p in Transformer(config).named_parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_of_each_family(save, family):
    architecture, changes = FAMILIES[family]
    config = open_checkpoint(save(random_model(architecture, **changes))).config
    assert shapes(config) == shapes_of_torch(config)


def flags(*names):
    return st.fixed_dictionaries(dict.fromkeys(names, st.booleans()))


@given(
    flags("qkv_bias", "output_bias", "norm", "output_norm", "sum_norm"),
    st.sampled_from([None, "head", "all", "rotated_head"]),
    flags("gated", "bias", "norm", "output_norm", "sum_norm", "sum_scale", "parallel"),
    flags("tied_head", "final_norm"),
    flags("learned_positions"),
    st.sampled_from(["rms", "layer"]),
)
def test_of_any_features(save, of_attention, qk_norm, of_mlp, of_model, of_stem, norm):
    config = open_checkpoint(save(random_model("llama"))).config
    layers = [
        (replace(attention, qk_norm=qk_norm, **of_attention), replace(mlp, **of_mlp))
        for attention, mlp in config.layers
    ]
    config = replace(config, layers=tuple(layers), norm=norm, stem=TokenStem(**of_stem), **of_model)
    assert shapes(config) == shapes_of_torch(config)
