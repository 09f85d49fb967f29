"""GGUF files: written with gguf's own writer, read back as the model they came from."""

import math
import re
import struct
from contextlib import nullcontext, suppress

import numpy as np
import pytest
import torch
from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType, get_tensor_name_map, quants
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as ValueType
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import GemmaTokenizer, LlamaTokenizer
from transformers.tokenization_utils_base import generate_merges

import specbeam
from specbeam import SpecbeamError
from specbeam.backends.cpu.weights import packed_bytes
from specbeam.cache.slots import Slots
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.architecture import Metadata
from specbeam.checkpoints.families import GGUF_ARCHITECTURES
from specbeam.checkpoints.families.ministral3 import GGUF_BETA
from specbeam.checkpoints.formats.folder_config import config_from_hugging_face
from specbeam.checkpoints.formats.gguf import KINDS, read_header
from specbeam.checkpoints.formats.gguf_config import KINDS_OF_MODELS, check_transformers, config_from_gguf
from specbeam.checkpoints.sources import packed
from specbeam.checkpoints.tokenizers import gguf_tokenizer
from specbeam.checkpoints.tokenizers.gguf_tokenizer import PRE, tokenizer_from_gguf
from specbeam.checkpoints.tokenizers.gguf_vocabulary import vocabulary_from_gguf
from specbeam.core.tree import Tree
from tests.absent import needs
from tests.backends.test_conformance import EXPERTS_BESIDE, KEYS_ARE_VALUES, PER_LAYER
from tests.conftest import (
    ALPHA,
    BOS,
    CHAT_TEMPLATE,
    EOS,
    GROWING,
    LFS_POINTER,
    LLAMA3_ROPE,
    LONGROPE,
    YARN,
    byte_tokenizer,
    examples,
    random_model,
)

CONTROL, NORMAL = 3, 1
UINT32 = ValueType.UINT32
AB = byte_tokenizer().convert_tokens_to_ids("ÿ")


def interleave(weight, heads):
    """How llama.cpp stores the query and key rows of Llama models."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


NAMED = {
    **{"gemma3_text": "gemma3", "gpt_neox": "gptneox", "mistral": "llama", "olmo3": "olmo2", "mixtral": "llama"},
    **{"hunyuan_v1_dense": "hunyuan-dense", "ministral3": "mistral3"},
    **{"gemma4_text": "gemma4", "gemma4_unified_text": "gemma4"},
    **{"granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1"},
    **{
        "qwen3_5_text": "qwen35",
        "qwen2_moe": "qwen2moe",
        "qwen3_moe": "qwen3moe",
        "gpt_oss": "gpt-oss",
        "lfm2_moe": "lfm2moe",
    },
    **{"granitemoeshared": "granitemoe", "glm4_moe": "glm4moe", "glm": "chatglm"},
}
NEXTN = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
"""Modules of a head for multi-token prediction outside of its layer, and their names in a GGUF file."""
WITHOUT_KEY_LENGTH = {"gpt2", "gptneox", "stablelm", "phi3", "lfm2", "olmo2", "granite", "exaone4", "starcoder2"}
WITHOUT_KEY_LENGTH |= {"cohere2", "lfm2moe", "olmoe", "granitemoe", "qwen2moe", "chatglm", "granitehybrid"}
PAIRED = ("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
SHARED_WIDTHS = ("shared_intermediate_size", "shared_expert_intermediate_size")
LAYER_NORM_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")


EXACT = (".gate.weight", ".router.weight", ".router.proj.weight", ".shared_expert_gate.weight")
EXACT += (".A_log", ".D", ".mamba.norm.weight", ".mixer.norm.weight")
"""Ends of the names of matrices that a converter never quantizes."""
SCALES = {".router.scale": "ffn_gate_inp.scale", ".router.per_expert_scale": "ffn_down_exps.scale"}
"""Vectors of Gemma 4 whose names in a file end with other words than usual."""


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expert_tensors(config, name, array):
    """The tensors that llama.cpp's converter makes of a stacked tensor of experts, by their names."""
    kind = "bias" if name.endswith("bias") else "weight"
    if config.model_type == "gemma4_text" and "gate_up" in name:
        return {f"blk.{name.split('.')[2]}.ffn_gate_up_exps.weight": array}
    layer, stacked = name.split(".")[2], "gate_up" if "gate_up" in name else "down"
    if config.model_type == "gpt_oss":  # [experts, in, out], and gate and up alternate
        array = array.swapaxes(1, 2) if kind == "weight" else array
        parts = (array[:, ::2], array[:, 1::2])
    else:
        parts = np.split(array, 2, axis=1) if stacked == "gate_up" else ()
    parts = {"gate": parts[0], "up": parts[1]} if stacked == "gate_up" else {"down": array}
    return {f"blk.{layer}.ffn_{part}_exps.{kind}": own for part, own in parts.items()}


def quantized(name, array, kind):
    """A tensor as a file stores it, and its type."""
    return quants.quantize(np.ascontiguousarray(array), kind), kind


