"""The formats of tokenizers."""
