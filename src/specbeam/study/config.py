"""The configuration of a study: composed by Hydra, then checked here, name by name.

Hydra puts together the packaged ``conf/``, the ``config.yaml`` and groups of the user's own folder, and ``key=value``
from the command line.
"""

from __future__ import annotations

import difflib
import itertools
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError
from specbeam.option_names import nearest_name
from specbeam.options import BEAM_OPTIONS, MAX_DRAFT_SIZES, SAMPLING_OPTIONS, Options

MODES = ("greedy", "sample", "beam", "speculative", "speculative-beam")
OLD_MODES = {"hybrid": "speculative-beam", "speculative_beam": "speculative-beam"}
"""Other names of modes. Folders and configurations of earlier studies have "hybrid"."""
OLD_KEYS = {
    "decode.k": "decode.num_draft_tokens",
    "decode.max_tokens": "decode.max_new_tokens",
    "draft.temperature": "decode.draft_temperature",
    "draft.top_k": "decode.draft_top_k",
}
"""Other names of keys, from before the keys of ``decode`` were named as in :class:`specbeam.Options`."""
DECODE_DEFAULTS: dict[str, Any] = {"max_new_tokens": 64, "num_beams": 4, "num_draft_tokens": "auto"}
SET_BY_THE_STUDY = ("seed", "trace", "top_logprobs")
"""Options that a study sets itself, or does not record."""
FUNCTIONS = ("constraint", "prefix_allowed_tokens_fn", "logits_processor")
"""Options whose values are Python objects."""
USERS: dict[str, frozenset[str]] = {
    **dict.fromkeys(SAMPLING_OPTIONS, frozenset({"samples"})),
    **dict.fromkeys((*BEAM_OPTIONS, "num_beams", "num_beam_groups", "diversity_penalty"), frozenset({"has beams"})),
    **dict.fromkeys(MAX_DRAFT_SIZES, frozenset({"drafts"})),
    **dict.fromkeys(("draft_temperature", "draft_top_k"), frozenset({"samples", "drafts"})),
    "bound_rule": frozenset({"has beams", "drafts"}),
    "num_return_sequences": frozenset({"returns several texts"}),
}
"""The traits that a method needs for an option to have an effect. The other options have one in every method."""
MODES_THAT = {
    "samples": "methods that sample (mode sample, or speculative with do_sample: true)",
    "drafts": "methods that draft (mode speculative or speculative-beam)",
    "has beams": "methods with beams (mode beam or speculative-beam)",
    "returns several texts": "methods with beams and methods that sample",
}
DECODE_KEYS = ("mode", *(f.name for f in fields(Options) if f.name not in (*SET_BY_THE_STUDY, *FUNCTIONS)))
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
SET_BY_HYDRA = ("hydra.overrides", "hydra.runtime", "hydra.searchpath", "hydra.job.config_name", "hydra.job.override")
"""The keys of Hydra's own that differ from run to run by themselves."""


@dataclass(frozen=True)
class Chat:
    """Attributes:
    use_system_prompt: put ``system_prompt`` first.
    raw: no chat template.
    """

    use_system_prompt: bool = False
    system_prompt: str = ""
    raw: bool = False


@dataclass(frozen=True)
class Debug:
    """Attributes:
    render_input_text: keep and show exactly what the model sees of each prompt.
    """

    render_input_text: bool = False


@dataclass(frozen=True)
class Draft:
    """Attributes:
    quantize: how the cpu backend keeps the draft model's weights.
    """

    quantize: str | None = None


@dataclass(frozen=True)
class Load:
    """How models are loaded (:func:`specbeam.load`)."""

    backend: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    quantize: str = "auto"
    threads: int | None = None


