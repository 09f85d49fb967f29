"""Hugging Face folders: single and sharded, and what is wrong with wrong ones."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models
from tokenizers.processors import TemplateProcessing
from transformers import ByT5Tokenizer, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import specbeam
from specbeam import SpecbeamError
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.folder_config import rope_from_transformers
from specbeam.cli import main
from tests.conftest import (
    ARCHITECTURES,
    EOS,
    LLAMA3_ROPE,
    YARN,
    beams_of_transformers,
    byte_tokenizer,
    random_model,
    rewrite,
)


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
    rope = new.layers[0].rope
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
        (config(model_type="mamba"), "'mamba' is not supported: supported are gemma2"),
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
        (config(intermediate_size=64), "have 96 rows|asks for"),
        (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": [1]}'), "weight_map"),
        (lambda f: rewrite(f, "generation_config.json", eos_token_id="abc"), "no token id"),
        (tensors(lambda t: t.pop(Q)), f"no tensor {Q}"),
        (tensors(lambda t: t.update({Q: t[Q][:, :-1].clone()})), f"{Q} has shape"),
        (tensors(lambda t: t.update({Q: t[Q][:-1].clone()})), "63 rows"),
        (tensors(lambda t: t.update({Q: t[Q].to(torch.int8)})), f"{Q} holds I8: load an unquantized folder"),
        (tensors(lambda t: t.update({"model.extra": t[Q].clone()})), "model.extra"),
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


def test_a_head_stored_beside_a_tied_embedding_is_passed_over(save):
    model = random_model("llama", tie_word_embeddings=True)
    folder = save(model)
    expected = specbeam.generate(specbeam.load(folder), [1], max_new_tokens=5).token_ids
    tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(folder)
    assert specbeam.generate(specbeam.load(folder), [1], max_new_tokens=5).token_ids == expected


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
