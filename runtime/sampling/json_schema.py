"""JSON schemas as clients send them become schemas that llguidance can follow.

    held = held_schema(schema, whose="function 'f'", strict=False, closed=True)
    lark = f"start: %json {json.dumps(held)}"

Annotations are left out. A keyword that the library does not know is an error where the schema is
strict. Elsewhere it is ignored, and the log names it once. The result stands alone: what a `$ref`
names is in its `$defs`, so that any part of it can be used with `with_definitions`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

logger = logging.getLogger(__name__)

KINDS = frozenset(("string", "number", "integer", "boolean", "null", "object", "array"))
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
# White space between JSON's tokens. The limit prevents endless blanks.
WHITESPACE = r"[ \n\r\t]{0,20}"
OPTIONS = "x-guidance"
# Keywords about values that llguidance does not follow.
_UNKNOWN = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"),
    *("dependentRequired", "dependentSchemas", "dependencies", "uniqueItems"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
)
# Values of these keywords that allow everything.
_ALLOWING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    **dict.fromkeys(("propertyNames", "unevaluatedItems", "unevaluatedProperties"), ({}, True)),
}
# Keywords that llguidance follows only in some schemas.
_APPROXIMATED = ("oneOf", "minProperties", "maxProperties")
_LISTS = ("anyOf", "oneOf", "allOf")
_logged: set[str] = set()


def held_schema(
    schema: Any, *, whose: str, strict: bool = False, closed: bool = False, root: bool = False
) -> dict[str, Any]:
    """Return the schema in a form that llguidance can follow, with its options.

    Args:
        whose: The owner of the schema, for errors and the log.
        strict: Raise for a keyword that is unknown or used wrongly. Otherwise ignore it.
        closed: Objects that name their properties have no others, unless they say so.
        root: The schema describes the arguments of a function, which are an object. A keyword that
            is used wrongly is ignored unless the function is strict.

    Raises:
        ValueError: A keyword is used wrongly, or the schema is strict and has a keyword that
            llguidance cannot follow.
    """
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object")
    made = _Holder(schema, whose, strict, closed, root).document()
    made[OPTIONS] = {"whitespace_pattern": WHITESPACE}
    if not strict and any(f'"{keyword}"' in json.dumps(made) for keyword in _APPROXIMATED):
        made[OPTIONS]["lenient"] = True
    return made


def with_definitions(part: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part of a schema from `held_schema` as a schema, with the definitions it needs."""
    own = dict(part) if isinstance(part, dict) else {"not": {}} if part is False else {}
    definitions = root.get("$defs", {})
    found: dict[str, Any] = {}
    open_parts: list[Any] = [own]
    while open_parts:
        for reference in _references(open_parts.pop()):
            name = reference.removeprefix("#/$defs/")
            if name not in found and name in definitions:
                found[name] = definitions[name]
                open_parts.append(definitions[name])
    options = {OPTIONS: root[OPTIONS]} if OPTIONS in root else {}
    return {**own, **({"$defs": found} if found else {}), **options}


def ignore(whose: str, keyword: str, reason: str) -> None:
    """Log once per keyword that texts do not follow the keyword."""
    if keyword not in _logged:
        _logged.add(keyword)
        logger.warning(
            "%s: %s; it is ignored, since the schema is not strict. Further schemas with %s are "
            "not reported.",
            whose,
            reason,
            keyword,
        )


def find(pointer: str, root: Any) -> Any:
    """Return the value of a JSON pointer such as `#/$defs/a`, or None."""
    found = root
    for part in pointer.removeprefix("#").split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
            found = found[int(part)]
        else:
            found = found.get(part) if isinstance(found, dict) else None
    return found


