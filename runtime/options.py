"""Fields of configurations that are flags of the command line, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, fields
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


def check_options(config: Any, positive: Sequence[str]) -> None:
    """Raises `ValueError` for a value that is none of its choices, and for one of `positive` below
    1; None is always taken.
    """
    for each in fields(config):
        value, choices = getattr(config, each.name), each.metadata.get("choices")
        flag = f"--{each.name.replace('_', '-')}"
        if value is not None and each.name in positive and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
        if value is not None and choices and value not in choices:
            raise ValueError(f"{flag} must be one of {', '.join(choices)}, got {value}")
