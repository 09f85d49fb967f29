"""The ladder: one greedy text made in five ways, each of which does less for a token than the one before.

    1  no cache               the whole text goes through the model for every token
    2  no cache, compiled     the same, as one compiled program whose shapes never change
    3  KV cache               keys and values are kept, and only the last token goes through the model
    4  KV cache, compiled     the same, as one compiled program; on a GPU it is replayed as a CUDA graph
    5  engine                 specbeam.generate

To be read from top to bottom: how the rungs see the model, the rungs, and what they take. The model is the one that all
of specbeam runs on, ``backends/torch/transformer.py``.
"""

from __future__ import annotations

import math
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbeam.backends.contract import Backend, Segment
from specbeam.backends.devices import peak_memory, reset_peak_memory
from specbeam.backends.torch import TorchBackend
from specbeam.backends.torch.cache import TreeCache
from specbeam.backends.torch.transformer import TreeSegment
from specbeam.engine.failures import forget_frames, is_out_of_memory
from specbeam.errors import SpecbeamError
from specbeam.generation import generate
from specbeam.model import LanguageModel

RUNGS = {1: "no cache", 2: "no cache, compiled", 3: "KV cache", 4: "KV cache, compiled", 5: "engine"}
COMPILED = (2, 4)

Forward = Callable[[Tensor, Tensor, list[TreeSegment], Tensor], Tensor]
"""``Transformer.forward``: tokens and positions int64 [n], segments, and which nodes' logits are wanted."""


class Model:
    """A model as the rungs see it: tokens in, the likeliest next token out.

    For specbeam's transformer a text is a tree without branches. The token at position i lies in slot i.

    Args:
        compiled: every pass has the shapes of the first, so one program can be made of it.

    Raises:
        SpecbeamError: the rungs are not for such a model.
    """

    def __init__(self, lm: LanguageModel, compiled: bool = False) -> None:
        backend = lm.backend
        self.device = backend.device
        self.windows: set[int | None] = {None}
        self.forward: Forward
        if isinstance(backend, TorchBackend):
            self.windows |= {layer.window for layer in backend.model.config.layers}
            self.forward = backend.model
        elif backend.start_token_ids is not None:
            raise SpecbeamError("the model has an encoder, which this rung does not know")
        elif compiled:
            raise SpecbeamError(f"the model runs on the {backend.name} backend, and only torch's passes are compiled")
        else:
            self.forward = through(backend)
        if compiled:
            # A CUDA graph launches all kernels of a pass at once; one by one that takes longer than small ones run.
            mode = "reduce-overhead" if self.device.type == "cuda" else None
            self.forward = torch.compile(self.forward, fullgraph=True, dynamic=False, mode=mode)

    @torch.no_grad()
    def logits(self, tokens: list[int], start: int, cache: TreeCache, length: int, last: int = -1) -> Tensor:
        """One pass: the logits [1, vocab] after one of the tokens, on the model's device.

        Args:
            tokens: token ids that stand in the text from position ``start`` on.
            cache: where their keys and values go, and where those of the tokens before them lie.
            length: attention reads so many slots, whether they hold something yet or not.
            last: which of the tokens the logits follow.
        """
        device = self.device
        positions = torch.arange(start, start + len(tokens), device=device)
        distance = positions[:, None] - torch.arange(length, device=device)
        past = distance >= 0
        visible: dict[int | None, Tensor | None] = {
            window: past if window is None else past & (distance < window) for window in self.windows
        }
        segment = TreeSegment(cache, rows=slice(0, len(tokens)), slots=positions, length=length, visible=visible)
        wanted = torch.tensor([last % len(tokens)], device=device)
        return self.forward(torch.tensor(tokens, device=device), positions, [segment], wanted)

    def next_token(self, tokens: list[int], start: int, cache: TreeCache, length: int, last: int = -1) -> int:
        """The likeliest token after one of the tokens. Arguments as for :meth:`logits`."""
        return int(self.logits(tokens, start, cache, length, last).argmax())


