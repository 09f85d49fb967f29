"""Folders of CTranslate2: their files are read, and damaged ones are refused in one line."""

import json
import shutil
import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specbeam
from specbeam import SpecbeamError
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.architecture import tensor_names
from specbeam.checkpoints.families import ARCHITECTURES
from specbeam.checkpoints.formats.folder_config import config_from_hugging_face
from specbeam.checkpoints.parameters import parameters
from tests.backends.test_whisper import PROMPT, random_whisper, run, sound, states_of, with_values_of
from tests.conftest import EOS, LFS_POINTER, byte_tokenizer, examples

TYPES = {"float32": 0, "int8": 1, "int16": 2, "float16": 4, "bfloat16": 5}
NUMBERS = {
    **dict.fromkeys(("decoder/alibi", "decoder/scale_embeddings", "decoder/start_from_zero_embedding"), (1, b"\0")),
    **{"decoder/activation": (1, b"\3"), "decoder/pre_norm": (1, b"\1"), "decoder/alignment_layer": (2, b"\xff\xff")},
}


def quantized(weight, kind):
    """A weight as CTranslate2 keeps it, and its scales."""
    if kind == "int16":
        scale = np.float32(2**10 / np.abs(weight).max())
        return np.rint(weight * scale).astype(np.int16), np.array(scale)
    most = np.abs(weight.reshape(len(weight), -1)).max(1)
    scale = np.float32(127) / np.where(most == 0, np.float32(127), most)
    return np.rint(weight * scale.reshape(-1, *[1] * (weight.ndim - 1))).astype(np.int8), scale


def variables(model, kind):
    """The tensors of a model of transformers under CTranslate2's names, and in its numbers."""
    state, config = model.state_dict(), model.config
    whisper, found = ARCHITECTURES["whisper"], {}
    for parameter in parameters(config_from_hugging_face(config.to_dict(), state)):
        theirs = tensor_names(parameter, whisper.folder_tensors)
        parts = [state.get(name, torch.zeros(config.d_model)).numpy() for name in theirs]
        (name,) = tensor_names(parameter, whisper.ctranslate2_tensors)
        module, _, end = name.rpartition(".")
        if module.endswith("layer_norm"):
            end = {"weight": "gamma", "bias": "beta"}[end]
        elif module.endswith("position_encodings"):
            end = "encodings"
        found[f"{module}/{end}"] = np.concatenate(parts)
    for part in ("encoder", "decoder"):
        found[f"{part}/num_heads"] = np.array(getattr(config, f"{part}_attention_heads"), np.int16)
    for name, weight in list(found.items()):
        if weight.dtype != np.float32:
            continue
        if kind.startswith("int") and name.endswith("/weight"):
            found[name], found[f"{name}_scale"] = quantized(weight, kind)
        elif kind == "float16":
            found[name] = weight.astype(np.float16)
        elif kind == "bfloat16":
            found[name] = torch.tensor(weight).bfloat16().view(torch.uint16).numpy()
    return found


def text(value):
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def model_bin(found, aliases=(("decoder/projection/weight", "decoder/embeddings/weight"),), **head):
    """The bytes of a model.bin."""
    codes = {"f4": 0, "i1": 1, "i2": 2, "f2": 4, "u2": 5}
    entries = [(n, x.shape, codes[x.dtype.str[1:]], x.tobytes()) for n, x in found.items()]
    entries += [(name, (), code, data) for name, (code, data) in NUMBERS.items()]
    out = struct.pack("<I", head.get("version", 6)) + text(head.get("spec", "WhisperSpec"))
    out += struct.pack("<II", head.get("revision", 3), head.get("count", len(entries)))
    for name, shape, code, data in sorted(entries):
        out += (
            text(name)
            + struct.pack(f"<B{len(shape)}I", len(shape), *shape)
            + struct.pack("<BI", code, len(data))
            + data
        )
    return out + struct.pack("<I", len(aliases)) + b"".join(text(a) + text(b) for a, b in aliases)


def write(folder, model, kind="float32"):
    folder.mkdir(exist_ok=True)
    (folder / "model.bin").write_bytes(model_bin(variables(model, kind)))
    vocabulary = [f"<{i}>" for i in range(257)] + ["<|endoftext|>", "<|startoftranscript|>"]
    (folder / "vocabulary.txt").write_text("".join(f"{token}\n" for token in vocabulary))
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [7], "suppress_ids_begin": [], "lang_ids": [1]}))
    return folder


