"""Layers of parts: what they keep, what their parameters are, and which of them no model can have."""

from dataclasses import replace

import pytest

from specbeam import SpecbeamError
from specbeam.backends.cpu.library import library
from specbeam.backends.cpu.model import bytes_of_sequence
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.description import description
from specbeam.checkpoints.parameters import parameters, parts_by_parameter
from specbeam.checkpoints.parts.attention import Attention, CrossAttention
from specbeam.checkpoints.parts.mlp import MLP
from specbeam.checkpoints.parts.part import Parameter
from specbeam.checkpoints.parts.per_layer_embedding import PerLayerEmbedding
from specbeam.checkpoints.parts.short_convolution import ShortConvolution
from specbeam.checkpoints.rope import Rope
from specbeam.checkpoints.stems import AudioStem, TokenStem

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.5}
ATTENTION, CROSS, CONVOLUTION = Attention(**HEADS), CrossAttention(**HEADS), ShortConvolution(kernel_size=3)
WIDE = MLP(intermediate_size=48)


def config(*layers, **others):
    sizes = {"architecture": "llama", "vocab_size": 100, "hidden_size": 32, "context_length": 64, "norm_eps": 1e-5}
    return Config(layers=layers, **sizes | others)


ENCODER = config((ATTENTION, WIDE), stem=AudioStem(bands=8))


def test_parts_have_their_own_numbers():
    other = Attention(num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0, window=8)
    mixed = config((ATTENTION, WIDE), (other, MLP(intermediate_size=16)), (CONVOLUTION, WIDE))
    described = parameters(mixed)
    assert described["blocks.0.attention.qkv.weight"] == Parameter((64, 32), (32, 16, 16), 4)
    assert described["blocks.1.attention.qkv.weight"] == Parameter((64, 32), (32, 16, 16), 4)
    assert described["blocks.1.mlp.gate_up.weight"] == Parameter((32, 32), (16, 16), 4)
    assert described["blocks.2.short_convolution.filter.weight"] == Parameter((32, 3), (), 32)
    assert described["embedding.weight"].min_bits == described["head.weight"].min_bits == 8
    assert [(m.numbers, m.reach) for m in mixed.memories] == [(32, None), (32, 8), (32, 3)]
    assert parts_by_parameter(mixed)["blocks.1.mlp.down.weight"].intermediate_size == 16


SLIDING = replace(ATTENTION, window=8, qk_norm="head")


def test_an_attention_that_reads_the_keys_of_an_earlier_layer_keeps_nothing():
    own = [(SLIDING, WIDE), (replace(ATTENTION, keys_are_values=True), WIDE)]
    reading = [(replace(SLIDING, shares_keys_of=0), WIDE), (replace(ATTENTION, shares_keys_of=1), WIDE)]
    both = config(*own, *reading)
    assert both.memories == config(*own).memories
    for integers in (True, False):
        sizes = [bytes_of_sequence(library(), one, integers, 1) for one in (both, config(*own), config(own[0]))]
        assert sizes[0] == sizes[1] == 2 * sizes[2]
    shapes = {name: one.shape for name, one in parameters(both).items() if ".attention." in name}
    assert {name.removeprefix("blocks.2.attention.") for name in shapes if "blocks.2." in name} == {
        *("query.weight", "output.weight", "q_norm.weight")
    }
    assert shapes["blocks.1.attention.query_key.weight"] == (48, 32)
    assert shapes["blocks.3.attention.query.weight"] == (32, 32)


def test_layers_with_embeddings_of_their_own_have_them_in_one_table_that_stays_in_its_file():
    own = PerLayerEmbedding(size=6, norm=False, output_norm=True, sum_scale=True)
    described = parameters(config((ATTENTION, WIDE, own), (ATTENTION, WIDE), (ATTENTION, WIDE, own)))
    assert described["per_layer_embedding.weight"] == Parameter((100, 18), min_bits=8, mapped=True)
    assert {name for name, one in described.items() if one.mapped} == {"per_layer_embedding.weight"}
    assert described["per_layer_projection.weight"].shape == (18, 32)
    assert described["blocks.2.per_layer_embedding_sum_scale.weight"].shape == (1,)
    assert not any("per_layer" in name for name in parameters(config((ATTENTION, WIDE))))


