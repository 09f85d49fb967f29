"""The conformance suite: every backend computes what transformers computes from the same weights."""

from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam.backends.devices import choose_device
from specbeam.cache.slots import Slots
from specbeam.core.tree import Tree
from specbeam.errors import SpecbeamError
from tests.conftest import (
    ALPHA,
    LLAMA3_ROPE,
    LONGROPE,
    YARN,
    assert_are_beams_of_transformers,
    beams_of_transformers,
    examples,
    in_thorough_mode,
    random_model,
)

BACKENDS = ["torch", "cpu", "transformers", "transformers, eager"]

LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
TWO_ROPES = {"full_attention": LINEAR_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
SOME_SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
GEMMA4 = {"sliding_window": 5, "final_logit_softcapping": 6.0}
PER_LAYER = {
    **GEMMA4,
    **{"num_hidden_layers": 6, "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "num_key_value_heads": 1},
    "hidden_size_per_layer_input": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
}
KEYS_ARE_VALUES = {
    **GEMMA4,
    **{"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
LINEAR_FIRST_AND_LAST = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
EXPERTS_BESIDE = {
    **KEYS_ARE_VALUES,
    **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, head_dim apart": ("llama", {"head_dim": 24}),
    "llama, one key head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama 3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR_ROPE}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen2, some layers sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "mistral, sliding window": ("mistral", {"sliding_window": 5}),
    "ministral3": ("ministral3", {}),
    "ministral3, sliding window": ("ministral3", {"sliding_window": 5, "num_key_value_heads": 4}),
    "gpt2": ("gpt2", {}),
    "gpt2, own width": ("gpt2", {"n_inner": 40, "activation_function": "gelu", "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, one after the other": ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    "stablelm": ("stablelm", {}),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "phi3": ("phi3", {"sliding_window": 5}),
    "phi3, longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "gemma2": ("gemma2", {"sliding_window": 5, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0}),
    "gemma2, another activation": ("gemma2", {"hidden_activation": "silu"}),
    "gemma3": ("gemma3", SOME_SLIDING),
    "olmo2": ("olmo2", {}),
    "olmo2, biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", SOME_SLIDING),
    "olmo3, yarn": ("olmo3", {**SOME_SLIDING, "rope_parameters": TWO_ROPES | {"full_attention": YARN}}),
    "hunyuan": ("hunyuan_v1_dense", {"rope_parameters": ALPHA}),
    "hunyuan, biases": ("hunyuan_v1_dense", {"attention_bias": True, "head_dim": 12, "tie_word_embeddings": True}),
    "granite": ("granite", {}),
    "granite, biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granitemoe": ("granitemoe", {"attention_bias": True, "tie_word_embeddings": True}),
    "granitemoeshared": ("granitemoeshared", {}),
    "glm": ("glm", {"attention_bias": False}),
    "glm4": ("glm4", {}),
    "exaone4": ("exaone4", SOME_SLIDING),
    "exaone4, no windows": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3, "rope_parameters": LLAMA3_ROPE},
    ),
    "ernie4_5": ("ernie4_5", {"use_bias": True}),
    "seed_oss": ("seed_oss", {}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "cohere2": ("cohere2", SOME_SLIDING | {"tie_word_embeddings": True}),
    "lfm2": ("lfm2", {}),
    "lfm2, convolutions first and last": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_hidden_layers": 4},
    ),
    "lfm2, wide filters": ("lfm2", {"conv_L_cache": 5, "tie_word_embeddings": True}),
    "lfm2, rounded width": (
        "lfm2",
        {
            **{"intermediate_size": 70, "block_auto_adjust_ff_dim": True},
            **{"block_ffn_dim_multiplier": 1.25, "block_multiple_of": 16},
        },
    ),
    "qwen3_5": ("qwen3_5", {}),
    "qwen3_5, linear attention first and last": (
        "qwen3_5",
        {
            **{"num_hidden_layers": 4, "layer_types": LINEAR_FIRST_AND_LAST, "attention_bias": True},
            **{"linear_conv_kernel_dim": 3, "linear_num_value_heads": 6, "linear_value_head_dim": 16},
        },
    ),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid, experts, one group": (
        "granitemoehybrid",
        {
            **{"num_local_experts": 8, "num_experts_per_tok": 3, "shared_intermediate_size": 20},
            **{"mamba_n_groups": 1, "mamba_d_conv": 3, "mamba_conv_bias": False},
        },
    ),
    "granitemoehybrid, rope": (
        "granitemoehybrid",
        {"position_embedding_type": "rope", "num_hidden_layers": 4, "layer_types": LINEAR_FIRST_AND_LAST},
    ),
    "falcon_h1": ("falcon_h1", {}),
    "falcon_h1, normed": (
        "falcon_h1",
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "head_dim": 12, "tie_word_embeddings": True},
    ),
    "falcon_h1, normed before the gate": ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 1}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h, biases": (
        "nemotron_h",
        {
            **{"mlp_bias": True, "use_conv_bias": False, "n_groups": 1},
            "layers_block_type": ["full_attention", "linear_attention", "linear_attention", "mlp"],
        },
    ),
    "gemma4": ("gemma4", PER_LAYER),
    "gemma4, keys are values": ("gemma4", KEYS_ARE_VALUES),
    "gemma4_unified, tied": ("gemma4_unified", KEYS_ARE_VALUES | {"tie_word_embeddings": True}),
    "gemma4, experts": ("gemma4", EXPERTS_BESIDE),
    "gemma4, experts and embeddings for each layer": ("gemma4", EXPERTS_BESIDE | PER_LAYER),
    "qwen2_moe": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2_moe, some layers": ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, biases": ("glm4_moe", {"use_qk_norm": False, "attention_bias": True, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, some layers": (
        "qwen3_moe",
        {"mlp_only_layers": [1], "decoder_sparse_step": 2, "num_hidden_layers": 4, "num_experts": 3},
    ),
    "qwen3_moe, sliding window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
    "olmoe": ("olmoe", {}),
    "olmoe, one expert of all": ("olmoe", {"num_experts": 1, "num_experts_per_tok": 1}),
    "mixtral": ("mixtral", {"sliding_window": 5, "num_experts_per_tok": 4}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, other numbers": (
        "gpt_oss",
        {"swiglu_limit": 1.5, "swiglu_alpha": 1.0, "attention_bias": False, "layer_types": ["full_attention"] * 3},
    ),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe, no bias": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0, "tie_word_embeddings": True},
    ),
    "gemma3, linear rope": ("gemma3", {**SOME_SLIDING, "rope_parameters": TWO_ROPES, "query_pre_attn_scalar": 24}),
}
WITH_IMAGES = {
    "gemma3 with images": ("gemma3 with images", SOME_SLIDING),
    "gemma4 with images": ("gemma4 with images", PER_LAYER),
    "gemma4 with images, experts": ("gemma4 with images", EXPERTS_BESIDE),
    "mistral3 with images": ("mistral3 with images", {"sliding_window": 5}),
    "mistral3 with images, ministral3": ("mistral3 with images", {"text": "ministral3"}),
    "lfm2_vl with images": ("lfm2_vl with images", {"tie_word_embeddings": True}),
    "qwen3_5 with images": ("qwen3_5 with images", {}),
}
"""Models that read images, too, by the architectures of their text models."""
ALL = FAMILIES | WITH_IMAGES
SOME = [
    *("llama", "mistral, sliding window", "gpt2", "gpt_neox", "stablelm, parallel", "smollm3", "gemma2", "gemma3"),
    *("gemma4", "lfm2", "qwen3_5", "qwen3_moe", "gpt_oss", "granitemoehybrid", "falcon_h1"),
]
ONE_PER_ARCHITECTURE = [*SOME, "qwen2, some layers sliding", "qwen3", "phi3", "olmo2", "olmo3"]
ONE_PER_ARCHITECTURE += ["hunyuan", "granite", "glm4", "exaone4", "ministral3", "gemma4, keys are values"]
ONE_PER_ARCHITECTURE += ["olmoe", "mixtral", "lfm2_moe", "granitemoeshared", "gemma4, experts", "qwen2_moe", "glm4_moe"]
ONE_PER_ARCHITECTURE += ["nemotron_h"]
WITHOUT_KERNELS = ("lfm2", "olmo2", "olmo3", "hunyuan_v1_dense", "granite", "exaone4", "ministral3", "gemma4")
WITHOUT_KERNELS += (
    "qwen3_5",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "mixtral",
    "gpt_oss",
    "lfm2_moe",
    "granitemoeshared",
    "glm4_moe",
    "granitemoehybrid",
    "falcon_h1",
    "nemotron_h",
)
"""Architectures that run on plain PyTorch on GPUs, too."""
WITH_KERNELS = [family for family in ONE_PER_ARCHITECTURE if FAMILIES[family][0] not in WITHOUT_KERNELS]
NATIVE_ALONE = ("lfm2", "lfm2_moe", "lfm2_vl with images", "qwen3_5", "qwen3_5 with images")
NATIVE_ALONE += ("granitemoehybrid", "falcon_h1", "nemotron_h")
"""Architectures that the transformers backend refuses, because their caches are no keys and values."""


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request, tiny):
    """By family: a model of transformers, and the same on one of the backends."""

    @cache
    def pair(family):
        architecture, changes = ALL[family]
        if request.param.startswith("transformers"):
            if architecture in NATIVE_ALONE:
                pytest.skip(f"the transformers backend refuses {architecture}: tests/backends/test_transformers.py")
            attention = "eager" if request.param.endswith("eager") else "sdpa"
            model = random_model(architecture, attention=attention, **changes)
            return model, specbeam.hf.wrap(model)
        return tiny(architecture, backend=request.param, **changes)

    return pair


