"""The tokenizer of a folder in Hugging Face's layout, as transformers makes it of the same files.

transformers rebuilds seven kinds of tokenizers from their vocabulary and merges, whatever else tokenizer.json says; it
takes other files as they are. What is not surely one of these cases is left to transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specbeam.checkpoints.families import ARCHITECTURES
from specbeam.checkpoints.files import read_json, refusing
from specbeam.checkpoints.tokenizers.gguf_tokenizer import (
    QWEN2,
    QWEN35,
    check_lengths,
    cuts,
    sentencepiece_decoder,
    surround,
)
from specbeam.checkpoints.tokenizers.sentencepiece_model import (
    BPE,
    CONTROL,
    USER_DEFINED,
    SentencePiece,
    read_sentencepiece,
)
from specbeam.errors import SpecbeamError, shown
from specbeam.system.extras import are_installed
from specbeam.system.numbers import is_integer
from specbeam.text.tokenizer import NAMED, Tokenizer

PLAIN, WHISPER = "TokenizersBackend", "WhisperTokenizer"
AS_THE_FILE_SAYS = (PLAIN, "PreTrainedTokenizer", "PythonBackend")
"""Classes for which tokenizer.json decides, as they are called without "Fast" at the end."""
MISTRALS = ("ministral3", "mistral", "mistral3")
"""Models for which transformers takes mistral_common where it is installed, and tokenizer.json elsewhere."""
WRONG_IN_FILES = ("phi3", "qwen2", "qwen3_5")
"""Models whose files often name a wrong class, so transformers takes the class it knows."""
OF_SEVERAL_PARTS: dict[str, str | None] = {
    **{"gemma3": "GemmaTokenizer", "internvl": "Qwen2Tokenizer", "qwen3_5": "Qwen3_5Tokenizer"},
    **dict.fromkeys(("gemma4", "gemma4_unified", "idefics3", "lfm2_vl")),
    **dict.fromkeys(("llava", "mistral3", "smolvlm"), PLAIN),
}
"""The class that transformers knows for the folders of models that also read images or audio; None if it knows none."""
TAKEN_AS_THEY_ARE = (
    *("deepseek-ai/deepseek-r1-distill-llama-*", "deepseek-ai/deepseek-coder-*", "allenai/dolma2-tokenizer"),
    *("google/umt5-small", "naver-clova-ix/donut-*", "salesforce/*", "stepfun-ai/step-3.7-*"),
)
"""Names of models with rules of their own in transformers."""
WITHOUT_EFFECT = {
    *("add_bos_token", "add_eos_token", "backend", "is_local", "max_len", "max_length", "model_input_names"),
    *("model_max_length", "name_or_path", "pad_to_multiple_of", "pad_token_type_id", "padding_side", "processor_class"),
    *("errors", "sp_model_kwargs", "spaces_between_special_tokens", "special_tokens_map_file", "stride"),
    *("tokenizer_class", "tokenizer_file", "trim_offsets", "truncation_side", "truncation_strategy"),
    *("use_default_system_prompt", "local_files_only", "use_fast", "return_attention_mask"),
}
"""Keys of tokenizer_config.json that beside a tokenizer.json change no text and no token id."""
OF_MODEL = "model_specific_special_tokens"
"""The key under which transformers 5 writes special tokens such as ``image_token``, by their names."""
WITH_EFFECT = {
    *("add_prefix_space", "added_tokens_decoder", "additional_special_tokens", "chat_template"),
    *("clean_up_tokenization_spaces", "extra_special_tokens", "legacy", "split_special_tokens", OF_MODEL),
}


OF_SENTENCEPIECE = ("LlamaTokenizer", "GemmaTokenizer", PLAIN)
"""Classes that read tokenizer.model where there is no tokenizer.json. The others read vocab.json and merges.txt."""
TOKEN_KEYS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
WHOLE = (CONTROL, USER_DEFINED)
TEXT_END = "<|endoftext|>"
DEFAULTS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        **{"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"},
        **{"pad_token": "<pad>", "mask_token": "<mask>"},
    },
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), TEXT_END),
    "GPTNeoXTokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), TEXT_END) | {"pad_token": "<|padding|>"},
    **dict.fromkeys(
        ("Qwen2Tokenizer", "Qwen3_5Tokenizer"), dict.fromkeys(("eos_token", "unk_token", "pad_token"), TEXT_END)
    ),
    WHISPER: dict.fromkeys(("bos_token", "eos_token", "unk_token"), TEXT_END),
}
"""The special tokens of each kind that is rebuilt, if tokenizer_config.json names none."""
START, PREVIOUS = "<|startoftranscript|>", "<|startofprev|>"
BEGIN = (START, "<|notimestamps|>")
"""Whisper's tokens that begin each text."""
TIMESTAMP = re.compile(r"<\|\d+\.\d+\|>")


