"""The contract of the layers' ops for torch_npu's kernels, on the simulated NPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_ops import *  # noqa: F403
from contract_ops import Kind

from piecework.kernels.npu.platform import NpuPlatform

KIND = Kind(
    "torch_npu",
    lambda op, *arguments: getattr(torch.ops.piecework, op)(*arguments),
    device="npu",
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
    quantized=(torch.int8,),
    exact=(),
    differ=(1.0, 1.0),
    # A fused kernel does not round the norm to 16 bits before it quantises.
    slack=2**-8,
)


@pytest.fixture
def kind(simnpu: Any) -> Kind:
    NpuPlatform().set_up(None)
    return KIND