@dataclass(frozen=True)
class Columns:
    """The names of a table's columns. None: the usual name if there is such a column, else no column."""

    prompt: str | None = None
    reference: str | None = None
    category: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class Data:
    """Attributes:
    source: a file (.jsonl, .json, .csv, .parquet, .txt; .gz as well), or the id of a data set on the hub.
    format: auto, table, text, spec_bench or human_eval.
    split, subset: parts of a data set on the hub.
    columns: the names of a table's columns.
    template: the prompt's text, with {prompt} and the table's other columns in it.
    per_category: how many rows to draw from each category, with the seed.
    limit: how many rows to draw in all, with the seed.
    categories: the categories to keep; None: all.
    turns: the most turns of a conversation.
    """

    source: str | None = None
    format: str = "auto"
    split: str = "test"
    subset: str | None = None
    columns: Columns = field(default_factory=Columns)
    template: str | None = None
    per_category: int | None = None
    limit: int | None = None
    categories: list[str] | None = None
    turns: int | None = None


@dataclass(frozen=True)
class Metrics:
    """Attributes:
    perplexity: models that measure the perplexity of the texts; "target" is the study's own target model.
    confidence: the confidence level of the intervals.
    baseline: the method that the others are compared with; None: the first one.
    pass_at_1: run the answers to HumanEval's problems.
    """

    perplexity: list[str] = field(default_factory=lambda: ["target"])
    confidence: float = 0.95
    baseline: str | None = None
    pass_at_1: bool = True


@dataclass(frozen=True)
class Tracking:
    """Attributes:
    name: none or wandb.
    """

    name: str = "none"
    project: str | None = None
    entity: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Launcher:
    """Attributes:
    name: local or ray.
    address: of a Ray cluster; None starts one on this machine.
    workers: the most workers; None: as many as the cluster has room for.
    cpus, gpus: CPUs and GPUs per worker.
    """

    name: str = "local"
    address: str | None = None
    workers: int | None = None
    cpus: float = 1
    gpus: float = 0


@dataclass(frozen=True)
class Study:
    """A study.

    Attributes:
        output: the run's folder; None: ``runs/``, the project's name and a hash of the configuration.
        decode: how to decode. "mode" is one of MODES, or a list of them to compare. The other keys are options of
            :class:`specbeam.Options`. Each goes to the methods in which it has an effect. do_sample is for
            "speculative": "sample" always samples, and the others never do.
        methods: names the methods to compare where ``decode.mode`` is not enough. Each maps keys to values, which
            replace the study's own: the keys of ``decode`` and ``load``, ``draft_quantize`` and ``draft_model``.
    """

    project_name: str = "specbeam-study"
    output: str | None = None
    target_model: str = "smollm2-135m-instruct"
    draft_model: str = "ngram"
    load: Load = field(default_factory=Load)
    chat: Chat = field(default_factory=Chat)
    debug: Debug = field(default_factory=Debug)
    decode: dict[str, Any] = field(default_factory=dict)
    draft: Draft = field(default_factory=Draft)
    methods: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    data: Data = field(default_factory=Data)
    metrics: Metrics = field(default_factory=Metrics)
    tracking: Tracking = field(default_factory=Tracking)
    launcher: Launcher = field(default_factory=Launcher)
    seed: int = 0
    repeats: int = 1


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        options: of :class:`specbeam.Options`.
        draft: a model, "ngram" or "suffix"; None without.
        load, draft_load: how :func:`specbeam.load` loads target and draft model.
        twin: the name of the method without drafts whose texts this one must return, or None.
    """

    name: str
    mode: str
    options: dict[str, Any]
    draft: str | None
    load: dict[str, Any]
    draft_load: dict[str, Any]
    twin: str | None = None


def compose(overrides: Sequence[str], folder: Path | None = None) -> Mapping[str, Any]:
    """The configuration as plain data.

    Args:
        overrides: ``key=value`` in Hydra's grammar.
        folder: the user's own, with a ``config.yaml`` and groups (data/NAME.yaml, ablation/NAME.yaml, ...).

    Raises:
        SpecbeamError: it cannot be read, an override is not understood, or a key of Hydra's own is set.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import MissingConfigException
    from omegaconf import OmegaConf, open_dict

    parsed = _parsed(overrides)
    for override in parsed:
        _refuse_hydras(override.key_or_group.replace("/", "."), override.key_or_group)
    _refuse_old_beside_new({o.key_or_group: o.value() for o in parsed if not o.is_delete()})
    words = [_may_add(_with_new_key(str(override.input_line))) for override in parsed]
    search, primary = [], "study"
    if folder is not None:
        if not folder.is_dir():
            raise SpecbeamError(f"--config-dir {folder} is not a folder")
        quoted = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
        search = [f"hydra.searchpath=['file://{quoted}']"]
    GlobalHydra.instance().clear()
    try:
        if folder is not None and (folder / "config.yaml").exists():
            primary = ABOVE_STUDY
            ConfigStore.instance().store(primary, _above_study(OmegaConf.load(folder / "config.yaml")))
        with initialize_config_dir(str(Path(__file__).parent / "conf"), version_base="1.3"):
            # ``check`` refuses unknown names and suggests the nearest one. Hydra's own message would be less clear.
            composed = hydra_compose(primary, [*words, *search], return_hydra_config=True)
            with open_dict(composed):
                hydras = composed.pop("hydra")
            if folder is not None:
                usual = _leaves("hydra", OmegaConf.to_container(hydra_compose("study", return_hydra_config=True).hydra))
                for key, value in _leaves("hydra", OmegaConf.to_container(hydras)).items():
                    if not key.startswith(SET_BY_HYDRA) and (key not in usual or usual[key] != value):
                        _refuse_hydras(key, key)
            plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except SpecbeamError:
        raise
    except MissingConfigException as error:
        raise SpecbeamError(_missing(error)) from error
    except UnicodeDecodeError as error:
        raise SpecbeamError(f"a configuration file is not UTF-8 text (byte {error.start:,}): convert it") from error
    except Exception as error:  # Hydra raises ValueError, AssertionError and others for wrong words and files, too
        raise SpecbeamError(f"the configuration cannot be composed: {_one_line(error)}") from error
    given_last = {word.partition("=")[0].lstrip("+~") for word in words}
    return with_new_names(typing.cast(dict[str, Any], plain), given_last)


