"""What transformers' own loader of GGUF files carries over, so that it never runs another model than the file's.

It takes few keys, and drops the others and unknown tensors in silence: rotary scaling, softcaps, scales of Granite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from math import isclose
from typing import Any

from specbeam.checkpoints.architecture import Metadata
from specbeam.checkpoints.config import Config
from specbeam.checkpoints.families import GGUF_ARCHITECTURES
from specbeam.checkpoints.formats.folder_config import config_from_hugging_face
from specbeam.checkpoints.formats.gguf_config import DIVISORS, NO_EFFECT, check_model_file
from specbeam.errors import SpecbeamError

OWN_NAMES = {"gpt-oss": "gpt_oss", "minimax-m2": "minimax_m2", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe"}
"""transformers' names of architectures, where GGUF files have other names."""
IN_SHAPES = frozenset(("expert_feed_forward_length", "expert_shared_feed_forward_length", "attention.value_length"))
"""Keys that the shapes of tensors repeat. transformers refuses tensors of other shapes."""
WAY_OUT = "Give the folder from which the file was made"


def check_transformers(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[int, ...]],
    config: Any,
    own: Callable[[], Config],
) -> None:
    """Refuse a GGUF file that transformers' loader would run as another model.

    Args:
        metadata: all keys of the file.
        tensors: the shape of each tensor, by name.
        config: the configuration that the loader makes of the file.
        own: gives the configuration that specbeam makes of it, for an architecture that specbeam has.

    Raises:
        SpecbeamError: names what the loader drops or changes.
    """
    check_model_file(metadata, tensors)
    name = str(metadata.get("general.architecture"))
    if name in GGUF_ARCHITECTURES:
        ours, theirs = own(), config_from_hugging_face(config.to_dict(), tensors)
        for field in fields(Config):
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            if field.name != "architecture" and not _equal(a, b):
                raise SpecbeamError(
                    f"transformers' loader of GGUF files takes another {field.name} than the file says: use the cpu or "
                    "the torch backend"
                )
        return
    lost = sorted([*(tensor for tensor in DIVISORS if tensor in tensors), *_lost_keys(Metadata(name, metadata))])
    if lost:
        raise SpecbeamError(
            f"architecture {name!r} is not supported natively, and transformers' loader of GGUF files drops what this "
            f"file says in {', '.join(lost[:5])}{', ...' if len(lost) > 5 else ''}. {WAY_OUT}"
        )


def _equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, float) and isinstance(theirs, float):
        return isclose(ours, theirs, rel_tol=1e-6)
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(_equal, ours, theirs))
    if hasattr(ours, "__dataclass_fields__") and type(ours) is type(theirs):
        return all(_equal(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(ours))
    return bool(ours == theirs)


def _lost_keys(metadata: Metadata) -> list[str]:
    """The keys of an architecture unknown to specbeam that have an effect, and that the loader ignores."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    taken = GGUF_CONFIG_MAPPING.get(OWN_NAMES.get(metadata.architecture, metadata.architecture))
    heads, hidden = metadata.get("attention.head_count"), metadata.get("embedding_length")
    head_dims = [metadata.get("attention.key_length")]
    if isinstance(heads, int) and isinstance(hidden, int) and heads:
        head_dims.append(hidden // heads)
    kind, factor = metadata.get("rope.scaling.type", "linear"), metadata.get("rope.scaling.factor", 0)
    is_scaled = kind in ("yarn", "longrope") or (
        kind != "none" and (factor or metadata.get("rope.scale_linear", 0)) > 1
    )
    lost = []
    for key, value in metadata.items():
        if key.startswith("rope.scal"):
            neutral = metadata.architecture == "gpt-oss" or not (is_scaled or key.endswith("attn_factor"))
        elif taken is None:  # the loader has code of its own for this architecture
            neutral = True
        elif key in ("attention.key_length", "rope.dimension_count"):
            neutral = value in head_dims or taken.get(key) is not None
        else:
            neutral = taken.get(key) is not None or key in NO_EFFECT | IN_SHAPES or value in (0, "", None)
        if not neutral and (key, value) != ("attention.causal", True):
            lost.append(metadata.name(key))
    return lost
