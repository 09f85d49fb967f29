"""The tokenizers of folders: ids, texts and prompts as transformers has them."""

import json
import random
import subprocess
import sys

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specbeam
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.tokenizers.folder_tokenizer import tokenizer_from_folder
from specbeam.checkpoints.tokenizers.gguf_tokenizer import LLAMA3
from specbeam.models.prompts import render
from tests.conftest import in_thorough_mode, random_model

PIECES = [
    *(
        "a",
        "B",
        " ",
        "  ",
        "\n",
        "\t",
        "é",
        "e\u0301",
        "漢字",
        "🙂",
        "👩‍👩‍👧",
        "\u0301",
        "ﬁ",
        "1",
        "23",
        "7890",
        "'s",
        "'LL",
    ),
    *("<s>", "</s>", "<bos>", "<|endoftext|>", "<|extra|>", " <|extra|> ", "<unk>", "<pad>", "the", "Hello", " world"),
    *("<|startofprev|>", "<|startoftranscript|>", "<|en|>", "<|0.04|>", "<|notimestamps|>"),
    *("\u200b", "\xa0", "\x00", "\r\n", "!", "?..", "▁", "Ġ", "<0x0A>", "سلام", "हिन्दी", "한국", "\u2028", "def f(x):"),
]
CORPUS = [
    "Hello world, the cat's hat: 12 naïve 🙂",
    "def f(x):\n    return x",
    "the the world 7890 漢字 한국 e\u0301é",
] * 3
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
SPECIAL = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<pad>", "<bos>"]


def texts():
    rnd = random.Random(7)
    return [
        "",
        *("".join(rnd.choices(PIECES, k=rnd.randrange(24))) for _ in range(2000 if in_thorough_mode() else 300)),
    ]


def byte_level(splits=None, composes=False):
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC() if composes else None
    parts = [pre_tokenizers.Split(Regex(splits), "isolated")] if splits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=not parts)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


def sentencepiece():
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    names = [*SPECIAL, *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    file = json.loads(backend.to_str())
    file["added_tokens"] = file["added_tokens"][: len(SPECIAL)]
    backend = Backend.from_str(json.dumps(file))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


def whisper():
    """Bytes, with a lowercase normalizer that transformers does not use, and the special tokens of Whisper."""
    backend = byte_level(LLAMA3[0])
    names = ["startoftranscript", "en", "transcribe", "startofprev", "notimestamps"]
    backend.add_special_tokens([f"<|{name}|>" for name in names])
    backend.add_tokens([f"<|{place / 50:.2f}|>" for place in range(60)])
    backend.normalizer = normalizers.Lowercase()
    return backend


def lfm2():
    """Llama 3's way to split, with the processors and the decoder of LFM2's files in sequences."""
    backend = byte_level(*LLAMA3)
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), backend.post_processor])
    backend.decoder = decoders.Sequence([backend.decoder])
    return backend


