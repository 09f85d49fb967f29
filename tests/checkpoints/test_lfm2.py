"""LFM2's configurations: which layers are convolutions, and how wide its MLP is, in all forms of its files."""

import pytest
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from specbeam import SpecbeamError
from specbeam.checkpoints.formats.folder_config import config_from_hugging_face
from specbeam.checkpoints.formats.gguf_config import config_from_gguf
from specbeam.checkpoints.parts.attention import Attention

FOLDER = {
    **{"model_type": "lfm2", "vocab_size": 259, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "full_attn_idxs": [1], "block_ff_dim": 100, "block_multiple_of": 16},
}
"""As the first files say it."""
NEWER = {"full_attn_idxs": ..., "layer_types": ["conv", "full_attention", "conv"]}
NEWER |= {"block_ff_dim": ..., "intermediate_size": 100}
TENSORS = range(60)
KEYS = {
    **{"context_length": 64, "embedding_length": 32, "block_count": 3, "feed_forward_length": 80, "vocab_size": 259},
    **{"attention.head_count": 4, "attention.head_count_kv": [0, 2, 0], "attention.layer_norm_rms_epsilon": 1e-5},
    **{"rope.freq_base": 1e6, "shortconv.l_cache": 3},
}
SHAPES = {"token_embd.weight": (259, 32), "token_embd_norm.weight": (32,), "blk.0.ffn_norm.weight": (32,)}


def of_folder(**changes):
    return config_from_hugging_face({k: v for k, v in (FOLDER | changes).items() if v is not ...}, TENSORS)


def of_gguf(**changes):
    keys = {f"lfm2.{key}": value for key, value in (KEYS | changes).items() if value is not ...}
    return config_from_gguf({"general.architecture": "lfm2"} | keys, SHAPES)


@pytest.mark.parametrize("changes", [{}, NEWER, {"tie_embedding": True}, {"hidden_act": "gelu", "rms_norm_eps": 1e-3}])
def test_older_and_newer_keys_say_the_same_model(changes):
    config = of_folder(**changes)
    assert [[part.name for part in layer] for layer in config.layers] == [
        *(["short_convolution", "mlp"], ["attention", "mlp"], ["short_convolution", "mlp"]),
    ]
    (convolution, mlp), (attention, _), _ = config.layers
    assert (convolution.kernel_size, attention.num_kv_heads, attention.qk_norm, attention.rope.theta) == (
        3,
        2,
        "head",
        1e6,
    )
    assert (mlp.intermediate_size, mlp.activation, config.norm_eps, config.tied_head) == (80, "silu", 1e-5, True)


@pytest.mark.parametrize(
    "changes",
    [{"block_auto_adjust_ff_dim": False}, {"block_ffn_dim_multiplier": 1.3}, {"block_multiple_of": 7}, {}],
)
def test_the_width_of_the_mlp_is_that_of_transformers(changes):
    keys = {key: value for key, value in (FOLDER | changes).items() if key != "model_type"}
    expected = Lfm2MLP(Lfm2Config(**keys)).w1.out_features
    assert {layer[1].intermediate_size for layer in of_folder(**changes).layers} == {expected}


def test_a_gguf_file_says_the_same_model():
    config = of_gguf()
    assert config.layers == of_folder().layers
    assert (config.norm_eps, config.tied_head, config.window) == (1e-5, True, None)


def test_layers_without_attention_are_all_convolutions():
    assert of_folder(full_attn_idxs=[]).window == of_gguf(**{"attention.head_count_kv": [0, 0, 0]}).window == 3
    assert all(isinstance(layer[0], Attention) for layer in of_folder(full_attn_idxs=None).layers)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conv_L_cache": 17}, "conv_L_cache = 17, which is no size"),
        ({"block_multiple_of": 0}, "block_multiple_of = 0, which is no size"),
        ({"block_ff_dim": "wide"}, "config.json says block_ff_dim = 'wide', not an integer"),
        ({"num_attention_heads": 0}, "num_heads = 0, which is no size"),
    ],
)
def test_what_a_config_json_cannot_say_is_refused(changes, says):
    with pytest.raises(SpecbeamError, match=says):
        of_folder(**changes)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("shortconv.l_cache", ..., "has no lfm2.shortconv.l_cache"),
        ("shortconv.l_cache", 0, "kernel_size = 0, which is no size"),
        ("attention.head_count_kv", [0, 2], "lfm2.attention.head_count_kv has 2 values, but the model has 3 layers"),
        ("attention.head_count_kv", [0, -2, 0], "num_kv_heads = -2, which is no size"),
        ("attention.head_count", 0, "num_heads = 0, which is no size"),
    ],
)
def test_what_a_gguf_file_cannot_say_is_refused(key, value, says):
    with pytest.raises(SpecbeamError, match=says):
        of_gguf(**{key: value})
