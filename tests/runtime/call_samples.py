"""Tools that tests of the formats of tool calls call, and arguments that are hard to read."""

from __future__ import annotations

import json
from typing import Any

from piecework.server.parsing.tool_calls import Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 99},
        "parts": {"type": "array", "items": {"enum": ["sun", True, None]}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [Tool("weather", "of a city", SCHEMA), Tool("now", "", NOTHING)]

Said = list[str | tuple[str, Any]]
"""Texts, and calls: a name and its arguments."""

BONN = {"city": 'Bö"n', "days": 7}
ODD = {"city": "</x> {é]", "days": 1, "parts": ["sun", True, None]}
TWO: Said = [("weather", BONN), ("now", {})]


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def as_object(name: str, arguments: Any, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {as_json(arguments)}}}'
