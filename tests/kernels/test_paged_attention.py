"""Paged attention against the definition, token by token, for any mix of chunks, decodes, pages and windows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piecework.kernels.attention import AttentionMetadata
from piecework.kernels.paged_attention import TorchAttention

HEAD_SIZE = 8
KV_HEADS = 2


def defined(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, scale: float, window: int | None) -> torch.Tensor:
    """q [n, H, D] at positions first.. over keys, values [s, K, D]; one query and head at a time."""
    rows = []
    for offset, query in enumerate(q):
        position = first + offset
        low = 0 if window is None else max(0, position - window + 1)
        heads = []
        for head, vector in enumerate(query):
            kv = head // (q.shape[1] // KV_HEADS)
            weights = (keys[low : position + 1, kv] @ vector * scale).softmax(0)
            heads.append(weights @ values[low : position + 1, kv])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


class Step:
    """Random requests in a paged cache: `past` tokens are stored, `query_lens` are new. Pages are dealt out of order."""

    def __init__(self, lens: list[tuple[int, int]], *, page_size: int, heads: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.query_lens = [new for new, _ in lens]
        self.seq_lens = [new + past for new, past in lens]
        pages = [-(-seq // page_size) for seq in self.seq_lens]
        order = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
        table = torch.zeros(len(lens), max(pages), dtype=torch.int64)
        shape = (sum(pages) + 1, page_size, KV_HEADS, HEAD_SIZE)
        # Whatever lies in pages that nobody wrote must not matter.
        self.k_cache, self.v_cache = (torch.full(shape, 1e3), torch.full(shape, -1e3))
        self.keys = [torch.randn(seq, KV_HEADS, HEAD_SIZE, generator=generator) for seq in self.seq_lens]
        self.values = [torch.randn(seq, KV_HEADS, HEAD_SIZE, generator=generator) for seq in self.seq_lens]
        slots = []
        for row, seq in enumerate(self.seq_lens):
            table[row, : pages[row]] = torch.tensor([order.pop() for _ in range(pages[row])])
            position = torch.arange(seq)
            where = table[row][position // page_size] * page_size + position % page_size
            past = seq - self.query_lens[row]
            self.k_cache.view(-1, KV_HEADS, HEAD_SIZE)[where[:past]] = self.keys[row][:past]
            self.v_cache.view(-1, KV_HEADS, HEAD_SIZE)[where[:past]] = self.values[row][:past]
            slots.append(where[past:])
        self.q = torch.randn(sum(self.query_lens), heads, HEAD_SIZE, generator=generator)
        self.metadata = AttentionMetadata(
            query_lens=self.query_lens, seq_lens=self.seq_lens, block_table=table, slot_mapping=torch.cat(slots)
        )

    def new(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensor[len(tensor) - new :] for tensor, new in zip(tensors, self.query_lens, strict=True)])

    def expected(self, scale: float, window: int | None) -> torch.Tensor:
        queries = self.q.split(self.query_lens)
        parts = zip(queries, self.keys, self.values, self.seq_lens, strict=True)
        return torch.cat([defined(q, k, v, seq - len(q), scale, window) for q, k, v, seq in parts])


def run(step: Step, page_size: int, *, window: int | None, padding: int = 0) -> torch.Tensor:
    backend = TorchAttention()
    plan = backend.plan(step.metadata, page_size)
    pad = torch.full((padding, 1, HEAD_SIZE), float("nan"))
    q, k, v = (torch.cat([part, pad.expand(-1, part.shape[1], -1)]) for part in (step.q, step.new(step.keys), step.new(step.values)))
    out = torch.empty_like(q)
    for _ in range(2):  # the second layer of a step uses what the plan has made for the first
        backend.run(q, k, v, out, step.k_cache, step.v_cache, plan, scale=1 / math.sqrt(HEAD_SIZE), window=window)
    return out[: len(step.q)]


@settings(deadline=None, max_examples=120)
@given(
    lens=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([2, 6]),
    window=st.sampled_from([None, 1, 4, 100]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 5),
)
def test_it_equals_the_definition(
    lens: list[tuple[int, int]], page_size: int, heads: int, window: int | None, padding: int, seed: int
) -> None:
    step = Step(lens, page_size=page_size, heads=heads, seed=seed)
    out = run(step, page_size, window=window, padding=padding)
    assert torch.allclose(out, step.expected(1 / math.sqrt(HEAD_SIZE), window), atol=1e-4)


@pytest.mark.parametrize("lens", [[(1, 10)] * 4, [(1, 3), (1, 200), (1, 9)], [(1, 0)]])
def test_decodes_of_any_lengths(lens: list[tuple[int, int]]) -> None:
    step = Step(lens, page_size=16, heads=4, seed=1)
    assert torch.allclose(run(step, 16, window=None), step.expected(1 / math.sqrt(HEAD_SIZE), None), atol=1e-4)


def test_new_keys_and_values_are_stored_at_their_slots() -> None:
    step = Step([(3, 2), (1, 4)], page_size=4, heads=2, seed=2)
    run(step, 4, window=None)
    stored = step.k_cache.view(-1, KV_HEADS, HEAD_SIZE)[step.metadata.slot_mapping]
    assert torch.equal(stored, step.new(step.keys))


@settings(deadline=None, max_examples=60)
@given(
    past=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    padding=st.integers(0, 3),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_a_plan_that_is_updated_in_place(past: list[int], padding: int, page_size: int, window: int | None, seed: int) -> None:
    """Twice over the same plan: what the first step left behind must not be seen by the second, shorter one."""
    backend = TorchAttention()
    plan = backend.capture_plan(8, 21, page_size, torch.device("cpu"))
    for lens in (past, past[: len(past) // 2 + 1]):
        step = Step([(1, each) for each in lens], page_size=page_size, heads=4, seed=seed)
        backend.update_plan(plan, step.metadata)
        q, k, v = (torch.cat((part, torch.ones(padding, *part.shape[1:]))) for part in (step.q, step.new(step.keys), step.new(step.values)))
        out = torch.empty_like(q)
        backend.run(q, k, v, out, step.k_cache, step.v_cache, plan, scale=0.3, window=window)
        torch.testing.assert_close(out[: len(lens)], step.expected(0.3, window), atol=1e-4, rtol=1e-4)
        assert out.isfinite().all()
