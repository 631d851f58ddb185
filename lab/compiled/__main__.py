"""Compile Triton's kernels as they are launched, for GPUs that need not be there.

python -m piecework.lab.compiled                      # every kernel, every target: minutes each
python -m piecework.lab.compiled --targets 86 --quick # some kernels
python -m piecework.lab.compiled --rows FILE          # goes on where an earlier run was stopped
python -m piecework.lab.compiled --targets --rows FILE --write docs/performance-cuda.md

Prints a line per kernel, and ends with code 1 if a kernel does not compile, or needs more shared
memory than a block may have.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from . import cases, sass, targets

_BEGIN, _END = "<!-- compiled kernels -->\n", "<!-- end of compiled kernels -->\n"


class Row(NamedTuple):
    """Attributes:
    target: Compute capability, 90 for 9.0.
    instructions: Of the inner loop, per warp.
    loop_bytes: Bytes of weights or cache that an iteration of the loop reads.
    """

    target: int
    case: str
    kernel: str
    error: str | None = None
    registers: int = 0
    stack: int = 0
    shared: int = 0
    warps: int = 0
    instructions: int = 0
    loop_bytes: int | None = None
    matrix: tuple[str, ...] = ()
    copies_ahead: bool = False
    is_trap: bool = False

    @property
    def fault(self) -> str | None:
        if self.error is not None:
            return self.error
        if self.is_trap:
            return "compiles to a trap"
        if self.shared > (most := targets.SHARED_MEMORY[self.target]):
            return f"{self.shared} bytes of shared memory, of {most}"
        return None

    @property
    def per_kib(self) -> str:
        """Instructions of all warps of a block per KiB of weights or cache that it reads."""
        if not self.loop_bytes:
            return ""
        return f"{self.instructions * self.warps * 1024 / self.loop_bytes:.0f}"


def rows(target: int, chosen: Iterable[cases.Case]) -> Iterator[list[Row]]:
    """Yield the rows of one case after another."""
    with targets.recording(target) as recorder:
        for case in chosen:
            recorder.begin(case.name)
            case.call()
            yield [_row(target, found) for found in recorder.found]


def _row(target: int, found: targets.Recorded) -> Row:
    if found.error is not None:
        return Row(target, found.case, found.name, found.error)
    usage, kernel = sass.usage(found.kernel), found.kernel
    return Row(
        target,
        found.case,
        found.name,
        None,
        *usage,
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        len(sass.inner_loop(kernel)),
        sass.loop_bytes(kernel),
        tuple(sass.matrix_instructions(kernel)),
        sass.copies_ahead(kernel),
        sass.is_trap(kernel),
    )


# The cells of a table by (kernel, case) and by target, "9.0".
Cells = dict[tuple[str, str], dict[str, str]]


def table(found: list[Row], kept: Cells | None = None) -> str:
    """Return Markdown: a line per kernel and case, with the figures of all targets. `kept` are the
    cells of an earlier table, for cases and targets that were not compiled now.
    """
    cells: Cells = {key: dict(row) for key, row in (kept or {}).items()}
    by_kernel: dict[tuple[str, str], dict[int, Row]] = {}
    for row in found:
        # A case may launch several specialisations. The largest is shown.
        entry = by_kernel.setdefault((row.kernel, row.case), {})
        if row.target not in entry or row.instructions > entry[row.target].instructions:
            entry[row.target] = row
    for (kernel, case), entry in by_kernel.items():
        line = cells.setdefault((f"`{kernel.removesuffix('_kernel')}`", case), {})
        line |= {f"{each // 10}.{each % 10}": _cell(row) for each, row in entry.items()}
    columns = sorted({target for line in cells.values() for target in line}, key=float)
    lines = ["| kernel | case | " + " | ".join(columns) + " |", "|---|---|" + "---|" * len(columns)]
    for (name, case), line in sorted(
        cells.items(), key=lambda item: (item[0][0].strip("`"), item[0][1])
    ):
        figures = (line.get(column, "") for column in columns)
        lines.append(f"| {name} | {case} | " + " | ".join(figures) + " |")
    return "\n".join(lines) + "\n"


def _cells_of(text: str) -> Cells:
    """Return the cells of a table that `table` has written, of cases that still exist."""
    head, _, *lines = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n")[:-1]
    )
    known = {case.name for case in cases.cases()}
    return {
        (line[0], line[1]): {
            target: cell for target, cell in zip(head[2:], line[2:], strict=True) if cell
        }
        for line in lines
        if line[1] in known
    }


def _cell(row: Row) -> str:
    if row.error is not None:
        return "does not compile"
    parts = [str(row.registers), f"{row.shared / 1024:.0f}", row.per_kib]
    spilled = f", {row.stack} bytes spilled" if row.stack else ""
    return " / ".join(part for part in parts if part) + spilled


def _write(path: Path, found: list[Row]) -> None:
    page = path.read_text(encoding="utf-8")
    before, rest = page.split(_BEGIN)
    old, after = rest.split(_END)
    text = table(found, _cells_of(old))
    path.write_text(before + _BEGIN + text + _END + after, encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m piecework.lab.compiled",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = list(targets.SHARED_MEMORY)
    parser.add_argument("--targets", type=int, nargs="*", choices=known, default=known)
    parser.add_argument("--quick", action="store_true", help="only some cases")
    parser.add_argument("--cases", nargs="+", help="only cases whose names contain one of these")
    parser.add_argument("--json", action="store_true", help="print each row as JSON")
    parser.add_argument(
        "--rows",
        type=Path,
        help="a file that gets the rows, and whose cases are not compiled again",
    )
    parser.add_argument("--write", type=Path, help="a page whose table gets the figures")
    args = parser.parse_args(arguments)
    found = _read(args.rows)
    for target in args.targets:
        done = {row.case for row in found if row.target == target}
        chosen = (case for case in _chosen(args.quick, args.cases) if case.name not in done)
        for new in rows(target, chosen):
            found += new
            for row in new:
                print(json.dumps(row._asdict()) if args.json else _line(row), flush=True)
            if args.rows:
                with args.rows.open("a") as file:
                    file.write("".join(json.dumps(row._asdict()) + "\n" for row in new))
    if args.write:
        _write(args.write, found)
    faults = [row for row in found if row.fault]
    for row in faults:
        print(f"{row.target}: {row.case}: {row.kernel}: {row.fault}", file=sys.stderr)
    return bool(faults)


def _read(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.open()]


def _chosen(quick: bool, names: list[str] | None) -> Iterator[cases.Case]:
    for case in cases.cases():
        if (case.quick or not quick) and (not names or any(name in case.name for name in names)):
            yield case


def _line(row: Row) -> str:
    figures: list[Any] = [row.target, row.case, row.kernel, row.registers, row.shared]
    return " | ".join(map(str, [*figures, row.instructions, row.per_kib, row.fault or ""]))


if __name__ == "__main__":
    sys.exit(main())
