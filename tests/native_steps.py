"""One model's decode steps, op by op and in one native call, over the same cache."""

from __future__ import annotations

from pathlib import Path

import torch
from native_variants import built

from piecework.kernels import cache_format
from piecework.kernels.attention import AttentionMetadata
from piecework.kernels.cpu.native import build
from piecework.kernels.cpu.native.linear import native_linear
from piecework.kernels.cpu.native.step import NativeStep
from piecework.kernels.cpu.platform import CpuPlatform
from piecework.kernels.paged_attention import TorchAttention
from piecework.runtime.cache.pool import KVPool, in_cache_dtype, window_of
from piecework.runtime.core.forward_context import PagedAttention
from piecework.runtime.layers.attention import register_attention
from piecework.runtime.loader.loader import load_model

PAGE, PAGES = 16, 80


def tensors(pool: KVPool) -> list[torch.Tensor]:
    return [*pool.k, *pool.v]


class Case:
    """One model's weights and a cache of random keys and values, which both ways start from."""

    def __init__(self, path: Path, quantization: str) -> None:
        self.model = load_model(
            str(path),
            torch.bfloat16,
            torch.device("cpu"),
            progress=False,
            kernels=native_linear(),
            quantization=quantization,
        )
        # A number that is rounded to its neighbour of 8 bits is far from it.
        self.loss = 0.03 if quantization == "none" else 0.17
        self.config = self.model.config
        register_attention("CPU")
        generator = torch.Generator().manual_seed(0)
        self.layouts = self.model.kv_layouts(torch.bfloat16)
        self.cache = [
            torch.randn(tensor.shape, generator=generator) for tensor in tensors(self.pool())
        ]

    def pool(self) -> KVPool:
        """Layers with a window have pages of their own."""
        return KVPool(
            self.layouts,
            num_pages=PAGES,
            page_size=PAGE,
            platform=CpuPlatform(),
            window=window_of(self.layouts, 1000),
            window_pages=PAGES,
        )

    def filled(self) -> KVPool:
        pool = self.pool()
        for tensor, numbers in zip(tensors(pool), self.cache, strict=True):
            tensor.copy_(numbers)
        return pool

    def step(
        self, lens: list[tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
        """Ids, positions and the rest of a step of requests with (new, past) tokens; pages are
        dealt one after another, and those of windows from the last one on.
        """
        generator = torch.Generator().manual_seed(len(lens))
        width = max(-(-(new + past) // PAGE) for new, past in lens)
        table = torch.arange(1, 1 + len(lens) * width).view(len(lens), width)
        positions = [torch.arange(past, past + new) for new, past in lens]
        metadata = None
        for pages in (PAGES - table, table):
            slots = [
                row[where // PAGE] * PAGE + where % PAGE
                for row, where in zip(pages, positions, strict=True)
            ]
            metadata = AttentionMetadata(
                query_lens=[new for new, _ in lens],
                seq_lens=[new + past for new, past in lens],
                block_table=pages,
                slot_mapping=torch.cat(slots),
                window=metadata,
            )
        assert metadata is not None
        ids = torch.randint(
            self.config.vocab_size, (sum(new for new, _ in lens),), generator=generator
        )
        return ids, torch.cat(positions), metadata

    def in_bytes(self, kv_cache_dtype: str) -> KVPool:
        """The cache in 8 bits, with scales a layer where it is float8."""
        pool = KVPool(
            in_cache_dtype(
                self.layouts,
                kv_cache_dtype,
                [(0.5 + layer, 0.1) for layer in range(len(self.layouts))],
            ),
            num_pages=PAGES,
            page_size=PAGE,
            platform=CpuPlatform(),
        )
        for tensor, numbers in zip(tensors(pool), self.cache, strict=True):
            cache_format.store(numbers.flatten(0, 1), tensor, torch.arange(PAGES * PAGE), 1.0)
        return pool

    def logits(self, lens: list[tuple[int, int]], pool: KVPool) -> torch.Tensor:
        """Op by op."""
        ids, positions, metadata = self.step(lens)
        attention = PagedAttention(backend=TorchAttention(), pool=pool)
        with torch.inference_mode(), attention.step(metadata):
            logits: torch.Tensor = self.model.compute_logits(self.model(ids, positions))
        return logits

    def eager(self, lens: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.filled()
        return self.logits(lens, pool), torch.stack(tensors(pool))

    def native(
        self, lens: list[tuple[int, int]], variant: build.Variant
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self.filled()
        library = built(variant)
        kernels = NativeStep(library, self.model, pool.layouts, pool.k, pool.v, second=pool.second)
        logits = self.model.compute_logits(kernels.call(*self.step(lens)).hidden())
        return logits, torch.stack(tensors(pool))
