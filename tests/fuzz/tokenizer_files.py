"""tokenizer.json, tokenizer_config.json and a chat template of a folder: a JSON object with the three."""

import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from specbeam.checkpoints import open_checkpoint
from specbeam.models.prompts import render, tokenize
from tests.fuzz.json_mutator import mutate_json as mutate
from tests.fuzz.toys import command, model_folder, room

__all__ = ["mutate", "run", "seeds"]
NAMES = {"tokenizer": "tokenizer.json", "config": "tokenizer_config.json", "special": "special_tokens_map.json"}
TEXT = "The cat's hat: 12 naïve 🙂\n<eos>"


def seeds() -> list[bytes]:
    folder = model_folder()
    made: list[Any] = [
        {key: json.loads((folder / name).read_text()) for key, name in NAMES.items() if (folder / name).exists()}
    ]
    made[0]["template"] = (folder / "chat_template.jinja").read_text()
    for tokenizer in _others():
        made.append(made[0] | {"tokenizer": json.loads(tokenizer.to_str())})
    for kind in ("LlamaTokenizer", "GPT2Tokenizer", "GemmaTokenizer", "Qwen2Tokenizer", "T5Tokenizer", "BertTokenizer"):
        made.append(made[0] | {"config": made[0]["config"] | {"tokenizer_class": kind}})
    return [json.dumps(document).encode() for document in made]


def _others() -> list[tokenizers.Tokenizer]:
    """Tokenizers of other kinds, trained on a few words."""
    made = []
    for model, trainer in (
        (models.WordPiece(unk_token="[UNK]"), trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"])),
        (models.Unigram(), trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>")),
        (models.BPE(byte_fallback=True), trainers.BpeTrainer(vocab_size=60, special_tokens=["<s>"])),
        (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(special_tokens=["<unk>"])),
    ):
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\d"), "isolated"), pre_tokenizers.Digits()]
        )
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer.train_from_iterator([TEXT, "a cat sat on the mat"], trainer)
        first = tokenizer.id_to_token(0)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{first} $A", special_tokens=[(first, 0)])
        made.append(tokenizer)
    return made


def run(data: bytes) -> None:
    folder = room() / "tokenizer"
    if not folder.exists():
        shutil.copytree(model_folder(), folder)
    for name in (*NAMES.values(), "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    write(folder, data)
    checkpoint = open_checkpoint(folder)
    checkpoint.check_tokenizer(259)
    tokenizer = checkpoint.tokenizer
    ids = tokenize(tokenizer, TEXT, add_special_tokens=True).input_ids
    tokenizer.decode(ids)
    if tokenizer.chat_template:
        render(tokenizer, [{"role": "user", "content": "Hi"}])
    command("tokens", TEXT, "--model", str(folder))


def write(folder: Path, data: bytes) -> None:
    try:
        document = json.loads(data)
        assert isinstance(document, dict)
    except (ValueError, AssertionError, RecursionError):
        (folder / "tokenizer.json").write_bytes(data)
        return
    for key, name in NAMES.items():
        if key in document:
            (folder / name).write_text(json.dumps(document[key]))
    template = document.get("template")
    if isinstance(template, str):
        (folder / "chat_template.jinja").write_bytes(template.encode(errors="surrogatepass"))
