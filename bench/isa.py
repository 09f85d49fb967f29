"""Models whose kernels have a given instruction set."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import specbeam
from specbeam.backends.cpu import CpuBackend
from specbeam.backends.cpu.library import choose_isa
from specbeam.checkpoints import open_checkpoint

SETS = ("avx512", "avxvnni", "avx2", "portable")


def add_isa_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--isa", choices=SETS, default="", help="default: this machine's best")


def kernels(isa: str) -> str:
    """The instruction set in use, for the head of a table."""
    return f"kernels {choose_isa(isa)}"


def load(source: Path, isa: str, quantize: str = "auto", threads: int | None = None) -> specbeam.LanguageModel:
    """Load a model for the CPU with this instruction set, or with the machine's best if it is empty."""
    lm = specbeam.load(source, backend="cpu", quantize=quantize, threads=threads)
    return replace(lm, backend=CpuBackend(open_checkpoint(source), quantize, threads, isa)) if isa else lm
