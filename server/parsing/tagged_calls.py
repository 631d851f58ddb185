"""Formats in which each argument of a call is bare text in its own tag."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import regex

from .calls_grammar import Section, bounded_text, filled, literal, written_call
from .events import Arguments, CallBegins, Parser, as_json, as_text
from .scan import JsonValue, ScanParser, Steps
from .tagged_values import TagsEnd, read_tags
from .tool_calls import Call, CallRules, InTemplate, Tool
from .typed_values import Parameters, kind_of, kinds_of, read_value, written_value

_ANY_KEY = r"/[a-zA-Z_][a-zA-Z0-9_]{0,31}/"
_KEY = r"[^<>\"\x00-\x1f\x7f]{1,256}?"
# Names of arguments that the grammar writes and the parser reads.
_NAME = regex.compile(rf"(?!\s){_KEY}(?<!\s)")


@dataclass(frozen=True)
class TaggedFormat(InTemplate):
    """A `ToolCallFormat`.

    Calls are written as `before`, arguments and `after` within `section`. An argument is `opening`,
    the value and `closing`. NAME is the tool's name, KEY the argument's name, NUMBER the number of
    the call, TYPE the word in `types` for the value's type. The patterns for reading are bounded
    regular expressions.

    Attributes:
        head: Matches before the arguments of a call, after `section.mark`.
        key: Matches before a value.
        value_end: The text that ends a value. It may contain KEY, like `closing`.
        follows: Matches between a call and the next head.
        end: Matches after the last call.
        in_lines: Whether a line end at each end of a value is not part of it.
        types: Words for types of JSON. If given, `key` has a group `type`, and a value with the
            word of "string" is a string, whatever the schema says.
        quotes: Two texts that may stand around a string.
        bare: The beginning of `head`, for models that leave out the section's mark.
        tags: The beginning of all tags, if the members of objects and the items of lists may have
            tags.
    """

    name: str
    section: Section
    before: str
    opening: str
    closing: str
    after: str
    head: str
    key: str
    value_end: str
    follows: str
    end: str
    found_by: Callable[[str], bool]
    marks: tuple[str, ...]
    aliases: tuple[str, ...] = ()
    in_lines: bool = False
    types: Mapping[str, str] = field(default_factory=dict)
    quotes: tuple[str, str] | None = None
    bare: str = ""
    tags: str = ""

    def matches(self, template: str) -> bool:
        return self.found_by(template)

    def parser(self, tools: Sequence[Tool]) -> Parser:
        return _TaggedParser(self, tools)

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        calls, lines = [], [r"TEXTS: /(.|\n)*/"]
        for number, tool in enumerate(tools):
            parameters, parts = Parameters(tool), []
            for index, (key, schema, is_required) in enumerate(parameters.arguments()):
                parameters.check_name(key, _NAME, self.marks)
                rule = f"argument_{number}_{index}"
                parts.append(rule if is_required else f"{rule}?")
                # The format of this argument has its name in the closing tag.
                closing, end = (text.replace("KEY", key) for text in (self.closing, self.value_end))
                named = replace(self, closing=closing, value_end=end)
                lines += named._argument(rule, literal(key, {}), schema, parameters, rules)
            # The rule would allow the same name twice, unless the grammar knows the name.
            if parameters.is_open and not parts and "KEY" not in self.closing:
                rule = f"argument_{number}"
                parts.append(f"({rule})*")
                lines += self._argument(rule, _ANY_KEY, {}, parameters, rules)
            before = filled(self.before, {"NAME": literal(tool.name, {})}, rules.special)
            calls.append(f"{before} {' '.join(parts)} {literal(self.after, rules.special)}")
        return self.section.grammar(calls, lines, rules)

    def _argument(
        self, rule: str, key: str, schema: object, parameters: Parameters, rules: CallRules
    ) -> list[str]:
        """Return the rules of one argument and its closing tag. `key` is its name in Lark."""
        value = written_value(schema, parameters)
        lines: list[str] = []
        ways = []
        closing = self.closing
        if value.text is not None:
            text, lines = bounded_text(rule, value.text, self.value_end, closing, rules.special)
            ways.append(f"{self._opened(key, {'string'}, rules)} {text}")
        if value.json is not None:
            kinds = kinds_of(schema, parameters.root) - {"string"}
            opening = self._opened(key, kinds, rules)
            ending = literal(closing, rules.special)
            ways.append(f"{opening} %json {json.dumps(value.json)} {ending}")
        return [f"{rule}: {' | '.join(ways)}", *lines]

    def _opened(self, key: str, kinds: Iterable[str], rules: CallRules) -> str:
        """Return the text before a value of one of these types, in Lark."""
        types = sorted({literal(self.types[kind], {}) for kind in kinds if kind in self.types})
        words = {"KEY": key, "TYPE": f"({' | '.join(types)})"}
        return filled(self.opening, words, rules.special)

    def written(self, calls: Sequence[Call]) -> str:
        return self.section.written(
            [written_call(call, self.before, self._arguments, self.after) for call in calls]
        )

    def _arguments(self, arguments: Mapping[str, Any]) -> str:
        text = ""
        for key, value in arguments.items():
            kind = self.types.get(kind_of(value), "")
            opening = self.opening.replace("KEY", key).replace("TYPE", kind)
            text += opening + as_text(value) + self.closing.replace("KEY", key)
        return text


class _TaggedParser(ScanParser):
    def __init__(self, form: TaggedFormat, tools: Sequence[Tool]) -> None:
        super().__init__(tools)
        self._form = form
        head = form.head.replace("NAME", self.one_of_the_names)
        self._head, self._next = regex.compile(head), regex.compile(form.follows + head)
        self._key = regex.compile(form.key.replace("KEY", rf"(?P<key>{_KEY})"))
        self._end = regex.compile(form.end)

    def read(self) -> Steps[None]:
        yield from self.read_calls(self._form.section.mark, self._calls, self._form.bare)

    def _calls(self) -> Steps[bool]:
        found = yield from self.match(self._head)
        if found is None:
            return False
        while found is not None:
            yield from self._call(self.tools[found["name"]])
            found = yield from self.match(self._next)
        yield from self.close(self._end)
        return True

    def _call(self, tool: Tool) -> Steps[None]:
        self.tell(CallBegins(tool.name))
        parameters = Parameters(tool)
        before = "{"
        while (found := (yield from self.match(self._key))) is not None:
            key = found["key"].strip()
            self.tell(Arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: "))
            before = ", "
            kinds = kinds_of(parameters.schema_of(key), parameters.root)
            if self._form.types and found["type"] == self._form.types["string"]:
                kinds = frozenset(("string",))
            streams = kinds == {"string"} and self._form.quotes is None
            end = self._form.value_end.replace("KEY", key)
            value = self._string(end) if streams else self._value(end, kinds, key, parameters)
            if not (yield from value):
                return
        # If the call is cut off, more arguments may have followed. Then the object stays open.
        while not self.text.strip() and not self.is_whole:
            yield
        if self.text.strip():
            self.tell(Arguments("{}" if before == "{" else "}"))

    def _value(
        self, closing: str, kinds: frozenset[str], key: str, parameters: Parameters
    ) -> Steps[bool]:
        """Emit a value as JSON when it is complete. Return False if the text ends earlier."""
        quotes = self._form.quotes
        value, tags = _ValueEnd(closing), self._form.tags
        nested = TagsEnd(f"{tags}<{key}>", closing)
        while True:
            if tags and self.text.lstrip().startswith(tags):
                size = nested.find(self.text)
            else:
                size = value.find(self.text, self.is_whole)
            if size is not None:
                break
            if self.is_whole:
                self.take(len(self.text))
                return False
            yield
        text = self.take(size)
        self.take(len(closing))
        if tags and text.lstrip().startswith(tags):
            schema = parameters.schema_of(key)
            self.tell(Arguments(read_tags(text, tags, schema, parameters.root)))
            return True
        if self._form.in_lines:
            text = text.removeprefix("\n").removesuffix("\n")
        if quotes is not None and text.startswith(quotes[0]):
            text = text.removeprefix(quotes[0]).removesuffix(quotes[1])
            kinds &= {"string"}
        self.tell(Arguments(read_value(text, kinds or frozenset(("string",)))))
        return True

    def _string(self, end: str) -> Steps[bool]:
        """Emit a string while it arrives. Return False if the text ends earlier."""
        in_lines = self._form.in_lines
        while in_lines and not self.text and not self.is_whole:
            yield
        if in_lines and self.text.startswith("\n"):
            self.take(1)
        self.tell(Arguments('"'))
        while (place := self.text.find(end)) < 0:
            if self.is_whole:
                self._emit_string(self.take(len(self.text)))
                return False
            self._emit_string(self.take(len(self.text) - _kept(self.text, end, in_lines)))
            yield
        text = self.take(place)
        self.take(len(end))
        self._emit_string(text.removesuffix("\n") if in_lines else text)
        self.tell(Arguments('"'))
        return True

    def _emit_string(self, text: str) -> None:
        self.tell(Arguments(as_json(text)[1:-1]))


class _ValueEnd:
    """Finds the end of a value in a growing text. Ignores the closing tag within a string of
    JSON.
    """

    def __init__(self, closing: str) -> None:
        self._closing = closing
        self._json = JsonValue()
        self._place = 0
        self._size: int | None = None

    def find(self, text: str, is_whole: bool) -> int | None:
        """Return the size of the value, or None if more text is needed."""
        first = text.find(self._closing)
        begins = text.lstrip()[:1]
        if self._size is None and begins and begins in '[{"':
            if not self._place:
                self._place = len(text) - len(text.lstrip())
            end = self._json.end(text[self._place :])
            self._size = None if end is None else self._place + end
            self._place = len(text)
        if self._size is not None:
            rest = text[self._size :].lstrip()
            if rest.startswith(self._closing):
                return len(text) - len(rest)
            if self._closing.startswith(rest) and not is_whole:
                return None
        elif begins and begins in '[{"' and not is_whole:
            return None
        return first if first >= 0 else None


def _kept(text: str, end: str, in_lines: bool) -> int:
    """Return the length of the end of a text that may belong to the closing tag or the line end
    before it.
    """
    most = min(len(end) - 1, len(text))
    kept = next((size for size in range(most, 0, -1) if end.startswith(text[-size:])), 0)
    return kept + (in_lines and text[: len(text) - kept].endswith("\n"))
