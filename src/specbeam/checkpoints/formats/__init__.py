"""The formats of checkpoints: folders of safetensors, GGUF, CTranslate2, and adapters."""
