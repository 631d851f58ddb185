"""Mixtures of experts: each token passes a few of many feed-forward layers.

Shapes: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import nn

from ...kernels import ops
from ...kernels.experts import GELU
from ...kernels.linear import LinearKernels
from ...kernels.step_parts import MixtureParts, NoParts, part_or_none
from .linear import Linear, Stretch


class Routing(NamedTuple):
    """How the experts of a token are chosen.

    Attributes:
        scoring: Scores are the softmax over all experts, or the sigmoid of each logit.
        renormalized: Whether the weights are divided by their sum plus `least_sum`.
        num_groups: If this is above 1, experts lie in groups, and only the experts of the best
            `top_groups` groups are candidates.
        group_best: A group is rated by the sum of its `group_best` best scores: 2 in DeepSeek V3
            (arXiv:2412.19437), 1 in V2.
        scale: Factor of the weights.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalized: bool = True
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    group_best: int = 2
    least_sum: float = 1e-20

    def check(self) -> Routing:
        """Return self. Raise `ValueError` for numbers that no model can have."""
        experts, groups = self.num_experts, self.num_groups
        if experts > _MOST_EXPERTS:
            raise ValueError(
                f"a layer has {experts} experts, but at most {_MOST_EXPERTS} are possible: "
                "config.json is damaged, download the model again"
            )
        if not 1 <= self.top_k <= experts:
            raise ValueError(
                f"num_experts_per_tok is {self.top_k}, but a layer has {experts} experts: "
                "config.json is damaged, download the model again"
            )
        fits = groups >= 1 and experts % groups == 0 and 1 <= self.top_groups <= groups
        group_size = experts // max(groups, 1)
        if not fits or (
            groups > 1
            and (group_size < self.group_best or self.top_groups * group_size < self.top_k)
        ):
            raise ValueError(
                f"a token cannot choose {self.top_groups} of {groups} groups of {experts} experts: "
                "config.json is damaged, download the model again"
            )
        return self


_MOST_EXPERTS = 4096  # Lists with an entry for each expert are made before the weights are read.


class Router(Linear):
    """Maps x [T, hidden] to the chosen experts [T, k] int64 and their weights [T, k] float32.

    If `correction` is set, the layer adds a bias to the score of each expert while experts are
    chosen. The weights do not include this bias.
    """

    stays_in_16_bits = True

    def __init__(
        self,
        hidden_size: int,
        routing: Routing,
        *,
        bias: bool = False,
        correction: bool = False,
    ) -> None:
        super().__init__(hidden_size, routing.check().num_experts, bias=bias)
        self.routing = routing
        self.e_score_correction_bias = (
            nn.Parameter(torch.empty(routing.num_experts, dtype=torch.float32), requires_grad=False)
            if correction
            else None
        )

    def own_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        correction = self.e_score_correction_bias
        return () if correction is None else [("e_score_correction_bias", correction)]

    def choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = self.routing
        return ops.choose_experts(
            self(x),
            self.e_score_correction_bias,
            routing.top_k,
            routing.scoring == "sigmoid",
            routing.renormalized,
            routing.num_groups,
            routing.top_groups,
            routing.group_best,
            routing.scale,
            routing.least_sum,
        )


class ExpertLinear(Linear):
    """The projections of all experts as one weight, expert after expert.

    Attributes:
        parts: Rows by name in the checkpoint: "3.up_proj" belongs to expert 3. The constructor
            takes the parts of one expert.
        absent: Parts that only other ranks hold.
    """

    def __init__(
        self, num_experts: int, in_features: int, parts: Mapping[str, int], *, bias: bool
    ) -> None:
        super().__init__(in_features, num_experts * sum(parts.values()), bias=bias)
        self.parts = {
            f"{expert}.{part}": rows
            for expert in range(num_experts)
            for part, rows in parts.items()
        }
        self.absent: set[str] = set()
        self._lay_out()

    def _lay_out(self) -> None:
        ends = accumulate(self.parts.values())
        self._rows = {
            part: slice(end - size, end)
            for (part, size), end in zip(self.parts.items(), ends, strict=True)
        }

    def rows(self, part: str) -> slice:
        return self._rows[part]

    def hold_experts(self, experts: range, rows: Stretch | None = None) -> None:
        """Keep only these experts, and of each part only these rows."""
        self.absent = {part for part in self.parts if int(part.partition(".")[0]) not in experts}
        held = {part: size for part, size in self.parts.items() if part not in self.absent}
        self.hold_rows({part: rows or Stretch(0, size, size) for part, size in held.items()})
        self._lay_out()

    def pack(
        self,
        kernels: LinearKernels,
        kind: str,
        parts: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor] = (),
    ) -> None:
        super().pack(kernels, kind, parts, scales)
        self.op = kernels.experts_op

    def usable(self, kernels: LinearKernels | None) -> LinearKernels | None:
        sizes = self.in_features, *self.parts.values()
        return None if kernels is None else kernels.experts(sizes)

    @property
    def group(self) -> int:
        """Columns of x that share a scale of quantisation. 0: x is not quantised."""
        return 0 if self.input is None else self.input.group or self.in_features

    @property
    def input_numbers(self) -> torch.Tensor | None:
        """The scale by which x is quantised, if the checkpoint has one."""
        return None if self.input is None else self.input.scale


