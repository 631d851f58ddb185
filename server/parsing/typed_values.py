"""Arguments that a format writes as bare text. The schema says what the text means.

If the schema allows only strings, the text is the string. If it allows no strings, the text is
JSON. If it allows both, text that is JSON of an allowed type is that value, and other text is a
string.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...runtime.sampling.json_schema import KINDS, OPTIONS, find, ignore, with_definitions
from .events import as_json, read_json

if TYPE_CHECKING:
    import regex

    from .tool_calls import Tool

_OBJECT_MEMBERS = ("type", "properties", "required", "additionalProperties", "$defs", OPTIONS)
_MOST_WAYS = 64  # Maximum number of alternatives of one argument.
_DEEPEST = 64  # Maximum depth of brackets in a Python literal.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
# The beginning of texts that may be values other than strings.
_JSON_LIKE = r"\s*([-0-9\[{\"]|true|false|null|True|False|None)"
_DATE = r"[12][0-9]{3}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,30}[a-zA-Z0-9])?"
_WORD = "[0-9a-fA-F]{1,4}"
_IN_URI = r"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
# Patterns for `json_schema.FORMATS`. A pattern may match only a part of the format's values.
_PATTERNS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P([0-9]{1,9}W|[0-9]{1,9}D(T[0-9]{1,9}H)?|T([0-9]{1,9}H)?[0-9]{1,9}[MS])",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[a-zA-Z0-9_]{1,32}([.+-][a-zA-Z0-9_]{1,32}){0,4}@"
    r"[a-z0-9]{1,32}([.-][a-z0-9]{1,32}){0,4}\.[a-z]{2,12}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,6}}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "ipv6": rf"({_WORD}:){{7}}{_WORD}|({_WORD}:){{1,3}}(:{_WORD}){{1,3}}|::({_WORD})?",
    "uri": rf"[a-zA-Z][a-zA-Z0-9+.-]{{0,15}}:(//)?{_IN_URI}({_IN_URI}|/)*"
    rf"(\?({_IN_URI}|[/?])*)?(#({_IN_URI}|[/?])*)?",
}


class Parameters:
    """The arguments of one tool, by the schema that the grammar follows."""

    def __init__(self, tool: Tool) -> None:
        self.root = tool.held()
        self._tool = tool
        self.object = resolved(self.root, self.root)
        properties = self.object.get("properties")
        self.properties: dict[str, Any] = properties if isinstance(properties, dict) else {}

    def schema_of(self, key: str) -> Any:
        """Return the schema of one argument. It is empty if any value is allowed."""
        if key in self.properties:
            return self.properties[key]
        others = self.object.get("additionalProperties", True)
        return others if isinstance(others, dict) else {}

    def arguments(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield (name, schema, whether it is required) of each argument.

        Raise `ValueError` if the function is strict and the schema has more keywords.
        """
        for keyword in sorted(set(self.object) - set(_OBJECT_MEMBERS)):
            self.refuse(keyword, "beside the properties of a function")
        required = self.object.get("required", ())
        for key, schema in self.properties.items():
            if schema is not False or key in required:
                yield key, schema, key in required
        for key in required:
            if key not in self.properties:
                yield key, self.schema_of(key), True

    @property
    def is_open(self) -> bool:
        """Whether the schema names no argument and allows any."""
        return not self.properties and self.object.get("additionalProperties", True) is not False

    def refuse(self, keyword: str, reason: str) -> None:
        """Raise `ValueError` if the function is strict. Otherwise log that a keyword is ignored."""
        message = (
            f"calls in this model's format cannot follow the keyword {json.dumps(keyword)} {reason}"
        )
        if self._tool.strict:
            raise ValueError(f"{self._tool.whose}: {message}")
        ignore(self._tool.whose, f"{keyword} in bare text", message)

    def check_name(self, key: str, pattern: regex.Pattern[str], marks: Iterable[str]) -> None:
        """Raise `ValueError` for an argument with a name that the format cannot write."""
        if pattern.fullmatch(key) is None or any(mark in key for mark in marks):
            raise ValueError(
                f"{self._tool.whose}: calls in this model's format cannot have the parameter "
                f"{key!r:.80}; rename the parameter"
            )


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that a reference points to, if it is in `root`."""
    for _ in range(32):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        schema = find(reference, root)
    return schema if isinstance(schema, dict) else {}


def kinds_of(
    schema: Any, root: Mapping[str, Any], seen: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """Return the types of JSON that a schema allows.

    `seen` holds the types of schemas that were already visited, because schemas may be recursive.
    """
    schema, seen = resolved(schema, root), {} if seen is None else seen
    if id(schema) in seen:
        return seen[id(schema)]
    seen[id(schema)] = kinds = KINDS
    if "type" in schema:
        named = schema["type"]
        named = named if isinstance(named, list) else [named]
        kinds = frozenset(kind for kind in KINDS if kind in named)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        kinds &= frozenset(kind for value in values for kind in _kinds_of_value(value))
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            kinds &= frozenset().union(*(kinds_of(each, root, seen) for each in schema[name]))
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            kinds &= kinds_of(each, root, seen)
    seen[id(schema)] = kinds = kinds | {"integer"} if "number" in kinds else kinds
    return kinds


def _kinds_of_value(value: Any) -> frozenset[str]:
    match value:
        case str():
            return frozenset(("string",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("number",))
        case None:
            return frozenset(("null",))
        case list():
            return frozenset(("array",))
    return frozenset(("object",))


def kind_of(value: Any) -> str:
    """Return the JSON type of a value."""
    return min(_kinds_of_value(value))


def read_value(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of the value that a text represents."""
    if kinds == {"string"}:
        return as_json(text)
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        found = _kinds_of_value(read_json(bare))
    except ValueError:
        if "string" in kinds:
            return as_json(text)
        # Some chat templates write lists and objects in Python.
        try:
            return as_json(read_python(text.strip()))
        except (ValueError, TypeError, RecursionError):
            return as_json(text)
    return as_json(text) if "string" in kinds and not kinds & found else bare