def _references(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            if isinstance(each.get("$ref"), str):
                yield each["$ref"]
            pending += [member for name, member in each.items() if name not in ("const", "enum")]
        elif isinstance(each, list):
            pending += each


class _Holder:
    def __init__(
        self, root: dict[str, Any], whose: str, strict: bool, closed: bool, is_arguments: bool
    ) -> None:
        self._is_arguments = is_arguments
        self._root, self._whose, self._strict, self._closed = root, whose, strict, closed
        self._names: dict[str, str] = {}
        self._waiting: list[tuple[str, Any, str]] = []
        self._composed = self._composed_objects() if closed else set()

    def document(self) -> dict[str, Any]:
        root, is_arguments = self._root, self._is_arguments
        if is_arguments and not any(name in root for name in ("$ref", *_LISTS)):
            # A function whose schema says nothing about arguments has no arguments.
            says = any(root.get(name) is not None for name in _OBJECT_KEYWORDS)
            root = {**root, "type": "object", **({} if says else {"properties": {}})}
        made = self._schema(root, "", closes=self._closed and is_arguments)
        definitions: dict[str, Any] = {}
        while self._waiting:
            name, schema, path = self._waiting.pop()
            definitions[name] = self._schema(schema, path)
        if not isinstance(made, dict):
            made = {}
        return {**made, "$defs": definitions} if definitions else made

    def _refuse(self, keyword: str, path: str, reason: str, is_wrong: bool = False) -> None:
        place = f" (at {path[:200]})" if path else ""
        told = f"the keyword {json.dumps(keyword)}{place} {reason}"
        if self._strict or (is_wrong and not self._is_arguments):
            raise ValueError(f"{self._whose}: {told}")
        ignore(self._whose, keyword, told)

    def _schema(self, schema: Any, path: str, closes: bool = False) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._refuse(path.rpartition("/")[2], path, "is no schema", is_wrong=True)
            return {}
        held: dict[str, Any] = {}
        for name, value in schema.items():
            if name in _UNKNOWN:
                if value is not None and value not in _ALLOWING.get(name, ()):
                    self._refuse(name, path, "is not supported by grammars of JSON")
            elif name == "const" or (value is not None and name in _KEYWORDS):
                self._member(held, name, value, f"{path}/{name}")
        self._names_of_properties(schema, held, path)
        lists_all = "properties" in held and id(schema) not in self._composed
        is_open = "additionalProperties" not in held
        if self._closed and lists_all and is_open and (held["properties"] or closes):
            for name in held.get("required", ()):
                held["properties"].setdefault(name, {})
            held["additionalProperties"] = False
        return held

    def _member(self, held: dict[str, Any], name: str, value: Any, path: str) -> None:
        """Add the supported part of a keyword to `held`."""
        is_right, reason = _KEYWORDS[name]
        if not is_right(value):
            self._refuse(name, path, reason, is_wrong=True)
        elif name == "$ref":
            if (target := self._reference(value)) is not None:
                held[name] = target
            else:
                self._refuse(name, path, "names nothing in this schema", is_wrong=True)
        elif name == "type":
            kinds = [value] if isinstance(value, str) else value
            known = [kind for kind in kinds if kind in KINDS]
            if len(known) < len(kinds):
                kinds_told = ", ".join(sorted(KINDS))
                self._refuse(name, path, f"has a value other than {kinds_told}", is_wrong=True)
            elif known:
                held[name] = value
        elif name == "format" and value not in FORMATS:
            reason = f"has the unknown value {value!r:.40}; known are {', '.join(sorted(FORMATS))}"
            self._refuse(name, path, reason)
        elif name == "pattern" and not is_pattern(value):
            self._refuse(name, path, "is a regular expression that grammars cannot follow")
        elif name == "patternProperties":
            parts = {key: each for key, each in value.items() if is_pattern(key)}
            if len(parts) < len(value):
                self._refuse(name, path, "has a regular expression that grammars cannot follow")
                held["additionalProperties"] = True
            held[name] = {key: self._schema(parts[key], f"{path}/{key}") for key in parts}
        elif name == "properties":
            held[name] = {key: self._schema(each, f"{path}/{key}") for key, each in value.items()}
        elif name in (*_LISTS, "prefixItems") or (name == "items" and isinstance(value, list)):
            held[name] = [self._schema(each, f"{path}/{at}") for at, each in enumerate(value)]
        elif name in ("items", "additionalItems", "additionalProperties"):
            if not (name == "additionalProperties" and name in held):
                held[name] = self._schema(value, path)
        elif name == "required":
            held[name] = list(dict.fromkeys(value))
        else:
            held[name] = int(value) if name in _COUNTS else value

    def _names_of_properties(self, schema: Any, held: dict[str, Any], path: str) -> None:
        """Limit an object without named properties to the names that `propertyNames` allows."""
        names = schema.get("propertyNames")
        if isinstance(names, dict) and isinstance(names.get("$ref"), str):
            names = find(names["$ref"], self._root)
        others = held.get("additionalProperties", True)
        if not isinstance(names, dict) or "properties" in held or "patternProperties" in held:
            return
        if isinstance(keys := names.get("enum"), list) and all(isinstance(k, str) for k in keys):
            held["properties"] = dict.fromkeys(keys, others)
            held["additionalProperties"] = False
        elif isinstance(pattern := names.get("pattern"), str) and is_pattern(pattern):
            held["patternProperties"] = {pattern: others}
            held["additionalProperties"] = False

    def _reference(self, reference: str) -> str | None:
        """Return a `$ref` to a definition of the result, or None if it points to nothing."""
        own = self._root.get("$id", self._root.get("id"))
        if isinstance(own, str) and own and reference.startswith(own.rstrip("#")):
            reference = "#" + reference.removeprefix(own.rstrip("#")).removeprefix("#")
        pointer = reference
        if not reference.startswith("#"):
            return None
        if len(reference) > 1 and not reference.startswith("#/"):
            found = self._anchored(reference[1:])
        else:
            found = find(reference, self._root)
        if not isinstance(found, dict | bool):
            return None
        if pointer not in self._names:
            self._names[pointer] = name = f"d{len(self._names)}"
            self._waiting.append((name, found, pointer.removeprefix("#")))
        return f"#/$defs/{self._names[pointer]}"

    def _anchored(self, anchor: str) -> Any:
        pending: list[Any] = [self._root]
        while pending:
            each = pending.pop()
            if isinstance(each, dict):
                if each.get("$anchor") == anchor:
                    return each
                pending += each.values()
            elif isinstance(each, list):
                pending += each
        return None

    def _composed_objects(self) -> set[int]:
        """Return the ids of schemas that describe one object together with other schemas.

        None of them lists all properties of the object.
        """
        composed: set[int] = set()
        pending: list[Any] = [self._root]
        while pending:
            each = pending.pop()
            if isinstance(each, dict):
                if each.get("allOf") or (
                    "properties" in each and any(each.get(k) for k in ("anyOf", "oneOf", "$ref"))
                ):
                    parts = self._of_one_object(each)
                    if sum(bool(part.get("properties")) for part in parts.values()) > 1:
                        composed.update(parts)
                pending += each.values()
            elif isinstance(each, list):
                pending += each
        return composed

    def _of_one_object(self, schema: dict[str, Any]) -> dict[int, dict[str, Any]]:
        parts: dict[int, dict[str, Any]] = {}
        pending: list[Any] = [schema]
        while pending:
            each = pending.pop()
            if not isinstance(each, dict) or id(each) in parts:
                continue
            parts[id(each)] = each
            for name in _LISTS:
                if isinstance(each.get(name), list):
                    pending += each[name]
            if isinstance(each.get("$ref"), str):
                pending.append(find(each["$ref"], self._root))
        return parts


def _is_count(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value < 2**53
        and value == int(value)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300 and math.isfinite(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_OBJECT_KEYWORDS = (
    *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties"),
)
_Rule = tuple[Callable[[Any], bool], str]
_COUNT: _Rule = (_is_count, "must be a whole number of at least 0")
_NUMBER: _Rule = (_is_number, "must be a number")
_TEXT: _Rule = (lambda value: isinstance(value, str), "must be a string")
_MAP: _Rule = (lambda value: isinstance(value, dict), "must be an object")
_SOME: _Rule = (lambda value: isinstance(value, list) and bool(value), "must be a list of schemas")
# Keywords that llguidance follows: a check of their value, and its description.
_KEYWORDS: Mapping[str, _Rule] = {
    "$ref": _TEXT,
    "type": (
        lambda value: isinstance(value, str) or _is_texts(value),
        "must be a string or a list of strings",
    ),
    "const": (lambda value: True, ""),
    "enum": (lambda value: isinstance(value, list) and bool(value), "must be a list of values"),
    "properties": _MAP,
    "patternProperties": _MAP,
    "required": (_is_texts, "must be a list of names"),
    "additionalProperties": (_is_schema, "must be a schema"),
    "additionalItems": (_is_schema, "must be a schema"),
    "items": (lambda value: isinstance(value, dict | bool | list), "must be a schema"),
    **dict.fromkeys((*_LISTS, "prefixItems"), _SOME),
    **dict.fromkeys(_COUNTS, _COUNT),
    **dict.fromkeys(("minimum", "maximum"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "must be a number above 0"),
    "pattern": _TEXT,
    "format": _TEXT,
}


@lru_cache(maxsize=1024)
def is_pattern(pattern: str) -> bool:
    """Return whether llguidance can follow a schema's regular expression."""
    from llguidance import LLMatcher

    schema = json.dumps({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(schema))
