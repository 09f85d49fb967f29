"""The configuration of a study, checked name by name, and the methods that it compares."""

from __future__ import annotations

import typing
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, is_dataclass, replace
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any

from specbeam.drafting.resolve import draft_kind
from specbeam.errors import SpecbeamError, located
from specbeam.models.model import Placement
from specbeam.options.declared import OBJECTS, OPTIONS, Need
from specbeam.options.names import nearest_name
from specbeam.options.options import Options
from specbeam.plugins import entry_point_names, is_name
from specbeam.structured.grammar import OUTPUT_SPECS
from specbeam.study.tables import KNOWN, custom_name

MODES = ("greedy", "sample", "beam", "speculative", "speculative-beam")
DECODE_DEFAULTS: dict[str, Any] = {"max_new_tokens": 64, "num_beams": 4, "num_draft_tokens": "auto"}
SET_BY_THE_STUDY = ("seed", "trace", "top_logprobs")
"""Options that a study sets itself, or does not record."""
METHODS_WITH: dict[Need, str] = {
    "sampling": "methods that sample (mode sample, or speculative with do_sample: true)",
    "draft": "methods that draft (mode speculative or speculative-beam)",
    "beams": "methods with beams (mode beam or speculative-beam)",
    "several": "methods with beams and methods that sample",
}
"""The methods that have what an option needs."""
WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}
WORDS |= {list: "a list", dict: "a mapping"}
"""The types of settings."""
DECODE_KEYS = (
    *("mode", "strategy", *OUTPUT_SPECS),
    *(name for name in OPTIONS if name not in (*SET_BY_THE_STUDY, *OBJECTS)),
)


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
class Columns:
    """The names of a table's columns. None: the usual name if there is such a column, else no column."""

    prompt: str | None = None
    reference: str | None = None
    category: str | None = None
    id: str | None = None


@dataclass(frozen=True)
class Data:
    """Attributes:
    source: a file (.jsonl, .json, .csv, .tsv, .parquet, .txt; .gz as well), or the id of a data set on the hub.
    format: auto, table, text, spec_bench or human_eval.
    split, subset: parts of a data set on the hub.
    columns: the names of a table's columns.
    template: the prompt's text, with {prompt} and the table's other columns in it.
    per_category: how many rows to draw from each category, with the seed.
    limit: how many rows to draw in all, with the seed.
    categories: the categories to keep; None: all.
    turns: the maximum number of turns of a conversation.
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
    own: user-defined functions, each ``module:name`` or the name of an entry point (:class:`CustomMetrics`).
    perplexity: models that measure the perplexity of the texts; "target" is the study's own target model.
    confidence: the confidence level of the intervals.
    baseline: the method that the others are compared with; None: the first one.
    pass_at_1: run the answers to HumanEval's problems.
    """

    own: list[str] = field(default_factory=list)
    perplexity: list[str] = field(default_factory=lambda: ["target"])
    confidence: float = 0.95
    baseline: str | None = None
    pass_at_1: bool = True


@dataclass(frozen=True)
class Report:
    """Attributes:
    latex_columns: the metrics that are columns of ``tables/methods.tex``, as ``tables/methods.csv`` names them; None:
        :data:`specbeam.study.tables.LATEX_COLUMNS`, and user-defined ones.
    """

    latex_columns: list[str] | None = None


@dataclass(frozen=True)
class Tracking:
    """Attributes:
    name: none, wandb, or a user-defined class: ``module:name``, or the name of an entry point
        (:class:`specbeam.study.tracking.Tracker`).
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
    workers: the maximum number of workers; None: as many as the cluster has room for.
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
        decode: how to decode. "mode" is one of MODES, or a list of them to compare. One of OUTPUT_SPECS is a
            constraint. The other keys are options of :class:`specbeam.Options`. Each goes to the methods in which it
            has an effect. do_sample is for "speculative": "sample" always samples, and the others never do.
        methods: names the methods to compare where ``decode.mode`` is not enough. Each maps keys to values, which
            replace the study's own: the keys of ``decode`` and ``load``, ``draft_quantize`` and ``draft_model``.

    A "strategy" among the keys of ``decode`` is a decoding method of one's own, as ``module:name`` or an entry point.
    It takes the place of the mode's own one, and the mode says which options it gets. ``draft_model`` is a model,
    "ngram", "suffix", "mtp" or a drafter of one's own, named likewise.
    """

    project_name: str = "specbeam-study"
    output: str | None = None
    target_model: str = "smollm2-135m-instruct"
    draft_model: str = "ngram"
    load: Placement = field(default_factory=Placement)
    chat: Chat = field(default_factory=Chat)
    debug: Debug = field(default_factory=Debug)
    decode: dict[str, Any] = field(default_factory=dict)
    draft: Draft = field(default_factory=Draft)
    methods: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    data: Data = field(default_factory=Data)
    metrics: Metrics = field(default_factory=Metrics)
    report: Report = field(default_factory=Report)
    tracking: Tracking = field(default_factory=Tracking)
    launcher: Launcher = field(default_factory=Launcher)
    seed: int = 0
    repeats: int = 1


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        options: of :class:`specbeam.Options`.
        strategy: a decoding method of one's own in place of the mode's; None without.
        draft: a model, "ngram", "suffix", "mtp" or a drafter of one's own; None without.
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
    strategy: str | None = None


