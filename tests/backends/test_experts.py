"""Mixtures of experts: nearer to transformers than all models have to be, bit for bit in any batch, from any file.

tests/backends/test_cpu.py compares their kernels with NumPy, and tests/backends/test_conformance.py has the trees,
beams and drafts of these models.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import specbeam
from specbeam import SpecbeamError
from specbeam.backends.cpu import CpuBackend
from specbeam.backends.cpu.library import library
from specbeam.backends.cpu.weights import packed_bytes
from specbeam.cache.slots import Slots
from specbeam.checkpoints import open_checkpoint
from specbeam.core.tree import Tree
from specbeam.system.machine import Memory
from tests.backends.test_conformance import EXPERTS_BESIDE, FAMILIES, ONE_PER_ARCHITECTURE
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import examples, needs_torch, random_model, rewrite

ARCHITECTURES = ("qwen3_moe", "olmoe", "mixtral", "gpt_oss", "lfm2_moe", "granitemoeshared", "qwen2_moe", "glm4_moe")
ISAS = [isa for isa in ("avx512", "avxvnni", "avx2", "neon", "portable") if library().specbeam_isa(isa.encode())]
PROMPT = np.random.default_rng(1).integers(0, 256, 60)


def logits(backend, *sequences):
    """Logits after each token of several sequences in one pass, [n, vocab] each."""
    places = [Slots(Tree([*sequence]), backend) for sequence in sequences]
    nodes = [np.arange(len(sequence)) for sequence in sequences]
    rows = np.array(backend.forward([place.tree_batch(n, n) for place, n in zip(places, nodes, strict=True)]))
    ends = np.cumsum([0, *map(len, sequences)])
    return [rows[start:end] for start, end in pairwise(ends.tolist())]


@pytest.mark.parametrize(
    "family",
    [family for family in ONE_PER_ARCHITECTURE if FAMILIES[family][0] in ARCHITECTURES or family == "gemma4, experts"],
)
def test_logits_are_within_1e_4_of_the_logits_of_transformers(tiny, family):
    architecture, changes = FAMILIES[family]
    theirs, lm = tiny(architecture, **changes)
    with torch.no_grad():
        expected = theirs(torch.tensor(PROMPT[None])).logits[0].numpy()
    assert lm.backend.name == "cpu"
    assert np.abs(logits(lm.backend, PROMPT)[0] - expected).max() < 1e-4


SHARED = {"qwen2_moe": {"num_hidden_layers": 2}, "gemma4": EXPERTS_BESIDE | {"num_hidden_layers": 3}}
"""Models with an MLP beside their experts: with a gate, and with norms of both and of their sum."""


@pytest.fixture(scope="module", params=ISAS)
def packed(request, save):
    """The same model in three formats, and models with an MLP beside experts, on each instruction set."""
    checkpoint = open_checkpoint(save(random_model("qwen3_moe", num_hidden_layers=2)))
    alike = [CpuBackend(checkpoint, quantize, 2, request.param) for quantize in ("float32", "int8", "int4")]
    others = [open_checkpoint(save(random_model(name, **changes))) for name, changes in SHARED.items()]
    return alike + [CpuBackend(one, "int8", 2, request.param) for one in others]


@settings(max_examples=examples())
@given(st.data())
def test_a_row_has_the_same_bits_beside_any_other_rows(packed, data):
    sequence = st.lists(st.integers(0, 258), min_size=1, max_size=40)
    own, others = data.draw(sequence), data.draw(st.lists(sequence, max_size=4))
    place = data.draw(st.integers(0, len(others)))
    for backend in packed:
        among = logits(backend, *others[:place], own, *others[place:])[place]
        assert among.tobytes() == logits(backend, own)[0].tobytes()
        for token in range(len(own)):  # row by row
            assert among[token].tobytes() == logits(backend, own[: token + 1])[0][-1].tobytes()


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *((name, {"norm_topk_prob": True}) for name in ("qwen3_moe", "mixtral", "lfm2_moe", "gpt_oss")),
        ("qwen2_moe", {"norm_topk_prob": False}),  # as llama.cpp has it
        ("granitemoeshared", {}),
        ("glm4_moe", {}),
        ("gemma4", EXPERTS_BESIDE),
    ],
)
def test_a_folder_and_a_file_have_the_same_bits_however_they_store_the_experts(save, tmp_path, architecture, changes):
    """The hub has a tensor for each expert, transformers 5 stacks them, and so do GGUF files."""
    model = random_model(architecture, **changes)
    sources = [save(model), save(model, save_original_format=False), write_gguf(tmp_path / "m.gguf", model)]
    assert len({specbeam.load(source, dtype="float32").weights for source in sources[:2]}) == 1
    bits = {logits(specbeam.load(source, dtype="float32").backend, PROMPT)[0].tobytes() for source in sources}
    assert len(bits) == 1


@needs_torch
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_of_equal_scores_the_lower_experts_are_taken(save, backend):
    """A router that prefers no expert. The model is equal to one that has the first three experts alone."""
    model, few = random_model("qwen3_moe"), random_model("qwen3_moe", num_experts=3)
    weights = model.state_dict()
    for name, parameter in few.state_dict().items():
        parameter.copy_(weights[name][: len(parameter)])
    for layer in (*model.model.layers, *few.model.layers):
        layer.mlp.gate.weight.data[:] = 0
    few.config.norm_topk_prob = model.config.norm_topk_prob = True
    lms = [specbeam.load(save(one), backend=backend, dtype="float32") for one in (model, few)]
    np.testing.assert_array_equal(*(logits(lm.backend, PROMPT)[0] for lm in lms))


def as_mxfp4(folder):
    """Store the experts of a folder of gpt-oss as floats of 4 bits, at random. Returns their values by names."""
    weights, draw, values = load_file(folder / "model.safetensors"), np.random.default_rng(1), {}
    for name in [name for name in weights if name.endswith("_proj") and "experts" in name]:
        experts, columns, rows = weights.pop(name).shape
        shape = experts, rows, columns // 32
        numbers = draw.integers(0, 16, (*shape, 32), np.uint8)
        numbers[numbers == 8] = 0  # no -0.0, and the largest value in each group, as a quantizer has them
        numbers[..., 0] = 7
        blocks, scales = numbers[..., ::2] | numbers[..., 1::2] << 4, draw.integers(123, 126, shape, np.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    rewrite(folder, "config.json", quantization_config={"quant_method": "mxfp4"})
    return values


def test_a_folder_of_mxfp4_keeps_its_values(save, tmp_path):
    model = random_model("gpt_oss", intermediate_size=64)
    folder = save(model)
    for name, values in as_mxfp4(folder).items():
        model.get_parameter(name).data[:] = values
    with torch.no_grad():
        expected = model(torch.tensor(PROMPT[None])).logits[0].numpy()
    for backend in ("cpu", "torch"):
        lm = specbeam.load(folder, backend=backend, dtype="float32")
        assert np.abs(logits(lm.backend, PROMPT)[0] - expected).max() < 1e-4
    file = write_gguf(tmp_path / "m.gguf", model, Type.MXFP4)
    of_experts = {}
    for source in (folder, file):
        weights = specbeam.load(source).backend._weights
        of_experts[source] = {name: weights.digest_of(name) for name in weights.parts if ".experts." in name}
    assert of_experts[folder] == of_experts[file]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_experts_per_tok": 9}, "gives each token 9 experts, but has 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0, which is no size"),
        ({"num_local_experts": 7}, r"mlp.gate.weight has shape \[8, 32\], but .* asks for \[7, 32\]"),
        ({"num_local_experts": 2**20}, "num_local_experts = 1048576, which is too large"),
        ({"moe_intermediate_size": 16}, r"gate_proj.weight has shape \[8, 24, 32\]"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
    ],
)
def test_experts_that_do_not_fit_are_refused(save, changes, says):
    folder = save(random_model("qwen3_moe"))
    rewrite(folder, "config.json", **changes)
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(folder, backend="cpu")


@pytest.mark.parametrize(
    ("architecture", "changes", "says"),
    [
        ("granitemoeshared", {"num_local_experts": 7}, r"router.weight has shape \[8, 32\], but .* asks for \[7, 32\]"),
        ("granitemoeshared", {"shared_intermediate_size": 24}, r"shared_mlp.input_linear.weight has shape \[40, 32\]"),
        ("granitemoeshared", {"shared_intermediate_size": -1}, "intermediate_size = -1, which is no size"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "intermediate_size = 0, which is no size"),
        ("glm4_moe", {"n_group": 2}, "n_group = 2 is not supported for glm4_moe"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts = 0, which is no size"),
        ("glm4_moe", {"num_experts_per_tok": 9}, "gives each token 9 experts, but has 8"),
        ("gemma4", {"top_k_experts": None}, "num_experts_per_tok = None, which is no size"),
        ("gemma4", {"num_experts": None}, "num_experts = None, which is no size"),
        ("gemma4", {"moe_intermediate_size": 16}, r"experts.gate_proj.weight has shape \[8, 24, 32\]"),
    ],
)
def test_shared_experts_that_do_not_fit_are_refused(save, architecture, changes, says):
    folder = save(random_model(architecture, **EXPERTS_BESIDE if architecture == "gemma4" else {}))
    rewrite(folder, "config.json", **changes)
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(folder, backend="cpu")


@pytest.mark.parametrize(
    ("architecture", "tensor"),
    [
        ("granitemoeshared", "model.layers.1.shared_mlp.output_linear.weight"),
        ("granitemoeshared", "model.layers.1.block_sparse_moe.input_linear.weight"),
        ("qwen2_moe", "model.layers.2.mlp.shared_expert_gate.weight"),
        ("glm4_moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("gemma4", "model.layers.0.router.scale"),
        ("gemma4", "model.layers.0.router.per_expert_scale"),
        ("gemma4", "model.layers.0.post_feedforward_layernorm_1.weight"),
        ("gemma4", "model.layers.0.experts.down_proj"),
    ],
)
def test_a_folder_that_lacks_a_tensor_of_experts_is_refused(save, architecture, tensor):
    folder = save(random_model(architecture, **EXPERTS_BESIDE if architecture == "gemma4" else {}))
    weights = load_file(folder / "model.safetensors")
    del weights[tensor]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    layer = ".".join(tensor.split(".")[:3])
    with pytest.raises(SpecbeamError, match=f"has no tensor {layer}"):
        specbeam.load(folder)


def test_a_folder_that_lacks_an_expert_is_refused(save):
    folder = save(random_model("qwen3_moe"))
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(SpecbeamError, match=r"has no tensor model.layers.1.mlp.experts.3.up_proj.weight"):
        specbeam.load(folder)


def test_weights_that_are_larger_than_the_memory_are_refused_with_both_sizes(save, monkeypatch):
    folder = save(random_model("qwen3_moe"))
    size = packed_bytes(open_checkpoint(folder), "int8")
    monkeypatch.setattr("specbeam.backends.cpu.weights.usable_memory", lambda: Memory(size, size))
    specbeam.load(folder)
    monkeypatch.setattr("specbeam.backends.cpu.weights.usable_memory", lambda: Memory(size - 1, size - 1))
    with pytest.raises(SpecbeamError, match=r"the weights take .* GB with quantize='int8', and this process may"):
        specbeam.load(folder)
