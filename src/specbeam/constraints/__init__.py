"""Constraints: automata over tokens that say which sequences may be generated."""

from specbeam.constraints.constraint import Constraint as Constraint
from specbeam.constraints.constraint import State as State
from specbeam.constraints.trie import TokenTrie as TokenTrie
