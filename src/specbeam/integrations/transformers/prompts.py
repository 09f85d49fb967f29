"""The prompts of one call of transformers' ``generate``, and the cache that it leaves.

The engine prefills prompts of token ids itself. The model's own forward prefills the others, as in transformers:
prompts with embeddings, token types, unusual positions or a given cache, and all prompts if the caller asks for the
cache. Sequences then go on from these keys and values (:class:`ReadPrompt`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from specbeam.backends.transformers import CausalBackend, ReadPrompt
from specbeam.backends.transformers.compat import CACHE, prefill
from specbeam.backends.transformers.encoder_decoder import EncoderDecoderBackend
from specbeam.cache.slots import slots_of
from specbeam.core.tree import Nodes, Tree
from specbeam.integrations.transformers.processors import unsupported

KeysAndValues = list[tuple[Tensor, Tensor]]
"""Of each layer, [kv_heads, tokens, head_dim] each."""


@dataclass(frozen=True)
class Prompt:
    """The prompt of one row of the batch.

    Attributes:
        token_ids: the beginning of its sequence, or the encoder's prompt. 0 where there is only an embedding.
        padding: how many tokens of padding come before them in the row. None if they are not the rest of the row.
        source: for :meth:`specbeam.Engine.submit`. None where the engine reads the token ids.
    """

    token_ids: list[int]
    padding: int | None = 0
    source: Any = None


class Prompts:
    """The prompts of a call.

    Args:
        backend: of the model.
        input_ids: of the batch, int64 [rows, length].
        copies: how many rows have the same prompt.
        has_beams: several beams for each prompt. Then no cache is returned.
        source_ids: the encoder's token ids, if it has read any.
        arguments: of the model's forward, as ``generate`` has prepared them.

    Attributes:
        cache: keeps the keys and values of the sequences. None if nobody asks for it.
        rows: the prompts of all rows, or one for each of some rows that have the same.
        have_ids: whether all token ids are known.
    """

    def __init__(
        self,
        backend: CausalBackend | EncoderDecoderBackend,
        input_ids: Tensor,
        copies: int,
        has_beams: bool,
        generation_config: Any,
        source_ids: Tensor | None,
        arguments: dict[str, Any],
    ) -> None:
        self._backend = backend
        self._source_ids = source_ids
        self._config = generation_config
        self._arguments = {name: value for name, value in arguments.items() if value is not None}
        cache = self._arguments.get(CACHE)
        refuse(cache is not None and not isinstance(cache, Cache), f"{CACHE} of type {type(cache).__name__}")
        is_callers = getattr(cache, "_is_user_defined", False)
        refuse(has_beams and is_callers, f"{CACHE} with beams")
        wanted = is_callers or (not has_beams and bool(generation_config.return_dict_in_generate))
        self.cache: Cache | None = cache if wanted else None
        repeats = wanted and not is_callers and _is_dynamic(cache)  # prefill each prompt once, and repeat its cache
        self._every = slice(None, None, 1 if wanted and not repeats else copies)
        if isinstance(backend, EncoderDecoderBackend):
            self.rows = self._encoded(backend, input_ids)
        else:
            self.rows = self._causal(input_ids)
        if repeats and copies > 1:
            self._arguments[CACHE].batch_repeat_interleave(copies)

    def of_row(self, number: int, rows: int) -> Prompt:
        """The prompt of one of the batch's rows."""
        return self.rows[number * len(self.rows) // rows]

    def kept(self, tree: Tree, nodes: Nodes) -> KeysAndValues:
        """A copy of the keys and values of a live sequence's nodes."""
        return self._backend.keys_and_values(slots_of(tree, self._backend).places(nodes))

    def fill_cache(self, texts: Sequence[KeysAndValues]) -> None:
        """Add the keys and values of the new tokens of all rows to the cache.

        After the end of a text they are 0, where transformers has the padding's.
        """
        assert self.cache is not None
        cache = self.cache.self_attention_cache if isinstance(self.cache, EncoderDecoderCache) else self.cache
        longest = max(text[0][0].shape[1] for text in texts)
        for layer in range(len(texts[0]) if longest else 0):
            keys, values = (
                torch.stack([pad(text[layer][kind], (0, 0, 0, longest - text[layer][kind].shape[1])) for text in texts])
                for kind in (0, 1)
            )
            cache.update(keys, values, layer)

    def _causal(self, input_ids: Tensor) -> list[Prompt]:
        arguments, rows = self._arguments, len(input_ids)
        embeds, cache = arguments.get("inputs_embeds"), arguments.get(CACHE)
        past = 0 if cache is None else cache.get_seq_length()
        new = input_ids.shape[1] if embeds is None else embeds.shape[1]
        mask = arguments.get("attention_mask")
        if mask is None:
            mask = input_ids.new_ones(rows, getattr(self._config, "_mask_length", new))
        refuse(
            mask.ndim != 2 or len(mask) != rows or mask.shape[1] not in (new, past + new),
            "an attention mask of another shape than the prompts",
        )
        refuse(past >= mask.shape[1], f"{CACHE} with as many tokens as the prompt: give a longer one")
        mask = mask.to(input_ids.device).bool()
        refuse(not mask[:, -1].all(), "an attention mask that hides the last token: pad prompts on the left")
        has_holes = bool((mask.long().diff() < 0).any())
        window = self._backend._window
        refuse(has_holes and window is not None, "a mask that hides tokens inside a prompt, with a sliding window")
        is_read = past > 0 or embeds is not None or "token_type_ids" in arguments or self.cache is not None
        if (positions := arguments.get("position_ids")) is not None:
            usual, positions = (mask.cumsum(-1) - 1)[: len(positions)], positions.to(mask.device)
            is_last_usual = positions.shape == usual.shape and torch.equal(positions[:, -1], usual[:, -1])
            refuse(not is_last_usual, "position_ids other than the usual")
            is_read |= bool((positions != usual)[mask[: len(positions)]].any())
        ids = input_ids.new_zeros(rows, mask.shape[1])
        if input_ids.shape[1]:
            ids[:, -input_ids.shape[1] :] = input_ids
        self.have_ids = input_ids.shape[1] == mask.shape[1]
        sources = self._read(input_ids, mask) if is_read else None
        prompts = []
        for number, (row, seen) in enumerate(zip(ids[self._every], mask[self._every], strict=True)):
            is_rest = self.have_ids and not has_holes
            padding = int((~seen).sum()) if is_rest else None
            prompts.append(Prompt(row[seen].tolist(), padding, sources and sources[number]))
        return prompts

    def _read(self, input_ids: Tensor, mask: Tensor) -> list[ReadPrompt]:
        """The prompts of some rows, read by the model as transformers does it."""
        cache = self._arguments.get(CACHE)
        if cache is None:
            cache = DynamicCache(config=self._backend.model.config.get_text_config(decoder=True))
        output = self._prefill(input_ids, **{CACHE: cache}, use_cache=True)
        types = self._arguments.get("token_type_ids")
        sources = []
        for number, seen in enumerate(mask[self._every]):
            layers = [
                (_columns(layer.keys[number], seen), _columns(layer.values[number], seen)) for layer in cache.layers
            ]
            token_type = None if types is None else int(types[self._every][number, -1])
            sources.append(ReadPrompt(layers, output.logits[number, -1].float(), token_type))
        return sources

    def _encoded(self, backend: EncoderDecoderBackend, input_ids: Tensor) -> list[Prompt]:
        arguments = self._arguments
        decoder_mask, mask = arguments.get("decoder_attention_mask"), arguments.get("attention_mask")
        refuse(bool((input_ids != input_ids[0]).any()), "decoder_input_ids that differ between rows")
        refuse(decoder_mask is not None and not decoder_mask.all(), "a decoder_attention_mask with zeros")
        cache = arguments.get(CACHE)
        refuse(cache is not None and cache.get_seq_length() > 0, f"{CACHE} with something in them")
        states: Tensor = arguments["encoder_outputs"].last_hidden_state[self._every]
        read = torch.ones(states.shape[:2], dtype=torch.bool) if mask is None else mask[self._every].bool()
        refuse(read.shape != states.shape[:2], "an attention mask of another shape than encoder_outputs")
        sources = backend.place([of[row] for of, row in zip(states, read.to(states.device), strict=True)])
        if self.cache is not None:
            self._prefill(input_ids)
        ids, unknown = self._source_ids, torch.zeros_like(read, dtype=torch.long)
        if ids is None or ids.is_floating_point() or bool((ids < 0).any()):
            ids = unknown
        else:
            ids = ids.repeat_interleave(len(input_ids) // len(ids), 0)[self._every]
        self.have_ids = ids is not unknown and ids.shape == read.shape
        ids = ids if self.have_ids else unknown
        return [Prompt(i[row].tolist(), 0, source) for i, row, source in zip(ids, read, sources, strict=True)]

    def _prefill(self, input_ids: Tensor, **more: Any) -> Any:
        """The output of the model for some rows, read as in transformers."""
        every, rows = self._every, len(input_ids)

        def some(value: Any) -> Any:
            if isinstance(value, BaseModelOutput):
                return BaseModelOutput(value.last_hidden_state[every])
            if isinstance(value, Tensor) and value.ndim:
                return value[every] if len(value) == rows else value[:1]
            return value

        arguments = {name: some(value) for name, value in self._arguments.items()}
        return prefill(self._backend.model, input_ids[every], self._config, arguments | more)


def _is_dynamic(cache: Cache) -> bool:
    return isinstance(cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache, DynamicCache)


def _columns(stored: Tensor, seen: Tensor) -> Tensor:
    """A cached layer's part for the tokens that are seen, [kv_heads, tokens, head_dim].

    Args:
        stored: [kv_heads, columns, head_dim]: more columns than tokens, or the columns of the last tokens.
        seen: bool [length].
    """
    missing = max(0, len(seen) - stored.shape[1])  # before the window of the layer
    return pad(stored, (0, 0, missing, 0))[:, : len(seen)][:, seen.to(stored.device)]


def refuse(asked: bool, what: str) -> None:
    if asked:
        raise unsupported(what)
