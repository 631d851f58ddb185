"""Formats whose calls are a name and a JSON object between marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from .calls_grammar import Section, filled, json_of, literal, written_call
from .events import Parser, as_json, as_text, read_json
from .scan import JsonValue, ScanParser, Steps
from .tool_calls import Call, CallRules, InTemplate, Tool

# A call as a JSON object, up to its arguments.
OBJECT_HEAD = (
    r'\s{0,20}\{\s{0,20}(?:"type"\s{0,5}:\s{0,5}"function"\s{0,5},\s{0,20})?'
    r'"name"\s{0,5}:\s{0,5}"NAME"\s{0,5},\s{0,20}"(?:arguments|parameters)"\s{0,5}:\s{0,20}(?=\{)'
)
_MORE_MEMBERS = r'(?:\s{0,20},\s{0,20}"\w{1,20}"\s{0,5}:\s{0,5}"[^"\\]{0,64}")?'
# The rest of the object after the arguments. Models sometimes write too many braces.
OBJECT_END = _MORE_MEMBERS + r"\s{0,20}\}{1,3}"
_LONGEST = 4096  # Maximum length of a call whose arguments stand before its name.


@dataclass(frozen=True)
class JsonFormat(InTemplate):
    """A `ToolCallFormat`.

    Calls are written as `before`, JSON and `after` within `section`. NAME is the tool's name. The
    patterns for reading are bounded regular expressions.

    Attributes:
        head: Matches before a call's JSON: after `section.mark`, or at the beginning of the text.
        follows: Matches between a call's JSON and the next head.
        end: Matches after the last call's JSON.
        in_objects: Whether calls are JSON objects, whose members may have another order.
    """

    name: str
    section: Section
    before: str
    after: str
    head: str
    follows: str
    end: str
    found_by: Callable[[str], bool]
    marks: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    in_objects: bool = True

    def matches(self, template: str) -> bool:
        return self.found_by(template)

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _JsonParser(self, tools)

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        after = literal(self.after, rules.special)
        calls = [f"{self.head_of(tool.name, rules)} {json_of(tool)} {after}" for tool in tools]
        firsts: list[str] = []
        if not self.section.mark and self.section.opening:
            # One terminal holds opening and head. Otherwise the opening alone could begin free
            # text.
            opening = self.section.opening + self.before
            for tool in tools:
                head = filled(opening, {"NAME": literal(tool.name, {})}, rules.special)
                firsts.append(f"{head} {json_of(tool)} {after}")
        return self.section.grammar(calls, [], rules, firsts)

    def head_of(self, name: str, rules: CallRules) -> str:
        """Return the Lark of the text before a call's arguments."""
        return filled(self.before, {"NAME": literal(name, {})}, rules.special)

    def written(self, calls: Sequence[Call]) -> str:
        return self.section.written(
            [written_call(call, self.before, as_text, self.after) for call in calls]
        )


class _JsonParser(ScanParser):
    def __init__(self, form: JsonFormat, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._form = form
        head = form.head.replace("NAME", self.one_of_the_names)
        self._head, self._next = regex.compile(head), regex.compile(form.follows + head)
        self._end = regex.compile(form.end)

    def read(self) -> Steps[None]:
        yield from self.read_calls(self._form.section.mark, self._calls)

    def _calls(self) -> Steps[bool]:
        found = yield from self.match(self._head)
        if found is None:
            return self._form.in_objects and (yield from self._reordered())
        while found is not None:
            yield from self.arguments_of(found["name"])
            found = yield from self.match(self._next)
        yield from self.close(self._end)
        return True

    def _reordered(self) -> Steps[bool]:
        """Read complete calls whose members have another order, or whose arguments are a text."""
        while not self.text.lstrip() and not self.is_whole:
            yield
        if not self.text.lstrip().startswith(("{", "[")):
            return False
        decoder = json.JSONDecoder()
        while True:
            begin = len(self.text) - len(self.text.lstrip())
            try:
                value, end = decoder.raw_decode(self.text[:_LONGEST], begin)
            except (ValueError, RecursionError):
                if self.is_whole or len(self.text) > _LONGEST:
                    if (
                        self.is_cut
                        and len(self.text) <= _LONGEST
                        and JsonValue().end(self.text) is None
                    ):
                        self.break_off()
                    return False
                yield
                continue
            calls = [self._read(each) for each in (value if isinstance(value, list) else [value])]
            valid = [call for call in calls if call is not None]
            if not valid or len(valid) < len(calls):
                return False
            self.take(end)
            for name, arguments in valid:
                self.call(name, arguments)
            closing = regex.escape(self._form.section.closing.strip().removeprefix("]"))
            if closing:
                yield from self.close(regex.compile(r"\s{0,20}" + closing))
            return True

    def _read(self, call: Any) -> tuple[str, str] | None:
        name = call.get("name") if isinstance(call, dict) else None
        if not isinstance(name, str) or name not in self.tools:
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = read_json(arguments)
            except ValueError:
                return None
        if not isinstance(arguments, dict):
            return None
        try:
            return name, as_json(arguments)
        except ValueError:
            return None
