"""Aliases of the hub: huggingface_hub over a cache on disk, and the figures that the registry states for them."""

import json
import math
import os
import shutil
import socket
import struct
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from math import prod
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES
from huggingface_hub import constants
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import specbeam
from specbeam import SpecbeamError
from specbeam.backends.cpu.weights import bytes_per_token, memory_bytes
from specbeam.checkpoints import locate, open_checkpoint
from specbeam.checkpoints.sources import registry
from specbeam.checkpoints.sources.registry import ALIASES, Alias, HubModel, Wheels
from specbeam.cli import main
from tests.backends.test_whisper import random_whisper
from tests.checkpoints.test_ctranslate2 import text, write
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import byte_tokenizer, random_model, reference_model

Q4_K, Q5_K, Q6_K, Q8_0 = (getattr(GGMLQuantizationType, name) for name in ("Q4_K", "Q5_K", "Q6_K", "Q8_0"))
F32, BF16, Q4_0, Q5_0, Q5_1 = (getattr(GGMLQuantizationType, name) for name in ("F32", "BF16", "Q4_0", "Q5_0", "Q5_1"))
MXFP4 = GGMLQuantizationType.MXFP4


# One alias, in a cache on disk


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub without network, and in the registry a model "toy" of the repository org/toy-GGUF.

    Returns the folder of the repository, which has to be made by ``download``.
    """
    toy = Alias(HubModel("org/toy-GGUF", "toy-q8_0.gguf"), 1_000_000, 2_000_000, "mit", True, "a toy")
    monkeypatch.setitem(registry.ALIASES, "toy", toy)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SPECBEAM_HOME", str(tmp_path / "home"))
    return tmp_path / "hub/models--org--toy-GGUF"


def download(repository, *files):
    """What huggingface_hub leaves in its cache: blobs, and a snapshot of links to them."""
    commit = "c" * 40
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs/main").write_text(commit)
    for folder in ("blobs", f"snapshots/{commit}"):
        (repository / folder).mkdir(parents=True, exist_ok=True)
    for file in files:
        write_gguf(repository / "blobs" / file, random_model("llama"))
        (repository / f"snapshots/{commit}/{file}").symlink_to(f"../../blobs/{file}")
    return repository / f"snapshots/{commit}"


@pytest.fixture
def models(capsys):
    """Runs an action of ``specbeam models``. Returns what it prints, or how it refuses."""

    def models(*words, refuses=False):
        assert main(["models", *words]) == (2 if refuses else 0)
        out, err = capsys.readouterr()
        return err if refuses else out

    return models


def listed(models):
    return {model["name"]: model for model in json.loads(models("list", "--json"))}


def test_an_alias_of_the_hub_is_loaded_listed_shown_and_removed(cache, models):
    assert "fetches it" not in models("show", "toy")
    assert listed(models)["toy"]["bytes_to_fetch"] == 1_000_000
    path = download(cache, "toy-q8_0.gguf") / "toy-q8_0.gguf"
    assert locate("toy") == path
    assert specbeam.load("toy").backend.vocab_size == 259
    assert models("pull", "toy") == f"{path}\n"
    found = listed(models)
    assert (found["toy"]["path"], found["toy"]["bytes_to_fetch"]) == (str(path), 0)
    assert found["toy"]["bytes_on_disk"] == path.stat().st_size
    assert "org/toy-GGUF" not in found
    assert json.loads(models("show", "toy", "--json"))["architecture"] == "llama"
    assert models("rm", "toy").startswith("removed toy: ")
    assert not cache.exists()
    assert "toy is not on this machine: there is nothing to remove" in models("rm", "toy", refuses=True)


def test_an_alias_that_was_fetched_asks_nobody(cache, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for function in ("model_info", "list_repo_files", "snapshot_download", "hf_hub_download"):
        monkeypatch.setattr(huggingface_hub, function, None)
    path = download(cache, "toy-q8_0.gguf") / "toy-q8_0.gguf"
    assert locate("toy") == path


def test_a_whisper_that_faster_whisper_has_fetched_is_found_listed_and_removed(cache, models, monkeypatch):
    """With the files that faster-whisper asks for."""
    monkeypatch.setitem(registry.ALIASES, "toy", replace(ALIASES["whisper-tiny"], origin=HubModel("org/toy")))
    cache = cache.with_name("models--org--toy")
    snapshot, made = download(cache), write(cache / "made", random_whisper(), "float16")
    assert listed(models)["toy"]["path"] is None
    files = ("config.json", "vocabulary.txt", "model.bin", "tokenizer.json")
    byte_tokenizer().backend_tokenizer.save(str(made / "tokenizer.json"))
    for file in files:
        assert listed(models)["toy"]["path"] is None  # its fetch was interrupted
        (made / file).rename(cache / "blobs" / file)
        (snapshot / file).symlink_to(f"../../blobs/{file}")
    made.rmdir()
    assert locate("toy") == locate("org/toy") == snapshot
    assert specbeam.load("toy").backend.features_shape is not None
    found = listed(models)
    assert (found["toy"]["path"], found["toy"]["bytes_to_fetch"]) == (str(snapshot), 0)
    assert found["toy"]["bytes_on_disk"] > (cache / "blobs/model.bin").stat().st_size
    assert "org/toy" not in found
    assert json.loads(models("show", "toy", "--json"))["architecture"] == "whisper"
    assert models("rm", "toy").startswith("removed toy: ")
    assert not cache.exists()
    rows = json.loads(models("show", "toy", "--json"))
    assert (rows["repository"], rows["license"], "file" in rows) == ("org/toy", "mit", False)


def test_an_alias_asks_the_hub_for_its_file(cache, monkeypatch):
    def hf_hub_download(repository, file, revision=None, local_files_only=False):
        assert (repository, file, local_files_only) == ("org/toy-GGUF", "toy-q8_0.gguf", False)
        return str(download(cache, file) / file)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert locate("toy").name == "toy-q8_0.gguf"


def test_an_alias_that_cannot_be_fetched_is_named_with_its_repository(cache):
    with pytest.raises(SpecbeamError, match=r"cannot fetch toy: org/toy-GGUF is not in the local cache and cannot be"):
        locate("toy")
    with pytest.raises(SpecbeamError, match="toy is not on this machine: fetch it with specbeam models pull toy"):
        locate("toy", download=False)
    with pytest.raises(SpecbeamError, match="revision='main' goes with a hub id, and toy is not a hub id"):
        locate("toy", "main")


def test_other_files_of_the_repository_are_listed_and_stay(cache, models):
    snapshot = download(cache, "toy-q8_0.gguf", "toy-f16.gguf")
    found = listed(models)
    assert found["toy"]["path"] == str(snapshot / "toy-q8_0.gguf")
    assert found["org/toy-GGUF"]["description"] == "has toy-f16.gguf, toy-q8_0.gguf: name one after a colon"
    says = "the hub's cache has toy-f16.gguf of org/toy-GGUF too: specbeam models rm org/toy-GGUF removes all of it"
    assert says in models("rm", "toy", refuses=True)
    assert (snapshot / "toy-q8_0.gguf").exists()


def test_models_of_the_hub_are_listed_with_what_they_need(cache, models, save, tmp_path):
    folder = tmp_path / f"hub/models--some--model/snapshots/{'a' * 40}"
    shutil.copytree(save(random_model("llama")), folder)
    (tmp_path / "hub/models--some--model/refs").mkdir()
    (tmp_path / "hub/models--some--model/refs/main").write_text("a" * 40)
    other = shutil.copytree(folder.parents[1], tmp_path / "hub/models--some--other") / f"snapshots/{'a' * 40}"
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "opt"}))
    found = listed(models)
    assert found["some/model"]["description"] == "llama, float32"
    assert found["some/model"]["memory"] > 0
    assert found["some/other"]["memory"] is None
    assert "opt, float32; not for the cpu backend: " in found["some/other"]["description"]


# Figures


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("quantize", ["int8", "int4", "float32"])
def test_memory_is_that_of_the_weights_and_of_the_cache(save, kind, quantize):
    lm = specbeam.load(save(random_model(kind)), backend="cpu", quantize=quantize)
    checkpoint = open_checkpoint(locate(save(random_model(kind))))
    with_none, with_ten = (memory_bytes(checkpoint, quantize, tokens) for tokens in (0, 10))
    assert with_ten - with_none == 10 * lm.backend.slot_bytes
    parts = [part for parts in lm.backend._weights.parts.values() for part in parts]
    assert with_none == pytest.approx(sum(part.size for part in parts), abs=64 * len(parts))


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_token_reads_all_weights_but_the_embedding_and_the_other_experts(save, kind):
    model = random_model(kind, intermediate_size=64, moe_intermediate_size=32)  # whole blocks of 16 rows
    experts = model.config.num_experts_per_tok / model.config.num_experts if kind == "qwen3_moe" else 1
    weights = {
        name: math.prod(tensor.shape) for name, tensor in model.state_dict().items() if "embed_tokens" not in name
    }
    read = sum(size * (experts if ".experts." in name else 1) for name, size in weights.items())
    assert bytes_per_token(open_checkpoint(save(model)), "float32") == pytest.approx(
        4 * read, rel=0.03
    )  # a router has whole blocks, too


def is_close(stated, computed):
    """Whether a figure is what a computation gives, to three digits."""
    return abs(stated - computed) <= 0.005 * computed


@pytest.mark.models
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m", "qwen2.5-coder-0.5b-instruct"])
def test_the_figures_of_an_alias_are_those_of_its_file(name):
    checkpoint = open_checkpoint(reference_model(name))
    assert checkpoint.facts.size == ALIASES[name].size
    assert is_close(ALIASES[name].memory, memory_bytes(checkpoint, "keep"))
    assert is_close(ALIASES[name].bytes_per_token, bytes_per_token(checkpoint, "keep"))
    assert ("tokenizer.chat_template" in checkpoint.metadata) is ALIASES[name].chats


def shape(architecture, hidden, inner, layers, heads, kv_heads, vocab, tied=True, **more):
    """The architecture of a model, and the keys of its config.json that say how large it is."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    return architecture, sizes | {"max_position_embeddings": 32768} | more


