"""The base of the architectures in :mod:`specbeam.checkpoints.families`, and what config.json means in all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, ClassVar, NamedTuple, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from specbeam.checkpoints.config import Config, Layer
from specbeam.checkpoints.parts.attention import Attention
from specbeam.checkpoints.parts.experts import Experts
from specbeam.checkpoints.parts.mlp import MLP, SharedExpert
from specbeam.checkpoints.parts.part import Part, size
from specbeam.checkpoints.stems import PLAIN_STEM, TokenStem
from specbeam.errors import SpecbeamError

Keys = dict[str, tuple[Any, Any]]
"""The type and the default of each key."""

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""The keys without which a config.json is refused. transformers would take defaults for them."""
COMMON: Keys = {
    "max_position_embeddings": (int, 2048),
    "rope_parameters": (dict | None, None),
    "tie_word_embeddings": (bool, False),
    **dict.fromkeys(SIZES, (int, None)),
}
"""The keys that are read for all architectures."""
ORIGINAL = "original_max_position_embeddings"
"""The context length before rotary scaling."""
SIGMOID = 2
"""``expert_gating_func`` of GGUF files whose routers score by sigmoids."""
NEEDED = {
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", ORIGINAL},
    "longrope": {"short_factor", "long_factor", ORIGINAL},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", ORIGINAL},
}
"""The keys without which a kind of rotary scaling is refused."""
WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number with a point",
    str: "a text",
    dict: "an object",
    list: "a list",
    NoneType: "null",
}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value of JSON has a type. An integer is no ``float``, and true and false are no ``int``."""
    if isinstance(kind, UnionType):
        return any(fits(value, one) for one in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(fits(entry, get_args(kind)[0]) for entry in value)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def in_words(kind: Any) -> str:
    """A type as a reader of JSON says it."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return " or ".join(dict.fromkeys(WORDS[get_origin(one) or one] for one in kinds))


def rope_parameters(keys: SimpleNamespace, theta: float, theta_key: str = "rope_theta") -> dict[str, Any]:
    """The rotary settings in the form of transformers 5, where one or several older keys may stand for them.

    Args:
        theta: the default of ``rope_theta``.
        theta_key: its key beside the other settings.
    """
    ropes = getattr(keys, "rope_scaling", None) or keys.rope_parameters
    keys.rope_parameters = ropes = {} if ropes is None else ropes
    theta, partial = getattr(keys, theta_key, theta), vars(keys).pop("partial_rotary_factor", None)
    for parameters in nested(keys) or [ropes]:
        parameters.setdefault("rope_theta", theta)
        if partial is not None:
            parameters.setdefault("partial_rotary_factor", partial)
    return standardized(keys)


def rope_parameters_by_kind(keys: SimpleNamespace, thetas: Mapping[str, float]) -> dict[str, Any]:
    """The rotary settings, nested by kinds of layers. ``rope_scaling`` is that of layers that see the whole text.

    Args:
        thetas: the default of ``rope_theta`` for each kind of layers.
    """
    ropes = keys.rope_parameters
    keys.rope_parameters = ropes = {kind: {} for kind in thetas} if ropes is None else ropes
    if (scaling := getattr(keys, "rope_scaling", None)) is not None:
        ropes["full_attention"].update(scaling)
    for kind, theta in thetas.items():
        if ropes.get(kind) is None:
            ropes[kind] = {"rope_type": "default"}
        ropes[kind].setdefault("rope_theta", theta)
    return standardized(keys)


def standardized(keys: SimpleNamespace) -> dict[str, Any]:
    """The rotary settings, with their kind and the original context length where that counts."""
    context = keys.max_position_embeddings
    for parameters in nested(keys) or [keys.rope_parameters]:
        parameters.setdefault("rope_type", parameters.get("type", "default"))
        if parameters["rope_type"] in ("llama3", "yarn", "longrope"):
            parameters.setdefault(ORIGINAL, context)
    ropes: dict[str, Any] = keys.rope_parameters
    return ropes


