"""Calls as JSON objects between two marks in a text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .events import Arguments, CallBegins, Event, Text, held_back
from .tool_calls import Tool

_LONGEST_HEAD = 4096
"""Characters of a call in which its name must have come."""


class MarkedJsonParser:
    """Reads `OPENING {"name": NAME, "ARGUMENTS": {...}} CLOSING`."""

    def __init__(
        self, opening: str, closing: str, names: Collection[str], arguments: str = "arguments"
    ) -> None:
        self._opening, self._closing = opening, closing
        self._names, self._key = names, arguments
        self._head = re.compile(
            r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"' + arguments + r'"\s*:\s*(?=\{)'
        )
        self._text = ""
        self._value: _JsonValue | None = None
        self._in_call = self._behind_arguments = self._has_called = False
        self._blank = ""
        """Before the opening mark: of the text, if this is no call."""

    def push(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        rest, self._text = self._text, ""
        if self._value is not None or self._behind_arguments or not rest:
            return []
        if not self._in_call:
            return [] if self._has_called and rest.isspace() else [Text(rest)]
        return self._whole(rest) or [Text(self._blank + self._opening + rest)]

    def _advance(self, events: list[Event]) -> bool:
        """One step; False where more text must come."""
        if not self._text:
            return False
        if self._value is not None:
            events += self._arguments(self._value)
            return True
        if self._behind_arguments:
            return self._skip_to_closing()
        if self._in_call:
            return self._call(events)
        place = self._text.find(self._opening)
        # White space before a call belongs to neither.
        certain = place if place >= 0 else len(self._text) - held_back(self._text, self._opening)
        said = self._text[:certain].rstrip() if place >= 0 else self._text[:certain]
        if said:
            events.append(Text(said))
        if place < 0:
            self._text = self._text[certain:]
            return False
        self._blank = self._text[len(said) : place]
        self._text, self._in_call = self._text[place + len(self._opening) :], True
        return True

    def _call(self, events: list[Event]) -> bool:
        found = self._head.match(self._text)
        if found is not None and (name := _read(found[1])) in self._names:
            events.append(CallBegins(str(name)))
            self._has_called = True
            self._text, self._value = self._text[found.end() :], _JsonValue()
            return True
        place = self._text.find(self._closing)
        if place < 0 and len(self._text) < _LONGEST_HEAD:
            return False
        self._in_call = False
        if place < 0:
            events.append(Text(self._blank + self._opening))
            return True
        body = self._text[:place]
        self._text = self._text[place + len(self._closing) :]
        none = self._blank + self._opening + body + self._closing
        events += self._whole(body) or [Text(none)]
        return True

    def _whole(self, body: str) -> list[Event]:
        """A call whose members stand in another order; none where it is no call."""
        call = _read(body)
        if not isinstance(call, dict) or call.get("name") not in self._names:
            return []
        arguments = call.get(self._key, {})
        if isinstance(arguments, str):
            arguments = _read(arguments)
        if not isinstance(arguments, dict):
            return []
        self._has_called = True
        text = json.dumps(arguments, ensure_ascii=False)
        return [CallBegins(call["name"]), Arguments(text)]

    def _arguments(self, value: _JsonValue) -> list[Event]:
        end = value.end(self._text)
        piece = self._text if end is None else self._text[:end]
        self._text = self._text[len(piece) :]
        if end is not None:
            self._value, self._behind_arguments = None, True
        return [Arguments(piece)]

    def _skip_to_closing(self) -> bool:
        place = self._text.find(self._closing)
        if place < 0:
            return False
        self._text = self._text[place + len(self._closing) :]
        self._in_call = self._behind_arguments = False
        return True


class _JsonValue:
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


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def marked_json_grammar(
    opening: str,
    closing: str,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    content: Mapping[str, Any] | None = None,
    arguments: str = "arguments",
) -> str:
    """Lark of texts that `MarkedJsonParser` reads; the rest as `ToolCallFormat.grammar`."""
    names = [f"tool_{number}" for number in range(len(tools))]
    rules = [
        f"{rule}: {json.dumps(_before(tool, arguments))} "
        f"%json {json.dumps({'type': 'object', **tool.parameters})}"
        for rule, tool in zip(names, tools, strict=True)
    ]
    body = f"({' | '.join(names)}) {json.dumps('}' + closing)}"
    if required or content is not None:
        more = f"({json.dumps(chr(10))} call)*" if parallel else ""
        start = [
            f"start: call {more}" + " | content" * (not required),
            f"call: {json.dumps(opening)} {body}",
        ]
        if not required:
            start.append(f"content: %json {json.dumps(dict(content or {}))}")
    else:
        mark = opening.rstrip("\n")
        start = [
            # Behind a call that must be the only one no text may begin another.
            "start: call* text" if parallel else "start: call | text",
            f"call: mark {json.dumps(opening[len(mark) :])} {body}",
            f"mark[lazy]: TEXT {json.dumps(mark)}",
            "text: TEXT",
            r"TEXT: /(.|\n)*/",
        ]
    return "\n".join(["%llguidance {}", *start, *rules])


def _before(tool: Tool, arguments: str) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "{arguments}": '
