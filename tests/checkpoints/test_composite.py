"""Folders of models that also read images: their text models.

tests/backends/test_conformance.py compares the logits.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer, Gemma3Config, GenerationConfig

import specbeam
from specbeam import SpecbeamError
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.formats.composite import text_model
from specbeam.checkpoints.formats.folder_config import config_from_hugging_face
from specbeam.checkpoints.tokenizers.folder_tokenizer import OF_SEVERAL_PARTS
from specbeam.cli import main
from tests.checkpoints.test_folder import change_tensors
from tests.conftest import BOS, EOS, random_model, rewrite

TEMPLATE = (
    "{% for m in messages %}<bos>{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}|{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A template that reads contents as lists of parts alone."""


@pytest.fixture(scope="module")
def gemma(save):
    return save(random_model("gemma3 with images"))


@pytest.fixture(scope="module")
def mistral(save):
    return save(random_model("mistral3 with images", num_hidden_layers=1))


@pytest.fixture
def folder(gemma, tmp_path):
    return shutil.copytree(gemma, tmp_path / "gemma")


def renamed(folder, name_of):
    """Give the tensors of a folder other names, or remove those whose new name is None."""
    file = folder / "model.safetensors"
    tensors = {new: tensor for name, tensor in load_file(file).items() if (new := name_of(name)) is not None}
    save_file(tensors, file, metadata={"format": "pt"})


def as_transformers_5_holds_them(name):
    text = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
    return text if text != name else f"model.{name}"


def of_text_alone(name):
    text = name.replace("language_model.model.", "model.").replace("language_model.lm_head", "lm_head")
    return text if text != name else None


def test_the_text_model_is_the_same_in_each_layout_and_alone(folder, gemma):
    expected = specbeam.load(gemma).weights
    assert "language_model.model.norm.weight" in load_file(folder / "model.safetensors")
    renamed(folder, as_transformers_5_holds_them)
    assert specbeam.load(folder).weights == expected
    rewrite(folder, "config.json", model_type="gemma4_of_2030")  # any model that has such a text model
    assert specbeam.load(folder).weights == expected
    shutil.copy(gemma / "model.safetensors", folder)
    renamed(folder, of_text_alone)
    text = json.loads((folder / "config.json").read_text())["text_config"]
    (folder / "config.json").write_text(json.dumps(text))
    assert specbeam.load(folder).weights == expected


def test_what_is_passed_over_is_said_once_and_shown(gemma, caplog, capsys):
    specbeam.load(gemma)
    said = [record.message for record in caplog.records if "passed over" in record.message]
    assert said == [
        f"{gemma} reads text only: the weights of multi_modal_projector, vision_tower are passed over",
    ]
    assert main(["models", "show", str(gemma), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["architecture"], shown["context"]) == ("gemma3_text", 256)
    assert shown["passed_over"] == ["multi_modal_projector", "vision_tower"]
    text = load_file(gemma / "model.safetensors").items()
    assert shown["parameters"] == sum(tensor.numel() for name, tensor in text if name.startswith("language_model"))
    assert main(["models", "show", str(gemma)]) == 0
    assert "passed over    multi_modal_projector, vision_tower\n" in capsys.readouterr().out


def test_a_text_config_may_leave_out_what_transformers_knows():
    """As that of Gemma 3 with 4B parameters does."""
    text = {
        **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
    }
    content = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text, "vision_config": {}}
    names = [f"language_model.model.layers.{i}.input_layernorm.weight" for i in range(34)]
    config = config_from_hugging_face(text_model(content, names).config, names)
    theirs = Gemma3Config(**content).text_config
    assert (config.vocab_size, config.tied_head, config.num_layers) == (theirs.vocab_size, True, 34)
    written = config_from_hugging_face(theirs.to_dict(), names)
    assert config.layers == written.layers


