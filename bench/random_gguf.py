"""A GGUF file of a model's true shape with random weights: what a pass costs does not depend on their values.

    python bench/random_gguf.py FILE.gguf --shape lfm2-350m [--layers 12] [--seed 0]

Layers are Q4_0, norms, filters and routers are F32, and embedding and head are Q8_0, as are the embeddings of Gemma 4's
layers. Of gpt-oss, the experts are MXFP4, and all other matrices Q8_0. The vocabulary has all bytes and made-up words,
so that llama.cpp takes the file. `bench/cpu.py FILE.gguf` then compares both engines on it.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Container, Iterable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

Q4_0, Q8_0, MXFP4 = (getattr(GGMLQuantizationType, name) for name in ("Q4_0", "Q8_0", "MXFP4"))
BLOCK = 32
"""Weights that share a scale, in all types."""
SPREAD = 0.02
"""The standard deviation of the weights, about that of trained ones."""
MXFP4_SPREAD = 5.6
"""The standard deviation of the numbers of MXFP4, 0 to 12 with signs, where all are equally frequent."""
SPECIAL = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS = 1, 4
GEMMA_SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
GEMMA_BOS, GEMMA_EOS, GEMMA_UNKNOWN = 2, 1, 3


class Shape(NamedTuple):
    """The sizes of a model.

    Attributes:
        architecture: "lfm2" or "hunyuan-dense".
        attention: the layers with attention. The others have short convolutions.
        filter: positions of a convolution.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    attention: Container[int]
    architecture: str = "lfm2"
    filter: int = 3
    vocab: int = 65_536
    context: int = 128_000


class GemmaShape(NamedTuple):
    """The sizes of a Gemma 4 whose layers have embeddings of their own.

    Attributes:
        head, full_head: the size of a head in layers with a window, and in the others.
        period: every how many layers one sees the whole text.
        shared: how many last layers read the keys and values of earlier ones.
        wide: how many times as wide the MLPs of these layers are.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    period: int
    shared: int
    wide: int
    head: int = 256
    full_head: int = 512
    per_layer: int = 256
    window: int = 512
    vocab: int = 262_144
    context: int = 131_072


class ExpertsShape(NamedTuple):
    """The sizes of a model whose layers all have experts.

    Attributes:
        inner: of an expert.
        used: experts of a token.
        window: of every other layer of gpt-oss, whose attention has biases and sinks.
    """

    architecture: str
    hidden: int
    inner: int
    experts: int
    used: int
    heads: int
    kv_heads: int
    head: int
    layers: int
    vocab: int
    context: int
    theta: float
    window: int = 0


class LinearShape(NamedTuple):
    """The sizes of a Qwen3.5, most of whose layers have a Gated DeltaNet.

    Attributes:
        head: the size of a head of attention, of which a quarter is rotated.
        linear_head: of a key and of a value of linear attention.
        period: every how many layers one has attention.
        filter: positions of a convolution.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    value_heads: int
    key_heads: int = 16
    head: int = 256
    linear_head: int = 128
    period: int = 4
    filter: int = 4
    vocab: int = 248_320
    context: int = 262_144


