"""A GGUF file's values as a float checkpoint, for peers that read no GGUF file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def float_checkpoint(gguf: Path) -> Path:
    """A folder with the model and its tokenizer, which transformers wrote. It is made once, in the temporary folder."""
    folder = Path(tempfile.gettempdir()) / f"specbeam-bench-{gguf.stem}" / "folder"
    if not (folder / "tokenizer.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False
        )
        model.config.__dict__.pop("quantization_config", None)  # it is dequantized, whatever the reader says
        model.is_quantized = False
        model.hf_quantizer = None
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        tokenizer.save_pretrained(folder)
    return folder
