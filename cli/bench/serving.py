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
Measure how fast an OpenAI-compatible server answers a fixed load.
--request-rate R sends requests at the times of a Poisson process; inf sends all at once.
--max-concurrency limits concurrent requests. With --request-rate inf and a limit C, each of C
clients sends its next request when it has an answer.

TTFT  time from sending the request to the first token
TPOT  time per further token: (last token - first token) / (tokens - 1), one figure per request
ITL   gap between two events with tokens, over all requests
E2E   time from sending the request to its end
"""
_EXAMPLES = """\
examples:
  %(prog)s --random-input-len 256 --random-output-len 64 --ignore-eos --max-concurrency 8 \\
      --num-prompts 32
  %(prog)s --dataset shared-prefix --prefix-len 640 --random-input-len 96 --random-output-len 32 \\
      --ignore-eos --max-concurrency 8
  %(prog)s --lora sql chat --lora-zipf 1 --max-concurrency 32
  %(prog)s --api chat --images 1 --image-share 0.5 --random-input-len 64 --max-concurrency 8
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
        load, "--request-rate R", "requests per second, or inf; default: inf", _rate, float("inf")
    )
    add_flag(load, "--max-concurrency N", "concurrent requests; default: no limit", positive)
    add_flag(load, "--num-warmups N", "requests sent one by one before measuring", count, 1)
    add_flag(load, "--temperature T", "sampling temperature; default: 0, greedy", float, 0.0)
    load.add_argument(
        "--ignore-eos",
        action="store_true",
        help="generate answers of full length; for Piecework, SGLang and vLLM",
    )
    load.add_argument(
        "--no-stream",
        dest="stream",
        action="store_false",
        help="do not stream; without TTFT, TPOT and ITL",
    )
    add_flag(load, "--seed N", "seed of prompts, arrival times and --lora-zipf", int, 0)
    load.add_argument(
        "--lora",
        nargs="+",
        default=(),
        metavar="NAME",
        help="adapters (LoRA) that the server has, and that requests name in turn; the model's own "
        "name is the base model; default: all requests go to --model",
    )
    add_flag(
        load,
        "--lora-zipf S",
        "draw the adapter of each request: number K of --lora has a share of 1 / K^S",
        _exponent,
    )
    _add_prompts(parser.add_argument_group("prompts"))


def _add_prompts(group: Any) -> None:
    add_flag(group, "--dataset", "source of the prompts", str, "random", choices=DATASETS)
    add_flag(group, "--random-input-len N", "tokens of a random prompt", positive, 1024)
    add_flag(group, "--random-output-len N", "tokens of its answer", positive, 128)
    add_flag(
        group,
        "--random-range-ratio F",
        "draw each length from L (1 - F) to L (1 + F), as vLLM's benchmark does; default: 0, "
        "exactly L",
        ratio,
        0.0,
    )
    add_flag(group, "--prefix-len N", "tokens of the prefix (shared-prefix)", positive, 512)
    add_flag(group, "--num-prefixes N", "number of different prefixes (shared-prefix)", positive, 1)
    add_flag(
        group,
        "--prompt-kind",
        "form of random prompts: token-ids (exact lengths) or words (about one token each); "
        "default: token-ids, or words for a chat",
        choices=PROMPT_KINDS,
    )
    add_flag(
        group,
        "--vocab-size N",
        "upper limit of token ids; default: from /get_model_info",
        positive,
    )
    add_flag(group, "--num-shots N", "worked examples before each question (gsm8k)", count, 5)
    add_flag(
        group,
        "--output-len N",
        "maximum tokens of an answer (gsm8k: default 512; sharegpt-file: default about the "
        "recorded answer's)",
        positive,
    )
    add_gsm8k_file(group, "; sharegpt-file: the ShareGPT JSON")
    add_flag(group, "--images N", "random pictures in each prompt of a chat (--api chat)", count, 0)
    add_flag(group, "--image-size N", "pixels of a side of each picture", positive, 512)
    add_flag(
        group,
        "--image-share F",
        "share of the prompts that have pictures; default: 1, all",
        ratio,
        1.0,
    )


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of requests per second above 0, or inf"
        )
    return value


def _exponent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.report import Report
    from ...bench.serving import ServingSettings, run

    chat = arguments.api is Api.CHAT
    if chat and arguments.prompt_kind == "token-ids":
        raise ValueError(
            "--prompt-kind token-ids does not work with --api chat; give words, or another --api"
        )
    if arguments.images and not chat:
        raise ValueError("--images needs --api chat")
    workload = given(
        Workload, arguments, kind=arguments.prompt_kind or ("words" if chat else "token-ids")
    )
    return run(
        given(Target, arguments),
        given(ServingSettings, arguments, lora=tuple(arguments.lora)),
        workload,
        Report(arguments.json),
    )
