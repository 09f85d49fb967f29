"""Hugging Face folders: single and sharded, and what is wrong with wrong ones."""

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, ByT5Tokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import specbeam
from specbeam import SpecbeamError
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.formats.folder_config import rope_from_transformers
from specbeam.checkpoints.parameters import parameters
from specbeam.cli import main
from tests.conftest import (
    ARCHITECTURES,
    EOS,
    LFS_POINTER,
    LLAMA3_ROPE,
    YARN,
    beams_of_transformers,
    byte_tokenizer,
    indexed,
    random_model,
    rewrite,
)
from tests.speech.conftest import random_whisper, whisper_tokenizer


def test_shards_are_one_model_and_a_missing_one_is_named(save):
    model = random_model("qwen2")
    whole, shards = save(model), save(model, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 3
    results = [specbeam.generate(specbeam.load(f), [1, 2, 3], max_new_tokens=20).token_ids for f in (whole, shards)]
    assert results[0] == results[1]
    lost = sorted(shards.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(SpecbeamError, match=lost.name):
        specbeam.load(shards)


def test_generation_config_gives_the_ends_and_the_defaults(save):
    model = random_model("llama")
    model.generation_config.eos_token_id = [EOS, 7]
    model.generation_config.repetition_penalty = 1.7
    lm = specbeam.load(save(model), dtype="float32")
    assert lm.eos_token_ids == {EOS, 7}
    (expected,), _ = beams_of_transformers(model, [1, 2, 3], max_new_tokens=30)
    assert specbeam.generate(lm, [1, 2, 3], max_new_tokens=30).token_ids == expected


def test_without_generation_config_the_config_or_the_tokenizer_knows_the_end(folder):
    (folder / "generation_config.json").unlink()
    assert open_checkpoint(folder).eos_token_ids == {EOS}
    rewrite(folder, "config.json", eos_token_id=...)
    assert open_checkpoint(folder).eos_token_ids == {EOS}


def test_configs_of_transformers_4_and_5_say_the_same(save):
    rope = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    folder = save(random_model("llama", rope_parameters=rope | {"rope_theta": 5000.0}))
    new = open_checkpoint(folder).config
    rewrite(folder, "config.json", rope_parameters=..., rope_theta=5000.0, rope_scaling=rope)
    assert open_checkpoint(folder).config == new
    rope = new.layers[0][0].rope
    assert (rope.theta, max(rope.divisors)) == (5000.0, 8.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta_fast": 4, "beta_slow": 2, "truncate": False},
        {"attention_factor": 1.5},
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"factor": 0.5},
        {"factor": None},
        {"original_max_position_embeddings": 7},
    ],
)
def test_yarn_has_the_frequencies_and_the_factor_of_transformers(changes):
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=YARN | changes)
    rotary = LlamaRotaryEmbedding(config)
    rope = rope_from_transformers(config.rope_parameters, 32, config.max_position_embeddings)
    torch.testing.assert_close(torch.tensor(rope.frequencies()), rotary.inv_freq, rtol=1e-5, atol=0)
    assert rope.scale == pytest.approx(rotary.attention_scaling)


def test_the_facts_and_null_means_not_quantized(folder):
    rewrite(folder, "config.json", quantization_config=None)
    assert specbeam.load(folder)
    facts = open_checkpoint(folder).facts
    assert (facts.architecture, facts.quantization, facts.context) == ("llama", "float32", 256)
    assert facts.parameters == random_model("llama").num_parameters()
    assert facts.size == (folder / "model.safetensors").stat().st_size
    for card in ("license: mit", 'license: "mit"', "license:\n- mit\nlanguage: en"):
        (folder / "README.md").write_text(f"---\n{card}\n---\n# A model\n")
        assert open_checkpoint(folder).facts.license == "mit"


def change_tensors(file, change):
    """Change the tensors of a safetensors file, which ``change`` is given by name."""
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def tensors(change):
    return lambda folder: change_tensors(folder / "model.safetensors", change)


def config(**changes):
    return lambda folder: rewrite(folder, "config.json", **changes)


