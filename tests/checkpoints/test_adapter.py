"""LoRA adapters against PEFT: the merged model computes what PEFT's merged model computes, on every backend."""

import json
import os
import shutil

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoModelForSeq2SeqLM, T5Config

import specbeam
from specbeam import SpecbeamError
from specbeam.backends.cpu import weights
from specbeam.cache.slots import Slots
from specbeam.checkpoints import open_checkpoint
from specbeam.cli import main
from specbeam.tree import Tree
from tests.backends.test_conformance import evaluate
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import EOS, byte_tokenizer, random_model

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


def rewrite(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(lm):
    tree = Tree(PROMPT)
    return evaluate(lm, tree, Slots(tree, lm.backend), np.arange(len(PROMPT)))


def check(merged, lm):
    with torch.no_grad():
        expected = merged(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(lm), expected, atol=1e-3, rtol=1e-4)
    assert expected.std() > 0.5


LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
BIASED = {"attention_bias": True, "mlp_bias": True}
KINDS = {
    "llama": ("llama", {}, {"target_modules": LLAMA}),
    "llama, rslora": ("llama", {}, {"target_modules": LLAMA, "use_rslora": True}),
    "llama, patterns": (
        "llama",
        {},
        {
            "target_modules": LLAMA,
            "rank_pattern": {"q_proj": 2, "model.layers.1.mlp.down_proj": 7},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 9, "q_proj": 1, "mlp.up_proj": 3},
        },
    ),
    "llama, some layers": ("llama", {}, {"target_modules": ["up_proj"], "layers_to_transform": [1]}),
    "llama, biases": ("llama", BIASED, {"target_modules": ["q_proj", "down_proj"], "bias": "all"}),
    "llama, biases of its own": ("llama", BIASED, {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "llama, embedding and head": ("llama", {}, {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    "llama, tied, both saved": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "llama, tied, head saved": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ),
    "llama, tied, embedding saved": (
        "llama",
        {"tie_word_embeddings": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "gpt2": ("gpt2", {"tie_word_embeddings": True}, {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt2, saved": ("gpt2", {}, {"target_modules": ["c_attn"], "modules_to_save": ["lm_head", "c_fc", "wpe", "ln_1"]}),
    "gpt_neox": ("gpt_neox", {}, {"target_modules": ["query_key_value", "dense", "dense_4h_to_h"]}),
    "gemma3, scaled embedding and norms": (
        "gemma3",
        {},
        {"target_modules": ["embed_tokens", "k_proj"], "modules_to_save": ["q_norm", "post_feedforward_layernorm"]},
    ),
    "phi3, stacked": ("phi3", {}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_computes_what_pefts_merged_model_computes(train, kind):
    architecture, changes, how = KINDS[kind]
    merged, base, folder = train(random_model(architecture, **changes), **how)
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


@pytest.mark.parametrize(
    ("how", "tied"),
    [("saved", False), ("saved", True), ("only grown", False), ("only grown", True), ("updated", False)],
)
def test_tokens_that_an_adapter_adds(train, how, tied):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool>", special=True), AddedToken("<end>", special=True)])
    saved = {"modules_to_save": ["embed_tokens", "lm_head"]} if how == "saved" else {}
    targets = ["v_proj", "embed_tokens", "lm_head"] if how == "updated" else ["v_proj"]
    model = random_model("llama", tie_word_embeddings=tied)
    merged, _, folder = train(model, tokenizer, target_modules=targets, **saved)
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
    expected = merged.generate(torch.tensor([PROMPT]), num_beams=3, do_sample=False, max_new_tokens=12)[0, 1:].tolist()
    assert specbeam.generate(lm, PROMPT, num_beams=3, max_new_tokens=12).token_ids == expected


def test_half_precision_is_rounded_once(train):
    merged, _, folder = train(random_model("llama"), target_modules=LLAMA)
    lm = specbeam.load(folder, backend="torch", dtype="bfloat16", device="cpu")
    expected = merged.model.layers[1].mlp.down_proj.weight.bfloat16()
    assert (lm.backend.model.blocks[1].mlp.down.weight == expected).float().mean() > 0.99


def test_the_command_line_loads_an_adapter(train, capsys):
    merged, base, folder = train(random_model("llama"), target_modules=LLAMA)
    prompt = byte_tokenizer()("hello", return_tensors="pt").input_ids
    out = merged.generate(prompt, do_sample=False, max_new_tokens=8)
    expected = byte_tokenizer().decode(out[0, 5:], skip_special_tokens=True)
    for named in (["--model", str(folder)], ["--model", str(base), "--adapter", str(folder)]):
        assert main(["generate", "hello", *named, "--dtype", "float32", "--max-new-tokens", "8"]) == 0
        assert capsys.readouterr().out == expected + "\n"


def test_packed_weights_belong_to_an_adapter(trained, adapter, monkeypatch, tmp_path):
    """Also for an adapter of the same size, another alpha in its configuration, and no adapter."""
    monkeypatch.setattr(weights, "MIN_FILE_BYTES", 0)
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "home"))

    def packed(**how):
        return logits(specbeam.load(trained[1], backend="cpu", quantize="int8", **how))

    plain, first = packed(), packed(adapter=adapter)
    assert torch.equal(packed(adapter=adapter), first)
    assert len([*(tmp_path / "home" / "packed").glob("*.weights")]) == 2
    rewrite(adapter, lora_alpha=60)
    second = packed(adapter=adapter)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {name: -t if "lora_B" in name else t for name, t in tensors.items()}, adapter / "adapter_model.safetensors"
    )
    found = [plain, first, second, packed(adapter=adapter)]
    assert len({f.sum().item() for f in found}) == 4
    assert torch.equal(packed(), plain)


def test_packed_weights_follow_a_training_that_keeps_size_and_time_of_the_file(train, monkeypatch, tmp_path):
    """As after cp -p or rsync -t. The change is in the middle of a tensor."""
    monkeypatch.setattr(weights, "MIN_FILE_BYTES", 0)
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "home"))
    _, base, folder = train(random_model("llama"), target_modules=["q_proj"], r=256)

    def packed():
        return logits(specbeam.load(base, adapter=folder, backend="cpu", quantize="int8"))

    first, file = packed(), folder / "adapter_model.safetensors"
    before = file.stat()
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "lora_A" in name:
            tensor[40:70] *= -3
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert (packed() - first).abs().max() > 1e-3


# The base model


def test_the_revision_of_a_base_on_this_machine_is_ignored(trained, adapter):
    rewrite(adapter, revision="main")
    check(trained[0], specbeam.load(adapter, **FLOAT32["torch"]))


def test_the_base_may_be_another_than_the_adapter_names(trained, adapter, save):
    rewrite(adapter, base_model_name_or_path="/not/there")
    with pytest.raises(SpecbeamError, match="base model '/not/there' of the adapter"):
        specbeam.load(adapter)
    check(trained[0], specbeam.load(trained[1], adapter=adapter, **FLOAT32["torch"]))
    rewrite(adapter, base_model_name_or_path=None)
    with pytest.raises(SpecbeamError, match="names no base model: load the base model with adapter="):
        specbeam.load(adapter)


def test_an_adapter_is_no_base(adapter, trained, tmp_path):
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


def test_a_gguf_file_takes_no_adapter(adapter, tmp_path):
    file = write_gguf(tmp_path / "m.gguf", random_model("llama"))
    with pytest.raises(SpecbeamError, match="cannot be merged into a GGUF file"):
        specbeam.load(file, adapter=adapter)


@pytest.mark.parametrize("backend", FLOAT32)
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            lambda: random_model("llama", hidden_size=64),
            r"q_proj.weight as \[32, 32\], but in the base model it is \[64, 64\]",
        ),
        (lambda: random_model("gpt2"), "self_attn.q_proj.weight, which the base model lacks"),
    ],
)
def test_an_adapter_of_another_model_is_refused(adapter, save, backend, model, says):
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(save(model()), adapter=adapter, **FLOAT32[backend])


@pytest.mark.parametrize("backend", FLOAT32)
def test_an_update_of_a_tied_weight_is_refused(train, backend):
    """PEFT's merged model is not the model that it trained: the head changes with the embedding."""
    _, _, folder = train(random_model("llama", tie_word_embeddings=True), target_modules=["embed_tokens"])
    with pytest.raises(SpecbeamError, match=r"embed_tokens.weight, which the base model ties to another weight"):
        specbeam.load(folder, **FLOAT32[backend])


# What cannot be merged


def without_b(folder):
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(
        {n: t for n, t in tensors.items() if "layers.1.self_attn.q_proj.lora_B" not in n},
        folder / "adapter_model.safetensors",
    )


def with_tensor(name, shape=(4,)):
    def change(folder):
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file(tensors | {name: torch.ones(shape)}, folder / "adapter_model.safetensors")

    return change


def as_pickle(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def outside(folder):
    (folder / "adapter_model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "adapter_model.safetensors").symlink_to(folder.parent / "elsewhere")


def truncated(folder):
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: rewrite(f, peft_type="IA3"), "adapter of type IA3: only LORA can be merged"),
        (lambda f: rewrite(f, use_dora=True), "an adapter with use_dora='True' cannot be merged"),
        (lambda f: rewrite(f, layer_replication=[[0, 2]]), "layer_replication="),
        (lambda f: rewrite(f, invented_next_year={"a": 1}), "invented_next_year="),
        (
            lambda f: rewrite(f, init_lora_weights="pissa"),
            "init_lora_weights='pissa' has changed the weights of the base",
        ),
        (lambda f: rewrite(f, lora_alpha="many"), "lora_alpha='many' for .* is no number"),
        (lambda f: rewrite(f, alpha_pattern={"(a+)+$": 3}), "holds what is no name of a module"),
        (lambda f: rewrite(f, alpha_pattern=[1]), "holds what is no name of a module"),
        (without_b, r"factors of model.layers.1.self_attn.q_proj have the shapes \[4, 32\] and \[\]"),
        (
            with_tensor("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"),
            "lora_magnitude_vector",
        ),
        (with_tensor("model.norm.weight"), "the tensor model.norm.weight cannot be merged"),
        (with_tensor("base_model.model.model.extra.weight"), "model.extra.weight, which the base model lacks"),
        (with_tensor("base_model.model.lm_head.weight", ()), r"damaged: lm_head.weight has the shape \[\]"),
        (with_tensor("base_model.model.lm_head.weight"), r"damaged: lm_head.weight has the shape \[4\]"),
        (
            with_tensor("base_model.model.model.embed_tokens.weight", ()),
            r"damaged: model.embed_tokens.weight has the shape \[\]",
        ),
        (with_tensor("base_model.model.model.norm.weight", ()), r"norm.weight"),
        (as_pickle, "has no adapter_model.safetensors, and pickles .* are never opened"),
        (outside, "Only files inside the folder are read"),
        (truncated, "damaged or not a safetensors file"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "transformers"])
def test_what_cannot_be_merged_is_refused_by_name(adapter, change, says, backend):
    change(adapter)
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(adapter, **FLOAT32[backend])


def test_show_names_adapter_and_base(trained, capsys):
    assert main(["models", "show", str(trained[2])]) == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert (rows["path"], rows["adapter"]) == (str(trained[1]), str(trained[2]))
    assert open_checkpoint(trained[2]).facts.size > open_checkpoint(trained[1]).facts.size
