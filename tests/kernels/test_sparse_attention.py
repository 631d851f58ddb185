"""Queries that see a choice of tokens, whatever backend computes the other requests of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_steps import Step, latent

from piecework.kernels import sparse_attention
from piecework.kernels.attention import KVLayout
from piecework.kernels.cpu.native.attention import native_or_torch
from piecework.kernels.latent_attention import LatentLayer, absorbed_queries, heads_values
from piecework.kernels.paged_attention import TorchAttention
from piecework.kernels.sparse_attention import Index, choose, plan_sparse, run_sparse, store_index

HEADS, LATENT, TURNED, UNTURNED, VALUE, PAGE = 3, 16, 8, 8, 12, 4
INDEX_HEADS, WIDTH, SELECTED = 5, 6, 7
LENS = [(9, 0), (1, 12), (3, 2), (6, 7), (1, 4), (1, 30)]
"""Of which two see all there is."""


class Apart(TorchAttention):
    """Keeps vectors backwards, and computes none of them."""

    def keeps_apart(self, layout: KVLayout, page_size: int) -> bool:
        return layout.latent and page_size == PAGE

    def store_latent(
        self, k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, layout: KVLayout
    ) -> None:
        cache.flatten(0, 1)[slots] = k.flip(-1)

    def read_latent(
        self, cache: torch.Tensor, pages: torch.Tensor, layout: KVLayout
    ) -> torch.Tensor:
        return cache[pages].flip(-1)


class Case:
    """A step with an index, computed by `run_sparse` and by the definition."""

    def __init__(self, lens: list[tuple[int, int]], dtype: torch.dtype | None = None) -> None:
        size = LATENT + TURNED
        step = Step(lens, page_size=PAGE, heads=HEADS, seed=1, kv_heads=1, head_size=size)
        self.step = step = latent(step, LATENT)
        cache = step.k_cache.nan_to_num(nan=5.0)
        self.layout = replace(
            step.heads, scale=0.3, selected=SELECTED, index_size=WIDTH, cache_dtype=dtype
        )
        cache = cache if dtype is None else cache.to(dtype)
        generator = torch.Generator().manual_seed(2)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        tokens, pages = len(step.q), len(cache)
        weight = random(HEADS * (UNTURNED + VALUE), LATENT)
        self.layer = LatentLayer(
            step.q[..., : UNTURNED + TURNED],
            step.new(step.keys),
            weight,
            torch.full((tokens, HEADS, VALUE), float("nan")),
            cache,
            self.layout,
        )
        self.index = Index(
            random(tokens, INDEX_HEADS, WIDTH),
            random(tokens, WIDTH),
            random(tokens, INDEX_HEADS),
            random(pages, PAGE, WIDTH),
        )

    def run(self, backend: Any) -> torch.Tensor:
        metadata = self.step.metadata
        if isinstance(backend, Apart):
            self.layer.cache.copy_(self.layer.cache.flip(-1))
        store_index(self.index, metadata.slot_mapping)
        plan = plan_sparse(backend, metadata, PAGE, SELECTED)
        assert plan is not None
        chosen = choose(self.index, plan.long, self.layout)
        run_sparse(backend, self.layer, plan, None, chosen)
        return self.layer.out

    def expected(self) -> torch.Tensor:
        """One query at a time, over what lies in the caches now."""
        rows, first = [], 0
        queries = absorbed_queries(self.layer)
        table = self.step.metadata.block_table
        for request, (new, past) in enumerate(LENS):
            kept, keys = (
                cache[table[request]].flatten(0, 1).view(-1, cache.shape[-1]).float()
                for cache in (self.layer.cache, self.index.cache)
            )
            for offset in range(new):
                row, position = first + offset, past + offset
                scores = (self.index.q[row] @ keys[: position + 1].T).relu()
                scores = self.index.weights[row] @ scores
                seen = scores.topk(min(SELECTED, position + 1)).indices
                weights = (queries[row] @ kept[seen].T * 0.3).softmax(-1)
                rows.append(weights @ kept[seen, :LATENT])
            first += new
        return heads_values(self.layer, torch.stack(rows))


@pytest.mark.parametrize("dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("make", [TorchAttention, native_or_torch])
@pytest.mark.parametrize("numbers", [1, 2**26])
def test_a_query_sees_what_its_index_scores_highest(
    make: Any, dtype: torch.dtype | None, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside requests that are no longer than that, in memory for one query at a time too."""
    monkeypatch.setattr(sparse_attention, "_NUMBERS", numbers)
    case = Case(LENS, dtype)
    assert torch.allclose(case.run(make()), case.expected(), atol=1e-4)


def test_vectors_that_a_backend_keeps_apart_are_read_through_it() -> None:
    case = Case(LENS[-1:])
    cache = case.layer.cache.clone()
    plain = Case(LENS[-1:])
    assert torch.equal(plain.layer.cache, cache)
    assert torch.allclose(case.run(Apart()), plain.run(TorchAttention()), atol=1e-5)


def test_a_step_of_short_requests_is_left_to_the_backend() -> None:
    assert plan_sparse(TorchAttention(), Case(LENS[:1]).step.metadata, PAGE, 9) is None
