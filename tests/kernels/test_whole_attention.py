"""Attention of some tokens of a sequence to all of its tokens, by the C++ kernels."""

from __future__ import annotations

import pytest
import torch

from piecework.kernels import reference
from piecework.kernels.cpu.native import whole_attention
from piecework.kernels.cpu.native.build import load_kernels


@pytest.mark.parametrize(("rows", "length"), [(0, 5), (0, 0)])
def test_no_queries_have_no_result(rows: int, length: int) -> None:
    q, k = torch.ones(rows, 2, 16).bfloat16(), torch.ones(length, 2, 16).bfloat16()
    assert whole_attention.attend_all(q, k, k, 1.0).shape == q.shape


@pytest.mark.skipif(load_kernels() is None, reason="no CPU kernels")
@pytest.mark.parametrize(
    ("rows", "length", "heads", "size"),
    [(1, 1, 1, 16), (5, 70, 3, 72), (64, 700, 2, 64), (200, 200, 2, 80)],
)
def test_every_query_sees_every_key(
    rows: int, length: int, heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        # As projections of a tower lie: [heads, tokens, size] with the tokens apart.
        torch.randn(heads, count, size, generator=generator).bfloat16().transpose(0, 1)
        for count in (rows, length, length)
    )
    kept = k.clone(), v.clone()
    wanted = reference.attend_all(q.float(), k.float(), v.float(), 0.2)
    monkeypatch.delattr(reference, "attend_all")
    found = whole_attention.attend_all(q, k, v, 0.2)
    assert found.shape == (rows, heads, size)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-6, atol=2**-7)
    assert torch.equal(k, kept[0]) and torch.equal(v, kept[1])