class NoCache(TreeCache):
    """Stands where a cache would, and keeps nothing: attention gets the keys and values of this very pass."""

    def __init__(self) -> None:
        super().__init__(0, 0, 0, most=0, dtype=torch.float32, device=torch.device("cpu"))

    def store(self, layer: int, slots: slice | Tensor, k: Tensor, v: Tensor, length: int) -> tuple[Tensor, Tensor]:
        return k.transpose(0, 1), v.transpose(0, 1)


def static_cache(backend: Backend[Any], length: int) -> Any:
    """A cache with room for the whole text from the start, so that neither its shape nor its place ever changes."""
    cache = backend.new_cache(length)
    cache.reserve(length)
    if isinstance(cache, TreeCache):
        cache.stay()
    return cache


def through(backend: Backend[Any]) -> Forward:
    """The pass of a backend that is not torch, called as a Transformer's: one text, in slots that are in use."""

    def forward(tokens: Tensor, positions: Tensor, segments: list[TreeSegment], wanted: Tensor) -> Tensor:
        cache: Any = segments[0].cache
        nodes, slots, last = (t.cpu().numpy() for t in (tokens, positions, wanted))
        length = len(nodes) + int(slots[0])
        if isinstance(cache, NoCache):
            cache = static_cache(backend, length)  # it must have one, which nobody will read again
        visible = np.arange(length) <= slots[:, None]
        return backend.forward([Segment(cache, nodes, slots, slots, length, visible, last)])

    return forward


def no_cache(model: Model, prompt: list[int], length: int) -> Iterator[int]:
    """Rung 1: the whole text goes through the model for every token."""
    text = [*prompt]
    while len(text) < length:
        text.append(model.next_token(text, 0, NoCache(), len(text)))
        yield text[-1]


def no_cache_static(model: Model, prompt: list[int], length: int) -> Iterator[int]:
    """Rung 2: the same, in shapes that never change, for the text is padded to its final length.

    The padding changes nothing, because no token sees what stands after it.
    """
    text = [*prompt]
    while len(text) < length:
        padding = [0] * (length - len(text))
        text.append(model.next_token(text + padding, 0, NoCache(), length, last=len(text) - 1))
        yield text[-1]


def kv_cache(reader: Model, writer: Model, cache: TreeCache, prompt: list[int], length: int) -> Iterator[int]:
    """Rungs 3 and 4: keys and values are kept, and after the prompt a pass has one token.

    Args:
        reader: reads the prompt, in one pass.
        writer: the same model; on rung 4 it is compiled, since all its passes have the same shapes.
        cache: has room for the whole text. What an earlier text left in it is out of sight until it is overwritten.
    """
    token = reader.next_token(prompt, 0, cache, length)
    yield token
    for position in range(len(prompt), length - 1):
        token = writer.next_token([token], position, cache, length)
        yield token


def engine(lm: LanguageModel, prompt: list[int], max_new_tokens: int) -> tuple[list[int], int]:
    """Rung 5: specbeam's own loop. Its cache grows, and it is ready for beams, drafts and other requests beside it."""
    plain = replace(lm, generation_defaults={})  # some checkpoints ask for penalties, which no other rung has
    result = generate(plain, prompt, max_new_tokens=max_new_tokens)
    return result.token_ids, result.stats.target_passes


Run = Callable[[], tuple[list[int], int]]
"""Makes the text, from the prompt on, and returns its new tokens and how many passes of the model they took."""


def prepare(lm: LanguageModel, number: int, prompt: list[int], max_new_tokens: int) -> Run:
    """A rung that can be run any number of times. Errors as of :class:`Model`."""
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
        return tokens, len(tokens)  # each is a pass

    return run


@dataclass(frozen=True)
class Difference:
    """Where a text parts from the one it should be.

    Attributes:
        token: the number of the first new token that differs, from 0.
        gap: by how much the logit of the token that should be there is the higher one, in a pass over the whole text;
            None if one of the texts ends there, or logits are no numbers.
        near_tie: the gap is so small that rounding can turn it round.
    """

    token: int
    gap: float | None
    near_tie: bool