SHAPES: dict[str, Shape | GemmaShape | ExpertsShape | LinearShape] = {
    "lfm2-350m": Shape(1024, 4608, 16, 8, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-700m": Shape(1536, 6912, 24, 8, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-1.2b": Shape(2048, 8192, 32, 8, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-2.6b": Shape(2048, 10752, 32, 8, 30, (2, 5, 9, 13, 17, 21, 24, 27)),
    "hy-mt-1.8b": Shape(2048, 6144, 16, 4, 32, range(32), "hunyuan-dense", vocab=120_818, context=262_144),
    "hy-mt-7b": Shape(4096, 14336, 32, 8, 32, range(32), "hunyuan-dense", vocab=128_256, context=262_144),
    "gemma4-e2b": GemmaShape(1536, 6144, 8, 1, 35, 5, 20, 2),
    "gemma4-e4b": GemmaShape(2560, 10240, 8, 2, 42, 6, 18, 1),
    "qwen3-30b-a3b": ExpertsShape("qwen3moe", 2048, 768, 128, 8, 32, 4, 128, 48, 151_936, 40_960, 1e6),
    "olmoe-1b-7b": ExpertsShape("olmoe", 2048, 1024, 64, 8, 16, 16, 128, 16, 50_304, 4096, 1e4),
    "qwen3.5-0.8b": LinearShape(1024, 3584, 8, 2, 24, 16),
    "qwen3.5-4b": LinearShape(2560, 9216, 16, 4, 32, 32),
    "gpt-oss-20b": ExpertsShape("gpt-oss", 2880, 2880, 32, 4, 64, 8, 64, 24, 201_088, 131_072, 150_000.0, 128),
}
"""By the configurations that LiquidAI, Tencent, Google, Qwen, Ai2 and OpenAI publish."""
ROPE_THETA = {"lfm2": 1e6, "hunyuan-dense": 1e4 * 1000 ** (128 / 126)}
LAST_NORM = {"lfm2": "token_embd_norm", "hunyuan-dense": "output_norm"}
PRE_TOKENIZERS = {"qwen3moe": "qwen2", "olmoe": "olmo", "gpt-oss": "gpt-4o"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--layers", type=int, help="of models with experts, the first layers alone [all]")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    shape = SHAPES[given.shape]
    if isinstance(shape, ExpertsShape):
        shape = shape._replace(layers=min(given.layers or shape.layers, shape.layers))
    named = {GemmaShape: "gemma4", LinearShape: "qwen35"}
    architecture = named[type(shape)] if isinstance(shape, GemmaShape | LinearShape) else shape.architecture
    writer = GGUFWriter(given.file, architecture, use_temp_file=True)
    draw = np.random.default_rng(given.seed)
    writer.add_name(f"random {given.shape}")
    if isinstance(shape, Shape):
        write(writer, shape, draw)
    elif isinstance(shape, GemmaShape):
        write_gemma4(writer, shape, draw)
    elif isinstance(shape, LinearShape):
        write_qwen35(writer, shape, draw)
    else:
        write_experts(writer, shape, draw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(writer: GGUFWriter, shape: Shape, draw: np.random.Generator) -> None:
    """Add what llama.cpp's converter and quantizer write."""
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(ROPE_THETA[shape.architecture])
    writer.add_vocab_size(shape.vocab)
    if shape.architecture == "lfm2":
        writer.add_head_count_kv([shape.kv_heads * (i in shape.attention) for i in range(shape.layers)])
        writer.add_shortconv_l_cache(shape.filter)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    add_vocabulary(writer, SPECIAL, sorted(pre_tokenizers.ByteLevel.alphabet()), shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(shape.architecture)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)

    def matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType = Q4_0) -> None:
        writer.add_tensor(f"{name}.weight", blocks(draw, rows, columns, kind), raw_dtype=kind)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    hidden, head = shape.hidden, shape.hidden // shape.heads
    matrix("token_embd", shape.vocab, hidden, Q8_0)
    norm(LAST_NORM[shape.architecture], hidden)
    for layer in range(shape.layers):
        at = f"blk.{layer}"
        norm(f"{at}.attn_norm", hidden)
        if layer in shape.attention:
            matrix(f"{at}.attn_q", hidden, hidden)
            matrix(f"{at}.attn_k", shape.kv_heads * head, hidden)
            matrix(f"{at}.attn_v", shape.kv_heads * head, hidden)
            matrix(f"{at}.attn_output", hidden, hidden)
            norm(f"{at}.attn_q_norm", head)
            norm(f"{at}.attn_k_norm", head)
        else:
            matrix(f"{at}.shortconv.in_proj", 3 * hidden, hidden)
            filters = draw.normal(0, 0.3, (hidden, shape.filter)).astype(np.float32)
            writer.add_tensor(f"{at}.shortconv.conv.weight", filters)
            matrix(f"{at}.shortconv.out_proj", hidden, hidden)
        norm(f"{at}.ffn_norm", hidden)
        matrix(f"{at}.ffn_gate", shape.inner, hidden)
        matrix(f"{at}.ffn_up", shape.inner, hidden)
        matrix(f"{at}.ffn_down", hidden, shape.inner)


def write_gemma4(writer: GGUFWriter, shape: GemmaShape, draw: np.random.Generator) -> None:
    """The same for Gemma 4."""
    own, slides = shape.layers - shape.shared, [(i + 1) % shape.period != 0 for i in range(shape.layers)]
    inner = [shape.inner * (1 if i < own else shape.wide) for i in range(shape.layers)]
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_embedding_length_per_layer_input(shape.per_layer)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.full_head)
    writer.add_value_length(shape.full_head)
    writer.add_key_length_swa(shape.head)
    writer.add_value_length_swa(shape.head)
    writer.add_shared_kv_layers(shape.shared)
    writer.add_sliding_window(shape.window)
    writer.add_sliding_window_pattern(slides)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(shape.full_head)
    writer.add_rope_dimension_count_swa(shape.head)
    writer.add_rope_freq_base(1e6)
    writer.add_float32("gemma4.rope.freq_base_swa", 1e4)
    writer.add_final_logit_softcapping(30.0)
    units = [*(f"<0x{i:02X}>" for i in range(256)), "▁", "\n", *map(chr, range(33, 127))]
    add_vocabulary(writer, GEMMA_SPECIAL, units, shape.vocab)
    writer.add_tokenizer_model("gemma4")
    writer.add_add_space_prefix(False)
    writer.add_bos_token_id(GEMMA_BOS)
    writer.add_eos_token_id(GEMMA_EOS)
    writer.add_unk_token_id(GEMMA_UNKNOWN)

    def matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType = Q4_0) -> None:
        writer.add_tensor(f"{name}.weight", blocks(draw, rows, columns, kind), raw_dtype=kind)

    def vector(name: str, size: int, value: float = 1.0) -> None:
        writer.add_tensor(f"{name}.weight", np.full(size, value, np.float32))

    hidden, turning = shape.hidden, shape.full_head // 8
    factors = np.where(np.arange(shape.full_head // 2) < turning, 1, 1e30).astype(np.float32)
    writer.add_tensor("rope_freqs.weight", factors)
    matrix("token_embd", shape.vocab, hidden, Q8_0)
    matrix("per_layer_token_embd", shape.vocab, shape.layers * shape.per_layer, Q8_0)
    matrix("per_layer_model_proj", shape.layers * shape.per_layer, hidden, Q8_0)
    vector("per_layer_proj_norm", shape.per_layer)
    vector("output_norm", hidden)
    for layer in range(shape.layers):
        at, head = f"blk.{layer}", shape.head if slides[layer] else shape.full_head
        vector(f"{at}.attn_norm", hidden)
        matrix(f"{at}.attn_q", shape.heads * head, hidden)
        matrix(f"{at}.attn_output", hidden, shape.heads * head)
        vector(f"{at}.attn_q_norm", head)
        if layer < own:
            matrix(f"{at}.attn_k", shape.kv_heads * head, hidden)
            matrix(f"{at}.attn_v", shape.kv_heads * head, hidden)
            vector(f"{at}.attn_k_norm", head)
        vector(f"{at}.post_attention_norm", hidden)
        vector(f"{at}.ffn_norm", hidden)
        matrix(f"{at}.ffn_gate", inner[layer], hidden)
        matrix(f"{at}.ffn_up", inner[layer], hidden)
        matrix(f"{at}.ffn_down", hidden, inner[layer])
        vector(f"{at}.post_ffw_norm", hidden)
        matrix(f"{at}.inp_gate", shape.per_layer, hidden)
        matrix(f"{at}.proj", hidden, shape.per_layer)
        vector(f"{at}.post_norm", hidden)
        vector(f"{at}.layer_output_scale", 1, 0.5)


def write_qwen35(writer: GGUFWriter, shape: LinearShape, draw: np.random.Generator) -> None:
    """The same for Qwen3.5, with its head for multi-token prediction. The products of betas and decays are Q8_0."""
    keys, values = shape.key_heads * shape.linear_head, shape.value_heads * shape.linear_head
    writer.add_block_count(shape.layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(shape.head // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(shape.period)
    writer.add_ssm_conv_kernel(shape.filter)
    writer.add_ssm_state_size(shape.linear_head)
    writer.add_ssm_group_count(shape.key_heads)
    writer.add_ssm_time_step_rank(shape.value_heads)
    writer.add_ssm_inner_size(values)
    add_vocabulary(writer, SPECIAL, sorted(pre_tokenizers.ByteLevel.alphabet()), shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)

    def matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType = Q4_0) -> None:
        writer.add_tensor(f"{name}.weight", blocks(draw, rows, columns, kind), raw_dtype=kind)

    def exact(name: str, values: NDArray[np.floating]) -> None:
        writer.add_tensor(name, values.astype(np.float32))

    hidden, heads = shape.hidden, shape.value_heads
    matrix("token_embd", shape.vocab, hidden, Q8_0)
    exact("output_norm.weight", np.ones(hidden))
    for layer in range(shape.layers + 1):
        at = f"blk.{layer}"
        exact(f"{at}.attn_norm.weight", np.ones(hidden))
        if (layer + 1) % shape.period and layer < shape.layers:
            matrix(f"{at}.attn_qkv", 2 * keys + values, hidden)
            matrix(f"{at}.attn_gate", values, hidden)
            matrix(f"{at}.ssm_beta", heads, hidden, Q8_0)
            matrix(f"{at}.ssm_alpha", heads, hidden, Q8_0)
            exact(f"{at}.ssm_conv1d.weight", draw.normal(0, 0.3, (2 * keys + values, shape.filter)))
            exact(f"{at}.ssm_a", -draw.uniform(0.01, 16, heads))
            exact(f"{at}.ssm_dt.bias", draw.normal(-4, 1, heads))
            exact(f"{at}.ssm_norm.weight", np.ones(shape.linear_head))
            matrix(f"{at}.ssm_out", hidden, values)
        else:
            matrix(f"{at}.attn_q", 2 * shape.heads * shape.head, hidden)
            matrix(f"{at}.attn_k", shape.kv_heads * shape.head, hidden)
            matrix(f"{at}.attn_v", shape.kv_heads * shape.head, hidden)
            matrix(f"{at}.attn_output", hidden, shape.heads * shape.head)
            exact(f"{at}.attn_q_norm.weight", np.ones(shape.head))
            exact(f"{at}.attn_k_norm.weight", np.ones(shape.head))
        exact(f"{at}.post_attention_norm.weight", np.ones(hidden))
        matrix(f"{at}.ffn_gate", shape.inner, hidden)
        matrix(f"{at}.ffn_up", shape.inner, hidden)
        matrix(f"{at}.ffn_down", hidden, shape.inner)
    matrix(f"blk.{shape.layers}.nextn.eh_proj", hidden, 2 * hidden)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        exact(f"blk.{shape.layers}.nextn.{norm}.weight", np.ones(hidden))


def write_experts(writer: GGUFWriter, shape: ExpertsShape, draw: np.random.Generator) -> None:
    """The same for Qwen3-MoE, OLMoE and gpt-oss."""
    architecture, is_gpt_oss = shape.architecture, bool(shape.window)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.theta)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_expert_feed_forward_length(shape.inner)
    if is_gpt_oss:
        writer.add_sliding_window(shape.window)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    add_vocabulary(writer, SPECIAL, sorted(pre_tokenizers.ByteLevel.alphabet()), shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZERS[architecture])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    hidden, inner, experts = shape.hidden, shape.inner, shape.experts
    queries, keys = shape.heads * shape.head, shape.kv_heads * shape.head

    def add(name: str, *sizes: int, kind: GGMLQuantizationType = Q8_0 if is_gpt_oss else Q4_0) -> None:
        *stacked, rows, columns = sizes
        made = blocks(draw, math.prod(stacked) * rows, columns, kind).reshape(*stacked, rows, -1)
        writer.add_tensor(f"{name}.weight", made, raw_dtype=kind)

    def exact(name: str, *sizes: int, spread: float = SPREAD, mean: float = 0.0) -> None:
        writer.add_tensor(name, draw.normal(mean, spread, sizes).astype(np.float32))

    add("token_embd", shape.vocab, hidden, kind=Q8_0)
    add("output", shape.vocab, hidden, kind=Q8_0)
    exact("output_norm.weight", hidden, mean=1.0)
    for layer in range(shape.layers):
        at = f"blk.{layer}"
        exact(f"{at}.attn_norm.weight", hidden, mean=1.0)
        exact(f"{at}.{'post_attention_norm' if is_gpt_oss else 'ffn_norm'}.weight", hidden, mean=1.0)
        exact(f"{at}.ffn_gate_inp.weight", experts, hidden)
        parts = {"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)}
        for part, sizes in (parts | {"attn_output": (hidden, queries)}).items():
            add(f"{at}.{part}", *sizes)
            if is_gpt_oss:
                exact(f"{at}.{part}.bias", sizes[0])
        for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            add(f"{at}.ffn_{part}_exps", experts, rows, columns, kind=MXFP4 if is_gpt_oss else Q4_0)
            if is_gpt_oss:
                exact(f"{at}.ffn_{part}_exps.bias", experts, rows)
        if is_gpt_oss:
            exact(f"{at}.attn_sinks.weight", shape.heads, spread=1.0)
            exact(f"{at}.ffn_gate_inp.bias", experts)
        else:
            sizes = (queries, keys) if architecture == "olmoe" else (shape.head, shape.head)
            for part, size in zip("qk", sizes, strict=True):
                exact(f"{at}.attn_{part}_norm.weight", size, mean=1.0)


def blocks(draw: np.random.Generator, rows: int, columns: int, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """A random quantized matrix, uint8 [rows, bytes]: a scale and its numbers, block for block."""
    if kind == MXFP4:
        made = draw.integers(0, 256, (rows, columns // BLOCK, 1 + BLOCK // 2), np.uint8)
        made[..., 0] = 128 + round(math.log2(SPREAD / MXFP4_SPREAD))
        return made.reshape(rows, -1)
    number_bytes = {Q4_0: BLOCK // 2, Q8_0: BLOCK}[kind]
    largest = {Q4_0: 8, Q8_0: 128}[kind]
    made = draw.integers(0, 256, (rows, columns // BLOCK, 2 + number_bytes), np.uint8)
    # Numbers are evenly spread, so their deviation is the largest one over the root of 3.
    made[..., :2] = np.frombuffer(np.float16(SPREAD * 3**0.5 / largest).tobytes(), np.uint8)
    return made.reshape(rows, -1)


def add_vocabulary(writer: GGUFWriter, special: Iterable[str], units: Iterable[str], size: int) -> None:
    """Special tokens, all bytes or characters, words of letters that no merge leads to, and one merge."""
    special, units = [*special], [*units]
    tokens = [*special, *units, *islice(words(), size - len(special) - len(units))]
    tokens[-1] = "ab"  # of the one merge, without which llama.cpp refuses the file
    of_bytes = [TokenType.BYTE if unit.startswith("<0x") else TokenType.NORMAL for unit in units]
    types = [TokenType.CONTROL] * len(special) + of_bytes
    writer.add_token_list(tokens)
    writer.add_token_types(types + [TokenType.NORMAL] * (size - len(types)))
    writer.add_token_merges(["a b"])
    writer.add_add_bos_token(True)


def words() -> Iterator[str]:
    """Words of four letters, then of more."""
    letters, length = "abcdefghijklmnopqrstuvwxyz", 4
    while True:
        yield from map("".join, product(letters, repeat=length))
        length += 1


if __name__ == "__main__":
    main()
