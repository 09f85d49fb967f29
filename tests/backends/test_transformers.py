"""The transformers backend's own matters: loading, and the models that it refuses."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoConfig,
    Lfm2Config,
    Llama4TextConfig,
    MambaConfig,
    Phi3Config,
    Qwen3_5TextConfig,
)

import specbeam
from specbeam import SpecbeamError, hf
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import EOS, beams_of_transformers, needs_torch, random_model, rewrite

OPTIONS = {"max_new_tokens": 20, "num_beams": 3}


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_folder_is_loaded_through_transformers(save, architecture):
    model = random_model(architecture)
    lm = specbeam.load(save(model), backend="transformers", device="cpu")
    assert (lm.backend.name, lm.eos_token_ids) == ("transformers", {model.config.eos_token_id})
    expected = specbeam.generate(hf.wrap(model, lm.tokenizer), "hello", **OPTIONS)
    got = specbeam.generate(lm, "hello", **OPTIONS)
    assert (got.text, got.token_ids) == (expected.text, expected.token_ids)


def test_a_gguf_file_is_loaded_through_transformers(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"))
    ours, theirs = (specbeam.load(path, backend=backend, device="cpu") for backend in ("torch", "transformers"))
    assert specbeam.generate(theirs, [1, 2, 3], **OPTIONS).text == specbeam.generate(ours, [1, 2, 3], **OPTIONS).text


def test_what_we_do_not_have_runs_on_transformers_and_says_so(save, caplog):
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 259}
    model = GPTJForCausalLM(GPTJConfig(**sizes, eos_token_id=EOS)).eval()
    folder = save(model)
    lm = specbeam.load(folder, device="cpu")
    assert lm.backend.name == "transformers"
    (said,) = (record.message for record in caplog.records if record.name == "specbeam")
    assert str(folder) in said
    assert "'gptj' is not supported" in said
    expected, _ = beams_of_transformers(model, [1, 2, 3], **OPTIONS)
    assert specbeam.generate(lm, [1, 2, 3], **OPTIONS).token_ids == expected[0]
    with pytest.raises(SpecbeamError, match="'gptj' is not supported"):
        specbeam.load(folder, backend="torch", device="cpu")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "no-such-model"}, "transformers cannot load .*no-such-model"),
        # The experts of this model are not there.
        ({"model_type": "mixtral"}, r"lacks \d+ tensors of a MixtralForCausalLM, among them .*experts"),
        ({"return_dict": False}, "LlamaForCausalLM cannot run with its configuration"),
    ],
)
def test_a_configuration_of_another_model_is_refused_in_one_line(folder, changes, says):
    rewrite(folder, "config.json", **changes)
    with pytest.raises(SpecbeamError, match=says) as raised:
        specbeam.load(folder, backend="transformers", device="cpu")
    assert "\n" not in str(raised.value)


SMALL = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


EXPERTS = SMALL | {"num_local_experts": 2, "intermediate_size_mlp": 8}
GPT_NEO = {"vocab_size": 9, "hidden_size": 8, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]}


@pytest.mark.parametrize(
    ("make", "sizes", "says"),
    [
        (MambaConfig, SMALL, "running state"),
        (BloomConfig, {"vocab_size": 9, "hidden_size": 8, "n_layer": 1, "n_head": 2}, "takes no position_ids"),
        (FalconConfig, SMALL | {"alibi": True}, "does not follow"),
        (GPTNeoConfig, GPT_NEO, "does"),
        (Llama4TextConfig, EXPERTS, "layers of kind chunked_attention"),
        (Lfm2Config, SMALL | {"full_attn_idxs": []}, "layers of kind conv"),
        (Qwen3_5TextConfig, SMALL | {"num_key_value_heads": 2, "head_dim": 4}, "layers of kind linear_attention"),
    ],
)
def test_models_a_tree_cannot_be_laid_over_are_refused(make, sizes, says):
    with pytest.raises(SpecbeamError, match=f"cannot be evaluated at the nodes of a tree: .*{says}"):
        hf.wrap(AutoModelForCausalLM.from_config(make(**sizes)).eval())


def test_attention_without_masks_and_training_are_refused():
    model = random_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(SpecbeamError, match=r'flash_attention_2 .*attn_implementation="sdpa"'):
        hf.wrap(model)
    with pytest.raises(SpecbeamError, match=r"training mode.*model\.eval"):
        hf.wrap(random_model("llama").train())


def test_the_facts_are_those_of_the_model():
    backend = hf.wrap(random_model("gpt2", vocab_size=40)).backend
    assert (backend.vocab_size, backend.context_length) == (40, 256)
    assert backend.slot_bytes == 3 * 2 * 32 * 4  # layers, keys and values, features, bytes
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    lengths = {"max_position_embeddings": 512, "original_max_position_embeddings": 64}
    config = Phi3Config(**SMALL, **lengths, rope_parameters=rope, pad_token_id=0)
    assert hf.wrap(AutoModelForCausalLM.from_config(config).eval()).backend.context_length == 64


@needs_torch
def test_the_callers_model_stays_as_it_was():
    model = random_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    specbeam.generate(hf.wrap(model), [1, 2], **OPTIONS)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    model.train()(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()  # and can be trained


def test_without_a_tokenizer_there_are_ids_and_no_text():
    lm = hf.wrap(random_model("llama"))
    result = specbeam.generate(lm, [1, 2, 3], max_new_tokens=5)
    assert (result.text, len(result.token_ids)) == ("", 5)
    pieces = [*specbeam.stream(lm, [1, 2, 3], max_new_tokens=5)]
    assert [token for piece in pieces for token in piece.token_ids] == result.token_ids
    assert not any(piece.text for piece in pieces)
    with pytest.raises(SpecbeamError, match="has no tokenizer: give token ids"):
        specbeam.generate(lm, "hello")
    with pytest.raises(SpecbeamError, match=r"stop_strings.* has no tokenizer"):
        specbeam.generate(lm, [1], stop_strings="x")
