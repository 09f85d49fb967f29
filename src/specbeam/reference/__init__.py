"""Models written out in NumPy, to be read and to check the others against."""

from specbeam.reference import gpt2 as gpt2
