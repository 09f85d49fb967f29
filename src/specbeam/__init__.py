"""specbeam: exact and fast decoding of open causal language models."""

from specbeam.engine import Engine
from specbeam.errors import SpecbeamError
from specbeam.generation import generate, stream
from specbeam.model import LanguageModel, load
from specbeam.options import Options
from specbeam.prompts import show_prompt
from specbeam.results import Piece, Result, Sequence, Stats

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "LanguageModel",
    "Options",
    "Piece",
    "Result",
    "Sequence",
    "SpecbeamError",
    "Stats",
    "generate",
    "load",
    "show_prompt",
    "stream",
]
