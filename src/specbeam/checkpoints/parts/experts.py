"""A mixture of experts, which stands in place of an MLP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from specbeam.checkpoints.parts.part import Parameter, Parameters, Part, Sizes, norm, product, size
from specbeam.errors import SpecbeamError

MAX_EXPERTS = 4096
"""The most experts of a layer. It is at most a few hundred in all models."""
SCORINGS = ("softmax", "sigmoid")


class ExpertUse(NamedTuple):
    """What a pass reads of experts.

    Attributes:
        share: of the weights that a pass over one node reads, the weights of its experts.
        num_experts, experts_per_token: of a layer, on average over the layers with experts.
    """

    share: float
    num_experts: float
    experts_per_token: float

    def growth(self, nodes: float) -> float:
        """How many times as many experts a pass over this many nodes reads as one over one node.

        Nodes are taken to choose their experts independently, and all experts equally often.
        """
        used = self.experts_per_token / self.num_experts
        return (1 - (1 - used) ** nodes) / used


@dataclass(frozen=True, kw_only=True)
class Experts(Part):
    """A router gives each node a few of many gated MLPs, and adds their outputs with weights (Shazeer et al. 2017).

    A router has a logit for each expert. A node gets the experts with the highest scores; of equal scores,
    the lower experts. Its outputs are added in the order of the experts, so they do not depend on other nodes.

    Attributes:
        experts_per_token: how many experts a node has.
        intermediate_size: of an expert.
        activation: as in an MLP.
        scoring: a score is the softmax over all experts, or the sigmoid of its logit (DeepSeek-AI 2024).
        selection_bias: a number for each expert is added to the scores, for the choice of experts alone.
        normalized: the scores of a node's experts, as weights, are divided by their sum.
        sum_epsilon: is added to that sum, where the scores are sigmoids.
        weight_scale: factor of the weights.
        expert_scale: a number for each expert is one more factor of its weight.
        router_scale: factor of the router's logits.
        own_norms: it reads the hidden states as they are, and norms them with one weight for the router and with
            another one for the experts (Gemma Team 2026).
        router_bias, bias: the product of the router has a bias; the products of the experts have biases.
        swiglu_limit: the clamped activation of gpt-oss (OpenAI 2025) in place of ``activation``. The gate is at most
            the limit, the values are between both limits, and gate * sigmoid(swiglu_alpha * gate) is multiplied by the
            values + 1. None for no limit.
    """

    name: ClassVar = "experts"
    num_experts: int
    experts_per_token: int
    intermediate_size: int
    activation: str = "silu"
    scoring: str = "softmax"
    selection_bias: bool = False
    normalized: bool = False
    sum_epsilon: float = 1e-6
    weight_scale: float = 1.0
    expert_scale: bool = False
    router_scale: float = 1.0
    own_norms: bool = False
    router_bias: bool = False
    bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        size("num_experts", self.num_experts, MAX_EXPERTS)
        size("num_experts_per_tok", self.experts_per_token)
        size("intermediate_size of an expert", self.intermediate_size)
        if self.experts_per_token > self.num_experts:
            raise SpecbeamError(
                f"the model's configuration gives each token {self.experts_per_token} experts, but has "
                f"{self.num_experts}"
            )
        if self.own_norms and self.norm:
            raise SpecbeamError("the model's configuration norms the input of experts twice")
        if self.scoring not in SCORINGS:
            raise SpecbeamError(
                f"the model's configuration has the unknown router {self.scoring!r}: known are {', '.join(SCORINGS)}"
            )

    def weights(self, config: Sizes) -> Parameters:
        experts, inner, hidden = self.num_experts, self.intermediate_size, config.hidden_size
        if self.own_norms:
            yield from norm("router_norm", hidden, config)
            yield from norm("input_norm", hidden, config)
        yield from product("router", experts, hidden, self.router_bias, min_bits=32)
        if self.selection_bias:
            yield "selection_bias.weight", Parameter((experts,))
        if self.expert_scale:
            yield "expert_scale.weight", Parameter((experts,))
        for name, out, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            yield f"{name}.weight", Parameter((experts, out, columns))
            if self.bias:
                yield f"{name}.bias", Parameter((experts * out,))
