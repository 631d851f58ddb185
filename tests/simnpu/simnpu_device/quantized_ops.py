"""The meaning of the npu ops that quantise and that multiply quantised numbers, in plain torch on
the device's bytes.

M rows, K columns, N columns of the result. What is refused is what Atlas A2 and A3 refuse by the
documentation of the aclnn functions beneath torch_npu's ops (CANN's ops-nn: aclnnDynamicQuantV2,
aclnnQuantize, aclnnQuantMatmulV5, aclnnWeightQuantBatchMatmulV2, aclnnAddRmsNormQuantV2,
aclnnAddRmsNormDynamicQuantV2, aclnnSwiGluQuantV2) and by the checks of torch_npu's op-plugin before
them; or what the simulator does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .checks import check

Tensor = torch.Tensor

HALVES = (torch.float16, torch.bfloat16)
DTYPES = {1: torch.int8, 5: torch.float16, 12: torch.int8, 15: torch.bfloat16}
"""By torch's number of the type, which ops take as int; 12 is qint8."""
LONGEST = 65535
INT8_ONLY = (None, 1, torch.int8)


def npu_dynamic_quant(
    input: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    group_index: Tensor | None = None,
    dst_type: int | None = None,
    quant_mode: str = "pertoken",
    dst_type_max: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """input [..., K] by the largest of each row: (int8 [..., K], scales [...] float32)."""
    name = "npu_dynamic_quant"
    check(input.dtype in HALVES, f"{name}: input must have 16 bits, got {input.dtype}")
    check(input.dim() > 1, "Input shape dim should be greater than 1")
    check(dst_type in INT8_ONLY, f"{name}: int8 only")
    check(
        smooth_scales is None and group_index is None and quant_mode == "pertoken",
        f"{name}: the simulator knows rows without smooth_scales only",
    )
    return _by_the_largest(input.float())


def npu_quantize(
    input: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    dtype: int,
    axis: int = 1,
    div_mode: bool = True,
) -> Tensor:
    """input / scales + zero_points as int8; scales [1], or [K] along `axis`."""
    name = "npu_quantize"
    check(div_mode, f"{name}: the simulator knows div_mode only")
    check(DTYPES.get(dtype) == torch.int8, f"{name}: dtype must be torch.qint8, got {dtype}")
    check(
        input.dtype in (*HALVES, torch.float32) and input.dim() <= 8,
        f"{name}: input must be 16 or 32 bits wide",
    )
    check(
        scales.dtype in (input.dtype, torch.float32)
        and (scales.dtype == input.dtype or input.dtype == torch.float32),
        f"{name}: scales must be {input.dtype} as input is, got {scales.dtype}",
    )
    check(
        scales.dim() == 1 and scales.numel() in (1, input.shape[axis]),
        f"{name}: scales must be [1] or as long as axis {axis}",
    )
    check(zero_points is None, f"{name}: the simulator knows no zero_points")
    return _as_int8(input.float() / scales.float())


def npu_quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    offset: Tensor | None = None,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: int | None = None,
    **others: Any,
) -> Tensor:
    """x1 [M, K] int8 @ x2 [K, N] int8 * scale [N] * pertoken_scale [M] + bias [N]."""
    name = "npu_quant_matmul"
    check(not any(value is not None for value in others.values()), f"{name}: int8 only")
    check(x1.dtype == x2.dtype == torch.int8, f"{name}: x1 and x2 must be int8")
    check(x1.dim() == x2.dim() == 2, f"{name}: the simulator knows 2 dimensions only")
    check(min(*x1.shape, *x2.shape) > 0, f"{name}: x1 and x2 must not be empty")
    check(x1.is_contiguous(), f"{name}: x1 must be contiguous")
    check(
        x2.is_contiguous() or x2.t().is_contiguous(),
        f"{name}: x2 must be contiguous, or a transposed view of what is",
    )
    check(x1.shape[1] == x2.shape[0], f"{name}: the k of x1 and x2 must be equal")
    check(
        max(x1.shape[1], *x2.shape) <= LONGEST,
        f"{name}: the last dimension of x1 and x2 must not exceed {LONGEST}",
    )
    dtype = DTYPES.get(-1 if output_dtype is None else output_dtype)
    check(dtype in HALVES, f"{name}: the simulator gives 16 bits only")
    check(
        scale.dtype == torch.float32 or scale.dtype == dtype == torch.bfloat16,
        f"{name}: scale must be float32, got {scale.dtype}",
    )
    check(
        scale.dim() == 1 and scale.numel() in (1, x2.shape[1]),
        f"{name}: scale must be [1] or [n], got {list(scale.shape)}",
    )
    check(offset is None, f"{name}: offset is for int8 results")
    check(
        pertoken_scale is not None or dtype == torch.bfloat16,
        f"{name}: the simulator gives float16 with pertoken_scale only",
    )
    result = (x1.double() @ x2.double()).float() * scale.float()
    if pertoken_scale is not None:
        check(
            pertoken_scale.dtype == torch.float32 and pertoken_scale.shape == x1.shape[:1],
            f"{name}: pertoken_scale must be float32 [m], got {list(pertoken_scale.shape)}",
        )
        result *= pertoken_scale[:, None]
    if bias is not None:
        check(
            bias.dtype in (torch.float32, dtype) and bias.shape == x2.shape[1:],
            f"{name}: bias must be float32 or {dtype} [n], got {bias.dtype} {list(bias.shape)}",
        )
        result += bias.float()
    return result.to(dtype)