def _above_study(own: Any) -> dict[str, Any]:
    """The configuration of a user's ``config.yaml``, which is composed after the packaged one.

    Hydra takes overrides of groups from the primary configuration only, so this is made the primary one. A group of the
    packaged configuration is overridden with the word ``override`` and without it.
    """
    from omegaconf import DictConfig, ListConfig, OmegaConf

    if not isinstance(own, DictConfig):
        raise SpecbeamError("config.yaml cannot be composed: it has no keys and values")
    listed = own.pop("defaults", None)
    if not isinstance(listed, ListConfig | None):
        raise SpecbeamError(f"config.yaml cannot be composed: defaults={str(listed)[:40]!r} is not a list")
    plain, overrides = [], []
    for entry in [] if listed is None else OmegaConf.to_container(listed):
        if isinstance(entry, Mapping) and len(entry) == 1:
            ((key, choice),) = entry.items()
            group = str(key).removeprefix("override ").strip().removeprefix("/")
            if group in GROUPS or str(key).startswith("override "):
                overrides.append({f"override {group}": choice})
                continue
        plain.append(entry)
    _refuse_old_beside_new(_leaves("", OmegaConf.to_container(own)))
    before = [] if "study" in plain else ["study"]
    after = [] if "_self_" in plain else ["_self_"]
    return {"defaults": [*before, *plain, *after, *overrides], **{str(key): own._get_node(key) for key in own}}


def _missing(error: Any) -> str:
    """A group's file that is not there, and the files that are."""
    group, slash, name = str(error.missing_cfg_file or "").rpartition("/")
    if not slash:
        return f"the configuration cannot be composed: {_one_line(error).partition(' Config search path')[0]}"
    there = ", ".join(sorted({*(error.options or ())}))
    return f"there is no {group}={name}: give one of {there}, or --config-dir DIR with DIR/{group}/{name}.yaml"


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
                _refuse_both(f"{old_section}.", old_name, value, name, _given(into).get(name, value))
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


