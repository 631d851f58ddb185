"""Fields of configurations that are flags of the command line, too."""

from __future__ import annotations

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
    """A dataclass field that is also a command-line flag of the same name (`max_total_tokens` ->
    `--max-total-tokens`).

    `group`: the heading of `--help` that it stands under. `items`: the value is a text with commas,
    which a command line may give as several words too; a word belongs to it if it matches this.
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


def check_threads(asked: int | None) -> None:
    """Raises `ValueError` for more threads than libgomp can start: it ends the process instead of
    saying so.
    """
    if asked is not None and asked > MOST_THREADS:
        raise ValueError(f"--num-threads must be at most {MOST_THREADS}, got {asked}")


def check_context_length(asked: int | None, longest: int) -> None:
    """Raises `ValueError` for a context that the model does not have; None asks for the model's
    own.
    """
    if asked is not None and asked > longest:
        raise ValueError(f"--context-length {asked} is more than the model's {longest}")
