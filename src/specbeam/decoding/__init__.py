"""The searches: greedy search, sampling, speculative decoding, and beam search in its forms."""

# Custom strategies of version 0.2 import these names from here.
from specbeam.core.strategy import Evaluate as Evaluate
from specbeam.core.strategy import Hypothesis as Hypothesis
