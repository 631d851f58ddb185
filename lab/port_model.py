"""What share of a CPU's dot products of bytes the loops of `integers.cpp` can reach with AVX-512:
`python -m piecework.lab.port_model`.

A model, not a measurement: the instructions that a compiler makes of a loop, and the ports that the
CPU has for them. On Intel's, all vectors of 512 bits share two ports, and one is loaded a cycle, a
number to all lanes too: Intel's manuals say two, an Ice Lake server was measured at 1.1. On AMD's
from Zen 4 on two of four pipes make dot products, multiplications and FMAs. Stores and moves of
registers take other ports, and memory, latency and what stands around the loops are left out.
`--mca llvm-mca` adds the cycles that LLVM's own model of an Ice Lake server has for a pass, latency
included, to be read beside half as many as there are dot products.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ..kernels.cpu.native import build, parts
from ..kernels.cpu.native import compiler as compiling

_LABEL = re.compile(r"(\.?\w+):")
_JUMP = re.compile(r"\tj\w+\t(\.L\w+)")
_DOT = "vpdpbusd"
_MULTIPLIES = re.compile(r"vf[n]?m(add|sub)|vmulps")
_NO_VECTOR_PORT = re.compile(r"vmov|vp?broadcast\w+\t[^,]*\(")
_STORE = re.compile(r"vmov\w+\t%")
_TWICE = re.compile(r"vcvtph2ps|vcvtps2ph")
"""A permutation and a conversion."""
_FORMATS = {
    "Bytes, UnitScales<false, 0>": "Q8_0",
    "Planes<4, 0>, UnitScales<true, 0>": "Q4_1",
    "Planes<4, 0>, UnitScales<false, 8>": "Q4_0",
    "Planes<4, 0>, BlockScales<32, true, 0>": "Q4_K",
    "Planes<4, 1>, BlockScales<32, true, 0>": "Q5_K",
    "Planes<4, 2>, BlockScales<16, false, 32>": "Q6_K",
    "Unpacked<1, true, 0>": "Q4_1, Q4_K, Q5_K",
    "Unpacked<1, false, 8>": "Q4_0",
    "Unpacked<1, false, 128>": "Q8_0",
    "Unpacked<2, false, 32>": "Q6_K",
}


class Loop(NamedTuple):
    """Instructions of one pass: dot products, others that multiply, all of vectors, and loads."""

    dots: int
    multiplies: int
    vectors: int
    loads: int

    def of_intel(self) -> float:
        return self.dots / max(self.vectors, 2 * self.loads)

    def of_amd(self) -> float:
        return min(self.dots / (self.dots + self.multiplies), 2 * self.dots / self.vectors)


def loops_of(assembly: str) -> Iterator[tuple[str, list[str]]]:
    """The innermost loops that make dot products, as instructions, each with its function."""
    function, labels, lines = "", dict[str, int](), list[str]()
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            if not label[1].startswith("."):
                function, labels, lines = label[1], {}, []
            labels[label[1]] = len(lines)
        elif (jump := _JUMP.match(line)) and jump[1] in labels:
            body = lines[labels[jump[1]] :]
            if any(each.startswith(_DOT) for each in body):
                yield function, body
                # What this loop stands in is no innermost one.
                labels = {name: place for name, place in labels.items() if place > len(lines)}
        elif line[:1] == "\t" and line[1:2] != ".":
            lines.append(line.strip())


def counted(body: Sequence[str]) -> Loop:
    vectors = [each for each in body if each[0] == "v" and not _NO_VECTOR_PORT.match(each)]
    return Loop(
        sum(each.startswith(_DOT) for each in body),
        sum(_MULTIPLIES.match(each) is not None for each in body),
        sum(1 + (_TWICE.match(each) is not None) for each in vectors),
        sum(each[0] == "v" and "(" in each and not _STORE.match(each) for each in body),
    )


def mca_cycles(program: str, body: Sequence[str]) -> float:
    """Of a pass, by llvm-mca."""
    passes = 100
    command = [program, "-mtriple=x86_64", "-mcpu=icelake-server", f"-iterations={passes}"]
    run = subprocess.run(
        command, input="\n".join(body) + "\n", check=True, stdout=subprocess.PIPE, text=True
    )
    cycles = re.search(r"Total Cycles: *(\d+)", run.stdout)
    assert cycles, run.stdout
    return int(cycles[1]) / passes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compiler", default="g++")
    parser.add_argument("--mca", help="llvm-mca, of LLVM 16 or later")
    parser.add_argument("--rows", type=int, default=8, help="of x; default: 8")
    arguments = parser.parse_args(argv)
    try:
        rows = list(_rows(arguments.compiler, arguments.mca, arguments.rows))
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        parser.error(str(error))
    print("| loop | dot products | multiplications | vectors | loads | Intel | AMD | cycles |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(sorted(rows)))
    return 0


def _rows(compiler: str, mca: str | None, num_rows: int) -> Iterator[str]:
    """Raises `ValueError` where the compiler's loops are not those that are looked for."""
    (variant,) = (each for each in build.VARIANTS if each.name == "avx512_vnni")
    run = partial(subprocess.run, check=True, stdout=subprocess.PIPE, text=True)
    loops: list[tuple[str, list[str]]] = []
    for part in parts.formats():
        (source,) = parts.sources_of(part)
        flags = [*compiling.FLAGS, *variant.flags, *source.flags]
        command = [compiler, *flags, "-S", str(source.path)]
        loops += loops_of(run([*command, "-o", "-"]).stdout)
    names = run(["c++filt"], input="\n".join(name for name, _ in loops)).stdout.splitlines()
    bodies = defaultdict[str, list[list[str]]](list)
    for name, (_, body) in zip(names, loops, strict=True):
        is_unpacked = "Unpacked" in name or "many_products" in name
        if not (is_unpacked or f", {num_rows}>(" in name):
            continue
        for kind, form in _FORMATS.items():
            if f"<{kind} >" in (plain := name.replace("piecework::", "")) or f"<{kind}," in plain:
                bodies[f"{form}, unpacked" if is_unpacked else form].append(body)
    for kind, form in _FORMATS.items():
        if not any(
            form in told and ("unpacked" in told) == ("Unpacked" in kind) for told in bodies
        ):
            raise ValueError(f"no loop of {kind} with {num_rows} rows")
    for told, found in bodies.items():
        # Unpacked panels meet two numbers of rows, the greater one mostly.
        body = max(found, key=lambda each: counted(each).dots)
        if len(found) > (2 if "unpacked" in told else 1):
            raise ValueError(f"{told}: {len(found)} loops where one is expected")
        loop = counted(body)
        shares = f"{loop.of_intel():.2f} | {loop.of_amd():.2f}"
        cycles = f"{mca_cycles(mca, body):.0f}" if mca else ""
        yield f"| {told} | {' | '.join(map(str, loop))} | {shares} | {cycles} |"


if __name__ == "__main__":
    raise SystemExit(main())
