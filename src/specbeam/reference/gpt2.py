"""GPT-2 in NumPy, every step of the forward pass in the open.

A decoder-only transformer with learned positions, layer norms before each part of a block, and a projection tied to the
embedding: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Written to be read: the whole
text is evaluated anew for each token, with no cache and no batches. Parameters are nested as in picoGPT.

>>> gen_text("hello", 5)
'hello world world world <UNK> <UNK>'
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specbeam.errors import SpecbeamError

Array = NDArray[np.floating[Any]]


def gelu(x: Array) -> Array:
    """x * P(X <= x) for a standard normal X, by the tanh approximation (Hendrycks and Gimpel, 2016)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def softmax(x: Array) -> Array:
    """Each row, along the last axis, as probabilities."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))  # the same, and no row overflows
    return e / e.sum(axis=-1, keepdims=True)


def layer_norm(x: Array, g: Array, b: Array, eps: float = 1e-5) -> Array:
    """Each row to mean 0 and variance 1, then scaled by g and shifted by b, both [n_embd] (Ba et al., 2016)."""
    return g * (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + eps) + b


def linear(x: Array, w: Array, b: Array) -> Array:
    """x [n, inputs] to [n, outputs], with w [inputs, outputs] as GPT-2 stores it and b [outputs]."""
    return x @ w + b


def attention(x: Array, c_attn: dict[str, Array], c_proj: dict[str, Array], n_head: int) -> Array:
    """Causal multi-head attention, [n, n_embd] to [n, n_embd] (Vaswani et al., 2017)."""
    n = len(x)
    # One product gives queries, keys and values side by side: [3, n_head, n, n_embd / n_head].
    q, k, v = linear(x, **c_attn).reshape(n, 3, n_head, -1).transpose(1, 2, 0, 3)
    scores = q @ k.swapaxes(1, 2) / math.sqrt(q.shape[-1])
    scores[:, np.triu(np.ones((n, n), dtype=bool), 1)] = -np.inf  # nobody sees what comes later
    return linear((softmax(scores) @ v).swapaxes(0, 1).reshape(n, -1), **c_proj)


def block(x: Array, ln_1: Any, attn: Any, ln_2: Any, mlp: Any, n_head: int) -> Array:
    """One layer, [n, n_embd] to [n, n_embd]: attention, then the feed-forward net, each added to its input."""
    x = x + attention(layer_norm(x, **ln_1), **attn, n_head=n_head)
    return x + linear(gelu(linear(layer_norm(x, **ln_2), **mlp["c_fc"])), **mlp["c_proj"])


def gpt2(ids: list[int], wte: Array, wpe: Array, blocks: list[Any], ln_f: Any, n_head: int) -> Array:
    """The forward pass.

    Args:
        ids: token ids of a text of n tokens, at most n_ctx.
        wte: token embeddings [n_vocab, n_embd], which are the projection at the end too.
        wpe: position embeddings [n_ctx, n_embd].
        blocks: the parameters of each layer; with ``ln_f``, the last layer norm's, as in
            :func:`load_encoder_hparams_and_params`.
        n_head: number of attention heads.

    Returns:
        Logits [n, n_vocab] of the token after each one, in the parameters' dtype.
    """
    x: Array = wte[ids] + wpe[: len(ids)]
    for parameters in blocks:
        x = block(x, **parameters, n_head=n_head)
    return layer_norm(x, **ln_f) @ wte.T


def gen_text(
    prompt: str,
    n_tokens_to_generate: int = 40,
    model_size: str | os.PathLike[str] = "toy",
    models_dir: str | os.PathLike[str] = "models",
) -> str:
    """The prompt and the tokens that greedy search adds to it. It adds as many as asked for: nothing ends a text.

    Args:
        prompt: text, at least a token long.
        n_tokens_to_generate: number of new tokens; 0 gives the prompt back, as the vocabulary writes it.
        model_size: which model, and
        models_dir: where: see :func:`load_encoder_hparams_and_params`.

    Raises:
        SpecbeamError: a number below 0, an empty prompt, a text longer than the model's context, or no such model.
    """
    if n_tokens_to_generate < 0:
        raise SpecbeamError(f"n_tokens_to_generate={n_tokens_to_generate} must be 0 or more")
    encoder, hparams, params = load_encoder_hparams_and_params(model_size, models_dir)
    ids = list(encoder.encode(prompt))
    if not ids:
        raise SpecbeamError(f"the prompt {prompt!r} has no tokens: give at least one")
    if len(ids) + n_tokens_to_generate > hparams["n_ctx"]:
        raise SpecbeamError(
            f"{len(ids)} tokens of the prompt and n_tokens_to_generate={n_tokens_to_generate} do not fit the model's "
            f"context of {hparams['n_ctx']}: ask for fewer, or shorten the prompt"
        )
    for _ in range(n_tokens_to_generate):
        ids.append(int(gpt2(ids, **params, n_head=hparams["n_head"])[-1].argmax()))
    text: str = encoder.decode(ids)
    return text


def load_encoder_hparams_and_params(
    model_size: str | os.PathLike[str] = "toy", models_dir: str | os.PathLike[str] = "models"
) -> tuple[Any, dict[str, int], dict[str, Any]]:
    """A model's tokenizer, sizes and parameters.

    Args:
        model_size: "toy", which comes with the package; the name of a folder inside ``models_dir``; the path of one; or
            a hub id, such as "openai-community/gpt2", which is downloaded as :func:`specbeam.load` does.
            A folder is one that transformers saved a GPT-2 to: config.json, safetensors, tokenizer.
        models_dir: the folder that names of models are looked up in.

    Returns:
        encoder: has ``encode(text)``, which returns token ids, and ``decode(ids)``, which returns text.
        hparams: n_vocab, n_ctx, n_embd, n_head, n_layer.
        params: wte, wpe, blocks (a list of {attn: {c_attn, c_proj}, ln_1, ln_2, mlp: {c_fc, c_proj}}) and ln_f; layer
            norms are {g, b}, the others {w, b}. Float64 for the toy, else float32.

    Raises:
        SpecbeamError: there is no such folder, the hub cannot give it, what is in it is damaged, or it is no GPT-2 as
            OpenAI trained them.
    """
    if model_size == "toy":
        return toy()
    inside, outside = Path(models_dir, model_size), Path(model_size)
    for folder in (inside, outside):
        if folder.is_dir():
            return pretrained(folder)
    if "/" in (name := os.fspath(model_size)):
        from specbeam.checkpoints import locate

        return pretrained(locate(name))
    raise SpecbeamError(
        f"there is no folder {inside}: give toy, the name of a folder in {models_dir}, the path of a folder, or a hub "
        f"id to fetch. OpenAI's weights are {', '.join(f'{id} ({size})' for id, size in HUB_IDS.items())}"
    )


HUB_IDS = {
    "openai-community/gpt2": "124M",
    "openai-community/gpt2-medium": "355M",
    "openai-community/gpt2-large": "774M",
    "openai-community/gpt2-xl": "1558M",
}
"""The weights that OpenAI published, as the hub has them, with their numbers of parameters."""


def parameters(hparams: dict[str, int], n_inner: int, tensor: Callable[[str, tuple[int, ...]], Array]) -> Any:
    """The tree of parameters; ``tensor`` is asked for each by the name it has in checkpoints, with its shape."""
    n = hparams["n_embd"]

    def norm(name: str) -> dict[str, Array]:
        return {"g": tensor(f"{name}.weight", (n,)), "b": tensor(f"{name}.bias", (n,))}

    def dense(name: str, inputs: int, outputs: int) -> dict[str, Array]:
        return {"w": tensor(f"{name}.weight", (inputs, outputs)), "b": tensor(f"{name}.bias", (outputs,))}

    return {
        "wte": tensor("wte.weight", (hparams["n_vocab"], n)),
        "wpe": tensor("wpe.weight", (hparams["n_ctx"], n)),
        "blocks": [
            {
                "ln_1": norm(f"h.{i}.ln_1"),
                "attn": {"c_attn": dense(f"h.{i}.attn.c_attn", n, 3 * n), "c_proj": dense(f"h.{i}.attn.c_proj", n, n)},
                "ln_2": norm(f"h.{i}.ln_2"),
                "mlp": {"c_fc": dense(f"h.{i}.mlp.c_fc", n, n_inner), "c_proj": dense(f"h.{i}.mlp.c_proj", n_inner, n)},
            }
            for i in range(hparams["n_layer"])
        ],
        "ln_f": norm("ln_f"),
    }


class Words:
    """The toy's tokenizer: each word is a token, and white space is between words."""

    vocabulary = ("hello", "world", "the", "<UNK>")

    def encode(self, text: str) -> list[int]:
        """Token ids; of <UNK> for words that are not in the vocabulary."""
        words = [word if word in self.vocabulary else "<UNK>" for word in text.split()]
        return [self.vocabulary.index(word) for word in words]

    def decode(self, ids: list[int]) -> str:
        """The words of token ids, with a space between them."""
        return " ".join(self.vocabulary[i] for i in ids)


