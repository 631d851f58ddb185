"""Measures how the CPU's kernels choose tokens beside plain torch:
`python -m piecework.lab.cpu_sampling`.

Milliseconds of torch / of the kernel, processor time of one thread, each the least of many taken in
turn. Rows are as peaked as a model's: 200 tokens stand out of the others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ..kernels import plain_sampling, reference
from ..kernels.cpu.native import sampling
from ..kernels.cpu.native.build import load_kernels
from .cpu_kernels import least

ROWS, VOCABULARIES = (1, 8, 32), (49152, 151936)
WAYS = ("likeliest", "temperature", "top-p 0.95", "top-k 50", "top-p 0.95, flat")


def ways(rows: int, vocabulary: int, plain: ModuleType, filters: ModuleType) -> list[Any]:
    """The calls that `WAYS` names, by modules that have `sample_plain`, and the others."""
    logits = torch.randn(rows, vocabulary)
    flat = logits.softmax(-1)
    logits = logits * 2.5
    logits[:, : min(200, vocabulary)] += torch.linspace(12, 0, min(200, vocabulary))
    probs, none = logits.softmax(-1), torch.full((rows,), vocabulary)
    zeros, ones, drawn = torch.zeros(rows), torch.ones(rows), torch.rand(rows, dtype=torch.float64)
    nucleus = torch.full((rows,), 0.95)
    # `sample_plain` may overwrite what it is given.
    given = logits.clone()
    return [
        partial(filters.argmax, logits),
        partial(plain.sample_plain, given, torch.full((rows,), 0.8), torch.rand(rows, 2)),
        partial(filters.sample_filtered, probs, none, nucleus, zeros, drawn),
        partial(filters.sample_filtered, probs, torch.full((rows,), 50), ones, zeros, drawn),
        partial(filters.sample_filtered, flat, none, nucleus, zeros, drawn),
    ]


def table(rounds: int) -> list[str]:
    """A row for each number of rows and vocabulary."""
    lines = [" | ".join(["rows x vocabulary", *WAYS]), " | ".join(["---"] * (1 + len(WAYS)))]
    for vocabulary in VOCABULARIES:
        for rows in ROWS:
            torch_ways = ways(rows, vocabulary, plain_sampling, reference)
            kernels = ways(rows, vocabulary, sampling, sampling)
            calls: dict[str, Callable[[], Any]] = {}
            for way, plain, kernel in zip(WAYS, torch_ways, kernels, strict=True):
                calls |= {f"{way}: torch": plain, f"{way}: kernel": kernel}
            best = least(calls, rounds)
            cells = (
                f"{best[f'{way}: torch'] * 1e3:.3g} / {best[f'{way}: kernel'] * 1e3:.2g}"
                for way in WAYS
            )
            lines.append(" | ".join([f"{rows} x {vocabulary:,}", *cells]))
    return [f"| {line} |" for line in lines]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.cpu_sampling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="of each figure; default: 20"
    )
    rounds = parser.parse_args(argv).rounds
    if rounds < 1:
        parser.error("--rounds takes a number above 0")
    if load_kernels() is None:
        parser.error("there are no native kernels on this machine; see the log for the reason")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print("\n".join(table(rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
