"""Several sequences in one context of llama.cpp, for ``bench/cpu.py`` and ``bench/same_text.py``."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any


class LlamaBatch:
    """A context for several sequences.

    Args:
        model: a ``llama_cpp.Llama``.
        size: the maximum number of sequences.
        length: the maximum number of tokens of each.
        unified: the sequences share one cache, as in llama.cpp's server unless the slots are given.
    """

    def __init__(self, model: Any, size: int, length: int, unified: bool) -> None:
        from llama_cpp import _internals

        params = type(model.context_params).from_buffer_copy(model.context_params)
        params.n_ctx, params.n_seq_max, params.kv_unified = length * size, size, unified
        self._most = params.n_batch
        self._context = _internals.LlamaContext(model=model._model, params=params, verbose=False)
        self._batch = _internals.LlamaBatch(n_tokens=self._most, embd=0, n_seq_max=size, verbose=False)

    def texts(
        self, prompts: Sequence[list[int]], samplers: Sequence[Any], tokens: int, ends: Set[int] = frozenset()
    ) -> list[list[int]]:
        """The texts of prompts, with a sampler for each. A text ends after an end token, or with this many tokens."""
        context, fields = self._context, self._batch.batch
        context.kv_cache_clear()
        texts: list[list[int]] = [[] for _ in prompts]
        nodes = [  # sequence, position, token, whether it is a prompt's last
            (i, p, token, p == len(ids) - 1) for i, ids in enumerate(prompts) for p, token in enumerate(ids)
        ]
        while nodes:
            chosen = []
            for start in range(0, len(nodes), self._most):
                some = nodes[start : start + self._most]
                fields.n_tokens = len(some)
                for row, (sequence, position, token, is_last) in enumerate(some):
                    fields.token[row], fields.pos[row], fields.logits[row] = token, position, is_last
                    fields.seq_id[row][0], fields.n_seq_id[row] = sequence, 1
                context.decode(self._batch)
                for row, (sequence, position, _, is_last) in enumerate(some):
                    if is_last:
                        token = int(samplers[sequence].sample(context, row))
                        texts[sequence].append(token)
                        if token not in ends and len(texts[sequence]) < tokens:
                            chosen.append((sequence, position + 1, token, True))
            nodes = chosen
        return texts
