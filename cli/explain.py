"""`piecework explain`: what becomes of a model's forward, as tables, JSON and a picture; no server
is started.
"""

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
    from ..runtime.engine.explain import Explanation, ForwardRow

EXIT_FAILED = 1
_SHOTS = 5
"""Worked examples before each question, as in `piecework bench gsm8k`."""
_MIB = 2**20
_CHARACTERS = 72
"""Of a line of ops in the picture."""
_LONGEST = 12
"""Sizes of a list that are shown; what lies in the middle of a longer one is left out."""


def add_parser(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="show what becomes of a model: its pieces, sizes, times, memory and padding",
        usage="%(prog)s [MODEL] [flags]",
        description="Cut a model's forward as `serve --piecewise-cuda-graph` does, and show its "
        "distinct pieces, where it is cut, what "
        "compiling and capturing takes, and what lists of sizes waste on padding. Takes serve's "
        "flags of model, memory and graphs. "
        "Starts no server; what it compiles is in the cache for the next one.",
    )
    shown = explain.add_argument_group("what is shown")
    shown.add_argument("--json", action="store_true", help="print JSON instead of tables")
    shown.add_argument("--svg", metavar="FILE", help="draw the cut forward into FILE")
    source = shown.add_mutually_exclusive_group()
    source.add_argument(
        "--lengths",
        metavar="FILE",
        help="compute padding on these numbers of tokens; default: the lengths that servers of "
        "this model have seen",
    )
    source.add_argument(
        "--dataset", choices=["gsm8k"], help="compute padding on the prompts of a data set"
    )
    shown.add_argument(
        "--data-path", metavar="FILE", help="the data set's file; default: downloaded once"
    )
    explain.add_model_argument()
    explain.add_config_file_argument()
    add_config_arguments(explain, EngineConfig)
    add_foreign_flags(explain)
    explain.set_defaults(func=_explain, parser=explain)


def _explain(arguments: argparse.Namespace) -> int:
    """Exit code 0; 1 where the model cannot run in pieces."""
    config = engine_config(arguments)
    if arguments.data_path is not None and arguments.dataset is None:
        raise ValueError("--data-path goes with --dataset")
    if arguments.svg is not None and not Path(arguments.svg).absolute().parent.is_dir():
        raise ValueError(f"--svg {arguments.svg}: there is no such folder")
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
        told = explain(config, lengths)
    except GraphError as error:
        report(arguments.parser.prog, error)
        return EXIT_FAILED
    if arguments.json:
        print(json.dumps(told.to_json(), indent=2))
    else:
        sys.stdout.writelines(f"{line.rstrip()}\n" for line in lines(told))
    if arguments.svg is not None:
        try:
            Path(arguments.svg).write_text(picture(told))
        except OSError as error:
            raise ValueError(f"--svg {arguments.svg}: {error.strerror}") from None
    return 0


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
    for row, steps in zip(told.forwards, _steps(told), strict=True):
        passes = ", ".join(f"{name} matched {count} times" for name, count in row.passes.items())
        yield f"passes{steps}: {passes or 'none'}"
        for name, reason in row.passes_off.items():
            yield f"  {name} is off: {reason}"
        if told.tp_size > 1:
            yield f"  {_sent(told, row)}"
    yield ""
    yield from _pieces(told)
    yield ""
    for row, steps in zip(told.forwards, _steps(told), strict=True):
        yield f"order of calls{steps}"
        for piece, op, times in row.stretches:
            parts = [f"piece {piece}" if piece is not None else None, op]
            yield f"  {times:3} x  {', then '.join(part for part in parts if part is not None)}"
    yield ""
    yield from _captures(told)
    yield ""
    yield from _padding(told)


def _steps(told: Explanation) -> list[str]:
    """Of which steps each forward is, where there are several."""
    if len(told.forwards) == 1:
        return [""]
    tokens = told.forwards[1].tokens
    return [f" of steps below {tokens} tokens", f" of steps from {tokens} tokens on"]


def _sent(told: Explanation, row: ForwardRow) -> str:
    return (
        f"each of {told.tp_size} ranks sends {row.sent_before:,.0f} bytes a token as traced, "
        f"{row.sent:,.0f} after the passes"
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
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
    yield from _table(
        ["piece", "calls", "inputs", "weights", "compiled in", "code", "now", "ops"], rows
    )
    for row in told.pieces:
        if row.before != row.ops:
            yield f"  piece {row.number} was, before the passes: {row.before}"
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
    rows = []
    for capture in told.captures:
        failed, seconds = f"failed: {capture.failed}", capture.seconds
        rows.append(
            (capture.phase, str(capture.size), failed if seconds is None else f"{seconds:.3f} s")
        )
    yield from _table(["phase", "tokens", "captured in"], rows)
    total = sum(capture.seconds or 0.0 for capture in told.captures)
    yield f"  {told.num_graphs} graphs, {told.graph_bytes / _MIB:.1f} MiB, {total:.2f} s"


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
    rows = []
    for row in told.padding:
        sizes = [str(size) for size in row.sizes]
        if len(sizes) > _LONGEST:
            sizes = [*sizes[: _LONGEST // 2], "...", *sizes[-_LONGEST // 2 :]]
        share, longer = f"{row.share:.1%}", f"{row.longer:.1%}"
        rows.append((row.name, str(len(row.sizes)), share, longer, " ".join(sizes)))
    yield from _table(["list", "sizes", "padding", "steps above", ""], rows)
    if not told.pads:
        yield (
            f"  on {told.device} no step is padded: a size is replayed for steps of that very "
            "length"
        )


_COLUMN, _GAP, _LINE = 430, 18, 16
"""Of the picture: the width of a side, the space between things, the height of a line of ops."""


def picture(told: Explanation) -> str:
    """The cut forward as SVG: a box a piece, as it was traced and as the passes left it side by
    side, each with its ops, and the split op below. A forward of long steps stands below the other.
    """
    y, parts = 0, list[str]()
    for row, steps in zip(told.forwards, _steps(told), strict=True):
        y += _GAP
        if steps:
            parts.append(_text(_GAP, y, steps.removeprefix(" of "), weight="bold"))
            y += _GAP
        headings = (("as traced", row.sent_before), ("after the passes", row.sent))
        for place, (heading, sent) in enumerate(headings):
            text = f"{heading}: {sent:,.0f} bytes sent a token" if told.tp_size > 1 else heading
            parts.append(_text(_GAP + place * (_COLUMN + _GAP), y, text))
        y += _GAP
        for stretch in row.stretches:
            y = _draw(parts, told, stretch, y)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _COLUMN + 5 * _GAP}" height="{y}" '
        'font-family="sans-serif" font-size="14">'
    )
    return "\n".join([head, *parts, "</svg>"])


def _draw(parts: list[str], told: Explanation, stretch: Stretch, top: int) -> int:
    """Adds a piece and the op behind it to `parts`; returns where they end."""
    piece, op, times = stretch
    middle, y = _GAP + _COLUMN + _GAP // 2, top
    if piece is not None:
        row = told.pieces[piece]
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
