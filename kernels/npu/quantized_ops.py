"""INT8 on Ascend NPUs: 8-bit activations multiplied by 8-bit weights. Signatures and meaning are
those of `kernels.reference`.

A static scale of a checkpoint may give -128, where the reference ends at -127.
"""

from __future__ import annotations

import torch

from .. import reference
from .refusals import or_else

_HALVES = (torch.bfloat16, torch.float16)
_LONGEST = 65535  # Columns of either factor of `npu_quant_matmul`.
# Rows per product of a weight with more rows than that, such as a head. They are the columns of the
# second factor.
_ROWS_AT_ONCE = 1 << 15


@or_else(reference.quantize_static)
def quantize_static(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    if dtype != torch.int8 or x.numel() == 0:
        return None
    # With x in 16 bits, the kernel needs the scale in 16 bits too.
    result: torch.Tensor = torch.ops.npu.npu_quantize(
        x.float(), scale, None, torch.qint8, axis=-1, div_mode=True
    )
    return result


@or_else(reference.quantize_dynamic)
def quantize_dynamic(
    x: torch.Tensor, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if dtype != torch.int8 or x.dtype not in _HALVES or x.numel() == 0:
        return None
    numbers, scale = torch.ops.npu.npu_dynamic_quant(x.reshape(-1, group))
    return numbers.view(x.shape), scale.view(*x.shape[:-1], x.shape[-1] // group)


@or_else(reference.scaled_linear)
def scaled_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Multiply with scales per token and per row. Scales of blocks use plain torch."""
    (rows, columns), outputs = x.shape, weight.shape[0]
    if (
        x.dtype != torch.int8
        or weight.dtype != torch.int8
        or dtype not in _HALVES
        or x_scale.shape not in ((1,), (rows, 1))
        or weight_scale.shape not in ((1,), (outputs, 1))
        or (bias is not None and bias.dtype not in (dtype, torch.float32))
        or columns > _LONGEST
        or x.numel() == 0
    ):
        return None
    step = outputs if outputs <= _LONGEST else _ROWS_AT_ONCE
    weights = torch.split(weight, step)
    scales = torch.split(weight_scale.reshape(-1), step)
    if weight_scale.numel() == 1:
        scales *= len(weights)
    biases = [None] * len(weights) if bias is None else torch.split(bias, step)
    per_token = x_scale.reshape(-1).expand(rows).contiguous()
    parts = [
        torch.ops.npu.npu_quant_matmul(
            x, part.t(), scale, pertoken_scale=per_token, bias=offset, output_dtype=dtype
        )
        for part, scale, offset in zip(weights, scales, biases, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
