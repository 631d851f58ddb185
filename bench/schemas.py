"""JSON schemas of growing difficulty, made from a seed, and their validation."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = ("name", "city", "count", "kind", "size", "color", "note", "rank", "score", "tags")
# One entry per level. A schema of a level has parts of all lower levels.
LEVELS = (
    "scalars",
    "enums",
    "bounds",
    "arrays",
    "objects",
    "anyOf",
    "formats",
    "$ref",
    "recursion",
)
_DEPTH = 3


def make_schemas(count: int, seed: int) -> list[tuple[int, Schema]]:
    """Return (level, schema), the easiest first."""
    rng = random.Random(seed)
    levels = [place * len(LEVELS) // count for place in range(count)]
    return [(level, make_schema(rng, level)) for level in levels]


def make_schema(rng: random.Random, level: int) -> Schema:
    """Return an object schema with at least one member of its level."""
    maker = _Maker(rng, level)
    schema = maker.object(0)
    schema["properties"]["own"] = maker.kinds[level](1)
    schema["required"] = sorted({*schema["required"], "own"})
    return {**schema, "$defs": maker.definitions} if maker.definitions else schema


class _Maker:
    """Makes schemas. Texts and arrays are bounded, so that answers end."""

    def __init__(self, rng: random.Random, level: int) -> None:
        self._rng, self._level = rng, level
        self.definitions: dict[str, Schema] = {}
        self.kinds: tuple[Callable[[int], Schema], ...] = (
            self._scalar,
            self._enum,
            self._bounded,
            self._array,
            self.object,
            self._any_of,
            self._format,
            self._reference,
            self._recursion,
        )

    def value(self, depth: int) -> Schema:
        """Return a schema of any kind up to the level, or a scalar if it is nested deeply."""
        highest = self._level if depth < _DEPTH else min(self._level, 2)
        return self.kinds[self._rng.randint(0, highest)](depth)

    def object(self, depth: int) -> Schema:
        names = self._rng.sample(WORDS, self._rng.randint(1, 3))
        required = [name for name in names if self._rng.random() < 0.7]
        return {
            "type": "object",
            "properties": {name: self.value(depth + 1) for name in names},
            "required": required,
            "additionalProperties": False,
        }

    def _scalar(self, depth: int) -> Schema:
        return self._rng.choice(
            [
                {"type": "string", "maxLength": self._rng.randint(3, 12)},
                {"type": "integer", "minimum": -1000, "maximum": 100_000},
                {"type": "boolean"},
                {"type": ["null", "boolean"]},
            ]
        )

    def _enum(self, depth: int) -> Schema:
        values: list[Any] = [*self._rng.sample(WORDS, 3), 7, None, True]
        picked = self._rng.sample(values, 3)
        return self._rng.choice([{"enum": picked}, {"const": picked[0]}])

    def _bounded(self, depth: int) -> Schema:
        low = self._rng.randint(-500, 500)
        high = low + self._rng.randint(0, 300)
        return self._rng.choice(
            [
                {"type": "integer", "minimum": low, "maximum": high},
                {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high + 2},
                {"type": "integer", "minimum": 0, "maximum": 90, "multipleOf": 5},
                {"type": "string", "minLength": 2, "maxLength": self._rng.randint(2, 9)},
                {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            ]
        )

    def _array(self, depth: int) -> Schema:
        least = self._rng.randint(0, 2)
        return {
            "type": "array",
            "items": self.value(depth + 1),
            "minItems": least,
            "maxItems": least + self._rng.randint(0, 2),
        }

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self.value(depth + 1) for _ in range(self._rng.randint(2, 3))]}

    def _format(self, depth: int) -> Schema:
        return {"type": "string", "format": self._rng.choice(["date", "uuid", "ipv4"])}

    def _reference(self, depth: int) -> Schema:
        name = f"part{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.value(max(depth + 1, _DEPTH - 1))
        return {"$ref": f"#/$defs/{name}"}

    def _recursion(self, depth: int) -> Schema:
        name = f"node{len(self.definitions)}"
        next_one = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
        self.definitions[name] = {
            "type": "object",
            "properties": {"value": self._bounded(depth), "next": next_one},
            "required": ["value"],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}


class Validator:
    """Validates texts with jsonschema. Raises `ValueError` if jsonschema is not installed."""

    def __init__(self) -> None:
        try:
            import jsonschema
        except ImportError:
            raise ValueError(
                "answers are validated by jsonschema: pip install 'piecework[bench]'"
            ) from None
        self._kind = jsonschema.Draft202012Validator

    def fault(self, text: str, schema: Schema) -> str | None:
        """Return what is wrong with `text`, or None."""
        try:
            value = json.loads(text)
        except ValueError as error:
            return f"no JSON: {error}"
        checker = self._kind(schema, format_checker=self._kind.FORMAT_CHECKER)
        found = next(iter(checker.iter_errors(value)), None)
        return None if found is None else str(found.message)[:200]
