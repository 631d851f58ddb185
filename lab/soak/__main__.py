"""The flags of `python -m piecework.lab.soak`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...bench.report import Report
from ...bench.target import Api, Target
from ...cli.bench.flags import Formatter, add_flag, add_target, count, given, positive, ratio
from ...cli.core.flags import report
from .requests import Mix
from .result import SoakSettings
from .run import run

_TEXT = """\
Send many mixed requests: short and long prompts, text and token ids, shared prefixes; completions,
chat, /generate; streamed or not; n, log-probabilities, stop strings, seeds. At random moments, some
clients disconnect and some requests are aborted.
The form and the counts of every answer are checked. --verify greedy or seeded requests are first
sent alone, and their answers under load should be the same. In bfloat16, nearly equal tokens may
change places in another batch, so differences fail the run only above --max-mismatches. With a
server in float32, give 0.
--kill-engine and --hang-engine kill or stop the engine process during the load, which repeats until
all faults are done.
At the end the server must report no running and no waiting requests, and no used KV cache. The exit
code is 0 or 1.
"""
_EXAMPLES = """\
examples:
  %(prog)s --num-requests 2000 --concurrency 64
  %(prog)s --overload --concurrency 1200 --max-under-way 576 --duration 1440 --server-pid 4711
  %(prog)s --num-requests 300 --max-mismatches 0 --server-pid 4711 --max-memory-growth 50
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Put the load on the server that the flags name. Return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m piecework.lab.soak",
        "%(prog)s [flags]",
        _TEXT,
        _EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    add_target(parser, api=False)
    mix = parser.add_argument_group("requests")
    add_flag(mix, "--num-requests N", "number of requests", positive, 2000)
    add_flag(mix, "--concurrency N", "concurrent requests", positive, 64)
    add_flag(
        mix,
        "--duration S",
        "seconds to repeat the load for; default: run it once",
        float,
        0.0,
    )
    add_flag(mix, "--apis LIST", "endpoints; default: completion,chat,generate", _apis, tuple(Api))
    add_flag(mix, "--disconnect-rate F", "share of clients that disconnect", ratio, 0.1)
    add_flag(mix, "--abort-rate F", "share of requests aborted by /abort_request", ratio, 0.05)
    add_flag(mix, "--max-prompt-words N", "maximum words of a prompt", positive, 400)
    add_flag(mix, "--max-new-tokens N", "maximum tokens of one sequence", positive, 64)
    add_flag(
        mix,
        "--vocab-size N",
        "upper limit of token ids; default: from /get_model_info",
        positive,
    )
    add_flag(mix, "--seed N", "seed of all requests", int, 0)
    _add_checks(parser)
    _add_faults(parser)
    arguments = parser.parse_args(argv)
    try:
        return run(
            given(Target, arguments),
            given(SoakSettings, arguments),
            given(Mix, arguments),
            Report(arguments.json),
        )
    except ValueError as error:
        return report(parser.prog, error)


def _add_checks(parser: argparse.ArgumentParser) -> None:
    checks = parser.add_argument_group("checks")
    add_flag(
        checks, "--verify N", "number of answers to compare with the same request alone", count, 40
    )
    add_flag(checks, "--max-mismatches N", "how many of them may differ; default: no limit", count)
    checks.add_argument(
        "--overload",
        action="store_true",
        help="overload: the server must refuse requests, with 429 or with 503 and Retry-After",
    )
    add_flag(
        checks,
        "--max-under-way N",
        "maximum running plus waiting requests of the server: --max-running-requests plus "
        "--max-queued-requests; default: no limit",
        positive,
    )
    add_flag(checks, "--settle-seconds S", "seconds for the server to become idle", float, 10.0)
    add_flag(
        checks,
        "--server-pid PID",
        "watch the memory of this process and of its child processes",
        positive,
    )
    add_flag(
        checks,
        "--max-memory-growth MIB",
        "maximum growth of memory after the first quarter; default: no limit",
        float,
        dest="max_memory_growth_mib",
    )


def _add_faults(parser: argparse.ArgumentParser) -> None:
    faults = parser.add_argument_group("faults of the engine process; need --server-pid")
    add_flag(faults, "--kill-engine N", "how often to kill the engine", count, 0, dest="kills")
    add_flag(
        faults, "--hang-engine N", "how often to stop (hang) the engine", count, 0, dest="hangs"
    )
    add_flag(
        faults,
        "--fault-interval S",
        "seconds between faults; three within 60 s end a server",
        float,
        32.0,
    )


def _apis(text: str) -> tuple[Api, ...]:
    names = text.split(",")
    if not set(names) <= set(Api):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {','.join(Api)}")
    return tuple(map(Api, names))


if __name__ == "__main__":
    sys.exit(main())
