"""`piecework bench serving`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Api, Target
from ...bench.workloads import DATASETS, PROMPT_KINDS, Workload
from .flags import (
    add_flag,
    add_gsm8k_file,
    add_measurement,
    add_target,
    count,
    given,
    positive,
    ratio,
)

_TEXT = """\
A fixed load on any OpenAI-compatible server, and how fast it answers.
--request-rate R sends requests at the times of a Poisson process; inf, all at once.
--max-concurrency bounds how many are under way; with --request-rate inf and a bound C, C clients
each send their next request as soon as they have an answer.

TTFT  time to first token, from sending the request
TPOT  time of each further token: (last token - first token) / (tokens - 1), one figure a request
ITL   gap between two events that brought tokens, all requests together
E2E   from sending the request to its end
"""
_EXAMPLES = """\
examples:
  %(prog)s --random-input-len 256 --random-output-len 64 --ignore-eos --max-concurrency 8 \\
      --num-prompts 32
  %(prog)s --dataset shared-prefix --prefix-len 640 --random-input-len 96 --random-output-len 32 \\
      --ignore-eos --max-concurrency 8
  %(prog)s --dataset gsm8k --request-rate 4 --num-prompts 100 --json result.json
"""


def add_parser(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers,
        "serving",
        "latency and throughput under a fixed load",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    add_target(parser)
    load = parser.add_argument_group("load")
    add_flag(load, "--num-prompts N", "requests to measure", positive, 200)
    add_flag(
        load, "--request-rate R", "requests a second, or inf; default: inf", _rate, float("inf")
    )
    add_flag(load, "--max-concurrency N", "requests under way at once; default: no bound", positive)
    add_flag(load, "--num-warmups N", "requests sent one by one beforehand", count, 1)
    add_flag(load, "--temperature T", "default: 0, greedy", float, 0.0)
    load.add_argument(
        "--ignore-eos",
        action="store_true",
        help="answers go on to their full length; Piecework, SGLang and vLLM know this",
    )
    load.add_argument(
        "--no-stream",
        dest="stream",
        action="store_false",
        help="wait for whole answers; there is no TTFT, TPOT and ITL then",
    )
    add_flag(load, "--seed N", "of prompts and times of arrival", int, 0)
    _add_prompts(parser.add_argument_group("prompts"))


def _add_prompts(group: Any) -> None:
    add_flag(group, "--dataset", "", str, "random", choices=DATASETS)
    add_flag(group, "--random-input-len N", "tokens of a random prompt", positive, 1024)
    add_flag(group, "--random-output-len N", "tokens asked for behind it", positive, 128)
    add_flag(
        group,
        "--random-range-ratio F",
        "draw each length L from L (1 - F) to L (1 + F), as in vLLM's benchmark; default: 0, "
        "exactly L",
        ratio,
        0.0,
    )
    add_flag(group, "--prefix-len N", "shared-prefix: shared tokens before them", positive, 512)
    add_flag(group, "--num-prefixes N", "shared-prefix: different beginnings", positive, 1)
    add_flag(
        group,
        "--prompt-kind",
        "random prompts as token ids, of exact lengths, or as words, about one token each; "
        "default: token-ids, for a chat words",
        choices=PROMPT_KINDS,
    )
    add_flag(
        group,
        "--vocab-size N",
        "token ids are below this; default: as /get_model_info tells",
        positive,
    )
    add_flag(group, "--num-shots N", "gsm8k: worked examples before each question", count, 5)
    add_flag(
        group,
        "--output-len N",
        "gsm8k, sharegpt-file: most tokens; default: 512, and about the recorded reply's",
        positive,
    )
    add_gsm8k_file(group, "; sharegpt-file: the ShareGPT JSON")


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be requests a second, above 0, or inf")
    return value


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.report import Report
    from ...bench.serving import ServingSettings, run

    chat = arguments.api is Api.CHAT
    if chat and arguments.prompt_kind == "token-ids":
        raise ValueError(
            "--prompt-kind token-ids: a chat takes text; choose words, or another --api"
        )
    workload = given(
        Workload, arguments, kind=arguments.prompt_kind or ("words" if chat else "token-ids")
    )
    return run(
        given(Target, arguments),
        given(ServingSettings, arguments),
        workload,
        Report(arguments.json),
    )
