"""`piecework bench structured`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Target
from .flags import add_flag, add_measurement, add_target, given, numbers, positive

_TEXT = """\
Measure the cost of answers that follow JSON schemas, and check that they do.
First it measures tokens per second without and with a schema, alternating, at each of
--concurrencies. The ratio is over all rounds. Then it sends a request for each of --num-schemas
schemas of growing difficulty, made from --seed. jsonschema validates every finished answer. If the
model is on this machine too, the masks of its tokens are computed again here and timed. The exit
code is 1 if an answer is invalid or a request fails.
"""
_EXAMPLES = """\
examples:
  %(prog)s --json structured.json
  %(prog)s --concurrencies 8 --rounds 1 --num-schemas 20
"""


def add_parser(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers,
        "structured",
        "answers that follow JSON schemas: throughput, validity, mask times",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    add_target(parser, api=False)
    rates = parser.add_argument_group("throughput")
    add_flag(
        rates, "--concurrencies LIST", "concurrent requests; default: 1,8,32", numbers, (1, 8, 32)
    )
    add_flag(rates, "--rounds N", "rounds of both loads", positive, 3)
    add_flag(rates, "--output-len N", "tokens of an answer", positive, 64)
    schemas = parser.add_argument_group("schemas")
    add_flag(schemas, "--num-schemas N", "number of schemas", positive, 200)
    add_flag(schemas, "--max-concurrency N", "concurrent requests", positive, 16)
    add_flag(schemas, "--max-tokens N", "maximum tokens of an answer", positive, 400)
    add_flag(schemas, "--temperature T", "sampling temperature", float, 1.0)
    add_flag(schemas, "--seed N", "seed of the schemas", int, 0)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.report import Report
    from ...bench.structured import StructuredSettings, run

    return run(
        given(Target, arguments), given(StructuredSettings, arguments), Report(arguments.json)
    )
