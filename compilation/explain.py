"""What became of a forward, for people: a row a distinct piece, the order of the calls, and a
picture of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import NamedTuple

from .piece_store import PiecesReport
from .plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRow:
    """One distinct piece. `ops`: each op with how often it is applied. `seconds`: to compile it,
    now or once.

    `failed`: why it cannot be compiled, and runs as traced.
    """

    number: int
    calls: int
    ops: str
    num_inputs: int
    num_weights: int
    seconds: float
    num_bytes: int
    state: str
    failed: str | None


class Stretch(NamedTuple):
    """`piece`, then `op`, `times` times in a row; either may be missing."""

    piece: int | None
    op: str | None
    times: int


def piece_rows(plan: Plan, report: PiecesReport) -> list[PieceRow]:
    """Every distinct piece, in the order of its first call."""
    calls = plan.calls()
    rows = []
    for number, piece in enumerate(plan.pieces):
        weights = sum(spec.weight for spec in piece.inputs)
        rows.append(
            PieceRow(
                number=number,
                calls=calls[number],
                ops=_counted(piece.ops),
                num_inputs=len(piece.inputs) - weights,
                num_weights=weights,
                seconds=report.compile_seconds.get(number, report.loaded.get(number, 0.0)),
                num_bytes=report.num_bytes.get(number, 0),
                state="as traced"
                if number in report.failed
                else "from the cache"
                if number in report.loaded
                else "compiled",
                failed=report.failed.get(number),
            )
        )
    return rows


def stretches(plan: Plan) -> list[Stretch]:
    """The calls in order, equal neighbours told once: a model of 30 like layers has three or
    four.
    """
    pairs: list[tuple[int | None, str | None]] = []
    for step in plan.steps:
        if step.op is not None and pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], step.op)
        else:
            pairs.append((step.piece, step.op))
    return [Stretch(*pair, len(list(group))) for pair, group in groupby(pairs)]


def picture(plan: Plan) -> str:
    """The cut forward as SVG: a box a piece, with its ops, and the split op below it."""
    width, box, gap, op_height = 560, 64, 18, 26
    parts, y = [], gap
    for piece, op, times in stretches(plan):
        top = y
        if piece is not None:
            hue = 47 * piece % 360
            ops = _shortened(_counted(plan.pieces[piece].ops), 78)
            parts.append(
                f'<rect x="20" y="{y}" width="{width - 110}" height="{box}" rx="4" '
                f'fill="hsl({hue},60%,88%)" stroke="#555"/>'
            )
            parts.append(f'<text x="32" y="{y + 26}" font-weight="bold">piece {piece}</text>')
            parts.append(f'<text x="32" y="{y + 48}" font-size="11">{escape(ops)}</text>')
            y += box
        if op is not None:
            parts.append(
                f'<rect x="120" y="{y + 6}" width="{width - 310}" height="{op_height}" rx="13" '
                'fill="#fff" stroke="#555"/>'
            )
            parts.append(
                f'<text x="{(width - 70) // 2}" y="{y + 24}" '
                f'text-anchor="middle">{escape(op)}</text>'
            )
            y += op_height + 6
        if times > 1:
            parts.append(
                f'<path d="M{width - 80} {top} h12 v{y - top} h-12" fill="none" stroke="#555"/>'
            )
            parts.append(f'<text x="{width - 60}" y="{(top + y) // 2 + 5}">× {times}</text>')
        y += gap
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" '
        'font-family="sans-serif" font-size="14">'
    )
    return "\n".join([head, *parts, "</svg>"])


def _counted(ops: tuple[str, ...]) -> str:
    return ", ".join(
        name if count == 1 else f"{name} x {count}" for name, count in Counter(ops).items()
    )


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