def write_gguf(
    path,
    model,
    kind=Type.F32,
    tokenizer=True,
    stored=None,
    stacked=False,
    more=None,
    head=None,
    quantize=quantized,
    finish=finish,
    **metadata,
):
    """A GGUF file of a tiny model of transformers, as llama.cpp's converter writes it.

    Args:
        head: the tensors of its head for multi-token prediction, by their names in a folder.
        stored: tensors in place of the model's, with their types, by their names in the file.
        stacked: whether query, key and value are one tensor.
        more: tensors beside the model's, float32, by their names in the file.
        quantize: what makes a tensor of a name, an array and a type, which is F32 for tensors that stay exact.
        finish: writes the file that a writer holds.
    """
    config, architecture = model.config, model.config.model_type
    named = NAMED.get(architecture, architecture)
    config.allow_global_per_layer_attribute_access = True  # layers of Gemma 4 have their own heads
    rope = getattr(config, "rope_parameters", None) or {}
    heads, hidden = config.num_attention_heads, config.hidden_size
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    kv_heads = heads if architecture in ("gpt2", "gpt_neox") else config.num_key_value_heads
    writer = GGUFWriter(path, named)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers + bool(head))
    if head:
        writer.add_uint32(f"{named}.nextn_predict_layers", 1)
    inner = 4 * hidden if named == "gpt2" else config.intermediate_size
    if named in ("lfm2", "lfm2moe"):
        inner = len(model.state_dict()["model.layers.0.feed_forward.w1.weight"])  # config.json may have another width
        kv_heads = [kv_heads * (kind != "conv") for kind in config.layer_types]
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_vocab_size(config.vocab_size)
    if named == "qwen35":
        writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        pairs = int(config.rope_parameters["partial_rotary_factor"] * head_dim) // 2
        writer.add_rope_dimension_sections([(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0])
    if named == "gemma4":
        inner, kv_heads, head_dim = gemma4_sizes(writer, config)
    if named in ("granitehybrid", "falcon-h1", "nemotron_h"):
        inner, kv_heads = mamba_sizes(writer, config)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    if kv_heads != heads:
        writer.add_head_count_kv(kv_heads)
    if named not in WITHOUT_KEY_LENGTH:
        writer.add_key_length(head_dim)
    if named != "nemotron_h" and (experts := next((n for key in COUNTS if (n := getattr(config, key, None))), None)):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.top_k_experts if named == "gemma4" else config.num_experts_per_tok)
        if named not in ("olmoe", "llama", "granitemoe", "granitehybrid"):
            writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if shared := next((n for key in SHARED_WIDTHS if (n := getattr(config, key, None))), None):
        writer.add_expert_shared_feed_forward_length(shared)
    if named == "glm4moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_nextn_predict_layers(0)
    if named == "lfm2moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if named in ("lfm2", "lfm2moe"):
        writer.add_layer_norm_rms_eps(config.norm_eps)
    elif named == "nemotron_h":
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    elif hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(next(getattr(config, key) for key in LAYER_NORM_EPS if hasattr(config, key)))
    if base := rope.get("full_attention", rope):
        if named not in ("gptneox", "stablelm"):
            stretch = base["alpha"] ** (head_dim / (head_dim - 2)) if "alpha" in base else 1
            writer.add_rope_freq_base(base["rope_theta"] * stretch)
        if "alpha" in base:
            writer.add_rope_scaling_type(RopeScalingType.NONE)
            writer.add_rope_scaling_factor(1)
            writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
        if base.get("partial_rotary_factor", 1.0) != 1.0 and named != "gemma4":
            writer.add_rope_dimension_count(int(base["partial_rotary_factor"] * head_dim))
        if base.get("rope_type") == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(base["factor"])
        if base.get("rope_type") == "yarn":
            writer.add_rope_scaling_type(RopeScalingType.YARN)
            writer.add_rope_scaling_factor(base["factor"])
            writer.add_rope_scaling_orig_ctx_len(base["original_max_position_embeddings"])
            for theirs, named_there in (
                ("attention_factor", "attn_factor"),
                *((x, x) for x in ("beta_fast", "beta_slow")),
            ):
                if theirs in base:
                    writer.add_float32(f"{named}.rope.scaling.yarn_{named_there}", base[theirs])
            if "mscale_all_dim" in base:
                writer.add_rope_scaling_yarn_log_mul(base["mscale_all_dim"])
        if "llama_4_scaling_beta" in base:
            writer.add_attn_temperature_scale(base["llama_4_scaling_beta"])
        if base.get("rope_type") == "longrope":
            trained = base["original_max_position_embeddings"]
            writer.add_rope_scaling_orig_ctx_len(trained)
            stretch = config.max_position_embeddings / trained
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(trained)))
            for length in ("short", "long"):
                writer.add_tensor(f"rope_factors_{length}.weight", np.array(base[f"{length}_factor"], np.float32))
    if hasattr(config, "use_parallel_residual"):
        writer.add_parallel_residual(config.use_parallel_residual)
    if named in ("gemma2", "gemma3", "phi3", "gpt-oss") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if architecture == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_float32("olmo2.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
    if named == "exaone4" and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if named == "cohere2":
        writer.add_sliding_window(config.sliding_window)
        writer.add_logit_scale(config.logit_scale)
    if named in ("granite", "granitemoe", "granitehybrid"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if named == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if tokenizer:
        tokens = byte_tokenizer().convert_ids_to_tokens(list(range(259)))
        tokens[AB] = "ab"  # in place of a byte that no UTF-8 text has
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(tokens)
        writer.add_token_types([NORMAL] * 256 + [CONTROL] * 3)
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(BOS)
        writer.add_eos_token_id(EOS)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT_TEMPLATE)
    for key, value in metadata.items():
        key = key if "." in key else f"general.{key}"
        writer.kv_data[0].pop(key, None)
        if value is None:  # the file lacks this key
            continue
        size = UINT32 if type(value) is int and value < 2**32 else ValueType.UINT64
        writer.add_key_value(key, value, size if type(value) is int else ValueType.get_type(value))
    names = get_tensor_name_map(
        {v: k for k, v in MODEL_ARCH_NAMES.items()}[named], config.num_hidden_layers + bool(head)
    )
    block = f"model.layers.{config.num_hidden_layers}."
    in_head = {name.replace("mtp.layers.0.", block): tensor for name, tensor in (head or {}).items()}
    waiting = {}
    for name, tensor in (mamba_tensors(model.state_dict(), config) | in_head).items():
        if name in ("lm_head.weight", "embed_out.weight") and config.tie_word_embeddings:
            continue
        array = np.asarray(tensor)
        if named in PAIRED and ("q_proj" in name or "k_proj" in name):
            array = interleave(array, heads if "q_proj" in name else config.num_key_value_heads)
        if named == "gpt2" and ".c_" in name and array.ndim == 2:
            array = np.ascontiguousarray(array.T)
        if "query_key_value" in name:
            array = array.reshape(heads, 3, head_dim, -1).swapaxes(0, 1).reshape(array.shape)
        if named in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            array = array + 1
        if named == "qwen35":
            if "norm" in name and "linear_attn" not in name:
                array = array + 1
            name, array = linear_attention_tensor(config, name, array)
        if ".experts." in name:
            if re.search(r"experts\.\d", name):
                needs("transformers, which stacks experts")
            for there, own in expert_tensors(config, name, array).items():
                form = Type.F32 if there.endswith("bias") else kind
                own, form = quantize(there, own, form)
                writer.add_tensor(there, own, raw_dtype=form)
            continue
        if "shared_mlp.input_linear" in name:
            for part, half in zip(("gate", "up"), np.split(array, 2), strict=True):
                there = f"blk.{name.split('.')[2]}.ffn_{part}_shexp.weight"
                writer.add_tensor(there, quants.quantize(half, kind), raw_dtype=kind)
            continue
        if scale := next((own for end, own in SCALES.items() if name.endswith(end)), None):
            writer.add_tensor(f"blk.{name.split('.')[2]}.{scale}", array)
            continue
        filters = array.ndim == 3 and ("conv.conv" in name or "conv1d" in name)
        array = array.squeeze(1) if filters else array
        array = array[0] if name.endswith("shared_expert_gate.weight") else array
        exact = filters or array.ndim == 1 or name.endswith(EXACT)
        name += ".weight" if name.endswith(("layer_scalar", ".sinks")) else ""
        name = name.replace("expert_bias", "expert_bias.bias").replace("correction_bias", "correction.bias")
        name = name.replace("moe.router.", "moe.router.layer.")
        there = names.get_name(name, try_suffixes=(".weight", ".bias")) or "output.weight"  # lfm2moe's lack the head
        if name.startswith("mtp."):
            there = f"blk.{config.num_hidden_layers}.nextn.{NEXTN[name.split('.')[1]]}.weight"
        form = Type.F32 if exact else kind
        if stacked and re.search(r"attn_[qkv]\.", there):
            there = re.sub(r"attn_[qkv]\.", "attn_qkv.", there)
            waiting.setdefault(there, []).append(array)
            if len(waiting[there]) < 3:
                continue
            array = np.concatenate(waiting[there])
        array, form = (stored or {}).get(there) or quantize(there, array, form)
        writer.add_tensor(there, array, raw_dtype=form)
    for there, array in (more or {}).items():
        writer.add_tensor(there, array)
    if rope.get("rope_type") == "llama3":
        plain = 1 / rope["rope_theta"] ** (np.arange(0, 8, 2) / 8)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32))
    finish(writer)
    return path