def check(given: Mapping[str, Any]) -> Study:
    """The study that a configuration asks for.

    Raises:
        SpecbeamError: an unknown key (the message names the nearest valid one), a value that is not allowed, or a
            study without prompts.
    """
    study: Study = _value(Study, given, "")
    for key in study.decode:
        nearest(f"decode.{key}", key, DECODE_KEYS)
    if not is_name(study.tracking.name):
        one_of("tracking.name", study.tracking.name, ("none", "wandb", *entry_point_names("tracker"), "module:name"))
    one_of("launcher.name", study.launcher.name, ("local", "ray"))
    one_of("data.format", study.data.format, ("auto", "table", "text", "spec_bench", "human_eval"))
    for name in ("repeats", "data.per_category", "data.limit", "data.turns", "launcher.workers"):
        if (number := attrgetter(name)(study)) is not None and number < 1:
            raise SpecbeamError(f"{name}={number} is not allowed: give at least 1")
    if not 0 < study.metrics.confidence < 1:
        raise SpecbeamError(f"metrics.confidence={study.metrics.confidence} is not allowed: give 0.95 or so")
    if not study.prompts and study.data.source is None:
        raise SpecbeamError("there is nothing to decode: give prompts=[...] or data.source=FILE")
    judged = (f"perplexity {name}" for name in study.metrics.perplexity if name != "target")
    for column in study.report.latex_columns or []:
        one_of("report.latex_columns", column, [*KNOWN, *map(custom_name, study.metrics.own), *judged])
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
    own, several = study.decode.get("strategy"), isinstance(modes, list) and len(modes) > 1
    if own is not None and several and not study.methods:
        raise SpecbeamError(
            f"decode.strategy={own} is one method, and decode.mode has {len(modes)}: give the mode whose options it "
            f"takes, as in decode.mode=sample, or name each: 'methods={{mine: {{mode: sample, strategy: {own}}}}}'"
        )
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
    return [method if method.draft is None else replace(method, twin=plain.get(_promise(method))) for method in found]


def _method(study: Study, name: str, changes: Mapping[str, Any]) -> Method:
    place = f"methods.{name}" if name in study.methods else "decode"
    load_kinds = typing.get_type_hints(Placement)
    kinds = {**load_kinds, "draft_quantize": str | None, "draft_model": str}
    for key in changes:
        nearest(f"{place}.{key}", key, (*DECODE_KEYS, *kinds))
    own = {key: _value(kinds[key], value, f"{place}.{key}") for key, value in changes.items() if key in kinds}
    v = {"draft_quantize": study.draft.quantize, "draft_model": study.draft_model, **vars(study.load), **own}
    decode = DECODE_DEFAULTS | _not_null(study.decode) | {key: changes[key] for key in changes if key not in kinds}
    mode = decode.get("mode", MODES[0])
    if isinstance(mode, list) and "mode" not in changes:
        mode = next(iter(mode), "")
    one_of(f"{place}.mode", mode, MODES)
    strategy = _value(str | None, decode.get("strategy"), f"{place}.strategy")
    if (do_sample := decode.get("do_sample")) not in (None, True, False):
        raise SpecbeamError(f"{place}.do_sample={do_sample!r} is not allowed: give true or false")
    if changes.get("do_sample") and mode not in ("sample", "speculative"):
        raise SpecbeamError(f"methods.{name}.do_sample=true has no effect: {mode} never samples; leave it out")
    has = traits(mode, bool(do_sample))
    for key, value in non_default_options(changes).items():
        if missing := needs_of(key) - has:
            raise SpecbeamError(_without_effect(f"methods.{name}.{key}={value}", missing, f"{name} does not"))
    options = {
        key: value
        for key, value in _not_null(decode).items()
        if key not in ("mode", "strategy", "do_sample", *OUTPUT_SPECS) and needs_of(key) <= has
    }
    options["do_sample"] = "sampling" in has
    constraints = [key for key in OUTPUT_SPECS if decode.get(key) is not None]
    if len(constraints) > 1:
        raise SpecbeamError(f"{place} has {' and '.join(constraints)}, and a text has one constraint: leave one out")
    with located(f"method {name}"):
        for key in constraints:
            options["constraint"] = OUTPUT_SPECS[key](decode[key])
        checked = Options.of(options)
    options = {key: getattr(checked, key) for key in options}
    load = {key: v[key] for key in load_kinds}
    draft_load = load | ({"quantize": v["draft_quantize"]} if v["draft_quantize"] is not None else {})
    draft = v["draft_model"] if "draft" in has else None
    return Method(name, mode, options, draft, load, draft_load, strategy=strategy)


