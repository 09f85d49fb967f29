"""A checkpoint is data: none of its code runs, nobody is asked, and no file outside its folder is read."""

import io
import json
import shutil
import sys

import pytest

import specbeam
from specbeam import SpecbeamError
from specbeam.checkpoints import open_checkpoint
from tests.conftest import byte_tokenizer, indexed, needs_torch, rewrite

pytestmark = needs_torch  # without transformers there is nothing that could run it

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({mark!r}).touch()
class Config(LlamaConfig): model_type = "mine"
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def folder_with_code(folder, tmp_path, monkeypatch):
    """A model with a file of code, which does not run. Nobody is asked whether it may."""
    (folder / "code_of_mine.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    monkeypatch.setattr(sys, "stdin", answers := io.StringIO("y\n" * 9))
    yield folder
    assert answers.tell() == 0
    assert not (tmp_path / "ran").exists()


INDEX = "model.safetensors.index.json"
OWN_MODEL = {"AutoModelForCausalLM": "code_of_mine.Model"}
REFUSED = r"code of its own .*, and a checkpoint's code is never run$"


def own_architecture(folder):
    names = OWN_MODEL | {"AutoConfig": "code_of_mine.Config"}
    rewrite(folder, "config.json", model_type="mine", auto_map=names)


def own_model(folder):
    rewrite(folder, "config.json", model_type="vit", auto_map=OWN_MODEL)


def own_part(folder):
    """transformers makes the parts of a model without asking whether their code is trusted."""
    decoder = {"model_type": "vit", "_name_or_path": str(folder), "auto_map": OWN_MODEL}
    parts = {"encoder": {"model_type": "bert"}, "decoder": decoder, "is_encoder_decoder": True}
    (folder / "config.json").write_text(json.dumps({"model_type": "encoder-decoder"} | parts))


@pytest.mark.parametrize("own", [own_architecture, own_model, own_part])
def test_code_of_a_model_does_not_run(folder_with_code, own):
    own(folder_with_code)
    with pytest.raises(SpecbeamError, match=REFUSED):
        specbeam.load(folder_with_code, device="cpu", backend="transformers")


def test_code_of_a_tokenizer_does_not_run(folder_with_code):
    names = {"AutoTokenizer": [None, "code_of_mine.Tokenizer"]}
    rewrite(folder_with_code, "tokenizer_config.json", tokenizer_class="MyTokenizer", auto_map=names)
    with pytest.raises(SpecbeamError, match=REFUSED):
        specbeam.load(folder_with_code)
    known = "PreTrainedTokenizerFast"  # transformers has this one
    rewrite(folder_with_code, "tokenizer_config.json", tokenizer_class=known)
    assert specbeam.load(folder_with_code).tokenizer("abc").input_ids == byte_tokenizer()("abc").input_ids


def test_a_model_that_transformers_knows_loads_without_its_code(folder_with_code):
    rewrite(folder_with_code, "config.json", auto_map=OWN_MODEL)
    for backend in ("torch", "transformers"):
        specbeam.load(folder_with_code, device="cpu", backend=backend)


def test_attention_that_a_checkpoint_names_is_not_fetched(folder):
    rewrite(folder, "config.json", attn_implementation="somebody/attention")
    assert specbeam.load(folder, device="cpu", backend="transformers").backend.vocab_size == 259


def test_pickles_and_files_of_weights_elsewhere_are_refused(folder):
    rewrite(folder, "config.json", transformers_weights="other.safetensors.index.json")
    with pytest.raises(SpecbeamError, match="transformers_weights"):
        specbeam.load(folder, backend="transformers")
    rewrite(folder, "config.json", transformers_weights=...)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SpecbeamError, match="only models saved as safetensors"):
        specbeam.load(folder, backend="transformers")


# Files outside the folder


def linked(name, target):
    """Replace a file by a link. The file lies beside the folder then."""

    def change(folder):
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(target)

    return change


def written(file, **content):
    return lambda folder: rewrite(folder, file, **content)


OUTSIDE = "Only files inside the folder are read"
NAMES = ["../other/model.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "", ".", "a\0b", "9" * 5000]
LINKED = ["model.safetensors", "config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *((indexed({"lm_head.weight": name}), OUTSIDE) for name in NAMES),
        *((linked(name, f"../{name}"), rf"{name} is a link to .*{OUTSIDE}") for name in LINKED),
        (linked("tokenizer.json", "tokenizer.json"), r"tokenizer\.json"),
        (written("tokenizer_config.json", fast_tokenizer_files=["../tokenizer.4.0.json"]), OUTSIDE),
        (written("tokenizer_config.json", gguf_file="/somewhere/model.gguf"), OUTSIDE),
        (written("tokenizer_config.json", vocab="../vocab.json"), OUTSIDE),
        (written("tokenizer_config.json", merges="../merges.txt"), OUTSIDE),
    ],
)
def test_files_outside_the_folder_are_refused(folder, change, says):
    change(folder)
    with pytest.raises(SpecbeamError, match=says):
        specbeam.load(folder)


def test_an_index_may_name_folders_inside_the_folder(folder):
    whole = specbeam.generate(specbeam.load(folder), [1, 2], max_new_tokens=5).token_ids
    names = dict.fromkeys(open_checkpoint(folder).shapes, "shards/one.safetensors")
    (folder / "shards").mkdir()
    (folder / "model.safetensors").rename(folder / "shards" / "one.safetensors")
    rewrite(folder, INDEX, weight_map=names)
    assert specbeam.generate(specbeam.load(folder), [1, 2], max_new_tokens=5).token_ids == whole


def test_a_link_inside_the_folder_and_a_link_to_the_folder_are_followed(folder, tmp_path):
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    (tmp_path / "link").symlink_to(folder)
    assert specbeam.load(tmp_path / "link").backend.vocab_size == 259


def test_a_snapshot_of_the_hub_is_links_to_its_blobs(folder, tmp_path):
    blobs = shutil.copytree(folder, tmp_path / "models--some--model" / "blobs")
    (snapshot := blobs.parent / "snapshots" / "abc").mkdir(parents=True)
    for number, file in enumerate([*blobs.iterdir()]):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert specbeam.load(snapshot).backend.vocab_size == 259
    (tmp_path / "elsewhere").write_text("{}")
    (snapshot / "generation_config.json").unlink()
    (snapshot / "generation_config.json").symlink_to("../../../elsewhere")
    with pytest.raises(SpecbeamError, match=r"generation_config\.json is a link to"):
        specbeam.load(snapshot)