BACKENDS = {
    "bytes": byte_level,
    "lfm2": lfm2,
    "whisper": whisper,
    "llama3": lambda: byte_level(*LLAMA3),
    "qwen": lambda: byte_level(*LLAMA3, composes=True),
    "sentencepiece": sentencepiece,
}
OPTIONS = [
    {},
    {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "add_bos_token": True},
    {"bos_token": None, "eos_token": "<|new|>", "extra_special_tokens": ["<|extra|>"], "chat_template": TEMPLATE},
    {"additional_special_tokens": ["<|extra|>", "</s>"], "image_token": "<|image|>", "legacy": True},
    {"extra_special_tokens": {"boi_token": "<|extra|>"}, "add_prefix_space": False, "legacy": False},
    {"chat_template": [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]},
    {
        "add_prefix_space": True,
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": True, "rstrip": False, "normalized": False},
        "added_tokens_decoder": {
            str(i): {"content": token, "lstrip": i == 2, "rstrip": i == 3, "normalized": i == 4, "special": i != 5}
            for i, token in enumerate(SPECIAL)
        },
        "clean_up_tokenization_spaces": True,
    },
]
KINDS = [
    ("llama", "bytes", None),
    ("llama", "llama3", "PreTrainedTokenizerFast"),
    ("llama", "llama3", "LlamaTokenizerFast"),
    ("llama", "sentencepiece", "LlamaTokenizer"),
    ("llama", "bytes", "GPT2Tokenizer"),
    ("smollm3", "llama3", "TokenizersBackend"),
    ("mistral", "sentencepiece", "LlamaTokenizerFast"),
    ("mistral", "llama3", "LlamaTokenizer"),
    ("gemma2", "sentencepiece", "GemmaTokenizerFast"),
    ("gemma3_text", "sentencepiece", None),
    ("gemma2", "bytes", "PreTrainedTokenizerFast"),
    ("gemma4_text", "sentencepiece", "GemmaTokenizer"),
    ("gemma4_unified_text", "sentencepiece", None),
    ("lfm2", "lfm2", "PreTrainedTokenizerFast"),
    ("lfm2", "lfm2", "TokenizersBackend"),
    ("lfm2", "llama3", "LlamaTokenizerFast"),
    ("lfm2", "llama3", None),
    ("qwen3_moe", "qwen", "Qwen2Tokenizer"),
    ("gpt_oss", "llama3", "PreTrainedTokenizerFast"),
    ("olmoe", "bytes", "GPT2TokenizerFast"),
    ("mixtral", "llama3", None),
    ("olmo2", "bytes", "GPT2TokenizerFast"),
    ("olmo3", "llama3", None),
    ("hunyuan_v1_dense", "llama3", "PreTrainedTokenizerFast"),
    ("granite", "bytes", "GPT2TokenizerFast"),
    ("glm4", "llama3", None),
    ("exaone4", "bytes", "PreTrainedTokenizerFast"),
    ("ernie4_5", "sentencepiece", "LlamaTokenizer"),
    ("starcoder2", "bytes", "GPT2TokenizerFast"),
    ("gpt2", "bytes", "GPT2TokenizerFast"),
    ("gpt2", "llama3", None),
    ("gpt_neox", "qwen", "GPTNeoXTokenizerFast"),
    ("gpt_neox", "bytes", "PreTrainedTokenizerFast"),
    ("qwen2", "llama3", "Qwen2Tokenizer"),
    ("qwen2", "llama3", "PreTrainedTokenizerFast"),
    ("qwen2", "sentencepiece", "LlamaTokenizer"),
    ("qwen3", "qwen", "Qwen2TokenizerFast"),
    ("qwen3_5_text", "qwen", "Qwen3_5Tokenizer"),
    ("qwen3_5_text", "llama3", None),
    ("qwen3_5", "llama3", "Qwen2TokenizerFast"),
    ("qwen3", "llama3", "LlamaTokenizer"),
    ("phi3", "sentencepiece", "LlamaTokenizer"),
    ("stablelm", "bytes", "GPTNeoXTokenizerFast"),
    ("whisper", "bytes", "TokenizersBackend"),
    ("whisper", "whisper", "WhisperTokenizer"),
    ("whisper", "whisper", None),
    ("whisper", "llama3", "PreTrainedTokenizerFast"),
]