def _refuse_old_beside_new(given: Mapping[str, Any]) -> None:
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


def _with_new_key(word: str) -> str:
    """An override whose key is not an old name."""
    key, equals, value = word.partition("=")
    name = key.lstrip("+~")
    return key.removesuffix(name) + OLD_KEYS.get(name, name) + equals + value


def sweep(overrides: Sequence[str]) -> Iterator[list[str]]:
    """The combinations that ``key=a,b`` and ``key=range(...)`` stand for, in order.

    Raises:
        SpecbeamError: an override is not understood, or stands for no value.
    """
    from hydra.errors import HydraException

    try:
        each = [
            [f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()]
            if o.is_sweep_override()
            else [str(o.input_line)]
            for o in _parsed(overrides)
        ]
    except HydraException as error:
        raise SpecbeamError(f"an override is not understood: {_one_line(error)}") from error
    for override, values in zip(overrides, each, strict=True):
        if not values:
            raise SpecbeamError(f"{override} stands for no value: give at least one")
    for combination in itertools.product(*each):
        yield list(combination)


def _parsed(overrides: Sequence[str]) -> list[Any]:
    """Overrides in Hydra's grammar."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return list(OverridesParser.create().parse_overrides(list(overrides)))
    except HydraException as error:
        raise SpecbeamError(f"an override is not understood: {_one_line(error)}") from error


def _refuse_hydras(key: str, given: str) -> None:
    """Raise SpecbeamError if a key is Hydra's own, such as hydra.run.dir or hydra.launcher, as it was given."""
    if key.partition(".")[0] == "hydra":
        instead = (hint for prefix, hint in INSTEAD_OF_HYDRAS.items() if f"{key}.".startswith(f"{prefix}."))
        hint = next(instead, "leave it out")
        raise SpecbeamError(f"{given} is a key of Hydra's own, and a study does not use it: {hint}")


def _leaves(path: str, value: Any) -> dict[str, Any]:
    """The values in nested mappings, by dotted keys."""
    if isinstance(value, Mapping) and value:
        return {k: v for part in value for k, v in _leaves(f"{path}.{part}", value[part]).items()}
    return {path: value}


def _may_add(override: str) -> str:
    """Let Hydra accept a key that its files do not have: ``check`` knows all keys."""
    name = override.partition("=")[0]
    if name[:1] in "+~" or name in GROUPS:
        return override
    return f"++{override}"


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split()).replace(f"'{ABOVE_STUDY}'", ABOVE_STUDY).replace(ABOVE_STUDY, "config.yaml")
    return line[:400] or type(error).__name__


def check(given: Mapping[str, Any]) -> Study:
    """The study that a configuration asks for.

    Raises:
        SpecbeamError: an unknown key (the message names the nearest valid one), a value that is not allowed, or a
            study without prompts.
    """
    study: Study = _build(Study, given, "")
    for key in study.decode:
        nearest(f"decode.{key}", key, DECODE_KEYS)
    one_of("tracking.name", study.tracking.name, ("none", "wandb"))
    one_of("launcher.name", study.launcher.name, ("local", "ray"))
    one_of("data.format", study.data.format, ("auto", "table", "text", "spec_bench", "human_eval"))
    for name, number in {
        "repeats": study.repeats,
        "data.per_category": study.data.per_category,
        "data.limit": study.data.limit,
        "data.turns": study.data.turns,
        "launcher.workers": study.launcher.workers,
    }.items():
        if number is not None and number < 1:
            raise SpecbeamError(f"{name}={number} is not allowed: give at least 1")
    if not 0 < study.metrics.confidence < 1:
        raise SpecbeamError(f"metrics.confidence={study.metrics.confidence} is not allowed: give 0.95 or so")
    if not study.prompts and study.data.source is None:
        raise SpecbeamError("there is nothing to decode: give prompts=[...] or data.source=FILE")
    names = [method.name for method in methods(study)]
    if study.metrics.baseline is not None:
        one_of("metrics.baseline", study.metrics.baseline, names)
    return study


