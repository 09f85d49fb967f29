"""Labels of texts; the public name of :mod:`specbeam.api.labels`."""

from specbeam.api.labels import CONTENT_FREE as CONTENT_FREE
from specbeam.api.labels import probabilities as probabilities
