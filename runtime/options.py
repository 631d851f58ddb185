"""Fields of configurations that are flags of the command line, too."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag of the same name (`max_total_tokens` ->
    `--max-total-tokens`).

    `group`: the heading of `--help` that it stands under.
    """
    return field(
        default=default,
        metadata={"help": help, "group": group, "choices": choices, "metavar": metavar},
    )
