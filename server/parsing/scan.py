"""Base of parsers that read a text in pieces.

A parser is a generator. It reads the text in order and yields when it needs more text.

    class Shouts(ScanParser):
        def read(self) -> Steps[None]:
            while (found := (yield from self.say_until("<shout>"))) is not None:
                ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import regex

from .events import Arguments, CallBegins, Event, Text, held_back
from .tool_calls import Tool

T = TypeVar("T")
# Maximum size of a piece in characters. Taking characters from a text copies the rest.
_PIECE = 4096
Steps = Generator[None, None, T]  # Yields when more text, or the end of the text, is needed.


class ScanParser(ABC):
    """A `Parser`.

    Attributes:
        text: The text that was not read yet.
        is_whole: Whether the text is complete.
        is_cut: Whether the text ends at its maximum length, perhaps within a mark.
    """

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.tools = {tool.name: tool for tool in tools}
        self.text, self.is_whole, self.is_cut = "", False, False
        self._has_broken_off = False
        self.has_called = False
        self._events: list[Event] = []
        self._steps = self.read()

    @property
    def one_of_the_names(self) -> str:
        """A pattern of the tools' names, in a group `name`."""
        return "(?P<name>" + "|".join(map(regex.escape, self.tools)) + ")"

    @abstractmethod
    def read(self) -> Steps[None]:
        """Read the whole text."""
        ...

    def push(self, text: str) -> list[Event]:
        events: list[Event] = []
        for begin in range(0, len(text), _PIECE):
            self.text += text[begin : begin + _PIECE]
            events += self._advance()
        return events

    def finish(self, *, is_cut: bool = False) -> list[Event]:
        self.is_whole, self.is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    # Output.

    def tell(self, event: Event) -> None:
        if isinstance(event, CallBegins):
            self.has_called = True
        elif not event.text:
            return
        self._events.append(event)

    def call(self, name: str, arguments: str) -> None:
        """Emit a complete call."""
        self.tell(CallBegins(name))
        self.tell(Arguments(arguments))

    # Input.

    def take(self, size: int) -> str:
        """Remove and return the next characters, which must exist."""
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def match(self, pattern: regex.Pattern[str]) -> Steps[regex.Match[str] | None]:
        """Take a match at the beginning of the text. Return None if there is none, and take
        nothing.

        The pattern must be bounded, because it is tried again with each piece.
        """
        while True:
            found = pattern.match(self.text, partial=not self.is_whole)
            if found is None or not found.partial:
                if found is None and self.is_cut and pattern.match(self.text, partial=True):
                    self.break_off()
                self.take(found.end() if found is not None else 0)
                return found
            yield

    def break_off(self) -> None:
        """Drop the rest, because the text was cut within a call."""
        self.text, self._has_broken_off = "", True

    def close(self, pattern: regex.Pattern[str]) -> Steps[None]:
        """Take the end of a call, or at the end of the text its beginning."""
        while True:
            found = pattern.match(self.text, partial=True)
            if found is None or not found.partial or self.is_whole:
                self.take(found.end() if found is not None else 0)
                return
            yield

    def say_until(self, *marks: str) -> Steps[tuple[str, str] | None]:
        """Emit text up to the first of some marks.

        Return the white space before the mark, which is taken, and the mark, which is not. Return
        None if the text has ended.
        """
        while True:
            found = [(place, mark) for mark in marks if (place := self.text.find(mark)) >= 0]
            if found:
                place, mark = min(found)
                before = self.take(place)
                said = before.rstrip()
                self.tell(Text(said))
                return before[len(said) :], mark
            held = max(held_back(self.text, mark) for mark in marks)
            if self.is_whole:
                if self.is_cut and self.text[len(self.text) - held :].strip():
                    self.text = self.text[: len(self.text) - held]
                self._say_end()
                return None
            self.tell(Text(self.take(len(self.text) - held)))
            yield

    def read_calls(
        self, mark: str, calls: Callable[[], Steps[bool]], bare: str = ""
    ) -> Steps[None]:
        """Read the whole text, with calls after each `mark`, or at its beginning if `mark` is "".

        `calls` reads calls and returns whether there are any. A mark without calls is text. Calls
        may also begin with `bare`, which `calls` reads itself.
        """
        if not mark:
            yield from calls()
            yield from self.say_rest()
            return
        marks = [each for each in (mark, bare) if each]
        while (found := (yield from self.say_until(*marks))) is not None:
            blank, begins = found
            if begins == mark:
                self.take(len(mark))
            if not (yield from calls()) and not self._has_broken_off:
                self.tell(Text(blank + begins))
                self.take(0 if begins == mark else len(begins))

    def wait_for(self, mark: str, most: int) -> Steps[str | None]:
        """Take a text and the mark after it, and return the text. The end of the text counts as a
        mark.

        Return None, and take nothing, if no mark follows within `most` characters.
        """
        while (place := self.text.find(mark)) < 0 and not self.is_whole:
            if len(self.text) > most:
                return None
            yield
        taken = self.take(place if place >= 0 else len(self.text))
        self.take(len(mark) if place >= 0 else 0)
        return taken

    def say_rest(self) -> Steps[None]:
        """Emit all remaining text."""
        while not self.is_whole:
            said = self.text.rstrip() if self.has_called else self.text
            self.tell(Text(self.take(len(said))))
            yield
        self._say_end()

    def _say_end(self) -> None:
        """Emit the rest. White space at the end of a text with calls is dropped."""
        self.tell(Text(self.text.rstrip() if self.has_called else self.text))
        self.text = ""

    def arguments_of(self, name: str) -> Steps[None]:
        """Emit a call whose arguments follow as a JSON object."""
        self.tell(CallBegins(name))
        yield from self.json_object()

    def json_object(self) -> Steps[None]:
        """Emit a JSON object as arguments while it arrives."""
        value = JsonValue()
        while True:
            end = value.end(self.text)
            self.tell(Arguments(self.take(len(self.text) if end is None else end)))
            if end is not None or self.is_whole:
                return
            yield


class JsonValue:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int | None:
        """Return the end of the object in this piece, or None."""
        for place, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None