def gemma4_sizes(writer, config):
    """Write the keys that only Gemma 4 has. Returns the widths and key heads of all layers, and the larger head_dim."""
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    shared, wide = config.num_kv_shared_layers, 1 + config.use_double_wide_mlp
    layers = [config.per_layer_config[i] for i in range(len(slides))]
    head_dim = layers[-1].head_dim
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(getattr(config, "hidden_size_per_layer_input", 0))
    writer.add_sliding_window_pattern(slides)
    writer.add_sliding_window(config.sliding_window)
    writer.add_value_length(head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_float32("gemma4.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    turning = int(head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * turning + [1e30] * (head_dim // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    widths = [config.intermediate_size * (1 if i < len(slides) - shared else wide) for i in range(len(slides))]
    return widths, [layer.num_key_value_heads for layer in layers], head_dim


def linear_attention_tensor(config, name, array):
    """The name that gguf knows, and the tensor with value heads in llama.cpp's order, in which h has key head h % n."""
    n, size = config.linear_num_key_heads, config.linear_value_head_dim
    keys = 2 * n * config.linear_key_head_dim

    def tiled(rows, size):
        return rows.reshape(n, -1, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    own = name.partition("linear_attn.")[2].removesuffix(".weight")
    if own in ("in_proj_qkv", "conv1d"):
        array = np.concatenate([array[:keys], tiled(array[keys:], size)])
    elif own == "in_proj_z":
        array = tiled(array, size)
    elif own in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        array = tiled(-np.exp(array) if own == "A_log" else array, 1)
        name = name.replace("dt_bias", "dt_proj.bias")
    elif own == "out_proj":
        array = np.ascontiguousarray(tiled(array.T, size).T)
    return name, array


def mamba_sizes(writer, config):
    """Write the keys of Mamba 2. Returns the widths of the MLPs and the key heads, for each layer if they differ."""
    c, inner, kv_heads = config, config.intermediate_size, config.num_key_value_heads
    if c.model_type == "nemotron_h":
        sizes = (c.conv_kernel, c.ssm_state_size, c.n_groups, c.mamba_num_heads * c.mamba_head_dim, c.mamba_num_heads)
        inner = [inner * (kind == "mlp") for kind in c.layer_types]
    else:
        total = c.mamba_expand * c.hidden_size if c.model_type == "granitemoehybrid" else c.mamba_d_ssm
        sizes = (c.mamba_d_conv, c.mamba_d_state, c.mamba_n_groups, total, c.mamba_n_heads)
    if c.model_type != "falcon_h1":
        kv_heads = [kv_heads * (kind == "full_attention") for kind in c.layer_types]
        writer.add_rope_scaling_finetuned(False)
    names = ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank")
    for name, size in zip(names, sizes, strict=True):
        writer.add_uint32(f"{writer.arch}.ssm.{name}", size)
    return inner, kv_heads


def mamba_tensors(tensors, config):
    """The tensors of a model. A model with Mamba 2 has them as llama.cpp's converter writes them, by names of gguf."""
    found = {}
    for name, tensor in tensors.items():
        array, layer = np.asarray(tensor), ".".join(name.split(".")[:3])
        is_dense = getattr(config, "num_local_experts", None) == 0
        if is_dense and name.endswith("shared_mlp.input_linear.weight"):
            for own, half in zip(("gate", "up"), np.split(array, 2), strict=True):
                found[f"{layer}.mlp.{own}_proj.weight"] = half
        elif is_dense and name.endswith("shared_mlp.output_linear.weight"):
            found[f"{layer}.mlp.down_proj.weight"] = array
        elif name.endswith((".mamba.A_log", ".mamba.D", ".mixer.A_log", ".mixer.D")):
            found[name] = (-np.exp(array) if name.endswith("A_log") else array)[:, None]
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            groups = config.n_groups if config.model_type == "nemotron_h" else config.mamba_n_groups
            found[name] = array.reshape(groups, -1)
        elif name.endswith((".mamba.dt_bias", ".mixer.dt_bias")):
            found[name.replace("dt_bias", "dt_proj.bias")] = array
        else:
            found[name] = array * falcon_multipliers(config, name) if config.model_type == "falcon_h1" else array
    prefix = "backbone." if config.model_type == "nemotron_h" else "model."
    return {name.replace("model.", prefix, 1): array for name, array in found.items()}


def falcon_multipliers(config, name):
    """The factors of a tensor's rows. llama.cpp's converter multiplies the weights with them."""
    c, own = config, name.removesuffix(".weight").rpartition(".")[2]
    if own == "in_proj":
        keys = c.mamba_n_groups * c.mamba_d_state
        rows = (c.mamba_d_ssm, c.mamba_d_ssm, keys, keys, c.mamba_n_heads)
        return c.ssm_in_multiplier * np.repeat(np.float32(c.ssm_multipliers), rows)[:, None]
    factors = {
        **{"q_proj": c.attention_in_multiplier, "k_proj": c.attention_in_multiplier * c.key_multiplier},
        **{"v_proj": c.attention_in_multiplier, "o_proj": c.attention_out_multiplier, "out_proj": c.ssm_out_multiplier},
        **{"gate_proj": c.mlp_multipliers[0], "down_proj": c.mlp_multipliers[1]},
        **{"embed_tokens": c.embedding_multiplier, "lm_head": c.lm_head_multiplier},
    }
    return np.float32(factors.get(own, 1))


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
WITHOUT_WINDOWS = {"sliding_window": None, "layer_types": ["full_attention"] * 3}
GEMMA = {"sliding_window": 5, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *((name, {}) for name in ("llama", "qwen2", "gpt2", "gpt_neox", "stablelm")),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"attention_bias": True}),
        ("llama", {"rope_parameters": LLAMA3_ROPE}),
        ("llama", {"rope_parameters": YARN}),
        ("qwen2", {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 8.0, "beta_slow": 2.0}}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("ministral3", {"rope_parameters": GROWING | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
        ("gpt_neox", {"use_parallel_residual": False}),
        ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
        ("phi3", {"sliding_window": 5}),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
        ("smollm3", {"num_hidden_layers": 5}),
        ("gemma2", GEMMA),
        ("gemma3", GEMMA | {"num_hidden_layers": 7}),
        ("gemma4", PER_LAYER),
        ("gemma4", KEYS_ARE_VALUES),
        ("gemma4", EXPERTS_BESIDE),
        ("gemma4_unified", KEYS_ARE_VALUES | {"num_kv_shared_layers": 1}),
        ("olmo2", {}),
        ("olmo3", {"sliding_window": 5, "num_hidden_layers": 5}),
        ("olmo3", {"sliding_window": 5, "num_hidden_layers": 5, "rope_parameters": ROPES}),
        ("hunyuan_v1_dense", {"rope_parameters": ALPHA, "tie_word_embeddings": True}),
        ("granite", {}),
        ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("granitemoe", {"tie_word_embeddings": True}),
        ("granitemoeshared", {}),
        ("glm", {"attention_bias": False}),
        ("glm4", {}),
        ("glm4_moe", {}),
        ("glm4_moe", {"use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False}),
        ("exaone4", {"sliding_window": 5, "num_hidden_layers": 5}),
        ("exaone4", WITHOUT_WINDOWS | {"rope_parameters": LLAMA3_ROPE}),
        ("ernie4_5", {"tie_word_embeddings": True}),
        ("seed_oss", {}),
        ("starcoder2", {}),
        ("cohere2", {"sliding_window": 5, "num_hidden_layers": 5, "tie_word_embeddings": True}),
        ("qwen2_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("olmoe", {}),
        ("mixtral", {}),
        ("gpt_oss", {"num_hidden_layers": 4}),
        ("lfm2_moe", {"tie_word_embeddings": True}),
        ("qwen3_5", {"tie_word_embeddings": True}),
        ("nemotron_h", {}),
        ("falcon_h1", {}),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 12}),
        ("granitemoehybrid", {}),
        ("granitemoehybrid", {"num_local_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
        ("lfm2", {"tie_word_embeddings": True}),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 5}),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "block_multiple_of": 16, "intermediate_size": 70}),
    ],
)
def test_a_file_is_the_model_it_came_from(tmp_path, architecture, changes):
    model = random_model(architecture, **changes)
    path = write_gguf(tmp_path / "m.gguf", model)
    ids = torch.tensor([[1, 2, 3]])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=EOS)
    for backend in ("torch", "cpu"):
        lm = specbeam.load(path, backend=backend, dtype="float32")
        assert specbeam.generate(lm, [1, 2, 3], max_new_tokens=20).token_ids == out[0, 3:].tolist()


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0])
@pytest.mark.parametrize("architecture", ["glm", "llama"])
def test_query_key_and_value_may_be_one_tensor(tmp_path, architecture, kind):
    """As in the files of GLM-4 of 2024."""
    model = random_model(architecture, attention_bias=True, intermediate_size=64)
    paths = [write_gguf(tmp_path / f"{stacked}.gguf", model, kind, stacked=stacked) for stacked in (False, True)]
    assert "blk.2.attn_qkv.bias" in read_header(paths[1])[1]
    apart, together = (specbeam.load(path).backend._weights for path in paths)
    assert apart.digest_of("blocks") == together.digest_of("blocks")


def test_layers_that_predict_several_tokens_are_passed_over(tmp_path):
    """The file of a model with a layer more, whose last layer is said to be one of these."""
    short, long = (random_model("glm4_moe", num_hidden_layers=layers) for layers in (2, 3))
    of_short = long.state_dict()
    short.load_state_dict({name: of_short[name] for name in short.state_dict()})
    path = write_gguf(tmp_path / "m.gguf", long, **{"glm4moe.nextn_predict_layers": 1})
    one, other = (
        specbeam.load(source, dtype="float32").weights for source in (path, write_gguf(tmp_path / "s", short))
    )
    assert one == other


TYPE, FACTOR, OLD_FACTOR = "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.rope.scale_linear"


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({TYPE: "linear", FACTOR: 4.0}, 4.0),
        ({FACTOR: 4.0}, 4.0),
        ({OLD_FACTOR: 4.0}, 4.0),
        ({OLD_FACTOR: 2.0, FACTOR: 4.0}, 4.0),
        ({TYPE: "none", FACTOR: 4.0}, 1.0),
        ({FACTOR: 0.0}, 1.0),
        ({TYPE: "yarn"}, 1.0),
    ],
)
def test_a_factor_without_a_type_is_linear_scaling(tmp_path, keys, factor):
    rope = {"rope_type": "linear", "rope_theta": 100.0, "factor": factor}
    model = random_model("llama", rope_parameters=rope)
    path = write_gguf(tmp_path / "m.gguf", model, **({TYPE: None, FACTOR: None} | keys))
    rope = open_checkpoint(path).config.layers[0][0].rope
    torch.testing.assert_close(torch.tensor(rope.frequencies()), model.model.rotary_emb.inv_freq)


