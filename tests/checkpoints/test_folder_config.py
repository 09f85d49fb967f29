"""The keys of a config.json that count are read as transformers' configuration classes read them."""

import json
import random
from copy import deepcopy
from functools import cache

import pytest
import transformers
from transformers import CONFIG_MAPPING

from specbeam.checkpoints.architecture import COMMON, SIZES, check_rope, nested
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.families import ARCHITECTURES
from specbeam.checkpoints.formats import folder_config
from specbeam.errors import SpecbeamError, Unsupported
from tests.conftest import in_thorough_mode
from tests.fuzz.folder_config import seeds

CASES, PARTS = 10_000 if in_thorough_mode() else 800, 4
TENSORS = [str(number) for number in range(60)]
OLDER_NAMES = {
    *("rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base", "sliding_window_pattern"),
    *("rope_local_base_freq", "n_embd", "n_layer", "n_head", "n_positions", "layer_types", "no_rope_layers"),
}
READ = sorted({*COMMON, *OLDER_NAMES, *(key for architecture in ARCHITECTURES.values() for key in architecture.keys)})
"""The other keys of a file, such as keys about training, may have any value."""
WHISPER = {
    **{"model_type": "whisper", "vocab_size": 259, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 30},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "suppress_tokens": [7]},
    **{"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 40, "max_target_positions": 64},
}
VALUES = [
    *(None, True, False, 0, 1, 2, 3, 5, 7, 64, -1, 1.0, 0.5, 1e-5, "x", "silu", "4", [], [1], [1.0, 2.0], {}),
    *(["full_attention"] * 3, ["sliding_attention", "full_attention", "attention"]),
    *({"rope_type": kind, "factor": 2.0} for kind in ("linear", "yarn", "dynamic", "longrope")),
    {"type": "linear", "factor": 2.0},
    {"full_attention": {"rope_type": "linear", "factor": 2.0}},
    {"sliding_attention": None},
]


def by_transformers(given):
    """The configuration by way of transformers' class; None if that or the rules after it refuse it."""
    kind = CONFIG_MAPPING[given["model_type"]]
    needed = [key for key in SIZES if key not in ARCHITECTURES[given["model_type"]].derived_sizes]
    if any(key not in given and kind.attribute_map.get(key) not in given for key in needed):
        return None  # transformers has defaults for them, and specbeam does not take these
    try:
        complete = kind.from_dict(kind._decode_special_floats(deepcopy(given)))  # as it reads files
        architecture = ARCHITECTURES[given["model_type"]]
        complete.allow_global_per_layer_attribute_access = True  # layers of Gemma 4 have their own numbers
        ropes = getattr(complete, "rope_parameters", None) or {}
        if given["model_type"] == "hunyuan_v1_dense" and ropes.get("rope_type") == "dynamic" and ropes.get("alpha"):
            dim = (
                complete.head_dim or complete.hidden_size // complete.num_attention_heads
            )  # as its model's code has it
            theta = ropes["rope_theta"] * float(ropes["alpha"]) ** (dim / (dim - 2))
            complete.rope_parameters = {"rope_type": "default", "rope_theta": theta}
        for parameters in nested(complete) or [complete.rope_parameters] if architecture.has_rope else []:
            check_rope(parameters)  # models of transformers fail later where this refuses
        return folder_config._read(architecture, complete, TENSORS)
    except Exception:
        return None


def by_us(given):
    try:
        return folder_config.config_from_hugging_face(given, TENSORS)
    except SpecbeamError:
        return None


@cache
def whole_files():
    files = [json.loads(seed)["config"] for seed in seeds()]
    files += [WHISPER, transformers.WhisperConfig(**WHISPER).to_dict()]
    return [file for file in files if file["model_type"] in ARCHITECTURES]


