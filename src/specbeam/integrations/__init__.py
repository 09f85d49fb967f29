"""specbeam inside other libraries: transformers' ``generate``, EleutherAI's evaluation harness."""