def scaled_context(ropes: Mapping[str, Any], context: int) -> int:
    """The tokens of the longest sequence that rotary settings are for.

    YaRN's are for ``factor`` times the original context. Model cards ask to add them to a config.json that keeps its
    ``max_position_embeddings``. LongRoPE's rotation changes for all tokens of a sequence beyond the original context.
    The other kinds are for ``max_position_embeddings``.

    Args:
        ropes: of transformers 5. They may be nested by kinds of layers, of which those count that see the whole text.
        context: ``max_position_embeddings``.
    """
    ropes = ropes.get("full_attention") or ropes
    kind, original = ropes.get("rope_type"), ropes.get(ORIGINAL)
    if kind == "longrope" and original:
        return min(context, int(original))
    if kind == "yarn" and original and (factor := ropes.get("factor")):
        return int(factor * original)
    return context


def nested(keys: SimpleNamespace) -> list[dict[str, Any]]:
    """The rotary settings of each kind of layers; empty if there is one for all layers."""
    kinds = getattr(keys, "layer_types", None) or ()
    return [value for key, value in keys.rope_parameters.items() if key in kinds and value is not None]


def check_rope(parameters: Mapping[str, Any]) -> None:
    """Refuse rotary settings that lack a key, or have a text in place of a number."""
    kind = parameters.get("rope_type") or "default"
    if missing := NEEDED.get(kind, set()) - set(parameters):
        raise SpecbeamError(f"the rotary scaling {kind!r} of config.json lacks {', '.join(sorted(missing))}")
    for key, value in parameters.items():
        if isinstance(value, str) and key not in ("rope_type", "type"):
            raise SpecbeamError(f"the rotary scaling of config.json says {key} = {value[:80]!r}, which is no number")


class Metadata(dict[str, Any]):
    """The keys of a GGUF file that are about its architecture. It knows which of them were read.

    Attributes:
        architecture: ``general.architecture``, with which these keys begin in the file. Here they are without it.
        read: the keys that were asked for.
        tensors: the names of all tensors.
        in_layers: the names of the tensors in the file's layers, without ``blk.N.``.
    """

    def __init__(self, architecture: str, metadata: Mapping[str, Any], tensors: Iterable[str] = ()) -> None:
        prefix = f"{architecture}."
        super().__init__((k.removeprefix(prefix), value) for k, value in metadata.items() if k.startswith(prefix))
        self.architecture = architecture
        self.read: set[str] = set()
        self.tensors = frozenset(tensors)
        self.in_layers = {name.split(".", 2)[-1] for name in self.tensors if name.startswith("blk.")}

    def name(self, key: str) -> str:
        """A key as the file has it."""
        return f"{self.architecture}.{key}"

    def need(self, key: str, *otherwise: Any) -> Any:
        """The value of a key, or its default. Raises SpecbeamError if it has neither."""
        self.read.add(key)
        if key in self:
            return self[key]
        if not otherwise:
            raise SpecbeamError(
                f"the GGUF file has no {self.name(key)}: it is not a complete {self.architecture} model"
            )
        return otherwise[0]

    def of_layer(self, number: int, key: str, *otherwise: Any) -> Any:
        """The value of a key for one layer. A file may give it once for all layers."""
        value = self.need(key, *otherwise)
        if not isinstance(value, list):
            return value
        if len(value) != (layers := self.need("block_count")):
            raise SpecbeamError(f"{self.name(key)} has {len(value)} values, but the model has {layers} layers")
        return value[number]

    def slides(self, number: int, period: int) -> bool:
        """Whether a layer has a window, in models where the last layer of each group sees the whole text.

        Args:
            period: the layers of a group, unless the file says otherwise.

        Raises:
            SpecbeamError: the file lists the layers, and llama.cpp does not take them from the list.
        """
        key = "attention.sliding_window_pattern"
        if isinstance(self.need(key, period), list):  # one entry for each layer, true where it slides
            if bool(self.of_layer(number, key)) != bool((number + 1) % period):
                raise SpecbeamError(
                    f"{self.name(key)} lists other layers than {self.architecture} has, which is not supported"
                )
        else:
            period = size(key, self.need(key, period))
        return (number + 1) % period != 0

    def require(self, key: str, expected: int) -> None:
        """Raises SpecbeamError if a key has another value than this. It may be missing."""
        if (value := self.need(key, expected)) != expected:
            raise SpecbeamError(f"{self.name(key)} = {value} is not supported: it must be {expected} here")


class Usual(NamedTuple):
    """Functions that make parts by the rules that all architectures share. Keywords are other values of fields."""

    attention: partial[Attention]
    mlp: partial[MLP]
    experts: partial[Experts]
    shared_expert: partial[SharedExpert]


