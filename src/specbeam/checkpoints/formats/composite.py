"""The text model in a folder whose model also reads images or audio, such as that of Gemma 3 with 4B parameters.

``text_config`` in its config.json describes a model of an architecture that other folders have alone. The names of its
tensors begin with the module that holds it, which transformers 4 and 5 name in several ways. All other tensors are
passed over: encoders of images and audio, projectors, and heads that predict several tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from specbeam.checkpoints.architecture import SIZES, Architecture
from specbeam.checkpoints.families import ARCHITECTURES

WRAPPER = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?=\w)")
"""Begins the names of the text model's tensors."""
HEAD, TIED = "lm_head.", "tie_word_embeddings"


class TextModel(NamedTuple):
    """The text model of a folder. Most folders hold nothing else.

    Attributes:
        config: what config.json says of it.
        names: for each of its tensors in a model of several parts, by the name that a model of text alone gives it, the
            name in the folder. Empty if the two are the same.
        passed_over: the tensors of other parts, by their names in the folder.
    """

    config: dict[str, Any]
    names: Mapping[str, str] = MappingProxyType({})
    passed_over: frozenset[str] = frozenset()

    @property
    def parts_passed_over(self) -> list[str]:
        """The modules of the tensors that are passed over, such as "vision_tower"."""
        return sorted(set(map(_module, self.passed_over)))

    def name(self, changed: str) -> str | None:
        """The name in a model of text alone of a tensor that an adapter changes; None for a tensor of another part."""
        if not self.names:
            return changed
        return None if _module(changed) in self.parts_passed_over else text_name(changed) or changed


def text_model(content: Mapping[str, Any], tensors: Collection[str]) -> TextModel:
    """The text model that a folder has alone or beside others.

    Args:
        content: the content of config.json.
        tensors: the names of the tensors.
    """
    config, text = dict(content), content.get("text_config")
    architecture = _architecture(text) if isinstance(text, dict) else None
    if architecture is not None and isinstance(text, dict) and not content.get("is_encoder_decoder"):
        has_head = any(HEAD in name for name in tensors)
        config = {**dict(zip(SIZES, architecture.sizes, strict=False)), **text, TIED: _tied(content, text, has_head)}
    if _architecture(config) is None:
        return TextModel(config)
    names = {text: name for name in tensors if (text := text_name(name)) is not None}
    if not any(map(WRAPPER.match, names.values())):
        return TextModel(config)
    return TextModel(config, names, frozenset(tensors) - frozenset(names.values()))


def text_name(name: str) -> str | None:
    """The name that a tensor of several parts has in a model of text alone; None for a tensor of another part."""
    if wrapper := WRAPPER.match(name):
        inner = name[wrapper.end() :]
        return inner if inner.startswith(HEAD) else f"model.{inner}"
    return name if name.startswith(HEAD) else None


def _architecture(part: Mapping[str, Any]) -> Architecture | None:
    return ARCHITECTURES.get(str(part.get("model_type")))


def _module(name: str) -> str:
    return name.removeprefix("model.").partition(".")[0]


def _tied(content: Mapping[str, Any], text: Mapping[str, Any], has_head: bool) -> Any:
    """Whether the head is the embedding. transformers 4 asks the text model, and version 5 the whole.

    Both store a head that is not tied.

    Args:
        content, text: the contents of config.json, and of its ``text_config``.
        has_head: whether the folder stores a head.
    """
    stated = [part[TIED] for part in (content, text) if part.get(TIED) is not None]
    return next((value for value in stated if value is not False), False) if stated else not has_head
