"""The npu ops of quantised layers compute what their documentation says, and each mistake that
hardware punishes is caught: the call beside it, which is right, passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

M, K, N = 3, 64, 16


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8, device="npu")


def halves(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype).npu()


def wide(*shape: int) -> torch.Tensor:
    return torch.rand(shape).npu() + 0.5


def test_rows_are_quantised_by_their_largest(simnpu: Any) -> None:
    x = halves(M, K)
    found, scales = torch.ops.npu.npu_dynamic_quant(x)
    assert found.cpu().abs().amax(-1).tolist() == [127] * M and scales.shape == (M,)
    largest = x.cpu().float().abs().amax(-1)
    torch.testing.assert_close(scales.cpu() * 127, largest)


def test_the_gate_is_the_right_half_unless_the_call_says_left(simnpu: Any) -> None:
    """And the factor is what the product is multiplied by, not what it is divided by."""
    x, factor, offset = halves(M, 2 * K), wide(1) * 50, torch.zeros(1, device="npu")
    gate, up = x.cpu().float().chunk(2, -1)
    for left, product in ((True, F.silu(gate) * up), (False, gate * F.silu(up))):
        found, _ = torch.ops.npu.npu_swiglu_quant(
            x, smooth_scales=factor, offsets=offset, activate_left=left
        )
        expected = (product * factor.cpu()).clamp(-128, 127)
        assert (found.cpu() - expected).abs().max() <= 0.5


def test_what_int4_pack_makes_the_product_reads(simnpu: Any) -> None:
    weight = torch.randint(-8, 8, (K, N), dtype=torch.int32)
    x, scale = halves(M, K).round(), torch.full((1, N), 0.5).bfloat16().npu()
    expected = (x.cpu().float() @ (weight * scale.cpu().float())).bfloat16()
    for packed in (
        torch.ops.npu.npu_convert_weight_to_int4pack(weight.npu()),
        torch.ops.npu.npu_convert_weight_to_int4pack(weight.t().contiguous().npu()).t(),
    ):
        found = torch.ops.npu.npu_weight_quant_batchmatmul(x, packed, scale)
        torch.testing.assert_close(found.cpu(), expected)


def test_numbers_are_packed_on_the_host(simnpu: Any) -> None:
    weight = torch.zeros(8, 8, dtype=torch.int32, device="npu")
    # The allocator goes on asking a graph whose capture was lost, so it must not die.
    lost = torch.npu.NPUGraph()
    with (
        pytest.raises(RuntimeError, match="npu_convert_weight_to_int4pack, which torch_npu runs"),
        torch.npu.graph(lost),
    ):
        torch.ops.npu.npu_convert_weight_to_int4pack(weight)


def quant_matmul(**changes: Any) -> torch.Tensor:
    given: dict[str, Any] = {
        "x1": numbers(M, K),
        "x2": numbers(N, K).t(),
        "scale": wide(N),
        "pertoken_scale": wide(M),
        "bias": halves(N),
        "output_dtype": torch.bfloat16,
    } | changes
    x1, x2, scale = (given.pop(name) for name in ("x1", "x2", "scale"))
    result: torch.Tensor = torch.ops.npu.npu_quant_matmul(x1, x2, scale, **given)
    return result


def weight_matmul(**changes: Any) -> torch.Tensor:
    given: dict[str, Any] = {
        "x": halves(M, K),
        "weight": numbers(K, N),
        "antiquant_scale": halves(2, N),
        "antiquant_offset": halves(2, N),
        "bias": wide(N),
        "antiquant_group_size": 32,
    } | changes
    x, weight, scale = (given.pop(name) for name in ("x", "weight", "antiquant_scale"))
    result: torch.Tensor = torch.ops.npu.npu_weight_quant_batchmatmul(x, weight, scale, **given)
    return result


def norm_quant(scale: torch.Tensor, dtype: torch.dtype) -> None:
    torch.ops.npu.npu_add_rms_norm_quant(
        halves(M, K, dtype=dtype), halves(M, K, dtype=dtype), halves(K, dtype=dtype), scale, None
    )


def norm_dynamic(dtype: torch.dtype, gamma: torch.dtype) -> None:
    torch.ops.npu.npu_add_rms_norm_dynamic_quant(
        halves(M, K, dtype=dtype),
        halves(M, K, dtype=dtype),
        halves(K, dtype=gamma),
        output_mask=[True, False],
    )


def swiglu(size: int = 2 * K, **changes: Any) -> None:
    given = {"smooth_scales": wide(1), "offsets": wide(1)} | changes
    torch.ops.npu.npu_swiglu_quant(halves(M, size), **given)


SEEDED: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "activations of 32 bits": (
        lambda: torch.ops.npu.npu_dynamic_quant(halves(M, K)),
        lambda: torch.ops.npu.npu_dynamic_quant(wide(M, K)),
        "input must have 16 bits",
    ),
    "a scale of 32 bits beside 16": (
        lambda: torch.ops.npu.npu_quantize(wide(M, K), wide(1), None, torch.qint8, -1),
        lambda: torch.ops.npu.npu_quantize(halves(M, K), wide(1), None, torch.qint8, -1),
        "scales must be torch.bfloat16",
    ),
    "a scale for each token in two dimensions": (
        quant_matmul,
        lambda: quant_matmul(pertoken_scale=wide(M, 1)),
        r"pertoken_scale must be float32 \[m\]",
    ),
    "a weight that is not transposed": (
        quant_matmul,
        lambda: quant_matmul(x2=numbers(N, K)),
        "the k of x1 and x2 must be equal",
    ),
    "some columns of a weight": (
        quant_matmul,
        lambda: quant_matmul(x2=numbers(K, 2 * N)[:, :N]),
        "x2 must be contiguous, or a transposed view",
    ),
    "a product in 32 bits": (
        quant_matmul,
        lambda: quant_matmul(output_dtype=torch.float32),
        "16 bits only",
    ),
    "a bias of other 16 bits": (
        quant_matmul,
        lambda: quant_matmul(bias=halves(N, dtype=torch.float16)),
        "bias must be float32 or torch.bfloat16",
    ),
    "a vocabulary at once": (
        lambda: quant_matmul(x2=numbers(65535, K).t(), scale=wide(1), bias=None),
        lambda: quant_matmul(x2=numbers(65536, K).t(), scale=wide(1), bias=None),
        "must not exceed 65535",
    ),
    "no tokens": (quant_matmul, lambda: quant_matmul(x1=numbers(0, K)), "must not be empty"),
    "groups of 16": (
        weight_matmul,
        lambda: weight_matmul(antiquant_group_size=16),
        "a multiple of 32",
    ),
    "one group as a group": (
        lambda: weight_matmul(
            antiquant_group_size=0, antiquant_scale=halves(1, N), antiquant_offset=None
        ),
        lambda: weight_matmul(
            antiquant_group_size=K, antiquant_scale=halves(1, N), antiquant_offset=None
        ),
        "within the range 32 to weight_k_dim - 1",
    ),
    "scales of other 16 bits": (
        weight_matmul,
        lambda: weight_matmul(antiquant_scale=halves(2, N, dtype=torch.float16)),
        "antiquant_scale must be torch.bfloat16",
    ),
    "a bias of 16 bits beside bfloat16": (
        weight_matmul,
        lambda: weight_matmul(bias=halves(N)),
        "bias must be torch.float32",
    ),
    "numbers beyond 4 bits": (
        lambda: torch.ops.npu.npu_convert_weight_to_int4pack(numbers(8, 8).int() % 8),
        lambda: torch.ops.npu.npu_convert_weight_to_int4pack(numbers(8, 8).int() % 8 + 8),
        "within -8 and 7",
    ),
    "a scale of 32 bits beside a norm in bfloat16": (
        lambda: norm_quant(wide(K), torch.float16),
        lambda: norm_quant(wide(K), torch.bfloat16),
        "scales1 must be torch.bfloat16",
    ),
    "one scale for a whole norm": (
        lambda: norm_quant(wide(K), torch.float16),
        lambda: norm_quant(wide(1), torch.float16),
        "as long as gamma",
    ),
    "norm weights of 32 bits": (
        lambda: norm_dynamic(torch.float16, torch.float16),
        lambda: norm_dynamic(torch.float16, torch.float32),
        "must have the same 16 bits",
    ),
    "a long gated row": (
        lambda: swiglu(8192),
        lambda: swiglu(8194),
        "should not be larger than 8192",
    ),
    "factors that the kernel reads but was not given": (
        swiglu,
        lambda: swiglu(smooth_scales=None, offsets=None),
        "smooth_scales must be given",
    ),
    "a gated product by rows": (swiglu, lambda: swiglu(quant_mode=1), "the caller's own only"),
    "a factor without an offset": (
        swiglu,
        lambda: swiglu(offsets=None),
        "should have the same shape",
    ),
    "heads of 896 numbers": (
        lambda: torch.ops.npu.npu_rotary_mul(*(halves(1, 2, 1, 894) for _ in range(3))),
        lambda: torch.ops.npu.npu_rotary_mul(*(halves(1, 2, 1, 896) for _ in range(3))),
        "below 896",
    ),
    "a gated product of a view": (
        lambda: torch.ops.npu.npu_swiglu(halves(M, K)),
        lambda: torch.ops.npu.npu_swiglu(halves(M, 2 * K)[:, :K]),
        "must be contiguous",
    ),
}


@pytest.mark.parametrize("mistake", SEEDED)
def test_a_mistake_is_caught_and_its_right_form_passes(simnpu: Any, mistake: str) -> None:
    right, wrong, message = SEEDED[mistake]
    right()
    with pytest.raises(RuntimeError, match=message):
        wrong()
