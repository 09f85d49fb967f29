"""LoRA adapters against PEFT: the merged model computes what PEFT's merged model computes, on every backend."""

import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoModelForSeq2SeqLM, T5Config

import specbeam
from specbeam import SpecbeamError
from specbeam.cache.slots import Slots
from specbeam.checkpoints import open_checkpoint
from specbeam.cli import main
from specbeam.core.tree import Tree
from tests.backends.test_conformance import evaluate
from tests.backends.test_packed import replace_at_the_same_time
from tests.checkpoints.test_folder import change_tensors
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import EOS, beams_of_transformers, byte_tokenizer, random_model, rewrite

LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FILE = "adapter_model.safetensors"
PROMPT = [5, 17, 200, 3, 99, 42, 17, 200]
FLOAT32 = {
    "torch": {"backend": "torch", "dtype": "float32"},
    "cpu": {"backend": "cpu", "quantize": "float32"},
    "transformers": {"backend": "transformers", "dtype": "float32"},
}


@pytest.fixture(scope="module")
def train(save, tmp_path_factory):
    """Saves a base model and an adapter with random weights. Returns PEFT's merged model, and the two folders."""

    def train(model, tokenizer=None, **how):
        base = save(model)
        model = type(model).from_pretrained(base, attn_implementation="eager").eval()  # the adapter names its folder
        if tokenizer is not None:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        torch.manual_seed(1)
        tuned = get_peft_model(model, LoraConfig(**({"r": 4, "lora_alpha": 6, "init_lora_weights": False} | how)))
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                parameter.data.add_(torch.randn_like(parameter) * 0.1)
        folder = tmp_path_factory.mktemp("adapter")
        tuned.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        return tuned.eval().merge_and_unload(), base, folder

    return train


@pytest.fixture(scope="module")
def trained(train):
    """A small adapter, for tests of other things than its values. They copy what they change."""
    return train(random_model("llama"), target_modules=["q_proj"])


@pytest.fixture
def adapter(trained, tmp_path):
    return shutil.copytree(trained[2], tmp_path / "adapter")


rewrite = partial(rewrite, name="adapter_config.json")


def logits(lm):
    return evaluate(Slots(Tree(PROMPT), lm.backend), np.arange(len(PROMPT)))


def check(merged, lm):
    with torch.no_grad():
        expected = merged(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(lm), expected, atol=1e-3, rtol=1e-4)
    assert expected.std() > 0.5