def methods(study: Study) -> list[Method]:
    """The methods that a study compares, in order.

    Raises:
        SpecbeamError: a method's key or value is not allowed, or has no effect.
    """
    modes = study.decode.get("mode", MODES[0])
    if not isinstance(modes, str | list):
        raise SpecbeamError(f"decode.mode={modes!r} is not allowed: give one of {', '.join(MODES)}, or a list")
    asked: dict[str, Mapping[str, Any]] = {}
    for mode in ([modes] if isinstance(modes, str) else modes) if not study.methods else ():
        one_of("decode.mode", mode, MODES)
        asked[mode] = {"mode": mode}
    for name, changes in study.methods.items():
        if not isinstance(changes, Mapping):
            raise SpecbeamError(f"methods.{name}={changes!r} is not allowed: give keys and values, as in decode")
        asked[name] = changes
    if not asked:
        raise SpecbeamError("there is no method: give decode.mode, one or a list")
    found = [_method(study, name, changes) for name, changes in asked.items()]
    _refuse_without_effect(study, found)
    plain = {_promise(method): method.name for method in reversed(found) if method.draft is None}
    return [
        method if method.draft is None else Method(**vars(method) | {"twin": plain.get(_promise(method))})
        for method in found
    ]


def _method(study: Study, name: str, changes: Mapping[str, Any]) -> Method:
    place = f"methods.{name}" if name in study.methods else "decode"
    load_kinds = typing.get_type_hints(Load)
    kinds = {**load_kinds, "draft_quantize": str | None, "draft_model": str}
    for key in changes:
        nearest(f"{place}.{key}", key, {**dict.fromkeys(DECODE_KEYS), **kinds})
    own = {key: _value(kinds[key], value, f"{place}.{key}") for key, value in changes.items() if key in kinds}
    v = {"draft_quantize": study.draft.quantize, "draft_model": study.draft_model, **vars(study.load), **own}
    decode = DECODE_DEFAULTS | _not_null(study.decode) | {key: changes[key] for key in changes if key not in kinds}
    mode = decode.get("mode", MODES[0])
    if isinstance(mode, list) and "mode" not in changes:
        mode = next(iter(mode), "")
    one_of(f"{place}.mode", mode, MODES)
    if (do_sample := decode.get("do_sample")) not in (None, True, False):
        raise SpecbeamError(f"{place}.do_sample={do_sample!r} is not allowed: give true or false")
    if changes.get("do_sample") and mode not in ("sample", "speculative"):
        raise SpecbeamError(f"methods.{name}.do_sample=true has no effect: {mode} never samples; leave it out")
    does = traits(mode, bool(do_sample))
    for key, value in _given(changes).items():
        if key in USERS and not USERS[key] <= does:
            raise SpecbeamError(_without_effect(f"methods.{name}.{key}={value}", USERS[key] - does, f"{name} does not"))
    options = {
        key: value
        for key, value in _not_null(decode).items()
        if key not in ("mode", "do_sample") and USERS.get(key, frozenset()) <= does
    }
    options["do_sample"] = "samples" in does
    if "has beams" in does:
        options.setdefault("num_return_sequences", options["num_beams"])
    try:
        checked = Options.of(options)
    except SpecbeamError as error:
        raise SpecbeamError(f"method {name}: {error}") from error
    options = {key: getattr(checked, key) for key in options}
    load = {key: v[key] for key in load_kinds}
    draft_load = load | ({"quantize": v["draft_quantize"]} if v["draft_quantize"] is not None else {})
    return Method(name, mode, options, v["draft_model"] if "drafts" in does else None, load, draft_load)


def traits(mode: str, do_sample: bool) -> frozenset[str]:
    """The traits of a method, in the words of USERS."""
    does = {
        "samples": mode == "sample" or (mode == "speculative" and do_sample),
        "drafts": mode in ("speculative", "speculative-beam"),
        "has beams": mode in ("beam", "speculative-beam"),
    }
    does["returns several texts"] = does["samples"] or does["has beams"]
    return frozenset(trait for trait, holds in does.items() if holds)


