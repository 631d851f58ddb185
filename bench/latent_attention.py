"""Measures latent attention beside the same attention with expanded keys and values:
`python -m piecework.bench.latent_attention`.

Of one layer of DeepSeek V2 Lite's sizes, or those given: the bytes that a token takes in the cache,
and the time of a decode on the CPU's kernels, as it is served (queries taken to the latent vectors,
and what comes of them to values) and as multi-head attention over expanded keys and values. Those
are taken to be of one size that makes as many numbers and products: the mean of both.

Each figure is the least of many, taken in turn on one thread.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..kernels.attention import AttentionMetadata, KVLayout
from ..kernels.cpu.native.attention import native_or_torch
from .cpu_kernels import least

_PAGE_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="piecework.bench.latent_attention", description=__doc__)
    for name, size, text in (
        ("context", 8192, "tokens that the decode reads"),
        ("heads", 16, "query heads"),
        ("latent", 512, "numbers of a latent vector"),
        ("turned", 64, "numbers of a key that all heads share"),
        ("unturned", 128, "numbers of a head's key that are its own"),
        ("value", 128, "numbers of a head's value"),
        ("rounds", 20, "how often each is measured"),
    ):
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{text} (default {size})")
    given = parser.parse_args(arguments)
    for name, value in vars(given).items():
        if value < 1:
            parser.error(f"--{name} must be more than 0, got {value}")
    torch.set_num_threads(1)
    print("\n".join(_table(given)), flush=True)
    return 0


def _table(sizes: argparse.Namespace) -> list[str]:
    heads, key = sizes.heads, sizes.unturned + sizes.turned
    scale, dtype = key**-0.5, torch.bfloat16
    mean = (key + sizes.value) // 2
    latent = KVLayout(
        num_heads=heads,
        num_kv_heads=1,
        key_size=sizes.latent + sizes.turned,
        value_size=sizes.latent,
        scale=scale,
        dtype=dtype,
        latent=True,
    )
    expanded = KVLayout.of_heads(heads, heads, mean, dtype)
    attend = {name: _decode(each, sizes.context) for name, each in _named(latent, expanded)}
    q = torch.randn(heads, 1, sizes.unturned).to(dtype)
    of_keys = torch.randn(heads, sizes.unturned, sizes.latent).to(dtype)
    of_values = torch.randn(heads, sizes.latent, sizes.value).to(dtype)
    result = torch.randn(heads, 1, sizes.latent).to(dtype)

    def served() -> None:
        torch.bmm(q, of_keys)
        attend["latent"]()
        torch.bmm(result, of_values)

    with torch.inference_mode():
        best = least({"latent": served, "expanded": attend["expanded"]}, sizes.rounds)
    return [
        "| cache | bytes a token and layer | ms a decode and layer |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {each.token_bytes:,} | {best[name] * 1e3:.2f} |"
            for name, each in _named(latent, expanded)
        ),
    ]


def _named(latent: KVLayout, expanded: KVLayout) -> list[tuple[str, KVLayout]]:
    return [("latent", latent), ("expanded", expanded)]


def _decode(layout: KVLayout, context: int) -> Callable[[], Any]:
    """A step of one request that is `context` tokens long with its new one."""
    backend = native_or_torch()
    pages = -(-context // _PAGE_SIZE) + 1
    metadata = AttentionMetadata(
        query_lens=[1],
        seq_lens=[context],
        block_table=torch.arange(1, pages).view(1, -1),
        slot_mapping=torch.tensor([context - 1 + _PAGE_SIZE]),
    )
    plan = backend.plan(metadata, _PAGE_SIZE)
    shape = pages, _PAGE_SIZE, layout.num_kv_heads
    k_cache = torch.randn(*shape, layout.key_size).to(layout.dtype)
    v_cache = (
        k_cache[..., : layout.value_size]
        if layout.latent
        else torch.randn(*shape, layout.value_size).to(layout.dtype)
    )
    q = torch.randn(1, layout.num_heads, layout.key_size).to(layout.dtype)
    k = torch.randn(1, layout.num_kv_heads, layout.key_size).to(layout.dtype)
    v = k[..., : layout.value_size]
    out = q.new_empty(1, layout.num_heads, layout.value_size)
    return lambda: backend.run(q, k, v, out, k_cache, v_cache, plan, layout)


if __name__ == "__main__":
    sys.exit(main())
