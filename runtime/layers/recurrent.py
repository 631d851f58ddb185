"""Layers with a recurrent state as ops.

Only these ops read and write the states of requests (`current_states`). Graphs are cut at them, as
at attention.

Shapes: T tokens, C channels, K columns of a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...compilation.core.split_ops import Implementation, register_split_op
from ...kernels import recurrent
from ...kernels.recurrent_steps import DeltaWeights, Mamba2Weights, ScanWeights, States
from ..core.forward_context import current_states, layer_begins
from .linear import Stretch

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]


class CausalConv(nn.Module):
    """The weight [C, 1, K] and bias [C] float32 of a convolution of each channel over its last K
    tokens.
    """

    def __init__(self, channels: int, width: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = float_weight(channels, 1, width)
        self.bias = float_weight(channels) if bias else None
        self.held_rows: Sequence[Stretch] | None = None

    def hold_rows(self, rows: Sequence[Stretch]) -> None:
        """Keep only the weights of these channels, for a layer that is split over ranks."""
        self.held_rows, channels = rows, sum(stretch.size for stretch in rows)
        self.weight = float_weight(channels, *self.weight.shape[1:])
        self.bias = None if self.bias is None else float_weight(channels)


def float_weight(*shape: int) -> nn.Parameter:
    """Return an uninitialised float32 parameter, because the states it is used with are float32."""
    return nn.Parameter(torch.empty(*shape, dtype=torch.float32), requires_grad=False)


def _causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    layer: int,
) -> None:
    layer_begins()
    # The layer may have more states, which its other ops read.
    (states, *_), metadata = current_states(layer)
    recurrent.causal_conv(x, weight.flatten(1), bias, out, states, metadata.plan)


def _mamba2(
    x: torch.Tensor,
    dt: torch.Tensor,
    conv: torch.Tensor,
    conv_bias: torch.Tensor | None,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    least_dt: float,
    most_dt: float,
    layer: int,
) -> None:
    layer_begins()
    states, metadata = current_states(layer)
    weights = Mamba2Weights(
        conv.flatten(1), conv_bias, -a_log.exp(), d, dt_bias, (least_dt, most_dt)
    )
    recurrent.mamba2(x, dt, weights, out, States(*states), metadata.plan)


def _lightning_attention(
    x: torch.Tensor, log_decay: torch.Tensor, out: torch.Tensor, layer: int
) -> None:
    layer_begins()
    (states,), metadata = current_states(layer)
    recurrent.lightning_attention(x, log_decay, out, states, metadata.plan)


def _gated_delta_net(
    x: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    most_written: float,
    layer: int,
) -> None:
    layer_begins()
    states, metadata = current_states(layer)
    weights = DeltaWeights(conv.flatten(1), -a_log.exp(), dt_bias.flatten(), most_written)
    recurrent.gated_delta_net(x, b, a, weights, out, States(*states), metadata.plan)


def _selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
    layer: int,
) -> None:
    layer_begins()
    (_, states), metadata = current_states(layer)
    weights = ScanWeights(a, d, dt_bias)
    recurrent.selective_scan(x, dt, b, c, weights, out, states, metadata.plan)


_OPS: dict[str, tuple[str, Implementation]] = {
    "causal_conv": (
        "(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, int layer) -> ()",
        _causal_conv,
    ),
    "mamba2": (
        "(Tensor x, Tensor dt, Tensor conv, Tensor? conv_bias, Tensor a_log, Tensor d, "
        "Tensor dt_bias, Tensor(a!) out, float least_dt, float most_dt, int layer) -> ()",
        _mamba2,
    ),
    "lightning_attention": (
        "(Tensor x, Tensor log_decay, Tensor(a!) out, int layer) -> ()",
        _lightning_attention,
    ),
    "gated_delta_net": (
        "(Tensor x, Tensor b, Tensor a, Tensor conv, Tensor a_log, Tensor dt_bias, "
        "Tensor(a!) out, float most_written, int layer) -> ()",
        _gated_delta_net,
    ),
    "selective_scan": (
        "(Tensor x, Tensor dt, Tensor b, Tensor c, Tensor a, Tensor d, Tensor dt_bias, "
        "Tensor(a!) out, int layer) -> ()",
        _selective_scan,
    ),
}
for _name, (_signature, _run) in _OPS.items():
    _LIBRARY.define(_name + _signature)  # type: ignore[no-untyped-call]
    _kernel = register_split_op(f"piecework::{_name}", _run)
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, lambda *arguments: None, "Meta")  # type: ignore[no-untyped-call]
