"""How chat and the server sample where nobody says how.

The first of these that says something decides, for each model:

1. the checkpoint: its generation_config.json, or the ``general.sampling`` keys of a GGUF file;
2. the model's publisher (``RECOMMENDED``), since GGUF files rarely have those keys;
3. specbeam (``FALLBACK``).

``specbeam.generate``, batches and studies ask nobody: they are greedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from specbeam.errors import located
from specbeam.options.declared import SHAPING
from specbeam.options.generation_defaults import is_number
from specbeam.options.options import Options

if TYPE_CHECKING:  # it imports PyTorch, which takes a second
    from specbeam.models.model import LanguageModel

MIN_TEMPERATURE = 1e-5
"""Options take no lower one but 0. Files that mean greedy have some, such as Qwen2.5-VL's 0.000001."""


@dataclass(frozen=True)
class SamplingDefaults:
    """The sampling options of a model. As a text it is the end of a sentence about the model.

    Attributes:
        settings: by the names of :class:`specbeam.Options`; without a temperature for greedy.
        origin: who says so, as the end of a sentence.
        always: settings that hold for greedy texts and for beams, too.
    """

    settings: Mapping[str, float]
    origin: str
    always: Mapping[str, float] = field(default_factory=dict)

    def fill(self, given: Mapping[str, Any], *, searches: bool = False) -> dict[str, Any]:
        """The given options, and these settings in the place of options that are not given or None.

        Greedy search stays greedy without a penalty of ours. Beams do not sample unless an option
        says so. A value without effect, such as a top_p of 1, says nothing.

        Args:
            searches: by beams, even by a single one.
        """
        given = {name: value for name, value in given.items() if value is not None}
        beams = given.get("num_beams", 1)
        searches = searches or (isinstance(beams, int) and beams > 1)
        asks = "do_sample" in given or "temperature" in given
        asks = asks or any(given.get(name, neutral) != neutral for name, neutral in SHAPING.items())
        if given.get("do_sample") is False or (searches and not asks):
            return {**self.always, **given}
        filled = {**self.settings, **given}
        return {"temperature": 0, **self.always, **given} if filled.get("temperature") == 0 else filled

    def changed(self, own: Mapping[str, float]) -> SamplingDefaults:
        """These with other settings of a user's or an operator's own. A penalty among them holds for every text.

        Raises:
            SpecbeamError: a setting is not allowed.
        """
        if not own:
            return self
        settings = {**self.settings, **own}
        samples = Options.of(settings).samples
        if samples:
            settings = {"temperature": SHAPING["temperature"], **settings}
        rest = "" if not samples or self.settings.keys() <= own.keys() else f", and else {self.origin}"
        return SamplingDefaults(settings, f"as you say{rest}", {n: v for n, v in own.items() if n == PENALTY})

    def __str__(self) -> str:
        if not self.settings.get("temperature"):
            return f"takes the likeliest token (greedy), {self.origin}"
        settings = ", ".join(f"{name} {value:g}" for name, value in self.settings.items())
        return f"samples with {settings}, {self.origin}"


PENALTY = "repetition_penalty"
DRAWN_BY = (*SHAPING, PENALTY, "frequency_penalty")
"""The options that may be among a model's sampling options."""
GREEDY = SamplingDefaults({}, "as models with an encoder do")
FALLBACK = SamplingDefaults({"temperature": 0.7, "top_p": 0.9, PENALTY: 1.1}, "as specbeam does by default")


class Recommendation(NamedTuple):
    """What the publisher of a family of models recommends.

    Attributes:
        family: its name, for messages.
        pattern: a regular expression for names of models, in lower case.
        settings: by the names of :class:`specbeam.Options`.
        source: where the publisher says so.
        ours: what specbeam adds. Without it, 12 of 12 answers of SmolLM2-135M went on to 1,024 tokens. With
            it, 8 of 8 ended within 400. A repetition_penalty counts the prompt, too, and spoilt words.
    """

    family: str
    pattern: str
    settings: Mapping[str, float]
    source: str
    ours: Mapping[str, float] = {}