def gemma4(layers, hidden, inner, kv_heads, period, shared, wide):
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    more = {"head_dim": 256, "layer_types": kinds, "num_kv_shared_layers": shared, "use_double_wide_mlp": wide}
    return shape("gemma4_text", hidden, inner, layers, 8, kv_heads, 262144, **more)


def lfm2(layers, attention):
    return {"layer_types": ["full_attention" if i in attention else "conv" for i in range(layers)]}


SMALL, LARGE = (2, 5, 8, 10, 12, 14), (2, 6, 10, 14, 18, 21)
"""The layers of LFM2 that have attention."""
LFM2_EXPERTS = {"moe_intermediate_size": 1792, "num_experts": 32, "num_experts_per_tok": 4, "num_dense_layers": 2}
QWEN_EXPERTS = {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
SHAPES = {
    "qwen3-30b-a3b": shape("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, False, head_dim=128, **QWEN_EXPERTS),
    "gpt-oss-20b": shape("gpt_oss", 2880, 2880, 24, 64, 8, 201088, False, head_dim=64, num_local_experts=32),
    "qwen3-8b": shape("qwen3", 4096, 12288, 36, 32, 8, 151936, False, head_dim=128),
    "ministral3-8b-instruct": shape("ministral3", 4096, 14336, 34, 32, 8, 131072, False, head_dim=128),
    "qwen2.5-7b-instruct": shape("qwen2", 3584, 18944, 28, 28, 4, 152064, False),
    "lfm2.5-8b-a1b": shape("lfm2_moe", 2048, 7168, 24, 32, 8, 128000, **lfm2(24, LARGE), **LFM2_EXPERTS),
    "gemma4-e4b-it": gemma4(42, 2560, 10240, 2, 6, 18, wide=False),
    "qwen3-4b": shape("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128),
    "gemma4-e2b-it": gemma4(35, 1536, 6144, 1, 5, 20, wide=True),
    "ministral3-3b-instruct": shape("ministral3", 3072, 9216, 26, 32, 8, 131072, head_dim=128),
    "granite4.1-3b": shape("granite", 2560, 8192, 40, 40, 8, 100352),
    "gemma3-4b-it": shape("gemma3_text", 2560, 10240, 34, 8, 4, 262208, head_dim=256, sliding_window=1024),
    "phi4-mini-instruct": shape("phi3", 3072, 8192, 32, 24, 8, 200064, max_position_embeddings=4096),
    "smollm3-3b": shape("smollm3", 2048, 11008, 36, 16, 4, 128256),
    "llama3.2-3b-instruct": shape("llama", 3072, 8192, 28, 24, 8, 128256),
    "qwen3-1.7b": shape("qwen3", 2048, 6144, 28, 16, 8, 151936, head_dim=128),
    "lfm2.5-1.2b-instruct": shape("lfm2", 2048, 12288, 16, 32, 8, 65536, **lfm2(16, SMALL)),
    "exaone4-1.2b": shape("exaone4", 2048, 4096, 30, 32, 8, 102400, layer_types=["full_attention"] * 30),
    "qwen2.5-1.5b-instruct": shape("qwen2", 1536, 8960, 28, 12, 2, 151936, False),
    "gemma3-1b-it": shape("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512),
    "llama3.2-1b-instruct": shape("llama", 2048, 8192, 16, 32, 8, 128256),
    "olmo2-1b-instruct": shape("olmo2", 2048, 8192, 16, 16, 16, 100352, False, max_position_embeddings=4096),
    "smollm2-1.7b-instruct": shape("llama", 2048, 8192, 24, 32, 32, 49152),
    "qwen3-0.6b": shape("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128),
    "qwen2.5-0.5b-instruct": shape("qwen2", 896, 4864, 24, 14, 2, 151936, False),
    "lfm2.5-350m": shape("lfm2", 1024, 6656, 16, 16, 8, 65536, **lfm2(16, SMALL)),
    "hy-mt1.5-1.8b": shape("hunyuan_v1_dense", 2048, 6144, 32, 16, 4, 120818, head_dim=128),
    "qwen2.5-coder-1.5b-instruct": shape("qwen2", 1536, 8960, 28, 12, 2, 151936, False),
    "qwen2.5-coder-0.5b-instruct": shape("qwen2", 896, 4864, 24, 14, 2, 151936, False),
}
"""The models' own configurations. The size of the file that follows from them tells whether they are right."""
SHAPES["exaone4-1.2b"][1].update(sliding_window=None, sliding_window_pattern=None)


class Shaped:
    """A model of transformers without weights: of all tensors it has the shapes."""

    def __init__(self, architecture, keys):
        self.config = CONFIG_MAPPING[architecture](**keys)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(self.config)

    def state_dict(self):
        shapes = {name: tuple(tensor.shape) for name, tensor in self._model.state_dict().items()}
        return {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}


def types(mixture, config):
    """The types that llama.cpp gives the matrices of a file by their names, for each mixture that an alias has."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * layers
    with_attention = [i for i, kind in enumerate(kinds) if kind != "conv"]

    def has_more_bits(number, count):
        return number < count // 8 or number >= 7 * count // 8 or (number - count // 8) % 3 == 2

    def k_quant(name, columns):
        _, number, tensor = name.split(".")[:3] if name.startswith("blk.") else ("", 0, name.split(".")[0])
        if tensor == "output" or (tensor == "token_embd" and config.tie_word_embeddings):
            chosen = Q6_K
        elif tensor == "attn_qkv":
            chosen = Q5_K
        elif tensor == "attn_v":
            chosen = Q6_K if has_more_bits(with_attention.index(int(number)), len(with_attention)) else Q4_K
        else:
            chosen = Q6_K if tensor.startswith("ffn_down") and has_more_bits(int(number), layers) else Q4_K
        return chosen if columns % 256 == 0 else {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0}[chosen]

    gemma = {"token_embd.weight": Q8_0, "per_layer_model_proj.weight": BF16}
    return {
        "Q4_K_M": k_quant,
        "Q8_0": lambda name, columns: Q8_0,
        "Q4_0": lambda name, columns: gemma.get(name, Q4_0),
        "MXFP4": lambda name, columns: MXFP4 if "exps" in name else Q8_0,
    }[mixture]


def write_header(path, name):
    """A file with the header of an alias's, without a tokenizer, and holes for its matrices. Returns their bytes."""
    model, written = Shaped(*SHAPES[name]), []
    type_of = types(ALIASES[name].description.split(", ")[1].split(":")[0], model.config)

    def hole(name, array, kind):
        if kind is F32:
            return np.broadcast_to(np.float32(0), array.shape), F32
        kind = type_of(name, array.shape[-1])
        weights, block_bytes = GGML_QUANT_SIZES[kind]
        return np.broadcast_to(np.uint8(0), (*array.shape[:-1], array.shape[-1] // weights * block_bytes)), kind

    def finish(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        written.extend(info for tensors in writer.tensors for info in tensors.values())
        writer.close()

    write_gguf(path, model, Q4_K, tokenizer=False, quantize=hole, finish=finish)
    start = size = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as file:
        for info in written:
            if any(info.tensor.strides):  # numbers that are no weights, such as the divisors of rotations
                file.seek(size)
                file.write(info.tensor.tobytes())
            size += -(-info.nbytes // 32) * 32
        file.truncate(size)
    return size - start


WHISPERS = {
    # hidden size, heads, layers of the encoder and of the decoder, mel bins, vocabulary
    "whisper-tiny": (384, 6, 4, 4, 80, 51865),
    "whisper-tiny.en": (384, 6, 4, 4, 80, 51864),
    "whisper-base": (512, 8, 6, 6, 80, 51865),
    "whisper-base.en": (512, 8, 6, 6, 80, 51864),
    "whisper-small": (768, 12, 12, 12, 80, 51865),
    "whisper-small.en": (768, 12, 12, 12, 80, 51864),
    "whisper-medium": (1024, 16, 24, 24, 80, 51865),
    "whisper-medium.en": (1024, 16, 24, 24, 80, 51864),
    "whisper-large-v3": (1280, 20, 32, 32, 128, 51866),
    "whisper-large-v3-turbo": (1280, 20, 32, 4, 128, 51866),
}
"""The models' own configurations. The size of a file that follows from them tells whether they are right."""


def whisper_variables(hidden, heads, encoder_layers, decoder_layers, bands, vocab):
    """The names and the shapes of a model.bin's variables, and its numbers with their types."""
    yield "decoder/embeddings/weight", (vocab, hidden)
    for part, layers, positions in (("encoder", encoder_layers, 1500), ("decoder", decoder_layers, 448)):
        yield f"{part}/position_encodings/encodings", (positions, hidden)
        yield f"{part}/num_heads", ("h", heads)
        norms = [part]
        for layer in (f"{part}/layer_{n}" for n in range(layers)):
            linear = {"self_attention/linear_0": (3, 1), "self_attention/linear_1": (1, 1)}
            linear |= {"ffn/linear_0": (4, 1), "ffn/linear_1": (1, 4)}
            if part == "decoder":
                linear |= {"attention/linear_0": (1, 1), "attention/linear_1": (2, 1), "attention/linear_2": (1, 1)}
            for name, (rows, columns) in linear.items():
                yield f"{layer}/{name}/weight", (rows * hidden, columns * hidden)
                yield f"{layer}/{name}/bias", (rows * hidden,)
            norms += {f"{layer}/{name.split('/')[0]}" for name in linear}
        for norm in norms:
            yield from ((f"{norm}/layer_norm/{end}", (hidden,)) for end in ("beta", "gamma"))
    for number, columns in (("1", bands), ("2", hidden)):
        yield f"encoder/conv{number}/weight", (hidden, columns, 3)
        yield f"encoder/conv{number}/bias", (hidden,)
    yield from ((f"decoder/{n}", ("b", 0)) for n in ("alibi", "scale_embeddings", "start_from_zero_embedding"))
    yield from ((f"decoder/{n}", ("b", value)) for n, value in (("activation", 3), ("pre_norm", 1)))
    yield from ((f"decoder/{n}", ("h", value)) for n, value in (("alignment_heads", 1), ("alignment_layer", -1)))


def as_converted_later(variables):
    """Variables as large-v3 and its turbo have them, with two numbers more."""
    yield from variables
    yield from ((f"decoder/{name}", ("b", 0)) for name in ("alibi_use_positive_positions", "scale_alibi"))


def write_model_bin(path, variables):
    """A model.bin of float16 whose weights are holes."""
    found = sorted(variables)
    with path.open("wb") as file:
        file.write(struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(found)))
        for name, shape in found:
            file.write(text(name))
            if isinstance(shape[0], str):
                kind, number = shape
                file.write(struct.pack(f"<BBI{kind}", 0, {"b": 1, "h": 2}[kind], struct.calcsize(kind), number))
            else:
                file.write(struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, 4, 2 * prod(shape)))
                file.seek(2 * prod(shape), 1)
        file.write(struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight"))


@pytest.mark.parametrize("name", WHISPERS)
def test_a_whisper_of_the_hub_runs_natively_and_its_figures_are_right(name, tmp_path):
    variables = whisper_variables(*WHISPERS[name])
    write_model_bin(tmp_path / "model.bin", as_converted_later(variables) if "-v3" in name else variables)
    alias, checkpoint = ALIASES[name], open_checkpoint(tmp_path)
    assert checkpoint.facts.size == alias.size
    assert is_close(alias.memory, memory_bytes(checkpoint, "int8"))


@pytest.mark.parametrize("name", SHAPES)
def test_an_alias_of_the_hub_runs_natively_and_its_figures_are_right(name, tmp_path):
    """From the header that its file must have, since its weights are not here."""
    path, alias = tmp_path / "header.gguf", ALIASES[name]
    weights = write_header(path, name)
    tokenizer = alias.size - weights
    assert 1_000_000 < tokenizer < 16_000_000  # of 49,000 to 262,000 tokens
    checkpoint = open_checkpoint(path)
    assert checkpoint.quantized
    assert is_close(alias.memory, memory_bytes(checkpoint, "keep"))
    assert is_close(alias.bytes_per_token, bytes_per_token(checkpoint, "keep"))


def test_all_aliases_of_the_hub_are_checked():
    assert {name for name, alias in ALIASES.items() if not isinstance(alias.origin, Wheels)} == {*SHAPES, *WHISPERS}
    files = [alias.origin for alias in ALIASES.values() if isinstance(alias.origin, HubModel)]
    assert len({*files}) == len(files)
    assert all(file.repository.count("/") == 1 for file in files)
    assert all(file.file is None or file.file.endswith(".gguf") for file in files)


# The script that asks the hub


@pytest.fixture
def ask(cache, monkeypatch, tmp_path, capsys):
    """Runs .ci/aliases on "toy" with a hub that has the alias as stated but for the changes. Returns what it prints."""
    script = SourceFileLoader("aliases", str(Path(__file__).parents[2] / ".ci/aliases")).load_module()
    file = tmp_path / "toy.gguf"
    write_gguf(file, random_model("llama"))
    memory = memory_bytes(open_checkpoint(file), "int8")
    for name in ("memory_bytes", "bytes_per_token"):
        monkeypatch.setattr(script, name, lambda *_: memory)  # the file is not quantized
    toy = Alias(HubModel("org/toy-GGUF", "toy-q8_0.gguf"), file.stat().st_size, memory, "mit", True, "a toy", memory)
    monkeypatch.setattr(huggingface_hub.HfFileSystem, "read_block", lambda *_: file.read_bytes())

    def ask(status, license="mit", name="toy-q8_0.gguf", gated=False, **changes):
        def model_info(repository, files_metadata=False, revision=None, timeout=None):
            assert repository == "org/toy-GGUF"
            files = [SimpleNamespace(rfilename=name, size=file.stat().st_size)]
            return SimpleNamespace(gated=gated, card_data={"license": license}, siblings=files)

        monkeypatch.setattr(huggingface_hub, "model_info", model_info)
        monkeypatch.setitem(registry.ALIASES, "toy", replace(toy, **changes))
        assert script.main(["toy"]) == status
        return capsys.readouterr().out.strip()

    return ask


def test_the_script_says_what_the_hub_has_otherwise(ask):
    assert ask(0) == "toy: as stated"
    assert ask(1, license="gemma") == "toy: the license is gemma, not mit"
    assert ask(1, gated="manual") == "toy: org/toy-GGUF is gated"
    assert ask(1, name="toy-f16.gguf") == "toy: org/toy-GGUF has no toy-q8_0.gguf, but toy-f16.gguf"
    assert "bytes, not 17" in ask(1, size=17)
    assert "the memory is" in ask(1, memory=17)
    assert "a token reads" in ask(1, bytes_per_token=17)
    assert ask(1, chats=False) == "toy: the file has a chat template"


def test_the_script_says_that_no_hub_answers():
    command = [sys.executable, str(Path(__file__).parents[2] / ".ci/aliases")]
    with socket.socket() as silent:  # bound, and nobody listens
        silent.bind(("127.0.0.1", 0))
        address = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(command, env=os.environ | address, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3
    assert done.stderr.startswith("no hub answers, so nothing is checked: ")
    assert done.stdout == ""
