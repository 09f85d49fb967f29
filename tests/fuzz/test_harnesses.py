"""The fuzzer's harnesses run: each accepts its first seeds, and takes changed ones without a traceback."""

import importlib
from contextlib import suppress

import pytest

from specbeam import SpecbeamError
from tests.conftest import examples
from tests.fuzz import HARNESSES


@pytest.mark.parametrize("name", HARNESSES)
def test_changed_seeds_load_or_are_refused(name):
    if name in ("gguf_file", "folder_config", "ctranslate2_file"):  # transformers writes their seeds
        pytest.importorskip("transformers")
    harness = importlib.import_module(f"tests.fuzz.{name}")
    first, *_ = seeds = harness.seeds()
    harness.run(first)
    mutate = getattr(harness, "mutate", flipped)
    for seed in range(examples(0.5)):
        changed = mutate(seeds[seed % len(seeds)], 1 << 17, seed)
        with suppress(SpecbeamError):
            harness.run(flipped(first, 0, seed) if changed is None else changed)


def flipped(data, longest, seed):
    """The input with one changed byte."""
    at = seed * 7919 % len(data)
    return data[:at] + bytes([data[at] ^ (1 << seed % 8)]) + data[at + 1 :]
