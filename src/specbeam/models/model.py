"""A language model ready to generate: a backend and the tokenizer that goes with it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from specbeam.backends.contract import Backend
from specbeam.backends.devices import DTYPES, choose_device, choose_dtype, has_kernels, kind
from specbeam.checkpoints import locate, open_checkpoint
from specbeam.checkpoints.sources.registry import ALIASES
from specbeam.errors import SpecbeamError, Unsupported, wrong_value
from specbeam.options.generation_defaults import GenerationDefaults
from specbeam.options.names import BACKENDS, MTP
from specbeam.options.options import refuse_unknown_keywords
from specbeam.system.extras import are_installed, require
from specbeam.text.tokenizer import Tokenizer, text_of

if TYPE_CHECKING:  # they import PyTorch, which takes a second
    from specbeam.backends.torch import TorchBackend
    from specbeam.checkpoints.checkpoint import Checkpoint

logger = logging.getLogger("specbeam")
CONFIGURATIONS = ("config.json", "adapter_config.json")
"""The files of a folder that say how the weights of a model or an adapter are used."""
PACKAGES: dict[str, tuple[str, ...]] = {"cpu": (), "torch": ("torch",), "transformers": ("torch", "transformers")}
"""The packages that each backend needs beyond the core."""
shown_precisions: set[str] = set()  # the lines that this process has shown


@dataclass(frozen=True)
class Placement:
    """Where a model runs and in which precision: arguments of :func:`load`, which says what they mean."""

    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class Origin:
    """Where a model's weights come from: arguments of :func:`load`. A file or a folder has its whole path."""

    source: str
    revision: str | None
    adapter: str | None


@dataclass(frozen=True)
class TokenIds:
    """What the token ids of a model mean.

    Attributes:
        source: of the model, for messages.
        size: of its vocabulary.
    """

    source: str
    tokenizer: Any
    size: int

    def mean_the_same(self, other: TokenIds) -> bool:
        """Whether ids mean the same to both, apart from 1%: siblings often differ in special tokens.

        Without a tokenizer, the sizes of the vocabularies decide.
        """
        if self.tokenizer is other.tokenizer or self.tokenizer is None or other.tokenizer is None:
            return self.size == other.size
        ours, theirs = ({*tokenizer.get_vocab().items()} for tokenizer in (self.tokenizer, other.tokenizer))
        return len(ours ^ theirs) < 0.01 * len(ours | theirs)


