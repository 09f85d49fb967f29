"""Weights that are NaN or infinite are refused by name, on every backend. Before, int8 and int4 read them as finite."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, T5Config

import specbeam
from specbeam import SpecbeamError
from specbeam.backends import transformers as transformers_backend
from specbeam.backends.cpu import weights
from specbeam.backends.cpu.library import library
from specbeam.checkpoints import open_checkpoint
from tests.backends.test_cpu import F32, KINDS, Q4_MIN, Q8, pack, pack_status, random_blocks, room
from tests.checkpoints.test_folder import change_tensors
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import random_model

NAN, INF = float("nan"), float("inf")
WAYS = {
    "int8": {"backend": "cpu", "quantize": "int8"},
    "int4": {"backend": "cpu", "quantize": "int4"},
    "float32": {"backend": "cpu", "quantize": "float32"},
    "torch": {"backend": "torch", "dtype": "float32"},
    "transformers": {"backend": "transformers", "dtype": "float32"},
}
QUERY = "model.layers.1.self_attn.q_proj.weight"
REFUSED = "has weights that are not finite"
HALVES = {
    **{"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2]},
    **{"Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]},
}
"""Where the half-float scales and minima lie in a block of a GGUF file, in bytes."""


@pytest.fixture(scope="module")
def sound(save):
    return save(random_model("llama"))


@pytest.fixture
def spoil(sound, tmp_path):
    """A copy of a valid folder, with one number of a tensor replaced."""

    def spoil(tensor, value):
        folder = shutil.copytree(sound, tmp_path / "spoiled")
        change_tensors(folder / "model.safetensors", lambda tensors: tensors[tensor].view(-1)[-1:].fill_(value))
        return folder

    return spoil


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("tensor", "value"),
    [(QUERY, NAN), (QUERY, INF), (QUERY, -INF), ("lm_head.weight", NAN), ("model.norm.weight", NAN)],
)
def test_a_folder_is_refused(spoil, tensor, way, value):
    with pytest.raises(SpecbeamError, match=f"spoiled.*tensor {tensor} {REFUSED}"):
        specbeam.load(spoil(tensor, value), **WAYS[way])


@pytest.mark.parametrize("form", [F32, Q8, Q4_MIN])
def test_kernels_see_each_number(form):
    values = np.ones((19, 70), np.float32)
    out = room(library().specbeam_matrix_bytes(form, *values.shape))
    for at in ((0, 0), (18, 69), (7, 33)):
        for value in (NAN, INF, -INF, 3e38, 1.0):
            values[at] = value
            status = library().specbeam_quantize(form, values.ctypes.data, *values.shape, out.ctypes.data)
            assert status == (0 if value == 1 or (form == F32 and value == 3e38) else weights.NOT_FINITE)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_see_each_scale(kind):
    rows, columns = 18, 512
    raw, order = random_blocks(Type[kind], rows, columns), np.arange(rows)[::-1].copy()
    _, out = pack(Type[kind], raw, rows, columns, order)
    block = raw.shape[1] // (columns // (256 if kind.endswith("K") else 32))
    if kind == "MXFP4":  # a power of two in a byte, of which one stands for no number
        raw[rows - 1, -block] = 255
        assert pack_status(Type[kind], raw, rows, columns, out, order) == weights.NOT_FINITE
        return
    for row, start in ((0, 0), (rows - 1, raw.shape[1] - block)):
        for half in HALVES[kind]:
            for value in (NAN, INF, -INF):
                wrong = raw.copy()
                wrong[row, start + half : start + half + 2] = np.array([value], np.float16).view(np.uint8)
                assert pack_status(Type[kind], wrong, rows, columns, out, order) == weights.NOT_FINITE


@pytest.mark.parametrize("way", ["keep", "int8", "float32", "torch", "transformers"])
@pytest.mark.parametrize(("kind", "tensor"), [("Q8_0", "blk.1.ffn_down.weight"), ("F16", "output.weight")])
def test_a_gguf_file_is_refused(tmp_path, way, kind, tensor):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama", intermediate_size=64), Type[kind])
    with path.open("r+b") as file:
        file.seek(open_checkpoint(path)._tensors[tensor].offset)
        file.write(np.array([NAN], np.float16).tobytes())
    name = "lm_head.weight|mlp.down_proj.weight" if way == "transformers" else tensor
    with pytest.raises(SpecbeamError, match=f"model.gguf: tensor .*({name}) {REFUSED}"):
        specbeam.load(path, **WAYS.get(way, {"backend": "cpu"} if kind == "F16" else {"quantize": way}))


def test_weights_too_large_for_a_format_are_refused(spoil):
    folder = spoil(QUERY, 1e30)
    for quantize in ("int8", "int4"):
        with pytest.raises(SpecbeamError, match=rf"{QUERY} has weights of up to 1e\+30, too large .*dtype='float32'"):
            specbeam.load(folder, quantize=quantize)
    with pytest.raises(SpecbeamError, match=rf"{QUERY} has weights of up to 1e\+30, too large for float16"):
        specbeam.load(folder, backend="torch", dtype="float16")
    specbeam.load(folder, dtype="float32")


def test_packed_weights_of_before_are_not_trusted(spoil, cached, monkeypatch):
    """Until version 3, packing kept weights that are not finite."""
    folder = spoil(QUERY, NAN)
    native = library()

    def quantize(*args):
        native.specbeam_quantize(*args)
        return 0

    names = ("specbeam_pack", "specbeam_matrix_bytes", "specbeam_format_of", "enums")
    careless = SimpleNamespace(specbeam_quantize=quantize, **{name: getattr(native, name) for name in names})
    with monkeypatch.context() as before:
        before.setattr(weights, "LAYOUT_VERSION", 3)
        before.setattr(weights, "library", lambda: careless)
        specbeam.load(folder, quantize="int8")
    assert len([*cached.glob("*.weights")]) == 1
    for _ in range(2):  # nothing is kept of a load that was refused
        with pytest.raises(SpecbeamError, match=f"{QUERY} {REFUSED}"):
            specbeam.load(folder, quantize="int8")
    assert [path.suffix for path in cached.iterdir() if path.suffix != ".lock"] == [".weights"]  # the old file


@pytest.fixture(scope="module")
def adapter(sound, tmp_path_factory):
    how = LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    folder = tmp_path_factory.mktemp("adapter")
    get_peft_model(AutoModelForCausalLM.from_pretrained(sound), how).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tensor", ["q_proj.lora_A.weight", "q_proj.lora_B.weight", "lm_head.weight"])
def test_an_adapter_is_refused(sound, adapter, tmp_path, tensor):
    file = shutil.copytree(adapter, tmp_path / "spoiled") / "adapter_model.safetensors"
    name = next(name for name in load_file(file) if name.endswith(tensor))
    change_tensors(file, lambda tensors: tensors[name].view(-1)[3:4].fill_(NAN))
    for way in WAYS.values():
        with pytest.raises(SpecbeamError, match=f"{file}: tensor {name} {REFUSED}"):
            specbeam.load(sound, adapter=file.parent, **way)


def test_a_wrapped_model_is_refused_and_read_once(monkeypatch):
    model, reads = random_model("llama"), []
    are_finite = transformers_backend.are_finite
    monkeypatch.setattr(transformers_backend, "are_finite", lambda w: reads.append(w) or are_finite(w))
    weight = model.model.layers[1].self_attn.q_proj.weight.data

    def generate():
        model.generate(torch.tensor([[1, 2]]), custom_generate=specbeam.hf.generate, max_new_tokens=3, do_sample=False)

    sound, weight[3, 5] = float(weight[3, 5]), NAN
    for _ in range(2):
        with pytest.raises(SpecbeamError, match=f"LlamaForCausalLM: tensor {QUERY} {REFUSED}"):
            specbeam.hf.wrap(model)
        with pytest.raises(SpecbeamError, match=f"{QUERY} {REFUSED}"):
            generate()
    weight[3, 5] = sound
    generate()
    reads.clear()
    generate()
    specbeam.hf.wrap(model)
    assert not reads
    weight[3, 5] = NAN  # trained since then: its logits tell
    with pytest.raises(SpecbeamError, match="logits of LlamaForCausalLM hold NaN"):
        generate()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_remove_invalid_values_takes_what_transformers_takes(num_beams):
    model = random_model("llama")
    model.lm_head.weight.data[7] = NAN  # one logit of each row
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    how = {"max_new_tokens": 6, "do_sample": False, "num_beams": num_beams, "remove_invalid_values": True}
    how["attention_mask"] = torch.ones_like(ids)
    expected = model.generate(ids, **how)
    assert model.generate(ids, custom_generate=specbeam.hf.generate, **how).tolist() == expected.tolist()
    with pytest.raises(SpecbeamError, match=f"lm_head.weight {REFUSED}"):
        model.generate(ids, custom_generate=specbeam.hf.generate, **how | {"remove_invalid_values": False})


def test_a_model_with_an_encoder_is_refused():
    model = AutoModelForSeq2SeqLM.from_config(T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=16, num_layers=1))
    model.eval().generation_config.decoder_start_token_id = 0
    model.encoder.block[0].layer[0].SelfAttention.q.weight.data[2, 1] = INF
    with pytest.raises(SpecbeamError, match=f"SelfAttention.q.weight {REFUSED}"):
        specbeam.hf.wrap(model)
    with pytest.raises(SpecbeamError, match=f"SelfAttention.q.weight {REFUSED}"):
        model.generate(torch.tensor([[1, 2]]), custom_generate=specbeam.hf.generate, max_new_tokens=3)
