"""The contract of the layers' ops for the native kernels, in every variant that runs here, and for
Triton's: on a GPU for real, elsewhere in its interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_ops import *  # noqa: F403
from contract_ops import Kind
from hypothesis import strategies as st
from native_variants import built, native_variants

from piecework.kernels.cpu.native import build, quantize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def native(variant: build.Variant) -> Kind:
    def call(op: str, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantize, "load_kernels", lambda: built(variant))
            # The kernels must not leave an op to the reference.
            patch.setattr(quantize, "reference", None)
            return getattr(quantize, op)(*arguments)

    return Kind(
        variant.name,
        call,
        quantized=(torch.int8, torch.float8_e4m3fn),
        exact=("quantize", "rotary_embedding"),
        differ=(0.02, 0.02),
    )


def triton(op: str, *arguments: Any) -> Any:
    pytest.importorskip("triton_interpreter")
    from piecework.kernels.triton import ops

    return getattr(ops, op)(*arguments)


KINDS = [
    *map(native, native_variants()),
    Kind(
        "triton",
        triton,
        device=DEVICE,
        examples=8,
        # The interpreter cuts a bfloat16 off where hardware rounds to the nearest.
        dtypes=(torch.float16, torch.float32) + (torch.bfloat16,) * (DEVICE == "cuda"),
        # Groups that are no power of two are left to plain torch.
        sizes=st.sampled_from([2, 16, 24, 32, 48, 70, 128, 256]),
    ),
]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param