@pytest.mark.parametrize("kind", TYPES)
def test_a_folder_is_the_hugging_face_folder_with_its_values(tmp_path, save, kind):
    model = random_whisper()
    folder = write(tmp_path / kind, model, kind)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.facts.architecture == "whisper"
    assert checkpoint.dtype == kind
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    twin = with_values_of(checkpoint, model)
    for name, tensor in twin.state_dict().items():
        error = (tensor - before[name]).abs().max() / before[name].abs().max()
        assert error <= (0 if kind == "float32" else 0.01)
    lm, same = specbeam.load(folder, dtype="float32"), specbeam.load(save(twin, byte_tokenizer()), dtype="float32")
    np.testing.assert_array_equal(states_of(lm.backend, sound()), states_of(same.backend, sound()))
    assert (lm.eos_token_ids, lm.tokenizer) == ({EOS}, None)
    assert lm.generation_defaults == {"suppress_tokens": [7]}
    same = replace(same, generation_defaults=lm.generation_defaults)
    options = {"max_new_tokens": 12, "num_beams": 3}
    assert run(lm, [sound()], options) == run(same, [sound()], options)
    assert specbeam.load(folder, quantize="int8").precision == "int8 on cpu"


def test_what_later_versions_of_ctranslate2_write_is_known(tmp_path):
    """The files of large-v3 and of its turbo have these numbers. Only 0 is supported."""
    folder = write(tmp_path / "model", random_whisper())
    found = variables(random_whisper(), "float32")
    for name in ("alibi_use_positive_positions", "scale_alibi"):
        found[f"decoder/{name}"] = np.array(0, np.int8)
    (folder / "model.bin").write_bytes(model_bin(found))
    assert specbeam.load(folder).backend.features_shape is not None
    (folder / "model.bin").write_bytes(model_bin(found | {"decoder/scale_alibi": np.array(1, np.int8)}))
    with pytest.raises(SpecbeamError, match=r"'decoder/scale_alibi' = 1 in model\.bin is not supported"):
        open_checkpoint(folder)


def test_an_untied_head_the_tokenizer_and_a_vocabulary_in_json(tmp_path):
    model = random_whisper()
    folder = write(tmp_path / "model", model)
    found = variables(model, "float32")
    found["decoder/projection/weight"] = found["decoder/embeddings/weight"] * 2
    found["decoder/alignment_heads"] = np.array([[0, 1], [1, 0]], np.int16)
    (folder / "model.bin").write_bytes(model_bin(found, ()))
    (folder / "vocabulary.json").write_text(json.dumps(["<|endoftext|>", "a"]))
    byte_tokenizer().save_pretrained(folder)
    for extra in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / extra).unlink(missing_ok=True)
    lm = specbeam.load(folder, dtype="float32")
    assert not open_checkpoint(folder).config.tied_head
    assert lm.tokenizer.get_vocab()
    assert lm.eos_token_ids == {0}
    assert run(lm, [sound()], {"max_new_tokens": 4, "num_beams": 2})


def changed(name, value):
    return lambda found: model_bin(found | {name: value})


def lacking(name):
    return lambda found: model_bin(without(found, name))


def renamed(name, other):
    return lambda found: model_bin(found).replace(name, other)