def read_python(source: str) -> Any:
    """Return the value of a Python literal. Raise `ValueError` or `TypeError`."""
    depth = most = 0
    for char in source:
        depth += (char in "([{") - (char in ")]}")
        most = max(most, depth)
    if most > _DEEPEST:
        raise ValueError("it is nested too deeply")
    try:
        return ast.literal_eval(source)
    except (SyntaxError, MemoryError) as error:
        raise ValueError("it is not a literal") from error


class Value(NamedTuple):
    """How a value is written.

    `text` is a terminal of Lark for strings, `json` is a schema of the other values. Either may be
    None.
    """

    text: str | None
    json: dict[str, Any] | None


def written_value(schema: Any, parameters: Parameters) -> Value:
    """Return how values of a schema are written.

    Raise `ValueError` if the function is strict and bare text cannot follow the schema.
    """
    root = parameters.root
    kinds = kinds_of(schema, root)
    if "string" not in kinds:
        return Value(None, with_definitions(schema, root))
    try:
        ways = [_simple(way, root) for way in _ways(schema, root)]
    except _Unsupported as unsupported:
        parameters.refuse(*unsupported.args)
        others = sorted(kinds - {"string"})
        json_schema = with_definitions({"type": others}, root) if others else None
        return Value(_no_json(_ANY_TEXT) if others else _ANY_TEXT, json_schema)
    texts = list(dict.fromkeys([way.text for way in ways if way.text is not None]))
    schemas = [way.json for way in ways if way.json is not None]
    text = texts[0] if len(texts) == 1 else " | ".join(f"({each})" for each in texts)
    if not schemas:
        return Value(text, None)
    together = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return Value(_no_json(text) if texts else None, with_definitions(together, root))


class _Unsupported(Exception):
    """A keyword of a string that bare text cannot follow, and its place."""