def evaluate(slots, nodes):
    """Logits at nodes, the way the engine asks for them."""
    pending = slots.missing(nodes)
    return torch.as_tensor(slots.backend.forward([slots.tree_batch(pending, np.flatnonzero(np.isin(pending, nodes)))]))


def alone(lm, tokens):
    """Logits after a sequence, from nothing."""
    return evaluate(Slots(Tree(tokens), lm.backend), [len(tokens) - 1])[0]


@pytest.mark.parametrize("family", ALL)
def test_logits_equal_the_logits_of_transformers(pair, family):
    theirs, lm = pair(family)
    tokens = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    got = evaluate(Slots(Tree(tokens.tolist()), lm.backend), np.arange(len(tokens)))
    assert expected.std() > 0.5  # else closeness says nothing
    # Of linear attention, transformers' own logits are not as exact: tests/backends/test_gated_delta_net.py.
    torch.testing.assert_close(got, expected, atol=2e-2 if "qwen3_5" in family else 1e-3, rtol=0)


@pytest.mark.parametrize(
    "family",
    [
        f if f in {*ONE_PER_ARCHITECTURE, "gemma3 with images"} else pytest.param(f, marks=pytest.mark.thorough)
        for f in ALL
    ],
)
def test_texts_equal_the_texts_of_transformers(tiny, family):
    """Greedy and beams, across the edges of the sliding windows. Drafts change nothing."""
    architecture, changes = ALL[family]
    theirs, native = tiny(architecture, **changes)
    assert native.backend.name == "cpu"
    _, by_torch = tiny(architecture, backend="torch", **changes)
    prompt, how = [5, 6, 7, 5, 6, 7, 5], {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 24}
    (expected,), _ = beams_of_transformers(theirs, prompt, max_new_tokens=24)
    beams, scores = beams_of_transformers(theirs, prompt, **how)
    for lm, draft in product((native, by_torch), (None, "ngram")):
        assert specbeam.generate(lm, prompt, max_new_tokens=24, draft=draft).token_ids == expected
        assert_are_beams_of_transformers(specbeam.generate(lm, prompt, draft=draft, **how).sequences, beams, scores)


