"""Compares the CPU's products with weights of few bits with those in bfloat16:

    python -m piecework.lab.block_speed

A row per format: bfloat16's time divided by that of the format, for each number of tokens, with
activations as `--cpu-activations auto` has them and, in parentheses, in 16 bits. The weights are
taken in turn on one thread, and each figure is the least of many.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from ..kernels.cpu.native.build import load_kernels
from ..kernels.cpu.native.linear import NativeLinear, multiply
from .cpu_kernels import _random, _row, least

# Formats of few bits. "Q4_1" also holds AWQ's, GPTQ's and other weights of 4 bits in groups.
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "IQ4_XS", "MXFP4", "NVFP4")
ROWS, COLUMNS, COPIES = 2048, 2048, 12
TOKENS = (1, 8, 64, 256)


def _calls(kind: str, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Return a call for each way in which activations are rounded."""
    library = load_kernels()
    assert library is not None
    calls: dict[str, Callable[[], Any]] = {}
    for activations in ("auto", "bf16"):
        kernels = NativeLinear(library, activations=activations)
        layout = kernels.layout(kind, COLUMNS)
        assert layout is not None
        if kind == "bfloat16":
            stored = _random(ROWS, COLUMNS)
        else:
            numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
            # Small bytes are finite scales in every format.
            stored = torch.randint(0, 60, (ROWS, COLUMNS // numbers * size), dtype=torch.uint8)
        packed = [kernels.pack(kind, [stored]) for _ in range(COPIES)]

        def call(packed: Any = packed, layout: int = layout) -> None:
            for weight in packed:
                multiply(library, x, None, weight, None, ROWS, layout)

        calls[f"{kind} {activations}"] = call
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m piecework.lab.block_speed")
    parser.add_argument("--rounds", type=int, default=15, help="of each figure; default: 15")
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cells: dict[str, list[str]] = {kind: [] for kind in args.kinds}
    for tokens in TOKENS:
        x = _random(tokens, COLUMNS)
        calls = _calls("bfloat16", x)
        for kind in args.kinds:
            calls |= _calls(kind, x)
        best = least(calls, args.rounds)
        for kind, line in cells.items():
            own, plain = (best["bfloat16 auto"] / best[f"{kind} {way}"] for way in ("auto", "bf16"))
            line.append(f"{own:.2f} ({plain:.2f})")
    print(_row("format", *map(str, TOKENS)), _row(*["---"] * (1 + len(TOKENS))), sep="\n")
    for kind, line in cells.items():
        print(_row(kind, *line))


if __name__ == "__main__":
    main()