POST_PROCESSOR = {  # its token is not among its special tokens: the tokenizers library panics over it
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "no JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 200), "damaged or not a safetensors file"),
        (lambda f: os.truncate(f / "model.safetensors", 60_000), "damaged or not a safetensors file"),
        (config(model_type="mamba"), "'mamba' is not supported: supported are .*, gemma2"),
        (config(hidden_size=...), "no 'hidden_size'"),
        (config(hidden_size="big"), "hidden_size"),
        (config(num_hidden_layers=0), "num_layers = 0"),
        (config(num_hidden_layers=10**8), "num_hidden_layers = 100000000"),
        (config(model_type="smollm3", num_hidden_layers=2**63), "num_hidden_layers = 9"),
        (config(model_type="mamba", text_config={"n_layer": 2**40}), "n_layer = 1"),
        (config(num_labels=2**40), "num_labels = 1099511627776, which is too large"),
        (config(hidden_size=16_000_048, head_dim=None), "head_dim = 4000012"),
        (config(head_dim=2**31 - 2), "head_dim = 2147483646"),
        (config(num_attention_heads=3, head_dim=8), "no multiple of its 3 heads"),
        (config(hidden_act="relu"), "relu"),
        (config(rope_parameters={"rope_type": "yarn"}), "yarn"),
        (config(rope_parameters={"rope_type": "linear", "factor": 0}), "must be over 0"),
        (config(rope_parameters={"rope_theta": -1.0}), "must be over 0"),
        (config(rope_parameters=3), "not an object or null"),
        (config(quantization_config={"quant_method": "gptq"}), "quantized with gptq"),
        (config(intermediate_size=64), r"has shape \[48, 32\], but the configuration asks for \[64, 32\]"),
        (lambda f: (f / "model.safetensors").rename(f / "x"), "has no model.safetensors: only models"),
        (indexed([1]), "weight_map"),
        (lambda f: rewrite(f, "generation_config.json", eos_token_id="abc"), "no token id"),
        (tensors(lambda t: t.pop(Q)), f"no tensor {Q}"),
        (tensors(lambda t: t.update({Q: t[Q][:, :-1].clone()})), f"{Q} has shape"),
        (tensors(lambda t: t.update({Q: t[Q][:-1].clone()})), rf"{Q} has shape \[31, 32\]"),
        (tensors(lambda t: t.update({Q: t[Q].to(torch.int8)})), f"{Q} holds I8: load an unquantized folder"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "no tokenizer that can be loaded"),
        (lambda f: rewrite(f, "tokenizer.json", post_processor=POST_PROCESSOR), "its tokenizer is damaged"),
    ],
)
def test_what_is_wrong_is_said(folder, break_it, says):
    break_it(folder)
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(folder, backend="torch")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_without_a_vocabulary_prompts_are_token_ids(save, architecture):
    folder = save(random_model(architecture))
    whole = specbeam.generate(specbeam.load(folder, backend="torch", device="cpu"), [1, 2, 3], max_new_tokens=5)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
        lm = specbeam.load(folder, backend="torch", device="cpu")
        result = specbeam.generate(lm, [1, 2, 3], max_new_tokens=5)
        assert (result.text, result.token_ids) == ("", whole.token_ids)
        with pytest.raises(SpecbeamError, match="has no tokenizer: give token ids"):
            specbeam.generate(lm, "hello")


def test_without_a_vocabulary_the_command_line_says_it_in_one_line(folder, capsys):
    (folder / "tokenizer.json").unlink()
    for command in ("generate", "tokens"):
        assert main([command, "hello", "--model", str(folder)]) == 2
        assert f"{folder} has no tokenizer" in capsys.readouterr().err.splitlines()[-1]


def test_a_tokenizer_of_bytes_needs_no_vocabulary(save):
    folder = save(random_model("llama", vocab_size=384), ByT5Tokenizer())
    assert specbeam.load(folder).tokenizer("abc").input_ids == [100, 101, 102, 1]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (models.WordLevel({"a": 0}, unk_token="<unk>"), "tokenizer cannot read this text"),
        (models.BPE({"a": 0}, []), "the prompt has no tokens"),
    ],
)
def test_a_tokenizer_that_cannot_read_a_text_is_named(folder, model, says):
    Tokenizer(model).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    lm = specbeam.load(folder)
    with pytest.raises(SpecbeamError, match=says):
        specbeam.generate(lm, "hello", max_new_tokens=1)