TOY = {"n_vocab": 4, "n_ctx": 64, "n_embd": 8, "n_head": 2, "n_layer": 2}
TOY_SEED = 41786
"""The seed with the surest texts of the first 200,000. In the three texts of tests/reference/test_gpt2.py, the logit of
the likeliest token leads by 3.7 or more. Rounding on any machine changes far less."""


def toy() -> tuple[Words, dict[str, int], dict[str, Any]]:
    """A model with four words: every parameter is drawn from a standard normal, in the order of :func:`parameters`."""
    rng = np.random.default_rng(TOY_SEED)
    return Words(), dict(TOY), parameters(TOY, 4 * TOY["n_embd"], lambda _, shape: rng.standard_normal(shape))


SIZES = {"n_vocab": "vocab_size", "n_ctx": "n_positions", "n_embd": "n_embd", "n_head": "n_head", "n_layer": "n_layer"}
"""The names of the sizes in a config.json."""
AS_TRAINED = {
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "tie_word_embeddings": True,
}
"""Settings that transformers has for GPT-2, with the values of OpenAI's models. This file computes with them."""


def pretrained(folder: Path) -> tuple[Any, dict[str, int], dict[str, Any]]:
    """A model that transformers saved to a folder. Errors as in :func:`load_encoder_hparams_and_params`."""
    from specbeam.checkpoints.files import read_json
    from specbeam.checkpoints.formats.folder import FolderCheckpoint  # it imports PyTorch, which the toy does without

    checkpoint, config = FolderCheckpoint(folder), read_json(folder, "config.json")
    if checkpoint.facts.architecture != "gpt2":
        raise SpecbeamError(f"{folder} holds a {checkpoint.facts.architecture} model: the reference runs gpt2 alone")
    for setting, value in AS_TRAINED.items():
        if config.get(setting, value) != value:
            raise SpecbeamError(f"{folder}: {setting} is {config[setting]!r}, and the reference has {value!r} alone")
    hparams: dict[str, Any] = {name: config.get(key) for name, key in SIZES.items()}
    for name, size in hparams.items():
        if type(size) is not int or size < 1:
            raise SpecbeamError(f"{folder}: {SIZES[name]} of its config.json is {size!r} and must be 1 or more")
    if hparams["n_embd"] % hparams["n_head"]:
        raise SpecbeamError(f"{folder}: n_embd={hparams['n_embd']} cannot be cut into {hparams['n_head']} heads")
    if checkpoint.tokenizer is None:
        raise SpecbeamError(f"{folder} has no tokenizer: its prompts are texts")
    checkpoint.check_tokenizer(hparams["n_vocab"])
    prefix = "transformer." if "transformer.wte.weight" in checkpoint.shapes else ""  # OpenAI's own have no prefix

    def tensor(name: str, shape: tuple[int, ...]) -> Array:
        found = checkpoint.shapes.get(prefix + name)
        if found != shape:
            what = "is missing" if found is None else f"has shape {list(found)}"
            raise SpecbeamError(f"{folder}: tensor {prefix + name} {what}; config.json asks for {list(shape)}")
        read = checkpoint.read(prefix + name, 0, checkpoint.shape(prefix + name)[0])
        return read.T if ".c_" in name else read  # they are read as [out, in]

    return checkpoint.tokenizer, hparams, parameters(hparams, config.get("n_inner") or 4 * hparams["n_embd"], tensor)
