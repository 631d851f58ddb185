"""What huge pages gain for packed weights, a row of x at a time: `python -m
piecework.bench.huge_pages`.

The same weights twice, on huge pages and on the machine's own, more than its caches hold, in turn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch

from ..kernels.cpu.native.linear import native_linear

_ROWS, _COLUMNS = 8192, 2048
_BLOCK_COLUMNS, _BLOCK_BYTES = 256, 144
"""Of Q4_K."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=int, default=24, help="of 9 MiB each; default: 24")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args(argv)
    kernels = native_linear(activations="int8")
    if kernels is None:
        print("there are no kernels here")
        return 2
    layout = kernels.layout("Q4_K", _COLUMNS)
    blocks = torch.zeros(_ROWS, _COLUMNS // _BLOCK_COLUMNS * _BLOCK_BYTES, dtype=torch.uint8)
    huge = [kernels.pack("Q4_K", [blocks]) for _ in range(arguments.weights)]
    sets = {"huge pages": huge, "own pages": [weight.clone() for weight in huge]}
    x = torch.ones(1, _COLUMNS, dtype=torch.bfloat16)
    multiply = partial(torch.ops.piecework.linear, bias=None, out_features=_ROWS, layout=layout)
    seconds: dict[str, list[float]] = {name: [] for name in sets}
    for name in [*sets] * arguments.rounds:
        began = time.perf_counter()
        for weight in sets[name]:
            multiply(x, weight)
        seconds[name].append(time.perf_counter() - began)
    size = sum(weight.numel() for weight in huge) / 1e9
    for name, times in seconds.items():
        most, middle = size / min(times), size / statistics.median(times)
        print(f"{name}: {most:.1f} GB/s at most, median {middle:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
