"""The ladder: one greedy text made in five ways. Each way does less work per token than the one before.

| rung | per token |
| --- | --- |
| 1 no cache | The whole sequence goes through the model. |
| 2 no cache, compiled | The same, as one compiled program with fixed shapes. |
| 3 KV cache | Keys and values are cached, and only the last token goes through the model. |
| 4 KV cache, compiled | The same, as one compiled program. On a GPU it is replayed as a CUDA graph. |
| 5 engine | The steps of ``specbeam.generate``. |

Read it from top to bottom: the model as the rungs see it, the rungs, and their measurement. The model is the one that
all of specbeam runs on, ``backends/torch/transformer.py``.
"""

# ruff: noqa: E402
from __future__ import annotations

import math
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specbeam.system.extras import require_for

require_for(__name__)

import numpy as np
import torch
from torch import Tensor

from specbeam.api.generation import generate
from specbeam.backends.contract import Backend, TreeBatch
from specbeam.backends.devices import kind, peak_memory, reset_peak_memory
from specbeam.backends.torch import TorchBackend
from specbeam.backends.torch.cache import KeyValues
from specbeam.backends.torch.parts.part import TreeSegment
from specbeam.cache.slots import Slots
from specbeam.core.tree import Tree
from specbeam.errors import SpecbeamError, forget_frames, is_out_of_memory
from specbeam.models.model import LanguageModel
from specbeam.options.generation_defaults import GenerationDefaults
from specbeam.text.detokenizer import NewText, shared_length

RUNGS = {1: "no cache", 2: "no cache, compiled", 3: "KV cache", 4: "KV cache, compiled", 5: "engine"}
COMPILED = (2, 4)

Forward = Callable[[Tensor, Tensor, list[TreeSegment], Tensor], Tensor]
"""``Transformer.forward``: tokens and positions int64 [n], segments, and the nodes whose logits are wanted."""


class Model:
    """A model as the rungs see it: tokens in, the likeliest next token out.

    For specbeam's transformer a sequence is a tree without branches. The token at position i lies in slot i.

    Args:
        compiled: compile the forward pass. Every pass must then have the shapes of the first.

    Raises:
        SpecbeamError: no rung can run such a model.
    """

    def __init__(self, lm: LanguageModel, compiled: bool = False) -> None:
        backend = lm.backend
        self.device = backend.device
        self.windows: set[int | None] = {None}
        self.reaches: set[int | None] = set()
        self.forward: Forward
        if backend.encoder_reads is not None:
            raise SpecbeamError("the model has an encoder, which this rung does not know")
        if isinstance(backend, TorchBackend):
            self.windows |= backend.model.windows
            self.reaches = backend.model.reaches
            self.forward = backend.model
        elif compiled:
            raise SpecbeamError(f"the model runs on the {backend.name} backend, and only torch's passes are compiled")
        else:
            self.forward = through(backend)
        if compiled:
            # A CUDA graph launches all kernels of a pass at once: one launch takes longer than a small kernel.
            mode = "reduce-overhead" if kind(self.device) == "cuda" else None
            self.forward = torch.compile(self.forward, fullgraph=True, dynamic=False, mode=mode)

    @torch.no_grad()
    def logits(self, tokens: list[int], start: int, cache: KeyValues | Slots, length: int, last: int = -1) -> Tensor:
        """One pass: the logits [1, vocab] after one of the tokens, on the model's device.

        Args:
            tokens: token ids of the text from position ``start`` on.
            cache: holds the keys and values of the tokens before ``start``, and takes the new ones.
            length: attention reads this many slots, also slots that are empty.
            last: the index of the token that the logits follow.
        """
        device = self.device
        positions = torch.arange(start, start + len(tokens), device=device)
        distance = positions[:, None] - torch.arange(length, device=device)
        past = distance >= 0
        visible: dict[int | None, Tensor | None] = {
            window: past if window is None else past & (distance < window) for window in self.windows
        }
        store: Any = cache
        every = {reach: length if reach is None else reach for reach in self.reaches}
        recent = {one: positions[:, None] + torch.arange(1 - n, 1, device=device) for one, n in every.items()}
        segment = TreeSegment(store, slice(0, len(tokens)), positions, slice(0, length), visible, recent)
        wanted = torch.tensor([last % len(tokens)], device=device)
        return self.forward(torch.tensor(tokens, device=device), positions, [segment], wanted)

    def next_token(self, tokens: list[int], start: int, cache: KeyValues | Slots, length: int, last: int = -1) -> int:
        """The likeliest token after one of the tokens. Arguments as for :meth:`logits`."""
        return int(self.logits(tokens, start, cache, length, last).argmax())


