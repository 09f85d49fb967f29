"""The tokenizers of folders: ids, texts and prompts as transformers has them."""

import json
import random
import subprocess
import sys

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import specbeam
from specbeam.checkpoints import open_checkpoint
from specbeam.checkpoints.gguf_tokenizer import LLAMA3
from specbeam.prompts import render
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


BACKENDS = {
    "bytes": byte_level,
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
    ("gpt2", "bytes", "GPT2TokenizerFast"),
    ("gpt2", "llama3", None),
    ("gpt_neox", "qwen", "GPTNeoXTokenizerFast"),
    ("gpt_neox", "bytes", "PreTrainedTokenizerFast"),
    ("qwen2", "llama3", "Qwen2Tokenizer"),
    ("qwen2", "llama3", "PreTrainedTokenizerFast"),
    ("qwen2", "sentencepiece", "LlamaTokenizer"),
    ("qwen3", "qwen", "Qwen2TokenizerFast"),
    ("qwen3", "llama3", "LlamaTokenizer"),
    ("phi3", "sentencepiece", "LlamaTokenizer"),
    ("stablelm", "bytes", "GPTNeoXTokenizerFast"),
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
from specbeam import chat_templates
from specbeam.checkpoints import open_checkpoint
from specbeam.control_tokens import ControlTokens
from specbeam.detokenizing import Detokenizer
from specbeam.prompt_length import bound_of
checkpoint = open_checkpoint(Path(sys.argv[1]))
tokenizer = checkpoint.tokenizer
checkpoint.check_tokenizer(len(tokenizer))
control = ControlTokens(tokenizer)
(message,), stand_ins = control.hide([{"role": "user", "content": tokenizer.eos_token}])
text = chat_templates.render(tokenizer.get_chat_template(), [message], **tokenizer.special_tokens_map)
ids = control.ids(control.tokenizer(control.show(text, stand_ins)).input_ids)
assert tokenizer.eos_token in tokenizer.decode(ids, skip_special_tokens=True)
Detokenizer(tokenizer.decode), bound_of(tokenizer)
print({"torch", "transformers"} & {*sys.modules})
"""


def assert_native(source):
    command = [sys.executable, "-c", NATIVE, str(source)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (made.stdout, made.stderr) == ("set()\n", "")


@pytest.mark.parametrize(("model", "backend", "kind"), [KINDS[3], KINDS[11], KINDS[15]])
def test_neither_transformers_nor_torch_is_imported(folders, model, backend, kind):
    folder, files = folders
    write(folder, model, files[backend], OPTIONS[1] | {"tokenizer_class": kind, "chat_template": TEMPLATE})
    assert_native(folder)
