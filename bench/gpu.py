"""Speed on one CUDA device, against transformers and the speed of its memory. Weights are random, in the true shapes.

    python bench/gpu.py [--repeats 5] [--json FILE]

"Must reach" is about an H200. A figure is the median of the repeats after a warm-up. Rates are of whole requests with a
prompt of 128 tokens, prefill included. transformers makes fewer tokens, since its rate hardly depends on their number.
The speed of memory is measured by reading 4 GiB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from figures import Figures, add_json_option
from machine import describe
from table import Table
from transformers import AutoConfig, AutoModelForCausalLM

import specbeam
from specbeam import Engine, LanguageModel
from specbeam.backends.torch.gpu import GpuBackend
from specbeam.cache.slots import Slots
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts.attention import Attention
from specbeam.checkpoints.parts.mlp import MLP
from specbeam.checkpoints.rope import Rope
from specbeam.core.tree import Tree
from specbeam.options.generation_defaults import GenerationDefaults

PROMPT = np.random.default_rng(0).integers(1, 1000, 128).tolist()
SMALL = "Qwen3-0.6B"
SHAPES: dict[str, dict[str, Any]] = {
    SMALL: {
        **{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        **{"tie_word_embeddings": True, "max_position_embeddings": 40960},
    },
    "Llama-2-7B": {
        **{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128},
        **{"tie_word_embeddings": False, "max_position_embeddings": 4096},
    },
}
"""The configurations of two models, as transformers has them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    add_json_option(parser)
    given = parser.parse_args()
    peer = f"transformers {transformers.__version__}"
    print(describe(peer))
    transformers.utils.logging.set_verbosity_error()
    figures = Figures.of_this_run(peer)

    bytes_per_second = repeated(given.repeats, read_speed)
    table = Table(figures, "device")
    table.head()
    table.row("reading memory", unit="TB/s", samples=[one / 1e12 for one in bytes_per_second])
    for name in SHAPES:
        measure(name, Table(figures, name), given.repeats, statistics.median(bytes_per_second))
    figures.write(given.json)


def repeated(repeats: int, measure: Callable[..., float], *args: Any, **keywords: Any) -> list[float]:
    measure(*args, **keywords)
    return [measure(*args, **keywords) for _ in range(repeats)]


def measure(name: str, table: Table, repeats: int, bytes_per_second: float) -> None:
    """All rows of one shape."""
    shape, is_small, tokens = SHAPES[name], name == SMALL, "tokens/s"
    theirs = random_transformer(shape)
    peers = {n: repeated(repeats, rate_of_transformers, theirs, n) for n in ((1, 4) if is_small else (1, 4, 64))}
    del theirs
    torch.cuda.empty_cache()
    lm, read = random_model(shape)
    limit = bytes_per_second / read
    for beams, samples in peers.items():
        what = "greedy" if beams == 1 else f"{beams} beams"
        ours = repeated(repeats, rate, lm, 192) if beams == 1 else repeated(repeats, rate, lm, 64, num_beams=beams)
        table.row(what, unit=tokens, samples=ours, at_least=1200 if is_small and beams == 1 else None)
        if beams == 1:
            share = [one / limit for one in ours]
            table.row(what, "of the limit of memory", unit="", samples=share, at_least=None if is_small else 0.75)
        table.row(what, "transformers", unit=tokens, samples=samples)
        ratios = [one / statistics.median(samples) for one in ours]
        table.row(what, "to transformers", unit="times", samples=ratios, at_least={1: 8, 4: 5, 64: 8}[beams])
    table.row("sampled", unit=tokens, samples=repeated(repeats, rate, lm, 192, do_sample=True, seed=1))
    one, many = (repeated(repeats, pass_seconds, lm, nodes) for nodes in (1, 64))
    table.row("pass of 1 node", unit="ms", samples=[1e3 * seconds for seconds in one])
    ratios = [seconds / statistics.median(one) for seconds in many]
    table.row("pass of 64 nodes to one of 1", unit="times", samples=ratios, at_most=1.15)
    prefill = repeated(repeats, rate, lm, 1, (PROMPT * 16)[:2047])
    table.row("prefill of 2,047 tokens", unit=tokens, samples=[2047 * one for one in prefill])
    if is_small:
        together, alone = repeated(repeats, mixed, lm, True), mixed(lm, False)
        ratios = [alone / seconds for seconds in together]
        table.row("64 mixed requests at once", unit="times", samples=ratios, at_least=15)


