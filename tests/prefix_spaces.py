"""Tokenizers of Llama 2's kind: a space before each text, which the decoder drops. Folders and GGUF files have them."""

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tests.checkpoints.test_gguf import tokenizer_of_file
from tests.conftest import fast_tokenizer

SPECIAL = ["<unk>", "<s>", "</s>", "<turn>"]
WORDS = ["▁The", "▁is", "▁Paris", "▁Rome", "▁in", "Paris", "Rome", "is"]
KINDS = ["prepended", "first", "always", "gguf"]


def pieces_and_merges():
    """The vocabulary, and merges that make the words from left to right."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted({*"".join(WORDS)} - {"▁"}), ".", "\t"]
    merges = []
    for word in WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    return pieces, merges


def prefix_space_tokenizer(kind, chat_template=None):
    """A tokenizer as transformers converts it, by a normalizer or a pre-tokenizer, or as a GGUF file describes it."""
    pieces, merges = pieces_and_merges()
    if kind == "gguf":
        types = [2, 3, 3, 3, *[6] * 256, *[1] * (len(pieces) - 260)]  # unknown, control, bytes, normal
        metadata = {"token_type": types, "scores": [-float(n) for n in range(len(pieces))]}
        ours = tokenizer_of_file("llama", pieces, bos_token_id=1, eos_token_id=2, unknown_token_id=0, **metadata)
        backend, special = ours.backend_tokenizer, ours.special_tokens_map
        return fast_tokenizer(backend, chat_template=chat_template, **special)
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if kind == "prepended":
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    to_text = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([*to_text])
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return fast_tokenizer(made, chat_template=chat_template, **named)
