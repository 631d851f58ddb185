"""Reading a text that comes in pieces: a parser is a generator, told in the order of the text, that
waits wherever more must come.

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
_PIECE = 4096
"""Characters that are read at a time: what is taken from a text copies the rest of it."""
Steps = Generator[None, None, T]
"""Yields where more text must come, or its end."""


class ScanParser(ABC):
    """A `Parser`.

    Attributes:
        text: What is not read yet.
        is_whole: Nothing follows the text.
        is_cut: The text ends where its length was used up, perhaps within a mark.
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

    # What is told

    def tell(self, event: Event) -> None:
        if isinstance(event, CallBegins):
            self.has_called = True
        elif not event.text:
            return
        self._events.append(event)

    def call(self, name: str, arguments: str) -> None:
        """A whole call."""
        self.tell(CallBegins(name))
        self.tell(Arguments(arguments))

    # What is read

    def take(self, size: int) -> str:
        """The next characters, which are there."""
        taken, self.text = self.text[:size], self.text[size:]
        return taken

    def match(self, pattern: regex.Pattern[str]) -> Steps[regex.Match[str] | None]:
        """Take what matches at the beginning; None, and nothing taken, where nothing does. A
        pattern is bounded, for it is tried again with each piece.
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
        """Leave the rest out: the text was cut where more of a call would have come."""
        self.text, self._has_broken_off = "", True

    def close(self, pattern: regex.Pattern[str]) -> Steps[None]:
        """Take what ends a call; at the end of the text as much of it as is there."""
        while True:
            found = pattern.match(self.text, partial=True)
            if found is None or not found.partial or self.is_whole:
                self.take(found.end() if found is not None else 0)
                return
            yield

    def say_until(self, *marks: str) -> Steps[tuple[str, str] | None]:
        """Tell text up to the first of some marks. Return the white space before the mark, which is
        taken, and the mark, which is not. None: the text has ended.
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
        """Read the whole text: `calls` stand behind each mark, or, where that is empty, at the
        beginning, and say whether they are any; a mark without them is text. Calls may also begin
        with `bare`, which they read themselves.
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
        """Take a text and the mark behind it, which is left out; at the end of the text what there
        is. None, and nothing taken, where no mark comes within `most` characters.
        """
        while (place := self.text.find(mark)) < 0 and not self.is_whole:
            if len(self.text) > most:
                return None
            yield
        taken = self.take(place if place >= 0 else len(self.text))
        self.take(len(mark) if place >= 0 else 0)
        return taken

    def say_rest(self) -> Steps[None]:
        """Tell all that comes as text."""
        while not self.is_whole:
            said = self.text.rstrip() if self.has_called else self.text
            self.tell(Text(self.take(len(said))))
            yield
        self._say_end()

    def _say_end(self) -> None:
        """White space at the end of a text with calls belongs to nothing."""
        self.tell(Text(self.text.rstrip() if self.has_called else self.text))
        self.text = ""

    def arguments_of(self, name: str) -> Steps[None]:
        """Tell a call whose arguments come now, as a JSON object."""
        self.tell(CallBegins(name))
        yield from self.json_object()

    def json_object(self) -> Steps[None]:
        """Tell a JSON object as arguments, while it comes."""
        value = JsonValue()
        while True:
            end = value.end(self.text)
            self.tell(Arguments(self.take(len(self.text) if end is None else end)))
            if end is not None or self.is_whole:
                return
            yield


class JsonValue:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int | None:
        """Where the object ends in this piece, if it does."""
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