@pytest.mark.parametrize("backend", ["torch", "transformers"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_float32(save, backend, dtype):
    model = random_model("qwen2", initializer_range=0.1)
    lm = specbeam.load(save(model), backend=backend, dtype=dtype, device="cpu")
    tokens = list(range(40))
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1]
    got = alone(lm, tokens)
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, expected, dim=0) > 0.99


@settings(max_examples=examples(0.5 if in_thorough_mode() else 0.3))
@given(st.data())
@pytest.mark.parametrize("family", ["qwen3", *SOME])
def test_a_tree_at_once_is_each_sequence_alone(pair, family, data):
    """Also after nodes were dropped and their slots reused. tests/cache/test_slots.py proves the bookkeeping."""
    _, lm = pair(family)
    token = st.integers(0, 255)
    tree = Tree(data.draw(st.lists(token, min_size=1, max_size=6)))
    slots = Slots(tree, lm.backend)
    leaves = [tree.tip]
    for _ in range(data.draw(st.integers(1, 4))):
        nodes = data.draw(st.lists(st.sampled_from(leaves), min_size=1, max_size=5))
        for _ in range(2):
            nodes = tree.add(nodes, data.draw(st.lists(token, min_size=len(nodes), max_size=len(nodes)))).tolist()
            leaves = [*leaves, *nodes]
        nodes = np.array(sorted(data.draw(st.sets(st.sampled_from(leaves), min_size=1))))
        logits = evaluate(slots, nodes)
        for node, row in zip(nodes.tolist(), logits, strict=True):
            torch.testing.assert_close(row, alone(lm, tree.tokens(tree.path(node)).tolist()), atol=2e-4, rtol=0)
        leaves = sorted(data.draw(st.sets(st.sampled_from(leaves), min_size=1)))
        tree.keep(leaves)
        slots.free(tree.take_dropped())
        leaves = [n for n in leaves if tree.tip in tree.path(n)] or [tree.tip]
        assert slots.used <= tree.live