class FusedMoE(nn.Module):
    """Maps x, and the ids and weights of a `Router`, to the weighted sum of the experts [T,
    hidden].

    Attributes:
        names: Names of the gate, up and down projections in the checkpoint.
        activation: "silu" or "gelu_pytorch_tanh" of the gate, or "relu2": no gate, and the squared
            ReLU of the up projection.
        limit, weighs_input: See `reference.fused_moe`.
        first: [1] int64, the first expert of this rank, if other ranks hold experts.
    """

    first: torch.Tensor | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        *,
        bias: bool = False,
        limit: float = 0.0,
        weighs_input: bool = False,
        activation: str = "silu",
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        super().__init__()
        if intermediate_size < 1:
            raise ValueError(
                f"moe_intermediate_size is {intermediate_size}, but must be at least 1: "
                "config.json is damaged, download the model again"
            )
        if activation not in ("silu", "gelu_pytorch_tanh", "relu2"):
            raise ValueError(
                f"experts with the activation {activation!r} are not supported; choose another "
                "model"
            )
        self.num_experts, self.weighs_input = num_experts, weighs_input
        self.limit = GELU if activation == "gelu_pytorch_tanh" else limit
        self.register_buffer("first", None)
        gate, up, down = names
        parts = dict.fromkeys((up,) if activation == "relu2" else (gate, up), intermediate_size)
        self.gate_up_proj = ExpertLinear(num_experts, hidden_size, parts, bias=bias)
        self.down_proj = ExpertLinear(
            num_experts, intermediate_size, {down: hidden_size}, bias=bias
        )

    def hold(self, experts: Stretch, columns: Stretch) -> None:
        """Keep only these experts, and of each the intermediate columns `columns`.

        Call this before the weights are created. The result is then a summand of the whole layer's
        result.
        """
        held = range(experts.begin, experts.begin + experts.size)
        self.gate_up_proj.hold_experts(held, columns)
        self.down_proj.hold_experts(held)
        self.down_proj.hold_columns(columns)
        self.num_experts = experts.size
        if experts.size < experts.whole:
            # A buffer, because a constant would become part of the traced forward.
            self.first = torch.tensor([experts.begin])

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            ids = ids - self.first
        opened, closed = self.gate_up_proj, self.down_proj
        if opened.op is None:
            return ops.fused_moe(
                x,
                ids,
                weights,
                opened.weight,
                opened.bias,
                closed.weight,
                closed.bias,
                self.limit,
                self.weighs_input,
            )
        assert opened.layout is not None and closed.layout is not None
        result: torch.Tensor = opened.op(
            x,
            ids,
            weights,
            opened.weight,
            opened.bias,
            opened.input_numbers,
            closed.weight,
            closed.bias,
            closed.input_numbers,
            [self.num_experts, closed.in_features, opened.out_features // self.num_experts],
            [opened.layout, closed.layout],
            [opened.group, closed.group],
            self.limit,
            self.weighs_input,
        )
        return result

    def check(self, name: str) -> None:
        """Raise `ValueError` if no kernel multiplies the finished weights together."""
        both = self.gate_up_proj, self.down_proj
        packed = {linear.op is not None for linear in both}
        if len(packed) > 1 or any(hasattr(linear, "input_order") for linear in both):
            raise ValueError(
                f"{name}: no kernel multiplies experts whose weights are {both[0].method.kind} and "
                f"{both[1].method.kind}; use --quantization none"
            )


class SparseMoE(nn.Module):
    """A feed-forward layer of experts, plus optional experts that every token passes."""

    def __init__(
        self, gate: Router, experts: FusedMoE, shared_experts: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts(x, *self.gate.choose(x))
        return result if self.shared_experts is None else result + self.shared_experts(x)

    def step_parts(self) -> MixtureParts:
        if type(self.gate).choose is not Router.choose:
            raise NoParts(type(self.gate).__name__)
        return MixtureParts(self.gate, self.experts, part_or_none(self.shared_experts))
