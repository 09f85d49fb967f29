"""ERNIE 4.5 (Baidu 2025) without experts. It is Llama whose queries and keys are rotated as neighbours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Usual
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.families.llama import rows_of_pairs
from specbeam.checkpoints.parts.part import Part


class Ernie(Architecture):
    """ERNIE 4.5 0.3B."""

    name = "ernie4_5"
    gguf_name = "ernie4_5"
    rope_theta = 500_000.0
    tokenizer_class = "TokenizersBackend"
    keys: ClassVar = {
        "head_dim": (int | None, 128),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 3072),
        "max_position_embeddings": (int, 131072),
        "num_key_value_heads": (int | None, 2),
        "rms_norm_eps": (float, 1e-5),
        "tie_word_embeddings": (bool, True),
        "use_bias": (bool | None, False),
    }

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        bias = bool(keys.use_bias)
        return usual.attention(qkv_bias=bias, output_bias=bias), usual.mlp(bias=bias)

    def folder_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part, ".q_proj.", ".k_proj.")

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part)


ARCHITECTURES = (Ernie(),)
