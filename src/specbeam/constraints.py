"""Constraints on the generated text; the public name of :mod:`specbeam.structured`."""

from specbeam.structured import Choice as Choice
from specbeam.structured import Constraint as Constraint
from specbeam.structured import Grammar as Grammar
from specbeam.structured import JsonSchema as JsonSchema
from specbeam.structured import Regex as Regex
from specbeam.structured import TokenTrie as TokenTrie
