"""The events of a model's text, and the parsers that produce them from a stream."""

from __future__ import annotations

import json
from typing import Any, NamedTuple, Protocol

import pydantic_core


class Text(NamedTuple):
    """Text of the answer."""

    text: str


class Thought(NamedTuple):
    """Text of a thought."""

    text: str


class CallBegins(NamedTuple):
    """The beginning of a call. Its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """The next part of the last call's arguments.

    All parts together are JSON, unless the text ends too early.
    """

    text: str


Event = Text | Thought | CallBegins | Arguments


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of a call. If the call is cut off, return the arguments up to there."""
    try:
        found = pydantic_core.from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class Parser(Protocol):
    """Parses one text. Marks and calls that turn out to be invalid are text."""

    def push(self, text: str) -> list[Event]:
        """Add a piece of text and return the events that are certain. Pieces may be cut
        anywhere.
        """
        ...

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        """End the text and return the remaining events.

        If `is_cut`, the text ends at its maximum length. Then half a mark at its end is dropped.
        """
        ...


class PlainText:
    """A `Parser` of texts without thoughts or calls."""

    def push(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        return []


def as_json(value: Any) -> str:
    """Return JSON that every client reads and that UTF-8 can encode.

    Raise `ValueError` for numbers that JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    is_unicode = not any("\ud800" <= char <= "\udfff" for char in text)
    return text if is_unicode else json.dumps(value)


def as_text(value: Any) -> str:
    """Return a string unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else as_json(value)


def read_json(text: str) -> Any:
    """Return the value of JSON text.

    Raise `ValueError` for invalid JSON, and for NaN and infinities, which Python accepts.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _no_number(text: str) -> float:
    raise ValueError(f"JSON has no {text}")


def held_back(text: str, mark: str) -> int:
    """Return the length of the end of `text` that may belong to a mark: its beginning, and white
    space before it.
    """
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            before = text[: len(text) - size]
            return len(text) - len(before.rstrip())
    return len(text) - len(text.rstrip())
