"""The parts of a model's layers, one file for each: their numbers, their parameters and what they keep of a token."""
