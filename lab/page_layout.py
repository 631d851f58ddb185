"""How long decodes read pages of windows and of other layers, on a CPU: `python -m
piecework.lab.page_layout`.

Attention of all layers of a model of Gemma 3's shape, for a step of eight requests: where each kind
of layer has memory of its own, and where they share slabs of so many pages. The least of all
rounds, in turn; one thread.
"""

from __future__ import annotations

import argparse
import time
from itertools import repeat
from typing import NamedTuple

import torch

from ..kernels.attention import AttentionMetadata, KVLayout
from ..kernels.cpu.native.attention import native_or_torch
from ..kernels.cpu.platform import CpuPlatform
from ..runtime.cache.pool import KVPool
from ..runtime.cache.slabs import PageAllocator, SharedPages, Slabs
from ..runtime.core.forward_context import PagedAttention
from ..runtime.layers.attention import attention, register_attention

PAGE, WINDOW, REQUESTS, CONTEXT = 16, 512, 8, 700
LEAST = [0, 1, 2, 4, 8, 16]
"""Pages in a slab; 0: no memory is shared."""


class Decode(NamedTuple):
    attention: PagedAttention
    metadata: AttentionMetadata


def decode_with(least: int, layouts: list[KVLayout]) -> Decode:
    """A step whose requests have got their pages one after another."""
    each = -(-CONTEXT // PAGE)
    pages = REQUESTS * each
    windowed = sum(layout.window is not None for layout in layouts)
    shared = SharedPages.of(len(layouts) - windowed, windowed, least) if least else None
    count = shared.slabs(pages, pages) + 1 if shared else 0
    pool = KVPool(
        layouts, num_pages=pages + 1, page_size=PAGE, platform=CpuPlatform(), window=WINDOW,
        window_pages=pages + 1, shared=shared, num_slabs=count,
    )  # fmt: skip
    # Memory that nobody has written is one page of zeros to the kernel.
    for tensor in [*pool.k, *pool.v] if shared is None else pool.k[:1]:
        tensor.fill_(0.01)
    if shared is None:
        allocators = [PageAllocator(Slabs(pages + 1)) for _ in range(2)]
    else:
        slabs = Slabs(count)
        allocators = [PageAllocator(slabs, kind) for kind in (shared.full, shared.window)]
    metadata = None
    for allocator in reversed(allocators):
        table = torch.tensor([allocator.allocate(each) for _ in range(REQUESTS)])
        metadata = AttentionMetadata(
            query_lens=[1] * REQUESTS,
            seq_lens=[CONTEXT] * REQUESTS,
            block_table=table,
            slot_mapping=table[:, -1] * PAGE + (CONTEXT - 1) % PAGE,
            window=metadata,
        )
    assert metadata is not None
    return Decode(PagedAttention(backend=native_or_torch(), pool=pool), metadata)


def seconds(decode: Decode, tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> float:
    began = time.perf_counter()
    with decode.attention.step(decode.metadata):
        for layer in range(len(decode.attention.pool.layouts)):
            attention(*tensors, layer)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    register_attention("CPU")
    torch.set_num_threads(1)
    layouts = [
        KVLayout.of_heads(4, 1, 256, torch.bfloat16, window=None if layer % 6 == 5 else WINDOW)
        for layer in range(18)
    ]
    decodes = {least: decode_with(least, layouts) for least in LEAST}
    new = torch.randn(REQUESTS, 1, 256).bfloat16()
    tensors = torch.randn(REQUESTS, 4, 256).bfloat16(), new, new.clone()
    best = dict(zip(LEAST, repeat(float("inf")), strict=False))
    for _ in range(rounds):
        for least, decode in decodes.items():
            best[least] = min(best[least], seconds(decode, tensors))
    for least, taken in best.items():
        name = f"slabs of {least}" if least else "apart"
        print(f"{name:12} {taken * 1e3:7.3f} ms {taken / best[0]:5.2f}")


if __name__ == "__main__":
    main()
