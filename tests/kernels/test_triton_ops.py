"""What is special about Triton's ops beside the contract: memory with gaps, groups without a tile,
which ops a device has, real models' shapes on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_interpreter import DEVICE

from piecework.kernels import ops, reference
from piecework.kernels.triton import ops as triton_ops
from piecework.kernels.triton import quantize

pytestmark = pytest.mark.on_gpu


def random(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3).to(
        DEVICE, dtype
    )


ROUNDINGS = {torch.float32: 1e-5, torch.float16: 2**-7, torch.bfloat16: 2**-6}
"""A number is rounded to its dtype twice, before its last product and after, and a sum in another
order may turn the first.
"""


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape and actual.is_contiguous()
    torch.testing.assert_close(actual, expected, rtol=ROUNDINGS[actual.dtype], atol=1e-3)


def test_heads_are_normalised_where_they_lie() -> None:
    x, weight = random(1, 3, 5, 70, dtype=torch.float16), random(2, 70, dtype=torch.float16)
    q = x[:, 1:3]
    assert_same(triton_ops.rms_norm(q, weight, 1e-5), reference.rms_norm(q, weight, 1e-5))


def test_groups_that_are_no_power_of_two_are_plain_torch_s(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have no tile; the answer is the same."""
    kernels = ("quantize_kernel", "rms_norm_quantize_kernel", "silu_and_mul_quantize_kernel")
    for name in kernels:
        monkeypatch.delattr(quantize, name)
    x, weight = random(0, 2, 96, dtype=torch.float32), random(1, 96, dtype=torch.float32)
    calls: dict[str, tuple[Any, ...]] = {
        "quantize_dynamic": (x, 24, torch.int8),
        "rms_norm_quantize_dynamic": (x, weight, 1e-5, 24, torch.int8),
        "add_rms_norm_quantize_dynamic": (x, x, weight, 1e-5, 24, torch.int8),
        "silu_and_mul_quantize_dynamic": (x, 24, torch.int8),
    }
    for op, arguments in calls.items():
        found, expected = (getattr(each, op)(*arguments) for each in (triton_ops, reference))
        assert all(map(torch.equal, found, expected))


def test_ops_are_the_device_s_own_unless_plain_torch_is_asked_for() -> None:
    calls = []

    class Spy:
        def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            return reference.silu_and_mul(x)

    x = torch.ones(1, 4, device="meta")
    ops.register("meta", Spy())
    try:
        ops.silu_and_mul(x)
        with ops.plain_torch():
            ops.silu_and_mul(x)
        assert len(calls) == 1
        ops.silu_and_mul(x)
        assert len(calls) == 2
    finally:
        ops._versions.pop("meta")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="no NVIDIA GPU")
@pytest.mark.parametrize("tokens", [1, 37, 1000])
def test_shapes_of_an_8b_model(tokens: int) -> None:
    x, residual, weight = (
        random(i, *shape, dtype=torch.bfloat16)
        for i, shape in enumerate([(tokens, 4096), (tokens, 4096), (4096,)])
    )
    for actual, expected in zip(
        triton_ops.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        assert_same(actual, expected)
    gates = random(3, tokens, 2 * 14336, dtype=torch.bfloat16)
    assert_same(triton_ops.silu_and_mul(gates), reference.silu_and_mul(gates))
    heads, cos, sin = (
        random(i, tokens, *shape, dtype=torch.bfloat16)
        for i, shape in enumerate([(40, 128), (1, 128), (1, 128)])
    )
    assert_same(
        triton_ops.rotary_embedding(heads, cos, sin), reference.rotary_embedding(heads, cos, sin)
    )
