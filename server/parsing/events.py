"""What a model's text consists of, and how it is read while it comes."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol


class Text(NamedTuple):
    """What the model says."""

    text: str


class Thought(NamedTuple):
    """What it thinks before it says something."""

    text: str


class CallBegins(NamedTuple):
    """A call, whose arguments follow."""

    name: str


class Arguments(NamedTuple):
    """The next piece of the last call's arguments: together they are JSON, unless the text ends
    within.
    """

    text: str


Event = Text | Thought | CallBegins | Arguments


class Parser(Protocol):
    """Reads one text. What looks like something else and is not is text."""

    def push(self, text: str) -> list[Event]:
        """What is certain with this piece, however the text is cut into pieces."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """What the end of the text makes certain. `is_cut`: the text ends because its length was
        used up, so that half a mark at its end is no text.
        """
        ...


class PlainText:
    """A `Parser` of texts that are nothing else."""

    def push(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        return []


def as_json(value: Any) -> str:
    """JSON that any client reads, and any connection takes. Raises `ValueError` for numbers that
    JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    is_unicode = not any("\ud800" <= char <= "\udfff" for char in text)
    return text if is_unicode else json.dumps(value)


def as_text(value: Any) -> str:
    """A string as it is, and JSON of any other value."""
    return value if isinstance(value, str) else as_json(value)


def read_json(text: str) -> Any:
    """What JSON says. Raises `ValueError` for what is none, also for NaN and infinities, which
    Python takes.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(text: str) -> float:
    raise ValueError(f"JSON has no {text}")


def held_back(text: str, mark: str) -> int:
    """How much of the end of a text may be white space before a mark, or the mark's beginning."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            before = text[: len(text) - size]
            return len(text) - len(before.rstrip())
    return len(text) - len(text.rstrip())