def read_speed() -> float:
    """Bytes per second of a sum over 4 GiB."""
    numbers = torch.ones(1 << 29, dtype=torch.int64, device="cuda")
    return numbers.nbytes / seconds_of(lambda: numbers.sum())


def seconds_of(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def random_transformer(shape: dict[str, Any]) -> Any:
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.bfloat16).eval()


def rate_of_transformers(model: Any, beams: int, tokens: int = 16) -> float:
    ids = torch.tensor([PROMPT], device="cuda")
    how = {"do_sample": False, "num_beams": beams, "max_new_tokens": tokens, "min_new_tokens": tokens}
    return tokens / seconds_of(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **how))


def random_model(shape: dict[str, Any]) -> tuple[LanguageModel, int]:
    """A model whose weights are drawn on the device, and the bytes of weights that a pass reads."""
    heads, head_dim, is_qwen = shape["num_attention_heads"], shape["head_dim"], shape["model_type"] == "qwen3"
    attention = Attention(
        **{"num_heads": heads, "num_kv_heads": shape["num_key_value_heads"], "head_dim": head_dim},
        **{"scale": head_dim**-0.5, "rope": Rope(10000.0, head_dim), "qk_norm": is_qwen},
    )
    layer = attention, MLP(intermediate_size=shape["intermediate_size"])
    sizes = {name: shape[name] for name in ("vocab_size", "hidden_size")}
    sizes |= {"context_length": shape["max_position_embeddings"], "tied_head": shape["tie_word_embeddings"]}
    config = Config(shape["model_type"], layers=(layer,) * shape["num_hidden_layers"], norm_eps=1e-6, **sizes)

    def draw(model: Any, checkpoint: Any, device: str, dtype: torch.dtype) -> None:
        model.to(dtype).to_empty(device=device)
        model.frequencies = {rope: frequencies.to(device) for rope, frequencies in model.frequencies.items()}
        generator = torch.Generator(device).manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.fill_(1.0)
            else:
                parameter.data.normal_(0, parameter.shape[1] ** -0.5, generator=generator)

    with mock.patch("specbeam.backends.torch.load_weights", draw):
        backend = GpuBackend(SimpleNamespace(config=config, dtype="bfloat16"), "cuda", "bfloat16")  # type: ignore[arg-type]
    parameters = dict(backend.model.named_parameters())
    if not config.tied_head:
        del parameters["embedding.weight"]
    lm = LanguageModel("random weights", backend, None, frozenset([0]), GenerationDefaults())
    return lm, sum(parameter.nbytes for parameter in parameters.values())


def rate(lm: LanguageModel, tokens: int, prompt: list[int] = PROMPT, **options: Any) -> float:
    how = {"max_new_tokens": tokens, "eos_token_id": [], "share_prefix": False, **options}
    return tokens / seconds_of(lambda: specbeam.generate(lm, prompt, **how))


def pass_seconds(lm: LanguageModel, nodes: int, passes: int = 10) -> float:
    """Seconds of a pass over the children of a prompt's last token, logits included."""
    tree = Tree(PROMPT * 4)
    slots = Slots(tree, lm.backend)
    lm.backend.forward([slots.tree_batch(slots.missing([tree.tip]), np.array([0]))])
    children = np.array(tree.add([tree.tip] * nodes, [*range(1, nodes + 1)]))
    segment = slots.tree_batch(children, np.arange(nodes))
    lm.backend.forward([segment])
    seconds = seconds_of(lambda: [lm.backend.forward([segment]) for _ in range(passes)])
    return seconds / passes


def mixed(lm: LanguageModel, at_once: bool) -> float:
    """Seconds of 64 requests of 64 tokens: greedy, 4 beams, and greedy with lookups; a sixteenth of them if alone."""
    kinds: list[tuple[dict[str, Any], str | None]] = [({}, None), ({"num_beams": 4}, None), ({}, None), ({}, "ngram")]
    shared = {"max_new_tokens": 64, "eos_token_id": []}
    requests = [(PROMPT[: 40 + i], shared | kinds[i % 4][0], kinds[i % 4][1]) for i in range(64)]

    def run(some: list[Any]) -> None:
        engine = Engine(lm)
        submitted = [engine.submit(prompt, how, draft=draft) for prompt, how, draft in some]
        engine.run()
        for request in submitted:
            request.result()

    if at_once:
        return seconds_of(lambda: run(requests))
    return 16 * sum(seconds_of(partial(run, [one])) for one in requests[:4])


if __name__ == "__main__":
    main()
