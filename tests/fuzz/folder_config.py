"""config.json and generation_config.json of a folder: a JSON object with both."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import specbeam
from tests.conftest import ALPHA, LLAMA3_ROPE, LONGROPE, byte_tokenizer, random_model
from tests.fuzz.json_mutator import mutate_json as mutate
from tests.fuzz.toys import SIZES, load_and_generate, room

__all__ = ["mutate", "run", "seeds"]
MODELS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "stablelm", "smollm3", "lfm2", "olmo2")),
    *(
        (name, {})
        for name in ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "gpt_oss", "lfm2_moe", "glm4_moe", "qwen3_5")
    ),
    *((name, {}) for name in ("falcon_h1", "nemotron_h")),
    ("granitemoehybrid", {"mamba_n_heads": 2}),
    *((name, {"sliding_window": 5}) for name in ("mistral", "ministral3", "gemma2", "gemma3", "olmo3")),
    ("gemma4", {"sliding_window": 5, "num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2}),
    ("gemma4_unified", {"sliding_window": 5, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("hunyuan_v1_dense", {"rope_parameters": ALPHA}),
    *((name, {}) for name in ("granite", "granitemoe", "granitemoeshared", "glm", "glm4", "ernie4_5", "seed_oss")),
    *((name, {"sliding_window": 5}) for name in ("exaone4", "starcoder2", "cohere2")),
    ("phi3", {"rope_parameters": LONGROPE | {"short_factor": [1.0, 2.0], "long_factor": [2.0, 4.0]}}),
]
GENERATION = {
    **{"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "typical_p": 0.9, "repetition_penalty": 1.1},
    **{"eos_token_id": [257], "forced_eos_token_id": 257, "suppress_tokens": [5], "begin_suppress_tokens": [4]},
    **{"bad_words_ids": [[4, 5]], "sequence_bias": [[[4], 1.0]], "no_repeat_ngram_size": 3, "min_length": 3},
    **{"exponential_decay_length_penalty": [2, 1.5], "guidance_scale": 1.0, "min_new_tokens": 2, "length_penalty": 2.0},
    **{"encoder_repetition_penalty": 1.2, "encoder_no_repeat_ngram_size": 2, "renormalize_logits": True},
    **{"early_stopping": True, "top_h": 0.4, "stop_strings": ["x"], "max_time": 9.0},
}
OTHERS = ["falcon", "bloom", "opt", "mamba", "phimoe", "t5", "bert", "deepseek_v3", "llava", "bart"]
"""Architectures of transformers without one here."""


@cache
def folders() -> dict[str, Path]:
    """A folder with weights and tokenizer for each model type."""
    made: dict[str, Path] = {}
    for architecture, changes in MODELS:
        model = random_model(architecture, **(SIZES | changes))
        folder = room() / f"config-{architecture}"
        if not folder.exists():
            model.save_pretrained(folder)
            byte_tokenizer().save_pretrained(folder)
            made[model.config.model_type] = folder
    return made


def seeds() -> list[bytes]:
    made = []
    for architecture, changes in MODELS:
        config = random_model(architecture, **(SIZES | changes)).config
        made.append({"config": json.loads(config.to_json_string(use_diff=False)), "generation": GENERATION})
        made.append({"config": config.to_diff_dict(), "generation": {}})
    made.append({"config": made[0]["config"] | GENERATION})
    for other in OTHERS:
        made.append({"config": made[0]["config"] | {"model_type": other}, "generation": {}})
    return [json.dumps(document).encode() for document in made]


def run(data: bytes) -> None:
    try:
        document = json.loads(data)
        kind = document["config"].get("model_type")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        document, kind = None, None
    source = folders().get(kind if isinstance(kind, str) else "", folders()["llama"])
    folder = room() / "config"
    if not folder.exists() or (folder / "from").read_text() != str(source):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        (folder / "from").write_text(str(source))
    if document is None:
        (folder / "config.json").write_bytes(data)
    else:
        (folder / "config.json").write_text(json.dumps(document["config"]))
        settings = folder / "generation_config.json"
        settings.unlink(missing_ok=True)
        if "generation" in document:  # else the settings are in config.json
            settings.write_text(json.dumps(document["generation"]))
    lm = load_and_generate(folder, **({"backend": "torch"} if len(data) % 2 else {}))
    specbeam.generate(lm, [1, 2], max_new_tokens=2, do_sample=True, seed=1, num_beams=2)
