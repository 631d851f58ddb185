"""Steps of paged attention for tests, and what they must give by the definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from piecework.kernels import cache_format
from piecework.kernels.attention import AttentionBackend, AttentionMetadata, KVLayout


def defined(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """q [n, H, D] at positions first.. over keys, values [s, K, D]; one query and head at a
    time.
    """
    rows = []
    for offset, query in enumerate(q):
        position = first + offset
        low = 0 if window is None else max(0, position - window + 1)
        heads = []
        for head, vector in enumerate(query):
            kv = head // (q.shape[1] // keys.shape[1])
            weights = (keys[low : position + 1, kv] @ vector * scale).softmax(0)
            heads.append(weights @ values[low : position + 1, kv])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def untouched(actual: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two tensors hold the same, where what is no number equals itself."""
    return torch.equal(actual.isnan(), before.isnan()) and torch.equal(
        actual.nan_to_num(), before.nan_to_num()
    )


class Step:
    """Random requests in a paged cache: `past` tokens are stored, `query_lens` are new. Pages are
    dealt out of order.
    """

    def __init__(
        self,
        lens: list[tuple[int, int]],
        *,
        page_size: int,
        heads: int,
        seed: int,
        kv_heads: int = 2,
        head_size: int = 8,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.page_size = page_size
        self.query_lens = [new for new, _ in lens]
        self.seq_lens = [new + past for new, past in lens]
        pages = [-(-seq // page_size) for seq in self.seq_lens]
        order = (torch.randperm(sum(pages), generator=generator) + 1).tolist()
        table = torch.zeros(len(lens), max(pages), dtype=torch.int64)
        shape = (sum(pages) + 1, page_size, kv_heads, head_size)
        # Whatever lies in pages that nobody wrote must not matter, and nothing shows more than what
        # is no number.
        k_cache, v_cache = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        self.keys = [
            torch.randn(seq, kv_heads, head_size, generator=generator).to(dtype)
            for seq in self.seq_lens
        ]
        self.values = [
            torch.randn(seq, kv_heads, head_size, generator=generator).to(dtype)
            for seq in self.seq_lens
        ]
        slots = []
        for row, seq in enumerate(self.seq_lens):
            table[row, : pages[row]] = torch.tensor([order.pop() for _ in range(pages[row])])
            position = torch.arange(seq)
            where = table[row][position // page_size] * page_size + position % page_size
            past = seq - self.query_lens[row]
            k_cache.view(-1, kv_heads, head_size)[where[:past]] = self.keys[row][:past].float()
            v_cache.view(-1, kv_heads, head_size)[where[:past]] = self.values[row][:past].float()
            slots.append(where[past:])
        self.q = torch.randn(sum(self.query_lens), heads, head_size, generator=generator).to(
            device, dtype
        )
        self.heads = KVLayout.of_heads(heads, kv_heads, head_size, dtype)
        self.k_cache, self.v_cache = k_cache.to(device, dtype), v_cache.to(device, dtype)
        indices = torch.int32 if device == "npu" else torch.int64
        self.metadata = AttentionMetadata(
            query_lens=self.query_lens,
            seq_lens=self.seq_lens,
            block_table=table.to(device, indices),
            slot_mapping=torch.cat(slots).to(device, indices),
        )

    def layout(self, window: int | None = None) -> KVLayout:
        return replace(self.heads, window=window)

    def new(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(
            [
                tensor[len(tensor) - new :]
                for tensor, new in zip(tensors, self.query_lens, strict=True)
            ]
        ).to(self.q.device)

    def expected(self, window: int | None = None) -> torch.Tensor:
        """Return what attention is by its definition, in float64 on the CPU."""
        layout, rows = self.heads, []
        queries = self.q.cpu().double().split(self.query_lens)
        for q, keys, values in zip(queries, self.keys, self.values, strict=True):
            heads = slice(layout.skipped_heads, layout.skipped_heads + q.shape[1])
            keys, values = (
                part.double().repeat_interleave(layout.group, 1)[:, heads]
                for part in (keys, values)
            )
            key = torch.arange(len(keys))
            position = torch.arange(len(keys) - len(q), len(keys))[:, None]
            hidden = key > position
            if layout.chunked:
                assert layout.window is not None
                hidden |= key < position // layout.window * layout.window
            elif window is not None:
                hidden |= key <= position - window
            scores = torch.einsum("nhd,shd->hns", q, keys) * layout.scale
            if layout.softcap is not None:
                scores = layout.softcap * (scores / layout.softcap).tanh()
            if layout.slopes is not None:
                scores += layout.slopes.cpu().double()[:, None, None] * (key - position)
            scores = scores.masked_fill(hidden, float("-inf"))
            if layout.sinks is not None:
                sinks = layout.sinks.cpu().double()[:, None, None].expand(-1, len(q), -1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., : len(keys)]
            rows.append(torch.einsum("hns,shd->nhd", weights, values))
        return torch.cat(rows)

    def run(
        self, backend: AttentionBackend, *, window: int | None = None, padding: int = 0
    ) -> torch.Tensor:
        """Attention of the step's tokens; `padding` rows of NaN behind them, as a step has that is
        padded to a captured size.
        """
        plan = backend.plan(self.metadata, self.page_size)
        q, k, v = (
            torch.cat([part, part.new_full((padding, *part.shape[1:]), float("nan"))])
            for part in (self.q, self.new(self.keys), self.new(self.values))
        )
        out = q.new_empty(*q.shape[:2], self.heads.value_size)
        for _ in range(2):  # the second layer of a step uses what the plan has made for the first
            backend.run(q, k, v, out, self.k_cache, self.v_cache, plan, self.layout(window))
        return out[: len(self.q)]

    def run_quantized(
        self, backend: Any, scale: torch.Tensor, dtype: torch.dtype, **layout: Any
    ) -> torch.Tensor:
        """The same in 8 bits, by a backend that writes them."""
        plan = backend.plan(self.metadata, self.page_size)
        out = self.q.new_empty(*self.q.shape[:2], self.heads.value_size, dtype=dtype)
        tensors = (self.q, self.new(self.keys), self.new(self.values), out, scale)
        for _ in range(2):
            backend.run_quantized(*tensors, self.k_cache, self.v_cache, plan, self.layout(**layout))
        return out

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values that lie at the slots of the new tokens."""
        slots = self.metadata.slot_mapping.long()
        return self.k_cache.flatten(0, 1)[slots], self.v_cache.flatten(0, 1)[slots]


def latent(step: Step, value_size: int) -> Step:
    """The step over keys alone, whose first numbers are the values."""
    step.heads = replace(step.heads, value_size=value_size, latent=True)
    step.values = [keys[..., :value_size] for keys in step.keys]
    step.v_cache = step.k_cache[..., :value_size]
    return step


def kept(x: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    """x [T, K, N] as it is read from pages of three tokens."""
    tokens, heads, size = x.shape
    cache = torch.zeros(cache_format.pages_shape(-(-tokens // 3), 3, heads, size, dtype)).to(dtype)
    returned = cache_format.store(x, cache, torch.arange(tokens), scale)
    pages = torch.arange(len(cache))
    read = cache_format.load(cache, pages, heads, size, scale, x.dtype).flatten(0, 1)[:tokens]
    assert torch.equal(read.nan_to_num(7), returned.nan_to_num(7))
    return read


def quantized(
    step: Step, dtype: torch.dtype, scales: tuple[float, float] = (1.0, 1.0)
) -> tuple[Step, list[torch.Tensor], list[torch.Tensor]]:
    """The step over a cache in 8 bits, which holds its past, and all keys and values as they are
    read from it, in float32. `scales`: those of keys and values in float8.
    """
    scales = (1.0, 1.0) if dtype == torch.int8 else scales
    step.heads = replace(step.heads, cache_dtype=dtype, k_scale=scales[0], v_scale=scales[1])
    caches, read = [], []
    for plain, numbers, scale in zip(
        (step.k_cache, step.v_cache), (step.keys, step.values), scales, strict=True
    ):
        # Bytes that nobody wrote are NaN in e4m3 and as scales.
        shape = cache_format.pages_shape(*plain.shape, dtype)
        cache = torch.full(shape, 0xFF, dtype=torch.uint8).view(dtype)
        flat = plain.flatten(0, 1).float().cpu()
        (written,) = torch.where(flat.isfinite().all(-1).all(-1))
        cache_format.store(flat[written], cache, written, scale)
        caches.append(cache.to(plain.device))
        read.append([kept(each.float(), dtype, scale) for each in numbers])
    step.k_cache, step.v_cache = caches
    return step, *read