BIAS = "encoder/conv1/bias"
CHANGED = {
    "nothing": (lambda _: b"", "model.bin is empty: fetch it again"),
    "a pointer": (lambda _: LFS_POINTER, "model.bin is a pointer of Git LFS"),
    "no model": (lambda _: b"\6\0", "it ends within its header"),
    "another version": (lambda found: model_bin(found, version=5), "begins with the version 5"),
    "PyTorch's weights": (lambda _: b"PK\3\4" + bytes(300), "is no model of CTranslate2 of version 6"),
    "another kind": (lambda found: model_bin(found, spec="TransformerSpec"), "is a 'TransformerSpec' of CTranslate2"),
    "another revision": (lambda found: model_bin(found, revision=4), "of revision 4, and only revision 3"),
    "too many": (lambda found: model_bin(found, count=2**32 - 1), "it has 4,294,967,295 variables"),
    "one more": (lambda found: model_bin(found, count=len(found) + len(NUMBERS) + 1), "damaged or no model"),
    "cut": (lambda found: model_bin(found)[:5000], "it ends within"),
    "longer": (lambda found: model_bin(found) + b"x", "it goes on after its end"),
    "a name that ends nowhere": (renamed(b"/conv1/bias\0", b"/conv1/bias1"), "a name has no end"),
    "a name that is no text": (renamed(b"/conv1/bias\0", b"/conv1/bi\xff\xfe\0"), "a name is no text"),
    "an alias of nothing": (lambda found: model_bin(found, [("a", "b")]), "'a' stands for 'b', which it lacks"),
    "an alias that is there": (lambda found: model_bin(found, [(BIAS, "encoder/conv2/bias")]), "is a variable, and"),
    "another shape": (
        changed(BIAS, np.zeros(5, np.float32)),
        r"bias has shape \[5\], but the configuration asks for \[32\]",
    ),
    "a tensor less": (lacking("decoder/layer_2/ffn/linear_0/bias"), "no tensor decoder"),
    "a part less": (lacking("decoder/position_encodings/encodings"), "of 2 dimensions"),
    "a tensor more": (changed("x", np.zeros(5, np.float32)), "1 tensors a whisper model"),
    "no scale": (changed(BIAS, np.zeros(32, np.int8)), "but has no scale"),
    "no heads": (lacking("encoder/num_heads"), "does not describe a whisper model: 'encoder/num_heads'"),
    "0 heads": (changed("decoder/num_heads", np.array(0, np.int16)), "decoder_attention_heads = 0, which is no size"),
    "infinite heads": (changed("encoder/num_heads", np.array(np.inf, np.float32)), "does not describe a whisper model"),
    "another number": (changed("decoder/rotary_dim", np.array(4, np.int16)), "'decoder/rotary_dim' = 4"),
    "NaN": (changed(BIAS, np.full(32, np.nan, np.float32)), "conv1/bias"),
    "a scale of 0": (lambda found: model_bin(scaled(found, np.zeros(32, np.float32))), "conv1/weight"),
    "too few scales": (lambda found: model_bin(scaled(found, np.ones(3, np.float32))), "has 3 scales and 32 rows"),
}


def without(found, name):
    return {key: value for key, value in found.items() if key != name}


def scaled(found, scales):
    weight = found["encoder/conv1/weight"]
    return found | {"encoder/conv1/weight": np.ones(weight.shape, np.int8), "encoder/conv1/weight_scale": scales}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("ctranslate2"), random_whisper())


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_wrong_is_said_in_one_line(written, tmp_path, what):
    change, says = CHANGED[what]
    folder = shutil.copytree(written, tmp_path / "model")
    (folder / "model.bin").write_bytes(change(variables(random_whisper(), "float32")))
    with pytest.raises(SpecbeamError, match=says) as refusal:
        specbeam.load(folder, dtype="float32")
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("vocabulary.txt", b"\xff", "its vocabulary cannot be read"),
        ("vocabulary.json", b"{", "its vocabulary cannot be read"),
        ("vocabulary.json", b'{"a": 1}', "is no list of tokens"),
        ("vocabulary.txt", b"x\n" * 300, "its vocabulary has 300 tokens, but the model 259"),
        ("tokenizer.json", b"{}", "no tokenizer that can be loaded"),
        ("config.json", b"[]", "holds no JSON object"),
        ("config.json", b'{"suppress_ids": "x"}', "suppress_tokens"),
    ],
)
def test_other_files_that_are_wrong_are_named(written, tmp_path, name, content, says):
    folder = shutil.copytree(written, tmp_path / "model")
    (folder / name).write_bytes(content)
    with pytest.raises(SpecbeamError, match=says):
        run(specbeam.load(folder, dtype="float32"), [sound()], {"max_new_tokens": 2}, PROMPT)


def test_other_backends_and_adapters_are_refused(written, tmp_path):
    with pytest.raises(SpecbeamError, match="transformers cannot load"):
        specbeam.load(written, backend="transformers")
    with pytest.raises(SpecbeamError, match="an adapter cannot be merged into a model of CTranslate2"):
        open_checkpoint(written, tmp_path)


@settings(max_examples=examples(2))
@given(st.data())
def test_damaged_bytes_never_end_the_process(written, tmp_path_factory, data):
    whole = (written / "model.bin").read_bytes()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, min(len(whole), 4000) - 1))
        changed[at] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(written, folder, dirs_exist_ok=True)
    (folder / "model.bin").write_bytes(bytes(changed[: data.draw(st.sampled_from([None, None, 100, 4000]))]))
    with suppress(SpecbeamError):
        run(specbeam.load(folder, dtype="float32"), [sound()], {"max_new_tokens": 2})