def npu_convert_weight_to_int4pack(weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
    """weight [rows, columns] int32, each from -8 to 7, to [rows, columns / 8] int32: eight numbers
    in each, the first in the lowest bits.
    """
    name = "npu_convert_weight_to_int4pack"
    check(weight.is_contiguous(), "weight should be contiguous")
    check(weight.dim() == 2 and weight.dtype == torch.int32, f"{name}: weight must be int32, 2-D")
    check(weight.shape[1] % 8 == 0, "weight last dim should be the multiple of 8")
    check(
        weight.is_meta or bool(((weight >= -8) & (weight <= 7)).all()),
        f"{name}: numbers must lie within -8 and 7",
    )
    shifts = 4 * torch.arange(8, dtype=torch.int64, device=weight.device)
    packed = ((weight.long() & 15).unflatten(1, (-1, 8)) << shifts).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def npu_weight_quant_batchmatmul(
    x: Tensor,
    weight: Tensor,
    antiquant_scale: Tensor,
    antiquant_offset: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    bias: Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
    weight_dtype: int | None = None,
) -> Tensor:
    """x [M, K] @ ((weight [K, N] + offset) * scale) + bias [N], scale and offset [K / group, N]
    or [1, N]; weight int8, or packed by `npu_convert_weight_to_int4pack` along its inner
    dimension.
    """
    name = "npu_weight_quant_batchmatmul"
    check(x.dtype in HALVES, f"{name}: x must have 16 bits, got {x.dtype}")
    check(x.dim() == weight.dim() == 2 and x.numel() > 0, f"{name}: x and weight must be 2-D")
    check(
        quant_scale is None and quant_offset is None and weight_dtype is None,
        f"{name}: the simulator gives results of 16 bits only",
    )
    for each, what in ((weight, "weight"), (antiquant_scale, "antiquant_scale")):
        check(
            each.is_contiguous() or each.t().is_contiguous(),
            f"{name}: {what} must be contiguous, or a transposed view of what is",
        )
    check(weight.dtype in (torch.int8, torch.int32), f"{name}: weight must be int8 or packed int32")
    numbers = _unpacked(weight) if weight.dtype == torch.int32 else weight
    inner, columns = numbers.shape
    check(
        x.shape[1] == inner,
        f"The k of x and weight should be equal. but x_k_dim is {x.shape[1]}, weight_k_dim is "
        f"{inner}",
    )
    check(max(inner, columns) <= LONGEST, f"{name}: k and n must not exceed {LONGEST}")
    group = antiquant_group_size
    check(
        group == 0 or (32 <= group <= inner - 1 and group % 32 == 0),
        "antiquant_group_size can be either 0 or a multiple of 32 within the range 32 to "
        "weight_k_dim - 1.",
    )
    groups = -(-inner // group) if group else 1
    check(
        antiquant_scale.shape == (groups, columns) and antiquant_scale.dtype == x.dtype,
        f"{name}: antiquant_scale must be {x.dtype} {[groups, columns]}, got "
        f"{antiquant_scale.dtype} {list(antiquant_scale.shape)}",
    )
    check(
        antiquant_offset is None
        or (antiquant_offset.shape == antiquant_scale.shape and antiquant_offset.dtype == x.dtype),
        f"{name}: antiquant_offset must be as antiquant_scale is",
    )
    wide = numbers.float()
    places = torch.arange(inner, device=x.device) // (group or inner)
    if antiquant_offset is not None:
        wide = wide + antiquant_offset.float()[places]
    result = x.float() @ (wide * antiquant_scale.float()[places]).to(x.dtype).float()
    if bias is not None:
        wanted = torch.float32 if x.dtype == torch.bfloat16 else torch.float16
        check(
            bias.dtype == wanted and bias.shape == (columns,) and bias.is_contiguous(),
            f"{name}: bias must be {wanted} [n] where x is {x.dtype}, got {bias.dtype}",
        )
        result = result + bias.float()
    return result.to(x.dtype)


def _unpacked(weight: Tensor) -> Tensor:
    """The numbers of packed `weight`; what torch_npu holds for a transposed view is transposed."""
    if not weight.is_contiguous() and weight.t().is_contiguous():
        return _unpacked(weight.t()).t()
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=weight.device)
    numbers = (weight.unsqueeze(-1) >> shifts) & 15
    return torch.where(numbers > 7, numbers - 16, numbers).flatten(-2)


def npu_add_rms_norm_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    scales1: Tensor,
    zero_points1: Tensor | None,
    beta: Tensor | None = None,
    scales2: Tensor | None = None,
    zero_points2: Tensor | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-6,
    div_mode: bool = True,
    dst_type: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(normalised x1 + x2, divided by scales1 [K], as int8; nothing; x1 + x2)."""
    name = "npu_add_rms_norm_quant"
    _check_sum(name, x1, x2, gamma)
    wanted = torch.float32 if x1.dtype == torch.float16 else torch.bfloat16
    check(
        scales1.dtype == wanted and scales1.shape == gamma.shape,
        f"{name}: scales1 must be {wanted} where x1 is {x1.dtype}, and as long as gamma; got "
        f"{scales1.dtype} {list(scales1.shape)}",
    )
    check(axis == -1, "axis only support -1.")
    check(div_mode and dst_type in INT8_ONLY, f"{name}: div_mode and int8 only")
    check(
        zero_points1 is None and beta is None and scales2 is None and zero_points2 is None,
        f"{name}: the simulator knows one result without zero points and beta only",
    )
    total, wide = _normalised_sum(x1, x2, gamma, epsilon)
    return _as_int8(wide / scales1.float()), torch.zeros_like(x1, dtype=torch.int8), total


def npu_add_rms_norm_dynamic_quant(
    x1: Tensor,
    x2: Tensor,
    gamma: Tensor,
    *,
    smooth_scale1: Tensor | None = None,
    smooth_scale2: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
    output_mask: list[bool] | None = None,
    y_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(normalised x1 + x2 by the largest of each row, nothing, x1 + x2, scales, nothing)."""
    name = "npu_add_rms_norm_dynamic_quant"
    _check_sum(name, x1, x2, gamma)
    check(x1.dim() >= 2, "The x1 should be in 2~8D")
    check(y_dtype in INT8_ONLY, f"{name}: int8 only")
    check(
        smooth_scale1 is None
        and smooth_scale2 is None
        and beta is None
        and (output_mask is None or list(output_mask) == [True, False]),
        f"{name}: the simulator knows the first result without smooth scales and beta only",
    )
    total, wide = _normalised_sum(x1, x2, gamma, epsilon)
    numbers, scales = _by_the_largest(wide)
    nothing = x1.new_zeros(())
    return numbers, nothing.to(torch.int8), total, scales, nothing.float()


def _check_sum(name: str, x1: Tensor, x2: Tensor, gamma: Tensor) -> None:
    check(
        x1.dtype == x2.dtype == gamma.dtype and x1.dtype in HALVES,
        f"{name}: x1, x2 and gamma must have the same 16 bits, got {x1.dtype}, {x2.dtype}, "
        f"{gamma.dtype}",
    )
    check(x1.shape == x2.shape, "The shape of x1 and x2 must be the same")
    check(gamma.shape == x1.shape[-1:] and x1.numel() > 0, f"{name}: gamma must be as x1's rows")


def _normalised_sum(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = (x1 + x2).contiguous()
    return total, F.rms_norm(total.float(), gamma.shape, gamma.float(), epsilon)


def npu_swiglu_quant(
    x: Tensor,
    *,
    smooth_scales: Tensor | None = None,
    offsets: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    group_list_type: int = 0,
    dst_type: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """One half of x [M, 2 * K] by the SiLU of the other, times smooth_scales [1, K] or [1], plus
    offsets, as int8 [M, K]; no scales beside it. By rows (`quant_mode` 1) it is not known here: its
    scale is 127 / the largest in ops-nn's kernel for A2, and the inverse on others.
    """
    name = "npu_swiglu_quant"
    check(x.dtype in (*HALVES, torch.float32) and x.dim() > 1, f"{name}: x must be 16 or 32 bits")
    check(x.is_contiguous() and x.numel() > 0, f"{name}: x must be contiguous")
    size = x.shape[-1]
    check(size <= 8192, f"x last dim size should not be larger than 8192, but got {size}")
    check(size % 2 == 0, "x last dim size should be even")
    check(group_index is None and dst_type in INT8_ONLY, f"{name}: int8 without groups only")
    check(quant_mode == 0, f"{name}: the simulator knows scales of the caller's own only")
    # The kernel of A2 and A3 reads them whether they were given or not.
    check(smooth_scales is not None, f"{name}: smooth_scales must be given")
    assert smooth_scales is not None
    check(
        smooth_scales.dtype == torch.float32 and list(smooth_scales.shape) in ([1, size // 2], [1]),
        f"{name}: smooth_scales must be float32 [1], got {list(smooth_scales.shape)}",
    )
    check(
        offsets is not None and offsets.shape == smooth_scales.shape,
        "smooth_scales and offsets should have the same shape when quant_mode is 0",
    )
    left, right = x.float().chunk(2, -1)
    product = F.silu(left) * right if activate_left else left * F.silu(right)
    numbers = _as_int8(product * smooth_scales + offsets)
    return numbers, x.new_zeros(x.shape[:-1], dtype=torch.float32)


def _by_the_largest(wide: Tensor) -> tuple[Tensor, Tensor]:
    scales = wide.abs().amax(-1) / 127
    return _as_int8(wide / scales.unsqueeze(-1)), scales


def _as_int8(wide: Tensor) -> Tensor:
    return wide.nan_to_num(0.0).round().clamp(-128, 127).to(torch.int8).contiguous()


KERNELS: dict[str, Callable[..., Any]] = {
    f"npu::{kernel.__name__}": kernel
    for kernel in (
        npu_add_rms_norm_dynamic_quant,
        npu_add_rms_norm_quant,
        npu_convert_weight_to_int4pack,
        npu_dynamic_quant,
        npu_quant_matmul,
        npu_quantize,
        npu_swiglu_quant,
        npu_weight_quant_batchmatmul,
    )
}
"""They run on meta tensors too, for which torch_npu has kernels."""

RUN_ON_THE_HOST = {"npu::npu_convert_weight_to_int4pack"}
"""Ops that fetch their input from the device."""
