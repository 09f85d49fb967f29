"""Names that options take as values, and the names of options in other tools."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

BACKENDS = ("cpu", "torch", "transformers")
LOOKUPS = ("ngram", "suffix")
"""The drafts that are no model."""
TRANSCRIPT_FORMATS = ("txt", "srt", "vtt", "tsv", "json")
NO_DRAFT = "none"
"""The draft of a server's request that is to have none."""

OTHER_NAMES = {
    "max_new_tokens": (
        "max_tokens",
        "max_length",
        "max_completion_tokens",
        "max_gen_toks",
        "max_decoding_length",
        "n_predict",
        "num_predict",
    ),
    "max_output_tokens": ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "num_predict"),
    "max_tokens": ("max_new_tokens", "n_predict", "num_predict"),
    "min_tokens": ("min_new_tokens", "min_length"),
    "min_new_tokens": ("min_tokens", "min_length", "min_decoding_length"),
    "do_sample": ("sample", "sampling", "greedy", "use_sampling"),
    "temperature": ("temp", "sampling_temperature"),
    "top_k": ("sampling_topk", "topk"),
    "top_p": ("sampling_topp", "topp", "nucleus"),
    "typical_p": ("typical", "typ_p"),
    "repetition_penalty": ("repeat_penalty", "rep_pen"),
    "no_repeat_ngram_size": ("no_repeat_ngram", "block_ngram_repeat"),
    "frequency_penalty": ("frequence_penalty",),
    "presence_penalty": ("presence_penality",),
    "logit_bias": ("sequence_bias",),
    "bad_words_ids": ("bad_words", "suppress_tokens", "suppress_sequences"),
    "seed": ("random_seed", "rng_seed", "sampler_seed"),
    "num_beams": ("beam", "beams", "beam_size", "beam_width", "best_of", "use_beam_search"),
    "num_return_sequences": ("n", "num_return", "num_samples", "num_hypotheses"),
    "early_stopping": ("stop_early", "allow_early_exit"),
    "num_draft_tokens": (
        "num_assistant_tokens",
        "num_speculative_tokens",
        "prompt_lookup_num_tokens",
        "n_draft",
        "draft_max",
        "gamma",
    ),
    "eos_token_id": ("eos", "eos_id", "eos_token", "end_token", "stop_token_ids"),
    "stop": ("stopping_strings", "stop_strings", "stops", "stop_words", "stop_sequences"),
    "stop_strings": ("stop", "stops", "stop_words", "stop_sequences"),
    "top_logprobs": ("logprobs", "log_probs", "output_scores", "output_logits", "return_log_prob"),
    "logprobs": ("n_probs",),
    "constraint": ("constraints", "grammar", "choices", "guided_choice", "allowed_tokens", "force_words_ids"),
    "structured_outputs": ("guided_choice", "guided_decoding"),
    "logits_processor": ("logits_processors", "processors"),
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
