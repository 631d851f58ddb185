"""The ops that layers call, on an NPU: torch_npu's kernel where it takes the call, plain torch
where not, the numbers the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from piecework.kernels import ops, reference
from piecework.kernels.npu.platform import NpuPlatform

EPS = 1e-5
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def set_up(simnpu: Any) -> None:
    NpuPlatform().set_up(None)


def launches(simnpu: Any, function: Callable[[], Any]) -> list[str]:
    """What a graph of the function launches; nothing in it may wait for the device."""
    with simnpu.no_waiting():
        function()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        function()
    names: list[str] = simnpu.launches(graph)
    return names


def inputs(op: str, rows: int, dtype: torch.dtype, heads: int = 3, size: int = 16) -> list[Any]:
    """What an op is called with, on the host."""
    x, residual = torch.randn(2, rows, heads * size, dtype=dtype)
    weight, head_weight = torch.rand(heads * size, dtype=dtype), torch.rand(size, dtype=dtype)
    angles = torch.rand(rows, 1, size // 2)
    cos, sin = angles.cos(), angles.sin()
    rotation = [torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)]
    q, k = x.view(rows, heads, size), residual.view(rows, heads, size)[:, :1]
    return {
        "rms_norm": [x, weight, EPS],
        "add_rms_norm": [x, residual, weight, EPS],
        "silu_and_mul": [x],
        "rotary_embedding": [q, *rotation],
        "norm_rotary_embedding": [q, k, head_weight, head_weight, EPS, *rotation],
    }[op]


def on_npu(arguments: list[Any]) -> list[Any]:
    """Views stay views."""
    return [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="npu").copy_(a)
        if isinstance(a, torch.Tensor)
        else a
        for a in arguments
    ]


def pairs(found: Any, expected: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Results, of which some ops have several, with those of the reference."""
    several = [(x,) if torch.is_tensor(x) else x for x in (found, expected)]
    return list(zip(*several, strict=True))


LAUNCHED = {
    "rms_norm": "npu::npu_rms_norm",
    "add_rms_norm": "npu::npu_add_rms_norm",
    "silu_and_mul": "npu::npu_swiglu",
    "rotary_embedding": "npu::npu_rotary_mul",
    "norm_rotary_embedding": "npu::npu_rotary_mul",
}


@pytest.mark.parametrize("op", LAUNCHED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_graph_launches_the_kernel_and_never_waits(
    simnpu: Any, op: str, dtype: torch.dtype
) -> None:
    arguments = on_npu(inputs(op, 4, dtype))
    assert LAUNCHED[op] in launches(simnpu, lambda: getattr(torch.ops.piecework, op)(*arguments))


@pytest.mark.parametrize("op", LAUNCHED)
def test_pieces_keep_ops_that_have_a_kernel(simnpu: Any, op: str) -> None:
    assert ops.has_kernel("npu", op)


@pytest.mark.parametrize(
    ("op", "changed"),
    [
        ("rms_norm", {1: torch.ones(48, dtype=torch.float32)}),
        ("add_rms_norm", {1: torch.ones(4, 48, dtype=torch.float32)}),
        ("rotary_embedding", {1: torch.ones(4, 1, 16, dtype=torch.float32)}),
        ("rotary_embedding", dict(enumerate(inputs("rotary_embedding", 2, torch.float16, 1, 896)))),
        (
            "rotary_embedding",
            dict(enumerate(inputs("rotary_embedding", 2, torch.float16, 1000, 2))),
        ),
    ],
    ids=[
        "weights of 32 bits",
        "a sum of two kinds",
        "angles of 32 bits",
        "wide heads",
        "many heads",
    ],
)
def test_what_kernels_refuse_is_computed_by_plain_torch(
    simnpu: Any, op: str, changed: dict[int, torch.Tensor]
) -> None:
    arguments = [changed.get(i, a) for i, a in enumerate(inputs(op, 4, torch.float16))]
    on_device = on_npu(arguments)
    found: Any = getattr(torch.ops.piecework, op)(*on_device)
    expected: Any = getattr(reference, op)(*arguments)
    for one, other in pairs(found, expected):
        torch.testing.assert_close(one.cpu(), other)
    names = launches(simnpu, lambda: getattr(torch.ops.piecework, op)(*on_device))
    assert not [name for name in names if name.startswith("npu::")]


@pytest.mark.parametrize("op", LAUNCHED)
def test_a_step_of_no_tokens_is_none_for_a_kernel(simnpu: Any, op: str) -> None:
    arguments = inputs(op, 0, torch.bfloat16)
    found: Any = getattr(torch.ops.piecework, op)(*on_npu(arguments))
    expected: Any = getattr(reference, op)(*arguments)
    for one, other in pairs(found, expected):
        assert one.shape == other.shape
