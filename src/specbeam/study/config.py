"""The configuration of a study: composed by Hydra, then checked here, name by name.

Hydra puts together the packaged ``conf/``, the ``config.yaml`` and groups of the user's own folder, and ``key=value``
from the command line.
"""

from __future__ import annotations

import difflib
import itertools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from specbeam.errors import SpecbeamError

MODES = ("greedy", "sample", "beam", "speculative", "hybrid")
"""hybrid is speculative beam search."""
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
class Decode:
    """How to decode. A name that :class:`specbeam.Options` has too means the same.

    Attributes:
        mode: one of MODES, or a list of them to compare.
        k: tokens to draft per round (num_draft_tokens).
        max_tokens: the most new tokens.
        do_sample: whether "speculative" samples; "sample" always does, "greedy" never.
    """

    mode: str | list[str] = "greedy"
    k: int | str = "auto"
    max_tokens: int = 64
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    num_beams: int = 4
    num_return_sequences: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    draft_width: int | str = "auto"
    draft_budget: int | str = "auto"
    bound_rule: bool = True


@dataclass(frozen=True)
class Draft:
    """The draft model's distribution where texts are sampled. None: as for the target.

    Attributes:
        quantize: how the cpu backend keeps the draft model's weights.
    """

    temperature: float | None = None
    top_k: int | None = None
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
    """A study. ``methods`` names the methods to compare where ``decode.mode`` is not enough.

    Each method maps keys to values, which replace the study's own. The keys are the keys of ``decode``, ``draft`` (as
    draft_temperature, ...) and ``load`` (as quantize, ...), and ``draft_model``.
    """

    project_name: str = "specbeam-study"
    output: str = "runs/specbeam-study"
    target_model: str = "smollm2-135m-instruct"
    draft_model: str = "ngram"
    load: Load = field(default_factory=Load)
    chat: Chat = field(default_factory=Chat)
    debug: Debug = field(default_factory=Debug)
    decode: Decode = field(default_factory=Decode)
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
    from omegaconf import OmegaConf, open_dict

    for override in _parsed(overrides):
        _refuse_hydras(override.key_or_group.replace("/", "."), override.key_or_group)
    search, primary = [], "study"
    if folder is not None:
        if not folder.is_dir():
            raise SpecbeamError(f"--config-dir {folder} is not a folder")
        quoted = str(folder.resolve()).replace("\\", "\\\\").replace("'", "\\'")
        search = [f"hydra.searchpath=['file://{quoted}']"]
        if (folder / "config.yaml").exists():
            ConfigStore.instance().store("study_and_config", {"defaults": ["study", "config"]})
            primary = "study_and_config"
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(Path(__file__).parent / "conf"), version_base="1.3"):
            # ``check`` refuses unknown names and suggests the nearest one. Hydra's own message would be less clear.
            composed = hydra_compose(primary, [*map(_may_add, overrides), *search], return_hydra_config=True)
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
    except UnicodeDecodeError as error:
        raise SpecbeamError(f"a configuration file is not UTF-8 text (byte {error.start:,}): convert it") from error
    except Exception as error:  # Hydra raises ValueError, AssertionError and others for wrong words and files, too
        raise SpecbeamError(f"the configuration cannot be composed: {_one_line(error)}") from error
    assert isinstance(plain, dict)
    return typing.cast(dict[str, Any], plain)


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
    if name[:1] in "+~" or name in ("data", "tracking", "launcher", "ablation"):
        return override
    return f"++{override}"


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__


