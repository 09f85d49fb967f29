"""Files of tiny models and tokenizers, written without PyTorch and transformers."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

WEIGHTS = 2
"""The seed of written models. With others, beams may end elsewhere than the tests expect."""
LLAMA_KEYS = {
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "initializer_range",
    "eos_token_id",
    "bos_token_id",
    "tie_word_embeddings",
}


class WrittenTokenizer:
    """The files of a tokenizer, without transformers."""

    def __init__(self, backend, chat_template, named):
        self._backend, self._template, self._named = backend, chat_template, named

    def save_pretrained(self, folder):
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        described = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._named
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
        if self._template is not None:
            (folder / "chat_template.jinja").write_text(self._template)

    def __getattr__(self, name):
        pytest.skip(f"needs transformers: {name} of its tokenizer")


class WrittenModel:
    """The files of a Llama with random weights, made without PyTorch. Tests that look into the model are skipped."""

    def __init__(self, architecture, sizes, seed):
        sizes = {"model_type": "llama"} | sizes
        if architecture != "llama" or not {*sizes} <= LLAMA_KEYS:
            pytest.skip("needs PyTorch: without it, NumPy writes models of Llama's architecture alone")
        self.config = SimpleNamespace(**sizes, is_encoder_decoder=False)
        self._sizes, self._seed = sizes, seed

    def save_pretrained(self, folder, **how):
        if how:
            pytest.skip(f"needs transformers: files with {how}")
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        config, draw = self.config, np.random.default_rng([WEIGHTS, self._seed])
        hidden, inner = config.hidden_size, config.intermediate_size
        head = hidden // config.num_attention_heads
        of_layer = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (config.num_key_value_heads * head, hidden),
            "self_attn.v_proj": (config.num_key_value_heads * head, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes = {"model.embed_tokens": (config.vocab_size, hidden), "model.norm": (hidden,)}
        for i in range(config.num_hidden_layers):
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
        if not config.tie_word_embeddings:
            shapes["lm_head"] = (config.vocab_size, hidden)
        spread = config.initializer_range
        tensors = {
            f"{name}.weight": draw.normal(0, spread, shape) if len(shape) == 2 else draw.normal(1, 0.2, shape)
            for name, shape in shapes.items()
        }
        save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, folder / "model.safetensors")
        described = {"architectures": ["LlamaForCausalLM"]} | self._sizes
        (folder / "config.json").write_text(json.dumps(described))
        ends = {key: self._sizes[key] for key in ("bos_token_id", "eos_token_id")}
        (folder / "generation_config.json").write_text(json.dumps(ends))

    def __getattr__(self, name):
        pytest.skip(f"needs PyTorch: {name} of a model")
