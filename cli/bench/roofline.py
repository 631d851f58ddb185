"""`piecework bench roofline`."""

from __future__ import annotations

import argparse
from typing import Any

from ...runtime.config.engine import PIECE_COMPILERS, QUANTIZATIONS
from .flags import add_flag, add_json, add_measurement, given, numbers, positive

_TEXT = """\
Measure how close each matrix product, attention and the whole step come to the limits of this CPU.
The engine runs in this process, without a server.

The same run measures the machine's peaks: bytes per second through 1 GiB, and multiply-adds per
second in each number format. A part's floor is the time that its bytes or its operations would take
at those peaks, whichever is longer. Its share is the floor divided by its time. Quantised weights
may be multiplied as integers, which has the highest peak.
"""
_EXAMPLES = """\
examples:
  %(prog)s
  %(prog)s --model-path model-Q4_K_M.gguf --plot roofline.png --json roofline.json
"""


def add_parser(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers,
        "roofline",
        "each part of a step as a share of this CPU's limits; no server",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    parser.add_model_argument()
    add_flag(parser, "--model-path PATH", "model; default: smollm2-135m")
    add_flag(parser, "--quantization", "as in serve; default: auto", choices=QUANTIZATIONS)
    add_flag(
        parser,
        "--compiler",
        "compiler of the pieces; default: by device",
        choices=PIECE_COMPILERS,
    )
    add_flag(parser, "--num-threads N", "compute threads; default: one per core", positive)
    add_flag(parser, "--batch-sizes LIST", "decode batch sizes; default: 1,8,32", numbers)
    add_flag(parser, "--prompt N", "tokens of the prompt; default: 1024", positive)
    add_flag(
        parser, "--context N", "context tokens of each decoded sequence; default: 256", positive
    )
    add_flag(parser, "--rounds N", "calls of each part; default: 10", positive)
    add_flag(parser, "--plot FILE", "draw the roofline and all parts; needs piecework[plot]")
    add_json(parser)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.report import Report
    from ...bench.roofline import RooflineSettings, run

    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    return run(given(RooflineSettings, argparse.Namespace(**chosen)), Report(arguments.json))
