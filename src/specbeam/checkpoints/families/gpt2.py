"""GPT-2. Positions are learned embeddings, and norms and products have biases.

A folder stores most matrices as [in, out], the layout of transformers' ``Conv1D``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

from specbeam.checkpoints.architecture import Architecture, Usual
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.stems import TokenStem


class GPT2(Architecture):
    """GPT-2 (Radford et al. 2019)."""

    name = "gpt2"
    gguf_name = "gpt2"
    tokenizer_class = "GPT2Tokenizer"
    attention: ClassVar = {"qkv_bias": True, "output_bias": True}
    mlp: ClassVar = {"activation": "gelu_tanh", "gated": False, "bias": True}
    features: ClassVar = {"norm": "layer", "stem": TokenStem(learned_positions=True)}
    older_names: ClassVar = {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }
    keys: ClassVar = {
        "activation_function": (str, "gelu_new"),
        "layer_norm_epsilon": (float, 1e-5),
        "max_position_embeddings": (int, 1024),
        "n_inner": (int | None, None),
        "scale_attn_by_inverse_layer_idx": (bool, False),
        "scale_attn_weights": (bool, True),
        "tie_word_embeddings": (bool, True),
    }
    folder_tensors: ClassVar = {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks.N.attention_norm": "transformer.h.N.ln_1",
        "blocks.N.attention.qkv": "transformer.h.N.attn.c_attn",
        "blocks.N.attention.output": "transformer.h.N.attn.c_proj",
        "blocks.N.mlp_norm": "transformer.h.N.ln_2",
        "blocks.N.mlp.up": "transformer.h.N.mlp.c_fc",
        "blocks.N.mlp.down": "transformer.h.N.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    }
    folder_ignored = (".attn.bias", ".attn.masked_bias")  # the causal mask
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {"blocks.N.attention.qkv": "blk.N.attn_qkv"}

    def derive(self, keys: SimpleNamespace) -> None:
        """Nothing follows from other keys."""

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        width = 4 * keys.hidden_size if keys.n_inner is None else keys.n_inner
        return usual.attention(num_kv_heads=keys.num_attention_heads), usual.mlp(intermediate_size=width)

    def stores_transposed(self, source: str) -> bool:
        return ".c_" in source and source.endswith(".weight")


ARCHITECTURES = (GPT2(),)
