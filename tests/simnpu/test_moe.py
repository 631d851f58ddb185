"""Layers of experts on an NPU: one product for all groups of rows, or plain torch; no waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecework.kernels import ops, reference
from piecework.kernels.npu.platform import NpuPlatform


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_it_is_the_reference_and_can_be_recorded(simnpu: Any, dtype: torch.dtype) -> None:
    NpuPlatform().set_up(None)
    experts, size, width, tokens = 4, 32, 16, 7
    make = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make).to(dtype)

    # One more than there are: it is another rank's.
    weights, ids = torch.rand(tokens, experts + 1, generator=make).topk(2, dim=-1)
    given = [
        normal(tokens, size),
        ids,
        weights,
        normal(experts * 2 * width, size),
        normal(experts * 2 * width),
        normal(experts * size, width),
        normal(experts * size),
    ]
    expected = reference.fused_moe(*given, 1.5, False)
    on_device = [tensor.to("npu") for tensor in given]
    with simnpu.no_waiting():
        found = ops.fused_moe(*on_device, 1.5, False)
    torch.testing.assert_close(
        found.cpu(), expected, rtol=0.05, atol=0.05 * float(expected.abs().max())
    )
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        ops.fused_moe(*on_device, 1.5, False)
    names = [name for name in simnpu.launches(graph) if "npu_grouped_matmul" in name]
    assert len(names) == (2 if dtype == torch.bfloat16 else 0)