@pytest.mark.parametrize("family", SOME)
def test_trees_share_a_pass_without_seeing_each_other_and_a_pass_can_be_repeated(pair, family):
    _, lm = pair(family)
    sequences = [[1, 2, 3], [4] * 30, [9]]
    places = [Slots(Tree(sequence), lm.backend) for sequence in sequences]
    for _ in range(2):
        segments = []
        for slots, sequence in zip(places, sequences, strict=True):
            nodes = slots.missing([len(sequence) - 1])
            segments.append(slots.tree_batch(nodes, np.array([len(nodes) - 1])))
        for row, sequence in zip(torch.as_tensor(lm.backend.forward(segments)), sequences, strict=True):
            torch.testing.assert_close(row, alone(lm, sequence), atol=2e-4, rtol=0)
        assert (places[0].used, places[2].used) == (3, 1)
        assert places[1].used <= 30  # a window may leave tokens behind


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma2"])
def test_logits_of_the_first_tokens_are_those_of_all_and_nothing_wanted_gives_no_rows(pair, family):
    """The logits of the last tokens may be left out if no segment needs them."""
    _, lm = pair(family)
    nodes = np.arange(4)
    slots, *others = [Slots(Tree([5, 6, 7, 8]), lm.backend) for _ in range(3)]
    whole = evaluate(slots, nodes)
    for vocab in (1, 17, 100, 259, 1000):
        some = torch.as_tensor(lm.backend.forward([slots.tree_batch(nodes, nodes, vocab)]))
        assert some.shape[1] in (min(vocab, 259), 259)
        torch.testing.assert_close(some, whole[:, : some.shape[1]], atol=2e-4, rtol=0)
        both = [one.tree_batch(nodes, nodes, v) for one, v in zip(others, (vocab, None), strict=True)]
        assert lm.backend.forward(both).shape == (8, 259)
    assert lm.backend.forward([slots.tree_batch(nodes[:2], nodes[:0])]).shape == (0, 259)


@pytest.mark.parametrize("backend", ["torch", "transformers"])
@pytest.mark.parametrize(("device", "dtype", "says"), [("cuda:99", "auto", "cuda:99"), ("cpu", "int3", "int3")])
def test_missing_devices_dtypes_and_backends_are_refused(save, backend, device, dtype, says):
    folder = save(random_model("llama"))
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(folder, backend=backend, device=device, dtype=dtype)
    with pytest.raises(SpecbeamError, match="vllm"):
        specbeam.load(folder, backend="vllm")


@pytest.mark.parametrize("name", ["mps", "cuda:99", "meta", "gpu", ""])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name):
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(SpecbeamError, match=f"^there is no device {name!r} here: give auto, or one of cpu") as raised:
        choose_device(name)
    assert len(str(raised.value)) < 100 + 8 * torch.cuda.device_count()
