"""Tiny models and tokenizers as NumPy writes them, without PyTorch and transformers."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from specbeam.checkpoints.architecture import tensor_names
from specbeam.checkpoints.families import ARCHITECTURES
from specbeam.checkpoints.folder_config import complete, config_from_hugging_face
from specbeam.checkpoints.parameters import parameter_shapes

WEIGHTS = 6
"""The seed of all weights. With others, beams may end elsewhere than the tests expect."""


class WrittenTokenizer:
    """The files of a tokenizer. Tests that use it itself are skipped."""

    def __init__(self, backend, chat_template, named):
        self.backend_tokenizer, self._template, self._named = backend, chat_template, named

    def add_special_tokens(self, named):
        self.backend_tokenizer.add_special_tokens(named["additional_special_tokens"])

    def save_pretrained(self, folder):
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        self.backend_tokenizer.save(str(folder / "tokenizer.json"))
        described = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._named
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
        if self._template is not None:
            (folder / "chat_template.jinja").write_text(self._template)

    def __getattr__(self, name):
        pytest.skip(f"needs transformers: {name} of its tokenizer")


class WrittenModel:
    """A model with random weights, and its files. Tests that compute with it are skipped.

    Attributes:
        config: the keys of its config.json, with their defaults.
    """

    def __init__(self, given, seed):
        self._given, self._tensors = given, random_tensors(given, seed)
        self.config = complete(ARCHITECTURES[given["model_type"]], given)

    def state_dict(self):
        return self._tensors

    def save_pretrained(self, folder, **how):
        if how:
            pytest.skip(f"needs transformers: files with {how}")
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        save_file(self._tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self._given))
        ends = {key: self._given[key] for key in ("bos_token_id", "eos_token_id")}
        (folder / "generation_config.json").write_text(json.dumps(ends))

    def __getattr__(self, name):
        pytest.skip(f"needs PyTorch: {name} of a model")


def random_tensors(given, seed):
    """Weights for a config.json, by their names in a folder.

    Norms and biases are random too, because ones and zeros hide mistakes.
    """
    architecture = ARCHITECTURES[given["model_type"]]
    config = config_from_hugging_face(given, range(10_000))
    deviation = given.get("init_std", given.get("initializer_range"))
    draw, tensors = np.random.default_rng([WEIGHTS, seed]), {}
    for parameter, shape in parameter_shapes(config).items():
        own = config.encoder if parameter.startswith("encoder.") else config
        heads, groups = (number * own.head_dim for number in (own.num_heads, own.num_kv_heads))
        names = tensor_names(parameter, architecture.folder_tensors)
        rows = {1: [shape[0]], 2: [shape[0] // 2] * 2, 3: [heads, groups, groups]}[len(names)]
        for name, count in zip(names, rows, strict=True):
            if name.endswith(architecture.folder_zeros):
                continue
            if len(shape) == 2:
                tensor = draw.normal(0, deviation, (count, shape[1]))
                tensor = tensor.T if architecture.stores_transposed(name) else tensor
                if architecture.stores_filters(name):
                    tensor = tensor.reshape(count, 3, -1).swapaxes(1, 2)
            else:
                middle = 0 if name.endswith("bias") else 1 - architecture.folder_norm_offset
                tensor = draw.normal(middle, 0.2, count)
            tensors[name] = np.ascontiguousarray(tensor, np.float32)
    return tensors