def test_yarn_counts_what_a_converter_took_from_the_folder(tmp_path):
    """llama.cpp's own formula: attn_factor multiplies, and the logarithm has a multiplier."""
    keys = {"llama.rope.scaling.attn_factor": 1.5, "llama.rope.scaling.yarn_log_multiplier": 0.5}
    model = random_model("llama", rope_parameters=YARN)
    rope = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, **keys)).config.layers[0][0].rope
    assert rope.scale == pytest.approx(1.5 * (0.1 * math.log(4) + 1) / (0.1 * 0.5 * math.log(4) + 1))
    keys = {"llama.rope.scaling.yarn_ext_factor": 0.0}
    rope = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, **keys)).config.layers[0][0].rope
    assert (rope.scale, set(rope.divisors)) == (1.0, {4.0})


NO_MULTIPLIERS = dict.fromkeys(("attention.scale", "residual_scale"))
GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}


@pytest.mark.parametrize(
    ("architecture", "changes", "keys"),
    [
        ("gemma2", GEMMA2, {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma2", GEMMA2, {"attention.sliding_window": None}),
        ("gemma3", {"final_logit_softcapping": 7.0}, {"final_logit_softcapping": 7.0}),
        ("gemma3", {"sliding_window_pattern": 3}, {"attention.sliding_window_pattern": 3}),
        ("gemma3", {"layer_types": ["full_attention"] * 7}, {"attention.sliding_window": None}),
        ("gemma4", {"final_logit_softcapping": 30.0}, {"final_logit_softcapping": None, "rope.freq_base_swa": None}),
        ("stablelm", {"use_parallel_residual": True}, {"use_parallel_residual": None}),
        ("olmo3", {"num_hidden_layers": 5}, {"attention.sliding_window_pattern": None, "rope.freq_base_swa": None}),
        ("olmo3", {"layer_types": ["full_attention"] * 3}, {"attention.sliding_window": None}),
        (
            "exaone4",
            {"num_hidden_layers": 4},
            {"attention.sliding_window_pattern": None, "rope.freq_base_swa": 10000.0},
        ),
        ("exaone4", WITHOUT_WINDOWS, {}),
        ("granite", {"attention_multiplier": 8**-0.5, "residual_multiplier": 1}, NO_MULTIPLIERS),
        ("hunyuan_v1_dense", {"rope_parameters": ALPHA}, {"rope.freq_base": 100.0, "rope.scaling.alpha": 50.0}),
        ("phi3", {}, {"rope.freq_base": None}),
        ("ministral3", {"rope_parameters": GROWING | {"llama_4_scaling_beta": 0.0}}, {GGUF_BETA: None}),
        ("llama", {}, {"attention.head_count_kv": [2, 2, 2], "feed_forward_length": [48, 48, 48]}),
    ],
)
def test_a_key_that_a_file_lacks_has_the_default_of_llama_cpp(tmp_path, architecture, changes, keys):
    if architecture.startswith("gemma"):
        changes = GEMMA | {"num_hidden_layers": 7} | changes
    model = random_model(architecture, **changes)
    keys = {f"{NAMED.get(architecture, architecture)}.{key}": value for key, value in keys.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, **keys))
    expected = config_from_hugging_face(model.config.to_dict(), {"model.norm.weight": (), **model.state_dict()})
    assert checkpoint.config.layers == expected.layers
    assert checkpoint.config.logits_softcap == expected.logits_softcap


def test_numbers_may_differ_between_layers():
    """Of the keys of these models, a list has one entry for each layer."""
    shapes = {f"blk.{i}.ffn_norm.weight": (32,) for i in range(3)} | {"token_embd.weight": (259, 32)}
    keys = {
        **{"context_length": 64, "embedding_length": 32, "block_count": 3, "attention.layer_norm_rms_epsilon": 1e-5},
        **{"attention.head_count": [4, 2, 4], "attention.head_count_kv": [1, 2, 4], "feed_forward_length": [48, 8, 64]},
    }
    metadata = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in keys.items()}}
    layers = config_from_gguf(metadata, shapes).layers
    assert [(a.num_heads, a.num_kv_heads, a.head_dim, mlp.intermediate_size) for a, mlp in layers] == [
        *((4, 1, 8, 48), (2, 2, 8, 8), (4, 4, 8, 64)),
    ]


@pytest.mark.parametrize(
    ("architecture", "key", "value", "says"),
    [
        ("gpt_neox", "use_parallel_residual", None, "has no gptneox.use_parallel_residual"),
        ("llama", "rope.scaling.type", "dynamic", "rope scaling 'dynamic' is not supported"),
        ("llama", "rope.dimension_count", 4, "llama.rope.dimension_count = 4 is not supported"),
        ("llama", "attention.value_length", 16, "llama.attention.value_length = 16 is not supported"),
        ("llama", "attention.causal", False, "attention is not causal"),
        ("qwen2", "expert_count", 8, "with experts"),
        ("llama", "expert_count", 8, "num_experts_per_tok = 0, which is no size"),
        ("qwen3_moe", "expert_used_count", 9, "gives each token 9 experts, but has 8"),
        ("granitemoe", "expert_used_count", 9, "gives each token 9 experts, but has 8"),
        ("granitemoeshared", "expert_count", 7, r"ffn_gate_inp.weight has shape .8, 32., but the .* asks for .7, 32."),
        ("granitemoeshared", "expert_shared_feed_forward_length", 24, "ffn_gate_shexp.weight has shape .20, 32."),
        ("granitemoe", "expert_shared_feed_forward_length", 24, "has no tensor blk.0.ffn_gate_shexp.weight"),
        ("qwen2_moe", "expert_shared_feed_forward_length", None, "ffn_gate_shexp.weight has shape .20, 32."),
        ("glm4_moe", "expert_gating_func", 1, "glm4moe.expert_gating_func = 1 is not supported"),
        ("glm4_moe", "expert_shared_count", None, "has no glm4moe.expert_shared_count"),
        ("glm4_moe", "nextn_predict_layers", 3, "block_count - nextn_predict_layers = 0, which is no size"),
        ("lfm2_moe", "expert_gating_func", 1, "lfm2moe.expert_gating_func = 1 is not supported"),
        ("llama", "attention.head_count_kv", [2, 2], "llama.attention.head_count_kv has 2 values, .* has 3 layers"),
        (
            "llama",
            "attention.head_count_kv",
            [1, 2, 1],
            "blk.0.attn_k.weight has shape .16, 32., but the",
        ),
        ("olmo3", "attention.sliding_window_pattern", [True, False, True], "lists other layers than olmo2 has"),
        ("gemma4", "attention.key_length_swa", None, "has no gemma4.attention.key_length_swa"),
        ("gemma4", "attention.value_length_swa", 16, "attention.value_length_swa = 16 is not supported"),
        ("gemma4", "attention.sliding_window_pattern", [True], "has 1 values, but the model has 3 layers"),
        ("gemma4", "attention.shared_kv_layers", 4, "attention.shared_kv_layers is 4, but the model has 3 layers"),
        ("gemma4", "attention.shared_kv_layers", 2, "layer 2 has no keys of its own .*, and no layer of its kind"),
        ("gemma4", "embedding_length_per_layer_input", None, "has no gemma4.embedding_length_per_layer_input"),
        ("granite", "logit_scale", None, "has no granite.logit_scale"),
        ("granite", "logit_scale", 0.0, "divides logits by 0.0"),
        ("glm4", "nextn_predict_layers", 1, "glm4.nextn_predict_layers = 1 is not supported"),
        ("ministral3", "attention.temperature_length", 99, "attention.temperature_length = 99 is not supported"),
        ("lfm2", "shortconv.l_cache", None, "has no lfm2.shortconv.l_cache"),
        ("lfm2", "shortconv.l_cache", 0, "= 0, which is no size"),
        ("lfm2", "attention.head_count_kv", [2, 0], "lfm2.attention.head_count_kv"),
        ("llama", "general.type", "adapter", "is a LoRA adapter, and no model: merge it"),
        ("llama", "general.type", "imatrix", "is an importance matrix"),
        ("llama", "general.type", "vocab", "a vocabulary without weights"),
        ("llama", "general.architecture", "clip", "the part of a model that reads pictures"),
        ("llama", "general.alignment", 24, "no power of 2"),
    ],
)
def test_what_llama_cpp_refuses_or_specbeam_lacks_is_refused_under_auto_too(tmp_path, architecture, key, value, says):
    key = key if key.startswith("general.") else f"{NAMED.get(architecture, architecture)}.{key}"
    path = write_gguf(tmp_path / "m.gguf", random_model(architecture), **{key: value})
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(path)
    with pytest.raises(SpecbeamError):
        specbeam.load(path, backend="transformers")


