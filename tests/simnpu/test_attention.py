"""The contract of attention backends for torch_npu's fused kernel, on the simulated NPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from contract_attention import *  # noqa: F403
from contract_attention import Kind

from piecework.kernels.npu.attention import AscendAttention
from piecework.kernels.npu.platform import NpuPlatform

# Other page sizes, and windows that are shorter than a step, go to plain torch.
KIND = Kind(
    "ascend",
    cache(lambda: [AscendAttention()]),
    device="npu",
    examples=8,
    page_sizes=(16, 128),
    head_sizes=(64,),
    modifies=False,
)


@pytest.fixture
def kind(simnpu: Any, monkeypatch: pytest.MonkeyPatch) -> Kind:
    NpuPlatform().set_up(None)
    # Hardware takes 16 bits.
    monkeypatch.setattr(AscendAttention, "dtypes", (torch.float32,))
    return KIND