def tokens_of_transformers(folder):
    """The greedy tokens of a folder as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    ids = torch.tensor([[1, 2, 3]])
    return model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=EOS, pad_token_id=EOS)[0, 3:].tolist()


def tokens(folder):
    lm = specbeam.load(folder, dtype="float32")
    return specbeam.generate(lm, [1, 2, 3], max_new_tokens=8, eos_token_id=EOS).token_ids


HEADS = {
    "gpt_neox": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
}
NEVER_TIED = "nemotron_h"
TIED_BY_DEFAULT = ("gemma2", "gemma3", "gpt2", "lfm2", "lfm2_moe", "smollm3")


@pytest.mark.parametrize("stored", ["another head", "the same head", "the head alone"])
@pytest.mark.parametrize(
    ("architecture", "tied"),
    [*((name, True) for name in ARCHITECTURES if name != NEVER_TIED), *((name, ...) for name in TIED_BY_DEFAULT)],
)
def test_embedding_and_head_are_tied_as_in_transformers(save, caplog, architecture, tied, stored):
    layers = 4 if architecture == "qwen3_5" else 2  # transformers cannot generate without attention
    folder = save(random_model(architecture, num_hidden_layers=layers))
    embedding, head = HEADS.get(architecture, ("model.embed_tokens.weight", "lm_head.weight"))
    if stored == "the same head":
        tensors(lambda t: t.update({head: t[embedding].clone()}))(folder)
    elif stored == "the head alone":
        tensors(lambda t: t.pop(embedding))(folder)
    rewrite(folder, "config.json", tie_word_embeddings=tied)
    assert tokens(folder) == tokens_of_transformers(folder)
    warned = [line for line in caplog.messages if f"config.json ties {head} to the embedding" in line]
    assert len(warned) == (stored == "another head")


def test_one_file_of_weights_goes_before_an_index_as_in_transformers(save):
    folder = save(random_model("llama"))
    expected = tokens(folder)
    random_model("llama", seed=1).save_pretrained(other := folder / "other", max_shard_size="20KB")
    for file in other.glob("model*"):
        file.rename(folder / file.name)
    assert (folder / "model.safetensors.index.json").is_file()
    assert tokens(folder) == expected == tokens_of_transformers(folder)
    (folder / "model.safetensors").unlink()
    assert tokens(folder) == tokens_of_transformers(folder) != expected


@pytest.mark.parametrize(
    "extra",
    [
        "model.embed_tokens.position_ids",
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "lm_head.bias",
    ],
)
def test_tensors_that_are_left_over_are_named_and_left_out_as_in_transformers(save, caplog, extra):
    folder = save(random_model("llama"))
    expected = tokens(folder)
    tensors(lambda t: t.update({extra: torch.ones(32)}))(folder)
    assert tokens(folder) == expected == tokens_of_transformers(folder)
    named = [line for line in caplog.messages if f"has 1 tensors a llama model does not have: {extra}" in line]
    assert len(named) == 1


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "whisper"])
def test_each_stacked_matrix_and_bias_has_its_own_shape(save, architecture):
    """So query and key cannot be exchanged, of which only the sum of the rows is that of the configuration."""
    model = random_whisper() if architecture == "whisper" else random_model(architecture)
    checkpoint = open_checkpoint(save(model, whisper_tokenizer() if architecture == "whisper" else None))
    shapes, described = dict(checkpoint.shapes), parameters(checkpoint.config)
    stacked = [sources for name in described if len(sources := checkpoint.sources(name)) > 1]
    assert stacked
    for first, second, *_ in stacked:
        checkpoint.shapes = dict(shapes)
        checkpoint.check_tensors(described)
        for source, more in ((first, -1), (second, 1)):
            rows, *columns = shapes[source]
            checkpoint.shapes[source] = (rows + more, *columns)
        with pytest.raises(SpecbeamError, match=rf"{first} has shape"):
            checkpoint.check_tensors(described)


def test_exchanged_queries_and_keys_are_refused(folder):
    key = Q.replace("q_proj", "k_proj")
    tensors(lambda t: t.update({Q: t[key].clone(), key: t[Q].clone()}))(folder)
    with pytest.raises(SpecbeamError, match=rf"{Q} has shape \[16, 32\], but the configuration asks for \[32, 32\]"):
        specbeam.load(folder)


SCALED = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("scaling", "stated", "context"),
    [
        (SCALED | {"type": "yarn"}, 32768, 131072),  # as the cards of Qwen2.5 say
        (SCALED | {"rope_type": "yarn"}, 40960, 131072),  # as the cards of Qwen3 say
        (SCALED | {"rope_type": "yarn"}, 131072, 131072),  # as DeepSeek, gpt-oss and others are published
        ({"rope_type": "yarn", "factor": 4.0}, 32768, 131072),  # the original is then the stated one
        (SCALED | {"rope_type": "yarn", "factor": None}, 65536, 65536),  # the factor is then their quotient
        ({"rope_type": "linear", "factor": 4.0}, 32768, 32768),
        (SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 131072, 131072),
        (None, 32768, 32768),
    ],
)
def test_the_context_of_rotary_scaling(folder, scaling, stated, context):
    """Frequencies are transformers' for the same file."""
    rewrite(folder, "config.json", rope_parameters=..., rope_scaling=scaling, max_position_embeddings=stated)
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.config.context_length, checkpoint.facts.context) == (context, context)
    config = LlamaConfig.from_pretrained(folder)
    rotary, rope = LlamaRotaryEmbedding(config), checkpoint.config.layers[0][0].rope
    torch.testing.assert_close(torch.tensor(rope.frequencies()), rotary.inv_freq, rtol=1e-5, atol=0)
    assert rope.scale == pytest.approx(rotary.attention_scaling)
    assert specbeam.load(folder, backend="transformers", device="cpu").backend.context_length == context


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_attn_logit_softcapping_is_for_gemma_2_alone_as_in_transformers(save, caplog, architecture):
    changes = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 1}
    folder = save(model := random_model(architecture, attention="eager", **changes))
    logits = model(torch.tensor([[1, 2, 3]])).logits[0, -1]
    lm = specbeam.load(folder, dtype="float32")
    (sequence,) = specbeam.generate(lm, [1, 2, 3], max_new_tokens=1).sequences
    assert sequence.log_prob == pytest.approx(torch.log_softmax(logits, -1).max().item(), abs=1e-4)
    assert ("attn_logit_softcapping in config.json has no effect on Gemma 3" in caplog.text) == (
        architecture == "gemma3"
    )


