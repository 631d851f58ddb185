"""`piecework bench`: one file per measurement, which imports its modules when it runs."""

from __future__ import annotations

from typing import Any

from . import (
    embeddings,
    graphs,
    gsm8k,
    peers,
    roofline,
    serving,
    structured,
    tools,
)


def add_parser(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure a server or an engine",
        description="Measure speed, correctness and memory of a server, or of an "
        "engine without a server.",
    )
    bench.set_defaults(parser=bench)
    add_measurements(bench.add_subparsers(title="measurements", metavar="MEASUREMENT"))


def add_measurements(subparsers: Any) -> None:
    """Add every measurement to the subparsers of `piecework bench`.

    Each sets `parser`, and `func`, which takes the parsed arguments and returns the exit code: 0,
    1 if requests failed or a goal was missed, 2 for a user error.
    """
    for measurement in (
        gsm8k,
        serving,
        structured,
        tools,
        peers,
        graphs,
        roofline,
        embeddings,
    ):
        measurement.add_parser(subparsers)
