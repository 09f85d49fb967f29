"""Names that keys and modes had in earlier studies, and the names of today."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specbeam.errors import SpecbeamError
from specbeam.study.config import non_default_options

OLD_MODES = {"hybrid": "speculative-beam", "speculative_beam": "speculative-beam"}
"""Other names of modes. Folders and configurations of earlier studies have "hybrid"."""
OLD_KEYS = {
    "decode.k": "decode.num_draft_tokens",
    "decode.max_tokens": "decode.max_new_tokens",
    "draft.temperature": "decode.draft_temperature",
    "draft.top_k": "decode.draft_top_k",
}
"""Other names of keys, from before the keys of ``decode`` were named as in :class:`specbeam.Options`."""


def with_new_names(config: Mapping[str, Any], given_last: Set[str] = frozenset()) -> dict[str, Any]:
    """A configuration in which the old names of keys and modes are replaced by the new ones.

    Args:
        given_last: new keys that come after the whole configuration, so that an old name does not replace their values.

    Raises:
        SpecbeamError: a key is given by its old and by its new name.
    """
    new = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    for old, key in OLD_KEYS.items():
        (old_section, old_name), (section, name) = old.split("."), key.split(".")
        if isinstance(new.get(old_section), dict) and old_name in new[old_section]:
            value = new[old_section].pop(old_name)
            into = new.setdefault(section, {})
            if value is not None and isinstance(into, dict) and key not in given_last:
                _refuse_both(f"{old_section}.", old_name, value, name, non_default_options(into).get(name, value))
                into[name] = value
    if isinstance(decode := new.get("decode"), dict) and "mode" in decode:
        decode["mode"] = _new_mode(decode["mode"])
    renamed = [[part.split(".")[1] for part in pair] for pair in OLD_KEYS.items() if pair[0].startswith("decode.")]
    for method, changes in (new["methods"] if isinstance(new.get("methods"), dict) else {}).items():
        if isinstance(changes, Mapping):
            changed = dict(changes)
            for old_name, name in renamed:
                if old_name in changed:
                    value = changed.pop(old_name)
                    _refuse_both(f"methods.{method}.", old_name, value, name, changed.setdefault(name, value))
            if "mode" in changed:
                changed["mode"] = _new_mode(changed["mode"])
            new["methods"][method] = changed
    metrics = new.get("metrics")
    if not new.get("methods") and isinstance(metrics, dict) and "baseline" in metrics:
        metrics["baseline"] = _new_mode(metrics["baseline"])
    return new


def refuse_old_beside_new(given: Mapping[str, Any]) -> None:
    """Raise SpecbeamError if one place, such as the command line, gives a setting by both of its names.

    Args:
        given: values by dotted keys.
    """
    values = {key.lstrip("."): value for key, value in given.items()}
    for old, new in OLD_KEYS.items():
        if old in values and new in values:
            _refuse_both("", old, values[old], new, values[new])


def _refuse_both(path: str, old: str, value: Any, new: str, other: Any) -> None:
    if value != other:
        raise SpecbeamError(
            f"{path}{old}={value!r} and {new}={other!r} are the same setting: leave out {old}, its old name"
        )


def _new_mode(mode: Any) -> Any:
    if isinstance(mode, list):
        return [_new_mode(one) for one in mode]
    return OLD_MODES.get(mode, mode) if isinstance(mode, str) else mode


def with_new_key(word: str) -> str:
    """An override whose key is not an old name."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    return key.removesuffix(name) + OLD_KEYS.get(name, name) + equals + value
