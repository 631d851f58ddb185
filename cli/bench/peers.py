"""`piecework bench peers`."""

from __future__ import annotations

import argparse
from typing import Any

from .flags import (
    add_flag,
    add_gsm8k_file,
    add_json,
    add_measurement,
    given,
    positive,
)

_TEXT = """\
Starts Piecework, then each --server, on this machine, one after the other; puts the same loads on
each, and prints a table: out tok/s of single (128 tokens in, 128 out, one at a time), batch8 and
batch32 (256 in, 64 out, 8 and 32 at a time) and prefix (640 shared and 96 own in, 32 out, 8 at a
time), in tok/s of prefill (1,024 in, 1 out, 4 at a time) and, where it is asked for, long (8,000
in, 1 out, one at a time), seconds to the first token, memory, and Piecework's ratio to the best of
the others. The command of a server is given a port as its last word, or where it says {port}.
"""
_EXAMPLES = """\
examples:
  %(prog)s --loads single,batch8
  %(prog)s --answers 24 --server 'int8=piecework serve --quantization int8 --port {port}'
  %(prog)s --server llama=./llama.sh --server 'vllm=vllm serve DIR --port {port}' --json peers.json
"""
_LOADS = ("single", "batch8", "batch32", "prefill", "prefix", "long")


def add_parser(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers,
        "peers",
        "Piecework beside other servers: speed, start-up, memory",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    parser.add_argument(
        "--server",
        dest="servers",
        action="append",
        type=_server,
        default=[],
        metavar="NAME=COMMAND",
        help="another server",
    )
    parser.add_model_argument()
    add_flag(parser, "--model-path PATH", "what Piecework serves; default: smollm2-135m")
    add_flag(
        parser,
        "--vocab-size N",
        "token ids of prompts are below this; default: 49152, smollm2-135m's",
        positive,
    )
    add_flag(parser, "--loads LIST", "default: single,batch8,batch32,prefill,prefix", _loads)
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="also 1, 2, 4, ... 64 at a time, 128 tokens in and 64 out",
    )
    add_flag(
        parser,
        "--rounds N",
        "start and load every server so many times, in turn, and take its best figures; default: 1",
        positive,
    )
    add_flag(
        parser,
        "--answers N",
        "also the mean log-probability of the first N worked answers of GSM8K, where a server "
        "tells it; default: 0",
        positive,
    )
    add_gsm8k_file(parser)
    add_flag(parser, "--seed N", "of prompts; default: 0", int)
    add_flag(parser, "--markdown FILE", "write the tables there too")
    add_flag(parser, "--plot FILE", "draw the scaling run there, PNG or SVG; needs matplotlib")
    add_json(parser)


def _server(text: str) -> tuple[str, str]:
    label, _, command = text.partition("=")
    if not label or not command.strip():
        raise argparse.ArgumentTypeError(f"{text!r} should be a name and a command, NAME=COMMAND")
    return label, command


def _loads(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if not set(names) <= set(_LOADS):
        raise argparse.ArgumentTypeError(f"{text!r} should be some of {','.join(_LOADS)}")
    return tuple(names)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.peers import PeersSettings, run
    from ...bench.report import Report

    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    return run(given(PeersSettings, argparse.Namespace(**chosen)), Report(arguments.json))
