"""StableLM. It is Llama with LayerNorm. Where attention and MLP run in parallel, they share one norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from specbeam.checkpoints.architecture import Architecture, Metadata
from specbeam.checkpoints.config import Config


class StableLM(Architecture):
    """StableLM 2 (Bellagente et al. 2024)."""

    name = "stablelm"
    gguf_name = "stablelm"
    features: ClassVar = {"norm": "layer"}

    def refine_folder_config(self, config: Config, given: Any) -> Config:
        parallel = bool(given.use_parallel_residual)
        return replace(config, parallel=parallel, mlp_norm=not parallel, qkv_bias=bool(given.use_qkv_bias))

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        return replace(config, parallel=not config.mlp_norm)


ARCHITECTURES = (StableLM(),)
