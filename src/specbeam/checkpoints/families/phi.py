"""Phi-3 and Phi-4. Query, key and value lie in one tensor, and so do the gate and the up projection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from specbeam.checkpoints.architecture import ORIGINAL, Architecture, rope_parameters
from specbeam.errors import SpecbeamError


class Phi3(Architecture):
    """Phi-3 (Abdin et al. 2024). Its long models have LongRoPE, and run up to the length they were first trained at."""

    name = "phi3"
    gguf_name = "phi3"
    tokenizer_class = "TokenizersBackend"
    folder_tensors: ClassVar = Architecture.folder_tensors | {
        "blocks.N.attention.qkv": "model.layers.N.self_attn.qkv_proj",
        "blocks.N.mlp.gate_up": "model.layers.N.mlp.gate_up_proj",
    }
    keys: ClassVar = {
        "hidden_act": (str, "silu"),
        "intermediate_size": (int, 8192),
        "max_position_embeddings": (int, 4096),
        "num_key_value_heads": (int | None, None),
        "original_max_position_embeddings": (int, 4096),
        "rms_norm_eps": (float, 1e-5),
        "sliding_window": (int | None, None),
    }
    gguf_tensors: ClassVar = Architecture.gguf_tensors | {
        "blocks.N.attention.qkv": "blk.N.attn_qkv",
        "blocks.N.mlp.gate_up": "blk.N.ffn_up",
    }

    def rope_parameters(self, keys: SimpleNamespace) -> dict[str, Any]:
        keys.partial_rotary_factor = partial = getattr(keys, "partial_rotary_factor", 1.0)
        ropes = rope_parameters(keys, self.rope_theta)
        ropes.setdefault("partial_rotary_factor", partial)
        if ropes["rope_type"] in ("yarn", "longrope"):
            ropes[ORIGINAL] = keys.original_max_position_embeddings
        if ropes["rope_type"] in ("su", "yarn"):  # names of earlier versions
            ropes["rope_type"] = "longrope"
        if ropes["rope_type"] not in ("default", "longrope"):
            raise SpecbeamError(f"config.json has rotary scaling {ropes['rope_type']!r}: Phi-3 has longrope alone")
        features = int(keys.hidden_size // keys.num_attention_heads * ropes["partial_rotary_factor"]) // 2
        for key in ("short_factor", "long_factor"):
            factors = ropes.get(key)
            if factors is None:
                continue
            are_numbers = isinstance(factors, list) and all(isinstance(one, int | float) for one in factors)
            if not are_numbers or len(factors) != features:
                raise SpecbeamError(
                    f"config.json says {key} = {str(factors)[:80]}: it must be a list of {features} numbers"
                )
        return ropes


ARCHITECTURES = (Phi3(),)