def test_keys_without_effect_are_named_and_usual_keys_are_not(tmp_path, caplog):
    usual = {"llama.vocab_size": 259, "llama.rope.scaling.finetuned": False, "llama.attention.value_length": 8}
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", random_model("llama"), **usual)).config
    assert not caplog.messages
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", random_model("llama"), **{"llama.logit_scale": 0.5})).config
    assert caplog.messages == ["the GGUF file has keys that are not known and have no effect: llama.logit_scale"]


def test_transformers_loader_runs_no_other_model_than_the_file_describes(tmp_path):
    """It drops rotary scaling, for example."""
    for rope in (YARN, LLAMA3_ROPE):
        path = write_gguf(tmp_path / "m.gguf", random_model("llama", rope_parameters=rope))
        says = "takes another value for divisors of the rope of the attention of layer 0 than the file says"
        with pytest.raises(SpecbeamError, match=says):
            specbeam.load(path, backend="transformers")
        assert specbeam.load(path).backend.name == "cpu"
    usual = {
        **{"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 96},
        **{"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6},
        **{"attention.key_length": 8, "attention.value_length": 8, "rope.freq_base": 1e6, "rope.dimension_count": 8},
        **{"rope.scaling.finetuned": False},
    }
    tensors = {"token_embd.weight": (259, 32)}
    for lost in ({}, {"rope.scaling.factor": 4.0}, {"rope.scaling.type": "yarn"}, {"logit_scale": 0.5}):
        metadata = {"general.architecture": "deci"} | {f"deci.{k}": v for k, v in (usual | lost).items()}
        expected = pytest.raises(SpecbeamError, match="drops what this file says in deci") if lost else nullcontext()
        with expected:
            check_transformers(metadata, tensors, None, pytest.fail)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K", "Q3_K"])
def test_embeddings_of_layers_are_read_from_the_file_as_they_are_stored(tmp_path, cached, kind):
    """The torch backend reads dequantized rows. No kernel has Q3_K, so it is packed, and rounded to 8 bits."""
    model = random_model("gemma4", hidden_size_per_layer_input=64, num_hidden_layers=4)
    name, draw = "per_layer_token_embd.weight", np.random.default_rng(0)
    block, size = GGML_QUANT_SIZES[Type[kind]]
    if block > 1:
        rows = [draw.integers(0, 30, (259, 256 // block * size), dtype=np.uint8) for _ in range(2)]
    else:
        rows = [quants.quantize(draw.normal(0, 1, (259, 256)).astype(np.float32), Type[kind]) for _ in range(2)]
    paths = [tmp_path / f"{i}.gguf" for i in range(2)]
    files = [write_gguf(path, model, stored={name: (own, Type[kind])}) for path, own in zip(paths, rows, strict=True)]
    native, by_torch = (specbeam.load(files[0], backend=backend, dtype="float32") for backend in ("cpu", "torch"))
    tokens = [*range(0, 250, 7)]
    got, expected = (logits_after(lm, tokens) for lm in (native, by_torch))
    np.testing.assert_allclose(got, expected, atol=0.05 if kind == "Q3_K" else 2e-4)
    other, one, again = (specbeam.load(files[i], quantize="int8").backend for i in (1, 0, 0))
    weights = one._weights
    assert ("per_layer_embedding.weight" in weights.tables) == (kind != "Q3_K")
    assert weights.parts.keys().isdisjoint(weights.tables)
    assert one.weights_digest == again.weights_digest != other.weights_digest
    if kind != "Q3_K":
        table, packed_sizes = rows[0].nbytes, [file.stat().st_size for file in cached.glob("*.weights")]
        assert len(packed_sizes) == 2
        assert max(packed_sizes) < packed_bytes(open_checkpoint(files[0]), "int8") + 20_000
        assert weights.tables["per_layer_embedding.weight"][0].size == table


def logits_after(lm, tokens):
    slots = Slots(Tree(tokens), lm.backend)
    nodes = np.arange(len(tokens))
    return np.asarray(lm.backend.forward([slots.tree_batch(nodes, nodes)]))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_simple_type_reads_as_gguf_dequantizes_it(tmp_path, kind):
    model = random_model("llama", hidden_size=64, intermediate_size=96)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, Type[kind]))
    assert checkpoint.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, kind)
    original = model.model.embed_tokens.weight.detach().numpy()[3:200]
    got = checkpoint.read("token_embd.weight", 3, 200)
    np.testing.assert_array_equal(got, quants.dequantize(quants.quantize(original, Type[kind]), Type[kind]))
    assert np.abs(got - original).max() < 0.2  # and is near what was written
    down = model.model.layers[2].mlp.down_proj.weight.detach()
    torch.testing.assert_close(
        torch.from_numpy(checkpoint.read("blk.2.ffn_down.weight", 0, 64)), down, atol=0.2, rtol=0
    )


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_every_k_quant_reads_as_transformers_dequantizes_it(tmp_path, kind):
    """transformers has an implementation of its own, apart from the gguf package's."""
    theirs = pytest.importorskip("transformers.integrations.gguf.dequant")
    block, size = GGML_QUANT_SIZES[Type[kind]]
    raw = np.random.default_rng(0).integers(0, 60, (10, 2 * size), dtype=np.uint8)  # small bytes: no infinite scales
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_down.weight", raw, raw_dtype=Type[kind])
    writer.add_tensor("token_embd.weight", np.zeros((4, 512), np.float32))
    sizes = {"embedding_length": 512, "block_count": 1, "context_length": 9, "feed_forward_length": 9, "head_count": 1}
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    finish(writer)
    got = torch.from_numpy(open_checkpoint(tmp_path / "m.gguf").read("blk.0.ffn_down.weight", 2, 9))
    expected = theirs.dequantize(torch.from_numpy(raw), int(Type[kind])).reshape(10, 2 * block)
    torch.testing.assert_close(got, expected[2:9])
    assert got.abs().max() > 0


def test_tokenizer_special_tokens_template_and_facts_come_from_the_file(tmp_path):
    model = random_model("llama")
    lm = specbeam.load(path := write_gguf(tmp_path / "m.gguf", model, license="mit"))
    assert lm.eos_token_ids == {EOS}
    bytes_alone = byte_tokenizer()("h\u00e9 ").input_ids
    assert lm.tokenizer("h\u00e9 ab<eos>").input_ids == [*bytes_alone, AB, EOS]
    assert lm.decode([*bytes_alone, AB, EOS]) == "h\u00e9 ab"
    assert specbeam.show_prompt(lm, "Hi") == "<bos>user: Hi\nassistant: "
    facts = open_checkpoint(path).facts
    assert facts.parameters == model.num_parameters()
    assert (facts.architecture, facts.context, facts.quantization, facts.license) == ("llama", 256, "float32", "mit")
    assert specbeam.load(write_gguf(tmp_path / "bare.gguf", model, tokenizer=False)).tokenizer is None


def test_a_file_recommends_sampling_options_and_suppresses_tokens(tmp_path, caplog):
    model = random_model("llama")
    keys = {"sampling.top_k": 1, "sampling.temp": 0.5, "sampling.top_p": 1.0, "sampling.mirostat": 2}
    path = write_gguf(tmp_path / "m.gguf", model, **{f"general.{key}": value for key, value in keys.items()})
    lm = specbeam.load(path, dtype="float32")
    assert lm.generation_defaults == {"top_k": 1, "temperature": 0.5}
    assert "recommends options that specbeam lacks: general.sampling.mirostat" in caplog.text
    greedy = specbeam.generate(lm, [1, 2, 3], max_new_tokens=9).token_ids
    assert specbeam.generate(lm, [1, 2, 3], max_new_tokens=9, do_sample=True, seed=1).token_ids == greedy
    path = write_gguf(tmp_path / "m.gguf", model, **{"tokenizer.ggml.suppress_tokens": [greedy[0], greedy[1]]})
    lm = specbeam.load(path, dtype="float32")
    assert not {*greedy[:2]} & {*specbeam.generate(lm, [1, 2, 3], max_new_tokens=9).token_ids}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", random_model("llama"))


@settings(max_examples=examples(2))
@given(st.data())
def test_a_damaged_file_is_refused_or_still_a_model(whole, tmp_path_factory, data):
    """Cut anywhere it is refused; with bytes changed nothing worse happens than a clear error."""
    path = tmp_path_factory.mktemp("cut") / "m.gguf"
    content = bytearray(whole.read_bytes())
    if data.draw(st.booleans()):
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        with pytest.raises(SpecbeamError, match=r"truncated|damaged|not a GGUF|no tensor|is empty"):
            specbeam.load(path)
        return
    places = st.integers(0, content.index(b"blk.0.attn_norm") + 2000)
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with suppress(SpecbeamError):
        specbeam.generate(specbeam.load(path), [1, 2], max_new_tokens=2)


def header(*counts):
    """The begin of a file of version 3, with these numbers of tensors and keys."""
    return b"GGUF" + struct.pack("<IQQ", 3, *counts)


ARRAYS_IN_ARRAYS = header(0, 1) + struct.pack("<Q4sI", 4, b"deep", 9) + struct.pack("<IQ", 9, 1) * 5000
DIMENSIONS = np.full(200_000, 2**63, "<u8").tobytes()
MANY_DIMENSIONS = header(1, 0) + struct.pack("<Q1sI", 1, b"x", 200_000) + DIMENSIONS + struct.pack("<IQ", 0, 0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty: fetch it again"),
        (LFS_POINTER, "is a pointer of Git LFS, and not the file itself: fetch it with git lfs pull"),
        (b"GGUF", "damaged"),
        (b"PK\x03\x04 something else entirely", "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "version 1"),
        (ARRAYS_IN_ARRAYS, "damaged"),
        (MANY_DIMENSIONS, "is damaged"),
    ],
    ids=["empty", "pointer", "cut", "zip", "version 1", "arrays in arrays", "many dimensions"],
)
def test_other_files_are_refused(tmp_path, content, says):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(path)


def described(content):
    """The place of each tensor's description in a GGUF file: where its shape is, its type, and its offset."""
    found, at = {}, 0
    for name in open_checkpoint(content).shapes:
        data = name.encode()
        at = content.read_bytes().index(struct.pack("<Q", len(data)) + data, at) + 8 + len(data)
        (dimensions,) = struct.unpack_from("<I", content.read_bytes(), at)
        found[name] = (at + 4, at + 4 + 8 * dimensions, at + 8 + 8 * dimensions)
    return found


Q, K, DOWN, NORM = "blk.1.attn_q.weight", "blk.1.attn_k.weight", "blk.1.ffn_down.weight", "blk.1.attn_norm.weight"
LAST = "output_norm.weight"


def moved(name, by):
    def change(data, places):
        (offset,) = struct.unpack_from("<Q", data, at := places[name][2])
        struct.pack_into("<Q", data, at, offset + by)

    return change


def exchanged(name, other, part):
    """Exchange the offsets (2) or the shapes (0) of two tensors."""

    def change(data, places):
        first, second = (places[n][part] for n in (name, other))
        size = 8 if part == 2 else places[name][1] - places[name][0]
        kept = data[first : first + size]
        data[first : first + size] = data[second : second + size]
        data[second : second + size] = kept

    return change


def declared(name, kind):
    return lambda data, places: struct.pack_into("<I", data, places[name][1], int(Type[kind]))


def same_place(name, other):
    def change(data, places):
        at, source = places[name][2], places[other][2]
        data[at : at + 8] = data[source : source + 8]

    return change


def shrunk(name, rows):
    """The first size in the file is that of a row."""
    return lambda data, places: struct.pack_into("<Q", data, places[name][1] - 8, rows)


PLACE = "begins at byte"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (same_place(K, Q), PLACE),
        (same_place(NORM, LAST), PLACE),
        (exchanged("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight", 2), PLACE),
        (exchanged(NORM, LAST, 2), PLACE),
        (exchanged(Q, K, 2), PLACE),
        (moved(DOWN, 32), PLACE),
        (moved(DOWN, -32), PLACE),
        (moved(LAST, 32), PLACE),
        (moved(LAST, -128), PLACE),
        (moved("token_embd.weight", 32), PLACE),
        (declared(DOWN, "F16"), PLACE),
        (declared(DOWN, "Q8_0"), PLACE + "|has shape"),
        (shrunk(DOWN, 31), PLACE),
        (exchanged(Q, K, 0), PLACE),
        (declared(NORM, "F16"), f"{NORM} is a vector of type F16, and not F32"),
        (declared(NORM, "Q8_0"), f"{NORM} is a vector of type Q8_0, and not F32"),
        (declared(LAST, "BF16"), f"{LAST} is a vector of type BF16, and not F32"),
        (declared("blk.0.attn_q.bias", "F16"), "blk.0.attn_q.bias is a vector of type F16, and not F32"),
    ],
)
def test_a_tensor_in_another_place_or_of_another_size_is_refused(tmp_path, change, says):
    """llama.cpp demands that each tensor begins where the one before it ends, and computes with vectors of F32."""
    path = write_gguf(tmp_path / "m.gguf", random_model("qwen2"))
    data = bytearray(path.read_bytes())
    change(data, described(path))
    path.write_bytes(data)
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(path)


