"""Tiny models and tokenizers as NumPy writes them, without PyTorch and transformers."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import save_file

from specbeam import Tokenizer
from specbeam.checkpoints.architecture import tensor_names
from specbeam.checkpoints.checkpoint import FILTERS
from specbeam.checkpoints.families import ARCHITECTURES
from specbeam.checkpoints.formats.folder_config import complete, config_from_hugging_face
from specbeam.checkpoints.parameters import parameters
from specbeam.checkpoints.stems import FILTER_FRAMES
from tests.absent import needs

WEIGHTS = 6
"""The seed of all weights. With others, beams may end elsewhere than the tests expect."""


class WrittenTokenizer(Tokenizer):
    """A tokenizer of specbeam that can write its files."""

    def add_special_tokens(self, named):
        self.backend_tokenizer.add_special_tokens(named["additional_special_tokens"])

    def save_pretrained(self, folder):
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        self.backend_tokenizer.save(str(folder / "tokenizer.json"))
        described = {"tokenizer_class": "PreTrainedTokenizerFast"} | self.special_tokens_map
        (folder / "tokenizer_config.json").write_text(json.dumps(described))
        if self.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.chat_template)

    def __getattr__(self, name):
        needs(f"transformers: {name} of its tokenizer")


class WrittenConfig(SimpleNamespace):
    """The keys of a config.json, with their defaults."""

    def to_dict(self, **keywords):
        needs("transformers: its configuration")

    to_json_string = to_dict


class WrittenModel:
    """A model with random weights, and its files. Tests that compute with it are skipped.

    Attributes:
        config: a WrittenConfig.
    """

    def __init__(self, given, seed):
        self._given, self._tensors = given, random_tensors(given, seed)
        self.config = WrittenConfig(**given | vars(complete(ARCHITECTURES[given["model_type"]], given)))

    @classmethod
    def from_pretrained(cls, *args, **keywords):
        needs("transformers: a model of a folder")

    def state_dict(self):
        return {**self._tensors}

    def load_state_dict(self, tensors):
        self._tensors = tensors

    def save_pretrained(self, folder, **how):
        if how:
            needs(f"transformers: files with {how}")
        folder = Path(folder)
        folder.mkdir(exist_ok=True)
        save_file(self._tensors, folder / "model.safetensors")
        names = ARCHITECTURES[self._given["model_type"]].older_names  # which transformers writes
        written = {names.get(key, key): value for key, value in self._given.items()}
        (folder / "config.json").write_text(json.dumps(written))
        ends = {key: self._given[key] for key in ("bos_token_id", "eos_token_id")}
        (folder / "generation_config.json").write_text(json.dumps(ends))

    def __getattr__(self, name):
        needs(f"PyTorch: {name} of a model")


def random_tensors(given, seed):
    """Weights for a config.json, by their names in a folder.

    Norms and biases are random too, because ones and zeros hide mistakes.
    """
    architecture = ARCHITECTURES[given["model_type"]]
    config = config_from_hugging_face(given, range(10_000))
    deviation = given.get("init_std", given.get("initializer_range"))
    draw, tensors = np.random.default_rng([WEIGHTS, seed]), {}
    for parameter, described in parameters(config).items():
        shape, stacked = described.shape, described.rows
        names = tensor_names(parameter, architecture.folder_tensors)
        for name, count in zip(names, shape[:1] if len(names) == 1 else stacked, strict=True):
            if name.endswith(architecture.folder_zeros):
                continue
            if len(shape) == 3:
                if architecture.experts_transposed or "*" not in name:
                    needs("transformers: stacked experts")
                for expert in range(count):
                    tensors[name.replace("*", str(expert))] = draw.normal(0, deviation, shape[1:]).astype(np.float32)
                continue
            if len(shape) == 2:
                tensor = draw.normal(0, deviation, (count, shape[1]))
                tensor = tensor.T if architecture.stores_transposed(name) else tensor
                if FILTERS.search(name):  # [out, in, size]
                    size = shape[1] if parameter.endswith("filter.weight") else FILTER_FRAMES
                    tensor = tensor.reshape(count, size, -1).swapaxes(1, 2)
            else:  # norms are about 1 as they are read
                (added,) = architecture.folder_values(name, np.zeros(1, np.float32))
                middle = 0 if name.endswith("bias") else 1 - added
                tensor = draw.normal(middle, 0.2, count)
            tensors[name] = np.ascontiguousarray(tensor, np.float32)
    return tensors