def assert_equal(ours, theirs, texts):
    assert isinstance(ours, specbeam.Tokenizer)
    assert (len(ours), ours.vocab_size, ours.kind) == (len(theirs), theirs.vocab_size, type(theirs).__name__)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert (ours.all_special_tokens, ours.all_special_ids) == (theirs.all_special_tokens, theirs.all_special_ids)
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        assert getattr(ours, name) == getattr(theirs, name)
        assert getattr(ours, f"{name}_id") == getattr(theirs, f"{name}_id")
    added = [{i: token.__getstate__() for i, token in one.added_tokens_decoder.items()} for one in (ours, theirs)]
    assert added[0] == added[1]
    assert ours.chat_template == theirs.chat_template
    assert ours.convert_tokens_to_ids(["a", "no token"]) == theirs.convert_tokens_to_ids(["a", "no token"])
    how = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    for special in (False, True):
        our_ids = ours(texts, add_special_tokens=special, **how)
        their_ids = theirs(texts, add_special_tokens=special, **how)
        for name in our_ids:
            assert our_ids[name] == their_ids[name], name
        for text, ids in zip(texts[:40], our_ids.input_ids, strict=False):
            assert (
                ours.encode(text, add_special_tokens=special) == ids == ours(text, add_special_tokens=special).input_ids
            )
            assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
        for ids in our_ids.input_ids:
            for skips in (False, True):
                decoded = ours.decode(ids, skip_special_tokens=skips)
                assert decoded == theirs.decode(ids, skip_special_tokens=skips)
    if ours.chat_template and theirs.bos_token is not None:
        messages = [{"role": "user", "content": "Hi"}]
        theirs_says = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert render(ours, messages) == theirs_says


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of models, and the files of tokenizers by the names of their backends."""
    root = tmp_path_factory.mktemp("tokenizers")
    random_model("llama").save_pretrained(root / "model")
    return root / "model", {name: make().to_str() for name, make in BACKENDS.items()}


def write(folder, model, file, described):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model}))
    (folder / "tokenizer.json").write_text(file)
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


@pytest.mark.parametrize(("model", "backend", "kind"), KINDS)
def test_a_folder_has_the_tokenizer_that_transformers_makes_of_it(folders, model, backend, kind):
    folder, files = folders
    for number, options in enumerate(OPTIONS):
        described = options if kind is None else options | {"tokenizer_class": kind}
        write(folder, model, files[backend], described)
        theirs = AutoTokenizer.from_pretrained(folder)
        assert_equal(open_checkpoint(folder).tokenizer, theirs, texts() if number < 2 else texts()[:60])


def test_older_files_and_templates_in_files(folders):
    folder, files = folders
    write(folder, "llama", files["llama3"], {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "old"})
    more = {
        "eos_token": {"content": "</s>", "lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    }
    more |= {"bos_token": "<s>", "additional_special_tokens": ["<|extra|>"]}
    (folder / "special_tokens_map.json").write_text(json.dumps(more))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    assert_equal(open_checkpoint(folder).tokenizer, AutoTokenizer.from_pretrained(folder), texts()[:60])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    assert_equal(open_checkpoint(folder).tokenizer, AutoTokenizer.from_pretrained(folder), texts()[:60])
    (folder / "additional_chat_templates" / "rag.jinja").unlink()
    (folder / "additional_chat_templates").rmdir()
    for name in ("chat_template.jinja", "special_tokens_map.json"):
        (folder / name).unlink()


def test_what_only_transformers_can_read_is_its(folders):
    folder, files = folders
    for described in ({"tokenizer_class": "CodeGenTokenizer"}, {"split_special_tokens": True}, {"unheard_of": 1}):
        write(folder, "llama", files["llama3"], described)
        assert isinstance(open_checkpoint(folder).tokenizer, PreTrainedTokenizerFast)


NATIVE = """
import sys
from pathlib import Path
from specbeam.text import chat_templates
from specbeam.checkpoints import open_checkpoint
from specbeam.text.control_tokens import ControlTokens
from specbeam.text.detokenizer import Detokenizer
checkpoint = open_checkpoint(Path(sys.argv[1]))
tokenizer = checkpoint.tokenizer
checkpoint.check_tokenizer(len(tokenizer))
control = ControlTokens(tokenizer)
(message,), stand_ins = control.hide([{"role": "user", "content": tokenizer.eos_token}])
text = chat_templates.render(tokenizer.get_chat_template(), [message], **tokenizer.special_tokens_map)
ids = control.ids(control.tokenizer(control.show(text, stand_ins)).input_ids)
assert tokenizer.eos_token in tokenizer.decode(ids, skip_special_tokens=True)
Detokenizer(tokenizer.decode)
print({"torch", "transformers"} & {*sys.modules})
"""


def assert_native(source):
    command = [sys.executable, "-c", NATIVE, str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (made.stdout, made.stderr) == ("set()\n", "")


LFM2 = {
    **{"add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": True, "extra_special_tokens": {}},
    **{"legacy": False, "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 10**30},
    **{"sp_model_kwargs": {}, "spaces_between_special_tokens": False, "use_default_system_prompt": False},
    **{"tokenizer_class": "PreTrainedTokenizerFast", "use_fast": True, "chat_template": TEMPLATE},
    **{"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"},
}
"""The keys of LFM2's tokenizer_config.json."""


