"""The KV cache: slots and who holds them, cached prefixes, the slots of a token tree, and the budget of an engine."""