def changed(draw):
    """One of the files, with up to three of the keys that are read left out, renamed or given another value."""
    file = deepcopy(draw.choice(whole_files()))
    present = [key for key in READ if key in file]
    for _ in range(draw.choice([1, 1, 1, 2, 2, 3])):
        key, how = draw.choice(present if draw.random() < 0.6 else READ), draw.random()
        other = draw.choice(READ)
        if how < 0.3:
            file.pop(key, None)
        elif how < 0.4 and key in file:
            file[other] = file.pop(key)
        elif how < 0.55 and isinstance(file.get(key), dict) and file[key]:
            part = draw.choice(sorted(file[key]))
            if draw.random() < 0.5:
                del file[key][part]
            else:
                file[key][part] = deepcopy(draw.choice(VALUES))
        else:
            file[key] = deepcopy(draw.choice(VALUES))
    if not ARCHITECTURES[file["model_type"]].has_rope:
        for key in ("rope_scaling", "rope_parameters"):  # at which one of the two looks all the same
            file.pop(key, None)
    if file["model_type"] == "phi3" and file.get("head_dim", ...) is None:
        del file["head_dim"]  # Phi-3 has no such key, and transformers' check of its rotation multiplies by it
    return file


@pytest.mark.parametrize("part", range(PARTS))
def test_each_file_is_read_as_transformers_reads_it_or_refused_by_both(part):
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        draw, refused = random.Random(part), 0
        for _ in range(CASES // PARTS):
            file = changed(draw)
            expected = by_transformers(file)
            assert by_us(file) == expected, json.dumps(file)
            refused += expected is None
    finally:
        transformers.logging.set_verbosity(verbosity)
    assert 0.2 < refused / (CASES // PARTS) < 0.8


def test_a_file_of_each_architecture_is_read_as_transformers_reads_it():
    assert {file["model_type"] for file in whole_files()} == {*ARCHITECTURES} - {"eagle3"}  # a draft head
    for file in whole_files():
        assert by_us(file) == by_transformers(file) is not None


SMALL = {"model_type": "llama", "vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rms_norm_eps": 1}, "config.json says rms_norm_eps = '1', not a number with a point"),
        ({"head_dim": "8"}, "config.json says head_dim = '8', not an integer or null"),
        ({"num_attention_heads": 3}, "hidden_size = 16, which is no multiple of its 3 heads"),
        ({"layer_types": ["full_attention"] * 2}, "num_hidden_layers = 1, and layer_types has 2 entries"),
        ({"layer_types": ["attention by ear"]}, "layers of the unknown kind 'attention by ear'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "the rotary scaling 'linear' of config.json lacks factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "says factor = '4', which is no number"),
        ({"model_type": "gpt2", "n_embd": "16", "hidden_size": ...}, "config.json says n_embd = '16', not an integer"),
    ],
)
def test_a_wrong_key_is_named_with_its_value(changes, says):
    given = {key: value for key, value in (SMALL | changes).items() if value is not ...}
    with pytest.raises(SpecbeamError, match=says):
        folder_config.config_from_hugging_face(given, TENSORS)


def test_settings_of_single_layers_are_not_supported():
    with pytest.raises(Unsupported, match="per_layer_config"):
        folder_config.config_from_hugging_face(SMALL | {"per_layer_config": {}}, TENSORS)


def test_layer_types_count_only_where_the_models_look_at_them():
    mistral = SMALL | {"model_type": "mistral", "num_key_value_heads": 2, "layer_types": ["full_attention"]}
    config = folder_config.config_from_hugging_face(mistral, TENSORS)
    assert isinstance(config, Config)
    assert config.layers[0][0].window == 4096


@pytest.mark.parametrize("given", [{}, {"attention_bias": False}, {"attention_bias": True}])
def test_attention_bias_counts_only_for_architectures_that_have_the_key(given):
    config = folder_config.config_from_hugging_face(
        SMALL | {"model_type": "qwen2", "num_key_value_heads": 2} | given, TENSORS
    )
    (attention, _), *_ = config.layers
    assert (attention.qkv_bias, attention.output_bias) == (True, False)
    (attention, _), *_ = folder_config.config_from_hugging_face(SMALL | given, TENSORS).layers
    assert attention.qkv_bias == attention.output_bias == given.get("attention_bias", False)


