"""`piecework::packed_linear`: a projection with a weight in the blocked layout of oneDNN's matrix
kernels.
"""

from __future__ import annotations

from functools import cache

import torch

_LIBRARY = torch.library.Library("piecework", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("packed_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")  # type: ignore[no-untyped-call]
# Rows that the layout is chosen for. The same layout was the best for 1 to 512 rows.
_PACKED_FOR = 512


def _packed_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def _packed_linear_meta(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


_LIBRARY.impl("packed_linear", _packed_linear, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("packed_linear", _packed_linear, "MkldnnCPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("packed_linear", _packed_linear_meta, "Meta")  # type: ignore[no-untyped-call]

OP = torch.ops.piecework.packed_linear.default


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Pack weight [out, in] for `OP`: an opaque tensor of the same shape, dtype and number of
    bytes, with a copy of the numbers.
    """
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR)
    return packed


@cache
def is_available() -> bool:
    """Return whether oneDNN has such kernels for bfloat16 on this CPU."""
    try:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        with torch.no_grad():
            OP(
                torch.ones(1, 64, dtype=torch.bfloat16),
                pack(torch.ones(64, 64, dtype=torch.bfloat16)),
            )
    except (AttributeError, RuntimeError):
        return False
    return True
