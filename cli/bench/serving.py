"""`piecework bench serving`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Api, Target
from ...bench.workloads import DATASETS, PROMPT_KINDS, Workload
from .flags import (
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
    load.add_argument(
        "--num-prompts",
        type=positive,
        default=200,
        metavar="N",
        help="requests to measure; default: 200",
    )
    load.add_argument(
        "--request-rate",
        type=_rate,
        default=float("inf"),
        metavar="R",
        help="requests a second, or inf; default: inf",
    )
    load.add_argument(
        "--max-concurrency",
        type=positive,
        metavar="N",
        help="requests under way at once; default: no bound",
    )
    load.add_argument(
        "--num-warmups",
        type=count,
        default=1,
        metavar="N",
        help="requests sent one by one beforehand; default: 1",
    )
    load.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy"
    )
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
    load.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of prompts and times of arrival; default: 0",
    )
    _add_prompts(parser.add_argument_group("prompts"))


def _add_prompts(group: Any) -> None:
    group.add_argument("--dataset", choices=DATASETS, default="random", help="default: random")
    group.add_argument(
        "--random-input-len",
        type=positive,
        default=1024,
        metavar="N",
        help="tokens of a random prompt; default: 1024",
    )
    group.add_argument(
        "--random-output-len",
        type=positive,
        default=128,
        metavar="N",
        help="tokens asked for behind it; default: 128",
    )
    group.add_argument(
        "--random-range-ratio",
        type=ratio,
        default=0.0,
        metavar="F",
        help="draw each length L from L (1 - F) to L (1 + F), as in vLLM's benchmark; default: 0, "
        "exactly L",
    )
    group.add_argument(
        "--prefix-len",
        type=positive,
        default=512,
        metavar="N",
        help="shared-prefix: shared tokens before them; default: 512",
    )
    group.add_argument(
        "--num-prefixes",
        type=positive,
        default=1,
        metavar="N",
        help="shared-prefix: different beginnings; default: 1",
    )
    group.add_argument(
        "--prompt-kind",
        choices=PROMPT_KINDS,
        help="random prompts as token ids, of exact lengths, or as words, about one token each; "
        "default: token-ids, for a chat words",
    )
    group.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="token ids are below this; default: as /get_model_info tells",
    )
    group.add_argument(
        "--num-shots",
        type=count,
        default=5,
        metavar="N",
        help="gsm8k: worked examples before each question; default: 5",
    )
    group.add_argument(
        "--output-len",
        type=positive,
        metavar="N",
        help="gsm8k, sharegpt-file: most tokens; default: 512, and about the recorded reply's",
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
