"""Scores of given texts; the public name of :mod:`specbeam.api.scoring`."""

from specbeam.api.scoring import score as score