def test_the_window_is_the_farthest_reach_of_all_parts():
    sliding = replace(ATTENTION, window=8)
    assert config((sliding, WIDE), (CONVOLUTION, WIDE)).window == 8
    assert config((sliding, WIDE), (ATTENTION, WIDE)).window is None
    assert config((sliding, CROSS, WIDE), encoder=ENCODER).window == 8  # the encoder's output is no memory of tokens


def test_a_parameter_comes_once_and_in_the_order_of_the_parts():
    normed = replace(ATTENTION, output_norm=True, qk_norm="head", qkv_bias=True)
    parallel = replace(WIDE, norm=False, parallel=True, gated=False, bias=True)
    described = parameters(config((normed, parallel), norm="layer", tied_head=True, stem=TokenStem()))
    ends = [name.removeprefix("blocks.0.") for name in described if name.startswith("blocks")]
    both = [f"{module}.{kind}" for module in ("q_norm", "k_norm") for kind in ("weight", "bias")]
    assert ends == [
        *("attention_norm.weight", "attention_norm.bias", "attention.qkv.weight", "attention.qkv.bias"),
        *("attention.output.weight", *(f"attention.{name}" for name in both)),
        *("post_attention_norm.weight", "post_attention_norm.bias"),
        *("mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias"),
    ]


def test_norms_may_be_before_a_part_after_it_and_of_the_sum():
    after = replace(ATTENTION, norm=False, output_norm=True, qk_norm="all")
    described = parameters(config((after, replace(WIDE, norm=False, sum_norm=True)), final_norm=False))
    norms = {name.removeprefix("blocks.0."): one.shape for name, one in described.items() if "norm" in name}
    assert norms == {
        **{"attention.q_norm.weight": (32,), "attention.k_norm.weight": (16,)},
        **{"post_attention_norm.weight": (32,), "mlp_sum_norm.weight": (32,)},
    }


def test_a_description_is_equal_for_equal_models_alone():
    one, same = config((ATTENTION, WIDE)), config((Attention(**HEADS, window=None), MLP(intermediate_size=48)))
    assert description(one) == description(same)
    others = [
        config((replace(ATTENTION, window=8), WIDE)),
        config((ATTENTION, replace(WIDE, bias=True))),
        config((CONVOLUTION, WIDE)),
        config((replace(ATTENTION, rope=Rope(1e4, 8)), WIDE)),
        config((ATTENTION, WIDE), stem=TokenStem(scale=2.0)),
        config((ATTENTION, WIDE), encoder=ENCODER),
        config((ATTENTION, WIDE), encoder=replace(ENCODER, final_norm=False)),
        config((ATTENTION, WIDE), final_norm=False),
        config((replace(ATTENTION, qk_norm="head"), WIDE)),
        config((replace(ATTENTION, qk_norm="all"), WIDE)),
        config((replace(ATTENTION, qk_norm="rotated_head"), WIDE)),
        config((ATTENTION, replace(WIDE, norm=False))),
        config((ATTENTION, replace(WIDE, sum_norm=True))),
        config((ATTENTION, replace(WIDE, sum_scale=True))),
        config((replace(ATTENTION, value_norm=True), WIDE)),
        config((replace(ATTENTION, keys_are_values=True), WIDE)),
        config((ATTENTION, WIDE), (replace(ATTENTION, shares_keys_of=0), WIDE)),
        config((ATTENTION, WIDE, PerLayerEmbedding(size=6))),
        config((ATTENTION, replace(WIDE, output_scale=0.5))),
        config((ATTENTION, WIDE), logits_scale=0.5),
    ]
    assert len({description(one), *map(description, others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: config(()), "a layer without parts"),
        (lambda: config((replace(WIDE, parallel=True),)), "a layer that begins with a parallel mlp"),
        (lambda: config((ATTENTION, CROSS, WIDE)), "cross-attention, but no encoder"),
        (lambda: config((WIDE, CROSS), encoder=ENCODER), "does not follow an attention"),
        (lambda: config((ATTENTION, replace(CROSS, num_kv_heads=4)), encoder=ENCODER), "does not follow an attention"),
        (lambda: replace(ATTENTION, num_heads=0), "num_heads = 0, which is no size"),
        (lambda: replace(ATTENTION, num_kv_heads=3), "4 heads and 3 key-value heads"),
        (lambda: replace(ATTENTION, head_dim=2**17), "head_dim = 131072, which is no size"),
        (lambda: replace(ATTENTION, window=0), "sliding_window = 0, which is no size"),
        (lambda: replace(ATTENTION, scale=0.0), "the number 0.0 for its norms"),
        (lambda: replace(ATTENTION, rope=Rope(1e4, 16)), "rotates more features of a head than it has"),
        (lambda: replace(WIDE, intermediate_size=-1), "intermediate_size = -1, which is no size"),
        (lambda: config((replace(ATTENTION, shares_keys_of=0), WIDE)), "layer 0 read the keys of layer 0"),
        (lambda: config((ATTENTION,), (replace(ATTENTION, shares_keys_of=2),)), "layer 1 read the keys of layer 2"),
        (lambda: config((ATTENTION,), (replace(SLIDING, shares_keys_of=0),)), "no earlier layer .* of the same size"),
        (
            lambda: config((ATTENTION,), *[(replace(ATTENTION, shares_keys_of=i),) for i in (0, 1)]),
            "layer 2 read the keys of layer 1, which is no earlier layer with keys and values of its own",
        ),
        (lambda: config(*[(PerLayerEmbedding(size=i),) for i in (6, 7)]), "embeddings of 6 numbers, and others .* 7"),
        (lambda: PerLayerEmbedding(size=0), "hidden_size_per_layer_input = 0, which is no size"),
        (lambda: ShortConvolution(kernel_size=17), "kernel_size = 17, which is no size"),
        (lambda: AudioStem(bands=0), "num_mel_bins = 0, which is no size"),
    ],
)
def test_what_no_model_can_have_is_refused(make, says):
    with pytest.raises(SpecbeamError, match=says):
        make()


