"""`piecework bench tools`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Api, Target
from .flags import add_flag, add_measurement, add_target, given, positive

_TEXT = """\
Tool calls of chats: with tools to choose from, required, a named one, and one call at most, whole
and streamed in turn. The arguments of every whole call are validated by jsonschema against the
schema of its tool, made from --seed. Exit code 1 where one does not validate, an answer has no call
where one is required, or a request fails.
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
        "tool calls: do their arguments follow their schemas",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    add_target(parser, api=False)
    load = parser.add_argument_group("load")
    add_flag(load, "--num-requests N", "", positive, 500)
    add_flag(load, "--max-concurrency N", "requests under way at once", positive, 16)
    add_flag(load, "--max-tokens N", "of an answer", positive, 400)
    add_flag(load, "--temperature T", "", float, 1.0)
    add_flag(load, "--seed N", "of the tools", int, 0)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.report import Report
    from ...bench.tool_calls import ToolSettings, run

    return run(
        given(Target, arguments, api=Api.CHAT),
        given(ToolSettings, arguments),
        Report(arguments.json),
    )
