"""Attention of some tokens of a sequence to all of its tokens, by the C++ kernels."""

from __future__ import annotations

import pytest
import torch
from native_variants import built, mostly_best

from piecework.kernels import reference
from piecework.kernels.cpu.native import build, whole_attention


@pytest.mark.parametrize(("rows", "length"), [(0, 5), (0, 0)])
def test_no_queries_have_no_result(rows: int, length: int) -> None:
    q, k = torch.ones(rows, 2, 16).bfloat16(), torch.ones(length, 2, 16).bfloat16()
    assert whole_attention.attend_all(q, k, k, 1.0).shape == q.shape


def test_values_of_another_width_are_left_to_plain_torch() -> None:
    q, k = (torch.randn(count, 2, 16).bfloat16() for count in (3, 9))
    v = torch.randn(9, 2, 8).bfloat16()
    found = whole_attention.attend_all(q, k, v, 0.2)
    assert torch.equal(found, reference.attend_all(q, k, v, 0.2))


@pytest.mark.parametrize("variant", mostly_best())
@pytest.mark.parametrize(
    ("rows", "length", "heads", "size"),
    [(1, 1, 1, 16), (5, 70, 3, 72), (64, 700, 2, 64), (200, 200, 2, 80)],
)
def test_every_query_sees_every_key(
    rows: int,
    length: int,
    heads: int,
    size: int,
    variant: build.Variant,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = built(variant)
    monkeypatch.setattr(whole_attention, "load_kernels", lambda: library)
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        # As projections of a tower lie: [heads, tokens, size] with the tokens apart.
        torch.randn(heads, count, size, generator=generator).bfloat16().transpose(0, 1)
        for count in (rows, length, length)
    )
    # Contiguous, so that the kernel works on these and not on copies.
    k, v = k.contiguous(), v.contiguous()
    kept = k.clone(), v.clone()
    wanted = reference.attend_all(q.float(), k.float(), v.float(), 0.2)
    monkeypatch.delattr(reference, "attend_all")
    found = whole_attention.attend_all(q, k, v, 0.2)
    assert found.shape == (rows, heads, size)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-6, atol=2**-7)
    assert torch.equal(k, kept[0]) and torch.equal(v, kept[1])