def _ways(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives of a schema as schemas without alternatives or references."""
    pending: list[tuple[Any, dict[str, Any], int]] = [(schema, {}, 0)]
    ways: list[dict[str, Any]] = []
    while pending:
        each, beside, depth = pending.pop()
        found = resolved(each, root)
        if depth > 16 or len(ways) + len(pending) > _MOST_WAYS:
            raise _Unsupported("anyOf", "with so many alternatives")
        if isinstance(each, dict) and "$ref" in each:
            beside = _both(beside, {key: each[key] for key in each if key != "$ref"})
        own = {key: found[key] for key in found if key not in ("anyOf", "oneOf", "allOf", "$ref")}
        own = _both(beside, own)
        for part in found.get("allOf", ()):
            part = resolved(part, root)
            if {"anyOf", "oneOf", "allOf", "$ref"}.intersection(part):
                raise _Unsupported("allOf", "with alternatives within it")
            own = _both(own, part)
        alternatives = [found[key] for key in ("anyOf", "oneOf") if key in found]
        if len(alternatives) > 1:
            raise _Unsupported("oneOf", "beside anyOf")
        if alternatives:
            pending += [(way, own, depth + 1) for way in reversed(alternatives[0])]
        else:
            ways.append(own)
    return ways


def _both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of the values that two simple schemas allow."""
    for key in set(one) & set(other) - {"type", "$defs", OPTIONS}:
        if one[key] != other[key]:
            raise _Unsupported(key, "that is given twice with allOf or anyOf")
    both = {**one, **other}
    if "type" in one and "type" in other:
        kinds = kinds_of({"type": one["type"]}, {}) & kinds_of({"type": other["type"]}, {})
        both["type"] = sorted(kinds)
    return both


def _simple(schema: dict[str, Any], root: Mapping[str, Any]) -> Value:
    kinds = kinds_of(schema, root)
    others = sorted(kinds - {"string"})
    text = string_terminal(schema) if "string" in kinds else None
    if not others:
        return Value(text, None)
    rest = {**schema, "type": others}
    if "enum" in schema:
        rest["enum"] = [value for value in schema["enum"] if not isinstance(value, str)]
    return Value(text, rest)


def _no_json(text: str) -> str:
    return rf"(({text}) & ~/{_JSON_LIKE}(.|\n)*/)"


_ANY_TEXT = r"(/(.|\n)*/)"


def string_terminal(schema: Mapping[str, Any]) -> str:
    """Return a terminal of Lark for the strings of a simple schema."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        return "(" + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts) + ")"
    parts = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    parts.append(rf"/(.|\n){{{least},{most}}}/" if least or most != "" else r"/(.|\n)*/")
    if "pattern" in schema:
        # A terminal matches whole texts, but a JSON schema's pattern is searched in the text.
        pattern = str(schema["pattern"])
        if "|" in pattern and _alternates(pattern):
            if pattern.startswith("^") or pattern.endswith("$"):
                raise _Unsupported(
                    "pattern", f"with the value {pattern!r:.60}: put its alternatives in a group"
                )
            pattern = f"({pattern})"
        is_escaped = (len(pattern) - len(pattern.removesuffix("$").rstrip("\\"))) % 2 == 0
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not is_escaped
        pattern = pattern[1:] if begins else rf"(.|\n)*{pattern}"
        parts.append(_regex(pattern[:-1] if ends else rf"{pattern}(.|\n)*"))
    if "format" in schema:
        parts.append(_regex(_PATTERNS[schema["format"]]))
    return "(" + " & ".join(parts) + ")"


def _regex(pattern: str) -> str:
    return "/" + pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n") + "/"


def _alternates(pattern: str) -> bool:
    """Return whether a regular expression has alternatives outside of groups."""
    depth = place = 0
    while place < len(pattern):
        match pattern[place]:
            case "\\":
                place += 1
            case "[":
                place = max(place + 1, pattern.find("]", place + 2))
            case "(":
                depth += 1
            case ")":
                depth -= 1
            case "|" if depth == 0:
                return True
        place += 1
    return False