@dataclass(frozen=True, eq=False, repr=False)
class LanguageModel:
    """A loaded model with its tokenizer, made by :func:`load`.

    Attributes:
        source: the name of the model, as the caller gave it.
        tokenizer: a :class:`~specbeam.Tokenizer`, or one of transformers, with the model's chat template if it has
            one. If this is None, prompts are token ids and texts are empty.
        eos_token_ids: the tokens that end its texts.
        generation_defaults: its checkpoint's generation settings.
        names: what its checkpoint and its source call it, its architecture too; empty if another function made it.
        placement: the arguments that :func:`load` was given; None if another function made this model. Drafts that are
            named by their source are loaded in the same way, or on the device of this model.
        weights: a digest of the weights and the configuration. The cpu backend's is of every byte that its kernels
            read. Another backend's is of samples of the checkpoint's files. None for a model that another function
            made.
        origin: where its weights come from; None if another function made this model.

    ``pickle`` stores no weights: the model is loaded again where it is unpickled, from the same source with the same
    arguments. ``copy`` and ``deepcopy`` return the model itself, which never changes.
    """

    source: str
    backend: Backend
    tokenizer: Any
    eos_token_ids: frozenset[int]
    generation_defaults: GenerationDefaults
    placement: Placement | None = None
    weights: str | None = None
    origin: Origin | None = None
    names: tuple[str, ...] = ()
    _drafts: dict[str, LanguageModel] = field(default_factory=dict, init=False)
    _loading: Lock = field(default_factory=Lock, init=False)

    def __repr__(self) -> str:
        return f"LanguageModel({self.source!r}, {self.precision})"

    def __copy__(self) -> LanguageModel:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LanguageModel:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.origin is None or self.placement is None:
            raise SpecbeamError(
                f"{self.source} cannot be pickled, because specbeam has not loaded it itself: send its source to the "
                "other process, and load or wrap the model there"
            )
        own = {"source": self.source, "generation_defaults": self.generation_defaults}
        return _load_again, (self.origin, self.placement, self.weights, self.precision, own)

    def draft_model(self, source: str | os.PathLike[str]) -> LanguageModel:
        """A draft for this model by its source (see :func:`load`), placed as this model is.

        It is loaded at the first call, and kept as long as this model.

        Args:
            source: "mtp" for this model's own head, or as for :func:`load`. A folder may also hold an EAGLE-3 head.

        Raises:
            SpecbeamError: no such model, or one that cannot be loaded.
        """
        name = os.fspath(source)
        if name not in self._drafts and (head := self.draft_head(name)) is not None:
            return head
        with self._loading:
            if name not in self._drafts:
                placement = self.placement or Placement(device=self.backend.device)
                self._drafts[name] = load_silently(name, placement)
            return self._drafts[name]

    def draft_head(self, source: str | os.PathLike[str], quantize: str | None = None) -> LanguageModel | None:
        """The draft head that a source names, for this model. None if it names something else.

        It is loaded at the first call, and kept as long as this model.

        Args:
            quantize: as for :func:`load` [as this model].

        Raises:
            SpecbeamError: there is no such head, or it cannot be loaded for this model.
        """
        name, placement = os.fspath(source), self.placement or Placement(device=self.backend.device)
        key = f"{name} {quantize}"
        with self._loading:
            if key not in self._drafts:
                if (checkpoint := self._checkpoint_of_head(name)) is None:
                    return None
                from specbeam.backends.cpu import CpuBackend
                from specbeam.backends.cpu.head import CpuHead

                if not isinstance(self.backend, CpuBackend):
                    says = f"{name} is a draft head, which runs on the cpu backend, and {self.source} is on"
                    raise SpecbeamError(f"{says} {self.backend.name}: load it with backend='cpu'", option="backend")
                backend = CpuHead(checkpoint, quantize or _weight_format(placement), self.backend)
                self._drafts[key] = replace(
                    self, source=name, backend=backend, weights=backend.weights_digest, origin=None, names=(name,)
                )
            return self._drafts[key]

    def _checkpoint_of_head(self, name: str) -> Checkpoint | None:
        if name != MTP:
            checkpoint = open_checkpoint(locate(name))
            return checkpoint if checkpoint.is_head else None
        if self.origin is None or self.placement is None:
            raise SpecbeamError(
                f"specbeam has not loaded {self.source} itself: draft='mtp' needs a model that it loads"
            )
        origin = self.origin
        own, *_ = _open(origin.source, self.placement, origin.revision, origin.adapter)
        if own.mtp is None:
            raise SpecbeamError(
                f"{self.source} has no head for multi-token prediction: give another draft, such as 'ngram'",
                option="draft",
            )
        return own.mtp

    @property
    def precision(self) -> str:
        """The number type of its weights, and its device, such as "int8 on cpu"."""
        return f"{self.backend.precision} on {self.backend.device}"

    @property
    def has_chat_template(self) -> bool:
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    @property
    def token_ids(self) -> TokenIds:
        """What its token ids mean."""
        return TokenIds(self.source, self.tokenizer, self.backend.vocab_size)

    def shares_tokenizer(self, other: LanguageModel) -> bool:
        """Whether token ids mean the same to both models, as :meth:`TokenIds.mean_the_same` decides."""
        if other not in self._shares_tokenizer:
            self._shares_tokenizer[other] = self.token_ids.mean_the_same(other.token_ids)
        return self._shares_tokenizer[other]

    @cached_property
    def _shares_tokenizer(self) -> WeakKeyDictionary[LanguageModel, bool]:
        return WeakKeyDictionary()  # to compare two large vocabularies takes a tenth of a second

    def decode_token(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens written out."""
        return self.decode(token_ids, skip_special_tokens=False)

    def token_text(self, token: int) -> str:
        """The text of a token as a part of a text, special tokens written out; empty without a tokenizer."""
        text = self.text_or_bytes(token)
        return text if isinstance(text, str) else text.decode(errors="replace")

    def text_or_bytes(self, token: int) -> str | bytes:
        """As :meth:`token_text`, but the bytes of a token that is no whole characters."""
        piece = None if self.tokenizer is None else self.tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._added_tokens:
            return piece or ""  # a model may have more rows than its tokenizer has tokens
        return text_of(self.tokenizer, token, piece)

    @cached_property
    def _added_tokens(self) -> frozenset[int]:
        return frozenset(self.tokenizer.added_tokens_decoder)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; empty without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self._decode(token_ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def _decode(self) -> Callable[..., str]:
        """The tokenizer's way to decode. Texts are decoded token by token, so checks of transformers are skipped."""
        tokenizer, kind = self.tokenizer, type(self.tokenizer)
        if isinstance(tokenizer, Tokenizer):
            backend_decode: Callable[..., str] = tokenizer.backend_tokenizer.decode
            return backend_decode
        from transformers import PreTrainedTokenizerFast as Fast

        only_checks = isinstance(tokenizer, Fast) and (kind.decode, kind._decode) == (Fast.decode, Fast._decode)
        skips = only_checks and not tokenizer.clean_up_tokenization_spaces
        decode: Callable[..., str] = tokenizer.backend_tokenizer.decode if skips else tokenizer.decode
        return decode


def _choose_backend(checkpoint: Checkpoint, placement: Placement) -> tuple[str, SpecbeamError | None]:
    """The backend for a checkpoint on this machine, and the reason if one would expect another backend."""
    try:
        _ = checkpoint.config
    except Unsupported as error:
        return "transformers", error
    from specbeam.backends.cpu.library import choose_isa, library

    halves = placement.dtype not in ("auto", "float32")
    if placement.quantize == "auto" and (halves or choose_device(placement.device) != "cpu"):
        return "torch", None
    try:
        library(choose_isa())
        return "cpu", None
    except SpecbeamError as error:
        if placement.quantize != "auto":
            raise
        return "torch", error


def _weight_format(placement: Placement) -> str:
    """The cpu backend's format of weights."""
    device, dtype, quantize = placement.device, placement.dtype, placement.quantize
    if device != "auto" and choose_device(device) != "cpu":
        raise SpecbeamError(f"the cpu backend does not run on {device}: leave out the device, or the backend")
    if dtype == "auto" or (dtype == "float32" and quantize in ("auto", "float32")):
        return quantize if dtype == "auto" else "float32"
    if dtype == "float32":
        both = ("dtype", "quantize")
        raise SpecbeamError(f"dtype='float32' contradicts quantize={quantize!r}: leave one out", option=both)
    says = f"the cpu backend has no dtype={dtype!r}: give quantize= keep, int8, int4 or float32 instead"
    raise SpecbeamError(says, option=("dtype", "quantize"))


def _say_precision(lm: LanguageModel, chosen_here: bool) -> None:
    """Log the number type of the weights at level INFO. Show it once per model if it is not the caller's choice.

    Python shows only warnings where nobody set up logging, and this is no warning. So it is printed there.
    """
    if not chosen_here:
        logger.info("%s: %s", lm.source, lm.precision)
        return
    of_file = "" if lm.backend.precision in ("int8", "int4") else " of this file"
    line = f"{lm.source}: {lm.precision}; dtype='float32' for transformers' own numbers{of_file}"
    logger.info(line)
    if line not in shown_precisions and logger.level == logging.NOTSET and not logger.hasHandlers():
        print(f"specbeam: {line}", file=sys.stderr, flush=True)
        shown_precisions.add(line)


def warn_of_settings(lm: LanguageModel) -> None:
    """Name the generation settings of a checkpoint that only transformers applies."""
    if not_applied := lm.generation_defaults.not_applied:
        logger.warning("%s: %s", lm.source, not_applied)


@refuse_unknown_keywords
def load(
    source: str | os.PathLike[str],
    *,
    backend: str = "auto",
    device: str = "auto",
    dtype: str = "auto",
    quantize: str = "auto",
    threads: int | None = None,
    revision: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> LanguageModel:
    """Load a model.

    On a CPU its weights are quantized unless you ask for another precision: that is fastest, but texts may differ from
    transformers' texts. ``dtype="float32"`` gives transformers' own numbers. The line ``MODEL: int8 on cpu; ...`` says
    so, at level INFO of the logger ``specbeam``. Where logging is not set up, the line goes to standard error, once per
    model. ``Stats.precision`` says it for each result. Drafts say nothing, since they change no text.

    The generation settings of a checkpoint hold where you give no option (docs/models.md). A warning of the logger
    ``specbeam`` names settings that transformers applies and specbeam does not.

    Args:
        source: an alias (``specbeam models list``), a folder as transformers saves models, a .gguf file, or a hub id.
            A folder may also hold one .gguf file, or a LoRA adapter as PEFT saves it, which names its base model. A hub
            id may name a GGUF file or its quantization: "org/name:Q4_K_M".
        backend: "cpu": native kernels with quantized weights (docs/cpu.md). "torch": specbeam's own transformer on any
            device. "transformers": any architecture that transformers can load. "auto": "cpu" on a CPU, but "torch"
            elsewhere and for half precision; "transformers" if those two lack the architecture. A warning of the logger
            ``specbeam`` explains an unexpected choice.
        device: "auto" (a CUDA device if there is one, else the CPU), or a PyTorch device such as "cpu" or "cuda:1".
        dtype: "float32", "bfloat16", "float16", or "auto". On a CPU "auto" stands for quantized weights (see quantize),
            or for float32 on the other two backends. On other devices it is the checkpoint's own half precision, or
            bfloat16. On a CPU "float32" is the same as ``quantize="float32"``.
        quantize: the cpu backend's format of weights. "keep": a quantized GGUF file's own values. "int8" or "int4": in
            groups of 32. With these three, activations are rounded to int8. "float32". "auto": keep for a quantized
            GGUF file, else int8.
        threads: how many threads the cpu backend uses [$SPECBEAM_THREADS, else all processors of this process].
        revision: a branch, tag or commit of a hub id.
        adapter: a LoRA adapter (a folder or a hub id) to merge into the weights of the model.

    Raises:
        SpecbeamError: no such source, an unsupported architecture, a damaged file, a tokenizer with tokens that the
            model lacks, a device that is not there. Also an unknown keyword.
    """
    lm = load_silently(source, Placement(backend, device, dtype, quantize, threads), revision, adapter)
    is_quantized = lm.backend.precision not in ("float32", "bfloat16", "float16")
    _say_precision(lm, chosen_here=is_quantized and quantize == dtype == "auto")
    warn_of_settings(lm)
    return lm


def weights_of(source: str | os.PathLike[str], placement: Placement) -> tuple[str, int]:
    """The device on which a model's weights will lie, and their size in bytes. They are not read.

    Raises:
        SpecbeamError: as for :func:`load`.
    """
    checkpoint, backend, _ = _open(source, placement)
    if backend == "cpu":
        from specbeam.backends.cpu import choose_mode
        from specbeam.backends.cpu.weights import packed_bytes

        return "cpu", packed_bytes(checkpoint, choose_mode(_weight_format(placement), checkpoint))
    device = choose_device(placement.device)
    return device, checkpoint.facts.parameters * DTYPES[choose_dtype(placement.dtype, device, checkpoint.dtype)]


def _open(
    source: str | os.PathLike[str],
    placement: Placement,
    revision: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> tuple[Checkpoint, str, SpecbeamError | None]:
    """A checkpoint, the name of the backend for it, and the reason if one would expect another backend."""
    backend, reason = placement.backend, None
    if backend not in ("auto", *BACKENDS):
        raise SpecbeamError(f"unknown backend {backend!r}: give auto, {', '.join(BACKENDS)}")
    choose_dtype(placement.dtype, "cpu", "float32")  # refuses names that nobody knows before a package is asked for
    checkpoint = open_checkpoint(locate(source, revision), None if adapter is None else locate(adapter))
    if backend == "auto":
        backend, reason = _choose_backend(checkpoint, placement)
    asks_for_dtype = placement.backend == "auto" and reason is None
    what = f"dtype={placement.dtype!r}" if asks_for_dtype else f"the {backend} backend"
    require(what if reason is None else f"{reason}. To run it, {what}", *PACKAGES[backend])
    return checkpoint, backend, reason


def load_silently(
    source: str | os.PathLike[str],
    placement: Placement,
    revision: str | None = None,
    adapter: str | os.PathLike[str] | None = None,
) -> LanguageModel:
    """Load a model, and say nothing of its precision. Arguments and errors as for :func:`load`."""
    device, dtype = placement.device, placement.dtype
    checkpoint, backend, reason = _open(source, placement, revision, adapter)
    if reason is not None:
        logger.warning("%s runs on the %s backend: %s", os.fspath(source), backend, reason)
    if checkpoint.is_head:
        raise SpecbeamError(f"{os.fspath(source)} is a draft head and no model: give it as the draft of its model")
    if backend != "cpu" and (placement.quantize != "auto" or placement.threads is not None):
        name = "quantize" if placement.quantize != "auto" else "threads"
        says = f"is for the cpu backend, and this is the {backend} backend: leave it out"
        raise wrong_value(name, getattr(placement, name), says)
    loaded: Backend
    if backend == "transformers":
        from specbeam.backends.transformers import load_model
        from specbeam.backends.transformers.encoder_decoder import backend_of

        check = checkpoint.check_transformers
        try:
            model = load_model(checkpoint.path, device, dtype, checkpoint.dtype, checkpoint.adapter, check)
        except SpecbeamError as error:
            options = () if reason is None else (*reason.options, *error.options)
            raise error if reason is None else SpecbeamError(f"{reason}. {error}", option=options) from error
        loaded = backend_of(model)
        checkpoint.check_tokenizer(loaded.vocab_size)
    else:
        checkpoint.check_tokenizer(checkpoint.config.vocab_size)  # refused before the slow parts if it cannot be run
        if parts := checkpoint.facts.passed_over:
            logger.warning("%s reads text only: the weights of %s are passed over", source, ", ".join(parts))

        if backend == "cpu":
            from specbeam.backends.cpu import CpuBackend

            loaded = CpuBackend(checkpoint, _weight_format(placement), placement.threads)
        else:
            loaded = _torch_backend(checkpoint, device, dtype)
    return LanguageModel(
        source=os.fspath(source),
        backend=loaded,
        tokenizer=checkpoint.tokenizer,
        eos_token_ids=checkpoint.eos_token_ids,
        generation_defaults=checkpoint.generation_defaults,
        placement=placement,
        weights=loaded.weights_digest or checkpoint.fingerprint(CONFIGURATIONS),
        origin=Origin(_absolute(source), revision, None if adapter is None else _absolute(adapter)),
        names=(*checkpoint.names, os.path.basename(os.path.normpath(source))),
    )


def _torch_backend(checkpoint: Checkpoint, device: str, dtype: str) -> TorchBackend:
    """The ``torch`` backend. Models on GPUs have kernels of their own, if Triton can compile them."""
    from specbeam.backends.torch import TorchBackend

    chosen = choose_device(device)
    if kind(chosen) == "cuda" and are_installed("triton") and has_kernels(chosen):
        from specbeam.backends.torch.gpu import GpuBackend

        if GpuBackend.fits(checkpoint.config, chosen, choose_dtype(dtype, chosen, checkpoint.dtype)):
            return GpuBackend(checkpoint, device, dtype)
    return TorchBackend(checkpoint, device, dtype)


def _absolute(source: str | os.PathLike[str]) -> str:
    """A source that does not depend on the current directory, which another process may not have."""
    name = os.fspath(source)
    return os.path.abspath(name) if name not in ALIASES and os.path.exists(name) else name


def _load_again(
    origin: Origin, placement: Placement, weights: str, precision: str, own: dict[str, Any]
) -> LanguageModel:
    """A model that another process pickled.

    Args:
        weights, precision: of the model there.
        own: attributes that it may not have from its source.

    Raises:
        SpecbeamError: as for :func:`load`. Also if the weights have changed, or have another precision here.
    """
    lm = load_silently(origin.source, placement, origin.revision, origin.adapter)
    if lm.precision != precision:
        raise SpecbeamError(
            f"{origin.source} was pickled as {precision}, and is {lm.precision} here: give device= and dtype= or "
            "quantize= where it is first loaded",
            option=("device", "dtype", "quantize"),
        )
    if lm.weights != weights:
        raise SpecbeamError(f"{origin.source} was pickled with other weights than it has here: load it here by itself")
    return replace(lm, **own)
