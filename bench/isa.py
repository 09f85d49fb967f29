"""Models whose kernels have a given instruction set."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import specbeam
from specbeam.backends.cpu import CpuBackend
from specbeam.backends.cpu.library import SUFFIX, choose_isa, find
from specbeam.checkpoints import open_checkpoint

SETS = ("avx512", "avxvnni", "avx2", "portable")


CTRANSLATE2 = {  # for its own kernels, and for oneDNN or on Intel's processors MKL, which multiply int8
    "avx512": ("AVX512", "AVX512_CORE_VNNI", "AVX512_E1"),
    "avxvnni": ("AVX2", "AVX2_VNNI", "AVX2_E1"),
    "avx2": ("AVX2", "AVX2", "AVX2"),
    "portable": ("GENERIC", "SSE41", "SSE4_2"),
}


def add_isa_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--isa", choices=SETS, default="", help="default: this machine's best")


def kernels(isa: str) -> str:
    """The instruction set in use, for the head of a table."""
    return f"kernels {choose_isa(isa)}"


def for_ctranslate2(isa: str) -> dict[str, str]:
    """The variables of a process in which CTranslate2 has this instruction set; empty for the machine's best."""
    names = "CT2_FORCE_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"
    return dict(zip(names, CTRANSLATE2.get(isa, ()), strict=False))


def for_specbeam(isa: str, folder: Path) -> dict[str, str]:
    """The variables of a process in which specbeam has this instruction set, whatever it chooses; empty for the best.

    Args:
        folder: is filled with one library under the names of all.

    Raises:
        SystemExit: the instruction set was not built.
    """
    if not isa:
        return {}
    if (library := find(isa)) is None:
        raise SystemExit(f"--isa {isa}: its kernels were not built")
    for name in SETS:
        (folder / f"libspecbeam_cpu_{name}{SUFFIX}").symlink_to(library)
    return {"SPECBEAM_CPU_LIBRARY": str(folder)}


def load(source: Path, isa: str, quantize: str = "auto", threads: int | None = None) -> specbeam.LanguageModel:
    """Load a model for the CPU with this instruction set, or with the machine's best if it is empty."""
    lm = specbeam.load(source, backend="cpu", quantize=quantize, threads=threads)
    return replace(lm, backend=CpuBackend(open_checkpoint(source), quantize, threads, isa)) if isa else lm
