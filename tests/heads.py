"""Draft heads with random weights, and what they compute by the formulas of their papers, in float64."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file


def add_mtp(folder, seed=0, spread=0.4):
    """Add a multi-token prediction head to a folder of a model, as Qwen3.5's folders have it."""
    file, draw = Path(folder) / "model.safetensors", np.random.default_rng(seed)
    tensors = load_file(file)
    hidden = json.loads((Path(folder) / "config.json").read_text())["hidden_size"]
    last = max(name for name in tensors if "self_attn" in name).partition("self_attn")[0]  # of fewer than 10 layers
    shapes = {"fc.weight": (hidden, 2 * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes |= {f"layers.0.{n.removeprefix(last)}": t.shape for n, t in tensors.items() if n.startswith(last)}
    head = {f"mtp.{name}": random(draw, name, shape, spread) for name, shape in shapes.items()}
    save_file(tensors | head, file, {"format": "pt"})
    return head


def write_eagle3(folder, target, seed=0, spread=0.4, tokens=None, **changes):
    """Write an EAGLE-3 head for the model of a folder.

    Args:
        tokens: of the rows of its logits; None for all tokens.
        changes: of config.json.
    """
    theirs, draw = json.loads((Path(target) / "config.json").read_text()), np.random.default_rng(seed)
    vocab, hidden, inner, heads, size = theirs["vocab_size"], theirs["hidden_size"], 40, 4, 8
    rows = vocab if tokens is None else len(tokens)
    config = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1},
        **{"vocab_size": vocab, "draft_vocab_size": rows, "hidden_size": hidden, "intermediate_size": inner},
        **{"num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": size, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 256, "rope_theta": 1000.0, "tie_word_embeddings": False, **changes},
    }
    shapes = {"fc": (hidden, 3 * hidden), "norm": (hidden,), "lm_head": (rows, hidden)}
    shapes |= {f"midlayer.{n}": (hidden,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    shapes |= {f"midlayer.self_attn.{n}_proj": (heads * size // (1 + (n != "q")), 2 * hidden) for n in "qkv"}
    shapes |= {"midlayer.self_attn.o_proj": (hidden, heads * size), "midlayer.mlp.down_proj": (hidden, inner)}
    shapes |= {f"midlayer.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    tensors = {f"{name}.weight": random(draw, name, shape, spread) for name, shape in shapes.items()}
    if tokens is not None:
        tensors["d2t"] = np.array(tokens, np.int64) - np.arange(rows)
        tensors["t2d"] = np.isin(np.arange(vocab), tokens)
    Path(folder).mkdir(exist_ok=True)
    (Path(folder) / "config.json").write_text(json.dumps(config))
    save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
    return tensors


def random(draw, name, shape, spread):
    values = draw.normal(0, spread, shape) if len(shape) > 1 else 1 + draw.normal(0, 0.2, shape)
    return values.astype(np.float32)
