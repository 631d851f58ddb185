"""The flags of `python -m piecework.lab.attack`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ...bench.report import Report
from ...bench.target import Target
from ...cli.bench.flags import DEFAULT_URL, Formatter, add_flag, add_json, given, positive
from ...cli.core.flags import report
from .run import NAMES, AttackSettings, run

_TEXT = """\
Attack your own running server with requests that have frozen or crashed servers: numbers that
underflow, 4 MB of wrong items, prompts that cannot fit, endless headers, slow bodies, thousands of
connections, unread answers. Each attack has a limit of requests and time.
A separate process requests /health every 50 ms and measures the memory of the server's processes,
which it finds by the port. It subtracts time in which other programs used the cores (from Linux),
and memory of the KV cache, which the system counts only at its first use.
fuzz sends mutated bodies to all endpoints. It must be named, and the same --seed makes the same
requests.

The exit code is 1 if /health failed or took longer than --max-wait, memory grew by more than
--max-growth-mb, an answer had a status 5xx other than a 503 for a busy server, or the engine was
restarted.
"""
_EXAMPLES = """\
examples:
  %(prog)s
  %(prog)s --attacks giant-header,slow-headers --json attacks.json
  %(prog)s --attacks fuzz --requests 50000 --seed 1
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Attack the server that the flags name. Return the exit code."""
    parser = argparse.ArgumentParser(
        "python -m piecework.lab.attack",
        "%(prog)s [flags]",
        _TEXT,
        _EXAMPLES,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("server")
    add_flag(group, "--base-url URL", f"default: {DEFAULT_URL}", str, DEFAULT_URL)
    add_flag(group, "--model NAME", "model to ask; default: the first that the server lists")
    add_flag(group, "--api-key KEY", "sent as `Authorization: Bearer KEY`; default: none")
    group.add_argument(
        "--allow-other-hosts",
        action="store_true",
        help="attack a server on another machine; it must be yours",
    )
    add_json(parser)
    attacks = parser.add_argument_group("attacks")
    add_flag(
        attacks,
        "--attacks LIST",
        f"all (without fuzz), or some of {', '.join(NAMES)}; default: all",
        _names,
    )
    add_flag(attacks, "--seconds S", "maximum seconds of one attack; default: 90", _seconds)
    add_flag(attacks, "--requests N", "number of requests of fuzz; default: 2000", positive)
    add_flag(attacks, "--seed N", "seed of fuzz; default: 0", int)
    add_flag(attacks, "--concurrency N", "concurrent requests of fuzz; default: 8", positive)
    goals = parser.add_argument_group("goals")
    add_flag(
        goals,
        "--max-wait S",
        "maximum seconds of a /health request; default: 0.5",
        _seconds,
    )
    add_flag(
        goals,
        "--max-growth-mb MB",
        "maximum growth of the server's processes together; default: 300",
        _seconds,
    )
    arguments = parser.parse_args(argv)
    chosen = argparse.Namespace(
        **{name: value for name, value in vars(arguments).items() if value is not None}
    )
    try:
        return run(given(Target, chosen), given(AttackSettings, chosen), Report(arguments.json))
    except ValueError as error:
        return report(parser.prog, error)


def _names(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if chosen == ("all",):
        return NAMES[:-1]
    if unknown := [name for name in chosen if name not in NAMES]:
        raise argparse.ArgumentTypeError(
            f"there is no attack {unknown[0]!r}; choose from {', '.join(NAMES)}"
        )
    return chosen


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