def test_exchanged_queries_and_keys_are_refused(tmp_path):
    model = random_model("llama")
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj.weight, attention.k_proj.weight = attention.k_proj.weight, attention.q_proj.weight
    path = write_gguf(tmp_path / "m.gguf", model, **{"llama.attention.key_length": 8})
    with pytest.raises(
        SpecbeamError, match=r"attn_q.weight has shape \[16, 32\], but the configuration asks for \[32, 32\]"
    ):
        specbeam.load(path)


OTHER_TYPES = {"uint32": ("INT32", "UINT64", "FLOAT32"), "float32": ("UINT32", "FLOAT64"), "bool": ("UINT32", "UINT8")}


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_each_key_has_the_type_that_llama_cpp_demands(tmp_path, kind):
    """Of an integer as layer_norm_rms_epsilon it says: wrong type u32 but expected type f32."""
    values = {"uint32": 8, "float32": 1.0, "bool": True}
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    names = {key: "llama." + key for key, kinds in KINDS_OF_MODELS.items() if kinds[0] == kind}
    names |= {key: key for key, kinds in KINDS.items() if kinds == (kind,)}
    assert names
    for key in names.values():
        writer.add_key_value(key, values[kind], ValueType[kind.upper()])
    finish(writer)
    read_header(tmp_path / "m.gguf")
    for key in names.values():
        for other in OTHER_TYPES[kind]:
            writer = GGUFWriter(tmp_path / "other.gguf", "llama")
            value = values[kind] if other.startswith("FLOAT") else int(values[kind])
            writer.add_key_value(key, value, ValueType[other])
            finish(writer)
            says = f"its key {key} has a value of a wrong type, {other.lower()} and not {kind}"
            with pytest.raises(SpecbeamError, match=re.escape(says)):
                read_header(tmp_path / "other.gguf")


def test_every_key_that_is_read_has_a_type(tmp_path, monkeypatch):
    asked, need = set(), Metadata.need
    monkeypatch.setattr(Metadata, "need", lambda self, key, *default: asked.add(key) or need(self, key, *default))
    for architecture, changes in [
        *((name, {}) for name in ("gpt2", "gpt_neox", "stablelm", "smollm3")),
        ("llama", {"rope_parameters": YARN}),
        ("gemma2", GEMMA),
        ("gemma3", GEMMA),
        ("exaone4", {"sliding_window": 5, "num_hidden_layers": 5}),
        *((name, {}) for name in ("gemma4", "ministral3", "hunyuan_v1_dense", "granite", "glm4", "cohere2")),
        *(
            (name, {})
            for name in ("lfm2", "lfm2_moe", "qwen3_5", "olmoe", "qwen2_moe", "qwen3_moe", "gpt_oss", "glm4_moe")
        ),
    ]:
        assert open_checkpoint(write_gguf(tmp_path / "m.gguf", random_model(architecture, **changes))).config
    assert asked == {*KINDS_OF_MODELS, *(key for one in GGUF_ARCHITECTURES.values() for key in one.gguf_keys)}