class NoCache(KeyValues):
    """Takes the place of a cache and keeps nothing: attention gets the keys and values of the pass itself."""

    def __init__(self) -> None:
        super().__init__((), dtype=torch.float32, device="cpu")

    def store(self, part: int, slots: slice | Tensor, *new: Tensor) -> list[Tensor]:
        return [rows.transpose(0, 1) for rows in new]


def static_cache(backend: Backend, length: int) -> KeyValues | Slots:
    """A cache with slots for the whole sequence from the start, so that neither its shape nor its address ever changes.

    Backends other than torch have one KV cache for all sequences. There a sequence has slots of its own.
    """
    if not isinstance(backend, TorchBackend):
        return Slots(Tree([0] * length), backend)
    cache = backend.new_store()
    cache.reserve(length)
    cache.stay()
    return cache


def through(backend: Backend) -> Forward:
    """The pass of a backend other than torch, with the signature of ``Transformer.forward``, for one text."""

    def forward(tokens: Tensor, positions: Tensor, segments: list[TreeSegment], wanted: Tensor) -> Tensor:
        cache: Any = segments[0].store
        nodes, places, last = (t.cpu().numpy() for t in (tokens, positions, wanted))
        if isinstance(cache, NoCache):
            cache = static_cache(backend, len(nodes))  # the backend needs one. It is thrown away after the pass
        whole = cache.tree_batch(np.arange(len(cache.tree)), last)
        suffixes = np.empty((len(nodes), 0), dtype=np.int64)
        return backend.forward([TreeBatch(nodes, places, whole.prefix[places], whole.prefix, suffixes, last)])

    return forward


def no_cache(model: Model, prompt: list[int], length: int) -> Iterator[int]:
    """Rung 1: the whole sequence goes through the model for every token."""
    text = [*prompt]
    while len(text) < length:
        text.append(model.next_token(text, 0, NoCache(), len(text)))
        yield text[-1]


def no_cache_static(model: Model, prompt: list[int], length: int) -> Iterator[int]:
    """Rung 2: the same with fixed shapes, because the sequence is padded to its final length.

    The padding changes nothing, because no token sees a later one.
    """
    text = [*prompt]
    while len(text) < length:
        padding = [0] * (length - len(text))
        text.append(model.next_token(text + padding, 0, NoCache(), length, last=len(text) - 1))
        yield text[-1]


def kv_cache(reader: Model, writer: Model, cache: KeyValues | Slots, prompt: list[int], length: int) -> Iterator[int]:
    """Rungs 3 and 4: keys and values are cached, and every pass after the prompt has one token.

    Args:
        reader: prefills the prompt, in one pass.
        writer: the same model. On rung 4 it is compiled, since all its passes have the same shapes.
        cache: has slots for the whole sequence. Slots left by an earlier one are masked until they are overwritten.
    """
    token = reader.next_token(prompt, 0, cache, length)
    yield token
    for position in range(len(prompt), length - 1):
        token = writer.next_token([token], position, cache, length)
        yield token


