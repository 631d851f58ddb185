"""`piecework bench tools`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Api, Target
from .flags import add_flag, add_measurement, add_target, given, positive

_TEXT = """\
Check tool calls of chats, streamed and not: with tool_choice auto, required and a named tool, and
with at most one call. jsonschema validates the arguments of every complete call against the schema
of its tool, made from --seed. The exit code is 1 if arguments are invalid, a required call is
missing, or a request fails.
"""
_EXAMPLES = """\
examples:
  %(prog)s --json tools.json
  %(prog)s --num-requests 40 --max-concurrency 8
"""


def add_parser(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers,
        "tools",
        "tool calls: check arguments against their schemas",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    add_target(parser, api=False)
    load = parser.add_argument_group("load")
    add_flag(load, "--num-requests N", "number of requests", positive, 500)
    add_flag(load, "--max-concurrency N", "concurrent requests", positive, 16)
    add_flag(load, "--max-tokens N", "maximum tokens of an answer", positive, 400)
    add_flag(load, "--temperature T", "sampling temperature", float, 1.0)
    add_flag(load, "--seed N", "seed of the tools", int, 0)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.report import Report
    from ...bench.tool_calls import ToolSettings, run

    return run(
        given(Target, arguments, api=Api.CHAT),
        given(ToolSettings, arguments),
        Report(arguments.json),
    )
