"""`piecework bench structured`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Target
from .flags import add_flag, add_measurement, add_target, given, numbers, positive

_TEXT = """\
Answers that follow JSON schemas: what they cost, and whether they do.
First tokens a second without a schema and with one, in turn, at each of --concurrencies; the ratio
is of all rounds. Then a request for each of --num-schemas schemas of growing difficulty, made
from --seed: every finished answer is validated by jsonschema, and where the model is on this
machine too, the masks of its tokens are made again here and timed. Exit code 1 where an answer does
not validate or a request fails.
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
        "answers that follow JSON schemas: throughput, validity, masks",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    add_target(parser, api=False)
    rates = parser.add_argument_group("throughput")
    add_flag(rates, "--concurrencies LIST", "default: 1,8,32", numbers, (1, 8, 32))
    add_flag(rates, "--rounds N", "of both loads, in turn", positive, 3)
    add_flag(rates, "--output-len N", "tokens of an answer", positive, 64)
    schemas = parser.add_argument_group("schemas")
    add_flag(schemas, "--num-schemas N", "", positive, 200)
    add_flag(schemas, "--max-concurrency N", "requests under way at once", positive, 16)
    add_flag(schemas, "--max-tokens N", "of an answer", positive, 400)
    add_flag(schemas, "--temperature T", "", float, 1.0)
    add_flag(schemas, "--seed N", "of the schemas", int, 0)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.report import Report
    from ...bench.structured import StructuredSettings, run

    return run(
        given(Target, arguments), given(StructuredSettings, arguments), Report(arguments.json)
    )
