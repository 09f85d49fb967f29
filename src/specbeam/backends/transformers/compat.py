"""Changes to transformers from the outside, in the places where it has no interface for them.

- ``model.generate`` keeps some of its arguments from a ``custom_generate`` function. :func:`argument_of_generate` reads
  them.
- The argument for the KV cache has another name since transformers 5.24: :func:`cache_argument`.
- Beam sampling has another rule since transformers 5.24: :func:`ranks_draws`.
- Prompts that are no token ids alone are read as ``generate`` reads them, by :func:`prefill`.
- Decoders with an encoder count their positions, and take none. :class:`DecoderPositions` replaces them for the time
  of a pass.

Both are tested against transformers' own results, so a release that changes the inside fails a test.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

MethodChange = tuple[Any, str, Callable[..., Tensor]]
"""A module, the name of a method, and another method."""


def cache_argument(function: Callable[..., Any]) -> str:
    """The argument by which a model's forward, or another function of transformers, takes the KV cache."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


CACHE = cache_argument(GenerationMixin.prepare_inputs_for_generation)
"""The name of the KV cache in the arguments and in the outputs of ``generate``."""


def argument_of_generate(name: str) -> Any:
    """An argument that the caller gave to ``model.generate``, for the function given to it as ``custom_generate``.

    ``generate`` takes each argument of its own signature for itself, and passes on only the arguments that it does not
    know. A draft model or a streamer would be lost without a word. So this reads the frame of ``generate``. A tokenizer
    is lost even there, but not in the frame of its innermost decorator, ``torch.no_grad``.

    Returns:
        None if the calling function was not called by ``generate``.
    """
    frame = inspect.currentframe()
    generate = frame.f_back.f_back if frame and frame.f_back else None
    if generate is None or generate.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        return None
    if name in generate.f_locals:
        return generate.f_locals[name]
    innermost = inspect.unwrap(
        GenerationMixin.generate, stop=lambda f: not hasattr(vars(f)["__wrapped__"], "__wrapped__")
    )
    decorator = generate.f_back
    if decorator is None or decorator.f_code is not innermost.__code__:
        return None
    return decorator.f_locals["kwargs"].get(name)


@cache
def ranks_draws() -> bool:
    """Whether beam sampling ranks the candidates that it draws by their scores, and not in the order of the draws.

    The candidates that have ended are kept if they are among the first num_beams.
    """
    scores, none = torch.linspace(0, 1, 64, device="cpu")[None], torch.zeros(1, 1, 1, dtype=torch.long, device="cpu")
    sizes = {"num_beams": 1, "vocab_size": 64, "batch_size": 1, "beams_to_keep": 64}
    with torch.random.fork_rng(devices=[]):
        ranked, *_ = GenerationMixin._get_top_k_continuations(
            GenerationMixin, scores, none, none, cur_len=0, decoder_prompt_len=0, do_sample=True, **sizes
        )
    return torch.equal(ranked, scores.flip(1))  # by chance once in 64! cases


def prefill(model: Any, input_ids: Tensor, generation_config: Any, arguments: dict[str, Any]) -> Any:
    """The output of a model's forward for prompts, as ``generate`` begins.

    Args:
        input_ids: int64 [rows, length].
        arguments: of the forward, as ``generate`` has prepared them. The cache among them is filled.
    """
    return model._prefill(input_ids, generation_config, arguments)


class DecoderPositions:
    """The positions of a decoder that counts them, to be replaced for the time of a forward pass.

    T5, BART and their relatives take the position of a token to be the number of tokens before it. In a tree, tokens of
    several branches lie side by side, so the positions differ. The module for learned positions (BART) gets another
    ``forward``, and the attention with relative positions (T5) another ``compute_bias``.
    """

    def __init__(self, decoder: Any) -> None:
        self._embed = getattr(decoder, "embed_positions", None)
        self._relative = [m for m in decoder.modules() if getattr(m, "has_relative_attention_bias", False)]

    @property
    def can_be_given(self) -> bool:
        """Whether :meth:`given` knows how this decoder turns positions into embeddings or biases."""
        if self._relative:
            return True
        parameters = [] if self._embed is None else [*inspect.signature(self._embed.forward).parameters]
        return "position_ids" in parameters or parameters[:2] == ["input_ids", "inputs_embeds"]

    def given(self, nodes: Tensor, slots: Tensor) -> GivenPositions:
        """Let the decoder use these positions, in a ``with`` block, instead of the positions that it counts.

        Args:
            nodes: positions of the evaluated nodes, int64 [n].
            slots: positions of all slots of the cache, int64 [length].
        """
        changes: list[MethodChange] = [
            (m, "compute_bias", partial(_bias, m.compute_bias, nodes[:, None] - slots)) for m in self._relative
        ]
        if self._embed is not None:
            changes.append((self._embed, "forward", partial(_embed, self._embed, self._embed.forward, nodes)))
        return GivenPositions(changes)


class GivenPositions:
    """A block in which modules have other methods.

    A class, because a generator would be closed late if an interrupt came before the block.

    Args:
        changes: modules, names of their methods, and the methods that take the place of these.
    """

    def __init__(self, changes: list[MethodChange]) -> None:
        self._changes = changes
        self._own = [vars(module).get(name) for module, name, _ in changes]  # not None where a caller has changed it

    def __enter__(self) -> None:
        for module, name, method in self._changes:
            setattr(module, name, method)

    def __exit__(self, *error: object) -> None:
        for (module, name, _), own in zip(self._changes, self._own, strict=True):
            delattr(module, name)
            if own is not None:
                setattr(module, name, own)


def _embed(module: Any, forward: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The embeddings at positions, int64 [n], from a module that counts them: it embeds a sequence that has all."""
    length = int(positions.max()) + 1
    if "position_ids" in inspect.signature(forward).parameters:
        embeddings = forward(*args, **(kwargs | {"position_ids": positions}))
        return embeddings.view(1, len(positions), -1)
    token = 0 if module.padding_idx else 1  # any token but padding, which is not counted
    text = torch.full((1, length), token, device=positions.device)
    return forward(text)[:, positions]


def _bias(compute: Any, distances: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """T5's bias [1, heads, n, slots] at distances, int64 [n, slots], from the biases of a sequence's last token."""
    length = int(distances.max()) + 1
    if "past_seen_tokens" in inspect.signature(compute).parameters:
        last = compute(1, length, past_seen_tokens=length - 1)[0, :, -1]
    else:
        last = compute(length, length)[0, :, -1]
    return last.flip(-1)[:, distances.clamp(0, length - 1)][None]