def engine(lm: LanguageModel, prompt: list[int], max_new_tokens: int) -> tuple[list[int], int]:
    """Rung 5: specbeam's own loop. Its cache grows, and it is ready for beams, drafts and other requests beside it."""
    plain = replace(
        lm, generation_defaults=GenerationDefaults()
    )  # some checkpoints ask for penalties, which the other rungs lack
    result = generate(plain, prompt, max_new_tokens=max_new_tokens)
    return result.token_ids, result.stats.target_passes


Run = Callable[[], tuple[list[int], int]]
"""Makes the text, and returns its new tokens and the number of passes."""


def prepare(lm: LanguageModel, number: int, prompt: list[int], max_new_tokens: int) -> Run:
    """A rung that can be run any number of times. Errors as for :class:`Model`."""
    if number == 5:
        return partial(engine, lm, prompt, max_new_tokens)
    length = min(len(prompt) + max_new_tokens, lm.backend.context_length)
    model = Model(lm, compiled=number in COMPILED)
    rung: Callable[[], Iterator[int]]
    if number == 1:
        rung = partial(no_cache, model, prompt, length)
    elif number == 2:
        rung = partial(no_cache_static, model, prompt, length)
    else:
        rung = partial(kv_cache, Model(lm), model, static_cache(lm.backend, length), prompt, length)

    def run() -> tuple[list[int], int]:
        tokens: list[int] = []
        for token in rung():
            tokens.append(token)
            if token in lm.eos_token_ids:
                break
        return tokens, len(tokens)  # one pass per token

    return run


@dataclass(frozen=True)
class Difference:
    """Where a text differs from the expected one.

    Attributes:
        token: the index of the first new token that differs, from 0.
        gap: the logit of the expected token minus the logit of the other one, in a pass over the whole text. None if
            one of the texts ends there, or if a logit is not finite.
        near_tie: the gap is so small that rounding can change its sign.
    """

    token: int
    gap: float | None
    near_tie: bool


