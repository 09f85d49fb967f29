"""A checkpoint's generation settings: transformers' ``GenerationConfig``, and what each of its fields does here.

A test compares these lists with transformers, so that a new field needs a decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from specbeam.errors import SpecbeamError, shown
from specbeam.options.declared import SHAPING, names_where
from specbeam.system.numbers import is_integer, is_real

FILE = "generation_config.json"
APPLIED = (
    *names_where(lambda option: option.of_checkpoint in ("fills", "read") and not option.needs),
    "min_length",
    "encoder_repetition_penalty",
    "encoder_no_repeat_ngram_size",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
)
"""Applied to every text. The last two begin the texts of an encoder-decoder model."""
APPLIED_WHEN_SAMPLING = tuple(SHAPING)
APPLIED_WITH_BEAMS = (
    *names_where(lambda option: option.of_checkpoint == "fills" and "beams" in option.needs),
    "renormalize_logits",
)
"""Without beams, the last of them has no effect on a text: probabilities keep their order and their ratios."""
NOT_UNDER_A_CONSTRAINT = (
    *names_where(lambda option: option.of_checkpoint is not None and option.forbids),
    "min_length",
    "encoder_no_repeat_ngram_size",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
)
"""They forbid or force tokens. A constraint says itself which tokens may follow, and the caller has asked for it."""
LEFT_TO_THE_CALLER = (*names_where(lambda option: option.of_checkpoint == "left"), "max_length")
"""Never taken from a checkpoint: docs/exactness.md, "Differences from transformers on purpose"."""
WITHOUT_EFFECT = {
    "a draft changes no text": (
        "use_mtp",
        "is_assistant",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "assistant_early_exit",
        "assistant_lookbehind",
        "target_lookbehind",
        "assistant_ensemble_weight",
        "speculation_type",
    ),
    "the KV cache and the forward passes are specbeam's own": (
        "use_cache",
        "cache_implementation",
        "cache_config",
        "max_cache_len",
        "prefill_chunk_size",
        "low_memory",
        "compile_config",
        "disable_compile",
        "continuous_batching_config",
    ),
    "a result has fields of its own": (
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    ),
    "there is no padding": ("pad_token_id",),
    "logits that are not finite end the request with an error": ("remove_invalid_values",),
    "it is about the file": ("transformers_version",),
}
"""Fields that change no text here, by the reason."""


class Lacking(NamedTuple):
    """A field that is not applied.

    Attributes:
        neutral: values that ask for nothing.
        why: the reason, for the warning.
    """

    neutral: tuple[Any, ...]
    why: str


NOT_APPLIED = {
    "guidance_scale": Lacking((1,), "no second pass without the prompt"),
    "watermarking_config": Lacking((), "no watermarks"),
    "token_healing": Lacking((False,), "the prompt is used as it is"),
    "top_h": Lacking((), "no such truncation"),
    "epsilon_cutoff": Lacking((0,), "no such truncation"),
    "eta_cutoff": Lacking((0,), "no such truncation"),
    "penalty_alpha": Lacking((0,), "no contrastive search"),
    "dola_layers": Lacking((), "no DoLa"),
    "constraints": Lacking((), "no constrained beam search of this kind"),
    "force_words_ids": Lacking((), "no constrained beam search of this kind"),
    "max_time": Lacking((), "give a timeout to the engine"),
    "stop_strings": Lacking(((), []), "give stop_strings yourself"),
}
"""Fields that transformers applies and specbeam does not: a model that asks for one gets a warning."""

FIELDS = (
    *APPLIED,
    *APPLIED_WHEN_SAMPLING,
    *APPLIED_WITH_BEAMS,
    *LEFT_TO_THE_CALLER,
    *(name for names in WITHOUT_EFFECT.values() for name in names),
    *NOT_APPLIED,
)


class GenerationDefaults(dict[str, Any]):
    """Generation settings by transformers' names. A setting that is None is left out.

    Attributes:
        file: where they stand, for messages.
        when_sampling: further ones, for chat and the server alone (:mod:`specbeam.models.sampling_defaults`).
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        file: str = FILE,
        when_sampling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__({name: value for name, value in (settings or {}).items() if value is not None})
        self.file = file
        self.when_sampling = when_sampling or {}

    @property
    def of_texts(self) -> dict[str, Any]:
        """The settings that change texts in transformers, without the tokens that begin and end them."""
        names = (*APPLIED, *APPLIED_WHEN_SAMPLING, *APPLIED_WITH_BEAMS, *LEFT_TO_THE_CALLER, *NOT_APPLIED)
        ends = ("eos_token_id", "bos_token_id", "decoder_start_token_id")
        return {name: self[name] for name in names if name in self and name not in ends}

    @property
    def under_constraint(self) -> GenerationDefaults:
        """The settings that hold under a constraint: they change scores, and take no token from it."""
        kept = {name: value for name, value in self.items() if name not in NOT_UNDER_A_CONSTRAINT}
        return GenerationDefaults(kept, self.file, self.when_sampling)

    @property
    def not_applied(self) -> str:
        """What the settings ask for in vain, in words; empty if there is nothing."""
        asked = {
            name: self[name] for name, (neutral, _) in NOT_APPLIED.items() if self.get(name) not in (None, *neutral)
        }
        listed = ", ".join(f"{name}={shown(value)} ({NOT_APPLIED[name].why})" for name, value in asked.items())
        return f"{self.file} asks for {listed}: not applied" if asked else ""

    def refused(self, name: str, allowed: str, *named: str) -> SpecbeamError:
        """The error for the value of a field, which names the file. Options in ``allowed`` are ``named``."""
        says = f"the model's {self.file}: {name}={shown(self[name])} is not allowed: give {allowed}"
        return SpecbeamError(says, option=(name, *named))


def is_number(value: Any, integer: bool = False) -> bool:
    """Whether a value is a number, or an integer, that arrays can hold."""
    return (is_integer if integer else is_real)(value) and bool(abs(value) < 2**63)


def defaults_of_config(config: Mapping[str, Any]) -> GenerationDefaults:
    """The settings in a config.json, which count where there is no generation_config.json, as in transformers.

    A setting of the whole model comes before the same one of its decoder.
    """
    parts = (config.get(name) for name in ("decoder", "generator", "text_config"))
    decoder = next((part for part in parts if part), None)
    both = GenerationDefaults(decoder if isinstance(decoder, dict) else None) | GenerationDefaults(config)
    settings = {name: both[name] for name in FIELDS if name in both}
    if config.get("force_bos_token_to_be_generated"):  # of BART's first configurations
        settings["forced_bos_token_id"] = both.get("bos_token_id")
    return GenerationDefaults(settings, "config.json")
