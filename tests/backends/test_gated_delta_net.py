"""Gated DeltaNets, by Qwen3.5: as exact as float32 allows, and bit for bit whatever shares a pass.

transformers solves triangular systems in float32, which is less exact than the recurrence. So the measure is the
recurrence in float64. tests/backends/test_conformance.py has trees, beams and drafts of these models, and
tests/cases.py their requests.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import specbeam
from specbeam.cache.slots import Slots
from specbeam.core.tree import Tree
from tests.backends.test_conformance import FAMILIES
from tests.backends.test_short_convolution import LARGEST_PIECE, logits, sequences
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model

BORDER, LAG, KEPT = 16, 16, 32
"""As in native/linear_attention.h and native/states.h."""
LINEAR = [family for family, (architecture, _) in FAMILIES.items() if architecture == "qwen3_5"]


def silu(x):
    return x / (1 + np.exp(-x))


def delta_net(weights, config, x):
    """The layer of transformers in float64: x [n, hidden], all numbers as in its formulas."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    n, taps = len(x), config.linear_conv_kernel_dim
    padded = np.concatenate([np.zeros((taps - 1, len(weights("in_proj_qkv")))), x @ weights("in_proj_qkv").T])
    filters = weights("conv1d")[:, 0]
    mixed = silu(sum(padded[t : t + n] * filters[:, t] for t in range(taps)))
    q, k, v = np.split(mixed, [key_heads * key_dim, 2 * key_heads * key_dim], axis=1)
    q, k = (one.reshape(n, key_heads, key_dim) for one in (q, k))
    q, k = (one / np.sqrt(np.square(one).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
    q, k = (one.repeat(value_heads // key_heads, axis=1) for one in (q * key_dim**-0.5, k))
    v = v.reshape(n, value_heads, value_dim)
    beta = 1 / (1 + np.exp(-x @ weights("in_proj_b").T))
    decay = np.exp(-np.exp(weights("A_log")) * np.logaddexp(0, x @ weights("in_proj_a").T + weights("dt_bias")))
    state, out = np.zeros((value_heads, key_dim, value_dim)), np.empty((n, value_heads, value_dim))
    for t in range(n):
        state *= decay[t, :, None, None]
        u = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state += k[t, :, :, None] * u[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, q[t])
    out /= np.sqrt(np.square(out).mean(-1, keepdims=True) + config.rms_norm_eps)
    gate = silu(x @ weights("in_proj_z").T).reshape(out.shape)
    return (out * weights("norm") * gate).reshape(n, -1) @ weights("out_proj").T


def attention(weights, config, x):
    n, heads, head_dim = len(x), config.num_attention_heads, config.head_dim
    group = heads // config.num_key_value_heads

    def project(name):
        bias = weights(f"{name}_proj", "bias") if config.attention_bias else 0
        return (x @ weights(f"{name}_proj").T + bias).reshape(n, -1, head_dim)

    both = project("q").reshape(n, heads, 2, head_dim)
    q, gate, k, v = both[:, :, 0], both[:, :, 1], project("k"), project("v")
    q, k = (normed(one, weights(f"{name}_norm"), config) for one, name in ((q, "q"), (k, "k")))
    rotated = int(config.rope_parameters["partial_rotary_factor"] * head_dim)
    inverse = 1 / config.rope_parameters["rope_theta"] ** (np.arange(0, rotated, 2) / rotated)
    angles = np.concatenate([np.arange(n)[:, None] * inverse.astype(np.float32)] * 2, axis=1)[:, None]
    for one in (q, k):
        turned = one[..., :rotated]
        left, right = np.split(turned, 2, axis=-1)
        one[..., :rotated] = turned * np.cos(angles) + np.concatenate([-right, left], axis=-1) * np.sin(angles)
    scores = np.einsum("ihd,jhd->hij", q, k.repeat(group, axis=1)) * head_dim**-0.5
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    out = np.einsum("hij,jhd->ihd", shares, v.repeat(group, axis=1)) / (1 + np.exp(-gate))
    bias = weights("o_proj", "bias") if config.attention_bias else 0
    return out.reshape(n, -1) @ weights("o_proj").T + bias


def normed(x, weight, config):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + config.rms_norm_eps) * (1 + weight)


def in_float64(model, tokens):
    """The logits of a model of transformers, from its weights."""
    config, values = model.config, {name: tensor.double().numpy() for name, tensor in model.state_dict().items()}
    x = values["model.embed_tokens.weight"][tokens]
    for layer, kind in enumerate(config.layer_types):
        layer_of = f"model.layers.{layer}."
        own = {name: value for name, value in values.items() if name.startswith(layer_of)}

        def weights(name, of="weight", own=own):
            return next(value for one, value in own.items() if one.endswith((f".{name}.{of}", f".{name}")))

        mix = delta_net if kind == "linear_attention" else attention
        x = x + mix(weights, config, normed(x, values[f"{layer_of}input_layernorm.weight"], config))
        inner = normed(x, values[f"{layer_of}post_attention_layernorm.weight"], config)
        inner = silu(inner @ weights("gate_proj").T) * (inner @ weights("up_proj").T)
        x = x + inner @ weights("down_proj").T
    return normed(x, values["model.norm.weight"], config) @ values["lm_head.weight"].T


@pytest.mark.parametrize("family", LINEAR)
def test_logits_are_nearer_to_float64_than_those_of_transformers(save, tmp_path, family):
    architecture, changes = FAMILIES[family]
    model = random_model(architecture, **changes)
    folder = save(model)
    sources = [(folder, "cpu"), (folder, "torch")]
    if "layer_types" not in changes:
        sources.append((write_gguf(tmp_path / "m.gguf", model), "cpu"))
    models = [specbeam.load(source, backend=backend, device="cpu", dtype="float32") for source, backend in sources]
    for tokens in sequences()[:2]:
        expected = in_float64(model, tokens)
        with torch.no_grad():
            theirs = np.abs(model(torch.tensor([tokens])).logits[0].numpy() - expected)
        assert expected.std() > 0.5  # else closeness says nothing
        for lm in models:
            ours = np.abs(logits(lm, tokens) - expected)
            assert ours.max() <= theirs.max()
            assert np.median(ours) <= 2 * np.median(theirs)


@pytest.fixture(scope="module")
def folders(save):
    return {family: save(random_model(FAMILIES[family][0], **FAMILIES[family][1])) for family in LINEAR}


@pytest.mark.parametrize("quantize", ["float32", "int8", "int4"])
@pytest.mark.parametrize("family", LINEAR)
def test_the_pieces_in_which_a_prompt_is_read_change_no_bit(folders, family, quantize):
    """A piece may begin and end anywhere between two borders."""
    lm = specbeam.load(folders[family], backend="cpu", quantize=quantize)
    draw = random.Random(2)
    for number, tokens in enumerate(sequences()):
        pieces = [1, 1, 2]
        while sum(pieces) < len(tokens):
            pieces.append(draw.randint(1, LARGEST_PIECE if number else 3))
        assert logits(lm, tokens, pieces).tobytes() == logits(lm, tokens).tobytes()


def test_more_sequences_than_states_are_kept_change_no_bit(folders):
    """Each one needs a state of its own in each pass, and all of them meet the next border in one pass."""
    lm = specbeam.load(folders["qwen3_5"], backend="cpu", quantize="float32")
    length = 2 * BORDER + LAG + 3
    draw = np.random.default_rng(3)
    prompts = draw.integers(0, 256, (KEPT + 3, length)).tolist()
    places = [Slots(Tree(tokens), lm.backend) for tokens in prompts]
    rows, start = [], 0
    for stop in (BORDER + LAG + 1, length - 4, *range(length - 3, length + 1)):
        nodes = np.arange(start, stop)
        segments = [slots.tree_batch(nodes, np.array([len(nodes) - 1])) for slots in places]
        rows.append(np.array(lm.backend.forward(segments)))
        start = stop
    for number, tokens in enumerate(prompts):
        assert logits(lm, tokens)[-1].tobytes() == rows[-1][number].tobytes()


def test_branches_before_and_after_a_border_are_each_sequence_alone(folders):
    """Also where the nodes at a border differ, where states were made of another branch, and were forgotten."""
    lm = specbeam.load(folders["qwen3_5"], backend="cpu", quantize="float32")
    draw = np.random.default_rng(4)
    tree = Tree(draw.integers(0, 256, LAG + BORDER - 5).tolist())
    slots = Slots(tree, lm.backend)
    tips = np.array([tree.tip])
    for step in range(LAG + BORDER + 12):
        parents = np.repeat(tips, 2) if step in (0, 3, 9) else tips
        tips = np.array(tree.add(parents.tolist(), draw.integers(0, 256, len(parents)).tolist()))
        nodes = slots.missing(tips)
        found = np.array(lm.backend.forward([slots.tree_batch(nodes, np.flatnonzero(np.isin(nodes, tips)))]))
        if step % 5 == 0 or step > LAG:
            for tip, row in zip(tips.tolist(), found, strict=True):
                assert logits(lm, tree.tokens(tree.path(tip)).tolist())[-1].tobytes() == row.tobytes()
        if step == LAG + 6:  # the slots of half of the branches are free for others
            tips = tips[::2]
            tree.keep(tips.tolist())
            slots.free(tree.take_dropped())


def test_a_refused_pass_leaves_no_state(folders):
    """Its slots got other nodes, so the states at their borders are gone."""
    lm = specbeam.load(folders["qwen3_5"], backend="cpu", quantize="float32")
    tokens, others = sequences()[0][: 2 * BORDER + LAG + 1], sequences()[1][: 2 * BORDER + LAG + 1]
    slots = Slots(Tree(tokens), lm.backend)
    nodes = np.arange(len(tokens))
    batch = slots.tree_batch(nodes, nodes)
    lm.backend.forward([batch])
    twice = batch.slots.copy()
    twice[-1] = twice[-2]
    with pytest.raises(RuntimeError, match="two nodes have the same slot"):
        lm.backend.forward([replace(batch, tokens=np.array(others), slots=twice)])
    first = slots.tree_batch(nodes[:-1], nodes[:-1])
    lm.backend.forward([replace(first, tokens=np.array(others[:-1]))])
    last = slots.tree_batch(nodes[-1:], np.array([0]))
    row = lm.backend.forward([replace(last, tokens=np.array(others[-1:]))])
    assert np.array(row).tobytes() == logits(lm, others)[-1:].tobytes()
