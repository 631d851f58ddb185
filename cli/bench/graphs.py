"""`piecework bench graphs`."""

from __future__ import annotations

import argparse
from typing import Any

from ...runtime.config.engine import DTYPES, PIECE_COMPILERS, QUANTIZATIONS
from .flags import (
    add_flag,
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
    add_flag(parser, "--model-path PATH", "default: smollm2-135m")
    add_flag(parser, "--dtype", "default: auto", choices=DTYPES)
    add_flag(
        parser,
        "--compiler",
        "what compiles the pieces; default: by device",
        choices=PIECE_COMPILERS,
    )
    add_flag(parser, "--quantization", "as serve's; default: auto", choices=QUANTIZATIONS)
    add_flag(parser, "--passes LIST", "passes of the pieces, as serve's; default: auto")
    add_flag(parser, "--num-threads N", "compute threads; default: one a core", positive)
    add_flag(parser, "--parts LIST", "default: prefill,decode,compile,ready", _parts)
    add_flag(parser, "--prefill LIST", "tokens of prefills; default: 16,64,256,512", numbers)
    add_flag(parser, "--batch-sizes LIST", "sequences of decodes; default: 1,8", numbers)
    add_flag(
        parser, "--context N", "tokens of each sequence that is decoded; default: 256", positive
    )
    add_flag(
        parser,
        "--layers LIST",
        "depths whose compile times are compared; default: 8,30,60",
        numbers,
    )
    add_flag(parser, "--repeats N", "runs of each step; default: 30", positive)
    add_flag(parser, "--starts N", "starts of each kind; default: 3", positive)
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