def _refuse_without_effect(study: Study, found: list[Method]) -> None:
    """Raise SpecbeamError if an option of ``decode`` or ``draft`` has an effect in none of the methods."""
    done = [traits(method.mode, method.options["do_sample"]) for method in found]
    for key, value in _given(study.decode).items():
        needs = USERS.get(key, frozenset())
        if not any(needs <= does for does in done):
            raise SpecbeamError(_without_effect(f"decode.{key}={value}", needs, "no method does"))
    if study.decode.get("do_sample") and not any(method.mode == "speculative" for method in found):
        raise SpecbeamError(
            "decode.do_sample=true has no effect: it is for speculative; give decode.mode=sample, or leave it out"
        )
    if study.draft.quantize is not None and not any(m.draft not in (None, "ngram", "suffix") for m in found):
        raise SpecbeamError(
            f"draft.quantize={study.draft.quantize} has no effect: no draft is a model; give draft_model=MODEL"
        )


def _without_effect(given: str, needs: Set[str], none_does: str) -> str:
    how = " and ".join(f"{MODES_THAT[need]}" for need in sorted(needs))
    unset = f"{given.partition('=')[0]}=null"
    return f"{given} has no effect: it is for {how}, and {none_does}; add such a method, or give {unset}"


def _not_null(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def _given(decode: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given: not null, and not the default of the packaged configuration."""
    return {key: value for key, value in _not_null(decode).items() if value != DECODE_DEFAULTS.get(key)}


def _promise(method: Method) -> str:
    """A key that is equal for methods whose texts must be equal.

    Drafts are part of it only where texts are sampled: there they change the draws, not their distribution.
    """
    about_drafts = ("num_draft_tokens", "draft_width", "draft_budget", "draft_temperature", "draft_top_k", "bound_rule")
    decides = {key: value for key, value in method.options.items() if key not in about_drafts}
    return repr((sorted(decides.items()), sorted(method.load.items()), method.draft if decides["do_sample"] else None))


def one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise SpecbeamError unless the value is allowed."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"give one of {', '.join(allowed)}"
        raise SpecbeamError(f"{name}={value!r} is not allowed: {hint}")


def nearest(path: str, key: Any, allowed: Collection[str]) -> None:
    """Raise SpecbeamError, which suggests the nearest key, unless the key is allowed."""
    if key not in allowed:
        near = nearest_name(str(key), [*allowed])
        hint = f"did you mean {path.removesuffix(str(key))}{near}?" if near else f"there are {', '.join(allowed)}"
        raise SpecbeamError(f"the configuration has no key {path}: {hint}")


def _build(kind: Any, given: Any, path: str) -> Any:
    """A dataclass from a mapping."""
    if not isinstance(given, Mapping):
        raise SpecbeamError(f"{path.rstrip('.')}={given!r} is not allowed: give keys and values")
    hints = typing.get_type_hints(kind)
    values = {}
    for key, value in given.items():
        nearest(f"{path}{key}", key, hints)
        values[key] = _value(hints[key], value, f"{path}{key}")
    for f in fields(kind):
        if f.name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise SpecbeamError(f"{path}{f.name} is missing")
    return kind(**values)


def _value(kind: Any, value: Any, path: str) -> Any:
    """A value of a type. Raises SpecbeamError, which names the type, for another one."""
    if is_dataclass(kind):
        return _build(kind, value if value is not None else {}, f"{path}.")
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for option in options:
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        origin = typing.get_origin(option) or option
        if isinstance(value, origin) and not (isinstance(value, bool) and option is not bool):
            inner = typing.get_args(option)
            if origin is list and inner:
                return [_value(inner[0], item, f"{path}[{i}]") for i, item in enumerate(value)]
            return dict(value) if origin is dict else value
    names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}
    allowed = [names.get(option, "a list" if typing.get_origin(option) is list else "a mapping") for option in options]
    raise SpecbeamError(f"{path}={value!r} is not allowed: give {' or '.join(allowed)}")