OF_VERSION_0_2 = (
    '{"architecture": "llama", "attention_scale": 0.5, "context_length": 64, "head_dim": 8, "hidden_size": 32, '
    '"intermediate_size": 48, "layers": [{"rope": {"dim": 8, "divisors": null, "scale": 1.0, "theta": 10000.0}, '
    '"window": 8}, {"rope": {"dim": 8, "divisors": null, "scale": 1.0, "theta": 10000.0}, "window": null}], '
    '"norm_eps": 1e-05, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 100}'
)
ENCODER_OF_VERSION_0_2 = (
    '"encoder": {"activation": "silu", "architecture": "llama", "attention_scale": 0.5, "attention_softcap": null, '
    '"bands": 8, "context_length": 64, "embedding_scale": 1.0, "encoder": null, "gated_mlp": false, "head_dim": 8, '
    '"hidden_size": 32, "intermediate_size": 48, "layers": [{"rope": null, "window": null}], "learned_positions": '
    'true, "logits_softcap": null, "mlp_bias": false, "mlp_norm": true, "norm": "layer", "norm_eps": 1e-05, '
    '"num_heads": 4, "num_kv_heads": 2, "output_bias": false, "parallel": false, "post_norms": false, "qk_norm": '
    'false, "qkv_bias": false, "tied_head": false, "vocab_size": 100}'
)
"""As the version before parts wrote them (commit c4a0872e). Receipts of that version have digests of them."""


def test_descriptions_of_models_that_version_0_2_had_are_as_they_were():
    rope = Rope(1e4, 8)
    rotated = [(replace(ATTENTION, rope=rope, window=window), WIDE) for window in (8, None)]
    assert description(config(*rotated)) == OF_VERSION_0_2
    plain = replace(WIDE, gated=False)
    encoder = config((ATTENTION, plain), norm="layer", stem=AudioStem(bands=8))
    stem = TokenStem(learned_positions=True)
    whole = config((ATTENTION, CROSS, plain), norm="layer", stem=stem, encoder=encoder)
    assert ENCODER_OF_VERSION_0_2 in description(whole)


@pytest.mark.parametrize(
    "layers",
    [
        [(ATTENTION, WIDE), (replace(ATTENTION, scale=0.25), WIDE)],
        [(ATTENTION, WIDE), (ATTENTION, replace(WIDE, intermediate_size=16))],
        [(ATTENTION, replace(WIDE, output_norm=True))],
        [(ATTENTION,)],
    ],
)
def test_descriptions_of_other_models_have_their_parts(layers):
    assert '"Attention"' in description(config(*layers))
