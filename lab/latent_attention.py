"""Measures latent attention beside the same attention with expanded keys and values:
`python -m piecework.lab.latent_attention`.

Of one layer of DeepSeek V2 Lite's sizes, or those given: the bytes that a token takes in the cache,
and the time of a decode on the CPU's kernels, as it is served (queries taken to the latent vectors,
and what comes of them to values) and as multi-head attention over expanded keys and values. Those
are taken to be of one size that makes as many numbers and products: the mean of both.

Of prompts, the time of a layer in both forms of `kernels.latent_attention`: absorbed as decodes
are, and with keys and values expanded; which is served is marked.

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
from ..kernels.latent_attention import LatentLayer, are_long, plan_latent, run_latent
from .cpu_kernels import least

_PAGE_SIZE = 16


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="piecework.lab.latent_attention", description=__doc__)
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
    parser.add_argument(
        "--prompts",
        default="2048/2048,128/2048,256/8192,2048/8192",
        help="new tokens of all tokens of each prompt (default %(default)s)",
    )
    given = parser.parse_args(arguments)
    try:
        prompts = [tuple(map(int, each.split("/"))) for each in given.prompts.split(",")]
        if not all(len(each) == 2 and 0 < each[0] <= each[1] for each in prompts):
            raise ValueError
    except ValueError:
        parser.error(f"--prompts takes new/all,new/all, got {given.prompts!r}")
    for name, value in vars(given).items():
        if name != "prompts" and value < 1:
            parser.error(f"--{name} must be more than 0, got {value}")
    torch.set_num_threads(1)
    print("\n".join(_table(given)), flush=True)
    print("\n| new tokens | of | ms absorbed | ms expanded |\n| --- | --- | --- | --- |")
    for new, length in prompts:
        print(_prompt(given, new, length), flush=True)
    return 0


def _prompt(sizes: argparse.Namespace, new: int, length: int) -> str:
    """A row of the table of prompts."""
    backend, heads, dtype = native_or_torch(), sizes.heads, torch.bfloat16
    layout = _latent_layout(sizes)
    metadata = _metadata(new, length)
    pages = metadata.block_table.shape[1] + 1
    layer = LatentLayer(
        q=torch.randn(new, heads, sizes.unturned + sizes.turned).to(dtype),
        k=torch.randn(new, 1, layout.key_size).to(dtype),
        weight=torch.randn(heads * (sizes.unturned + sizes.value), sizes.latent).to(dtype),
        out=torch.empty(new, heads, sizes.value, dtype=dtype),
        cache=torch.randn(pages, _PAGE_SIZE, 1, layout.key_size).to(dtype),
        layout=layout,
    )
    plan = backend.plan(metadata, _PAGE_SIZE)

    def form(is_long: bool) -> Callable[[], Any]:
        planned = plan_latent(backend, metadata, _PAGE_SIZE, [is_long])
        return lambda: run_latent(backend, layer, plan, planned)

    rounds = min(sizes.rounds, 3)
    with torch.inference_mode():
        best = least({"absorbed": form(is_long=False), "expanded": form(is_long=True)}, rounds)
    (is_long,) = are_long(metadata, layer, backend)
    marks = "" if is_long else " (served)", " (served)" if is_long else ""
    columns = (f"{best[name] * 1e3:.1f}" for name in ("absorbed", "expanded"))
    cells = (f"{column}{mark}" for column, mark in zip(columns, marks, strict=True))
    return f"| {new} | {length} | {' | '.join(cells)} |"


def _table(sizes: argparse.Namespace) -> list[str]:
    heads, dtype = sizes.heads, torch.bfloat16
    mean = (sizes.unturned + sizes.turned + sizes.value) // 2
    latent = _latent_layout(sizes)
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


def _latent_layout(sizes: argparse.Namespace) -> KVLayout:
    return KVLayout(
        num_heads=sizes.heads,
        num_kv_heads=1,
        key_size=sizes.latent + sizes.turned,
        value_size=sizes.latent,
        scale=(sizes.unturned + sizes.turned) ** -0.5,
        dtype=torch.bfloat16,
        latent=True,
    )


def _metadata(new: int, length: int) -> AttentionMetadata:
    """One request, `new` of whose tokens are."""
    pages = -(-length // _PAGE_SIZE) + 1
    return AttentionMetadata(
        query_lens=[new],
        seq_lens=[length],
        block_table=torch.arange(1, pages).view(1, -1),
        slot_mapping=torch.arange(length - new, length) + _PAGE_SIZE,
    )


def _named(latent: KVLayout, expanded: KVLayout) -> list[tuple[str, KVLayout]]:
    return [("latent", latent), ("expanded", expanded)]


def _decode(layout: KVLayout, context: int) -> Callable[[], Any]:
    """A step of one request that is `context` tokens long with its new one."""
    backend = native_or_torch()
    metadata = _metadata(1, context)
    plan = backend.plan(metadata, _PAGE_SIZE)
    shape = metadata.block_table.shape[1] + 1, _PAGE_SIZE, layout.num_kv_heads
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