def needs_of(key: str) -> frozenset[Need]:
    """What an option has an effect with. Other keys have one in every method."""
    return OPTIONS[key].needs if key in OPTIONS else frozenset()


def traits(mode: str, do_sample: bool) -> frozenset[Need]:
    """What a method has of the things that options need."""
    has: dict[Need, bool] = {
        "sampling": mode == "sample" or (mode == "speculative" and do_sample),
        "draft": mode in ("speculative", "speculative-beam"),
        "beams": mode in ("beam", "speculative-beam"),
    }
    has["several"] = has["sampling"] or has["beams"]
    return frozenset(need for need, holds in has.items() if holds)


def _refuse_without_effect(study: Study, found: list[Method]) -> None:
    """Raise SpecbeamError if an option of ``decode`` or ``draft`` has an effect in none of the methods."""
    done = [traits(method.mode, method.options["do_sample"]) for method in found]
    for key, value in non_default_options(study.decode).items():
        needs = needs_of(key)
        if not any(needs <= has for has in done):
            raise SpecbeamError(_without_effect(f"decode.{key}={value}", needs, "no method does"))
    if study.decode.get("do_sample") and not any(method.mode == "speculative" for method in found):
        raise SpecbeamError(
            "decode.do_sample=true has no effect: it is for speculative; give decode.mode=sample, or leave it out"
        )
    drafts = {method.draft for method in found if method.draft is not None}
    if study.draft.quantize is not None and not {"model", "head"} & {*map(draft_kind, drafts)}:
        raise SpecbeamError(
            f"draft.quantize={study.draft.quantize} has no effect: no draft is a model; give draft_model=MODEL"
        )


def _without_effect(given: str, needs: Set[Need], none_does: str) -> str:
    how = " and ".join(METHODS_WITH[need] for need in sorted(needs))
    unset = f"{given.partition('=')[0]}=null"
    return f"{given} has no effect: it is for {how}, and {none_does}; add such a method, or give {unset}"


def _not_null(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}


def non_default_options(decode: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not null, and not the default of the packaged configuration."""
    return {key: value for key, value in _not_null(decode).items() if value != DECODE_DEFAULTS.get(key)}


def _promise(method: Method) -> str:
    """A key that is equal for methods whose texts must be equal. Drafts and lazy steps change no text."""
    decides = {key: value for key, value in method.options.items() if OPTIONS[key].changes_text}
    return repr((method.strategy, sorted(decides.items()), sorted(method.load.items())))


def one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise SpecbeamError unless the value is allowed."""
    if value not in allowed:
        near = nearest_name(str(value), allowed)
        hint = f"did you mean {near!r}?" if near else f"give one of {', '.join(allowed)}"
        raise SpecbeamError(f"{name}={value!r} is not allowed: {hint}")


def nearest(path: str, key: Any, allowed: Collection[str]) -> None:
    """Raise SpecbeamError, which suggests the nearest key, unless the key is allowed."""
    if key not in allowed:
        near = nearest_name(str(key), [*allowed])
        hint = f"did you mean {path.removesuffix(str(key))}{near}?" if near else f"there are {', '.join(allowed)}"
        raise SpecbeamError(f"the configuration has no key {path}: {hint}")


def _value(kind: Any, value: Any, path: str) -> Any:
    """A value of a type; a dataclass is made of a mapping. Raises SpecbeamError, which names the type, for another."""
    if isinstance(kind, type) and is_dataclass(kind):
        if not isinstance(value, Mapping | None):
            raise SpecbeamError(f"{path}={value!r} is not allowed: give keys and values")
        hints, values = typing.get_type_hints(kind), {}
        for key, part in (value or {}).items():
            place = f"{path}.{key}".removeprefix(".")
            nearest(place, key, hints)
            values[key] = _value(hints[key], part, place)
        return kind(**values)
    options = typing.get_args(kind) if isinstance(kind, UnionType) else (kind,)
    origins = {typing.get_origin(option) or option: option for option in options}
    if float in origins and type(value) is int:
        return float(value)
    if type(value) not in origins:
        raise SpecbeamError(f"{path}={value!r} is not allowed: give {' or '.join(map(WORDS.__getitem__, origins))}")
    if isinstance(value, list):
        (kind,) = typing.get_args(origins[list])
        return [_value(kind, item, f"{path}[{i}]") for i, item in enumerate(value)]
    return value
