"""A checkpoint is data: none of its code runs, nobody is asked, and no file outside its folder is read."""

import io
import json
import shutil
import sys

import pytest

import specbeam
from specbeam import SpecbeamError
from specbeam.checkpoints import open_checkpoint
from tests.conftest import byte_tokenizer, rewrite

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class Config(LlamaConfig): model_type = "mine"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""


class Yes(io.StringIO):
    """Standard input that answers every question."""

    asked = 0

    def readline(self, *size):
        self.asked += 1
        return "y\n"


@pytest.fixture
def yes(monkeypatch):
    stream = Yes()
    monkeypatch.setattr(sys, "stdin", stream)
    return stream


@pytest.fixture
def folder(folder, tmp_path):
    """A model with a file of code. Running it leaves a file ``ran`` in ``tmp_path``."""
    (folder / "code_of_mine.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    return folder


def own_architecture(folder):
    names = {"AutoConfig": "code_of_mine.Config", "AutoModelForCausalLM": "code_of_mine.Model"}
    rewrite(folder, "config.json", model_type="mine", auto_map=names)


def own_model(folder):
    rewrite(folder, "config.json", model_type="vit", auto_map={"AutoModelForCausalLM": "code_of_mine.Model"})


def own_part(folder):
    """transformers makes the parts of a model without asking whether their code is trusted."""
    decoder = {
        "model_type": "vit",
        "_name_or_path": str(folder),
        "auto_map": {"AutoModelForCausalLM": "code_of_mine.Model"},
    }
    parts = {"encoder": {"model_type": "bert"}, "decoder": decoder, "is_encoder_decoder": True}
    (folder / "config.json").write_text(json.dumps({"model_type": "encoder-decoder"} | parts))


def own_tokenizer(folder):
    names = {"AutoTokenizer": [None, "code_of_mine.Tokenizer"]}
    rewrite(folder, "tokenizer_config.json", tokenizer_class="MyTokenizer", auto_map=names)


@pytest.mark.parametrize("own", [own_architecture, own_model, own_part])
def test_code_of_a_model_does_not_run(folder, tmp_path, yes, own):
    own(folder)
    with pytest.raises(SpecbeamError, match=r"code of its own .*, and a checkpoint's code is never run$"):
        specbeam.load(folder, device="cpu", backend="transformers")
    assert not yes.asked
    assert not (tmp_path / "ran").exists()


def test_code_of_a_tokenizer_does_not_run(folder, tmp_path, yes):
    own_tokenizer(folder)
    with pytest.raises(SpecbeamError, match=r"code of its own .*, and a checkpoint's code is never run$"):
        specbeam.load(folder)
    rewrite(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")  # transformers has this one
    assert specbeam.load(folder).tokenizer("abc").input_ids == byte_tokenizer()("abc").input_ids
    assert not yes.asked
    assert not (tmp_path / "ran").exists()


def test_a_model_that_transformers_knows_loads_without_its_code(folder, tmp_path, yes):
    rewrite(folder, "config.json", auto_map={"AutoModelForCausalLM": "code_of_mine.Model"})
    for backend in ("torch", "transformers"):
        specbeam.load(folder, device="cpu", backend=backend)
    assert not yes.asked
    assert not (tmp_path / "ran").exists()


def test_attention_that_a_checkpoint_names_is_not_fetched(folder):
    rewrite(folder, "config.json", attn_implementation="somebody/attention")
    assert specbeam.load(folder, device="cpu", backend="transformers").backend.vocab_size == 259


def test_pickles_are_not_opened(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SpecbeamError, match="only models saved as safetensors"):
        specbeam.load(folder, backend="transformers")


def test_files_of_weights_elsewhere_are_refused(folder):
    rewrite(folder, "config.json", transformers_weights="other.safetensors.index.json")
    with pytest.raises(SpecbeamError, match="transformers_weights"):
        specbeam.load(folder, backend="transformers")


# Files outside the folder


@pytest.mark.parametrize(
    "name", ["../other/model.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "", ".", "a\0b", "9" * 5000]
)
def test_an_index_names_files_inside_the_folder(folder, name):
    rewrite(folder, "model.safetensors.index.json", weight_map={"lm_head.weight": name})
    with pytest.raises(SpecbeamError, match="Only files inside the folder are read"):
        open_checkpoint(folder)


def test_an_index_may_name_folders_inside_the_folder(folder):
    whole = specbeam.generate(specbeam.load(folder), [1, 2], max_new_tokens=5).token_ids
    names = list(open_checkpoint(folder).shapes)
    (folder / "shards").mkdir()
    (folder / "model.safetensors").rename(folder / "shards" / "one.safetensors")
    rewrite(folder, "model.safetensors.index.json", weight_map=dict.fromkeys(names, "shards/one.safetensors"))
    assert specbeam.generate(specbeam.load(folder), [1, 2], max_new_tokens=5).token_ids == whole


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_that_leaves_the_folder_is_refused(folder, tmp_path, name):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(SpecbeamError, match=rf"{name} is a link to .*Only files inside the folder are read"):
        specbeam.load(folder)


def test_a_link_inside_the_folder_and_a_link_to_the_folder_are_followed(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(folder)
    assert specbeam.load(tmp_path / "link").backend.vocab_size == 259


def test_a_link_to_itself_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("tokenizer.json")
    with pytest.raises(SpecbeamError, match=r"tokenizer\.json"):
        specbeam.load(folder)


def test_a_snapshot_of_the_hub_is_links_to_its_blobs(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--some--model" / "snapshots" / "abc", tmp_path / "models--some--model" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(folder.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert specbeam.load(snapshot).backend.vocab_size == 259
    (tmp_path / "elsewhere").write_text("{}")
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to("../../../elsewhere")
    with pytest.raises(SpecbeamError, match=r"generation_config\.json is a link to"):
        specbeam.load(snapshot)


@pytest.mark.parametrize(
    "names",
    [
        {"fast_tokenizer_files": ["../tokenizer.4.0.json"]},
        {"gguf_file": "/somewhere/model.gguf"},
        {"vocab": "../vocab.json"},
        {"merges": "../merges.txt"},
    ],
)
def test_a_tokenizer_names_files_inside_the_folder(folder, names):
    rewrite(folder, "tokenizer_config.json", **names)
    with pytest.raises(SpecbeamError, match="Only files inside the folder are read"):
        specbeam.load(folder)
