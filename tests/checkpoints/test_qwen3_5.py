"""Qwen3.5's configurations and end tokens, in all forms of its files."""

import json

import numpy as np
import pytest

import specbeam
from specbeam import SpecbeamError
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.formats.folder_config import config_from_hugging_face
from specbeam.checkpoints.formats.gguf_config import config_from_gguf
from specbeam.checkpoints.parts.gated_delta_net import GatedDeltaNet
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model, rewrite

ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
ROPE |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
FOLDER = {
    **{"model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "rope_parameters": ROPE},
    **{"max_position_embeddings": 262_144, "attn_output_gate": True, "mamba_ssm_dtype": "float32"},
}
TENSORS = range(60)
KEYS = {
    **{"context_length": 262_144, "embedding_length": 1024, "block_count": 4, "feed_forward_length": 3584},
    **{"attention.head_count": 8, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6},
    **{"attention.key_length": 256, "attention.value_length": 256, "rope.dimension_count": 64, "rope.freq_base": 1e7},
    **{"rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4, "ssm.conv_kernel": 4},
    **{"ssm.group_count": 16, "ssm.time_step_rank": 32, "ssm.state_size": 128, "ssm.inner_size": 4096},
}
SHAPES = {"token_embd.weight": (248320, 1024)} | {f"blk.{i}.attn_norm.weight": (1024,) for i in range(5)}


def of_folder(**changes):
    return config_from_hugging_face({k: v for k, v in (FOLDER | changes).items() if v is not ...}, TENSORS)


def of_gguf(**changes):
    keys = {f"qwen35.{key}": value for key, value in (KEYS | changes).items() if value is not ...}
    return config_from_gguf({"general.architecture": "qwen35"} | keys, SHAPES)


def kinds(config):
    return [layer[0].name for layer in config.layers]


def test_a_folder_says_which_layers_have_linear_attention():
    config = of_folder()
    (delta_net, mlp), *_, (attention, _) = config.layers
    assert kinds(config) == ["gated_delta_net"] * 3 + ["attention"]
    assert delta_net == GatedDeltaNet(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, kernel_size=4)
    assert (attention.output_gate, attention.qk_norm, attention.rope.dim, attention.rope.theta) == (
        True,
        "head",
        64,
        1e7,
    )
    assert (mlp.intermediate_size, config.norm_eps, config.window) == (3584, 1e-6, None)
    assert kinds(of_folder(full_attention_interval=2)) == ["gated_delta_net", "attention"] * 2
    assert kinds(of_folder(layer_types=["full_attention"] * 4)) == ["attention"] * 4


def test_a_gguf_file_says_the_same_model_with_its_value_heads_tiled():
    config, folder = of_gguf(), of_folder()
    assert config.layers[3] == folder.layers[3]
    assert config.layers[0][0] == GatedDeltaNet(
        num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, kernel_size=4, tiled=True
    )
    assert kinds(of_gguf(**{"attention.recurrent_layers": [False, True, False, True]})) == [
        *("attention", "gated_delta_net") * 2
    ]
    assert kinds(of_gguf(full_attention_interval=...)) == kinds(config)


def test_blocks_that_predict_further_tokens_are_passed_over(tmp_path):
    assert kinds(of_gguf(block_count=5, nextn_predict_layers=1)) == kinds(of_gguf())
    model = random_model("qwen3_5")
    stored = {f"blk.3.{name}.weight": np.ones(32, np.float32) for name in ("attn_norm", "nextn.enorm")}
    path = write_gguf(
        tmp_path / "m.gguf",
        model,
        more=stored,
        **{"qwen35.block_count": 4, "qwen35.nextn_predict_layers": 1},
    )
    plain = write_gguf(tmp_path / "plain.gguf", model)
    texts = [specbeam.generate(specbeam.load(one, backend="cpu"), [1, 2, 3], max_new_tokens=8) for one in (path, plain)]
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"linear_key_head_dim": 24}, "key_dim = 24 for linear attention: it must be a multiple of 16"),
        ({"linear_num_value_heads": 24}, "24 value heads and 16 key heads"),
        ({"linear_conv_kernel_dim": 17}, "kernel_size = 17, which is no size"),
        ({"linear_num_key_heads": "many"}, "linear_num_key_heads = 'many', not an integer"),
        ({"full_attention_interval": 0}, "full_attention_interval = 0, which is no size"),
        ({"layer_types": ["sliding_attention"] * 4}, "layers of kind 'sliding_attention' are not supported"),
    ],
)
def test_what_a_config_json_cannot_say_is_refused(changes, says):
    with pytest.raises(SpecbeamError, match=says):
        of_folder(**changes)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("ssm.conv_kernel", ..., "has no qwen35.ssm.conv_kernel"),
        ("ssm.time_step_rank", 0, "ssm.time_step_rank = 0, which is no size"),
        ("ssm.inner_size", 100, "value_dim = 3 for linear attention"),
        ("rope.dimension_sections", [8, 8, 8, 0], r"dimension_sections = \[8, 8, 8, 0\] leaves out features"),
        ("rope.dimension_sections", [32], "leaves out features"),
        ("attention.recurrent_layers", [True], "has 1 values, but the model has 4 layers"),
        ("nextn_predict_layers", 4, "= 0, which is no size"),
    ],
)
def test_what_a_gguf_file_cannot_say_is_refused(key, value, says):
    with pytest.raises(SpecbeamError, match=says):
        of_gguf(**{key: value})


def test_the_end_of_a_turn_ends_a_text_though_config_json_does_not_say_so(save):
    """A generation_config.json has the last word."""
    folder = save(random_model("qwen3_5"))
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["added_tokens"][-1]["content"] = "<|im_end|>"
    (folder / "tokenizer.json").write_text(json.dumps(tokens).replace('"<unused>"', '"<|im_end|>"'))
    rewrite(folder, "config.json", eos_token_id=257)
    assert open_checkpoint(folder).eos_token_ids == {257}
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).eos_token_ids == {257, 258}
