"""`piecework bench peers`."""

from __future__ import annotations

import argparse
from typing import Any

from .flags import (
    add_flag,
    add_gsm8k_file,
    add_json,
    add_measurement,
    add_servers,
    given,
    positive,
)

_TEXT = """\
Start Piecework and each --server on this machine, one after the other, put the same loads on each,
and print a table with rates, seconds to the first token, memory, and Piecework's ratio to the best
other server.

load     tokens in                out   at a time  rate
single   128                      128   1          out tok/s
batch8   256                      64    8          out tok/s
batch32  256                      64    32         out tok/s
prefix   640 shared, 96 own       32    8          out tok/s
prefill  1,024                    1     4          in tok/s
long     8,000                    1     1          in tok/s (only if named)

A server's command gets a port as its last word, or in place of {port}.
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
        "compare Piecework with other servers: speed, start, memory",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    add_servers(parser, "command of another server; repeatable")
    parser.add_model_argument()
    add_flag(parser, "--model-path PATH", "model for Piecework; default: smollm2-135m")
    add_flag(
        parser,
        "--vocab-size N",
        "upper limit of token ids in prompts; default: 49152, smollm2-135m's",
        positive,
    )
    add_flag(parser, "--loads LIST", "loads; default: single,batch8,batch32,prefill,prefix", _loads)
    parser.add_argument(
        "--scaling",
        action="store_true",
        help="also measure 1, 2, 4, ... 64 at a time, 128 tokens in, 64 out",
    )
    add_flag(
        parser,
        "--rounds N",
        "rounds over all servers; the best figures of each count; default: 1",
        positive,
    )
    add_flag(
        parser,
        "--answers N",
        "also measure the mean log-probability of GSM8K's first N worked answers, if the server "
        "returns log-probabilities; default: 0",
        positive,
    )
    add_gsm8k_file(parser)
    add_flag(parser, "--seed N", "seed of the prompts; default: 0", int)
    add_flag(parser, "--markdown FILE", "also write the tables to FILE")
    add_flag(parser, "--plot FILE", "draw the scaling run as PNG or SVG; needs matplotlib")
    add_json(parser)


def _loads(text: str) -> tuple[str, ...]:
    names = text.split(",")
    if not set(names) <= set(_LOADS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {','.join(_LOADS)}")
    return tuple(names)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.peers import PeersSettings, run
    from ...bench.report import Report

    chosen = {name: value for name, value in vars(arguments).items() if value is not None}
    return run(given(PeersSettings, argparse.Namespace(**chosen)), Report(arguments.json))