class _LeftToTransformersError(Exception):
    """A file is of another kind, or damaged."""


def tokenizer_from_folder(folder: Path, config: Mapping[str, Any], described: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer of a folder; None if only transformers can tell what it is.

    Args:
        config: the content of config.json.
        described: the content of tokenizer_config.json.
    """
    try:
        return _tokenizer(folder, config, described)
    except _LeftToTransformersError:
        return None
    except SpecbeamError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if are_installed("transformers"):  # it has the last word on damaged files
            return None
        with refusing(f"{folder} has no tokenizer that can be loaded"):
            raise


def _tokenizer(folder: Path, config: Mapping[str, Any], described: dict[str, Any]) -> Tokenizer:
    file = folder / "tokenizer.json"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    kind = _kind(folder, config, described, text)
    model, content = (None, {}) if text else _of_other_files(folder, kind)
    options = {key: value for key, value in described.items() if key not in WITHOUT_EFFECT}
    _demand(not options.get("split_special_tokens") and described.get("trim_offsets", True) is True)
    _demand(all(isinstance(options.get(key), bool | None) for key in ("add_prefix_space", "legacy")))
    if "additional_special_tokens" in options and not options.get("extra_special_tokens"):
        options["extra_special_tokens"] = options.pop("additional_special_tokens")
    _demand(all(key in WITH_EFFECT or key.endswith("_token") for key in options))
    if text and (kind != PLAIN or "added_tokens_decoder" not in options):
        content = json.loads(text)
    _demand(content.get("padding") is None)

    added = _added_tokens(folder, options, content)
    if model is not None:
        unsplit = [(piece, type) for piece, type in zip(model.pieces, model.types, strict=True) if type in WHOLE]
        options["additional_special_tokens"] = [
            AddedToken(piece, normalized=False, special=type == CONTROL) for piece, type in unsplit
        ]
    named, extra = _special_tokens(options, {token.content: token for token in added.values()})
    if kind == PLAIN and model is not None:
        named = {name: named.get(name, token) for name, token in model.special.items()} | named
        backend = _plain_sentencepiece(model, content, added)
    elif kind == PLAIN:
        backend = Backend.from_str(text)
        _demand(backend.padding is None)
    else:
        named = {name: named.get(name, token) for name, token in DEFAULTS[kind].items()} | named
        backend = _rebuilt(kind, content, named, options)
    _demand(not options.get("clean_up_tokenization_spaces") or isinstance(backend.model, models.BPE))

    named = {name: named[name] for name in [*NAMED, *named] if named.get(name) is not None}
    _add(backend, added, named, extra)
    special = {name: str(token) for name, token in named.items()}
    if kind == "Qwen2Tokenizer":
        every = dict.fromkeys([*special.values(), *map(str, extra)])
        backend.add_tokens([AddedToken(token, special=True) for token in every])
    if kind == WHISPER:
        _demand({"eos_token", "unk_token"} <= special.keys())
        begin = [special["unk_token"] if backend.token_to_id(token) is None else token for token in BEGIN]
        surround(backend, begin, [special["eos_token"]])
    elif not text:
        bos, eos = ([special[f"{name}_token"]] if _adds(described, name, special) else [] for name in ("bos", "eos"))
        surround(backend, bos, eos)
    class_ = WhisperTokenizer if kind == WHISPER else Tokenizer
    return class_(backend, special, _chat_template(folder, options), extra=map(str, extra), kind=kind)


def _demand(condition: bool) -> None:
    if not condition:
        raise _LeftToTransformersError


def _adds(described: Mapping[str, Any], name: str, special: Mapping[str, str]) -> bool:
    """Whether texts begin ("bos") or end ("eos") with such a token. A tokenizer.json would say it itself."""
    adds = described.get(f"add_{name}_token")
    _demand(isinstance(adds, bool | None))
    return bool(adds) and f"{name}_token" in special


def _of_other_files(folder: Path, kind: str) -> tuple[SentencePiece | None, dict[str, Any]]:
    """The vocabulary and the merges of a folder without tokenizer.json, as that file would have them.

    Returns them after the content of tokenizer.model if they are of that file.
    """
    names = [file.name for file in folder.iterdir()]
    others = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json")
    named = {name for name in names if any(other in name for other in others)}
    model = None
    if kind in OF_SENTENCEPIECE:
        _demand(named == {"tokenizer.model"})
        model = read_sentencepiece(folder / "tokenizer.model")
        _demand(model.model_type == BPE)
        check_lengths(model.pieces, folder / "tokenizer.model")
        vocabulary = {piece: i for i, piece in enumerate(model.pieces)}
        merges = [(left, right) for _, left, right in cuts(vocabulary)]
    else:
        _demand(not named and "vocab.json" in names and "merges.txt" in names)
        vocabulary = read_json(folder, "vocab.json")
        for token, i in vocabulary.items():
            if not is_integer(i) or not 0 <= i < 1 << 32:
                raise SpecbeamError(f"{folder / 'vocab.json'}: the id of {shown(token)} is {shown(i)}")
        merges = _merges(folder / "merges.txt", vocabulary)
    return model, {"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}, "added_tokens": []}


def _merges(file: Path, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of a merges.txt, one a line."""
    try:
        lines = file.read_bytes().decode().removesuffix("\n").split("\n")
    except (OSError, ValueError) as error:
        raise SpecbeamError(f"{file} cannot be read: {error}") from error
    pairs = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#version") or lines == [""]:
            continue
        left, _, right = line.removesuffix("\r").partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise SpecbeamError(f"{file}: line {number} is no merge of two tokens of vocab.json: {shown(line)}")
        pairs.append((left, right))
    return pairs


def _plain_sentencepiece(model: SentencePiece, content: Mapping[str, Any], added: Mapping[int, AddedToken]) -> Backend:
    """A tokenizer.model as it is read where no class says more. Added tokens take the places of other pieces."""
    vocabulary = content["model"]["vocab"]
    for i, token in added.items():
        if 0 <= i < len(model.pieces) and model.pieces[i] != token.content and token.content not in vocabulary:
            del vocabulary[model.pieces[i]]
            vocabulary[token.content] = i
    how = {"unk_token": model.unk_piece, "fuse_unk": True, "byte_fallback": model.byte_fallback}
    backend = Backend(models.BPE(vocabulary, content["model"]["merges"], **how))
    normalize = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    backend.normalizer = normalizers.Sequence([*normalize, normalizers.Replace(" ", "▁")])
    spaces = decoders.Sequence([decoders.Replace("▁", " ")])
    backend.decoder = sentencepiece_decoder(strips=False) if model.byte_fallback else spaces
    return backend


def _kind(folder: Path, config: Mapping[str, Any], described: Mapping[str, Any], text: str) -> str:
    """The class that transformers' ``AutoTokenizer`` chooses."""
    model = str(config.get("model_type", ""))
    known_classes = {name: one.tokenizer_class for name, one in ARCHITECTURES.items()} | OF_SEVERAL_PARTS
    _demand(not model or model in known_classes)  # the folder of an adapter may have no config.json
    _demand(model not in MISTRALS or not are_installed("mistral_common"))
    for name in (str(config.get("_name_or_path", "")), str(folder)):
        _demand(not any(fnmatch(name.lower(), pattern) for pattern in TAKEN_AS_THEY_ARE))
    known = known_classes[model] if model else None
    for source in (described, config):
        _demand(isinstance(source.get("tokenizer_class"), str | None) and source.get("tokenizer_class") != "")
    stated = described.get("tokenizer_class")
    if stated is None and (stated := config.get("tokenizer_class")) is not None:
        _demand(stated not in AS_THE_FILE_SAYS[1:])
    if stated is None:
        stated = known or PLAIN
    bare = stated.removesuffix("Fast")
    if bare == "LlamaTokenizer" and model not in WRONG_IN_FILES and '"ByteLevel"' in text:
        return PLAIN
    if known == PLAIN and bare != PLAIN:
        return PLAIN
    if known is not None and model in WRONG_IN_FILES and bare != known:
        return known
    _demand(bare in DEFAULTS or bare in AS_THE_FILE_SAYS)
    return bare if bare in DEFAULTS else PLAIN


def _added_tokens(folder: Path, options: dict[str, Any], content: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The added tokens by their ids. Where tokenizer_config.json has none, older files say more of the special ones."""
    if "added_tokens_decoder" in options:
        return {int(i): _added_token(token) for i, token in options["added_tokens_decoder"].items()}
    for name, token in read_json(folder, "special_tokens_map.json").items():
        if isinstance(token, dict):
            _demand(name != "extra_special_tokens")
            token = _added_token({**token, "special": True})
        _demand(name in NAMED or name == "additional_special_tokens")
        options[name] = token
    special = {str(options[name]) for name in NAMED if options.get(name)}
    special |= {str(token) for token in options.get("extra_special_tokens") or []}
    added = {}
    for token, i in read_json(folder, "added_tokens.json").items():
        _demand(isinstance(i, int))
        added[i] = AddedToken(token, normalized=token not in special, special=token in special)
    tokens = content["added_tokens"]
    return added | {token["id"]: _added_token(token) for token in tokens}


def _added_token(described: Mapping[str, Any]) -> AddedToken:
    """An added token. The library would print the names of other keys."""
    return AddedToken(**{key: value for key, value in described.items() if key in TOKEN_KEYS})


def _special_tokens(
    options: Mapping[str, Any], added: Mapping[str, AddedToken]
) -> tuple[dict[str, Any], list[str | AddedToken]]:
    """The special tokens by their names, first the usual names, and the special tokens without names."""
    named = {name: _token(value) for name, value in options.items() if name in NAMED}
    named = {name: added.get(str(token), token) if token is not None else None for name, token in named.items()}
    of_model = {name: _token(value) for name, value in options.items() if name.endswith("_token") and name not in NAMED}
    _demand(all(isinstance(token, str) for token in of_model.values()))
    name = "extra_special_tokens" if "extra_special_tokens" in options else "additional_special_tokens"
    extra, specific = options.get(name) or [], options.get(OF_MODEL) or {}
    if specific:
        _demand(isinstance(specific, dict) and not of_model and not isinstance(extra, dict))
        of_model |= {name: _token(value) for name, value in specific.items()}
        _demand(not {*of_model} & {*NAMED})
    if isinstance(extra, dict):
        of_model |= {name: _token(value) for name, value in extra.items()}
        _demand(not {*of_model} & {*NAMED})
        extra = options.get("additional_special_tokens") or []
    _demand(isinstance(extra, list) and None not in of_model.values())
    _demand(None not in extra)
    return named | of_model, [_token(token) for token in extra]


def _token(value: Any) -> Any:
    """A special token of tokenizer_config.json: its text, or what it also says of it; None if there is none."""
    if isinstance(value, dict):
        _demand(value.get("__type") == "AddedToken")
        return _added_token(value)
    _demand(value is None or isinstance(value, str | AddedToken))
    return value


def _add(
    backend: Backend, added: Mapping[int, AddedToken], named: Mapping[str, Any], extra: list[str | AddedToken]
) -> None:
    """Add the added tokens to a tokenizer in the order of their ids, and then other special tokens."""
    tokens: list[Any] = [token for _, token in sorted(added.items(), key=lambda item: item[0])]
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | {str(token) for token in tokens}
    for token in (*named.values(), *extra):
        if str(token) not in known and token not in tokens:
            tokens.append(token)
    texts = {str(token) for token in named.values()}
    for i, token in enumerate(tokens):
        if isinstance(token, str):
            tokens[i] = AddedToken(token, special=True)
        elif str(token) in texts:
            token.special = True
    backend.add_tokens(tokens)


def _chat_template(folder: Path, options: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat templates: files come before what tokenizer_config.json holds."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.name.removesuffix(".jinja"): file for file in folder.glob("additional_chat_templates/*.jinja")}
    templates = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if templates:
        return templates["default"] if [*templates] == ["default"] else templates
    template = options.get("chat_template")
    if isinstance(template, list):
        template = {one["name"]: one["template"] for one in template}
    _demand(isinstance(template, str | dict | None))
    return template


def _rebuilt(kind: str, content: Mapping[str, Any], named: Mapping[str, Any], options: Mapping[str, Any]) -> Backend:
    """A tokenizer with the vocabulary, the merges and the post-processor of a file, and in all else of its kind."""
    model = content["model"]
    vocabulary, merges = model["vocab"], model.get("merges")
    _demand(model.get("type") == "BPE" and isinstance(vocabulary, dict) and isinstance(merges, list))
    pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    backend = REBUILD[kind](vocabulary, pairs, named, options)
    if kind != "GPTNeoXTokenizer" and content.get("post_processor") is not None:
        empty = {"type": "BPE", "vocab": {}, "merges": []}
        carrier = {**content, "model": {**model, **empty}, "added_tokens": []}
        backend.post_processor = Backend.from_str(json.dumps(carrier)).post_processor
    return backend


def _llama(vocabulary: Any, merges: Any, named: Mapping[str, Any], options: Mapping[str, Any]) -> Backend:
    backend = Backend(models.BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True))
    prefixes = options.get("add_prefix_space") is not False
    first = "always" if options.get("legacy") else "first"
    scheme = first if prefixes else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    backend.decoder = sentencepiece_decoder(strips=prefixes)
    return backend


def _gemma(vocabulary: Any, merges: Any, named: Mapping[str, Any], options: Mapping[str, Any]) -> Backend:
    _demand(named["unk_token"] is not None)
    unknown = str(named["unk_token"])
    backend = Backend(models.BPE(vocabulary, merges, fuse_unk=True, unk_token=unknown, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = sentencepiece_decoder(strips=False)
    return backend


def _byte_level(vocabulary: Any, merges: Any) -> Backend:
    backend = Backend(models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix=""))
    backend.decoder = decoders.ByteLevel()
    return backend


def _gpt2(vocabulary: Any, merges: Any, named: Mapping[str, Any], options: Mapping[str, Any]) -> Backend:
    backend = _byte_level(vocabulary, merges)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(options.get("add_prefix_space")))
    return backend


def _gpt_neox(vocabulary: Any, merges: Any, named: Mapping[str, Any], options: Mapping[str, Any]) -> Backend:
    backend = _gpt2(vocabulary, merges, named, options)
    backend.normalizer = normalizers.NFC()
    return backend


def _qwen(splits: tuple[str], vocabulary: Any, merges: Any, named: Any, options: Mapping[str, Any]) -> Backend:
    backend = _byte_level(vocabulary, merges)
    backend.normalizer = normalizers.NFC()
    (split,) = splits
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=bool(options.get("add_prefix_space")), use_regex=False),
        ]
    )
    return backend


REBUILD: dict[str, Callable[..., Backend]] = {
    "LlamaTokenizer": _llama,
    "GemmaTokenizer": _gemma,
    "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _gpt_neox,
    "Qwen2Tokenizer": partial(_qwen, QWEN2),
    "Qwen3_5Tokenizer": partial(_qwen, QWEN35),
    WHISPER: _gpt2,
}


class WhisperTokenizer(Tokenizer):
    """As transformers' class of this name decodes."""

    def _decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of token ids, without timestamps. ``skip_special_tokens`` also leaves out the text before it."""
        if skip_special_tokens and ids[:1] == [self._id(PREVIOUS)]:
            start = self._id(START)
            ids = ids[ids.index(start) :] if start in ids else []
        return TIMESTAMP.sub("", super()._decode(ids, skip_special_tokens))
