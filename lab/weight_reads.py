"""How fast products with few rows of x read packed weights out of memory: `python -m
piecework.lab.weight_reads`.

A row a format: gigabytes of panels a second, by rows of x, the most of all rounds. The weights of a
format are more than the machine's caches hold. With `--beside` the kernels of another build take
turns with these: in parentheses the median of how many times as fast these were. It is a file of
the kernels' folder, made from sources that lay panels out as these do, and is run as it is. Formats
take turns too, and so do huge pages, where the machine lends them, and its own, so that what else
runs here slows all of them.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Kind

from ..kernels.cpu.native.build import load_kernels
from ..kernels.cpu.native.linear import NativeLinear, multiply
from ..kernels.cpu.native.parts import CORE

_ROWS, _COLUMNS = 8192, 2048
_FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "bfloat16")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.weight_reads",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--formats", default=",".join(_FORMATS), help="default: %(default)s")
    parser.add_argument("--tokens", default="1,2,4,8", help="rows of x; default: %(default)s")
    parser.add_argument("--own-pages", action="store_true", help="also without huge pages")
    parser.add_argument(
        "--beside",
        metavar="FILE",
        help="the core of other kernels; the libraries of formats are beside it",
    )
    parser.add_argument(
        "--weights", type=int, default=8, help="of 16 million numbers each; default: %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=20, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    if (library := load_kernels()) is None:
        parser.error("there are no native kernels on this machine; see the log for the reason")
    builds: list[ctypes.CDLL] = [library]
    kernels = NativeLinear(library, activations="int8")
    names, counts = arguments.formats.split(","), arguments.tokens.split(",")
    if unknown := [name for name in names if not _is_known(kernels, name)]:
        parser.error(
            f"--formats: {unknown[0]!r} is neither bfloat16 nor one of GGUF's with kernels"
        )
    if not all(count.isdecimal() and int(count) for count in counts):
        parser.error(f"--tokens takes numbers above 0, such as 1,2,4,8, not {arguments.tokens!r}")
    if min(arguments.weights, arguments.rounds) < 1:
        parser.error("--weights and --rounds take numbers above 0")
    if arguments.beside:
        try:
            other = ctypes.CDLL(arguments.beside)
        except OSError as error:
            parser.error(f"--beside: {error}")
        if not hasattr(other, "piecework_linear"):
            parser.error(f"--beside: {arguments.beside} is a library without these kernels")
        # The same file is the same library in this process, and has its formats.
        if other._handle != library._handle:
            _add_formats(other, Path(arguments.beside), names)
        builds.insert(0, other)
    tokens = [int(count) for count in counts]
    sets: dict[tuple[str, str], list[torch.Tensor]] = {}
    for name in names:
        sets[name, "huge"] = _packed(kernels, name, arguments.weights)
        if arguments.own_pages:
            sets[name, "own"] = [weight.clone() for weight in sets[name, "huge"]]
    seconds: dict[tuple[str, str, int], list[list[float]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for (name, pages), weights in sets.items():
            layout = kernels.layout(name, _COLUMNS)
            assert layout is not None
            for count in tokens:
                times = [_seconds(build, weights, layout, count) for build in builds]
                seconds[name, pages, count].append(times)
    print(f"{torch.get_num_threads()} threads, GB/s by rows of x\n")
    print(f"| format | pages | {' | '.join(map(str, tokens))} |")
    print("|---|---|" + "---|" * len(tokens))
    for (name, pages), weights in sets.items():
        size = sum(weight.nbytes for weight in weights) / 1e9
        cells = " | ".join(_cell(size, seconds[name, pages, count]) for count in tokens)
        print(f"| {name} | {pages} | {cells} |")
    return 0


def _add_formats(core: ctypes.CDLL, file: Path, names: Sequence[str]) -> None:
    """Add formats to a core of the kernels: the newest libraries of its variant in its folder.

    Those of another variant would sum in another order than the rest of the core.
    """
    variant = file.name.partition(f"-{CORE}-")[0]
    for name in names:
        found = sorted(
            file.parent.glob(f"{variant}-{name}-*.so"), key=lambda path: path.stat().st_mtime
        )
        if found:
            table = getattr(ctypes.CDLL(str(found[-1])), f"piecework_format_{name}")
            table.restype = ctypes.c_void_p
            core.piecework_add_format(ctypes.c_void_p(table()))


def _is_known(kernels: NativeLinear, name: str) -> bool:
    is_weight = name == "bfloat16" or name in Kind.__members__
    return is_weight and kernels.layout(name, _COLUMNS) is not None


def _packed(kernels: NativeLinear, name: str, count: int) -> list[torch.Tensor]:
    """Weights [8192, 2048] of zeros; what numbers stand for takes no more or less time."""
    if name == "bfloat16":
        weight = torch.zeros(_ROWS, _COLUMNS, dtype=torch.bfloat16)
    else:
        columns, size = GGML_QUANT_SIZES[Kind[name]]
        weight = torch.zeros(_ROWS, _COLUMNS // columns * size, dtype=torch.uint8)
    return [kernels.pack(name, [weight]) for _ in range(count)]


def _seconds(build: ctypes.CDLL, weights: list[torch.Tensor], layout: int, count: int) -> float:
    x = torch.ones(count, _COLUMNS, dtype=torch.bfloat16)
    began = time.perf_counter()
    for weight in weights:
        multiply(build, x, None, weight, None, _ROWS, layout)
    return time.perf_counter() - began


def _cell(size: float, rounds: list[list[float]]) -> str:
    rates = [f"{size / min(times):.1f}" for times in zip(*rounds, strict=True)]
    if len(rates) == 1:
        return rates[0]
    ratio = statistics.median(other / these for other, these in rounds)
    return f"{rates[0]}, {rates[1]} ({ratio:.2f})"


if __name__ == "__main__":
    raise SystemExit(main())
