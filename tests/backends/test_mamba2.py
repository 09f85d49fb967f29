"""Mamba 2: against a recurrence in float64, and bit for bit whatever the pieces of a prompt are.

tests/backends/test_conformance.py has the trees, beams and drafts of these models, and tests/cases.py their requests.
"""

import random

import numpy as np
import pytest
import torch

import specbeam
from specbeam.checkpoints.parts.mamba2 import Mamba2
from specbeam.errors import SpecbeamError
from tests.backends.test_conformance import FAMILIES
from tests.backends.test_short_convolution import logits, sequences
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model

MAMBAS = [family for family, (name, _) in FAMILIES.items() if name in ("granitemoehybrid", "falcon_h1", "nemotron_h")]
ONE_EACH = ["granitemoehybrid", "falcon_h1, normed", "nemotron_h"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def mamba2(x, weights, c):
    """The outputs of a layer, [n, hidden] from [n, hidden], node by node as in the paper."""
    inner, keys = c.mamba_expand * c.hidden_size, c.mamba_n_groups * c.mamba_d_state
    z, mixed, dt = np.split(x @ weights["in_proj.weight"].T, [inner, 2 * inner + 2 * keys], axis=1)
    filters = weights["conv1d.weight"][:, 0]
    padded = np.concatenate([np.zeros((c.mamba_d_conv - 1, mixed.shape[1])), mixed])
    mixed = sum(padded[k : k + len(x)] * filters[:, k] for k in range(c.mamba_d_conv)) + weights["conv1d.bias"]
    values, b, q = np.split(mixed * sigmoid(mixed), [inner, inner + keys], axis=1)
    dt = np.clip(np.logaddexp(0, dt + weights["dt_bias"]), *c.time_step_limit)
    state, out = np.zeros((c.mamba_n_heads, c.mamba_d_state, c.mamba_d_head)), []
    for i in range(len(x)):
        heads = values[i].reshape(c.mamba_n_heads, -1)
        own = [
            np.repeat(one[i].reshape(c.mamba_n_groups, -1), c.mamba_n_heads // c.mamba_n_groups, 0) for one in (b, q)
        ]
        decay = np.exp(-np.exp(weights["A_log"]) * dt[i])[:, None, None]
        state = decay * state + own[0][:, :, None] * (dt[i][:, None] * heads)[:, None]
        out.append((np.einsum("hkv,hk->hv", state, own[1]) + weights["D"][:, None] * heads).ravel())
    gated = (np.array(out) * z * sigmoid(z)).reshape(len(x), c.mamba_n_groups, -1)
    weight = weights["norm.weight"].reshape(c.mamba_n_groups, -1)
    return rms_norm(gated, weight, c.rms_norm_eps).reshape(len(x), inner) @ weights["out_proj.weight"].T


def granite(model, tokens):
    """Logits of a Granite 4 H whose layers all have Mamba 2, in float64."""
    c, weights = model.config, {name: np.asarray(w, np.float64) for name, w in model.state_dict().items()}
    x = weights["model.embed_tokens.weight"][tokens] * c.embedding_multiplier
    for number in range(c.num_hidden_layers):
        layer = f"model.layers.{number}."
        own = {name.removeprefix(f"{layer}mamba."): w for name, w in weights.items() if name.startswith(layer)}
        normed = rms_norm(x, own[f"{layer}input_layernorm.weight"], c.rms_norm_eps)
        x = x + c.residual_multiplier * mamba2(normed, own, c)
        normed = rms_norm(x, own[f"{layer}post_attention_layernorm.weight"], c.rms_norm_eps)
        gate, up = np.split(normed @ own[f"{layer}shared_mlp.input_linear.weight"].T, 2, axis=1)
        x = x + c.residual_multiplier * (gate * sigmoid(gate) * up) @ own[f"{layer}shared_mlp.output_linear.weight"].T
    return rms_norm(x, weights["model.norm.weight"], c.rms_norm_eps) @ weights["lm_head.weight"].T / c.logits_scaling


@pytest.mark.parametrize("limits", [[0.0, float("inf")], [0.5, 1.5]])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_logits_are_those_of_a_recurrence_in_float64(save, backend, limits):
    """transformers has the limits of dt in a prompt, and drops them in the steps after it."""
    changes = {"layer_types": ["linear_attention"] * 3, "time_step_limit": limits}
    model = random_model("granitemoehybrid", **changes)
    lm = specbeam.load(save(model), backend=backend, dtype="float32")
    for tokens in sequences():
        expected = granite(model, tokens)
        assert expected.std() > 0.5  # else closeness says nothing
        assert np.abs(logits(lm, tokens) - expected).max() < 1e-4


@pytest.mark.parametrize("family", MAMBAS)
def test_logits_are_within_1e_4_of_the_logits_of_transformers(save, family):
    architecture, changes = FAMILIES[family]
    model = random_model(architecture, **changes)
    lm = specbeam.load(save(model), backend="cpu", quantize="float32")
    for tokens in sequences():
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0].numpy()
        assert np.abs(logits(lm, tokens) - expected).max() < 1e-4


@pytest.mark.parametrize("quantize", ["float32", "int8"])
@pytest.mark.parametrize("family", ONE_EACH)
def test_the_pieces_in_which_a_prompt_is_read_change_no_bit(save, family, quantize):
    """A piece may be shorter than a filter, may begin anywhere, and may have no border of states or several."""
    architecture, changes = FAMILIES[family]
    lm = specbeam.load(save(random_model(architecture, **changes)), backend="cpu", quantize=quantize)
    draw = random.Random(2)
    for tokens in sequences():
        pieces = [1, 1, 2]
        while sum(pieces) < len(tokens):
            pieces.append(draw.randint(1, 70))
        assert logits(lm, tokens, pieces).tobytes() == logits(lm, tokens).tobytes()


@pytest.mark.parametrize("family", ["granitemoehybrid", "nemotron_h"])
def test_a_gguf_file_has_the_bits_of_its_folder(save, tmp_path, family):
    """Falcon-H1's weights have its multipliers in them, so they have other bits."""
    architecture, changes = FAMILIES[family]
    model = random_model(architecture, **changes)
    folder = specbeam.load(save(model), backend="cpu", quantize="float32")
    file = specbeam.load(write_gguf(tmp_path / "m.gguf", model), backend="cpu", quantize="float32")
    tokens = sequences()[0]
    assert logits(file, tokens).tobytes() == logits(folder, tokens).tobytes()


SIZES = {"num_heads": 4, "head_dim": 16, "num_groups": 2, "state_size": 32, "kernel_size": 4}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"head_dim": 24}, "head_dim = 24 for Mamba 2: it must be a multiple of 16"),
        ({"state_size": 0}, "state_size = 0, which is no size"),
        ({"num_groups": 3}, "4 heads and 3 groups of Mamba 2"),
        ({"kernel_size": 17}, "kernel_size = 17, which is no size"),
        ({"min_step": -1.0}, "has the number -1.0"),
    ],
)
def test_wrong_numbers_are_refused(changes, says):
    with pytest.raises(SpecbeamError, match=says):
        Mamba2(**SIZES | changes)
