"""`piecework bench gsm8k`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Target
from .flags import (
    DEFAULT_URL,
    add_flag,
    add_gsm8k_file,
    add_measurement,
    add_servers,
    add_target,
    count,
    given,
    positive,
)

_TEXT = """\
Measure few-shot GSM8K with the prompts, stops and answer extraction of SGLang's few_shot_gsm8k, and
print its four lines: Accuracy, Invalid (share of answers without a number), Latency, Output
throughput (of the tokens that the server counts).
As in SGLang, the examples are the first --num-shots questions of the file, and the questions start
at its beginning too. The temperature is 0.
With --server, each command is started in turn and asked the same questions. A command gets a port
as its last word, or in place of {port}.
A failed request counts as wrong. Failures are listed, and the exit code is then 1.
"""
_EXAMPLES = """\
examples:
  %(prog)s --num-questions 200
  %(prog)s --base-url http://127.0.0.1:8000 --api chat --parallel 32 --data-path test.jsonl
  %(prog)s --base-url http://127.0.0.1:30000 --compare http://127.0.0.1:8000 --json result.json
  %(prog)s --server off='piecework serve DIR --disable-piecewise-cuda-graph --port {port}' \\
    --server on='piecework serve DIR --port {port}'
"""


def add_parser(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers,
        "gsm8k",
        "few-shot GSM8K accuracy of one server or several",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    add_target(parser)
    add_flag(
        parser,
        "--compare URL",
        "then ask a second server the same, and print the paired difference in accuracy",
    )
    add_servers(
        parser, "command of a server to start, ask and end, instead of --base-url; repeatable"
    )
    group = parser.add_argument_group("questions")
    add_gsm8k_file(group)
    add_flag(group, "--num-shots N", "worked examples before each question", count, 5)
    add_flag(group, "--num-questions N", "questions to ask", positive, 200)
    add_flag(group, "--max-new-tokens N", "maximum tokens of an answer", positive, 512)
    add_flag(group, "--parallel N", "concurrent requests", positive, 128)


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.gsm8k import Gsm8kSettings, run
    from ...bench.report import Report

    if arguments.servers and (arguments.compare or arguments.base_url != DEFAULT_URL):
        raise ValueError(
            "--server starts its own servers: leave --base-url and --compare out, or --server"
        )
    return run(
        given(Target, arguments),
        given(Gsm8kSettings, arguments),
        arguments.compare,
        Report(arguments.json),
        arguments.servers,
    )
