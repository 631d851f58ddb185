"""`piecework bench`: a file a measurement, which imports what it needs when it runs."""

from __future__ import annotations

from typing import Any

from . import (
    attack,
    embeddings,
    graphs,
    gsm8k,
    peers,
    roofline,
    serving,
    soak,
    structured,
    tools,
)


def add_parser(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure a server",
        description="Measure any OpenAI-compatible server: what it answers, how fast, and what it "
        "leaks.",
    )
    bench.set_defaults(parser=bench)
    add_measurements(bench.add_subparsers(title="measurements", metavar="MEASUREMENT"))


def add_measurements(subparsers: Any) -> None:
    """Add every measurement to the subparsers of `piecework bench`.

    Each sets `func`, which takes the parsed arguments and returns the exit code: 0, 1 where
    requests failed, 2 where the user can mend it; and `parser`, its own.
    """
    for measurement in (
        gsm8k,
        serving,
        structured,
        tools,
        soak,
        peers,
        graphs,
        roofline,
        embeddings,
        attack,
    ):
        measurement.add_parser(subparsers)
