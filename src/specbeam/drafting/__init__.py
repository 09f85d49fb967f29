"""Drafters propose draft tokens, so that the target can verify many tokens in one forward pass."""