@dataclass(frozen=True)
class Rung:
    """The measurement of one rung.

    Attributes:
        number: its key in :data:`RUNGS`.
        device: named as in PyTorch.
        backend: "torch", "transformers" or "cpu".
        weights: their dtype; for the cpu backend its quantization.
        prompt_tokens: tokens of the prompt.
        token_ids: the new tokens.
        text: their text, without special tokens.
        seconds: of each timed run, from the prompt to the last token. Empty if the rung failed.
        passes: of the model, per run.
        compile_seconds: how much longer the untimed first run took; None if the rung is not compiled.
        peak_memory: bytes held in these runs at most, with the weights: device memory on a GPU, memory of the process
            on a CPU. On macOS and Windows it is the maximum held so far. None if unknown.
        identical: whether all runs gave the tokens of the first rung; None for the first rung itself.
        difference: the first difference, if the tokens are not identical.
        failure: why the rung has no measurement; None if it has one.
    """

    number: int
    device: str
    backend: str
    weights: str
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    seconds: tuple[float, ...] = ()
    passes: int | None = None
    compile_seconds: float | None = None
    peak_memory: int | None = None
    identical: bool | None = None
    difference: Difference | None = None
    failure: str | None = None

    @property
    def name(self) -> str:
        return RUNGS[self.number]

    @property
    def median(self) -> float | None:
        """Seconds of the median run."""
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens per second, in the median run."""
        return len(self.token_ids) / self.median if self.median else None


def climb(
    lm: LanguageModel,
    prompt: list[int],
    *,
    max_new_tokens: int = 32,
    rungs: Sequence[int] = tuple(RUNGS),
    runs: int = 3,
    tell: Callable[[int, str], object] = lambda number, what: None,
) -> Iterator[Rung]:
    """Run one rung after the other, and yield each measurement as soon as it is known.

    A rung that fails, for any reason, is yielded with a ``failure``, and the others go on. Programs that the process
    has compiled with ``torch.compile`` are forgotten.

    Args:
        prompt: token ids (:func:`specbeam.models.prompts.encode`), fewer than the model's context.
        max_new_tokens: the maximum length. A text may end before, at one of the model's end-of-sequence tokens.
        rungs: keys of :data:`RUNGS`. Texts are compared with the text of the first rung that does not fail.
        runs: the number of timed runs, after one untimed run.
        tell: called before each run, with the rung's number and a description of the run.
    """
    expected: tuple[int, ...] | None = None
    for number in rungs:
        try:
            rung = measure(lm, number, prompt, max_new_tokens, runs, expected, tell)
            expected = expected or rung.token_ids
        except Exception as error:
            rung = Rung(number, *ground(lm), len(prompt), failure=reason(forget_frames(error)))
        finally:
            if number in COMPILED:
                torch.compiler.reset()  # frees the programs and the memory of their graphs
        yield rung


def measure(
    lm: LanguageModel,
    number: int,
    prompt: list[int],
    max_new_tokens: int,
    runs: int,
    expected: tuple[int, ...] | None,
    tell: Callable[[int, str], object],
) -> Rung:
    """Measure one rung. Arguments as for :func:`climb`, and the expected tokens, if they are known."""
    compiled = number in COMPILED
    run = prepare(lm, number, prompt, max_new_tokens)
    tell(number, "compiling" if compiled else "warming up")
    first, *_ = timed(run)
    reset_peak_memory(lm.backend.device)
    seconds, texts, passes = [], [], 0
    for i in range(runs):
        tell(number, f"run {i + 1} of {runs}")
        took, tokens, passes = timed(run)
        seconds.append(took)
        texts.append(tuple(tokens))
    new_text = NewText(lm.decode)
    others = [text for text in texts if text != expected] if expected else []
    return Rung(
        number,
        *ground(lm),
        prompt_tokens=len(prompt),
        token_ids=texts[0],
        text=new_text.of(new_text.after(prompt), texts[0]),
        seconds=tuple(seconds),
        passes=passes,
        compile_seconds=max(0.0, first - statistics.median(seconds)) if compiled else None,
        peak_memory=peak_memory(lm.backend.device),
        identical=not others if expected else None,
        difference=part(lm, prompt, expected, others[0]) if expected and others else None,
    )


def timed(run: Run) -> tuple[float, list[int], int]:
    """Seconds, tokens and passes of a run. Tokens are numbers of Python, so the device has finished its work."""
    start = time.perf_counter()
    tokens, passes = run()
    return time.perf_counter() - start, tokens, passes


NEAR_TIE = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.5}
"""Two logits that differ by less may change places when sums are formed in another order."""


def part(lm: LanguageModel, prompt: list[int], expected: Sequence[int], got: Sequence[int]) -> Difference:
    """The first difference of two texts that are not the same."""
    at = shared_length([expected, got])
    if at == min(len(expected), len(got)):
        return Difference(at, gap=None, near_tie=False)
    text = [*prompt, *expected[:at]]
    (logits,) = Model(lm).logits(text, 0, NoCache(), len(text)).float()
    gap = float(logits[expected[at]] - logits[got[at]])
    *_, weights = ground(lm)
    near_tie = abs(gap) < NEAR_TIE.get(weights, 0.0)  # the cpu backend's passes give the same bits in every order
    return Difference(at, gap if math.isfinite(gap) else None, near_tie)


def ground(lm: LanguageModel) -> tuple[str, str, str]:
    """The device, the backend and the weights that a model runs on."""
    backend: Any = lm.backend
    weights = backend.quantize if backend.name == "cpu" else str(backend.dtype).removeprefix("torch.")
    return backend.device, backend.name, weights


def reason(error: Exception) -> str:
    """The first line of an error. PyTorch's compiler writes many more."""
    if is_out_of_memory(error):
        return "out of memory"
    line = next(iter(str(error).strip().splitlines()), "")
    kind = "" if isinstance(error, SpecbeamError) else type(error).__name__
    return textwrap.shorten(": ".join(filter(None, (kind, line))), 160, placeholder=" ...")