BIASED = {"attention_bias": True, "mlp_bias": True}
TIED = {"tie_word_embeddings": True}
PATTERNS = {
    "rank_pattern": {"q_proj": 2, "model.layers.1.mlp.down_proj": 7},
    "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 9, "q_proj": 1, "mlp.up_proj": 3},
}
KINDS = {  # an architecture and its sizes, modules with factors, modules that are saved whole, and other settings
    "llama": ("llama", {}, LLAMA, [], {}),
    "llama, rslora": ("llama", {}, LLAMA, [], {"use_rslora": True}),
    "llama, patterns": ("llama", {}, LLAMA, [], PATTERNS),
    "llama, some layers": ("llama", {}, ["up_proj"], [], {"layers_to_transform": [1]}),
    "llama, biases": ("llama", BIASED, ["q_proj", "down_proj"], [], {"bias": "all"}),
    "llama, biases of its own": ("llama", BIASED, ["q_proj"], [], {"bias": "lora_only"}),
    "llama, embedding and head": ("llama", {}, ["embed_tokens", "lm_head", "v_proj"], [], {}),
    "llama, tied, both saved": ("llama", TIED, ["q_proj"], ["embed_tokens", "lm_head"], {}),
    "llama, tied, head saved": ("llama", TIED, ["q_proj"], ["lm_head"], {}),
    "llama, tied, embedding saved": ("llama", TIED, ["q_proj"], ["embed_tokens"], {}),
    "gpt2": ("gpt2", TIED, ["c_attn", "c_proj", "c_fc"], [], {}),
    "gpt2, saved": ("gpt2", {}, ["c_attn"], ["lm_head", "c_fc", "wpe", "ln_1"], {}),
    "gpt_neox": ("gpt_neox", {}, ["query_key_value", "dense", "dense_4h_to_h"], [], {}),
    "gemma3": ("gemma3", {}, ["embed_tokens", "k_proj"], ["q_norm", "post_feedforward_layernorm"], {}),
    "gemma3 with images": ("gemma3 with images", {}, ["q_proj", "down_proj"], ["lm_head"], {}),
    "phi3, stacked": ("phi3", {}, ["qkv_proj", "gate_up_proj"], [], {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_computes_what_pefts_merged_model_computes(train, kind):
    architecture, sizes, targets, saved, how = KINDS[kind]
    how = {"target_modules": targets, "modules_to_save": saved or None, **how}
    merged, base, folder = train(random_model(architecture, **sizes), **how)
    plain = logits(specbeam.load(base, **FLOAT32["torch"]))
    for backend in FLOAT32.values():
        lm = specbeam.load(folder, **backend)
        check(merged, lm)
        assert (logits(lm) - plain).abs().max() > 0.1


def test_an_adapter_of_an_old_gpt2_without_prefix(train):
    merged, base, folder = train(random_model("gpt2"), target_modules=["c_attn"], modules_to_save=["ln_f"])

    bare = {name.removeprefix("transformer."): t for name, t in load_file(base / "model.safetensors").items()}
    save_file(bare, base / "model.safetensors", metadata={"format": "pt"})
    check(merged, specbeam.load(folder, **FLOAT32["torch"]))


ENDS = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize(
    ("updated", "saved", "tied"),
    [([], ENDS, False), ([], ENDS, True), ([], None, False), ([], None, True), (ENDS, None, False)],
)
def test_tokens_that_an_adapter_adds(train, updated, saved, tied):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool>", special=True), AddedToken("<end>", special=True)])
    model = random_model("llama", tie_word_embeddings=tied)
    merged, _, folder = train(model, tokenizer, target_modules=["v_proj", *updated], modules_to_save=saved)
    for backend in FLOAT32.values():
        lm = specbeam.load(folder, **backend)
        assert lm.backend.vocab_size == 261
        assert lm.tokenizer("<tool>").input_ids == [259]
        check(merged, lm)


def test_an_encoder_decoder_model(train):
    config = T5Config(vocab_size=259, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, eos_token_id=EOS)
    config.decoder_start_token_id = config.pad_token_id = 0
    torch.manual_seed(0)
    merged, _, folder = train(AutoModelForSeq2SeqLM.from_config(config).eval(), target_modules=["q", "v", "wo"])
    lm = specbeam.load(folder, dtype="float32")
    how = {"num_beams": 3, "max_new_tokens": 12}
    (expected,), _ = beams_of_transformers(merged, PROMPT, **how)
    assert specbeam.generate(lm, PROMPT, **how).token_ids == expected


def test_half_precision_is_rounded_once(train):
    merged, _, folder = train(random_model("llama"), target_modules=LLAMA)
    lm = specbeam.load(folder, backend="torch", dtype="bfloat16", device="cpu")
    expected = merged.model.layers[1].mlp.down_proj.weight.bfloat16()
    assert (lm.backend.model.blocks[1].mlp.down.weight == expected).float().mean() > 0.99


def test_the_command_line_loads_and_shows_an_adapter(trained, capsys):
    merged, base, folder = trained
    (tokens,), _ = beams_of_transformers(merged, byte_tokenizer()("hello").input_ids, max_new_tokens=8)
    expected = byte_tokenizer().decode(tokens, skip_special_tokens=True)
    for named in (["--model", str(folder)], ["--model", str(base), "--adapter", str(folder)]):
        assert main(["generate", "hello", *named, "--dtype", "float32", "--max-new-tokens", "8"]) == 0
        assert capsys.readouterr().out == expected + "\n"
    assert main(["models", "show", str(folder)]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert (rows["path"], rows["adapter"]) == (str(base), str(folder))
    assert open_checkpoint(folder).facts.size > open_checkpoint(base).facts.size


def packed_logits(base, **how):
    return logits(specbeam.load(base, backend="cpu", quantize="int8", **how))


def multiply(factors, by, rows=slice(None)):
    """A change of an adapter's tensors."""

    def change(tensors):
        for name, tensor in tensors.items():
            if factors in name:
                tensor[rows] *= by

    return change


def test_packed_weights_belong_to_an_adapter(trained, adapter, cached):
    """Also for an adapter of the same size, another alpha in its configuration, and no adapter."""
    plain, first = packed_logits(trained[1]), packed_logits(trained[1], adapter=adapter)
    assert torch.equal(packed_logits(trained[1], adapter=adapter), first)
    assert len([*cached.glob("*.weights")]) == 2
    rewrite(adapter, lora_alpha=60)
    second = packed_logits(trained[1], adapter=adapter)
    change_tensors(adapter / FILE, multiply("lora_B", -1))
    found = [plain, first, second, packed_logits(trained[1], adapter=adapter)]
    assert len({f.sum().item() for f in found}) == 4
    assert torch.equal(packed_logits(trained[1]), plain)


def test_packed_weights_follow_a_training_that_keeps_size_and_time_of_the_file(train, cached):
    """As after cp -p or rsync -t. The change is in the middle of a tensor."""
    _, base, folder = train(random_model("llama"), target_modules=["q_proj"], r=256)
    first, file = packed_logits(base, adapter=folder), folder / FILE
    replace_at_the_same_time(file, lambda: change_tensors(file, multiply("lora_A", -3, slice(40, 70))))
    assert (packed_logits(base, adapter=folder) - first).abs().max() > 1e-3


# The base model


def test_the_revision_of_a_base_on_this_machine_is_ignored_and_the_base_may_be_another(trained, adapter):
    rewrite(adapter, revision="main")
    check(trained[0], specbeam.load(adapter, **FLOAT32["torch"]))
    rewrite(adapter, base_model_name_or_path="/not/there")
    with pytest.raises(SpecbeamError, match="base model '/not/there' of the adapter"):
        specbeam.load(adapter)
    check(trained[0], specbeam.load(trained[1], adapter=adapter, **FLOAT32["torch"]))
    rewrite(adapter, base_model_name_or_path=None)
    with pytest.raises(SpecbeamError, match="names no base model: load the base model with adapter="):
        specbeam.load(adapter)


def test_an_adapter_is_no_base_and_a_gguf_file_takes_none(adapter, trained, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", random_model("llama"))
    with pytest.raises(SpecbeamError, match="cannot be merged into a GGUF file"):
        specbeam.load(file, adapter=adapter)
    with pytest.raises(SpecbeamError, match="is an adapter, too: load its base model"):
        specbeam.load(adapter, adapter=trained[2])
    rewrite(adapter, base_model_name_or_path=str(adapter))
    with pytest.raises(SpecbeamError, match="is an adapter itself"):
        specbeam.load(adapter)


def test_a_folder_without_an_adapter_and_an_empty_name_are_refused(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(trained[1])  # an empty path would be this folder
    with pytest.raises(SpecbeamError, match=r"has no adapter_config.json: give the folder of a LoRA adapter"):
        specbeam.load(trained[1], adapter=tmp_path)
    for named in (["--model", ""], ["--model", str(trained[1]), "--adapter", ""]):
        assert main(["generate", "hello", *named]) == 2
        assert "the source is empty: give an alias, a folder" in capsys.readouterr().err


@pytest.mark.parametrize("backend", FLOAT32)
@pytest.mark.parametrize(
    ("architecture", "sizes", "says"),
    [
        ("llama", {"hidden_size": 64}, r"q_proj.weight as \[32, 32\], but in the base model it is \[64, 64\]"),
        ("gpt2", {}, "self_attn.q_proj.weight, which the base model lacks"),
    ],
)
def test_an_adapter_of_another_model_is_refused(adapter, save, backend, architecture, sizes, says):
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(save(random_model(architecture, **sizes)), adapter=adapter, **FLOAT32[backend])


@pytest.mark.parametrize("backend", FLOAT32)
def test_an_update_of_a_tied_weight_is_refused(train, backend):
    """PEFT's merged model is not the model that it trained: the head changes with the embedding."""
    _, _, folder = train(random_model("llama", tie_word_embeddings=True), target_modules=["embed_tokens"])
    with pytest.raises(SpecbeamError, match=r"embed_tokens.weight, which the base model ties to another weight"):
        specbeam.load(folder, **FLOAT32[backend])


# What cannot be merged


BASE = "base_model.model."
Q = f"{BASE}model.layers.1.self_attn.q_proj"


def config(**changes):
    return lambda folder: rewrite(folder, **changes)


def with_tensor(name, shape=(4,)):
    return lambda folder: change_tensors(folder / FILE, lambda tensors: tensors.update({name: torch.ones(shape)}))


def without_b(folder):
    change_tensors(folder / FILE, lambda tensors: tensors.pop(f"{Q}.lora_B.weight"))


def as_pickle(folder):
    (folder / FILE).rename(folder / "adapter_model.bin")


def outside(folder):
    (folder / FILE).rename(folder.parent / "elsewhere")
    (folder / FILE).symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (config(peft_type="IA3"), "adapter of type IA3: only LORA can be merged"),
        (config(use_dora=True), "an adapter with use_dora='True' cannot be merged"),
        (config(layer_replication=[[0, 2]]), "layer_replication="),
        (config(invented_next_year={"a": 1}), "invented_next_year="),
        (config(init_lora_weights="pissa"), "init_lora_weights='pissa' has changed the weights of the base"),
        (config(lora_alpha="many"), "lora_alpha='many' for .* is no number"),
        (config(alpha_pattern={"(a+)+$": 3}), "holds what is no name of a module"),
        (config(alpha_pattern=[1]), "holds what is no name of a module"),
        (without_b, r"factors of model.layers.1.self_attn.q_proj have the shapes \[4, 32\] and \[\]"),
        (with_tensor(f"{Q}.lora_magnitude_vector"), "lora_magnitude_vector"),
        (with_tensor("model.norm.weight"), "the tensor model.norm.weight cannot be merged"),
        (with_tensor(f"{BASE}model.extra.weight"), "model.extra.weight, which the base model lacks"),
        (with_tensor(f"{BASE}lm_head.weight", ()), r"damaged: lm_head.weight has the shape \[\]"),
        (with_tensor(f"{BASE}lm_head.weight"), r"damaged: lm_head.weight has the shape \[4\]"),
        (with_tensor(f"{BASE}model.embed_tokens.weight", ()), r"damaged: model.embed_tokens.weight has the shape \[\]"),
        (with_tensor(f"{BASE}model.norm.weight", ()), r"norm.weight"),
        (as_pickle, "has no adapter_model.safetensors, and pickles .* are never opened"),
        (outside, "Only files inside the folder are read"),
        (lambda f: os.truncate(f / FILE, (f / FILE).stat().st_size - 10), "damaged or not a safetensors file"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "transformers"])
def test_what_cannot_be_merged_is_refused_by_name(adapter, change, says, backend):
    change(adapter)
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(adapter, **FLOAT32[backend])
