"""Values of arguments that a format writes as bare text: what a text means is said by the schema.

A string is itself; what a schema allows besides strings is JSON. Where it allows both, a text that
is JSON of an allowed kind is that, and any other one is a string.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from .events import as_json, read_json

KINDS = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "$comment", "$schema")
)
_DEFINITIONS = ("$defs", "definitions")
_OBJECT_MEMBERS = _ANNOTATIONS.union(
    _DEFINITIONS, ("type", "properties", "required", "additionalProperties", "$id", "strict")
)
_DEEPEST = 64
"""Brackets within one another, in a literal of Python."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_JSON_LIKE = r"\s*([-0-9\[{\"]|true|false|null|True|False|None)"
"""How texts begin that may be anything else than a string."""
_DATE = r"[12][0-9]{3}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30))"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "email": r"[a-zA-Z0-9_]{1,32}([.+-][a-zA-Z0-9_]{1,32}){0,4}@"
    r"[a-z0-9]{1,32}([.-][a-z0-9]{1,32}){0,4}\.[a-z]{2,12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}


class Parameters:
    """The arguments of one tool."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.root = schema
        self.object = resolved(schema, schema)
        properties = self.object.get("properties")
        self.properties: dict[str, Any] = properties if isinstance(properties, dict) else {}

    def schema_of(self, key: str) -> Any:
        """Of one argument; what may be anything has an empty one."""
        if key in self.properties:
            return self.properties[key]
        others = self.object.get("additionalProperties", True)
        return others if isinstance(others, dict) else {}

    def told(self) -> Iterator[tuple[str, Any, bool]]:
        """Name, schema and whether it must be there, of each argument. Raises `ValueError` where
        the schema says more of them together.
        """
        beyond = sorted(set(self.object) - _OBJECT_MEMBERS)
        if beyond:
            raise ValueError(
                f"this model's calls cannot be held to {beyond[0]!r:.40} beside properties"
            )
        required = self.object.get("required", ())
        for key, schema in self.properties.items():
            yield key, schema, key in required
        for key in required:
            if key not in self.properties:
                yield key, self.schema_of(key), True

    @property
    def is_open(self) -> bool:
        """Whether the schema names no argument and allows any."""
        return not self.properties and self.object.get("additionalProperties", True) is not False

    def with_definitions(self, schema: Any) -> dict[str, Any]:
        """The schema of an argument as one of its own."""
        own = dict(schema) if isinstance(schema, dict) else {}
        return {**{name: self.root[name] for name in _DEFINITIONS if name in self.root}, **own}


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """What a schema refers to, as far as it is in `root`."""
    for _ in range(32):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            break
        found: Any = root
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        schema = found
    return schema if isinstance(schema, dict) else {}


def kinds_of(
    schema: Any, root: Mapping[str, Any], seen: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """The types of JSON that a schema allows, as far as it says. `seen`: what is known of others;
    each is looked at once, also where they refer to one another.
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
    """The type of JSON of a value."""
    return min(_kinds_of_value(value))


def read_value(text: str, kinds: frozenset[str]) -> str:
    """JSON of the value that a text stands for."""
    if kinds == {"string"}:
        return as_json(text)
    bare = text.strip()
    bare = _PYTHON.get(bare, bare)
    try:
        found = _kinds_of_value(read_json(bare))
    except ValueError:
        return as_json(text) if "string" in kinds else _python_value(text)
    return as_json(text) if "string" in kinds and not kinds & found else bare


def _python_value(text: str) -> str:
    """JSON of a Python literal: some chat templates write lists and objects as Python does. The
    text itself, as a string, if it is no literal either.
    """
    try:
        return as_json(read_python(text.strip()))
    except (ValueError, TypeError, RecursionError):
        return as_json(text)


def read_python(source: str) -> Any:
    """The value of a Python literal. Raises `ValueError` and `TypeError`."""
    depth = most = 0
    for char in source:
        depth += (char in "([{") - (char in ")]}")
        most = max(most, depth)
    if most > _DEEPEST:
        raise ValueError("it is nested too deeply")
    try:
        return ast.literal_eval(source)
    except (SyntaxError, MemoryError) as error:
        raise ValueError("it is no literal") from error


class Value(NamedTuple):
    """How a value is written: `text`, a terminal of Lark of a string's, and `json`, a schema of the
    others; each may be None.
    """

    text: str | None
    json: dict[str, Any] | None


def written_value(schema: Any, parameters: Parameters) -> Value:
    """Raises `ValueError` for a schema that bare text cannot be held to."""
    root = parameters.root
    found = resolved(schema, root)
    kinds = kinds_of(found, root)
    others = sorted(kinds - {"string"})
    if "string" not in kinds:
        return Value(None, parameters.with_definitions(schema))
    branches = found.get("anyOf", found.get("oneOf"))
    if branches is not None:
        if set(found) - _ANNOTATIONS - {"anyOf", "oneOf"}:
            raise ValueError("this model's calls cannot be held to anyOf beside other members")
        if any({"anyOf", "oneOf"}.intersection(resolved(each, root)) for each in branches):
            raise ValueError("this model's calls cannot be held to anyOf within anyOf")
        return _any_of([written_value(each, parameters) for each in branches])
    if not others:
        return Value(string_terminal(found), None)
    text = string_terminal({**_without_values(found), **_strings_of(found), "type": "string"})
    rest = {**found, "type": others}
    if "enum" in found:
        rest["enum"] = [value for value in found["enum"] if not isinstance(value, str)]
    return Value(_no_json(text), parameters.with_definitions(rest))


def _any_of(values: list[Value]) -> Value:
    texts = [value.text for value in values if value.text is not None]
    schemas = [value.json for value in values if value.json is not None]
    text = " | ".join(f"({each})" for each in texts)
    return Value(_no_json(text) if schemas else text, {"anyOf": schemas} if schemas else None)


def _no_json(text: str) -> str:
    return rf"(({text}) & ~/{_JSON_LIKE}(.|\n)*/)"


def _without_values(schema: Mapping[str, Any]) -> dict[str, Any]:
    names = ("type", "minLength", "maxLength", "pattern", "format", *_ANNOTATIONS)
    return {name: schema[name] for name in names if name in schema}


def _strings_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    if "enum" not in schema:
        return {}
    return {"enum": [value for value in schema["enum"] if isinstance(value, str)]}


def string_terminal(schema: Mapping[str, Any]) -> str:
    """A terminal of Lark of the strings of a schema. Raises `ValueError`."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if values is not None:
        texts = [value for value in values if isinstance(value, str)]
        return "(" + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts) + ")"
    known = {"type", "minLength", "maxLength", "pattern", "format", *_ANNOTATIONS, *_DEFINITIONS}
    beyond = sorted(set(schema) - known)
    if beyond:
        raise ValueError(f"this model's calls cannot be held to {beyond[0]!r:.40} of a string")
    parts = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    parts.append(rf"/(.|\n){{{least},{most}}}/" if least or most != "" else r"/(.|\n)*/")
    if "pattern" in schema:
        parts.append(_regex(_searched(str(schema["pattern"]))))
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise ValueError(
                f"this model's calls cannot be held to the format {schema['format']!r:.40}; known "
                f"are {', '.join(_FORMATS)}"
            )
        parts.append(_regex(_FORMATS[schema["format"]]))
    return "(" + " & ".join(parts) + ")"


def _regex(pattern: str) -> str:
    return "/" + pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n") + "/"


def _searched(pattern: str) -> str:
    """Of a JSON schema's pattern, which is searched for, one that matches whole texts."""
    if "|" in pattern and _alternates(pattern):
        if pattern.startswith("^") or pattern.endswith("$"):
            raise ValueError(
                f"this model's calls cannot be held to the pattern {pattern!r:.60}: put what is "
                "between ^ and $ in a group"
            )
        pattern = f"({pattern})"
    is_escaped = (len(pattern) - len(pattern.removesuffix("$").rstrip("\\"))) % 2 == 0
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not is_escaped
    pattern = pattern[1:] if begins else rf"(.|\n)*{pattern}"
    return pattern[:-1] if ends else rf"{pattern}(.|\n)*"


def _alternates(pattern: str) -> bool:
    """Whether a regular expression has alternatives outside of all groups."""
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
