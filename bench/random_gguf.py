"""A GGUF file of a model's true shape with random weights: what a pass costs does not depend on their values.

    python bench/random_gguf.py FILE.gguf --shape lfm2-350m [--seed 0]

Layers are Q4_0, the embedding, which is the head too, is Q8_0, and norms and filters are F32. The vocabulary has all
bytes and made-up words, so that llama.cpp takes the file. `bench/cpu.py FILE.gguf` then compares both engines on it.
"""

from __future__ import annotations

import argparse
from collections.abc import Container
from itertools import islice, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

Q4_0, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
BLOCK = 32
"""Weights that share a scale, in both types."""
SPREAD = 0.02
"""The standard deviation of the weights, about that of trained ones."""
SPECIAL = ("<|pad|>", "<|startoftext|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS = 1, 4


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


SHAPES = {
    "lfm2-350m": Shape(1024, 4608, 16, 8, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-700m": Shape(1536, 6912, 24, 8, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-1.2b": Shape(2048, 8192, 32, 8, 16, (2, 5, 8, 10, 12, 14)),
    "lfm2-2.6b": Shape(2048, 10752, 32, 8, 30, (2, 5, 9, 13, 17, 21, 24, 27)),
    "hy-mt-1.8b": Shape(2048, 6144, 16, 4, 32, range(32), "hunyuan-dense", vocab=120_818, context=262_144),
    "hy-mt-7b": Shape(4096, 14336, 32, 8, 32, range(32), "hunyuan-dense", vocab=128_256, context=262_144),
}
"""By the configurations that LiquidAI and Tencent publish."""
ROPE_THETA = {"lfm2": 1e6, "hunyuan-dense": 1e4 * 1000 ** (128 / 126)}
LAST_NORM = {"lfm2": "token_embd_norm", "hunyuan-dense": "output_norm"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write(given.file, SHAPES[given.shape], given.shape, given.seed)


def write(file: Path, shape: Shape, name: str, seed: int) -> None:
    """Write a file as llama.cpp's converter and quantizer write it."""
    writer, draw = GGUFWriter(file, shape.architecture), np.random.default_rng(seed)
    writer.add_name(f"random {name}")
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
    add_vocabulary(writer, shape.vocab, shape.architecture)

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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks(draw: np.random.Generator, rows: int, columns: int, kind: GGMLQuantizationType) -> NDArray[np.uint8]:
    """A random quantized matrix, uint8 [rows, bytes]: a half-precision scale and its numbers, block for block."""
    number_bytes = {Q4_0: BLOCK // 2, Q8_0: BLOCK}[kind]
    largest = {Q4_0: 8, Q8_0: 128}[kind]
    made = draw.integers(0, 256, (rows, columns // BLOCK, 2 + number_bytes), np.uint8)
    # Numbers are evenly spread, so their deviation is the largest one over the root of 3.
    made[..., :2] = np.frombuffer(np.float16(SPREAD * 3**0.5 / largest).tobytes(), np.uint8)
    return made.reshape(rows, -1)


def add_vocabulary(writer: GGUFWriter, size: int, pre: str) -> None:
    """Special tokens, all bytes, words of four letters that no merge leads to, and one merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = islice(map("".join, product(letters, repeat=4)), size - len(SPECIAL) - len(alphabet))
    tokens = [*SPECIAL, *alphabet, *words]
    tokens[-1] = "ab"  # of the one merge, without which llama.cpp refuses the file
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * (size - len(SPECIAL)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)


if __name__ == "__main__":
    main()
