"""Words of the study that this project began with, read as our names for the same settings.

A configuration of that study runs as it stands. Each file of a user, and each override of the command line, is read in
our words before Hydra merges them. So the last one given holds, in whichever words it was given, and all that is shown
and kept has our names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from specbeam.errors import SpecbeamError

OPTIONS = {"k": "num_draft_tokens", "max_tokens": "max_new_tokens"}
"""Our names of options by the study's words."""
MODES = {"hybrid": "speculative-beam"}
"""Our names of modes by the study's words."""
REFERENCE = re.compile(rf"(?<=\$\{{decode\.)({'|'.join(OPTIONS)})(?=\}})")
"""A word in an interpolation, such as ``${decode.k}``."""

Path = tuple[Any, ...]
"""The keys that lead to a part of a configuration."""


def in_our_words(value: Any, path: Path = ()) -> Any:
    """The part of a configuration at a path, in our words."""
    match value:
        case Mapping():
            ours: dict[Any, Any] = {}
            for key, part in value.items():
                *_, name = inner = path_in_our_words((*path, key))
                new = in_our_words(part, inner)
                if ours.setdefault(name, new) != new:
                    word = next(word for word in value if OPTIONS.get(word) == name)
                    refuse_both(path, word, value[word], value[name])
            return ours
        case list():
            return [in_our_words(part, path) for part in value]
        case QuotedString():
            return replace(value, text=in_our_words(value.text, path))
        case str() if path[-1:] == ("mode",) and _has_options(path[:-1]):
            return MODES.get(value, value)
        case str():
            return REFERENCE.sub(lambda word: OPTIONS[word[0]], value)
    return value


def path_in_our_words(path: Path) -> Path:
    """A path whose last key is our name."""
    *above, key = path
    return (*above, OPTIONS.get(key, key)) if _has_options(above) else path


def overrides_in_our_words(overrides: Sequence[Override]) -> list[Override]:
    """Overrides of a command line, in our words."""
    ours = [_override_in_our_words(override) for override in overrides]
    values = {override.key_or_group: override.value() for override in overrides if not override.is_delete()}
    for word, name in (
        (before.key_or_group, after.key_or_group) for before, after in zip(overrides, ours, strict=True)
    ):
        if word in values and values.get(name, values[word]) != values[word]:
            *above, key = word.split(".")
            refuse_both(above, key, values[word], values[name])
    return ours


def _override_in_our_words(override: Override) -> Override:
    path = path_in_our_words(tuple(override.key_or_group.split(".")))
    value = override._value
    if isinstance(value, ChoiceSweep):
        new: Any = replace(value, list=in_our_words(value.list, path))
    else:
        new = in_our_words(value, path)
    ours = replace(override, key_or_group=".".join(path), _value=new)
    if ours == override:
        return override
    line = ours.get_key_element()
    if ours.value_type is not None:  # Hydra writes no list of values to sweep over
        line += f"={ours.get_value_string() if ours.is_sweep_override() else ours.get_value_element_as_str()}"
    return replace(ours, input_line=line)


def refuse_both(above: Sequence[str], word: str, value: Any, other: Any) -> None:
    """Raise SpecbeamError for a word beside our name, with another value."""
    place = ".".join([*above, ""])
    raise SpecbeamError(
        f"{place}{word}={value!r} and {place}{OPTIONS[word]}={other!r} are the same setting: leave one out"
    )


def _has_options(path: Sequence[Any]) -> bool:
    """Whether options of decoding are at a path."""
    return [*path] == ["decode"] or (len(path) == 2 and path[0] == "methods")


class UserFiles(FileConfigSource):  # type: ignore[misc]
    """A user's folder, whose files Hydra gets in our words."""

    @staticmethod
    def scheme() -> str:
        return "study"

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        group, _, _ = config_path.rpartition("/")
        package = (result.header["package"] or "_group_").replace("_group_", group.replace("/", "."))
        path = tuple(key for key in package.split(".") if key not in ("", "_global_"))
        result.config = OmegaConf.create(in_our_words(OmegaConf.to_container(result.config), path))
        return result
