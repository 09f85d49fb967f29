"""Milliseconds of processor time per step as a sequence grows: no method may slow down by more than its attention does.

    python bench/long_text.py [--lengths 100 600 1200 4000] [--only NAME] [--json FILE]

Tiny random models are written to a temporary folder, so that nearly all time is the code around the passes. A figure is
the median of the 21 steps that end at this length of the sequence.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from figures import Figures, add_json_option
from machine import describe
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import specbeam
from specbeam.streaming import NewText, TextStream

STEPS_PER_FIGURE = 21
WORDS = "the little keeper of a lighthouse walked down to sea and saw that it was good said nothing about them"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 600, 1200, 4000])
    parser.add_argument("--only", default="", help="only the cases with this in their names")
    add_json_option(parser)
    given = parser.parse_args()
    print(describe())
    figures = Figures.of_this_run()
    lengths = sorted(given.lengths)
    with tempfile.TemporaryDirectory() as folder:
        lm = specbeam.load(write_model(Path(folder) / "target", vocab_size=600, context=lengths[-1] + 100))
        draft = specbeam.load(write_model(Path(folder) / "draft", vocab_size=400, context=2 * lengths[-1] + 200))
        beams = {"num_beams": 8, "length_penalty": 0.0}
        stops: dict[str, Any] = {"stop_strings": ["\n\n\n\n", "THE END"]}
        cases: dict[str, dict[str, Any]] = {
            "greedy": {},
            "8 beams": beams,
            "8 beams in 4 groups": {**beams, "num_beam_groups": 4, "diversity_penalty": 5.0},
            "8 beams in 4 groups, repetition penalty": {
                **beams, "num_beam_groups": 4, "diversity_penalty": 5.0, "repetition_penalty": 1.1,
            },
            "greedy, stop strings": stops,
            "8 beams, stop strings": {**beams, **stops},
            "ngram": {"draft": "ngram", "num_draft_tokens": 3},
            "8 beams, ngram": {**beams, "draft": "ngram", "num_draft_tokens": 3},
            "draft of another vocabulary": {"draft": draft, "num_draft_tokens": 3},
        }  # fmt: skip
        print("\n| milliseconds per step at | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |")
        print("| --- |" + " --- |" * len(lengths))
        for name, options in cases.items():
            if given.only in name:
                report(figures, name, lengths, steps(lm, lengths[-1], **options))
        if given.only in "stream of invalid bytes":
            report(figures, "stream of invalid bytes", lengths, pushes(lengths[-1]))
    figures.write(given.json)


def report(figures: Figures, name: str, lengths: list[int], timed: Iterator[tuple[int, float]]) -> None:
    """Print one row. ``timed``: the length of the sequence after each step, and the step's seconds."""
    taken = list(timed)
    row = []
    for length in lengths:
        samples = [1e3 * seconds for n, seconds in taken if n <= length][-STEPS_PER_FIGURE:]
        row.append(figures.add(name, f"{length} tokens", unit="ms", samples=samples).value)
    print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in row) + " |", flush=True)


def steps(lm: specbeam.LanguageModel, length: int, **options: Any) -> Iterator[tuple[int, float]]:
    draft = options.pop("draft", None)
    engine = specbeam.Engine(lm, max_cache_tokens=10**6)
    prompt = lm.tokenizer(WORDS).input_ids
    tokens = length
    request = engine.submit(prompt, {"max_new_tokens": tokens, "eos_token_id": [], **options}, draft=draft)
    engine.step()
    done = 0
    while not request.done:
        start = time.process_time()
        engine.step()
        done += 1
        yield done, time.process_time() - start


def pushes(length: int) -> Iterator[tuple[int, float]]:
    stream = TextStream(NewText(lambda ids: bytes(ids).decode(errors="replace")))
    for n in range(length):
        start = time.process_time()
        stream.push([255])
        yield n + 1, time.process_time() - start


def write_model(folder: Path, vocab_size: int, context: int) -> Path:
    """A tiny random model, with a byte-level tokenizer trained on a few words. Each of its tokens is text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = [c for c in pre_tokenizers.ByteLevel.alphabet() if c.isascii()]
    tokenizer.train_from_iterator(
        [WORDS], trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=context, initializer_range=0.4,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
