"""Formats whose arguments are names and literals of a language that is not JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from ...runtime.sampling.json_schema import with_definitions
from .calls_grammar import Section, bounded_text, literal, written_call
from .events import Arguments, CallBegins, Parser, as_json, read_json
from .scan import ScanParser, Steps
from .tool_calls import Call, CallRules, InTemplate, Tool
from .typed_values import Parameters, kinds_of, resolved, written_value

# Names of arguments that can be written.
_NAME = regex.compile(r"(?![\s,)\]}])[^\"'\\\x00-\x1f\x7f]{1,256}(?<!\s)")
_ANY_KEY = r"/[a-zA-Z_][a-zA-Z0-9_]{0,31}/"


@dataclass(frozen=True)
class LiteralFormat(InTemplate):
    """A `ToolCallFormat`.

    Calls are written as `before`, arguments and `after` within `section`. The patterns for reading
    are bounded regular expressions.

    Attributes:
        equals: Text between an argument's name and its value, which is JSON.
        comma: Text between arguments.
        delimiter: Text around strings, or "" if strings are JSON.
        words: By type of JSON: Lark of its values, if the language writes them differently.
        head: Matches before the first `call`: after `section.mark`, or at the beginning of the
            text.
        call: Matches a call up to its arguments.
        follows: Matches between a call's arguments and the next `call`.
        end, tail: Match after the last call's arguments.
        quotes: Characters around strings.
        read: Returns the value of a literal. Raises `ValueError`.
    """

    name: str
    section: Section
    before: str
    equals: str
    comma: str
    after: str
    head: str
    call: str
    follows: str
    end: str
    tail: str
    delimiter: str
    quotes: str
    words: dict[str, str]
    read: Callable[[str], Any]
    found_by: Callable[[str], bool]
    marks: tuple[str, ...]
    aliases: tuple[str, ...] = ()

    def matches(self, template: str) -> bool:
        return self.found_by(template)

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _LiteralParser(self, tools)

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        calls, firsts, lines = [], [], []
        comma = literal(self.comma, rules.special)
        for number, tool in enumerate(tools):
            parameters = Parameters(tool)
            required: list[str] = []
            optional: list[str] = []
            for index, (key, schema, is_required) in enumerate(parameters.arguments()):
                parameters.check_name(key, _NAME, self.marks)
                rule = f"argument_{number}_{index}"
                (required if is_required else optional).append(rule)
                lines += self._argument(rule, literal(key, {}), schema, parameters, rules)
            if parameters.is_open and not required:
                rule = f"argument_{number}"
                optional.append(f"{rule} ({comma} {rule})*")
                lines += self._argument(rule, _ANY_KEY, {}, parameters, rules)
            body = f" {comma} ".join(required)
            if required:
                body += "".join(f" ({comma} {rule})?" for rule in optional)
            elif optional:
                # Any of the optional arguments may be the first.
                ways = [
                    " ".join([rule, *(f"({comma} {other})?" for other in optional[place + 1 :])])
                    for place, rule in enumerate(optional)
                ]
                body = f"({' | '.join(ways)})?"
            before = self.before.replace("NAME", tool.name)
            call = f"{body} {literal(self.after, rules.special)}"
            calls.append(f"{literal(before, rules.special)} {call}")
            if not self.section.mark:
                # One terminal holds opening and head. Otherwise the opening alone could begin free
                # text.
                firsts.append(f"{literal(self.section.opening + before, rules.special)} {call}")
        return self.section_of(tools).grammar(calls, lines, rules, firsts)

    def written(self, calls: Sequence[Call]) -> str:
        return self.section.written(
            [written_call(call, self.before, self._arguments, self.after) for call in calls]
        )

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        members = [f"{key}{self.equals}{self._literal(value)}" for key, value in arguments.items()]
        return self.comma.join(members)

    def _literal(self, value: Any) -> str:
        """Return a value as a literal."""
        match value:
            case str():
                return f"{self.delimiter}{value}{self.delimiter}" if self.delimiter else repr(value)
            case list():
                return f"[{self.comma.join(map(self._literal, value))}]"
            case dict():
                members = [
                    f"{key if self.delimiter else repr(key)}: {self._literal(member)}"
                    for key, member in value.items()
                ]
                return f"{{{self.comma.join(members)}}}"
        return as_json(value) if self.delimiter else repr(value)

    def section_of(self, tools: Sequence[Tool]) -> Section:
        """Return the section for calls of these tools."""
        return self.section

    def _argument(
        self, rule: str, key: str, schema: Any, parameters: Parameters, rules: CallRules
    ) -> list[str]:
        """Return the rules of one argument. `key` is its name in Lark."""
        opening = f"{key} {literal(self.equals, rules.special)}"
        found = resolved(schema, parameters.root)
        kinds = kinds_of(schema, parameters.root)
        for kind, words in self.words.items():
            if kinds == {kind} and not {"enum", "const"}.intersection(found):
                return [f"{rule}: {opening} {words}"]
        if not self.delimiter:
            own = json.dumps(with_definitions(schema, parameters.root))
            return [f"{rule}: {opening} %json {own}"]
        value = written_value(schema, parameters)
        lines: list[str] = []
        ways = []
        if value.text is not None:
            end = self.delimiter
            text, lines = bounded_text(rule, value.text, end, end, rules.special)
            ways.append(f"{literal(end, rules.special)} {text}")
        if value.json is not None:
            ways.append(f"%json {json.dumps(value.json)}")
        return [f"{rule}: {opening} ({' | '.join(ways)})", *lines]


class _LiteralParser(ScanParser):
    def __init__(self, form: LiteralFormat, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._form = form
        call = form.call.replace("NAME", self.one_of_the_names)
        self._head = regex.compile(form.head + call)
        self._next = regex.compile(form.follows + call)
        self._end, self._tail = regex.compile(form.end), regex.compile(form.tail)
        self._closing = form.after[:1]

    def read(self) -> Steps[None]:
        yield from self.read_calls(self._form.section.mark, self._calls)

    def _calls(self) -> Steps[bool]:
        found = yield from self.match(self._head)
        if found is None:
            return False
        while found is not None:
            yield from self._call(self.tools[found["name"]])
            found = yield from self.match(self._next)
        yield from self.close(self._end)
        yield from self.match(self._tail)
        return True

    def _key_of(self, tool: Tool) -> regex.Pattern[str]:
        """Return a pattern of the text before a value: a name of the tool, or any identifier."""
        known = sorted(Parameters(tool).properties, key=len, reverse=True)
        names = "|".join([*map(str, map(regex.escape, known)), r"[\w.$\[\]-]{1,128}"])
        equals = regex.escape(self._form.equals.strip())
        return regex.compile(
            rf"\s{{0,20}},?\s{{0,20}}[\"']?(?P<key>{names})[\"']?\s{{0,8}}{equals}\s{{0,8}}(?=\S)"
        )

    def _call(self, tool: Tool) -> Steps[None]:
        self.tell(CallBegins(tool.name))
        key, before = self._key_of(tool), "{"
        while (found := (yield from self.match(key))) is not None:
            self.tell(Arguments(f"{before}{as_json(found['key'])}: "))
            before = ", "
            if not (yield from self._value()):
                return
        # If the call is cut off, more arguments may have followed. Then the object stays open.
        while not (rest := self.text.lstrip(" \r\n,")) and not self.is_whole:
            yield
        if rest.startswith(self._closing):
            self.tell(Arguments("{}" if before == "{" else "}"))

    def _value(self) -> Steps[bool]:
        """Emit a value as JSON when it is complete. Return False if the text ends earlier."""
        end = _LiteralEnd(self._form.quotes, self._form.delimiter)
        while (size := end.find(self.text)) is None:
            if self.is_whole:
                self.take(len(self.text))
                return False
            yield
        source = self.take(size).strip()
        try:
            read_json(source)
            value = source
        except ValueError:
            try:
                value = as_json(self._form.read(source))
            except (ValueError, TypeError, RecursionError):
                value = as_json(source)
        self.tell(Arguments(value))
        return True


class _LiteralEnd:
    """Finds the end of a growing literal: a comma or closing bracket outside of it."""

    def __init__(self, quotes: str, delimiter: str) -> None:
        self._quotes, self._delimiter = quotes, delimiter
        self._place = self._depth = 0
        self._quote = ""

    def find(self, text: str) -> int | None:
        """Return the size of the literal, or None if more text is needed."""
        while self._place < len(text):
            rest = text[self._place : self._place + max(1, len(self._delimiter))]
            is_in_other = self._quote not in ("", self._delimiter)
            if self._delimiter and not is_in_other and self._delimiter.startswith(rest):
                if rest != self._delimiter:
                    return None
                self._quote = "" if self._quote else self._delimiter
                self._place += len(rest)
                continue
            char = rest[0]
            if self._quote:
                if char == "\\" and self._quote != self._delimiter:
                    if self._place + 1 == len(text):
                        return None
                    self._place += 1
                elif char == self._quote:
                    self._quote = ""
            elif char in self._quotes:
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}" or (char == "," and not self._depth):
                if not self._depth:
                    return self._place
                self._depth -= 1
            self._place += 1
        return None
