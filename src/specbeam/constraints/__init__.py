"""Constraints: automata over tokens that say which texts may be generated."""

from specbeam.constraints.trie import Constrained as Constrained
from specbeam.constraints.trie import Constraint as Constraint
from specbeam.constraints.trie import TokenTrie as TokenTrie
