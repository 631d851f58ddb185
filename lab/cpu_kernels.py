"""Measures the CPU's kernels of 8 bits beside those of 16: `python -m piecework.lab.cpu_kernels`.

products  linear layers of SmolLM2's sizes: bfloat16's time divided by that of INT8 and FP8
integers  weights in GGUF's blocks: the time with activations of 16 bits divided by that of 8
packing   weights brought into panels: gigabytes a second
quantise  activations, alone and behind norms and gates: plain torch, `torch.compile`, the kernel
invariant linear layers in bfloat16 with `--batch-invariant`: their time divided by that without
ways      the same by FMAs of float32: their time divided by that by dot products of bfloat16
cache     a decode's attention over a KV cache in 8 bits: bfloat16's time divided by theirs
shared    decodes that begin with the same pages: the time when each reads them for itself divided
          by that when they are read once for all

Each figure is the least of many, taken in turn on one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from ..kernels import reference
from ..kernels.attention import AttentionMetadata, KVLayout
from ..kernels.cache_format import CACHE_DTYPES, pages_shape, store
from ..kernels.cpu.native import quantize
from ..kernels.cpu.native.attention import NativeAttention, native_or_torch
from ..kernels.cpu.native.build import load_kernels
from ..kernels.cpu.native.linear import NativeLinear, multiply, native_linear

SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
"""Rows and columns of the weights."""
TOKENS = (1, 8, 64, 256, 1024)
_BLOCKS = dict.fromkeys(("Q4_0", "Q8_0"), SHAPES[2:4]) | dict.fromkeys(
    ("Q4_K", "Q6_K"), ((2048, 2048), (2048, 8192))
)
"""Formats of GGUF, and the weights that are in them."""
_PACKED = ("Q4_0", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4")
_KINDS = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn}
_BYTES = 3
"""`piecework_multiply_adds` knows products of bytes by it."""
_FASTEST, _FLOATS, _DOTS = -1, 0, 1
"""As `piecework_choose_way` knows them."""
_MOST_NUMBERS = 60_000_000
"""Of the weights of one shape, one after another, so that they come from memory."""
_LAYERS, _PAGE_SIZE, _HEADS, _KV_HEADS, _HEAD_SIZE = 30, 16, 9, 3, 64


def least(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of the thread's processor time that each call takes, taken in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for name in [*calls] * rounds:
        began = time.thread_time()
        calls[name]()
        best[name] = min(best[name], time.thread_time() - began)
    return best


def products(rounds: int) -> list[str]:
    """A row a shape: how many times as fast as bfloat16, and GFLOP/s of INT8 in parentheses."""
    heads = [f"{kind}: {tokens}" for kind in _KINDS for tokens in TOKENS]
    lines = [_row("N x K", *heads), _row(*["---"] * (1 + len(heads)))]
    for rows, columns in SHAPES:
        times = {tokens: _product_times(rows, columns, tokens, rounds) for tokens in TOKENS}
        cells = []
        for kind in _KINDS:
            for tokens, best in times.items():
                rate = 2 * rows * columns * tokens / best[kind] / 1e9
                shown = f" ({rate:.0f})" if kind == "int8" else ""
                cells.append(f"{best['bfloat16'] / best[kind]:.2f}{shown}")
        lines.append(_row(f"{rows:,} x {columns:,}", *cells))
    return lines


def _product_times(rows: int, columns: int, tokens: int, rounds: int) -> dict[str, float]:
    kernels, library = native_linear(), load_kernels()
    assert kernels is not None and library is not None
    copies = max(1, min(30, _MOST_NUMBERS // (rows * columns)))
    calls: dict[str, Callable[[], Any]] = {}
    for kind, dtype in {"bfloat16": torch.bfloat16, **_KINDS}.items():
        weight = torch.randn(rows, columns).mul(20).to(dtype)
        scales = [torch.rand(rows, 1)] if kind in _KINDS else []
        packed = [kernels.pack(kind, [weight], scales) for _ in range(copies)]
        x = torch.randn(tokens, columns).mul(20).to(dtype)
        x_scale = torch.rand(tokens, 1) if kind in _KINDS else None
        layout = kernels.layout(kind, columns)
        assert layout is not None

        def call(
            x: Any = x, scale: Any = x_scale, packed: Any = packed, layout: int = layout
        ) -> None:
            for weight in packed:
                multiply(library, x, scale, weight, None, rows, layout)

        calls[kind] = call
    return {kind: seconds / copies for kind, seconds in least(calls, rounds).items()}


def invariant(rounds: int) -> list[str]:
    """A row a shape: how many times as long each number of tokens takes."""
    library = load_kernels()
    assert library is not None
    return _in_turn(library.piecework_set_batch_invariant, (1, 0), rounds)


def ways(rounds: int) -> list[str]:
    """A row a shape: how many times as fast dot products are, by tokens."""
    library = load_kernels()
    assert library is not None
    if not library.piecework_choose_way(_DOTS):
        return ["this CPU has no dot products of bfloat16"]
    lines = _in_turn(library.piecework_choose_way, (_FLOATS, _DOTS), rounds)
    library.piecework_choose_way(_FASTEST)
    return lines


def _in_turn(choose: Callable[[int], Any], values: tuple[int, int], rounds: int) -> list[str]:
    """A row a shape of bfloat16: the time after `choose` of the first value divided by that after
    the second, which stays.
    """
    kernels, library = native_linear(), load_kernels()
    assert kernels is not None and library is not None
    layout = kernels.layout("bfloat16", SHAPES[0][1])
    assert layout is not None
    lines = [_row("N x K", *map(str, TOKENS)), _row(*["---"] * (1 + len(TOKENS)))]
    for rows, columns in SHAPES:
        copies = max(1, min(30, _MOST_NUMBERS // (rows * columns)))
        weights = [kernels.pack("bfloat16", [_random(rows, columns)]) for _ in range(copies)]
        cells = []
        for tokens in TOKENS:

            def call(value: int, x: torch.Tensor, weights: Any = weights, rows: int = rows) -> None:
                choose(value)
                for weight in weights:
                    multiply(library, x, None, weight, None, rows, layout)

            x = _random(tokens, columns)
            best = least({str(value): partial(call, value, x) for value in values}, rounds)
            first, second = best.values()
            cells.append(f"{first / second:.2f}")
        lines.append(_row(f"{rows:,} x {columns:,}", *cells))
    return lines


def integers(rounds: int) -> list[str]:
    """A row a format and shape: how many times as fast as with activations of 16 bits, and in
    parentheses the share of a core's peak in products of bytes.
    """
    library = load_kernels()
    assert library is not None
    multiply_adds = library.piecework_multiply_adds
    multiply_adds.restype = ctypes.c_int64
    steps = 1 << 22
    made = {"int8": lambda: multiply_adds(_BYTES, ctypes.c_int64(steps), 1)}
    peak = made["int8"]() / least(made, 5 * rounds)["int8"]
    lines = [_row("format, N x K", *map(str, TOKENS)), _row(*["---"] * (1 + len(TOKENS)))]
    for kind, shapes in _BLOCKS.items():
        numbers, size = GGML_QUANT_SIZES[Kind[kind]]
        for rows, columns in shapes:
            # Any bytes are a weight, and what they stand for takes no more or less time.
            blocks = torch.randint(0, 256, (rows, columns // numbers * size), dtype=torch.uint8)
            copies = min(30, _MOST_NUMBERS // (rows * columns))
            cells = []
            for tokens in TOKENS:
                x, calls = _random(tokens, columns), dict[str, Callable[[], Any]]()
                for activations in ("bf16", "int8"):
                    kernels = NativeLinear(library, activations=activations)
                    layout = kernels.layout(kind, columns)
                    assert layout is not None
                    packed = [kernels.pack(kind, [blocks]) for _ in range(copies)]

                    def call(
                        x: Any = x, packed: Any = packed, rows: int = rows, layout: int = layout
                    ) -> None:
                        for weight in packed:
                            multiply(library, x, None, weight, None, rows, layout)

                    calls[activations] = call
                best = least(calls, rounds)
                rate = 2 * rows * columns * tokens * copies / best["int8"]
                share = f" ({rate / peak:.2f})" if peak else ""
                cells.append(f"{best['bf16'] / best['int8']:.2f}{share}")
            lines.append(_row(f"{kind}, {rows:,} x {columns:,}", *cells))
    return lines


def packing(rounds: int) -> list[str]:
    """A row a format: gigabytes of a file that are brought into panels in a second, with the
    memory that they get.
    """
    kernels = native_linear()
    assert kernels is not None
    rows, columns = 2048, 8192
    lines = [_row("format", "GB/s"), _row("---", "---")]
    for kind in (*_PACKED, "bfloat16"):
        numbers, size = GGML_QUANT_SIZES[Kind[kind]] if kind in _PACKED else (1, 2)
        blocks = torch.randint(0, 256, (rows, columns // numbers * size), dtype=torch.uint8)
        weight = blocks if kind in _PACKED else blocks.view(torch.bfloat16)
        best = least({kind: partial(kernels.pack, kind, [weight])}, rounds)[kind]
        lines.append(_row(kind, f"{blocks.numel() / best / 1e9:.2f}"))
    return lines


def quantising(rounds: int, tokens: int = 256) -> list[str]:
    """Microseconds of plain torch / `torch.compile` of the reference / the kernel."""
    hidden, wide = 576, 1536
    x, residual, weight = (_random(*shape) for shape in ((tokens, hidden),) * 2 + ((hidden,),))
    gates, scale = _random(tokens, 2 * wide), torch.tensor([0.03])
    q, k, turns = _random(tokens, 9, 64), _random(tokens, 3, 64), _random(tokens, 1, 64)
    norms = _random(64), _random(64)
    lines = [_row("op", *map(str, _KINDS)), _row(*["---"] * (1 + len(_KINDS)))]
    cases: dict[str, Callable[[torch.dtype], tuple[Any, ...]]] = {
        "quantize_dynamic": lambda dtype: (x, hidden, dtype),
        "add_rms_norm_quantize_dynamic": lambda dtype: (x, residual, weight, 1e-5, hidden, dtype),
        "add_rms_norm_quantize_static": lambda dtype: (x, residual, weight, 1e-5, scale, dtype),
        "silu_and_mul_quantize_dynamic": lambda dtype: (gates, wide, dtype),
        "silu_and_mul_quantize_static": lambda dtype: (gates, scale, dtype),
    }
    for op, arguments in cases.items():
        cells = [_three_ways(op, arguments(dtype), rounds) for dtype in _KINDS.values()]
        lines.append(_row(op, *cells))
    rotated = _three_ways("norm_rotary_embedding", (q, k, *norms, 1e-5, turns, turns), rounds)
    return [*lines, _row("norm_rotary_embedding, bfloat16", rotated, "")]


def _three_ways(op: str, arguments: tuple[Any, ...], rounds: int) -> str:
    plain = getattr(reference, op)
    ways = (plain, torch.compile(plain, dynamic=True), getattr(quantize, op))
    with torch.inference_mode():
        for way in ways:
            way(*arguments)
        calls = {str(n): (lambda way=way: way(*arguments)) for n, way in enumerate(ways)}
        best = least(calls, rounds)
    return " / ".join(f"{seconds * 1e6:,.0f}" for seconds in best.values())


def cache(rounds: int, context: int = 4096) -> list[str]:
    """A decode of one request over `context` tokens, through all layers of SmolLM2's heads."""
    backend = native_or_torch()
    assert isinstance(backend, NativeAttention)
    pages = -(-context // _PAGE_SIZE) + 1
    metadata = AttentionMetadata(
        query_lens=[1],
        seq_lens=[context],
        block_table=torch.arange(1, pages).view(1, -1),
        slot_mapping=torch.tensor([context - 1 + _PAGE_SIZE]),
    )
    plan = backend.plan(metadata, _PAGE_SIZE)
    q = _random(1, _HEADS, _HEAD_SIZE)
    new, out = _random(1, _KV_HEADS, _HEAD_SIZE), torch.empty_like(q)
    plain = KVLayout.of_heads(_HEADS, _KV_HEADS, _HEAD_SIZE, torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {}
    for name, dtype in {"bfloat16": None, **CACHE_DTYPES}.items():
        layout = replace(plain, cache_dtype=dtype)
        tensors = [_filled(pages, dtype) for _ in range(2 * _LAYERS)]

        def call(layout: KVLayout = layout, tensors: list[torch.Tensor] = tensors) -> None:
            for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
                backend.run(q, new, new, out, keys, values, plan, layout)

        calls[name] = call
    best = least(calls, rounds)
    return [
        _row("KV cache", "ms a decode", "times as fast as bfloat16"),
        _row("---", "---", "---"),
        *(
            _row(name, f"{seconds * 1e3:.2f}", f"{best['bfloat16'] / seconds:.2f}")
            for name, seconds in best.items()
        ),
    ]


class _Shared(NamedTuple):
    requests: int
    common: int
    own: int
    heads: int
    kv_heads: int


_SHARED = (
    *(_Shared(requests, 640, 96, 9, 3) for requests in (2, 4, 8, 32)),
    _Shared(8, 2000, 96, 32, 8),
    _Shared(8, 0, 736, 9, 3),
)


def shared(rounds: int) -> list[str]:
    """A row a batch, `own` tokens behind those in common; a layer of heads of 64."""
    backend, library = native_or_torch(), load_kernels()
    assert isinstance(backend, NativeAttention) and library is not None
    lines = [_row("requests", "tokens in common", "own", "heads", "us", "times as fast")]
    lines.append(_row(*["---"] * 6))
    for requests, common, own, heads, kv_heads in _SHARED:
        first, rest = common // _PAGE_SIZE, -(-own // _PAGE_SIZE)
        others = torch.arange(requests * rest).view(requests, rest) + first
        table = torch.cat([torch.arange(first).expand(requests, -1), others], dim=1)
        length = common + own
        metadata = AttentionMetadata(
            query_lens=[1] * requests,
            seq_lens=[length] * requests,
            block_table=table,
            slot_mapping=table[:, -1] * _PAGE_SIZE + (length - 1) % _PAGE_SIZE,
        )
        shape = int(table.max()) + 1, _PAGE_SIZE, kv_heads, _HEAD_SIZE
        keys, values = _random(*shape), _random(*shape)
        q, new = (_random(requests, count, _HEAD_SIZE) for count in (heads, kv_heads))
        out = torch.empty_like(q)
        layout = KVLayout.of_heads(heads, kv_heads, _HEAD_SIZE, torch.bfloat16)
        plan = backend.plan(metadata, _PAGE_SIZE)

        # Nobody shares keys in a batch whose rows depend on nothing else.
        def call(
            alone: int,
            given: tuple[Any, ...] = (q, new, new, out, keys, values, plan, layout),
        ) -> None:
            library.piecework_set_batch_invariant(alone)
            backend.run(*given)

        best = least({str(alone): partial(call, alone) for alone in (0, 1)}, 4 * rounds)
        cells = requests, common, own, f"{heads} and {kv_heads}"
        lines.append(
            _row(*map(str, cells), f"{best['0'] * 1e6:,.0f}", f"{best['1'] / best['0']:.2f}")
        )
    library.piecework_set_batch_invariant(0)
    return lines


def _filled(pages: int, dtype: torch.dtype | None) -> torch.Tensor:
    """Pages of random keys, in bfloat16 or rounded to `dtype`."""
    values = _random(pages * _PAGE_SIZE, _KV_HEADS, _HEAD_SIZE)
    if dtype is None:
        return values.view(pages, _PAGE_SIZE, _KV_HEADS, _HEAD_SIZE)
    shape = pages_shape(pages, _PAGE_SIZE, _KV_HEADS, _HEAD_SIZE, dtype)
    kept = torch.zeros(shape, dtype=torch.uint8).view(dtype)
    store(values, kept, torch.arange(len(values)), 1.0)
    return kept


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


PARTS = {
    "products": products,
    "invariant": invariant,
    "ways": ways,
    "integers": integers,
    "packing": packing,
    "quantise": quantising,
    "cache": cache,
    "shared": shared,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.cpu_kernels",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", default=",".join(PARTS), metavar="LIST", help="default: all")
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="of each figure; default: 15"
    )
    arguments = parser.parse_args(argv)
    names = arguments.parts.split(",")
    if not set(names) <= set(PARTS) or arguments.rounds < 1:
        parser.error(f"--parts takes some of {','.join(PARTS)}, --rounds a number above 0")
    if load_kernels() is None:
        parser.error("there are no native kernels on this machine; see the log for the reason")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name in names:
        print("\n".join([*PARTS[name](arguments.rounds), ""]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