def test_a_folder_of_lfm2_needs_no_transformers(folders):
    """Its files list the added tokens twice, and have some that are not special."""
    folder, _ = folders
    backend = lfm2()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|tool_list_start|>", "<|reserved_4|>"])
    backend.add_tokens([AddedToken("python", normalized=False)])
    added = {str(i): token.__getstate__() for i, token in backend.get_added_tokens_decoder().items()}
    write(folder, "lfm2", backend.to_str(), LFM2 | {"added_tokens_decoder": added})
    more = [*texts()[:60], "<|im_start|>user\nHi<|im_end|>\n", "in python, 'python'", " <|tool_list_start|>[]"]
    assert_equal(open_checkpoint(folder).tokenizer, AutoTokenizer.from_pretrained(folder), more)
    assert_native(folder)


@pytest.mark.parametrize(
    ("model", "backend", "kind"),
    [
        ("llama", "sentencepiece", "LlamaTokenizer"),
        ("gpt2", "bytes", "GPT2TokenizerFast"),
        ("qwen2", "llama3", "Qwen2Tokenizer"),
    ],
)
def test_neither_transformers_nor_torch_is_imported(folders, model, backend, kind):
    folder, files = folders
    write(folder, model, files[backend], OPTIONS[1] | {"tokenizer_class": kind, "chat_template": TEMPLATE})
    assert_native(folder)


def varint(number):
    return bytes([number & 127 | 128]) + varint(number >> 7) if number > 127 else bytes([number])


