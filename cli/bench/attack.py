"""`piecework bench attack`."""

from __future__ import annotations

import argparse
from typing import Any

from ...bench.target import Target
from .flags import DEFAULT_URL, add_flag, add_json, add_measurement, given, positive

NAMES = (
    *(
        "vanishing-numbers",
        "grammars",
        "stop-strings",
        "wrong-items",
        "many-lists",
        "long-prompts",
        "nesting",
        "huge-numbers",
        "many-members",
    ),
    *(
        "giant-header",
        "many-headers",
        "giant-url",
        "trailers",
        "pipelining",
        "slow-headers",
        "slow-bodies",
        "half-bodies",
    ),
    *("idle-connections", "connection-flood", "unread-answers"),
    *(
        "many-messages",
        "many-items",
        "long-histories",
        "unknown-strings",
        "headers-behind",
        "second-and-leave",
    ),
    *("description", "charsets", "long-texts", "many-alternatives", "counted-again"),
    *("echoed-prompts", "long-literals", "declarations", "compressed", "odd-files", "fuzz"),
)
_TEXT = """\
Attacks a running server, yours, with what has frozen or ended servers: numbers that vanish, 4 MB of
wrong items, prompts that cannot fit, headers without end, bodies that trickle, thousands of
connections, answers that nobody reads. Each attack is bounded in requests and time.
A process of its own asks for /health every 50 ms and weighs the server's processes, which are found
by the port they listen on. Two things that are no attacker's doing are subtracted: time in which
other programs had the cores (Linux tells it), and memory of the KV cache, which is reserved at the
start and counted by the system when it is first used.
fuzz sends mutated bodies to all endpoints, and is no part of all: the same --seed makes the same
requests.

A goal is missed where /health took longer than --max-wait or failed, memory grew by more than
--max-growth-mb, an answer had a status of 5xx other than a 503 that says that the server is busy,
or the engine was started again. Exit code 0 or 1.
"""
_EXAMPLES = """\
examples:
  %(prog)s
  %(prog)s --attacks giant-header,slow-headers --json attacks.json
  %(prog)s --attacks fuzz --requests 50000 --seed 1
"""


def add_parser(subparsers: Any) -> None:
    """Add `attack` to the subparsers of `piecework bench`."""
    parser = add_measurement(
        subparsers,
        "attack",
        "attacks on a server of one's own: does it stay well",
        _TEXT,
        _EXAMPLES,
        _run,
    )
    group = parser.add_argument_group("server")
    add_flag(group, "--base-url URL", f"default: {DEFAULT_URL}", str, DEFAULT_URL)
    add_flag(group, "--model NAME", "default: the first that the server lists")
    add_flag(group, "--api-key KEY", "sent as `Authorization: Bearer KEY`; default: none")
    group.add_argument(
        "--allow-other-hosts",
        action="store_true",
        help="attack another machine than this one; it must be yours",
    )
    add_json(parser)
    attacks = parser.add_argument_group("attacks")
    add_flag(
        attacks,
        "--attacks LIST",
        f"all, or some of {', '.join(NAMES)}; default: all, which is all but fuzz",
        _names,
    )
    add_flag(attacks, "--seconds S", "that one attack may take at most; default: 90", _seconds)
    add_flag(attacks, "--requests N", "fuzz: requests; default: 2000", positive)
    add_flag(attacks, "--seed N", "fuzz: of all requests; default: 0", int)
    add_flag(attacks, "--concurrency N", "fuzz: requests under way at once; default: 8", positive)
    goals = parser.add_argument_group("goals")
    add_flag(
        goals,
        "--max-wait S",
        "seconds that the server may keep /health waiting; default: 0.5",
        _seconds,
    )
    add_flag(
        goals,
        "--max-growth-mb MB",
        "by which the server's processes may grow together; default: 300",
        _seconds,
    )


def _names(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    if chosen == ("all",):
        return NAMES[:-1]
    if unknown := [name for name in chosen if name not in NAMES]:
        raise argparse.ArgumentTypeError(
            f"there is no attack {unknown[0]!r}; there are {', '.join(NAMES)}"
        )
    return chosen


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0")
    return value


def _run(arguments: argparse.Namespace) -> int:
    from ...bench.attack import AttackSettings, run
    from ...bench.report import Report

    chosen = argparse.Namespace(
        **{name: value for name, value in vars(arguments).items() if value is not None}
    )
    return run(given(Target, chosen), given(AttackSettings, chosen), Report(arguments.json))
