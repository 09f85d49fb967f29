"""Whisper (Radford et al. 2022): an encoder reads 30 seconds of audio, and a decoder writes what was said."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.architecture import Architecture, Usual, require_whole_heads
from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.parts.attention import Attention, CrossAttention
from specbeam.checkpoints.parts.mlp import MLP
from specbeam.checkpoints.parts.part import size
from specbeam.checkpoints.stems import AudioStem, TokenStem

NORM_EPS = 1e-5
"""Of all norms: PyTorch's default. No configuration says it."""


class Whisper(Architecture):
    """Whisper. Norms come before attention and MLP, and all positions are tables, the encoder's sinusoids too."""

    name = "whisper"
    gguf_name = None
    tokenizer_class = "WhisperTokenizer"
    attention: ClassVar = {"qkv_bias": True, "output_bias": True}
    mlp: ClassVar = {"gated": False, "bias": True}
    features: ClassVar = {"norm": "layer", "stem": TokenStem(learned_positions=True)}
    older_names: ClassVar = {
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",  # transformers means the encoder's, too
    }
    keys: ClassVar = {
        "activation_function": (str, "gelu"),
        "decoder_attention_heads": (int, 6),
        "decoder_ffn_dim": (int, 1536),
        "decoder_layers": (int, 4),
        "encoder_ffn_dim": (int, 1536),
        "max_position_embeddings": (object, None),  # Whisper has other names for it
        "max_source_positions": (int, 1500),
        "max_target_positions": (int, 448),
        "num_mel_bins": (int, 80),
        "tie_word_embeddings": (bool, True),
    }
    folder_tensors: ClassVar = {
        "embedding": "model.decoder.embed_tokens",
        "positions": "model.decoder.embed_positions",
        "blocks.N.attention_norm": "model.decoder.layers.N.self_attn_layer_norm",
        "blocks.N.attention.qkv": "model.decoder.layers.N.self_attn.{q,k,v}_proj",
        "blocks.N.attention.output": "model.decoder.layers.N.self_attn.out_proj",
        "blocks.N.cross_attention_norm": "model.decoder.layers.N.encoder_attn_layer_norm",
        "blocks.N.cross_attention.query": "model.decoder.layers.N.encoder_attn.q_proj",
        "blocks.N.cross_attention.key_value": "model.decoder.layers.N.encoder_attn.{k,v}_proj",
        "blocks.N.cross_attention.output": "model.decoder.layers.N.encoder_attn.out_proj",
        "blocks.N.mlp_norm": "model.decoder.layers.N.final_layer_norm",
        "blocks.N.mlp.up": "model.decoder.layers.N.fc1",
        "blocks.N.mlp.down": "model.decoder.layers.N.fc2",
        "norm": "model.decoder.layer_norm",
        "head": "proj_out",
        "encoder.conv1": "model.encoder.conv1",
        "encoder.conv2": "model.encoder.conv2",
        "encoder.positions": "model.encoder.embed_positions",
        "encoder.blocks.N.attention_norm": "model.encoder.layers.N.self_attn_layer_norm",
        "encoder.blocks.N.attention.qkv": "model.encoder.layers.N.self_attn.{q,k,v}_proj",
        "encoder.blocks.N.attention.output": "model.encoder.layers.N.self_attn.out_proj",
        "encoder.blocks.N.mlp_norm": "model.encoder.layers.N.final_layer_norm",
        "encoder.blocks.N.mlp.up": "model.encoder.layers.N.fc1",
        "encoder.blocks.N.mlp.down": "model.encoder.layers.N.fc2",
        "encoder.norm": "model.encoder.layer_norm",
    }
    folder_zeros = ("k_proj.bias",)
    ctranslate2_spec = "WhisperSpec"
    ctranslate2_revision = 3
    ctranslate2_tensors: ClassVar = {
        "embedding": "decoder/embeddings",
        "positions": "decoder/position_encodings",
        "blocks.N.attention_norm": "decoder/layer_N/self_attention/layer_norm",
        "blocks.N.attention.qkv": "decoder/layer_N/self_attention/linear_0",
        "blocks.N.attention.output": "decoder/layer_N/self_attention/linear_1",
        "blocks.N.cross_attention_norm": "decoder/layer_N/attention/layer_norm",
        "blocks.N.cross_attention.query": "decoder/layer_N/attention/linear_0",
        "blocks.N.cross_attention.key_value": "decoder/layer_N/attention/linear_1",
        "blocks.N.cross_attention.output": "decoder/layer_N/attention/linear_2",
        "blocks.N.mlp_norm": "decoder/layer_N/ffn/layer_norm",
        "blocks.N.mlp.up": "decoder/layer_N/ffn/linear_0",
        "blocks.N.mlp.down": "decoder/layer_N/ffn/linear_1",
        "norm": "decoder/layer_norm",
        "head": "decoder/projection",
        "encoder.conv1": "encoder/conv1",
        "encoder.conv2": "encoder/conv2",
        "encoder.positions": "encoder/position_encodings",
        "encoder.blocks.N.attention_norm": "encoder/layer_N/self_attention/layer_norm",
        "encoder.blocks.N.attention.qkv": "encoder/layer_N/self_attention/linear_0",
        "encoder.blocks.N.attention.output": "encoder/layer_N/self_attention/linear_1",
        "encoder.blocks.N.mlp_norm": "encoder/layer_N/ffn/layer_norm",
        "encoder.blocks.N.mlp.up": "encoder/layer_N/ffn/linear_0",
        "encoder.blocks.N.mlp.down": "encoder/layer_N/ffn/linear_1",
        "encoder.norm": "encoder/layer_norm",
    }
    ctranslate2_ignored = ("decoder/alignment_heads",)
    ctranslate2_numbers: ClassVar = {
        "encoder/num_heads": None,
        "decoder/num_heads": None,
        "decoder/activation": 3,  # GELU
        "decoder/pre_norm": 1,
        "decoder/alibi": 0,
        "decoder/alibi_use_positive_positions": 0,
        "decoder/scale_alibi": 0,
        "decoder/scale_embeddings": 0,
        "decoder/start_from_zero_embedding": 0,
        "decoder/alignment_heads": None,
        "decoder/alignment_layer": None,
    }

    def derive(self, keys: SimpleNamespace) -> None:
        """Nothing follows from other keys."""

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        """A layer of the encoder: see ``older_names``."""
        return usual.attention(), usual.mlp(intermediate_size=keys.encoder_ffn_dim)

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        encoder = replace(
            config,
            norm_eps=NORM_EPS,
            context_length=keys.max_source_positions,
            stem=AudioStem(bands=size("num_mel_bins", keys.num_mel_bins)),
        )
        number = size("decoder_attention_heads", keys.decoder_attention_heads)
        for heads in (keys.num_attention_heads, number):
            require_whole_heads(SimpleNamespace(hidden_size=config.hidden_size, num_attention_heads=heads))
        head_dim = config.hidden_size // number
        own = {"num_heads": number, "num_kv_heads": number, "head_dim": head_dim, "scale": head_dim**-0.5}
        attention, cross = Attention(**own, **self.attention), CrossAttention(**own, **self.attention)
        mlp = config.layers[0][1]
        assert isinstance(mlp, MLP)
        layer = attention, cross, replace(mlp, intermediate_size=keys.decoder_ffn_dim)
        return replace(
            encoder,
            layers=(layer,) * size("decoder_layers", keys.decoder_layers),
            context_length=keys.max_target_positions,
            stem=config.stem,
            encoder=encoder,
        )

    def keys_of_ctranslate2(
        self, shape: Callable[[str, int], tuple[int, ...]], numbers: Mapping[str, float], names: Iterable[str]
    ) -> dict[str, Any]:
        vocab_size, hidden = shape("decoder/embeddings/weight", 2)
        keys = {"vocab_size": vocab_size, "d_model": hidden, "num_mel_bins": shape("encoder/conv1/weight", 3)[1]}
        for part, positions in (("encoder", "max_source_positions"), ("decoder", "max_target_positions")):
            numbered = {int(m[1]) for name in names if (m := re.match(rf"{part}/layer_(\d{{1,9}})/", name))}
            keys |= {
                positions: shape(f"{part}/position_encodings/encodings", 2)[0],
                f"{part}_layers": len(numbered),
                f"{part}_attention_heads": int(numbers[f"{part}/num_heads"]),
                f"{part}_ffn_dim": shape(f"{part}/layer_0/ffn/linear_0/weight", 2)[0],
            }
        return keys

    def folder_values(self, source: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        return values.swapaxes(1, 2) if values.ndim == 3 else values  # filters are frame by frame


ARCHITECTURES = (Whisper(),)