@pytest.mark.parametrize("of_text", [True, False])
@pytest.mark.parametrize("of_all", [True, False, ...])
@pytest.mark.parametrize("stored", [False, True])
def test_a_head_is_tied_as_in_transformers(mistral, tmp_path, of_text, of_all, stored):
    """Except where transformers would go on with a random head."""
    folder = shutil.copytree(mistral, tmp_path / "model")
    text = json.loads((folder / "config.json").read_text())["text_config"]
    rewrite(folder, "config.json", tie_word_embeddings=of_all, text_config=text | {"tie_word_embeddings": of_text})

    if not stored:
        change_tensors(folder / "model.safetensors", lambda tensors: tensors.pop("language_model.lm_head.weight"))
    if not stored and of_all is not True and not of_text:
        with pytest.raises(SpecbeamError, match=r"has no tensor lm_head\.weight"):
            specbeam.load(folder, dtype="float32")
        return
    theirs, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    ids = torch.arange(5, 15)[None]
    if not info["missing_keys"]:
        expected = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0, 10:].tolist()
        lm = specbeam.load(folder, dtype="float32")
        assert specbeam.generate(lm, ids[0].tolist(), max_new_tokens=12).token_ids == expected


def test_the_ends_are_those_of_the_whole_model_and_then_of_the_text_model(folder):
    content = json.loads((folder / "config.json").read_text())
    (folder / "generation_config.json").unlink()
    for whole, text in (([EOS, 7], EOS), (..., [EOS, 9])):
        rewrite(folder, "config.json", eos_token_id=whole, text_config=content["text_config"] | {"eos_token_id": text})
        expected = GenerationConfig.from_model_config(json.loads((folder / "config.json").read_text())).eos_token_id
        assert open_checkpoint(folder).eos_token_ids == set(expected)


def test_a_quantized_folder_is_refused(folder):
    rewrite(folder, "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(SpecbeamError, match="is quantized with fp8"):
        specbeam.load(folder, backend="cpu")


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["TokenizersBackend", "GemmaProcessorOfItsOwn"])
def test_the_chat_template_of_a_processor(folder, file, kind):
    (folder / file).write_text(TEMPLATE if file.endswith("jinja") else json.dumps({"chat_template": TEMPLATE}))
    rewrite(folder, "tokenizer_config.json", tokenizer_class=kind, processor_class="Gemma3Processor")
    lm = specbeam.load(folder)
    message = {"role": "user", "content": "Hi"}
    assert specbeam.show_prompt(lm, [message]) == "<bos>user: Hi|assistant: "
    parts = [{"type": "text", "text": "Hi"}]
    assert specbeam.show_prompt(lm, [message | {"content": parts}]) == "<bos>user: Hi|assistant: "
    with pytest.raises(SpecbeamError, match="a part of type 'image', but specbeam reads text only: remove it"):
        specbeam.generate(lm, [message | {"content": [{"type": "image", "url": "x"}, *parts]}])


@pytest.mark.parametrize("architecture", OF_SEVERAL_PARTS)
@pytest.mark.parametrize("kind", [..., "TokenizersBackend", "LlamaTokenizer", "GemmaTokenizer"])
def test_the_tokenizer_is_that_of_transformers(folder, architecture, kind):
    content = json.loads((folder / "config.json").read_text())
    parts = {name: content[name] for name in ("text_config", "vision_config")} if architecture == "gemma3" else {}
    (folder / "config.json").write_text(json.dumps({"model_type": architecture, **parts}))
    rewrite(folder, "tokenizer_config.json", tokenizer_class=kind, unk_token="ÿ", image_token="<unused>")
    (folder / "tekken.json").write_text("{}")  # which only mistral_common reads beside a tokenizer.json
    ours = open_checkpoint(folder).tokenizer
    theirs = AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, specbeam.Tokenizer)
    for text in ("Hello, world", " two  spaces", "<bos>a<unused>"):
        assert ours(text).input_ids == theirs(text).input_ids
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id) == (BOS, EOS)


@pytest.mark.parametrize("text", [3, [], {"model_type": []}, {"model_type": "no_such_text"}, ...])
def test_a_folder_without_a_text_model_of_ours_is_not_native(folder, text):
    rewrite(folder, "config.json", text_config=text)
    with pytest.raises(SpecbeamError, match="architecture 'gemma3' is not supported"):
        _ = open_checkpoint(folder).config
    assert open_checkpoint(folder).facts.architecture == "gemma3"
