"""Triton's layers of experts against `kernels.reference`: on a GPU for real, elsewhere through its
interpreter.
"""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import DEVICE

from piecework.kernels import reference
from piecework.kernels.triton.moe import fused_moe


@pytest.mark.parametrize(
    ("tokens", "experts", "each", "limit", "weighs_input", "parts"),
    [
        (0, 4, 2, 0.0, False, 2),
        (1, 8, 3, 0.0, False, 2),
        (5, 3, 2, 1.5, False, 2),
        (40, 1, 1, 0.0, True, 2),
        # Without gates.
        (5, 3, 2, 0.0, False, 1),
    ],
)
def test_it_is_the_reference(
    tokens: int, experts: int, each: int, limit: float, weighs_input: bool, parts: int
) -> None:
    size, width = 40, 24
    make = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=make).to(DEVICE)

    # One more than there are: it is another rank's.
    weights, ids = torch.rand(tokens, experts + 1, generator=make).topk(each, dim=-1)
    given = (
        normal(tokens, size),
        ids.to(DEVICE),
        weights.to(DEVICE),
        normal(experts * parts * width, size),
        normal(experts * parts * width),
        normal(experts * size, width),
        normal(experts * size),
        limit,
        weighs_input,
    )
    torch.testing.assert_close(fused_moe(*given), reference.fused_moe(*given), rtol=1e-4, atol=1e-3)