def check(given: Mapping[str, Any]) -> Study:
    """The study that a configuration asks for.

    Raises:
        SpecbeamError: an unknown key (the message names the nearest valid one), a value that is not allowed, or a
            study without prompts.
    """
    study: Study = _build(Study, given, "")
    one_of("tracking.name", study.tracking.name, ("none", "wandb"))
    one_of("launcher.name", study.launcher.name, ("local", "ray"))
    one_of("data.format", study.data.format, ("auto", "table", "text", "spec_bench", "human_eval"))
    for name, number in {
        "repeats": study.repeats,
        "decode.max_tokens": study.decode.max_tokens,
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
        SpecbeamError: a method's key or value is not allowed.
    """
    modes = [study.decode.mode] if isinstance(study.decode.mode, str) else study.decode.mode
    asked: dict[str, Mapping[str, Any]] = {}
    for mode in modes if not study.methods else ():
        one_of("decode.mode", mode, MODES)
        asked[mode] = {"mode": mode}
    for name, changes in study.methods.items():
        if not isinstance(changes, Mapping):
            raise SpecbeamError(f"methods.{name}={changes!r} is not allowed: give keys and values, as in decode")
        asked[name] = changes
    if not asked:
        raise SpecbeamError("there is no method: give decode.mode, one or a list")
    found = [_method(study, name, changes) for name, changes in asked.items()]
    plain = {_promise(method): method.name for method in reversed(found) if method.draft is None}
    return [
        method if method.draft is None else Method(**vars(method) | {"twin": plain.get(_promise(method))})
        for method in found
    ]


def _method(study: Study, name: str, changes: Mapping[str, Any]) -> Method:
    base = {
        **vars(study.decode),
        **{f"draft_{key}": value for key, value in vars(study.draft).items()},
        **vars(study.load),
        "draft_model": study.draft_model,
    }
    for key in changes:
        nearest(f"methods.{name}.{key}", key, base)
    kinds = {
        **typing.get_type_hints(Decode),
        **{f"draft_{key}": kind for key, kind in typing.get_type_hints(Draft).items()},
        **typing.get_type_hints(Load),
        "draft_model": str,
    }
    v = base | {key: _value(kinds[key], value, f"methods.{name}.{key}") for key, value in changes.items()}
    mode = v["mode"] if isinstance(v["mode"], str) or "mode" in changes else next(iter(v["mode"]), "")
    one_of(f"methods.{name}.mode", mode, MODES)
    beams, drafts = mode in ("beam", "hybrid"), mode in ("speculative", "hybrid")
    samples = mode == "sample" or (mode == "speculative" and v["do_sample"])
    options: dict[str, Any] = {"max_new_tokens": v["max_tokens"], "min_new_tokens": v["min_new_tokens"]}
    if v["repetition_penalty"] is not None:
        options["repetition_penalty"] = v["repetition_penalty"]
    if samples:
        options["do_sample"] = True
        options |= {key: v[key] for key in ("temperature", "top_k", "top_p", "min_p") if v[key] is not None}
        if drafts:
            draws = {"draft_temperature": v["draft_temperature"], "draft_top_k": v["draft_top_k"]}
            options |= {key: value for key, value in draws.items() if value is not None}
    else:
        options["do_sample"] = False
    if beams:
        names = ("num_beams", "length_penalty", "early_stopping", "num_beam_groups", "diversity_penalty", "bound_rule")
        options |= {key: v[key] for key in names}
        options["num_return_sequences"] = v["num_return_sequences"] or v["num_beams"]
    if drafts:
        options |= {"num_draft_tokens": v["k"], "draft_width": v["draft_width"], "draft_budget": v["draft_budget"]}
    from specbeam.options import Options

    try:
        Options.of(options)
    except SpecbeamError as error:
        raise SpecbeamError(f"method {name}: {error}") from error
    load = {key: v[key] for key in vars(study.load)}
    draft_load = load | ({"quantize": v["draft_quantize"]} if v["draft_quantize"] is not None else {})
    return Method(name, mode, options, v["draft_model"] if drafts else None, load, draft_load)


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


def nearest(path: str, key: Any, allowed: Mapping[str, Any]) -> None:
    """Raise SpecbeamError, which suggests the nearest key, unless the key is allowed."""
    if key not in allowed:
        near = difflib.get_close_matches(str(key), [*allowed], n=1, cutoff=0.5)
        hint = f"did you mean {path.removesuffix(str(key))}{near[0]}?" if near else f"there are {', '.join(allowed)}"
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