def test_a_type_that_cannot_be_dequantized_is_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"))
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = content.index(name) + len(name) + 4 + 16
    content[at : at + 4] = int(Type.I32).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(SpecbeamError, match=r"blk.0.ffn_down.weight is of type I32"):
        specbeam.load(path)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (31, r" \(Q4_0_4_4\)"),
        (36, r" \(IQ4_NL_4_4, or I2_S of BitNet\)"),
        (138, r" \(IQ3_K of ik_llama.cpp\)"),
        (99, ""),
    ],
)
def test_a_type_of_tensors_that_is_not_known_is_no_damage(tmp_path, number, name):
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"))
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.0.ffn_down.weight") + 21 + 4 + 16
    content[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(
        SpecbeamError, match=rf"blk.0.ffn_down.weight is of type {number}{name}, which is not supported"
    ):
        specbeam.load(path)


def tokenizer_of_file(model, tokens, **more):
    """The tokenizer of a file with this metadata."""
    metadata = {"model": model, "tokens": tokens, **more}
    metadata = {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    return tokenizer_from_gguf(metadata, vocabulary_from_gguf(metadata, "a file"))


def byte_level(tokens, merges, pre, **more):
    return tokenizer_of_file("gpt2", tokens, merges=merges, pre=pre, bos_token_id=0, **more)


LIKE_LLAMA3 = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2"
SPLITS = {
    f"{LIKE_LLAMA3} dbrx smaug-bpe glm4 chatglm-bpe deepseek-v3 hunyuan-dense": "oW Ġ 111 1 ;Ċ a ' S /Ċ !! o 1",
    "qwen2 qwen35 deepseek-r1-qwen megrez stablelm2 kormo f2llmv2 hunyuan solar-open": (
        "oW Ġ 1 1 1 1 ;Ċ a ' S /Ċ !! o 1"
    ),
    "default falcon": "oW Ġ 111 1 ; Ċ a ' S / Ċ !! o 1",
    "gpt-4o llama4 kanana2 talkie": "o W Ġ 111 1 ;Ċ a'S /Ċ !! o 1",
    "tiny_aya cohere2moe": "o W Ġ 1 111 ;Ċ a'S /Ċ !! o 1",
    "tekken": "o W Ġ 1 1 1 1 ;Ċ a ' S /Ċ !! o 1",
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum": (
        "oW Ġ 11 11 ; Ċ a ' S / Ċ !! o 1"
    ),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2 deepseek-coder seed-coder": (
        "oW Ġ 1 1 1 1 ; Ċ a ' S / Ċ !! o 1"
    ),
}
"""The tokens that llama.cpp v0.4.0 makes of a text, by the names of pre-tokenizers."""


def test_every_pre_tokenizer_splits_begins_and_takes_whole_words_as_in_llama_cpp():
    whole = {*LIKE_LLAMA3.split(), "tekken"}  # these begin texts, too
    letters = ["<bos>", *"oW1;'Sa/ĠĊ!", "oW", "11", "111", ";Ċ", "a'", "a'S", "/Ċ", "!!", "1;o"]
    merges = ["o W", "1 1", "11 1", "; Ċ", "a '", "a' S", "/ Ċ", "! !"]
    expected = {name: pieces for names, pieces in SPLITS.items() for name in names.split()}
    assert expected.keys() == PRE.keys()
    for name, pieces in expected.items():
        tokenizer = byte_level(letters, merges, name)
        begin = ["<bos>"] if name in whole else []
        got = tokenizer("oW 1111;\na'S/\n!!o1").input_ids
        assert tokenizer.convert_ids_to_tokens(got) == [*begin, *pieces.split()], name
        tokenizer = byte_level(["<bos>", "a", "b", "c", "ab", "abc"], ["a b"], name, add_bos_token=False)
        assert tokenizer("abc").input_ids == ([5] if name in whole else [4, 3])


def test_a_missing_pre_tokenizer_is_the_default_with_a_warning_and_an_unknown_one_is_refused(caplog):
    tokens = ["<bos>", "1", "11", "111"]
    assert tokenizer_of_file("gpt2", tokens, merges=["1 1", "11 1"], bos_token_id=0)("11111").input_ids == [3, 2]
    assert "does not say how its tokenizer splits text" in caplog.text
    with pytest.raises(SpecbeamError, match="'brand-new' splits text is not known"):
        byte_level(tokens, [], "brand-new")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"merges": None}, "has no merges"),
        ({"add_eos_token": True}, r"have a token eos \(add_eos_token\), but it names none"),
        ({"pre": "llama-bpe", "bos_token_id": None}, r"have a token bos \(add_bos_token\), but it names none"),
        ({"tokens": ["<bos>", "a", "a"]}, "has the token 'a' twice"),
        ({"token_type": [3]}, "2 tokens and 1 types"),
        ({"model": "llama", "scores": [0.0]}, "2 tokens and 1 scores"),
        ({"model": "gemma4", "merges": None}, "has no merges"),
        ({"model": "bert"}, "of kind 'bert'"),
        ({"model": "llama", "tokens": ["<unk>", "x" * 10**6], "scores": [0.0] * 2}, "a token of 1000000 characters"),
    ],
)
def test_a_tokenizer_that_llama_cpp_refuses_is_refused(more, says):
    metadata = {"model": "gpt2", "tokens": ["<bos>", "a"], "merges": [], "pre": "gpt-2", "bos_token_id": 0} | more
    with pytest.raises(SpecbeamError, match=says):
        tokenizer_of_file(**{key: value for key, value in metadata.items() if value is not None})


def test_eos_ends_a_prompt_if_the_file_says_so_and_empty_tokens_have_names(caplog):
    tokens = ["<bos>", "a", "", "b"]
    tokenizer = byte_level(tokens, [], "gpt-2", eos_token_id=3, add_bos_token=True, add_eos_token=True)
    assert tokenizer("a").input_ids == [0, 1, 3]
    assert tokenizer.convert_ids_to_tokens(2) == "[EMPTY_2]"
    assert "has 1 empty tokens, the first of them 2" in caplog.text


@pytest.mark.parametrize("name", ["Phi-3-mini-4k-instruct", "Phi3 medium", "Phi-4-mini", None])
def test_special_tokens_of_phi_3_take_the_space_after_them(name):
    """As in its tokenizer.json. llama.cpp knows such models by their name."""
    plain, stripping = ["<s>", "<|endoftext|>"], ["</s>", "<|user|>", "<|end|>"]
    tokens = ["<unk>", *plain, *stripping, *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "▁a"]
    types = [2, *[3] * 5, *[6] * 256, 1, 1, 1]
    scores = [*[0.0] * 262, -1.0, -2.0, -3.0]
    more = {} if name is None else {"general.name": name}
    ours = tokenizer_of_file("llama", tokens, scores=scores, token_type=types, **more)
    theirs = tokenizer_of_file(
        "llama", [t if t not in stripping else f"<{i}>" for i, t in enumerate(tokens)], scores=scores
    )
    strips = {"rstrip": "3" in str(name), "normalized": False, "special": True}
    theirs.backend_tokenizer.add_tokens([AddedToken(token, **strips) for token in stripping])
    for text in ("<|user|>\na <|end|>\n<|user|> a</s>  <|end|>a", "<s> a<|endoftext|>\n a"):
        expected = theirs.convert_ids_to_tokens(theirs(text).input_ids)
        assert ours.convert_ids_to_tokens(ours(text).input_ids) == expected
    if "3" in str(name):
        assert ours("<|end|>\n<|user|>\na", add_special_tokens=False).input_ids == [5, 4, 264]


