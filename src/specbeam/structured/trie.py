"""A constraint that lists the allowed outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import SpecbeamError
from specbeam.system.numbers import is_integer

Encode = Callable[[Sequence[str]], list[list[int]]]
Decode = Callable[[list[int]], str]

CONTEXTS = ("\n", ".", "a", "1")
"""One of these stands before a text where a tokenizer changes the beginning of its input."""
PROBES = ("a", " a")


class TokenTrie:
    """Allows a list of outputs, such as the identifiers of a catalogue in generative retrieval.

    It is built once, in compact arrays. A node is a state; the tokens below it are a sorted run, found by bisection.
    An output is cut where max_new_tokens ends, and where an output has an end-of-sequence token inside.

    Args:
        outputs: the token ids of each allowed output, without an end-of-sequence token. Or an int array [n, length], in
            which negative numbers fill up the rows of shorter outputs. Or texts, with a tokenizer. A text follows the
            prompt as it is: after a chat template "Paris", but after the raw prompt "The capital is" " Paris".
        tokenizer: makes the token ids of texts: a model that :func:`specbeam.load` returned, or a tokenizer of
            transformers. Each text is allowed in the tokens that the tokenizer makes of it there, and in no others.
            For an encoder-decoder model give the model: no prompt comes before its text.

    Raises:
        SpecbeamError: there are no outputs, an output is empty, a value is not a token id, or texts come without a
            tokenizer.
    """

    start = 0

    def __init__(
        self, outputs: Iterable[Sequence[int]] | Iterable[str] | NDArray[np.integer], tokenizer: Any = None
    ) -> None:
        if isinstance(outputs, bytes | str):
            raise SpecbeamError(f"a TokenTrie is made of a list of outputs, not of one text: give [{outputs!r}]")
        table = outputs if isinstance(outputs, np.ndarray) and outputs.ndim == 2 else _padded(outputs, tokenizer)
        if not table.size:
            raise SpecbeamError("a TokenTrie needs at least one output")
        if not np.issubdtype(table.dtype, np.integer) or (table[:, 0] < 0).any() or table.max() >= 2**31:
            raise SpecbeamError("a TokenTrie is made of token ids: give 0 to 2**31 - 1, at least one per output")
        table = table.astype(np.int32, copy=False)
        table = table[np.lexsort(table.T[::-1])]  # outputs with the same first tokens lie together
        rows = len(table)
        node = np.zeros(rows, dtype=np.int32)  # reached by each row
        tokens, parents = [np.array([-1], dtype=np.int32)], [np.array([-1], dtype=np.int32)]
        lengths = (table >= 0).cumprod(axis=1).sum(axis=1)
        size = 1
        ends = []
        differs = np.zeros(rows, dtype=bool)  # from the row before it, somewhere up to this column
        differs[0] = True
        for column in range(table.shape[1]):
            here = lengths > column
            differs[1:] |= table[1:, column] != table[:-1, column]
            new = differs & here
            tokens.append(table[new, column])
            parents.append(node[new])
            number = size - 1 + np.cumsum(new)
            node = np.where(here, number, node).astype(np.int32)
            size += int(new.sum())
            ends.append(np.unique(node[lengths == column + 1]))
        # Level by level and in rows' order, so the children of a node follow each other, ascending by token.
        self._tokens = np.concatenate(tokens)
        children = np.bincount(np.concatenate(parents)[1:], minlength=size)
        self._first = np.concatenate([[1], 1 + np.cumsum(children)]).astype(np.int32)
        self._complete = np.zeros(size, dtype=bool)
        self._complete[np.concatenate(ends)] = True

    def __len__(self) -> int:
        """The number of nodes, the root included."""
        return len(self._tokens)

    def __repr__(self) -> str:
        return f"TokenTrie({int(self._complete.sum())} outputs, {len(self)} nodes)"

    def advance(self, state: int, token: int) -> int | None:
        first, end = self._first[state], self._first[state + 1]
        place = first + int(self._tokens[first:end].searchsorted(token))
        return place if place < end and self._tokens[place] == token else None

    def mask(self, state: int, vocab_size: int) -> NDArray[np.uint8]:
        below = self._tokens[self._first[state] : self._first[state + 1]]
        bits = np.zeros(vocab_size, dtype=bool)
        bits[below[: below.searchsorted(vocab_size)]] = True
        return np.packbits(bits, bitorder="little")

    def complete(self, state: int) -> bool:
        return bool(self._complete[state])


def _padded(outputs: Iterable[Any], tokenizer: Any) -> NDArray[np.int32]:
    try:
        outputs = [*outputs]
    except TypeError as error:
        raise SpecbeamError(f"a TokenTrie is made of a list of outputs: {error}") from error
    if outputs and all(isinstance(output, str) for output in outputs):
        outputs = _tokenized(outputs, tokenizer)
    try:
        lengths = np.array([len(output) for output in outputs], dtype=np.int64)
        tokens = list(chain.from_iterable(outputs))
        if not all(map(is_integer, tokens)):
            raise ValueError("some values are not integers")
        flat = np.array(tokens, dtype=np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecbeamError(f"a TokenTrie is made of lists of token ids: {error}") from error
    if not len(lengths) or not lengths.all() or (flat < 0).any() or (flat >= 2**31).any():
        raise SpecbeamError("a TokenTrie needs at least one output, and in each at least one token id, 0 to 2**31 - 1")
    table = np.full((len(lengths), int(lengths.max())), -1, dtype=np.int32)
    table[np.arange(table.shape[1]) < lengths[:, None]] = flat
    return table


def _tokenized(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """The token ids of texts after a prompt, without special tokens around them."""
    if tokenizer is None:
        raise SpecbeamError(
            f"a TokenTrie of texts needs the model, for its tokenizer: TokenTrie([{texts[0]!r}, ...], lm)"
        )
    make = getattr(tokenizer, "tokenizer", tokenizer)
    if not callable(make):
        raise SpecbeamError(f"{tokenizer!r} has no tokenizer: give a TokenTrie lists of token ids")

    def encode(given: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = make([str(text) for text in given], add_special_tokens=False, verbose=False).input_ids
        return ids

    has_encoder = getattr(getattr(tokenizer, "backend", None), "start_token_ids", None) is not None
    try:
        return encode(texts) if has_encoder else ids_after_prompt(encode, make.decode, texts)
    except Exception as error:  # tokenizers let any exception pass
        raise SpecbeamError(f"the tokenizer cannot read the texts of a TokenTrie: {error}") from error


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
