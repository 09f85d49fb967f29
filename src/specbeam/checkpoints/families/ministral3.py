"""Ministral 3 (Mistral AI 2025). It adds to Mistral a factor of the queries that grows beyond the original context.

A folder has it beside an encoder of images, as ``text_config``. GGUF files of Mistral Small 3.1 and 3.2 carry its name,
without the factor.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import ORIGINAL, Architecture, Metadata, Usual
from specbeam.checkpoints.config import Layer
from specbeam.checkpoints.families.llama import rows_of_pairs, whole_heads_rotated
from specbeam.checkpoints.parts.part import Part, size
from specbeam.errors import SpecbeamError

BETA, GGUF_BETA = "llama_4_scaling_beta", "attention.temperature_scale"


class Ministral3(Architecture):
    """Ministral 3 with 3B, 8B and 14B parameters."""

    name = "ministral3"
    gguf_name = "mistral3"
    tokenizer_class = "TokenizersBackend"
    sizes = (131072, 4096, 34, 32)
    keys: ClassVar = {
        "head_dim": (int, 128),
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 14336),
        "max_position_embeddings": (int, 262144),
        "num_key_value_heads": (int, 8),
        "rms_norm_eps": (float, 1e-5),
        "sliding_window": (int | None, None),
    }
    gguf_keys: ClassVar = {GGUF_BETA: ("float32",), "attention.temperature_length": ("uint32",)}

    def derive(self, keys: SimpleNamespace) -> None:
        super().derive(keys)
        if keys.rope_parameters is None and getattr(keys, "rope_scaling", None) is None:
            keys.rope_parameters = {
                **{"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, ORIGINAL: 16384},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1},
            }

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        ropes = keys.rope_parameters
        for key in (BETA, ORIGINAL):
            if ropes.get(key) is None:
                raise SpecbeamError(
                    f"config.json has no {key} among its rope_parameters, which a {self.name} model needs"
                )
        return _growing(usual, float(ropes[BETA]), size(ORIGINAL, ropes[ORIGINAL])).attention(), usual.mlp()

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        trained = metadata.need("rope.scaling.original_context_length", metadata.need("context_length"))
        metadata.require("attention.temperature_length", trained)
        growing = _growing(usual, float(metadata.need(GGUF_BETA, 0.0)), size(ORIGINAL, trained))
        return whole_heads_rotated(growing.attention(), metadata), usual.mlp()

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        return rows_of_pairs(source, part)


def _growing(usual: Usual, beta: float, period: int) -> Usual:
    """The usual parts with the growth of queries, unless it is 0."""
    if not beta:
        return usual
    return usual._replace(attention=partial(usual.attention, query_growth=beta, query_growth_period=period))


ARCHITECTURES = (Ministral3(),)