LFM2 = {
    **{"model_type": "lfm2", "vocab_size": 65536, "num_hidden_layers": 16, "num_key_value_heads": 8},
    **{"norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "max_position_embeddings": 128_000},
    **{"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "bos_token_id": 1, "eos_token_id": 7},
}
WITH_ATTENTION = [2, 5, 8, 10, 12, 14]
KINDS = ["full_attention" if i in WITH_ATTENTION else "conv" for i in range(LFM2["num_hidden_layers"])]
SIZES_350M = LFM2 | {"hidden_size": 1024, "num_attention_heads": 16}
SIZES_1_2B = LFM2 | {"hidden_size": 2048, "num_attention_heads": 32}
NEWER = {"layer_types": KINDS, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True}
FULL = {"rope_theta": 1e6, "rope_type": "default"}


@pytest.mark.parametrize(
    ("published", "same"),
    [
        pytest.param(
            SIZES_350M
            | {
                "block_ff_dim": 6656,
                "full_attn_idxs": WITH_ATTENTION,
                "rope_theta": 1e6,
                "block_auto_adjust_ff_dim": True,
            }
            | {"block_dim": 1024, "conv_dim": 1024, "num_heads": 16, "block_norm_eps": 1e-5, "use_pos_enc": True},
            SIZES_350M | NEWER | {"intermediate_size": 4608},
            id="LFM2-350M",
        ),
        pytest.param(
            SIZES_1_2B | {"block_ff_dim": 12288, "full_attn_idxs": WITH_ATTENTION, "rope_theta": 1e6},
            SIZES_1_2B | NEWER | {"intermediate_size": 8192},
            id="LFM2-1.2B",
        ),
        pytest.param(
            SIZES_1_2B
            | {"intermediate_size": 12288, "tie_embedding": True, "layer_types": KINDS, "full_attn_idxs": None},
            SIZES_1_2B | NEWER | {"intermediate_size": 8192, "rope_parameters": FULL},
            id="LFM2.5-1.2B",
        ),
        pytest.param(
            SIZES_1_2B | NEWER | {"intermediate_size": 10752, "rope_parameters": FULL | {"rope_theta": 1e7}},
            SIZES_1_2B
            | NEWER
            | {"block_ff_dim": 10752, "intermediate_size": 5, "rope_theta": 1e7, "tie_embedding": True},
            id="LFM2.5-2.6B",
        ),
        pytest.param(
            SIZES_350M | {"layer_types": KINDS, "full_attn_idxs": [0]},
            SIZES_350M | NEWER | {"intermediate_size": 8192},
            id="layer_types go before full_attn_idxs, and transformers has a width by default",
        ),
        pytest.param(
            SIZES_350M,
            SIZES_350M | NEWER | {"intermediate_size": 8192, "layer_types": ["full_attention"] * 16},
            id="attention everywhere by default",
        ),
    ],
)
def test_older_and_newer_keys_of_lfm2_say_the_same(published, same):
    assert by_us(published) == by_us(same) == by_transformers(published) is not None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conv_bias": True}, "conv_bias is not supported for lfm2"),
        ({"conv_L_cache": 0}, "= 0, which is no size"),
        ({"conv_L_cache": "3"}, "config.json says conv_L_cache = '3', not an integer"),
        ({"layer_types": ["sliding_attention", *KINDS[1:]]}, "layers of kind 'sliding_attention' are not supported"),
        ({"layer_types": KINDS[1:]}, "num_hidden_layers = 16, and layer_types has 15 entries"),
        ({"full_attn_idxs": "all"}, "config.json says full_attn_idxs = 'all', not a list or null"),
        ({"block_multiple_of": 0, "block_auto_adjust_ff_dim": True}, "block_multiple_of = 0, which is no size"),
    ],
)
def test_what_lfm2_cannot_have_is_refused(changes, says):
    with pytest.raises(SpecbeamError, match=says):
        folder_config.config_from_hugging_face(SIZES_350M | NEWER | changes, TENSORS)
