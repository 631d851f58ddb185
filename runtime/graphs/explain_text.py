"""An explanation as text: tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .explain import Explanation

_MIB = 2**20
_LONGEST = 12
"""Sizes of a list that are shown; what lies in the middle of a longer one is left out."""


def lines(told: Explanation) -> Iterator[str]:
    """Pieces, the order in which they run, captures and padding, each under a heading."""
    calls = sum(row.calls for row in told.pieces)
    splits = ", ".join(f"{count} x {op}" for op, count in told.split_ops.items())
    yield (
        f"{told.model_path}: {told.architecture} in {told.dtype} on {told.device}, "
        f"{told.weight_bytes / _MIB:.0f} MiB of weights"
    )
    yield (
        f"{calls} pieces, {len(told.pieces)} of them distinct, cut at {splits}; compiler: "
        f"{told.compiler}"
    )
    passes = ", ".join(f"{name} matched {count} times" for name, count in told.passes.items())
    yield f"passes: {passes or 'none'}"
    yield ""
    yield from _pieces(told)
    yield ""
    yield "order of calls"
    for piece, op, times in told.stretches:
        parts = [
            *([f"piece {piece}"] if piece is not None else []),
            *([op] if op is not None else []),
        ]
        yield f"  {times:3} x  {', then '.join(parts)}"
    yield ""
    yield from _captures(told)
    yield ""
    yield from _padding(told)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as what they hold; the last one, which is text, stands left."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row in [headings, *rows]:
        yield "  " + "  ".join(
            [
                *(text.rjust(width) for text, width in zip(row[:-1], widths[:-1], strict=True)),
                row[-1],
            ]
        )


def _pieces(told: Explanation) -> Iterator[str]:
    rows = [
        (
            str(row.number),
            str(row.calls),
            str(row.num_inputs),
            str(row.num_weights),
            f"{row.seconds:.2f} s",
            f"{row.num_bytes / 1024:.0f} KiB",
            row.state,
            row.ops,
        )
        for row in told.pieces
    ]
    yield from table(
        ["piece", "calls", "inputs", "weights", "compiled in", "code", "now", "ops"], rows
    )
    for row in told.pieces:
        if row.failed is not None:
            yield f"  piece {row.number} could not be compiled: {row.failed}"
    how = (
        f"traced in {told.trace_seconds:.2f} s"
        if told.trace_seconds
        else f"loaded in {told.load_seconds:.2f} s, neither traced nor compiled"
    )
    yield f"  {how}; compiling took {sum(row.seconds for row in told.pieces):.2f} s, now or once"


def _captures(told: Explanation) -> Iterator[str]:
    if not told.captures:
        yield (
            f"captured sizes: none; on {told.device} only those given with "
            "--piecewise-cuda-graph-tokens"
        )
        return
    yield "captured sizes"
    rows = [
        (capture.phase, str(capture.size), _outcome(capture.seconds, capture.failed))
        for capture in told.captures
    ]
    yield from table(["phase", "tokens", "captured in"], rows)
    seconds = sum(capture.seconds or 0.0 for capture in told.captures)
    yield f"  {told.num_graphs} graphs, {told.graph_bytes / _MIB:.1f} MiB, {seconds:.2f} s"


def _outcome(seconds: float | None, failed: str | None) -> str:
    return f"failed: {failed}" if seconds is None else f"{seconds:.3f} s"


def _padding(told: Explanation) -> Iterator[str]:
    if told.lengths is None:
        yield (
            "padding: no lengths are known yet; serve the model for a while, or give --lengths "
            "FILE or --dataset gsm8k"
        )
        return
    tokens = sum(length * count for length, count in told.lengths.counts.items())
    yield (
        f"padding, on {told.lengths.source}: {sum(told.lengths.counts.values())} lengths, "
        f"{tokens} tokens"
    )
    rows = [
        (row.name, str(len(row.sizes)), f"{row.share:.1%}", f"{row.longer:.1%}", _short(row.sizes))
        for row in told.padding
    ]
    yield from table(["list", "sizes", "padding", "steps above", ""], rows)
    if not told.pads:
        yield (
            f"  on {told.device} no step is padded: a size is replayed for steps of that very "
            "length"
        )


def _short(sizes: Sequence[int]) -> str:
    numbers = [str(size) for size in sizes]
    return " ".join(
        numbers
        if len(numbers) <= _LONGEST
        else [*numbers[: _LONGEST // 2], "...", *numbers[-_LONGEST // 2 :]]
    )