def test_equal_scores_say_no_order_of_merges(caplog):
    """llama.cpp then merges from the left, and made up that order. The merges of the file are the model's."""
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "b", "c", "ab", "bc", "bca"]
    merges = ["b c", "a b", "bc a"]
    for scores in ([-1000.0] * len(tokens), []):
        tokenizer = tokenizer_of_file(
            "llama", tokens, scores=scores, merges=merges, add_space_prefix=False, add_bos_token=False
        )
        assert tokenizer("abca").input_ids == [4, 9]
        assert "has equal scores for all tokens" in caplog.text
        with pytest.raises(SpecbeamError, match="equal scores for all tokens"):
            tokenizer_of_file("llama", tokens, scores=scores)
    assert tokenizer_of_file("llama", tokens[:8], scores=[0.0] * 8)("ab").input_ids == [
        1,
        3,
        7,
    ]  # one merge needs no order


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_is_that_of_transformers(prefix):
    """The best-scored merge first, bytes for unknown characters, a space before the text."""
    words = ["▁", "a", "b", "c", "ab", "bc", "abc", "▁a", "▁ab", "▁abc", "d"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    order = {"bc": 1, "▁a": 2, "ab": 3, "▁ab": 4, "abc": 5, "▁abc": 6}  # bc is the likeliest pair
    scores = [-float(order.get(token, 9)) for token in tokens]
    special = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_space_prefix": prefix}
    ours = tokenizer_of_file("llama", tokens, scores=scores, token_type=[2, 3, 3, *[6] * 256, *[1] * 11], **special)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    theirs = LlamaTokenizer(vocab=vocabulary, merges=merges, add_prefix_space=prefix, legacy=False)
    for text in ("abc", "abc abc", "aabbcc d", "é abc", "  ab"):
        expected = theirs(text, add_special_tokens=False).input_ids
        if prefix and text.startswith(" "):  # transformers adds no space before one; SentencePiece and llama.cpp do
            expected = [vocabulary["▁"], *expected]
        assert ours(text).input_ids == [1, *expected]
        assert ours.decode(ours(text).input_ids, skip_special_tokens=True) == text


def test_characters_and_runs_of_newlines_are_merged_as_in_gemma_4():
    words = ["▁", *"abcdefd"[:4], "ab", "bc", "▁a", "▁ab", "abc", "▁▁", "\n", "\n\n", "\n\n\n", "\t"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>"]
    tokens = [*special, *(f"<0x{i:02X}>" for i in range(256)), *words]
    merges = ["b c", "▁ a", "a b", "▁a b", "a bc", "▁ ▁", "\n \n", "\n\n \n", "\n \n\n"]
    types = [3, 3, 3, 2, 3, *[6] * 256, *[1] * len(words)]
    named = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "padding_token_id": 0}
    about = {"token_type": types, "scores": [0.0] * len(tokens), "add_space_prefix": False, **named}
    ours = tokenizer_of_file("gemma4", tokens, merges=merges, **about)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    theirs = GemmaTokenizer(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges])
    theirs.add_special_tokens({"additional_special_tokens": ["<|turn>"]})
    for text in ("abc abc", "  ab\n a\n\nb\n\n\n", "é\t<|turn>abd", "\n\n\n\n\n", ""):
        assert ours(text).input_ids == [2, *theirs(text, add_special_tokens=False).input_ids]
        assert ours.decode(ours(text).input_ids, skip_special_tokens=True) == text.replace("<|turn>", "")
    # As in llama.cpp, also where no merge leads to a run of newlines that is a token.
    ours = tokenizer_of_file("gemma4", tokens, merges=merges[:6], **about)
    assert ours("a\n\n\nb").input_ids == [2, *(vocabulary[token] for token in ("a", "\n\n\n", "b"))]


WRONG_TYPE = "its key {} has a value of a wrong type"
TOO_LARGE = "the model's configuration says"


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("tokenizer.ggml.tokens", 1.5, WRONG_TYPE),
        ("tokenizer.ggml.tokens", [1, 2], WRONG_TYPE),
        ("tokenizer.ggml.token_type", 1.5, WRONG_TYPE),
        ("tokenizer.ggml.eos_token_id", [1], WRONG_TYPE),
        ("tokenizer.ggml.eos_token_id", "1", WRONG_TYPE),
        ("tokenizer.chat_template", 7, WRONG_TYPE),
        ("general.alignment", 0.5, WRONG_TYPE),
        ("llama.attention.key_length", 2**31 - 2, TOO_LARGE),  # and takes no memory
        ("llama.rope.dimension_count", 2**20, TOO_LARGE),
        ("llama.block_count", 2**40, WRONG_TYPE),  # it is no uint32
        ("llama.block_count", 2**28 - 1, "268435455 layers"),
        ("llama.attention.head_count", 0, "num_heads = 0"),
        ("llama.rope.freq_base", 0.0, "must be over 0"),
        ("llama.attention.layer_norm_rms_epsilon", float("nan"), "must be over 0"),
        ("llama.attention.layer_norm_rms_epsilon", 1, WRONG_TYPE + ", uint32 and not float32"),
        ("llama.attention.key_length", 3, "must be even"),
        ("llama.feed_forward_length", 1, "asks for"),
    ],
)
def test_a_value_that_no_file_has_is_refused(tmp_path, key, value, says):
    path = write_gguf(tmp_path / "m.gguf", random_model("llama"), **{key: value})
    with pytest.raises(SpecbeamError, match=says.format(key)):
        specbeam.load(path)


def test_an_unknown_architecture_is_refused_with_those_that_are_known(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    finish(writer)
    with pytest.raises(SpecbeamError, match=r"'mamba' is not supported: supported are .*, gemma4_text"):
        specbeam.load(tmp_path / "m.gguf", backend="torch")
    assert open_checkpoint(tmp_path / "m.gguf").facts.architecture == "mamba"


@pytest.mark.parametrize("there", [(1, 2), (1,)])
def test_a_part_of_a_split_model_says_which_parts_are_not_there(tmp_path, there):
    parts = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i in there:
        write_gguf(parts[i - 1], random_model("llama"), **{"split.count": 2})
    says = (
        "join the parts" if len(there) == 2 else rf"1 of its 2 parts are not there, among them {parts[1].name}: fetch"
    )
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(parts[0])


@pytest.mark.parametrize(("stated", "original", "context"), [(40, 64, 256), (256, 64, 256), (64, None, 64)])
def test_the_context_of_yarn_is_that_of_the_folder(tmp_path, stated, original, context):
    keys = {"llama.context_length": stated, "llama.rope.scaling.original_context_length": original}
    path = write_gguf(tmp_path / "m.gguf", random_model("llama", rope_parameters=YARN), **keys)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.config.context_length, checkpoint.facts.context) == (context, context)


def test_a_folder_with_one_file_is_that_file_unless_it_is_a_link_elsewhere(tmp_path):
    model = random_model("llama")
    file = write_gguf(tmp_path / "m.gguf", model)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "m.gguf").symlink_to(file)
    with pytest.raises(SpecbeamError, match="Only files inside the folder are read"):
        specbeam.load(tmp_path / "folder")
    (tmp_path / "README.md").write_text("# A model")
    results = [specbeam.generate(specbeam.load(p), [1, 2], max_new_tokens=5).token_ids for p in (file, tmp_path)]
    assert results[0] == results[1]
    write_gguf(tmp_path / "other.gguf", model)
    with pytest.raises(SpecbeamError, match=r"holds 2 GGUF files: give the path of one of them \(m.gguf, other.gguf\)"):
        specbeam.load(tmp_path)


def test_the_merges_of_a_large_vocabulary_are_kept(monkeypatch, tmp_path):
    """So the next start needs no search for them. A damaged file, or one that cannot be written, changes nothing."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    types, scores = [2, 3, 3, *[6] * 256, *[1] * 6], [-float(i) for i in range(len(tokens))]

    def ids():
        return tokenizer_of_file("llama", tokens, scores=scores, token_type=types)("abab b aab").input_ids

    expected = ids()
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path))
    monkeypatch.setattr(gguf_tokenizer, "MANY_TOKENS", 0)
    assert ids() == expected
    (kept,) = packed.files()
    assert kept.path.suffix == packed.KEPT
    with monkeypatch.context() as patch:
        patch.setattr(gguf_tokenizer, "_implied_merges", None)  # not called
        assert ids() == expected
    for damage in (lambda content: content[:-4], lambda content: content[:40] + b"x" + content[41:], lambda _: b""):
        kept.path.write_bytes(damage(kept.path.read_bytes()))
        assert ids() == expected
    assert packed.clear() > 0
    (tmp_path / "packed").rmdir()
    (tmp_path / "packed").write_text("in the way")
    assert ids() == expected
