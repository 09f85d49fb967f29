"""The token ids of allowed texts. An allowed text follows the prompt as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Encode = Callable[[Sequence[str]], list[list[int]]]
Decode = Callable[[list[int]], str]

CONTEXTS = ("\n", ".", "a", "1")
"""One of these stands before a text where a tokenizer changes the beginning of its input."""
PROBES = ("a", " a")


def ids_after_prompt(encode: Encode, decode: Decode, texts: Sequence[str]) -> list[list[int]]:
    """The token ids with which each text follows a prompt.

    Tokenizers of Llama 2's kind put a space before their input, which after a prompt is one too many. Their tokens of a
    text are those after a context, without the context's. If the text's beginning merges with the context, another
    context is tried. A tokenizer of which no context shows how a text goes on keeps its own tokens.

    Args:
        encode: makes the token ids of texts, without special tokens around them.
        decode: makes text of token ids.
    """
    (before,) = encode(CONTEXTS[-1:])
    if _decode_to_probes(decode, before, encode(PROBES)):
        return encode(texts)
    found: list[list[int]] = [[] for _ in texts]
    missing = [*range(len(texts))]
    for context in CONTEXTS:
        (before,) = encode([context])
        size = len(before)
        if not _decode_to_probes(decode, before, [ids[size:] for ids in encode([context + p for p in PROBES])]):
            continue
        for i, ids in zip(missing, encode([context + texts[i] for i in missing]), strict=True):
            if ids[:size] == before:
                found[i] = ids[size:]
        missing = [i for i in missing if not found[i]]
        if not missing:
            return found
    for i, ids in zip(missing, encode([texts[i] for i in missing]), strict=True):
        found[i] = ids
    return found


def _decode_to_probes(decode: Decode, before: list[int], after: list[list[int]]) -> bool:
    """Whether tokens decode to the probes after these ones."""
    text = decode(before)
    return bool(text) and all(decode(before + ids) == text + probe for probe, ids in zip(PROBES, after, strict=True))
