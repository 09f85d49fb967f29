"""Token ids in a checkpoint's configuration that are no tokens: negative ones stand for none, others are refused."""

import struct

import pytest
import torch
from gguf import GGUFValueType

import specbeam
from specbeam import SpecbeamError, hf
from tests.checkpoints.test_gguf import write_gguf
from tests.conftest import EOS, random_model, rewrite

LAST = 258
"""The last token of the vocabulary, which an index of -1 would mean."""
NEW = 6


@pytest.fixture(scope="module")
def model():
    """A model whose texts consist of the last token, unless something forbids that."""
    model = random_model("llama")
    model.lm_head.weight.data[LAST] = 0
    with torch.no_grad():
        hidden = model.model(torch.tensor([[5, 6] + [LAST] * NEW])).last_hidden_state[0, 1:]
    model.lm_head.weight.data[LAST] = 50 * torch.linalg.lstsq(hidden, torch.ones(len(hidden), 1)).solution[:, 0]
    return model


@pytest.fixture
def load(model, save):
    """Loads the model with these entries in its generation_config.json, or in its config.json."""

    def load(file="generation_config.json", **entries):
        folder = save(model)
        for name in ("generation_config.json", "config.json"):
            rewrite(folder, name, **{"eos_token_id": ..., **(entries if name == file else {})})
        return specbeam.load(folder, dtype="float32", device="cpu")

    return load


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("eos", [-1, [-1], [EOS, -1]])
def test_a_negative_end_token_masks_no_token(load, file, eos):
    lm = load(file, eos_token_id=eos)
    for num_beams in (1, 3):
        result = specbeam.generate(lm, [5, 6], min_new_tokens=NEW, max_new_tokens=NEW, num_beams=num_beams)
        assert result.token_ids == [LAST] * NEW
    assert lm.eos_token_ids == ({EOS} if EOS in (eos if isinstance(eos, list) else ()) else set())


def test_the_same_holds_for_a_model_of_transformers(model):
    model.generation_config.eos_token_id = -1
    lm = hf.wrap(model)
    assert specbeam.generate(lm, [5, 6], min_new_tokens=NEW, max_new_tokens=NEW).token_ids == [LAST] * NEW
    ids = torch.tensor([[5, 6]])
    for extra in ({}, {"custom_generate": hf.generate}):
        rows = model.generate(ids, do_sample=False, min_new_tokens=NEW, max_new_tokens=NEW, **extra)
        assert rows[0, 2:].tolist() == [LAST] * NEW
    model.generation_config.eos_token_id = EOS


def test_the_same_holds_for_a_gguf_file(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", random_model("llama"))
    key = b"tokenizer.ggml.eos_token_id" + struct.pack("<I", GGUFValueType.UINT32)
    content = path.read_bytes()
    assert key + struct.pack("<I", EOS) in content
    path.write_bytes(content.replace(key + struct.pack("<I", EOS), key + struct.pack("<i", -1)))
    assert specbeam.load(path, dtype="float32").eos_token_ids == set()


@pytest.mark.parametrize(
    "entries",
    [
        {"forced_bos_token_id": -1},
        {"forced_eos_token_id": -1},
        {"forced_eos_token_id": [-1]},
        {"suppress_tokens": [-1]},
        {"suppress_tokens": [-1, 300]},
        {"begin_suppress_tokens": [-1]},
        {"bad_words_ids": [[-1], [LAST, -1], [LAST, 300]]},
        {"bos_token_id": -1, "pad_token_id": -1, "decoder_start_token_id": -1},
    ],
)
def test_ids_that_no_text_can_contain_force_and_forbid_nothing(load, entries):
    lms = load(**entries), load()
    for num_beams in (1, 3):
        options = {"max_new_tokens": NEW, "eos_token_id": EOS, "num_beams": num_beams}
        found, expected = (specbeam.generate(lm, [5], **options).token_ids for lm in lms)
        assert LAST in found
        assert found == expected


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id"])
def test_a_forced_token_that_the_model_lacks_is_refused_by_name(load, name):
    with pytest.raises(SpecbeamError, match=f"{name} 259 is not in the vocabulary of 259"):
        specbeam.generate(load(**{name: 259}), [5], max_new_tokens=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("forced_bos_token_id", "a"), ("forced_eos_token_id", False), ("suppress_tokens", 1.5)),
        *(("suppress_tokens", [True]), ("bad_words_ids", [3]), ("bad_words_ids", 3)),
    ],
)
def test_values_of_another_kind_are_refused_in_one_line(load, name, value):
    with pytest.raises(SpecbeamError, match=r"generation_config\.json") as raised:
        specbeam.generate(load(**{name: value}), [5], max_new_tokens=3)
    assert "\n" not in str(raised.value)
