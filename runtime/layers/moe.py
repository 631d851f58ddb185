"""Mixtures of experts: each token goes through a few of many feed-forward layers.

T tokens, E experts, k of them a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import nn

from ...kernels import ops
from ...kernels.linear import LinearKernels
from ...kernels.step_parts import MixtureParts, NoParts, part_or_none
from .linear import Linear, Stretch


class Routing(NamedTuple):
    """How experts are chosen.

    A token's scores are the softmax over all experts, or each one's sigmoid. `num_groups` above 1:
    experts lie in so many groups, of which the `top_groups` are left whose `group_best` best have
    the largest sum (two in DeepSeek V3, arXiv:2412.19437; one in V2). The weights are the scores of
    those that are chosen, divided by their sum and `least_sum` where they are `renormalized`, times
    `scale`.
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
        """Raises `ValueError` for numbers that no model can have."""
        experts, groups = self.num_experts, self.num_groups
        if experts > _MOST_EXPERTS:
            raise ValueError(
                f"{experts} experts a layer are more than {_MOST_EXPERTS}; fetch the model again"
            )
        if not 1 <= self.top_k <= experts:
            raise ValueError(
                f"{self.top_k} of {experts} experts a token make no sense; fetch the model again"
            )
        fits = groups >= 1 and experts % groups == 0 and 1 <= self.top_groups <= groups
        each = experts // max(groups, 1)
        if not fits or (
            groups > 1 and (each < self.group_best or self.top_groups * each < self.top_k)
        ):
            raise ValueError(
                f"{self.top_groups} of {groups} groups of {experts} experts make no sense; fetch "
                "the model again"
            )
        return self


_MOST_EXPERTS = 4096
"""Lists are made for each before a file of weights is looked into."""


class Router(Linear):
    """x [T, hidden] to the ids of the chosen experts [T, k] int64 and their weights [T, k] float32.

    `correction`: the layer has a number for each expert that is added to its score while experts
    are chosen, and not in the weights.
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
        routing, logits = self.routing, self(x).float()
        scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias
        if routing.num_groups > 1:
            groups = choice.unflatten(-1, (routing.num_groups, -1))
            best = groups.topk(routing.group_best, dim=-1).values.sum(-1)
            best = best.topk(routing.top_groups, dim=-1).indices
            is_left = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            choice = groups.masked_fill(~is_left.unsqueeze(-1), float("-inf")).flatten(-2)
        ids = choice.topk(routing.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if routing.renormalized:
            weights = weights / (weights.sum(-1, keepdim=True) + routing.least_sum)
        return ids, weights if routing.scale == 1.0 else weights * routing.scale


class ExpertLinear(Linear):
    """Projections of all experts as one weight, those of expert after expert. `parts`: of one
    expert, the checkpoint's names and rows; "3.up_proj" is what expert 3 has of it. `absent`: what
    other ranks have.
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
        """From now on the layer has these experts, and of each part these rows."""
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
        return kernels if kernels is not None and kernels.takes_experts(sizes) else None

    @property
    def group(self) -> int:
        """Columns of x that are quantised by one scale; 0 where it is not."""
        return 0 if self.input is None else self.input.group or self.in_features

    @property
    def input_numbers(self) -> torch.Tensor | None:
        """The scale that x is quantised by, where the checkpoint has it."""
        return None if self.input is None else self.input.scale


class FusedMoE(nn.Module):
    """The sum of what a token's experts make of it, weighted: x, ids and weights of a `Router` to
    [T, hidden].

    `names`: of gate, up and down projection in the checkpoint. `activation`: of the gate; no kernel
    has another than silu. "relu2": there is no gate, and the ups are squared ReLUs. `limit`,
    `weighs_input`: as `reference.fused_moe`. `first` [1] int64: the first expert of this rank,
    where it has not all.
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
                f"experts of {intermediate_size} columns make no sense; fetch the model again"
            )
        if activation not in ("silu", "relu2"):
            raise ValueError(
                f"experts with the activation {activation!r} are not supported; choose another "
                "model"
            )
        self.num_experts, self.limit, self.weighs_input = num_experts, limit, weighs_input
        self.register_buffer("first", None)
        gate, up, down = names
        parts = dict.fromkeys((up,) if activation == "relu2" else (gate, up), intermediate_size)
        self.gate_up_proj = ExpertLinear(num_experts, hidden_size, parts, bias=bias)
        self.down_proj = ExpertLinear(
            num_experts, intermediate_size, {down: hidden_size}, bias=bias
        )

    def hold(self, experts: Stretch, columns: Stretch) -> None:
        """From now on the layer has these experts, and of each these columns between gate and down:
        before its weights are created. Its result is a summand of the whole's.
        """
        held = range(experts.begin, experts.begin + experts.size)
        self.gate_up_proj.hold_experts(held, columns)
        self.down_proj.hold_experts(held)
        self.down_proj.hold_columns(columns)
        self.num_experts = experts.size
        if experts.size < experts.whole:
            # No constant: it would be one of the traced forward.
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
        """Raises `ValueError` where finished weights are not of one kind."""
        both = self.gate_up_proj, self.down_proj
        packed = {linear.op is not None for linear in both}
        if len(packed) > 1 or any(hasattr(linear, "input_order") for linear in both):
            raise ValueError(
                f"{name}: nothing multiplies experts whose weights are {both[0].method.kind} and "
                f"{both[1].method.kind} here; take --quantization none"
            )


class SparseMoE(nn.Module):
    """A feed-forward layer of experts, and of one that every token goes through, where there is
    such.
    """

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
