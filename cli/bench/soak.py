"""`piecework bench soak`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Api, Target
from .flags import (
    add_flag,
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
  %(prog)s --overload --concurrency 1200 --max-under-way 576 --duration 1440 --server-pid 4711
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
    add_flag(mix, "--num-requests N", "", positive, 2000)
    add_flag(mix, "--concurrency N", "requests under way at once", positive, 64)
    add_flag(
        mix,
        "--duration S",
        "seconds for which the load begins again; default: it is put on once",
        float,
        0.0,
    )
    add_flag(mix, "--apis LIST", "default: completion,chat,generate", _apis, tuple(Api))
    add_flag(mix, "--disconnect-rate F", "share whose client leaves", ratio, 0.1)
    add_flag(mix, "--abort-rate F", "share aborted by /abort_request", ratio, 0.05)
    add_flag(mix, "--max-prompt-words N", "longest prompt", positive, 400)
    add_flag(mix, "--max-new-tokens N", "most tokens of one sequence", positive, 64)
    add_flag(
        mix,
        "--vocab-size N",
        "token ids are below this; default: as /get_model_info tells",
        positive,
    )
    add_flag(mix, "--seed N", "of all requests", int, 0)
    checks = parser.add_argument_group("checks")
    add_flag(checks, "--verify N", "answers to compare with the same request alone", count, 40)
    add_flag(
        checks, "--max-mismatches N", "how many of them may differ; default: any number", count
    )
    checks.add_argument(
        "--overload",
        action="store_true",
        help="more than the server takes: requests must be refused, by 429 or 503 with Retry-After",
    )
    add_flag(
        checks,
        "--max-under-way N",
        "requests that may run and wait in the server at once, --max-running-requests and "
        "--max-queued-requests together; default: any number",
        positive,
    )
    add_flag(checks, "--settle-seconds S", "in which the server becomes idle", float, 10.0)
    add_flag(
        checks,
        "--server-pid PID",
        "watch the memory of this process and of those it started",
        positive,
    )
    add_flag(
        checks,
        "--max-memory-growth MIB",
        "since the first quarter; default: any",
        float,
        dest="max_memory_growth_mib",
    )
    faults = parser.add_argument_group(
        "faults, of the engine process of the server that --server-pid names, here"
    )
    add_flag(faults, "--kill-engine N", "times that it is killed", count, 0, dest="kills")
    add_flag(faults, "--hang-engine N", "times that it is stopped", count, 0, dest="hangs")
    add_flag(faults, "--fault-interval S", "three within 60 s end a server", float, 32.0)


def _apis(text: str) -> tuple[Api, ...]:
    names = text.split(",")
    if not set(names) <= set(Api):
        raise argparse.ArgumentTypeError(f"{text!r} should be some of {','.join(Api)}")
    return tuple(map(Api, names))


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.report import Report
    from ...bench.soak import run
    from ...bench.soak_requests import Mix
    from ...bench.soak_result import SoakSettings

    return run(
        given(Target, arguments),
        given(SoakSettings, arguments),
        given(Mix, arguments),
        Report(arguments.json),
    )
