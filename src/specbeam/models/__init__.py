"""Loaded models, their prompts, and the sampling that their makers recommend."""
