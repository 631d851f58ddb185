"""What the KV cache takes of models with sliding windows: `python -m piecework.lab.window_cache`.

Bytes a token, and how many texts of a length fit some memory: with pages for whole texts in all
layers, and with those of a window where layers have one. Sizes as `piecework serve` chooses them
for a GPU; nothing is allocated.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from typing import NamedTuple

import torch

from ..kernels.attention import KVLayout
from ..kernels.platform.step_defaults import StepDefaults
from ..runtime.cache.pool import is_windowed, page_bytes, shared_pages, window_of
from ..runtime.config.engine import EngineConfig
from ..runtime.config.model import ModelConfig
from ..runtime.config.resolve import WindowPages, resolve_cache, resolve_steps


class Shape(NamedTuple):
    """Of a published config.json. Every `full_every`th layer sees all; 0: none does."""

    layers: int
    kv_heads: int
    head_size: int
    window: int
    full_every: int

    def layouts(self) -> list[KVLayout]:
        """Of its layers, in 16 bits."""
        return [
            KVLayout.of_heads(
                self.kv_heads,
                self.kv_heads,
                self.head_size,
                torch.bfloat16,
                window=None
                if self.full_every and layer % self.full_every == self.full_every - 1
                else self.window,
            )
            for layer in range(self.layers)
        ]


SHAPES = {
    "gemma-3-1b": Shape(26, 1, 256, 512, 6),
    "gemma-3-27b": Shape(62, 16, 128, 1024, 6),
    "gpt-oss-20b": Shape(24, 8, 64, 128, 2),
    "gpt-oss-120b": Shape(36, 8, 64, 128, 2),
    "mistral-7b-v0.1": Shape(32, 8, 128, 4096, 0),
}


class Room(NamedTuple):
    """Bytes that a token of the texts takes of the cache, and how many texts fit."""

    token_bytes: float
    texts: int


def room(shape: Shape, length: int, memory: int, *, windows: bool) -> Room:
    """In `memory` bytes, for texts of `length` tokens."""
    layouts = shape.layouts()
    model = ModelConfig(
        architecture="", vocab_size=1, hidden_size=1, num_layers=shape.layers, num_heads=1,
        num_kv_heads=1, head_dim=2, intermediate_size=1, norm_eps=1e-6,
        max_position_embeddings=length, rope_theta=1e4,
    )  # fmt: skip
    steps = resolve_steps(EngineConfig(), model, StepDefaults())
    window, size = window_of(layouts, length) if windows else None, steps.page_size
    own = [each for each in layouts if is_windowed(each, window)]
    others = [each for each in layouts if not is_windowed(each, window)]
    shared = shared_pages(layouts, window)
    config = resolve_cache(
        steps,
        None,
        free_bytes=memory,
        page_bytes=page_bytes(others, size),
        window=WindowPages(window, page_bytes(own, size), shared) if window else None,
    )
    texts, pages = config.max_total_tokens // length, -(-length // size)
    if window is None:
        return Room(page_bytes(others, 1), texts)
    # Each holds the pages of its window, and one is computed in chunks.
    each, chunk = -(-(window - 1) // size) + 1, -(-steps.chunked_prefill_size // size)
    if shared is None:
        texts = min(texts, (config.window_pages - 1 - chunk) // each)
    else:
        texts = bisect_right(
            range(1, steps.max_running_requests + 1),
            config.kv_slabs - 1,
            key=lambda count: shared.slabs(count * pages, count * each + chunk),
        )
    taken = pages * page_bytes(others, size) + each * page_bytes(own, size)
    return Room(taken / length, texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=32_768, help="tokens of a text")
    parser.add_argument("--memory-gib", type=int, default=40, help="of the KV cache")
    options = parser.parse_args()
    print(f"texts of {options.length:,} tokens, {options.memory_gib} GiB of KV cache, in bfloat16")
    print(f"{'':16} {'bytes a token':>27} {'texts that fit':>23}")
    print(f"{'':16} {'all pages':>13} {'windows':>13} {'all pages':>13} {'windows':>9}")
    for name, shape in SHAPES.items():
        before, after = (
            room(shape, options.length, options.memory_gib << 30, windows=windows)
            for windows in (False, True)
        )
        print(
            f"{name:16} {before.token_bytes:13,.0f} {after.token_bytes:13,.0f} "
            f"{before.texts:13,} {after.texts:9,}"
        )


if __name__ == "__main__":
    main()