def field(number, value):
    """A field of a protocol buffer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value & 0xFFFFFFFFFFFFFFFF)
    return varint(number << 3 | 2) + varint(len(value)) + value


def sentencepiece_file(model_type=2, **trainer):
    """A tokenizer.model with the vocabulary of :func:`sentencepiece`."""
    pieces = b""
    vocabulary = json.loads(sentencepiece().to_str())["model"]["vocab"]
    for token in sorted(vocabulary, key=vocabulary.get):
        kind = 2 if token == "<unk>" else 3 if token in ("<s>", "</s>") else 4 if token in SPECIAL else 1
        kind = 6 if token.startswith("<0x") else kind
        pieces += field(1, field(1, token.encode()) + (b"" if kind == 1 else field(3, kind)))
    numbers = {"byte_fallback": 35, "unk_id": 40, "bos_id": 41, "eos_id": 42, "eos_piece": 47}
    return pieces + field(
        2, field(3, model_type) + b"".join(field(numbers[name], value) for name, value in trainer.items())
    )


def without_tokenizer_json(folder, backend):
    (folder / "tokenizer.json").unlink()
    if backend == "sentencepiece":
        (folder / "tokenizer.model").write_bytes(sentencepiece_file(byte_fallback=1))
        return
    model = json.loads(BACKENDS[backend]().to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")


OTHER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json")


@pytest.fixture
def clean(folders):
    yield folders[0]
    for name in OTHER_FILES:
        (folders[0] / name).unlink(missing_ok=True)


IN_OTHER_FILES = [
    ("whisper", "whisper", "WhisperTokenizer"),
    ("gpt2", "bytes", None),
    ("qwen2", "llama3", "Qwen2Tokenizer"),
    ("qwen3_5", "llama3", "Qwen3_5Tokenizer"),
    ("gpt_neox", "bytes", "GPTNeoXTokenizerFast"),
    ("llama", "sentencepiece", "LlamaTokenizer"),
    ("gemma2", "sentencepiece", "GemmaTokenizer"),
    ("mistral", "sentencepiece", "LlamaTokenizer"),
]
BOTH = {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(("model", "backend", "kind"), IN_OTHER_FILES)
def test_other_files_than_tokenizer_json(clean, folders, model, backend, kind):
    if backend == "sentencepiece":
        pytest.importorskip("sentencepiece")
    for number, options in enumerate([BOTH, *OPTIONS]):
        write(clean, model, folders[1][backend], options if kind is None else options | {"tokenizer_class": kind})
        without_tokenizer_json(clean, backend)
        theirs = AutoTokenizer.from_pretrained(clean)
        assert_equal(open_checkpoint(clean).tokenizer, theirs, texts() if number < 2 else texts()[:60])


@pytest.mark.parametrize(("model", "backend", "kind"), IN_OTHER_FILES)
def test_added_tokens_and_special_tokens_of_older_files(clean, folders, model, backend, kind):
    if backend == "sentencepiece":
        pytest.importorskip("sentencepiece")
    write(clean, model, folders[1][backend], OPTIONS[1] if kind is None else OPTIONS[1] | {"tokenizer_class": kind})
    (clean / "added_tokens.json").write_text(json.dumps({"<|late|>": 401, "<pad>": 4, "<|new|>": 400}))
    (clean / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|new|>"}))
    assert_equal(open_checkpoint(clean).tokenizer, AutoTokenizer.from_pretrained(clean), texts()[:60])
    without_tokenizer_json(clean, backend)
    assert_equal(open_checkpoint(clean).tokenizer, AutoTokenizer.from_pretrained(clean), texts()[:60])


@pytest.mark.parametrize(
    ("model", "backend", "name", "content"),
    [
        ("llama", "sentencepiece", "tokenizer.model", b""),
        ("llama", "sentencepiece", "tokenizer.model", b"\x0a\xff\xff\xff\xff\x0f"),
        ("llama", "sentencepiece", "tokenizer.model", field(1, field(1, b"a")) * 2),
        ("llama", "sentencepiece", "tokenizer.model", field(1, field(1, b"\xff"))),
        ("gpt2", "bytes", "vocab.json", b'{"a": -1}'),
        ("gpt2", "bytes", "vocab.json", b"["),
        ("gpt2", "bytes", "merges.txt", b"a\n"),
        ("gpt2", "bytes", "merges.txt", b"\xff"),
    ],
)
def test_damaged_files_are_refused_by_name(clean, folders, model, backend, name, content):
    kind = {"tokenizer_class": "LlamaTokenizer"} if model == "llama" else {}
    write(clean, model, folders[1][backend], kind)
    without_tokenizer_json(clean, backend)
    (clean / name).write_bytes(content)
    with pytest.raises(specbeam.SpecbeamError, match=name):
        open_checkpoint(clean).tokenizer  # noqa: B018


def test_a_unigram_model_needs_transformers(clean, folders, monkeypatch):
    write(clean, "llama", folders[1]["sentencepiece"], {})
    (clean / "tokenizer.json").unlink()
    (clean / "tokenizer.model").write_bytes(sentencepiece_file(1))
    monkeypatch.setattr("specbeam.system.extras.are_installed", lambda *packages: False)
    with pytest.raises(specbeam.SpecbeamError, match=r"specbeam\[torch\]"):
        open_checkpoint(clean).tokenizer  # noqa: B018


def test_unknown_keys_of_added_tokens_are_not_printed(folders, capfd):
    folder, files = folders
    token = {"content": "<pad>", "special": True, "odd": 1}
    write(folder, "llama", files["llama3"], {"added_tokens_decoder": {"4": token}, "tokenizer_class": "GPT2Tokenizer"})
    assert isinstance(open_checkpoint(folder).tokenizer, specbeam.Tokenizer)
    assert capfd.readouterr().out == ""


def test_the_tokenizer_of_an_adapter_needs_no_transformers(folders, tmp_path):
    (tmp_path / "tokenizer.json").write_text(folders[1]["llama3"])
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for kind in ({"tokenizer_class": "GPT2Tokenizer"}, {"tokenizer_class": "PreTrainedTokenizerFast"}, {}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(OPTIONS[1] | kind))
        ours = tokenizer_from_folder(tmp_path, {}, OPTIONS[1] | kind)
        assert_equal(ours, AutoTokenizer.from_pretrained(tmp_path), texts()[:60])