class Architecture:
    """A transformer as checkpoints name and describe it. A subclass states how it differs from Llama.

    Attributes:
        name: ``model_type`` in config.json.
        gguf_name: ``general.architecture`` in GGUF files; None if its files carry the name of another architecture.
        keys: the keys of its config.json that are read beside :data:`COMMON`, or have another type or default than
            there. transformers has the same types and defaults.
        sizes: the defaults of :data:`SIZES` in transformers, in their order. The ``text_config`` of a model that also
            reads images or audio may leave them out. Empty if it must have them.
        older_names: older names of keys, by the newer ones.
        derived_sizes: keys of :data:`SIZES` that its config.json may leave out, because others say them.
        rope_theta: the default of this key.
        tokenizer_class: of its folders, as transformers knows it; None if it knows none.
        attention, mlp, experts, shared_expert, features: fields of :class:`Attention`, :class:`MLP`, :class:`Experts`,
            :class:`SharedExpert` and :class:`Config` that all its models share. A config.json names its activation
            itself.
        has_experts: whether its GGUF files may have experts.
        yarn_truncated: whether YaRN's blend in its GGUF files begins and ends at integers of features.
        layer_kinds: the values of ``layer_types`` in config.json that it has.
        allowed_flags: values of keys of config.json that are true, and change no text.
        has_heads_by_kind: whether the heads of layers with a window have sizes of their own, which its GGUF files name.
        folder_tensors: for each module of ours, the name of the module in a folder's files. N stands for the layer.
            ``{q,k,v}`` stands for several modules, whose rows are stacked in this order. ``*`` stands for all experts,
            also where one tensor has them all. Experts without it are stacked in all folders. A name that ends with
            ``!`` is that of a tensor; other tensors have ``.weight`` or ``.bias`` after the name of their module.
        gguf_keys: the keys that only its GGUF files have, with the types that llama.cpp takes.
        gguf_tensors: the same as ``folder_tensors`` for GGUF files.
        folder_renamed: pieces of the names of tensors that some folders have, and what ``folder_tensors`` has in their
            place.
        experts_transposed: where a folder stacks the matrices of experts, they are [in, out], and the rows of gate and
            up alternate.
        folder_ignored, gguf_ignored: ends of the names of tensors in files that are no parameters.
        folder_zeros, gguf_zeros: ends of the names of biases that a folder or a GGUF file leaves out, because they are
            zeros.
        ctranslate2_spec, ctranslate2_revision: the specification in files of CTranslate2, and its revision; None if
            there is none.
        ctranslate2_tensors: the names of modules in these files, as in ``folder_tensors``.
        ctranslate2_ignored: tensors in these files that are no parameters.
        ctranslate2_numbers: the numbers in these files, with the value that a model must have; None for any.
    """

    name: ClassVar[str]
    gguf_name: ClassVar[str | None]
    keys: ClassVar[Keys] = {}
    sizes: ClassVar[tuple[int, ...]] = ()
    older_names: ClassVar[dict[str, str]] = {}
    derived_sizes: ClassVar[tuple[str, ...]] = ()
    rope_theta: ClassVar[float] = 10_000.0
    tokenizer_class: ClassVar[str | None] = None
    turn_end: ClassVar[str | None] = None
    attention: ClassVar[dict[str, Any]] = {}
    mlp: ClassVar[dict[str, Any]] = {}
    experts: ClassVar[dict[str, Any]] = {}
    shared_expert: ClassVar[dict[str, Any]] = {}
    has_experts: ClassVar[bool] = False
    yarn_truncated: ClassVar[bool] = True
    features: ClassVar[dict[str, Any]] = {}
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    allowed_flags: ClassVar[dict[str, tuple[str, ...]]] = {}
    has_heads_by_kind: ClassVar[bool] = False
    folder_tensors: ClassVar[dict[str, str]] = {
        "embedding": "model.embed_tokens",
        "blocks.N.attention_norm": "model.layers.N.input_layernorm",
        "blocks.N.attention.qkv": "model.layers.N.self_attn.{q,k,v}_proj",
        "blocks.N.attention.q_norm": "model.layers.N.self_attn.q_norm",
        "blocks.N.attention.k_norm": "model.layers.N.self_attn.k_norm",
        "blocks.N.attention.output": "model.layers.N.self_attn.o_proj",
        "blocks.N.mlp_norm": "model.layers.N.post_attention_layernorm",
        "blocks.N.mlp.gate_up": "model.layers.N.mlp.{gate,up}_proj",
        "blocks.N.mlp.down": "model.layers.N.mlp.down_proj",
        "blocks.N.experts_norm": "model.layers.N.post_attention_layernorm",
        "blocks.N.experts.router": "model.layers.N.mlp.gate",
        "blocks.N.experts.gate": "model.layers.N.mlp.experts.*.gate_proj",
        "blocks.N.experts.up": "model.layers.N.mlp.experts.*.up_proj",
        "blocks.N.experts.down": "model.layers.N.mlp.experts.*.down_proj",
        "norm": "model.norm",
        "head": "lm_head",
    }
    gguf_keys: ClassVar[dict[str, tuple[str, ...]]] = {}
    gguf_tensors: ClassVar[dict[str, str]] = {
        "embedding": "token_embd",
        "positions": "position_embd",
        "blocks.N.attention_norm": "blk.N.attn_norm",
        "blocks.N.attention.qkv": "blk.N.attn_{q,k,v}",
        "blocks.N.attention.q_norm": "blk.N.attn_q_norm",
        "blocks.N.attention.k_norm": "blk.N.attn_k_norm",
        "blocks.N.attention.output": "blk.N.attn_output",
        "blocks.N.post_attention_norm": "blk.N.post_attention_norm",
        "blocks.N.mlp_norm": "blk.N.ffn_norm",
        "blocks.N.mlp.gate_up": "blk.N.ffn_{gate,up}",
        "blocks.N.mlp.up": "blk.N.ffn_up",
        "blocks.N.mlp.down": "blk.N.ffn_down",
        "blocks.N.post_mlp_norm": "blk.N.post_ffw_norm",
        "blocks.N.experts_norm": "blk.N.ffn_norm",
        "blocks.N.experts.router": "blk.N.ffn_gate_inp",
        "blocks.N.experts.selection_bias": "blk.N.exp_probs_b.bias!",
        "blocks.N.experts.gate": "blk.N.ffn_gate_exps",
        "blocks.N.experts.up": "blk.N.ffn_up_exps",
        "blocks.N.experts.down": "blk.N.ffn_down_exps",
        "blocks.N.shared_expert.gate_up": "blk.N.ffn_{gate,up}_shexp",
        "blocks.N.shared_expert.down": "blk.N.ffn_down_shexp",
        "blocks.N.shared_expert.output_gate": "blk.N.ffn_gate_inp_shexp",
        "norm": "output_norm",
        "head": "output",
    }
    folder_renamed: ClassVar[dict[str, str]] = {}
    experts_transposed: ClassVar[bool] = False
    folder_ignored: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)
    gguf_ignored: ClassVar[tuple[str, ...]] = ()
    folder_zeros: ClassVar[tuple[str, ...]] = ()
    gguf_zeros: ClassVar[tuple[str, ...]] = ()
    ctranslate2_spec: ClassVar[str | None] = None
    ctranslate2_revision: ClassVar[int] = 0
    ctranslate2_tensors: ClassVar[dict[str, str]] = {}
    ctranslate2_ignored: ClassVar[tuple[str, ...]] = ()
    ctranslate2_numbers: ClassVar[dict[str, float | None]] = {}

    @property
    def has_rope(self) -> bool:
        """Whether its layers rotate queries and keys."""
        stem: TokenStem = self.features.get("stem", PLAIN_STEM)
        return not stem.learned_positions

    def derive(self, keys: SimpleNamespace) -> None:
        """Give keys of a config.json the values that follow from other keys.

        Raises:
            SpecbeamError: keys contradict each other.
        """
        if keys.num_key_value_heads is None:
            keys.num_key_value_heads = keys.num_attention_heads

    def rope_parameters(self, keys: SimpleNamespace) -> dict[str, Any]:
        """The rotary settings of a config.json as transformers 5 has them. They may be nested by kinds of layers."""
        return rope_parameters(keys, self.rope_theta)

    def folder_head_dim(self, number: int, usual: int, keys: SimpleNamespace) -> int:
        """The features of a head in a layer of a folder.

        Args:
            usual: of other architectures.
            keys: of config.json, with defaults.
        """
        return usual

    def folder_layer(self, number: int, usual: Usual, keys: SimpleNamespace) -> Layer:
        """The parts of a layer of a folder.

        Args:
            usual: what other architectures have there.
            keys: of config.json, with defaults.
        """
        return usual.attention(), usual.mlp()

    def gguf_layer(self, number: int, usual: Usual, metadata: Metadata) -> Layer:
        """The parts of a layer of a GGUF file. Arguments as for :meth:`folder_layer`, and the keys of the file."""
        return usual.attention(), usual.mlp()

    def refine_folder_config(self, config: Config, keys: SimpleNamespace) -> Config:
        """Add to a configuration the options of config.json beside its layers that only this architecture has.

        Args:
            config: read by the rules that all architectures share.
            keys: of the file, with defaults.
        """
        return config

    def refine_gguf_config(self, config: Config, metadata: Metadata) -> Config:
        """Add to a configuration the facts beside its layers that its GGUF files leave out, or only they have.

        Args:
            config: read by the rules that all architectures share.
            metadata: the file's keys for this architecture.
        """
        return config

    def keys_of_ctranslate2(
        self, shape: Callable[[str, int], tuple[int, ...]], numbers: Mapping[str, float], names: Iterable[str]
    ) -> dict[str, Any]:
        """What the config.json of a model would say, by the shapes in its file of CTranslate2.

        Args:
            shape: the shape of a variable, which must have a number of dimensions.
            numbers: the variables that are one number.
            names: of all variables.

        Raises:
            SpecbeamError: there is no such variable or number.
        """
        raise NotImplementedError

    def stores_transposed(self, source: str) -> bool:
        """Whether a folder stores this tensor as [in, out]."""
        return False

    def folder_values(self, source: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Our values of some rows of a tensor in a folder, or in a file of CTranslate2 that is made of one.

        Args:
            source: the name of the tensor, with points.
            values: [rows, ...] as the files have them. The filters of a convolution are [rows, in, size].

        Returns: as many. The numbers of each row are in our order.
        """
        return values

    def folder_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        """For each row of a tensor in our order, the row in a folder's tensor; None for the same order.

        Args:
            part: to which the tensor belongs; None for a tensor outside of all layers.
        """
        return None

    def gguf_rows(self, source: str, part: Part | None) -> NDArray[np.int64] | None:
        """The same for a tensor of a GGUF file."""
        return None


def require_whole_heads(keys: SimpleNamespace) -> None:
    """Raises SpecbeamError if hidden_size is no multiple of the number of heads. Not all architectures ask for that."""
    if keys.hidden_size % keys.num_attention_heads:
        raise SpecbeamError(
            f"config.json says hidden_size = {keys.hidden_size}, which is no multiple of its "
            f"{keys.num_attention_heads} heads"
        )


def windows_above(keys: SimpleNamespace) -> None:
    """Give the layers from ``max_window_layers`` on a window, where windows are in use (Qwen)."""
    keys.sliding_window = keys.sliding_window if keys.use_sliding_window else None
    if keys.layer_types is None:
        first = keys.max_window_layers if keys.sliding_window is not None else keys.num_hidden_layers
        kinds = ("full_attention", "sliding_attention")
        keys.layer_types = [kinds[i >= first] for i in range(keys.num_hidden_layers)]


def tensor_names(parameter: str, modules: Mapping[str, str]) -> list[str]:
    """The tensors of a file whose rows are stacked to one parameter of ours.

    Args:
        parameter: such as ``blocks.3.mlp.down.weight`` or ``encoder.norm.bias``.
        modules: ``folder_tensors`` or ``gguf_tensors`` of an architecture.
    """
    module, _, kind = parameter.rpartition(".")
    block = re.fullmatch(r"(.*\bblocks\.)(\d+)(\..*)", module)
    theirs = modules[f"{block[1]}N{block[3]}"] if block else modules[module]
    if block:
        theirs = re.sub(r"(?<![^\W_])N\b", block[2], theirs)
    several = re.fullmatch(r"(.*)\{(.*)\}(.*)", theirs)
    stacked = [several[1] + part + several[3] for part in several[2].split(",")] if several else [theirs]
    return [name.removesuffix("!") if name.endswith("!") else f"{name}.{kind}" for name in stacked]
