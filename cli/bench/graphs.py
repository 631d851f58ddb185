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
Measure what --piecewise-cuda-graph gains and costs, as Markdown tables. The engine runs in this
process, without a server.

prefill  forwards of one prompt, eager and in pieces, alternating; the fastest of --repeats runs
decode   the same for decode steps
compile  tracing and compiling models with the same layers at several depths, and loading them from
         the cache
ready    seconds from the start of the engine process until it accepts requests, with --startup fast
         and with graphs off
faults   only if named: the longest gap between two tokens of a stream during a cold start with a
         compiler that fails
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
        "gain and cost of compiled pieces on this machine; no server",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    parser.add_model_argument()
    add_flag(parser, "--model-path PATH", "model; default: smollm2-135m")
    add_flag(parser, "--dtype", "number format; default: auto", choices=DTYPES)
    add_flag(
        parser,
        "--compiler",
        "compiler of the pieces; default: by device",
        choices=PIECE_COMPILERS,
    )
    add_flag(parser, "--quantization", "as in serve; default: auto", choices=QUANTIZATIONS)
    add_flag(parser, "--passes LIST", "passes, as in serve; default: auto")
    add_flag(parser, "--num-threads N", "compute threads; default: one per core", positive)
    add_flag(
        parser, "--parts LIST", "parts to measure; default: prefill,decode,compile,ready", _parts
    )
    add_flag(
        parser, "--prefill LIST", "numbers of tokens of prefills; default: 16,64,256,512", numbers
    )
    add_flag(parser, "--batch-sizes LIST", "decode batch sizes; default: 1,8", numbers)
    add_flag(
        parser, "--context N", "context tokens of each decoded sequence; default: 256", positive
    )
    add_flag(
        parser,
        "--layers LIST",
        "numbers of layers for compile; default: 8,30,60",
        numbers,
    )
    add_flag(parser, "--repeats N", "runs of each step; default: 30", positive)
    add_flag(parser, "--starts N", "starts of each kind; default: 3", positive)
    add_json(parser)


def _parts(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if not set(names) <= set(_PARTS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {','.join(_PARTS)}")
    return tuple(names)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.graphs import GraphsSettings, run
    from ...bench.report import Report

    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    return run(given(GraphsSettings, argparse.Namespace(**chosen)), Report(arguments.json))
