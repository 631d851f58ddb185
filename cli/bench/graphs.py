"""`piecework bench graphs`."""

from __future__ import annotations

import argparse
from typing import Any

from ...runtime.config import DTYPES, PIECE_COMPILERS
from .flags import (
    add_json,
    add_measurement,
    given,
    numbers,
    positive,
)

_TEXT = """\
What --piecewise-cuda-graph gains and costs, in Markdown tables; the engine runs in this process, no
server is needed.

prefill  forwards of one prompt, graphs off and in pieces, run in turn; the least time of --repeats
         runs each
decode   the same of steps of nothing but decodes
compile  tracing and compiling a model of the same layers at several depths, and loading what a
         first start has left in the cache
ready    seconds from the start of the engine's process until it takes requests, --startup fast
         against graphs off
faults   only where asked for: cold starts of a server while a stream runs, with a compiler that
         fails: its longest gap between two tokens
"""
_EXAMPLES = """\
examples:
  %(prog)s --json graphs.json
  %(prog)s --parts prefill --prefill 16,64 --dtype float32 --num-threads 1
"""
_PARTS = ("prefill", "decode", "compile", "ready", "faults")


def add_parser(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers,
        "graphs",
        "what compiled pieces gain and cost on this machine; needs no server",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    parser.add_model_argument()
    parser.add_argument("--model-path", metavar="PATH", help="default: smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, help="default: auto")
    parser.add_argument(
        "--compiler", choices=PIECE_COMPILERS, help="what compiles the pieces; default: by device"
    )
    parser.add_argument(
        "--num-threads", type=positive, metavar="N", help="compute threads; default: one a core"
    )
    parser.add_argument(
        "--parts", type=_parts, metavar="LIST", help="default: prefill,decode,compile,ready"
    )
    parser.add_argument(
        "--prefill",
        type=numbers,
        metavar="LIST",
        help="tokens of prefills; default: 16,64,256,512",
    )
    parser.add_argument(
        "--batch-sizes", type=numbers, metavar="LIST", help="sequences of decodes; default: 1,8"
    )
    parser.add_argument(
        "--context",
        type=positive,
        metavar="N",
        help="tokens of each sequence that is decoded; default: 256",
    )
    parser.add_argument(
        "--layers",
        type=numbers,
        metavar="LIST",
        help="depths whose compile times are compared; default: 8,30,60",
    )
    parser.add_argument(
        "--repeats", type=positive, metavar="N", help="runs of each step; default: 30"
    )
    parser.add_argument(
        "--starts", type=positive, metavar="N", help="starts of each kind; default: 3"
    )
    add_json(parser)


def _parts(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if not set(names) <= set(_PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} should be some of {','.join(_PARTS)}")
    return tuple(names)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.graphs import GraphsSettings, run
    from ...bench.report import Report

    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    return run(given(GraphsSettings, argparse.Namespace(**chosen)), Report(arguments.json))