RECOMMENDED = (
    Recommendation(
        "DeepSeek-R1",
        r"deepseek.?r1",
        {"temperature": 0.6, "top_p": 0.95},
        "README of DeepSeek-R1, Usage Recommendations",
    ),
    Recommendation(
        "Qwen2.5-Coder",
        r"qwen.?2\.5.coder.*instruct",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, PENALTY: 1.1},
        "generation_config.json of Qwen2.5-Coder-7B-Instruct",
    ),
    Recommendation(
        "Qwen2.5",
        r"qwen.?2\.5.(0\.5|1\.5)b.*instruct",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, PENALTY: 1.1},
        "generation_config.json of Qwen2.5-0.5B-Instruct and Qwen2.5-1.5B-Instruct",
    ),
    Recommendation(
        "Qwen2.5",
        r"qwen.?2\.5.\d+b.*instruct",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, PENALTY: 1.05},
        "generation_config.json of Qwen2.5-3B-Instruct and Qwen2.5-7B-Instruct",
    ),
    Recommendation(
        "Qwen3-Coder",
        r"qwen.?3.coder",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, PENALTY: 1.05},
        "card of Qwen3-Coder-30B-A3B-Instruct, Best Practices",
    ),
    Recommendation(
        "Qwen3 Instruct",
        r"qwen.?3.*instruct",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        "cards of the Qwen3 Instruct models of July 2025, and of Qwen3 without thinking, Best Practices",
    ),
    Recommendation(
        "Qwen3",
        r"qwen.?3(?![.\d])",
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        "generation_config.json of Qwen3-4B, and its card for thinking, which its chat template begins with",
    ),
    Recommendation(
        "SmolLM2",
        r"smollm.?2",
        {"temperature": 0.2, "top_p": 0.9},
        "cards of SmolLM2-135M-Instruct and SmolLM2-1.7B-Instruct",
        ours={"frequency_penalty": 0.3},
    ),
    Recommendation("SmolLM3", r"smollm.?3", {"temperature": 0.6, "top_p": 0.95}, "card of SmolLM3-3B"),
    Recommendation(
        "Gemma 3",
        r"gemma.?3",
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        "generation_config.json of Gemma 3, which has no temperature, so that it is 1",
    ),
    Recommendation(
        "Gemma 4", r"gemma.?4", {"temperature": 1.0, "top_k": 64, "top_p": 0.95}, "card of Gemma 4, Best Practices"
    ),
    Recommendation("gpt-oss", r"gpt.?oss", {"temperature": 1.0}, "README of gpt-oss"),
    Recommendation(
        "LFM2.5 with experts",
        r"lfm.?2\.5.8b",
        {"temperature": 0.2, "top_k": 80, PENALTY: 1.05},
        "card of LFM2.5-8B-A1B",
    ),
    Recommendation(
        "LFM2.5",
        r"lfm.?2\.5(?!.*thinking)",
        {"temperature": 0.1, "top_k": 50, "top_p": 0.1, PENALTY: 1.05},
        "card of LFM2.5-1.2B-Instruct",
    ),
    Recommendation(
        "LFM2",
        r"lfm.?2(?!\.5)",
        {"temperature": 0.3, "min_p": 0.15, PENALTY: 1.05},
        "documentation of Liquid AI, Recommended Settings",
    ),
    Recommendation(
        "Ministral 3 Instruct",
        r"ministral.?3.*instruct",
        {"temperature": 0.05},
        "card of Ministral-3-3B-Instruct-2512, which says below 0.1",
    ),
    Recommendation(
        "Llama 3",
        r"llama.?3.*instruct",
        {"temperature": 0.6, "top_p": 0.9},
        "generation_config.json of Llama-3.1-8B-Instruct and Llama-3.2-3B-Instruct",
    ),
    Recommendation(
        "Hy-MT",
        r"h(y|unyuan).?mt",
        {"temperature": 0.7, "top_p": 0.6, "top_k": 20, PENALTY: 1.05},
        "cards of Hunyuan-MT-7B and HY-MT1.5-1.8B",
    ),
    Recommendation("Mistral Nemo", r"mistral.?nemo", {"temperature": 0.3}, "card of Mistral-Nemo-Instruct-2407"),
)
"""The first whose pattern fits one of a model's names counts: the names in its file, its source, its architecture.

Families whose publishers name no sampling options are not here, such as Mistral 7B and Phi-4 mini.
"""


def sampling_defaults(lm: LanguageModel, own: Mapping[str, float] | None = None) -> SamplingDefaults:
    """How a model samples where nobody says how.

    Args:
        own: options of the operator, which come before the model's.

    Raises:
        SpecbeamError: the checkpoint's settings are not allowed, or these options are not.
    """
    own = own or {}
    found = _of_checkpoint(lm, own) or _of_publisher(lm) or (FALLBACK if lm.backend.start_token_ids is None else GREEDY)
    if PENALTY in lm.generation_defaults:  # it holds for every text of the model
        found = replace(found, settings={**found.settings, PENALTY: lm.generation_defaults[PENALTY]})
    return found.changed(own)


def _of_checkpoint(lm: LanguageModel, own: Mapping[str, float]) -> SamplingDefaults | None:
    """What the checkpoint says; None if it says nothing about sampling, or only that one should."""
    says = lm.generation_defaults
    settings = {name: says[name] for name in SHAPING if name in says}
    temperature = settings.get("temperature")
    if says.get("do_sample") is False or (
        temperature is not None and is_number(temperature) and 0 <= temperature < MIN_TEMPERATURE
    ):
        return SamplingDefaults({}, f"as the model's {says.file} says")
    if not settings or (not says.get("do_sample") and all(SHAPING[n] == value for n, value in settings.items())):
        return None
    settings = {"temperature": SHAPING["temperature"], **settings, **says.when_sampling}
    with located(f"the model's {says.file}", ", and correct the file"):
        Options.of({**settings, **own})
    return SamplingDefaults(settings, f"as the model's {says.file} says")


def _of_publisher(lm: LanguageModel) -> SamplingDefaults | None:
    names = "\n".join(lm.names).lower()
    one = next((one for one in RECOMMENDED if re.search(one.pattern, names)), None)
    if one is None:
        return None
    ours = f", with a {' and '.join(one.ours)} of specbeam's own" if one.ours else ""
    return SamplingDefaults({**one.settings, **one.ours}, f"as the publisher of {one.family} recommends{ours}")
