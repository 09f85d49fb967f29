"""specbeam: exact and fast decoding of open causal language models.

Load a model with ``load``, and give it to ``generate``, ``stream`` or ``nbest`` with a prompt and options::

    lm = specbeam.load("smollm2-135m-instruct")
    specbeam.generate(lm, "Name three colours.", num_beams=4).text

``Options`` says what each option does. ``Engine`` runs many requests at once. ``TokenTrie`` limits what may be
generated. ``hf`` works inside transformers, and ``lm_eval`` inside EleutherAI's evaluation harness.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from specbeam.version import __version__ as __version__

if "OMP_WAIT_POLICY" not in os.environ:
    # PyTorch's threads spin while they wait for each other, by default for milliseconds. One other busy process on the
    # machine then stretches every product to a time slice of the scheduler (docs/performance.md). With shorter spins,
    # waking up costs more than the products. PyTorch reads the variable only when it is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

if TYPE_CHECKING:
    from specbeam import constraints as constraints
    from specbeam import hf as hf
    from specbeam import labels as labels
    from specbeam import ladder as ladder
    from specbeam import lm_eval as lm_eval
    from specbeam import reference as reference
    from specbeam import scoring as scoring
    from specbeam import speech as speech
    from specbeam.api.generation import generate as generate
    from specbeam.api.generation import nbest as nbest
    from specbeam.api.generation import stream as stream
    from specbeam.core.callers import tensors as tensors
    from specbeam.drafting.lookup import suffix_automaton as suffix_automaton
    from specbeam.engine import Engine as Engine
    from specbeam.engine import Request as Request
    from specbeam.errors import NotFinite as NotFinite
    from specbeam.errors import PromptTooLong as PromptTooLong
    from specbeam.errors import QueueFull as QueueFull
    from specbeam.errors import SpecbeamError as SpecbeamError
    from specbeam.models.model import LanguageModel as LanguageModel
    from specbeam.models.model import load as load
    from specbeam.models.prompts import show_prompt as show_prompt
    from specbeam.options.options import Options as Options
    from specbeam.results import Piece as Piece
    from specbeam.results import Result as Result
    from specbeam.results import Sequence as Sequence
    from specbeam.results import Stats as Stats
    from specbeam.speech import Segment as Segment
    from specbeam.speech import Transcript as Transcript
    from specbeam.speech import transcribe as transcribe
    from specbeam.speech import transcribe_stream as transcribe_stream
    from specbeam.structured import Choice as Choice
    from specbeam.structured import Grammar as Grammar
    from specbeam.structured import JsonSchema as JsonSchema
    from specbeam.structured import Regex as Regex
    from specbeam.structured import TokenTrie as TokenTrie
    from specbeam.text.tokenizer import Tokenizer as Tokenizer

_HOMES = {
    "Engine": "engine",
    "LanguageModel": "models.model",
    "NotFinite": "errors",
    "Options": "options",
    "Piece": "results",
    "PromptTooLong": "errors",
    "QueueFull": "errors",
    "Request": "engine",
    "Result": "results",
    "Sequence": "results",
    "Segment": "speech",
    "SpecbeamError": "errors",
    "Stats": "results",
    "TokenTrie": "structured",
    "Transcript": "speech",
    "Choice": "structured",
    "Grammar": "structured",
    "JsonSchema": "structured",
    "Regex": "structured",
    "Tokenizer": "text.tokenizer",
    "generate": "api.generation",
    "load": "models.model",
    "nbest": "api.generation",
    "show_prompt": "models.prompts",
    "stream": "api.generation",
    "suffix_automaton": "drafting.lookup",
    "tensors": "core.callers",
    "transcribe": "speech",
    "transcribe_stream": "speech",
}

_MODULES = ("constraints", "hf", "labels", "ladder", "lm_eval", "reference", "scoring", "speech")

__all__ = [*_HOMES]


if not TYPE_CHECKING:  # which would take every name, misspelt ones too, for one of type Any

    def __getattr__(name: str) -> Any:
        """Import a public name or module on first use, so that the command line answers before PyTorch has loaded."""
        if name in _MODULES:
            return import_module(f"specbeam.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'specbeam' has no attribute {name!r}")
        return getattr(import_module(f"specbeam.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names, for ``dir``, ``help`` and tab completion.

    ``help`` imports all of them. So a module that needs more packages is listed only if these are installed, and
    ``lm_eval`` only once it is imported.
    """
    from specbeam.system.extras import MODULES, are_installed

    there = [name for name in _MODULES if name not in MODULES or (name != "lm_eval" and are_installed(*MODULES[name]))]
    return [*_HOMES, *there, *(name for name in globals() if name == "lm_eval" or name.startswith("__"))]
