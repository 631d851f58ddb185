"""Measures the CPU's attention of prompts: `python -m piecework.lab.cpu_attention`.

A row a prompt, of one layer on one thread, by FMAs of float32 and by dot products of bfloat16: the
rate of each, and its mean error against float64 as a share of plain torch's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..kernels.attention import AttentionMetadata, KVLayout
from ..kernels.cpu.native.attention import NativeAttention
from ..kernels.cpu.native.build import load_kernels
from ..kernels.paged_attention import TorchAttention
from .cpu_kernels import least

_PAGE_SIZE = 16
_FASTEST, _FLOATS, _DOTS = -1, 0, 1
"""As `piecework_choose_way` knows them."""


class Prompt(NamedTuple):
    new: int
    cached: int
    heads: int
    kv_heads: int
    head_size: int


PROMPTS = (
    *(Prompt(new, 0, 9, 3, 64) for new in (64, 256, 1024, 4096)),
    Prompt(512, 3000, 9, 3, 64),
    Prompt(512, 7680, 9, 3, 64),
    Prompt(1024, 0, 32, 8, 64),
    Prompt(1024, 0, 16, 2, 128),
)


def rows(rounds: int) -> list[str]:
    """A Markdown table."""
    library = load_kernels()
    assert library is not None
    lines = ["| new on cached | heads | way | GFLOP/s | error |", "|---|---|---|---|---|"]
    backend = NativeAttention(library)
    ways = {"float32": _FLOATS, "bfloat16": _DOTS}
    ways = {name: way for name, way in ways.items() if library.piecework_choose_way(way)}
    for prompt in PROMPTS:
        new, cached, heads, kv_heads, size = prompt
        metadata, tensors = _step(prompt)
        layout = KVLayout.of_heads(heads, kv_heads, size, torch.bfloat16)
        exact = _run(TorchAttention(), metadata, tensors, layout, torch.float64)
        plain = _run(TorchAttention(), metadata, tensors, layout)
        out, errors = torch.empty_like(plain), dict[str, float]()
        plan = backend.plan(metadata, _PAGE_SIZE)
        given: tuple[Any, ...] = (*tensors[:3], out, *tensors[3:], plan, layout)

        def call(way: int, given: tuple[Any, ...] = given) -> None:
            library.piecework_choose_way(way)
            backend.run(*given)

        for name, way in ways.items():
            call(way)
            errors[name] = float((out - exact).abs().mean() / (plain - exact).abs().mean())
        best = least({name: partial(call, way) for name, way in ways.items()}, rounds)
        operations = 4 * heads * size * (new * cached + new * (new + 1) // 2)
        lines += [
            f"| {new:,} on {cached:,} | {heads} and {kv_heads} of {size} | {name} "
            f"| {operations / best[name] / 1e9:.0f} | {errors[name]:.2f} |"
            for name in ways
        ]
    library.piecework_choose_way(_FASTEST)
    return lines


def _step(prompt: Prompt) -> tuple[AttentionMetadata, list[torch.Tensor]]:
    """With q, k, v, and the pages of keys and values."""
    new, cached, heads, kv_heads, size = prompt
    pages = -(-(new + cached) // _PAGE_SIZE)
    table, position = torch.randperm(pages), torch.arange(cached, cached + new)
    metadata = AttentionMetadata(
        query_lens=[new],
        seq_lens=[new + cached],
        block_table=table.view(1, -1),
        slot_mapping=table[position // _PAGE_SIZE] * _PAGE_SIZE + position % _PAGE_SIZE,
    )
    shapes: list[tuple[int, ...]] = [(new, heads, size), *[(new, kv_heads, size)] * 2]
    shapes += [(pages, _PAGE_SIZE, kv_heads, size)] * 2
    return metadata, [torch.randn(*shape).bfloat16() for shape in shapes]


def _run(
    backend: TorchAttention,
    metadata: AttentionMetadata,
    tensors: list[torch.Tensor],
    layout: KVLayout,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    q, k, v, keys, values = (each.to(dtype, copy=True) for each in tensors)
    out = torch.empty_like(q)
    backend.run(q, k, v, out, keys, values, backend.plan(metadata, _PAGE_SIZE), layout)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.cpu_attention",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="of each figure; default: 10"
    )
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1:
        parser.error("--rounds takes a number above 0")
    if load_kernels() is None:
        parser.error("there are no native kernels on this machine; see the log for the reason")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("\n".join(rows(arguments.rounds)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
