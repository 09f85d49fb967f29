"""Token ids in a checkpoint's configuration that are no tokens: negative ones stand for none, others are refused."""

import struct

import pytest
import torch
from gguf import GGUFValueType

import specbeam
from specbeam import SpecbeamError, hf
from specbeam.checkpoints.tokenizers.gguf_tokenizer import tokenizer_from_gguf
from specbeam.checkpoints.tokenizers.gguf_vocabulary import vocabulary_from_gguf
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
    content = content.replace(key + struct.pack("<I", EOS), key + struct.pack("<i", -1))
    path.write_bytes(content)
    assert specbeam.load(path, dtype="float32").eos_token_ids == {EOS}  # by its name, <eos>
    path.write_bytes(content.replace(b"<eos>", b"<new>"))
    assert specbeam.load(path, dtype="float32").eos_token_ids == set()


STOP, FIM = ["<stop>"], ["<|fim_prefix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
HARMONY = ["<|return|>", "<|call|>", "<|end|>", "<|start|>"]
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


@pytest.mark.parametrize(
    ("tokens", "kind", "ends", "hidden"),
    [
        *((["<|im_end|>"], kind, ["<|im_end|>"], ["<|im_end|>"]) for kind in (NORMAL, CONTROL, USER_DEFINED)),
        (["</s>", "<end_of_turn>", "<|user|>"], USER_DEFINED, ["</s>", "<end_of_turn>"], ["</s>", "<end_of_turn>"]),
        (FIM, USER_DEFINED, FIM[1:], FIM),
        (["<PAD>", "<|fim_pad|>"], USER_DEFINED, ["<PAD>"], ["<PAD>"]),  # one of them, and the first
        (HARMONY, CONTROL, HARMONY[:2], HARMONY[:2]),
        (HARMONY[1:], CONTROL, HARMONY[1:3], HARMONY[1:3]),
        (["<|tool_response>", "</s>"], CONTROL, ["<|tool_response>"], ["<|tool_response>"]),
    ],
)
def test_end_tokens_of_a_gguf_file_are_found_by_their_names(caplog, tokens, kind, ends, hidden):
    """As in llama.cpp v0.4.0, whose end and control tokens of these vocabularies are written here."""
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": [*STOP, "a", *tokens],
        "tokenizer.ggml.token_type": [CONTROL, NORMAL, *[kind] * len(tokens)],
        "tokenizer.ggml.eos_token_id": 0,
    }
    vocabulary = vocabulary_from_gguf(metadata, "a file")
    tokenizer = tokenizer_from_gguf(metadata, vocabulary)
    assert {vocabulary.tokens[i] for i in vocabulary.eos_token_ids} == {*STOP, *ends}
    assert tokenizer.decode(range(2, 2 + len(tokens)), skip_special_tokens=True) == "".join(
        token for token in tokens if token not in hidden
    )
    for token in hidden:
        assert tokenizer(f"a{token}a").input_ids == [1, tokenizer.convert_tokens_to_ids(token), 1]
    assert ("by their names these are control tokens" in caplog.text) == (kind != CONTROL)


def test_the_usual_ids_stand_for_those_that_a_llama_file_does_not_name(caplog):
    """llama.cpp: 1 begins, and 2 ends. An id beyond the vocabulary counts as none, with a warning."""
    metadata = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "<end>", "a"]}
    assert vocabulary_from_gguf(metadata, "a file").special == {"bos_token": 1, "eos_token": 2, "unk_token": 0}
    assert not caplog.messages
    metadata["tokenizer.ggml.eos_token_id"] = 4
    assert vocabulary_from_gguf(metadata, "a file").eos_token_ids == {2}
    assert "eos_token_id names token 4 of a vocabulary of 4" in caplog.text


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("forced_bos_token_id", 259), ("forced_eos_token_id", 259)),  # which the model lacks
        *(("forced_bos_token_id", "a"), ("forced_eos_token_id", False), ("suppress_tokens", 1.5)),
        *(("suppress_tokens", [True]), ("bad_words_ids", [3]), ("bad_words_ids", 3)),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_in_one_line(load, name, value):
    says = f"{name} 259 is not in the vocabulary of 259" if value == 259 else r"generation_config\.json"
    with pytest.raises(SpecbeamError, match=says) as raised:
        specbeam.generate(load(**{name: value}), [5], max_new_tokens=3)
    assert "\n" not in str(raised.value)
