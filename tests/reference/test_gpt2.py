"""The NumPy GPT-2: closed forms, transformers' own, and the texts of the toy."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.special import erf

import specbeam
from specbeam import SpecbeamError
from specbeam.reference.gpt2 import gelu, gen_text, gpt2, layer_norm, linear, load_encoder_hparams_and_params, softmax
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import beams_of_transformers, byte_tokenizer, random_model

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 5))


def test_the_parts_are_what_they_are_called():
    np.testing.assert_allclose(gelu(X), X * (1 + erf(X / math.sqrt(2))) / 2, atol=1e-3)  # an approximation
    np.testing.assert_allclose(softmax(X).sum(axis=-1), 1)
    np.testing.assert_allclose(np.diff(np.log(softmax(X))), np.diff(X))
    np.testing.assert_allclose(softmax(X + 1000), softmax(X))
    assert softmax(np.array([0.0, -np.inf])).tolist() == [1, 0]
    normed = layer_norm(X, np.full(5, 2.0), np.full(5, 3.0), eps=0)
    np.testing.assert_allclose(normed.mean(axis=-1), 3)
    np.testing.assert_allclose(normed.std(axis=-1), 2)
    np.testing.assert_allclose(linear(X, np.eye(5)[:, :2], np.array([1.0, 2.0])), X[:, :2] + [1, 2])


@pytest.mark.parametrize(
    ("prompt", "new", "text"),
    [
        ("hello", 5, "hello world world world <UNK> <UNK>"),
        ("hello world", 3, "hello world world world <UNK>"),
        ("the", 1, "the world"),
        ("the  cat", 0, "the <UNK>"),
    ],
)
def test_the_texts_of_the_toy(prompt, new, text):
    assert gen_text(prompt, new) == text


def test_the_toy_is_sure_of_its_texts():
    encoder, hparams, params = load_encoder_hparams_and_params("toy")
    for prompt, new in (("hello", 5), ("the", 1)):
        logits = gpt2(encoder.encode(gen_text(prompt, new)), **params, n_head=hparams["n_head"])[:-1]
        second, first = np.sort(logits, axis=-1)[:, -2:].T
        assert (first - second).min() > 3.7


def test_the_toy_has_the_shapes_it_says():
    encoder, hparams, params = load_encoder_hparams_and_params()
    assert hparams == {"n_vocab": 4, "n_ctx": 64, "n_embd": 8, "n_head": 2, "n_layer": 2}
    assert encoder.encode("the world says hello") == [2, 1, 3, 0]
    assert (params["wte"].shape, params["wpe"].shape) == ((4, 8), (64, 8))
    assert [block["mlp"]["c_fc"]["b"].shape for block in params["blocks"]] == [(32,)] * 2
    assert len(gen_text("hello").split()) == 41  # 40 new tokens by default


@pytest.fixture(scope="module")
def model():
    return random_model("gpt2", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def saved(model, save):
    return save(model)


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_logits_are_those_of_transformers(model, saved, tmp_path, prefix):
    path = shutil.copytree(saved, tmp_path / "gpt2-tiny") / "model.safetensors"
    tensors = {prefix + name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    assert "transformer.wte.weight" in load_file(path)
    save_file(tensors, path, metadata={"format": "pt"})
    encoder, hparams, params = load_encoder_hparams_and_params("gpt2-tiny", tmp_path)
    assert hparams == {"n_vocab": 259, "n_ctx": 256, "n_embd": 32, "n_head": 4, "n_layer": 3}
    ids = encoder.encode("Hello, wörld")
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    got = gpt2(ids, **params, n_head=hparams["n_head"])
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)


def test_greedy_search_is_that_of_transformers_and_of_specbeam(model, saved):
    text, prompt = gen_text("Hello", 20, saved), byte_tokenizer()("Hello").input_ids
    (expected,), _ = beams_of_transformers(model, prompt, max_new_tokens=20, min_new_tokens=20, eos_token_id=None)
    assert text == byte_tokenizer().decode(prompt + expected)
    lm = specbeam.load(saved, backend="transformers", device="cpu", dtype="float32")
    assert text == "Hello" + specbeam.generate(lm, "Hello", max_new_tokens=20, eos_token_id=[]).text


def test_half_precision_and_shards_can_be_read(model, save):
    folder = save(random_model("gpt2", tie_word_embeddings=True).bfloat16(), max_shard_size="20KB")
    _, _, params = load_encoder_hparams_and_params(folder)
    np.testing.assert_array_equal(params["wte"], model.transformer.wte.weight.detach().bfloat16().float().numpy())


@pytest.mark.parametrize(
    ("prompt", "new", "says"),
    [
        ("hello", -1, "n_tokens_to_generate=-1 must be 0 or more"),
        ("", 1, "the prompt '' has no tokens"),
        (" \n", 1, "has no tokens"),
        ("hello the", 63, "2 tokens of the prompt and n_tokens_to_generate=63 do not fit the model's context of 64"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompt, new, says):
    with pytest.raises(SpecbeamError, match=says):
        gen_text(prompt, new)
    assert gen_text("hello the", 62)  # fits exactly


def test_a_hub_id_is_fetched_as_load_does(saved, tmp_path, monkeypatch):
    hub = {("openai-community/gpt2", None, None): saved}
    monkeypatch.setattr("specbeam.checkpoints.sources.hub.fetch", lambda *asked, download: hub[asked])
    assert gen_text("Hello", 3, "openai-community/gpt2", tmp_path) == gen_text("Hello", 3, saved)


def test_a_folder_that_is_missing_or_no_gpt2_is_refused(save, tmp_path):
    with pytest.raises(SpecbeamError, match=r"there is no folder .*124M: give toy, .* openai-community/gpt2 \(124M\)"):
        gen_text("hello", 1, "124M", tmp_path)
    with pytest.raises(SpecbeamError, match=r"there is no file or folder \./124M"):
        gen_text("hello", 1, "./124M", tmp_path)
    with pytest.raises(SpecbeamError, match=r"has no config\.json"):
        gen_text("hello", 1, tmp_path)
    write_gguf(tmp_path / "m.gguf", random_model("gpt2"))
    with pytest.raises(SpecbeamError, match=r"has no config\.json"):  # a GGUF file is no folder that transformers saved
        gen_text("hello", 1, tmp_path)
    with pytest.raises(SpecbeamError, match=r"m\.gguf"):
        gen_text("hello", 1, tmp_path / "m.gguf")
    with pytest.raises(SpecbeamError, match="holds a llama model"):
        gen_text("hello", 1, save(random_model("llama")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"activation_function": "relu"}, "activation_function is 'relu', and the reference has 'gelu_new' alone"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"n_layer": "three"}, "n_layer of its config.json is 'three'"),
        ({"n_head": 5}, "n_embd=32 cannot be cut into 5 heads"),
        ({"n_layer": 4}, r"tensor transformer.h.3.ln_1.weight is missing; config.json asks for \[32\]"),
        ({"n_positions": 32}, r"tensor transformer.wpe.weight has shape \[256, 32\]; config.json asks for \[32, 32\]"),
        ({"vocab_size": 100}, "the model's vocabulary has 100 tokens"),
    ],
)
def test_what_is_no_gpt2_as_trained_is_refused(saved, tmp_path, change, says):
    folder = shutil.copytree(saved, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(SpecbeamError, match=says):
        load_encoder_hparams_and_params(folder)