@dataclass(frozen=True)
class Rung:
    """What a rung took.

    Attributes:
        number: its key in :data:`RUNGS`.
        device: where it ran, named as in PyTorch.
        backend: what ran it: "torch", "transformers" or "cpu".
        weights: their dtype; for the cpu backend how it keeps them.
        prompt_tokens: tokens of the prompt.
        token_ids: the new tokens.
        text: the same, without special tokens.
        seconds: of each run, from the prompt to the last token; none if it failed.
        passes: of the model, in a run.
        compile_seconds: by how much a first run, which is not among those, took longer; None if nothing is compiled.
        peak_memory: the most bytes held in these runs, weights included: of device memory on a GPU, by the process on
            a CPU. Where counting cannot begin anew (on macOS and Windows) the most so far, and None where unknown.
        identical: whether all runs gave the tokens of the first rung; None for the first one itself.
        difference: where one did not.
        failure: why there is none of all this; None if there is.
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
        """New tokens a second, in the median run."""
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
    """Run one rung after the other, and say what each took as soon as it is known.

    A rung that fails, of whatever, is one with a ``failure``; the others go on. What else the process has compiled
    with ``torch.compile`` is forgotten.

    Args:
        prompt: token ids (:func:`specbeam.prompts.encode`), fewer than the model's context.
        max_new_tokens: at most so many; a text may end before, at one of the model's end-of-sequence tokens.
        rungs: keys of :data:`RUNGS`. Texts are compared with that of the first that does not fail.
        runs: so many are timed, after one that is not.
        tell: called before each run, with the rung's number and what is about to happen.
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
    """What a rung takes. Arguments as for :func:`climb`, and the tokens it is expected to find, if that is known."""
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
    others = [text for text in texts if text != expected] if expected else []
    return Rung(
        number,
        *ground(lm),
        prompt_tokens=len(prompt),
        token_ids=texts[0],
        text=lm.decode([*texts[0]]),
        seconds=tuple(seconds),
        passes=passes,
        compile_seconds=max(0.0, first - statistics.median(seconds)) if compiled else None,
        peak_memory=peak_memory(lm.backend.device),
        identical=not others if expected else None,
        difference=part(lm, prompt, expected, others[0]) if expected and others else None,
    )


def timed(run: Run) -> tuple[float, list[int], int]:
    """Seconds, tokens and passes of a run. Tokens are Python's numbers, so the device has done its work."""
    start = time.perf_counter()
    tokens, passes = run()
    return time.perf_counter() - start, tokens, passes


NEAR_TIE = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.5}
"""Two logits that lie closer may change places when sums are formed in another order."""


def part(lm: LanguageModel, prompt: list[int], expected: Sequence[int], got: Sequence[int]) -> Difference:
    """Where two texts that are not the same part."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))
    if at == min(len(expected), len(got)):
        return Difference(at, gap=None, near_tie=False)
    text = [*prompt, *expected[:at]]
    (logits,) = Model(lm).logits(text, 0, NoCache(), len(text)).float()
    gap = float(logits[expected[at]] - logits[got[at]])
    *_, weights = ground(lm)
    near_tie = abs(gap) < NEAR_TIE.get(weights, 0.0)  # the cpu backend's passes give the same bits in every order
    return Difference(at, gap if math.isfinite(gap) else None, near_tie)


def ground(lm: LanguageModel) -> tuple[str, str, str]:
    """What a model runs on: the device, the backend, and what its weights are."""
    backend: Any = lm.backend
    weights = backend.quantize if backend.name == "cpu" else str(backend.dtype).removeprefix("torch.")
    return str(backend.device), backend.name, weights


def reason(error: Exception) -> str:
    """What an error says in its first line. PyTorch's compiler says much more."""
    if is_out_of_memory(error):
        return "out of memory"
    line = next(iter(str(error).strip().splitlines()), "")
    kind = "" if isinstance(error, SpecbeamError) else type(error).__name__
    return textwrap.shorten(": ".join(filter(None, (kind, line))), 160, placeholder=" ...")
