"""Fields of configurations that are also flags of the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, fields
from typing import Any

MOST_THREADS = 1024


def option(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] | None = None,
    metavar: str | None = None,
    items: str | None = None,
) -> Any:
    """Return a dataclass field that is also a flag of the same name (`--max-total-tokens`).

    `group` is its heading in `--help`. `items` is set if the value is a text with commas. Then a
    command line may give several words, each of which must match this pattern.
    """
    return field(
        default=default,
        metadata={
            "help": help,
            "group": group,
            "choices": choices,
            "metavar": metavar,
            "items": items,
        },
    )


def check_options(config: Any, positive: Sequence[str]) -> None:
    """Raise `ValueError` for a value that is no choice, and for `positive` ones below 1. None is
    valid.
    """
    for each in fields(config):
        value, choices = getattr(config, each.name), each.metadata.get("choices")
        flag = f"--{each.name.replace('_', '-')}"
        if value is not None and each.name in positive and value < 1:
            raise ValueError(f"{flag} must be at least 1, got {value}")
        if value is not None and choices and value not in choices:
            raise ValueError(f"{flag} must be one of {', '.join(choices)}, got {value}")


def check_seconds(flag: str, seconds: float, least: int) -> None:
    """Raise `ValueError` if the seconds of a flag are fewer than `least`, or not finite."""
    if not least <= seconds < math.inf:
        unit = "second" if least == 1 else "seconds"
        raise ValueError(f"{flag} must be at least {least} {unit} and finite, got {seconds}")


def check_threads(asked: int | None) -> None:
    """Raise `ValueError` for more threads than libgomp can start, because it ends the process
    without a message.
    """
    if asked is not None and asked > MOST_THREADS:
        raise ValueError(f"--num-threads must be at most {MOST_THREADS}, got {asked}")


def check_context_length(asked: int | None, longest: int) -> None:
    """Raise `ValueError` if the model does not have this context. None means the model's own."""
    if asked is not None and asked > longest:
        raise ValueError(f"--context-length {asked} is more than the model's {longest}")