def weights(*ends, dtype=torch.int32):
    """In place of a weight its parts in a quantized form."""

    def change(stored):
        stored.pop(Q)
        stored.update({f"{Q.removesuffix('weight')}{end}": torch.ones(4, 4, dtype=dtype) for end in ends})

    return tensors(change)


def beside(name, **content):
    return lambda folder: rewrite(folder, name, **content)


BITS = {"bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ([config(quantization=BITS), weights("weight", "scales", "biases")], "MLX"),
        ([config(quantization=BITS, quantization_config=BITS)], "MLX"),
        ([weights("weight", "scales", "biases")], "MLX"),
        ([beside("hf_quant_config.json", quantization={"quant_algo": "NVFP4"})], "NVFP4"),
        ([config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})], r"modelopt \(NVFP4\)"),
        ([weights("weight", "weight_scale", "weight_scale_2", dtype=torch.uint8)], "NVFP4"),
        ([beside("quantize_config.json", **BITS), weights("qweight", "qzeros", "scales", "g_idx")], "GPTQ"),
        ([beside("quant_config.json", w_bit=4), weights("qweight", "qzeros", "scales")], "AWQ"),
        ([config(quantization_config={"load_in_8bit": True})], "bitsandbytes"),
        ([weights("weight", "weight.absmax", "weight.quant_map", dtype=torch.uint8)], "bitsandbytes"),
        ([weights("weight", "SCB", dtype=torch.int8)], "bitsandbytes"),
        ([config(quantization_config={"quant_method": "fp8"})], "fp8"),
        ([weights("weight", "weight_scale_inv", dtype=torch.float8_e4m3fn)], "fp8 and scales"),
        ([weights("weight", "weight_scale", dtype=torch.int8)], "int8 and scales"),
        ([weights("weight_packed", "weight_scale", "weight_shape")], "compressed-tensors"),
        ([config(compression_config={"quant_method": "compressed-tensors"})], "compressed-tensors"),
        ([config(quantization_config={})], "a method it does not name"),
    ],
)
def test_a_quantized_folder_is_named_for_what_it_is(folder, changes, name):
    for change in changes:
        change(folder)
    stated = json.loads((folder / "config.json").read_text()).get("quantization_config")
    for backend in (
        ("cpu",) if stated else ("auto", "cpu", "transformers")
    ):  # transformers may know what is stated there
        with pytest.raises(
            SpecbeamError, match=rf"is quantized with {name}: load an unquantized folder or a GGUF file"
        ):
            specbeam.load(folder, backend=backend, device="cpu")
    assert re.fullmatch(name, open_checkpoint(folder).facts.quantization)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            indexed({"lm_head.weight": "model-00002-of-00002.safetensors"}),
            "model-00002-of-00002.safetensors: its download",
        ),
        (
            lambda f: (f / "model.safetensors").rename(f / "model-1-of-2.safetensors"),
            "safetensors.index.json: its download",
        ),
        (lambda f: (f / "model.safetensors").rename(f / "model.safetensors.incomplete"), "safetensors: its download"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors is empty: fetch it again"),
        (lambda f: os.truncate(f / "model.safetensors", 60_000), "model.safetensors is damaged .* fetch it again"),
        (lambda f: (f / "model.safetensors").write_bytes(LFS_POINTER), "model.safetensors is a pointer of Git LFS"),
        (lambda f: (f / "config.json").write_bytes(LFS_POINTER), "config.json is a pointer of Git LFS"),
        (lambda f: (f / "tokenizer.json").write_bytes(LFS_POINTER), "tokenizer.json is a pointer of Git LFS"),
        (lambda f: (f / "tokenizer.json").write_bytes(b""), "tokenizer.json is empty: fetch it again"),
    ],
)
def test_an_incomplete_download_says_to_fetch_it_again(folder, change, says):
    change(folder)
    with pytest.raises(SpecbeamError, match=says) as caught:
        specbeam.load(folder)
    assert re.search(r"[Ff]etch it (again|with git lfs pull)", str(caught.value))


