"""`piecework bench soak`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Api, Target
from .flags import (
    add_measurement,
    add_target,
    count,
    given,
    positive,
    ratio,
)

_TEXT = """\
Many requests of mixed shapes (short and long prompts, text and token ids, shared beginnings;
completions, chat, /generate; streamed or not; n, log-probabilities, stop strings, seeds), among
them clients that disconnect and requests that are aborted at random moments.
Every answer is checked for its form and its counts. --verify requests, greedy or seeded ones, are
first asked alone; their answers under load should be the same. In bfloat16 two tokens that nearly
tie may fall the other way in another batch, so differences are told, and fail the soak only above
--max-mismatches; with a server in float32 give 0.
--kill-engine and --hang-engine do that to the engine process meanwhile; the load begins again until
all is done.
At the end the server must say that nothing runs, nothing waits, and no request holds KV cache. Exit
code 0 or 1.
"""
_EXAMPLES = """\
examples:
  %(prog)s --num-requests 2000 --concurrency 64
  %(prog)s --num-requests 300 --max-mismatches 0 --server-pid 4711 --max-memory-growth 50
"""


def add_parser(subparsers: Any) -> None:
    parser = add_measurement(
        subparsers,
        "soak",
        "mixed requests, disconnects and aborts; is all right, does anything leak",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    add_target(parser, api=False)
    mix = parser.add_argument_group("requests")
    mix.add_argument(
        "--num-requests", type=positive, default=2000, metavar="N", help="default: 2000"
    )
    mix.add_argument(
        "--concurrency",
        type=positive,
        default=64,
        metavar="N",
        help="requests under way at once; default: 64",
    )
    mix.add_argument(
        "--apis",
        type=_apis,
        default=tuple(Api),
        metavar="LIST",
        help="default: completion,chat,generate",
    )
    mix.add_argument(
        "--disconnect-rate",
        type=ratio,
        default=0.1,
        metavar="F",
        help="share whose client leaves; default: 0.1",
    )
    mix.add_argument(
        "--abort-rate",
        type=ratio,
        default=0.05,
        metavar="F",
        help="share aborted by /abort_request; default: 0.05",
    )
    mix.add_argument(
        "--max-prompt-words",
        type=positive,
        default=400,
        metavar="N",
        help="longest prompt; default: 400",
    )
    mix.add_argument(
        "--max-new-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="most tokens of one sequence; default: 64",
    )
    mix.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="token ids are below this; default: as /get_model_info tells",
    )
    mix.add_argument("--seed", type=int, default=0, metavar="N", help="of all requests; default: 0")
    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--verify",
        type=count,
        default=40,
        metavar="N",
        help="answers to compare with the same request alone; default: 40",
    )
    checks.add_argument(
        "--max-mismatches",
        type=count,
        metavar="N",
        help="how many of them may differ; default: any number",
    )
    checks.add_argument(
        "--settle-seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="in which the server becomes idle; default: 10",
    )
    checks.add_argument(
        "--server-pid",
        type=positive,
        metavar="PID",
        help="watch the memory of this process and of those it started",
    )
    checks.add_argument(
        "--max-memory-growth",
        dest="max_memory_growth_mib",
        type=float,
        metavar="MIB",
        help="since the first quarter; default: any",
    )
    faults = parser.add_argument_group(
        "faults, of the engine process of the server that --server-pid names, here"
    )
    faults.add_argument(
        "--kill-engine",
        dest="kills",
        type=count,
        default=0,
        metavar="N",
        help="times that it is killed; default: 0",
    )
    faults.add_argument(
        "--hang-engine",
        dest="hangs",
        type=count,
        default=0,
        metavar="N",
        help="times that it is stopped; default: 0",
    )
    faults.add_argument(
        "--fault-interval",
        type=float,
        default=32.0,
        metavar="S",
        help="three within 60 s end a server; default: 32",
    )


def _apis(text: str) -> tuple[Api, ...]:
    names = text.split(",")
    if not set(names) <= set(Api):
        raise argparse.ArgumentTypeError(f"{text!r} should be some of {','.join(Api)}")
    return tuple(map(Api, names))


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.report import Report
    from ...bench.soak import SoakSettings, run
    from ...bench.soak_requests import Mix

    return run(
        given(Target, arguments),
        given(SoakSettings, arguments),
        given(Mix, arguments),
        Report(arguments.json),
    )
