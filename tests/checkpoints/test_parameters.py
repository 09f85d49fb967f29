"""The parameters of a configuration, against the torch backend's transformer."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specbeam.backends.torch.transformer import Transformer
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.parameters import parameter_shapes
from tests.backends.test_conformance import FAMILIES
from tests.conftest import random_model


def parameters(config):
    with torch.device("meta"):
        return [(name, tuple(p.shape)) for name, p in Transformer(config).named_parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_of_each_family(save, family):
    architecture, changes = FAMILIES[family]
    config = open_checkpoint(save(random_model(architecture, **changes))).config
    assert [*parameter_shapes(config).items()] == parameters(config)


FLAGS = ("gated_mlp", "learned_positions", "mlp_norm", "post_norms", "qkv_bias", "output_bias", "mlp_bias", "qk_norm")


@given(st.fixed_dictionaries(dict.fromkeys((*FLAGS, "tied_head"), st.booleans())), st.sampled_from(["rms", "layer"]))
def test_of_any_features(save, flags, norm):
    config = replace(open_checkpoint(save(random_model("llama"))).config, norm=norm, **flags)
    assert [*parameter_shapes(config).items()] == parameters(config)
