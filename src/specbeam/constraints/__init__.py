"""Constraints: automata over tokens that say which texts may be generated."""

from specbeam.constraints.constraint import DEAD_STATE as DEAD_STATE
from specbeam.constraints.constraint import Constraint as Constraint
from specbeam.constraints.constraint import States as States
from specbeam.constraints.trie import TokenTrie as TokenTrie
