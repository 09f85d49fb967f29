"""The searches: greedy search, sampling, speculative decoding, and beam search in its forms."""
