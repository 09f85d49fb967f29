"""A GGUF file of a model's true shape with random weights: what a pass costs does not depend on their values.

    python bench/random_gguf.py FILE.gguf --shape lfm2-350m [--layers 12] [--seed 0]

Layers are Q4_0, the embedding and the head are Q8_0, and norms, filters and routers are F32. Of gpt-oss, the experts
are MXFP4, and all other matrices Q8_0. The vocabulary has all bytes and made-up words, so that llama.cpp takes the
file. `bench/cpu.py FILE.gguf` then compares both engines on it.
"""

from __future__ import annotations

import argparse
import math
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


class Shape(NamedTuple):
    """The sizes of an LFM2.

    Attributes:
        attention: the layers with attention. The others have short convolutions.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    attention: tuple[int, ...]
    filter: int = 3
    vocab: int = 65_536
    context: int = 128_000


SHAPES = {
    "lfm2-350m": Shape(1024, 4608, 16, 8, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-700m": Shape(1536, 6912, 24, 8, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-1.2b": Shape(2048, 8192, 32, 8, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-2.6b": Shape(2048, 10752, 32, 8, 30, (2, 5, 9, 13, 17, 21, 24, 27)),
}
"""By the configurations that LiquidAI publishes."""


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


EXPERTS_SHAPES = {
    "qwen3-30b-a3b": ExpertsShape("qwen3moe", 2048, 768, 128, 8, 32, 4, 128, 48, 151_936, 40_960, 1e6),
    "olmoe-1b-7b": ExpertsShape("olmoe", 2048, 1024, 64, 8, 16, 16, 128, 16, 50_304, 4096, 1e4),
    "gpt-oss-20b": ExpertsShape("gpt-oss", 2880, 2880, 32, 4, 64, 8, 64, 24, 201_088, 131_072, 150_000.0, 128),
}
"""By the configurations that Qwen, Ai2 and OpenAI publish."""
PRE_TOKENIZERS = {"qwen3moe": "qwen2", "olmoe": "olmo", "gpt-oss": "gpt-4o"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices={**SHAPES, **EXPERTS_SHAPES}, required=True)
    parser.add_argument("--layers", type=int, help="the first layers alone [all]")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    shape = {**SHAPES, **EXPERTS_SHAPES}[given.shape]
    shape = shape._replace(layers=min(given.layers or shape.layers, shape.layers))
    write = write_lfm2 if isinstance(shape, Shape) else write_experts
    write(given.file, shape, given.shape, given.seed)


def write_lfm2(file: Path, shape: Shape, name: str, seed: int) -> None:
    """Write a file as llama.cpp's converter and quantizer write it."""
    writer, draw = GGUFWriter(file, "lfm2"), np.random.default_rng(seed)
    writer.add_name(f"random {name}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv([shape.kv_heads * (i in shape.attention) for i in range(shape.layers)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_shortconv_l_cache(shape.filter)
    writer.add_vocab_size(shape.vocab)
    add_vocabulary(writer, shape.vocab, "lfm2")

    def matrix(name: str, rows: int, columns: int, kind: GGMLQuantizationType = Q4_0) -> None:
        writer.add_tensor(f"{name}.weight", blocks(draw, rows, columns, kind), raw_dtype=kind)

    def norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    hidden, head = shape.hidden, shape.hidden // shape.heads
    matrix("token_embd", shape.vocab, hidden, Q8_0)
    norm("token_embd_norm", hidden)
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
    finish(writer)


def write_experts(file: Path, shape: ExpertsShape, name: str, seed: int) -> None:
    """Write a file of Qwen3-MoE, OLMoE or gpt-oss. Its tensors wait on disk, and not in memory."""
    architecture, is_gpt_oss = shape.architecture, bool(shape.window)
    writer, draw = GGUFWriter(file, architecture, use_temp_file=True), np.random.default_rng(seed)
    writer.add_name(f"random {name}")
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
    add_vocabulary(writer, shape.vocab, PRE_TOKENIZERS[architecture])
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
    finish(writer)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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


def add_vocabulary(writer: GGUFWriter, size: int, pre_tokenizer: str) -> None:
    """Special tokens, all bytes, words of four letters that no merge leads to, and one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = islice(map("".join, product(letters, repeat=4)), size - len(SPECIAL) - len(alphabet))
    tokens = [*SPECIAL, *alphabet, *words]
    tokens[-1] = "ab"  # of the one merge, without which llama.cpp refuses the file
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (size - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)


if __name__ == "__main__":
    main()
