"""What configurations of families with Mamba 2 say, and which are refused."""

import pytest

from specbeam.checkpoints.formats.folder_config import config_from_hugging_face
from specbeam.checkpoints.parts.attention import Attention
from specbeam.checkpoints.parts.mamba2 import Mamba2
from specbeam.checkpoints.parts.mlp import MLP
from specbeam.errors import SpecbeamError

SIZES = {"vocab_size": 259, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
OF_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 16, "num_hidden_layers": 2}
GRANITE = {"model_type": "granitemoehybrid", "num_local_experts": 0, **SIZES, **OF_MAMBA}
FALCON = {"model_type": "falcon_h1", "mamba_d_ssm": 64, **SIZES, **OF_MAMBA}
NEMOTRON = {"model_type": "nemotron_h", "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, **SIZES}


def read(content):
    return config_from_hugging_face(content, range(1000))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ([0.0, float("inf")], (None, None)),
        ([0.0, {"__float__": "Infinity"}], (None, None)),
        ([0.001, 0.5], (0.001, 0.5)),
        (None, (None, None)),
    ],
)
def test_limits_of_dt_as_json_and_as_transformers_writes_infinity(limits, expected):
    (mamba2, _), _ = read(GRANITE | {"time_step_limit": limits}).layers
    assert (mamba2.min_step, mamba2.max_step) == expected


def test_a_pattern_of_nemotron_names_the_layers_as_the_list_does():
    """transformers writes no ``num_hidden_layers``, and files of NVIDIA have a pattern."""
    listed = read(NEMOTRON | {"layers_block_type": ["mamba", "mlp", "attention"]})
    assert [type(part) for (part,) in listed.layers] == [Mamba2, MLP, Attention]
    assert read(NEMOTRON | {"hybrid_override_pattern": "M-*", "num_hidden_layers": 3}) == listed


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (GRANITE | {"mamba_proj_bias": True}, "mamba_proj_bias is not supported for granitemoehybrid"),
        (GRANITE | {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (GRANITE | {"mamba_d_head": 32}, "mamba_n_heads = 4 and mamba_d_head = 32, but Mamba's inner size is 64"),
        (GRANITE | {"time_step_limit": [0.0]}, "which is not two numbers"),
        (GRANITE | {"time_step_limit": [0.0, "x"]}, "which is not two numbers"),
        (FALCON | {"projectors_bias": True}, "projectors_bias is not supported for falcon_h1"),
        (FALCON | {"ssm_multipliers": [1.0, 2.0]}, "which is not a list of 5 numbers"),
        (FALCON | {"key_multiplier": -1.0}, "has the number -"),
        (NEMOTRON | {"hybrid_override_pattern": "ME*"}, "layers of kind 'moe' are not supported"),
        (NEMOTRON | {"hybrid_override_pattern": "MX"}, "layers of the unknown kind 'X'"),
        (NEMOTRON, "has no 'layers_block_type'"),
        (NEMOTRON | {"hybrid_override_pattern": "M", "mlp_hidden_act": "silu"}, "mlp_hidden_act = 'silu'"),
    ],
)
def test_what_the_families_cannot_have_is_refused(content, says):
    with pytest.raises(SpecbeamError, match=says):
        read(content)
