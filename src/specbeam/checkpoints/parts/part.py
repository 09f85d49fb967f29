"""What every part of a layer says of itself, and the helpers with which parts say it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol

from specbeam.errors import SpecbeamError
from specbeam.system.numbers import is_integer

MAX_SIZE = 2**31 - 1
"""The largest size that is believed."""


class Parameter(NamedTuple):
    """One parameter of a model.

    Attributes:
        shape: [out, in] of a matrix, [n] of a vector, or [experts, out, in] of a matrix for each expert.
        rows: of the matrices that are stacked to it, such as query, key and value. Empty for a matrix that is one.
        min_bits: a quantized model keeps at least this many bits per weight: 4, 8 or 32.
        mapped: it is a table that stays in the checkpoint's file, from which only the rows are read that a pass needs.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...] = ()
    min_bits: int = 4
    mapped: bool = False


Parameters = Iterator[tuple[str, Parameter]]
"""Parameters with their names, in the order in which packed weights have them."""


class Sizes(Protocol):
    """What a part asks of its model: some fields of :class:`Config`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def per_layer_size(self) -> int | None: ...
    @property
    def norm(self) -> str: ...
    @property
    def encoder(self) -> Sizes | None: ...


class Memory(NamedTuple):
    """What a part keeps of each token for later ones.

    Attributes:
        numbers: how many numbers, such as keys and values.
        reach: a node reads the numbers of this many last positions, its own included; None for all positions.
    """

    numbers: int = 0
    reach: int | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One step of a layer. What it makes of the hidden states is added to them.

    Attributes:
        norm: its input is normed. A part without a norm reads the hidden states as they are. If it is parallel, it
            reads what the part before it has read.
        output_norm: its output is normed before it is added.
        output_scale: factor of its output, after this norm.
        joint_norm: its output and that of the part before, whose input it reads too, are added, and the sum is normed
            before it is added to the hidden states.
        sum_norm: the sum of the hidden states and its output is normed (post-norm; Vaswani et al. 2017).
        sum_scale: the sum is multiplied by a number, which is a parameter.
        parallel: it reads the same hidden states as the part before it, without what that part adds.
    """

    name: ClassVar[str]
    """In the names of its parameters, and of its code in native/parts/."""
    norm: bool = True
    output_norm: bool = False
    output_scale: float = 1.0
    joint_norm: bool = False
    sum_norm: bool = False
    sum_scale: bool = False
    parallel: bool = False

    def __post_init__(self) -> None:
        check_numbers(self)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.name.replace("_", " ")

    def check(self, config: Sizes, before: Part | None, earlier: Sequence[tuple[Part, ...]]) -> None:
        """Raises SpecbeamError if it cannot stand where it does in a layer.

        Args:
            before: the part before it in its layer; None for the first.
            earlier: the layers before its own.
        """
        if self.parallel and before is None:
            raise SpecbeamError(f"the model's configuration has a layer that begins with a parallel {self.title}")
        if self.joint_norm and (not self.parallel or before is None or before.sum_norm or before.sum_scale):
            raise SpecbeamError(
                f"the model's configuration norms the output of the {self.title} together with that of a part that "
                "reads other hidden states, or whose sum is normed or scaled"
            )

    def memory(self, config: Sizes) -> Memory:
        """What it keeps of each token. Most parts keep nothing."""
        return Memory()

    def weights(self, config: Sizes) -> Parameters:
        """Its own parameters, without its name."""
        raise NotImplementedError

    def parameters(self, config: Sizes) -> Parameters:
        """All of its parameters in a layer."""
        if self.norm:
            yield from norm(f"{self.name}_norm", config.hidden_size, config)
        for name, parameter in self.weights(config):
            yield f"{self.name}.{name}", parameter
        if self.output_norm:
            yield from norm(f"post_{self.name}_norm", config.hidden_size, config)
        if self.joint_norm:
            yield from norm(f"{self.name}_joint_norm", config.hidden_size, config)
        if self.sum_norm:
            yield from norm(f"{self.name}_sum_norm", config.hidden_size, config)
        if self.sum_scale:
            yield f"{self.name}_sum_scale.weight", Parameter((1,))


def product(name: str, rows: int | tuple[int, ...], columns: int, bias: bool = False, min_bits: int = 4) -> Parameters:
    """The matrix of a product, and its bias if it has one.

    Args:
        rows: several for matrices that are stacked.
    """
    stacked = rows if isinstance(rows, tuple) else ()
    total = sum(rows) if isinstance(rows, tuple) else rows
    yield f"{name}.weight", Parameter((total, columns), stacked, min_bits)
    if bias:
        yield f"{name}.bias", Parameter((total,), stacked)


def norm(name: str, size: int, config: Sizes) -> Parameters:
    """The weight of a norm, and the bias of a LayerNorm."""
    yield f"{name}.weight", Parameter((size,))
    if config.norm == "layer":
        yield f"{name}.bias", Parameter((size,))


def check_numbers(described: Any) -> None:
    """Raises SpecbeamError for a field of floats that is no positive number."""
    numbers = (getattr(described, field.name) for field in fields(described) if "float" in str(field.type))
    for number in (n for n in numbers if n is not None):
        if not (math.isfinite(number) and number > 0):
            raise SpecbeamError(
                f"the model's configuration has the number {number} for its norms, scales or caps: all must be over 0"
            )


def size(name: str, value: Any, maximum: int = MAX_SIZE) -> int:
    """The value, if it is a size. Raises SpecbeamError if it is not."""
    if not is_integer(value) or not 0 < value <= maximum:
        raise SpecbeamError(f"the model's configuration says {name} = {value!r}, which is no size")
    return value
