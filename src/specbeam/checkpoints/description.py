"""A configuration as one text, of which receipts have a digest. It is equal for equal models of two versions."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from specbeam.checkpoints.parts.attention import Attention, CrossAttention
from specbeam.checkpoints.parts.mlp import MLP
from specbeam.checkpoints.stems import AudioStem, FeatureStem, TokenStem

if TYPE_CHECKING:
    from specbeam.checkpoints.config import Config, Layer

DEFAULTS = {
    **{"norm": "rms", "activation": "silu", "gated_mlp": True, "mlp_norm": True, "embedding_scale": 1.0},
    **dict.fromkeys(("learned_positions", "parallel", "post_norms", "qkv_bias", "output_bias", "mlp_bias"), False),
    **dict.fromkeys(("qk_norm", "tied_head"), False),
    **dict.fromkeys(("attention_softcap", "logits_softcap", "bands", "encoder"), None),
}
"""The defaults of the fields of version 0.2."""


def description(config: Config) -> str:
    """The fields that differ from their defaults.

    Models whose layers all have the same attention and MLP are described by the fields of version 0.2, which had no
    parts. So receipts of that version hold.
    """
    flat = _flat(config)
    if flat is None:
        return json.dumps(_described(config), sort_keys=True)
    return json.dumps({k: v for k, v in flat.items() if k not in DEFAULTS or v != DEFAULTS[k]}, sort_keys=True)


def _described(value: Any) -> Any:
    """A dataclass as JSON: its name, and the fields that differ from their defaults."""
    if isinstance(value, tuple):
        return [_described(one) for one in value]
    if not is_dataclass(value):
        return value
    own = {f.name: getattr(value, f.name) for f in fields(value)}
    return {type(value).__name__: {f.name: _described(own[f.name]) for f in fields(value) if own[f.name] != f.default}}


def _flat(config: Config) -> dict[str, Any] | None:
    """All fields of version 0.2; None for a model that these cannot describe."""
    parts = {type(part): part for part in config.layers[0]}
    attention, mlp, stem = parts.get(Attention), parts.get(MLP), config.stem
    encoder = None if config.encoder is None else _flat(config.encoder)
    if not isinstance(attention, Attention) or not isinstance(mlp, MLP):
        return None
    if not config.final_norm or config.logits_scale != 1.0 or isinstance(stem, FeatureStem):
        return None
    if config.encoder is not None and encoder is None:
        return None
    heads = {name: getattr(attention, name) for name in ("num_heads", "num_kv_heads", "head_dim")}
    biases = {name: getattr(attention, name) for name in ("qkv_bias", "output_bias")}
    flat = {
        **{name: getattr(config, name) for name in ("architecture", "vocab_size", "hidden_size", "context_length")},
        **{name: getattr(config, name) for name in ("norm", "norm_eps", "logits_softcap", "tied_head")},
        **heads,
        **biases,
        "attention_scale": attention.scale,
        "attention_softcap": attention.softcap,
        "qk_norm": attention.qk_norm == "head",
        "post_norms": attention.output_norm,
        "intermediate_size": mlp.intermediate_size,
        "activation": mlp.activation,
        "gated_mlp": mlp.gated,
        "mlp_bias": mlp.bias,
        "parallel": mlp.parallel,
        "mlp_norm": mlp.norm,
        "embedding_scale": stem.scale if isinstance(stem, TokenStem) else 1.0,
        "learned_positions": isinstance(stem, AudioStem) or stem.learned_positions,
        "bands": stem.bands if isinstance(stem, AudioStem) else None,
        "encoder": encoder,
    }
    shared = {**heads, **biases, "scale": attention.scale, "softcap": attention.softcap}
    norms = {"output_norm": attention.output_norm}
    names = ("intermediate_size", "activation", "gated", "bias", "parallel", "norm")
    of_mlp: dict[str, Any] = norms | {name: getattr(mlp, name) for name in names}

    def described(layer: Layer) -> Layer:
        """A layer of a flat configuration."""
        own = next((part for part in layer if isinstance(part, Attention)), attention)
        return (
            Attention(rope=own.rope, window=own.window, qk_norm="head" if flat["qk_norm"] else None, **shared, **norms),
            *(() if config.encoder is None else (CrossAttention(**shared),)),
            MLP(**of_mlp),
        )

    if any(described(layer) != layer for layer in config.layers):
        return None
    attentions = (part for part in config.parts if isinstance(part, Attention))
    layers = [{"rope": None if a.rope is None else asdict(a.rope), "window": a.window} for a in attentions]
    return flat | {"layers": layers}
