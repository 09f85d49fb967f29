"""Names that options take as values, and the names of options in other tools."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from specbeam.options.declared import OPTIONS

BACKENDS = ("cpu", "torch", "transformers")
LOOKUPS = ("ngram", "suffix")
"""The drafts that are no model."""
MTP = "mtp"
"""The draft that is a part of the model: its head for multi-token prediction."""
TRANSCRIPT_FORMATS = ("txt", "srt", "vtt", "tsv", "json")
NO_DRAFT = "none"
"""The draft of a server's request that is to have none."""

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **{name: option.others for name, option in OPTIONS.items()},
    **{
        option.http: (name, *(other for other in option.others if other != option.http))
        for name, option in OPTIONS.items()
        if isinstance(option.http, str)
    },
    "max_output_tokens": ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "num_predict"),
    "logprobs": ("n_probs",),
    "structured_outputs": ("guided_choice", "guided_decoding"),
    "draft": ("draft_model", "assistant_model", "speculative_model"),
    "strategy": ("method", "decoding_method", "decoding_strategy", "custom_generate"),
    "system": ("system_prompt", "system_message"),
    "device": ("device_map",),
    "dtype": ("torch_dtype", "precision"),
    "quantize": ("quantization", "quantization_config", "load_in_8bit", "load_in_4bit", "compute_type"),
    "threads": ("n_threads", "num_threads", "cpu_threads", "intra_threads"),
    "format": ("output_format",),
    "adapter": ("lora", "lora_path", "lora_request"),
}
"""By our name, the names in transformers, vLLM, llama.cpp, CTranslate2, and OpenAI's interface, and likely slips."""


def nearest_name(name: str, names: Sequence[str]) -> str | None:
    """The one of the names that was most likely meant: first what other tools call so, then the nearest spelling."""
    plain = name.lower().replace("-", "_")
    for ours, theirs in OTHER_NAMES.items():
        if ours in names and plain in (ours, *theirs):
            return ours
    return next(iter(difflib.get_close_matches(plain, names, n=1, cutoff=0.65)), None)
