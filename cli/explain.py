"""`piecework explain`: show how a model's forward is split and compiled, without a server."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ..runtime.config.engine import EngineConfig
from .core.flags import add_config_arguments, check_model, engine_config, report
from .core.foreign_flags import add_foreign_flags

if TYPE_CHECKING:
    from ..compilation.plan import Stretch
    from ..runtime.engine.explain import Explanation

EXIT_FAILED = 1
_SHOTS = 5  # Worked examples before each question, as in `piecework bench gsm8k`.
_MIB = 2**20
_CHARACTERS = 72  # Characters per line of ops in the picture.
_LONGEST = 12  # Shown sizes of a list. The middle of a longer list is left out.


def add_parser(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="show a model's pieces, captured sizes, compile times, memory and padding",
        usage="%(prog)s [MODEL] [flags]",
        description="Split a model's forward as `serve --piecewise-cuda-graph` does, and show the "
        "distinct pieces, the split ops, the times of compiling and capturing, and the padding of "
        "lists of sizes. Takes serve's flags for model, memory and graphs. Starts no server. "
        "Compiled pieces stay in the cache for the next server.",
    )
    shown = explain.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="print JSON instead of tables")
    shown.add_argument("--svg", metavar="FILE", help="write a picture of the split forward to FILE")
    source = shown.add_mutually_exclusive_group()
    source.add_argument(
        "--lengths",
        metavar="FILE",
        help="file with numbers of tokens to compute padding for; default: the lengths that "
        "servers of this model have seen",
    )
    source.add_argument(
        "--dataset", choices=["gsm8k"], help="compute padding for the prompts of a data set"
    )
    shown.add_argument(
        "--data-path", metavar="FILE", help="file of the data set; default: downloaded once"
    )
    explain.add_model_argument()
    explain.add_config_file_argument()
    add_config_arguments(explain, EngineConfig)
    add_foreign_flags(explain)
    explain.set_defaults(func=_explain, parser=explain)


def _explain(arguments: argparse.Namespace) -> int:
    """Return 0, or 1 if the model cannot run in pieces."""
    config = engine_config(arguments)
    if arguments.data_path is not None and arguments.dataset is None:
        raise ValueError("--data-path needs --dataset; give both")
    if arguments.svg is not None and not Path(arguments.svg).absolute().parent.is_dir():
        raise ValueError(f"--svg {arguments.svg}: the folder does not exist; create it")
    check_model(config)
    from ..compilation.core.errors import GraphError
    from ..runtime.engine.explain import explain, lengths_of_file, lengths_of_prompts

    logging.basicConfig(format="%(levelname)s: %(message)s")
    lengths = None
    if arguments.lengths is not None:
        lengths = lengths_of_file(arguments.lengths)
    elif arguments.dataset is not None:
        from ..bench.datasets import few_shot_prompts, load_gsm8k

        questions = load_gsm8k(arguments.data_path)
        prompts = few_shot_prompts(questions, _SHOTS, len(questions))
        lengths = lengths_of_prompts(config, arguments.dataset, prompts)
    try:
        found = explain(config, lengths)
    except GraphError as error:
        report(arguments.parser.prog, error)
        return EXIT_FAILED
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in lines(found))
    if arguments.svg is not None:
        try:
            Path(arguments.svg).write_text(picture(found))
        except OSError as error:
            raise ValueError(f"--svg {arguments.svg}: {error.strerror}") from None
    return 0


def lines(found: Explanation) -> Iterator[str]:
    """Yield the report: pieces, their order, captures and padding."""
    calls = sum(row.calls for row in found.pieces)
    splits = ", ".join(f"{count} x {op}" for op, count in found.split_ops.items())
    yield (
        f"{found.model_path}: {found.architecture} in {found.dtype} on {found.device}, "
        f"{found.weight_bytes / _MIB:.0f} MiB of weights"
    )
    yield (
        f"{calls} pieces, {len(found.pieces)} of them distinct, split at {splits}; compiler: "
        f"{found.compiler}"
    )
    for row, steps in zip(found.forwards, _steps(found), strict=True):
        passes = ", ".join(f"{name} matched {count} times" for name, count in row.passes.items())
        yield f"passes{steps}: {passes or 'none'}"
        for name, backend in found.pass_backends.items():
            if row.passes.get(name):
                yield f"  {name} is computed by {backend}"
        for name, reason in row.passes_off.items():
            yield f"  {name} is off: {reason}"
        if found.tp_size > 1:
            yield (
                f"  each of {found.tp_size} ranks sends {row.sent_before:,.0f} bytes per token as "
                f"traced, {row.sent:,.0f} after the passes"
            )
    yield ""
    yield from _pieces(found)
    yield ""
    for row, steps in zip(found.forwards, _steps(found), strict=True):
        yield f"order of calls{steps}"
        for piece, op, times in row.stretches:
            parts = [f"piece {piece}" if piece is not None else None, op]
            yield f"  {times:3} x  {', then '.join(part for part in parts if part is not None)}"
    yield ""
    yield from _captures(found)
    yield ""
    yield from _padding(found)


def _steps(found: Explanation) -> list[str]:
    """Return a suffix for each forward that names its steps; empty if there is one forward."""
    with_adapters = any(row.adapters for row in found.forwards)
    longest = max(row.tokens for row in found.forwards)
    names = []
    for row in found.forwards:
        sizes = f" of at least {longest} tokens" if row.tokens > 1 else f" below {longest} tokens"
        has = " with adapters" if row.adapters else " without adapters"
        name = has * with_adapters + sizes * (longest > 1)
        names.append(f" of steps{name}" if name else "")
    return names


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table. The last column is aligned left, all others right."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    for row in [headings, *rows]:
        yield "  " + "  ".join(
            [
                *(text.rjust(width) for text, width in zip(row[:-1], widths[:-1], strict=True)),
                row[-1],
            ]
        )


def _pieces(found: Explanation) -> Iterator[str]:
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
        for row in found.pieces
    ]
    yield from _table(
        ["piece", "calls", "inputs", "weights", "compiled in", "code", "now", "ops"], rows
    )
    for row in found.pieces:
        if row.before != row.ops:
            yield f"  piece {row.number} was, before the passes: {row.before}"
        if row.failed is not None:
            yield f"  piece {row.number} could not be compiled: {row.failed}"
    how = (
        f"traced in {found.trace_seconds:.2f} s"
        if found.trace_seconds
        else f"loaded from the cache in {found.load_seconds:.2f} s"
    )
    yield f"  {how}; compiling took {sum(row.seconds for row in found.pieces):.2f} s in all"


def _captures(found: Explanation) -> Iterator[str]:
    if not found.captures:
        yield (
            f"captured sizes: none; {found.device} captures only those given with "
            "--piecewise-cuda-graph-tokens"
        )
        return
    yield "captured sizes"
    rows = []
    for capture in found.captures:
        failed, seconds = f"failed: {capture.failed}", capture.seconds
        phase = capture.phase + " with adapters" * capture.adapters
        rows.append((phase, str(capture.size), failed if seconds is None else f"{seconds:.3f} s"))
    yield from _table(["phase", "tokens", "captured in"], rows)
    total = sum(capture.seconds or 0.0 for capture in found.captures)
    yield f"  {found.num_graphs} graphs, {found.graph_bytes / _MIB:.1f} MiB, {total:.2f} s"


def _padding(found: Explanation) -> Iterator[str]:
    if found.lengths is None:
        yield (
            "padding: no lengths are known; serve the model for a while, or give --lengths FILE or "
            "--dataset gsm8k"
        )
        return
    tokens = sum(length * count for length, count in found.lengths.counts.items())
    yield (
        f"padding, for {found.lengths.source}: {sum(found.lengths.counts.values())} lengths, "
        f"{tokens} tokens"
    )
    rows = []
    for row in found.padding:
        sizes = [str(size) for size in row.sizes]
        if len(sizes) > _LONGEST:
            sizes = [*sizes[: _LONGEST // 2], "...", *sizes[-_LONGEST // 2 :]]
        share, longer = f"{row.share:.1%}", f"{row.longer:.1%}"
        rows.append((row.name, str(len(row.sizes)), share, longer, " ".join(sizes)))
    yield from _table(["list", "sizes", "padding", "steps above", ""], rows)
    if not found.pads:
        yield (
            f"  {found.device} pads no step: a captured size runs only steps of exactly that length"
        )


# Pixels of the picture: width of a column, space between boxes, height of a line of ops.
_COLUMN, _GAP, _LINE = 430, 18, 16


def picture(found: Explanation) -> str:
    """Return the split forward as SVG.

    Each piece is a row of two boxes with its ops: as traced, and after the passes. The split op
    stands below. The forward of long steps, if there is one, stands below the first.
    """
    y, parts = 0, list[str]()
    for row, steps in zip(found.forwards, _steps(found), strict=True):
        y += _GAP
        if steps:
            parts.append(_text(_GAP, y, steps.removeprefix(" of "), weight="bold"))
            y += _GAP
        headings = (("as traced", row.sent_before), ("after the passes", row.sent))
        for place, (heading, sent) in enumerate(headings):
            text = f"{heading}: {sent:,.0f} bytes sent a token" if found.tp_size > 1 else heading
            parts.append(_text(_GAP + place * (_COLUMN + _GAP), y, text))
        y += _GAP
        for stretch in row.stretches:
            y = _draw(parts, found, stretch, y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _COLUMN + 5 * _GAP}" height="{y}" '
        'font-family="sans-serif" font-size="14">'
    )
    return "\n".join([head, *parts, "</svg>"])


def _draw(parts: list[str], found: Explanation, stretch: Stretch, top: int) -> int:
    """Add a piece and its split op to `parts`. Returns the y coordinate where they end."""
    piece, op, times = stretch
    middle, y = _GAP + _COLUMN + _GAP // 2, top
    if piece is not None:
        row = found.pieces[piece]
        sides = [wrap(text, _CHARACTERS) for text in (row.before, row.ops)]
        box = 2 * _GAP + _LINE * max(map(len, sides))
        for place, (side, lightness) in enumerate(zip(sides, (95, 88), strict=True)):
            x = _GAP + place * (_COLUMN + _GAP)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{_COLUMN}" height="{box}" rx="4" '
                f'fill="hsl({47 * piece % 360},60%,{lightness}%)" stroke="#555"/>'
            )
            for number, text in enumerate(side):
                parts.append(_text(x + 12, y + 2 * _GAP + _LINE * number, text, size=11))
        parts.append(_text(middle + _GAP, y + _GAP, f"piece {piece}", weight="bold"))
        y += box
    if op is not None:
        parts.append(
            f'<rect x="{middle - 110}" y="{y + 6}" width="220" height="26" rx="13" '
            'fill="#fff" stroke="#555"/>'
        )
        parts.append(_text(middle, y + 24, op, anchor="middle"))
        y += 32
    if times > 1:
        right = 2 * _COLUMN + 2 * _GAP + 6
        parts.append(f'<path d="M{right} {top} h12 v{y - top} h-12" fill="none" stroke="#555"/>')
        parts.append(_text(right + _GAP, (top + y) // 2 + 5, f"× {times}"))
    return y + _GAP


def _text(
    x: int, y: int, text: str, *, size: int = 14, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
