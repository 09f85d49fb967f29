"""Draft heads: small models that read hidden states of their target, and propose its next tokens.

A multi-token prediction head (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 2.2) lies in the checkpoint of
its target. Its layer is like the target's last one. :mod:`specbeam.checkpoints.families.eagle3` has the other kind,
whose folders hold nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from specbeam.checkpoints.config import Config
from specbeam.checkpoints.parts.attention import Attention
from specbeam.checkpoints.stems import FeatureStem, TokenStem
from specbeam.errors import SpecbeamError

IN_FOLDER = "mtp."
"""Begins the names of a head's tensors in a folder."""
FOLDER_MODULES = {
    "fc": "mtp.fc",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "feature_norm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
}
"""A head's modules outside of its layer, by our names: their names in a folder."""

GGUF_MODULES = {"fc": "eh_proj", "embedding_norm": "enorm", "feature_norm": "hnorm", "norm": "shared_head_norm"}
"""The same in the head's block of a GGUF file."""


def mtp_config(target: Config) -> Config:
    """The configuration of the multi-token prediction head of a model.

    Its layer has the parts of the target's last layer whose attention sees all tokens. Embedding and head are the
    target's.

    Raises:
        SpecbeamError: the target has no such layer, or its embeddings depend on positions or layers.
    """
    stem, layers = target.stem, reversed(target.layers)
    layer = next((layer for layer in layers if any(isinstance(p, Attention) and not p.window for p in layer)), None)
    if layer is None or not isinstance(stem, TokenStem) or stem.learned_positions or target.per_layer_size is not None:
        raise SpecbeamError(f"multi-token prediction is not supported for {target.architecture}")
    states = FeatureStem(
        layers=(target.num_layers + 1,), feature_size=target.hidden_size, joins_embedding=True, scale=stem.scale
    )
    return replace(target, layers=(layer,), stem=states, tied_head=True)


def folder_modules(target: Mapping[str, str]) -> dict[str, str]:
    """The names of a head's modules in a folder, by our names.

    Args:
        target: the same of its target (:attr:`specbeam.checkpoints.architecture.Architecture.folder_tensors`).
    """
    of_layer = {own: name for own, name in target.items() if own.startswith("blocks.")}
    return {own: name.replace("model.layers.N", "mtp.layers.N") for own, name in of_layer.items()} | FOLDER_MODULES


def gguf_modules(target: Mapping[str, str], block: int) -> dict[str, str]:
    """The names of a head's modules in a GGUF file, by our names.

    Args:
        target: the same of its target (:attr:`specbeam.checkpoints.architecture.Architecture.gguf_tensors`).
        block: the number of its block, which follows the layers of the target.
    """
    of_layer = {own: name for own, name in target.items() if own.startswith("blocks.")}
    own = {name: f"blk.{block}.nextn.{theirs}" for name, theirs in GGUF_MODULES.items()}
    return {name: theirs.replace("blk.N", f"blk.{block}") for name, theirs in of_layer.items()} | own


def check_head(tensors: Collection[str], block: int = 0) -> None:
    """Refuse a head of several layers, of which each predicts another token, and one with embeddings of its own.

    Args:
        tensors: of a folder's head, or of a GGUF file.
        block: the number of the head's block in a GGUF file.
    """
    if any(name.startswith((f"{IN_FOLDER}layers.1.", f"blk.{block + 1}.nextn.")) for name in tensors):
        raise SpecbeamError("a head for multi-token prediction of several layers is not supported")
    nextn = f"blk.{block}.nextn."
    own = {"mtp.embed_tokens.weight", f"{nextn}embed_tokens.weight", f"{nextn}shared_head_head.weight"} & {*tensors}
    if own:
        raise SpecbeamError(f"a head for multi-token prediction with its own {', '.join(sorted(own))} is not supported")