def test_an_unfinished_download_in_the_cache_of_the_hub_says_to_fetch_it_again(folder, tmp_path):
    snapshot = shutil.copytree(folder, tmp_path / "models--a--b" / "snapshots" / "abc")
    (snapshot / "model.safetensors").unlink()
    (blobs := snapshot.parent.parent / "blobs").mkdir()
    (blobs / "f00.incomplete").write_bytes(b"{")
    with pytest.raises(SpecbeamError, match=r"model\.safetensors: its download is not complete\. Fetch it again"):
        specbeam.load(snapshot)


@pytest.mark.parametrize(
    ("architecture", "stored"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.h.0.attn.bias"),
        ("gpt_neox", "gpt_neox.layers.0.attention.masked_bias"),
    ],
)
def test_frequencies_and_masks_of_old_checkpoints_are_passed_over(save, architecture, stored):
    folder = save(random_model(architecture))
    tensors(lambda t: t.update({stored: torch.ones(1, 1, 4, 4)}))(folder)
    assert specbeam.load(folder, backend="torch").backend.vocab_size == 259


@pytest.mark.parametrize("backend", ["torch", "transformers"])
@pytest.mark.parametrize(
    ("special", "template", "begins"),
    [
        (False, None, False),  # any text may have it
        (True, "{{ messages[0].content }}<extra>", False),
        (True, None, True),
        (True, None, False),
    ],
)
def test_a_tokenizer_with_tokens_the_model_lacks(save, backend, special, template, begins):
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens([AddedToken("<extra>", special=special)])
    if begins:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<extra> $A", special_tokens=[("<extra>", 259)])
    folder = save(random_model("llama"), tokenizer)
    if begins or template or not special:
        says = "token '<extra>' has id 259, but the model's vocabulary has 259 tokens"
        with pytest.raises(SpecbeamError, match=says):
            specbeam.load(folder, backend=backend, device="cpu")
        return
    lm = specbeam.load(folder, backend=backend, device="cpu")
    assert specbeam.generate(lm, "hello", max_new_tokens=1).token_ids
    with pytest.raises(SpecbeamError, match="token '<extra>', whose id 259 is not in the model's vocabulary of 259"):
        specbeam.generate(lm, "hello <extra>")


def test_a_tokenizer_of_another_model_is_refused(save):
    folder = save(random_model("llama", vocab_size=200, eos_token_id=2), byte_tokenizer())
    with pytest.raises(SpecbeamError, match="has id 200, but the model's vocabulary has 200 tokens"):
        specbeam.load(folder, device="cpu")


@pytest.mark.parametrize("backend", ["torch", "transformers"])
def test_an_embedding_larger_than_the_tokenizer_is_padding(save, backend):
    lm = specbeam.load(save(random_model("llama", vocab_size=320)), backend=backend, device="cpu")
    assert (lm.backend.vocab_size, len(lm.tokenizer)) == (320, 259)


def test_weights_that_may_not_be_read_are_not_called_damaged(folder, monkeypatch):
    opened = Path.open

    def refuse(self, *how, **named):
        if self.suffix == ".safetensors":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return opened(self, *how, **named)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SpecbeamError, match=r"model\.safetensors cannot be read: Permission denied"):
        specbeam.load(folder)
