"""Triton's updates of adapters give what `kernels.lora` gives: on a GPU for real, elsewhere through
its interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_interpreter import DEVICE

from piecework.kernels import reference
from piecework.kernels.lora import columns_to_panels
from piecework.kernels.triton import lora

pytestmark = pytest.mark.on_gpu


def arguments(
    seed: int, tokens: int, size: int, rows: list[int], rank: int, slots: int, dtype: torch.dtype
) -> list[Any]:
    """Return arguments of the op. Parts have different ranks, and some have none."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    parts, out = len(rows), sum(rows)
    ranks = torch.randint(0, rank + 1, (slots, parts), generator=generator, dtype=torch.int32)
    live = (torch.arange(rank) < ranks[:, :, None])[:, :, None].to(DEVICE)
    return [
        random(tokens, out + 8)[:, :out],
        random(tokens, size + 8)[:, :size],
        random(slots, parts, size, rank) * live,
        columns_to_panels(random(slots, rank, out), None),
        (torch.rand(slots, parts, generator=generator) * (ranks > 0)).to(DEVICE),
        ranks.to(DEVICE),
        torch.randint(-1, slots, (tokens + 5,), generator=generator, dtype=torch.int32).to(DEVICE),
        rows,
    ]


@settings(max_examples=examples(8, exploring=20))
@given(
    seed=st.integers(0, 1000),
    tokens=st.sampled_from([0, 1, 16, 17, 40]),
    size=st.sampled_from([24, 64, 200]),
    rows=st.sampled_from([[64], [40, 8], [130, 16, 16]]),
    rank=st.sampled_from([16, 48]),
    slots=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_any_mixture_of_adapters(
    seed: int,
    tokens: int,
    size: int,
    rows: list[int],
    rank: int,
    slots: int,
    dtype: torch.dtype,
) -> None:
    given = arguments(seed, tokens, size, rows, rank, slots, dtype)
    found, wanted = lora.lora(*given), reference.lora(*given)
    assert found.dtype == dtype and found.is_contiguous()
    rounding = 2**-10 if dtype == torch.float16 else 1e-5
    largest = float(wanted.float().abs().max()) if wanted.numel() else 1.0
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=rounding * largest)


def test_tokens_without_an_adapter_keep_their_bits() -> None:
    """Also beside adapters whose numbers are not finite."""
    given = arguments(1, 20, 64, [64, 32], 16, 2, torch.float16)
    given[3].fill_(float("inf"))
    given[6][:] = -1
    given[6][3] = 1
    found = lora.lora(*given)
    others = torch.arange(20) != 3
    assert torch.equal(found[others], given[0][others])
