"""Hydra composes the configuration of a study.

It puts together the packaged ``conf/``, the ``config.yaml`` and groups of the user's folder, and ``key=value`` from
the command line.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from specbeam.errors import SpecbeamError, located
from specbeam.plugins import entry_point_names, is_name
from specbeam.text.escapes import unescaped

ABOVE_STUDY = "study_and_config"
"""The name under which Hydra knows the user's ``config.yaml``."""
GROUPS = ("data", "tracking", "launcher", "ablation")
"""The groups of the packaged configuration. A group is a folder of files to choose from."""
INSTEAD_OF_HYDRAS = {
    "hydra.run": "give output=FOLDER",
    "hydra.sweep": "give --multirun and output=FOLDER",
    "hydra.mode": "give --multirun",
    "hydra.sweeper": "give --multirun and KEY=A,B",
    "hydra.launcher": "give launcher=ray",
    "hydra.job.name": "give project_name=NAME",
    "hydra.searchpath": "give --config-dir DIR",
}
"""The study's own words for Hydra's keys. Hydra composes the configuration here, but does not run the study."""
TEXT_KEYS = ("template", "system_prompt", "stop_strings")
"""Settings in whose typed texts escapes are read (:mod:`specbeam.text.escapes`). Texts of files stay as they are."""
Keys = tuple[Any, ...]
"""The keys, and the places in lists, that lead to a value of the configuration."""
SET_BY_HYDRA = ("hydra.overrides", "hydra.runtime", "hydra.searchpath", "hydra.job.config_name", "hydra.job.override")
"""The keys of Hydra's own that differ from run to run by themselves."""
PATHS = ("output", "target_model", "draft_model", "source", "perplexity")
"""The keys, at any depth, whose texts may be paths."""
HOME = re.compile(r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|(?<=[=,:\[{(\s])~(?:\\.|[^,\[\]{}()'"\\])*""")
"""What stands in quotes, as a group, or a word that begins with "~". Hydra's grammar has no such word."""


def compose(overrides: Sequence[str], folder: Path | None = None) -> dict[str, Any]:
    """The configuration as plain data.

    Args:
        overrides: ``key=value`` in Hydra's grammar.
        folder: the user's, with a ``config.yaml`` and groups (data/NAME.yaml, ablation/NAME.yaml, ...).
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.errors import MissingConfigException
    from omegaconf import OmegaConf, open_dict

    from specbeam.study.aliases import MODES, UserFiles, in_our_words

    parsed = _parsed(overrides)
    for override in parsed:
        _refuse_hydras(override.key_or_group.replace("/", "."), override.key_or_group)
    words = [_custom_tracker(override, folder) or _may_add(str(override.input_line)) for override in parsed]
    search, primary = [], "study"
    if folder is not None:
        if not folder.is_dir():
            raise SpecbeamError(f"--config-dir {folder} is not a folder")
        quoted = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
        search = [f"hydra.searchpath=['{UserFiles.scheme()}://{quoted}']"]
        Plugins.instance().register(UserFiles)
    GlobalHydra.instance().clear()
    try:
        if folder is not None and (folder / "config.yaml").exists():
            primary = ABOVE_STUDY
            user_config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
            ConfigStore.instance().store(primary, _above_study(in_our_words(user_config)))
        with initialize_config_dir(str(Path(__file__).parent / "conf"), version_base="1.3"):
            # ``check`` refuses unknown names and suggests the nearest one. Hydra's own message would be less clear.
            composed = hydra_compose(primary, [*words, *search], return_hydra_config=True)
            with open_dict(composed):
                hydras = composed.pop("hydra")
            if folder is not None:
                usual = leaves("hydra", OmegaConf.to_container(hydra_compose("study", return_hydra_config=True).hydra))
                for key, value in leaves("hydra", OmegaConf.to_container(hydras)).items():
                    if not key.startswith(SET_BY_HYDRA) and (key not in usual or usual[key] != value):
                        _refuse_hydras(key, key)
            plain = cast(dict[str, Any], OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))
    except SpecbeamError:
        raise
    except MissingConfigException as error:
        raise SpecbeamError(_missing(error)) from error
    except UnicodeDecodeError as error:
        raise SpecbeamError(f"a configuration file is not UTF-8 text (byte {error.start:,}): convert it") from error
    except Exception as error:  # Hydra raises ValueError, AssertionError and others for wrong words and files, too
        raise SpecbeamError(f"the configuration cannot be composed: {_one_line(error)}") from error
    for path in {path for override in parsed if not override.is_delete() for path in _typed_texts(override)}:
        _read_escapes(plain, path)
    metrics = plain.get("metrics")
    if isinstance(metrics, dict) and metrics.get("baseline") in [*MODES] and not plain.get("methods"):
        metrics["baseline"] = MODES[metrics["baseline"]]  # methods are named by their modes
    return cast(dict[str, Any], _with_homes(plain))


def _with_homes(value: Any, key: Any = "") -> Any:
    """The part of a configuration below a key, with the home directory in place of "~" where paths begin.

    Shells leave "~" alone in quotes and after "=", and so does YAML.
    """
    match value:
        case Mapping():
            return {name: _with_homes(part, name) for name, part in value.items()}
        case list():
            return [_with_homes(part, key) for part in value]
        case str() if key in PATHS:
            return os.path.expanduser(value)
    return value


def as_yaml(config: Mapping[str, Any], **form: Any) -> str:
    """A configuration as YAML, with its keys in order. ``form``: arguments of yaml.safe_dump."""
    import yaml

    return yaml.safe_dump(json.loads(json.dumps(config)), sort_keys=False, allow_unicode=True, **form)


def _above_study(user_config: Any) -> dict[str, Any]:
    """The configuration of a user's ``config.yaml``, which is composed after the packaged one.

    Hydra takes overrides of groups from the primary configuration only, so this is made the primary one. A group of the
    packaged configuration is overridden with the word ``override`` and without it.
    """
    if not isinstance(user_config, Mapping):
        raise SpecbeamError("config.yaml cannot be composed: it has no keys and values")
    keys = {str(key): value for key, value in user_config.items()}
    listed = keys.pop("defaults", None)
    if not isinstance(listed, list | None):
        raise SpecbeamError(f"config.yaml cannot be composed: defaults={str(listed)[:40]!r} is not a list")
    plain, overrides = [], []
    for entry in listed or []:
        if isinstance(entry, Mapping) and len(entry) == 1:
            ((key, choice),) = entry.items()
            group = str(key).removeprefix("override ").strip().removeprefix("/")
            if group in GROUPS or str(key).startswith("override "):
                overrides.append({f"override {group}": choice})
                continue
        plain.append(entry)
    before = [] if "study" in plain else ["study"]
    after = [] if "_self_" in plain else ["_self_"]
    return {"defaults": [*before, *plain, *after, *overrides], **keys}


def _typed_texts(override: Any) -> Iterator[Keys]:
    """The places of the texts of an override in which escapes are read."""

    def paths(value: Any, path: Keys) -> Iterator[Keys]:
        if isinstance(value, Mapping | list):
            for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
                yield from paths(part, (*path, key))
        elif any(key in TEXT_KEYS for key in path[-2:]):  # a text, or one of a list
            yield path

    return paths(override.value(), tuple(override.key_or_group.split(".")))


def _read_escapes(config: Any, path: Keys) -> None:
    """Read the escapes of the text at a place, if it is one."""
    *above, last = path
    try:
        for key in above:
            config = config[key]
        text = config[last]
    except (LookupError, TypeError):  # a later override took the place away
        return
    if isinstance(text, str):
        with located(".".join(map(str, path))):
            config[last] = unescaped(text)


def _missing(error: Any) -> str:
    """A group's file that is not there, and the files that are."""
    group, slash, name = str(error.missing_cfg_file or "").rpartition("/")
    if not slash:
        return f"the configuration cannot be composed: {_one_line(error).partition(' Config search path')[0]}"
    names = ", ".join(sorted({*(error.options or ())}))
    custom = "tracking.name=module:name, " if group == "tracking" else ""
    return f"there is no {group}={name}: give one of {names}, {custom}or --config-dir DIR with DIR/{group}/{name}.yaml"


def sweep(overrides: Sequence[str]) -> list[tuple[list[str], str]]:
    """The combinations that ``key=a,b`` and ``key=range(...)`` stand for, in order.

    Returns:
        The overrides of each combination, and a name for it: its overrides that differ between combinations.
    """
    from hydra.errors import HydraException

    parsed = _parsed(overrides)
    try:
        each = [
            [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
            if o.is_sweep_override()
            else [str(o.input_line)]
            for o in parsed
        ]
    except HydraException as error:
        raise SpecbeamError(f"an override is not understood: {_one_line(error)}") from error
    for override, values in zip(overrides, each, strict=True):
        if not values:
            raise SpecbeamError(f"{override} stands for no value: give at least one")
    swept = [o.is_sweep_override() for o in parsed]
    return [([*words], ",".join(itertools.compress(words, swept))) for words in itertools.product(*each)]


def _parsed(overrides: Sequence[str]) -> list[Any]:
    """Overrides in Hydra's grammar, in our words."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from specbeam.study.aliases import overrides_in_our_words

    words = [HOME.sub(lambda match: match[1] or f"'{_unescaped(match[0].rstrip())}'", word) for word in overrides]
    try:
        return overrides_in_our_words(OverridesParser.create().parse_overrides(words))
    except HydraException as error:
        raise SpecbeamError(f"an override is not understood: {_one_line(error)}") from error


def _unescaped(word: str) -> str:
    return re.sub(r"\\(.)", r"\1", word)


def _refuse_hydras(key: str, given: str) -> None:
    """Raise SpecbeamError if a key is Hydra's own, such as hydra.run.dir or hydra.launcher, as it was given."""
    if key.partition(".")[0] == "hydra":
        instead = (hint for prefix, hint in INSTEAD_OF_HYDRAS.items() if f"{key}.".startswith(f"{prefix}."))
        hint = next(instead, "leave it out")
        raise SpecbeamError(f"{given} is a key of Hydra's own, and a study does not use it: {hint}")


def leaves(path: str, value: Any) -> dict[str, Any]:
    """The values in nested mappings, by dotted keys."""
    if isinstance(value, Mapping) and value:
        return {k: v for part in value for k, v in leaves(f"{path}.{part}", value[part]).items()}
    return {path: value}


def _custom_tracker(override: Any, folder: Path | None) -> str | None:
    """``tracking=NAME`` as a key, where the name is that of a class and not of a file; None for other overrides."""
    name = override.value() if override.key_or_group == "tracking" else None
    if not isinstance(name, str) or not (is_name(name) or name in entry_point_names("tracker")):
        return None
    folders = [Path(__file__).parent / "conf", *filter(None, [folder])]
    if any((folder_of / "tracking" / f"{name}.yaml").exists() for folder_of in folders):
        return None
    return f"++tracking.name='{name}'"


def _may_add(override: str) -> str:
    """Let Hydra accept a key that its files do not have: ``check`` knows all keys."""
    name = override.partition("=")[0]
    if name[:1] in "+~" or name in GROUPS:
        return override
    return f"++{override}"


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split()).replace(f"'{ABOVE_STUDY}'", ABOVE_STUDY).replace(ABOVE_STUDY, "config.yaml")
    return line[:400] or type(error).__name__
