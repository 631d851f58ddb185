"""Values that have a tag for each member of an object and for each `item` of a list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import regex

from .typed_values import kinds_of, read_value, resolved

_ITEM = "item"
_DEEPEST = 64
"""Tags within one another that are read."""


def read_tags(text: str, before: str, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Return a value as JSON. `before`: what each tag begins with, such as `]<]minimax[>[`. Text
    without tags is what its schema, a part of `root`, says.
    """
    children = list(_children(text, before)) if depth < _DEEPEST else []
    if not children:
        return read_value(text, kinds_of(schema, root) or frozenset(("string",)))
    said = resolved(schema, root)
    if all(name == _ITEM for name, _ in children):
        kind = said.get("items", {})
        items = [read_tags(one, before, kind, root, depth + 1) for _, one in children]
        return f"[{', '.join(items)}]"
    properties = said.get("properties")
    known = properties if isinstance(properties, dict) else {}
    members = [
        f"{json.dumps(name, ensure_ascii=False)}: "
        + read_tags(one, before, known.get(name, {}), root, depth + 1)
        for name, one in dict(children).items()
    ]
    return f"{{{', '.join(members)}}}"


class TagsEnd:
    """Finds where the tag of a value closes, in a text that grows: behind as many tags of its name
    as open in the value. The text begins behind the opening tag.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._tag = regex.compile(f"{regex.escape(opening)}|{regex.escape(closing)}")
        self._closing = closing
        self._place, self._depth = 0, 1

    def find(self, text: str) -> int | None:
        """The size of the value. None if more must come."""
        while (found := self._tag.search(text, self._place)) is not None:
            self._place = found.end()
            self._depth += -1 if found[0] == self._closing else 1
            if self._depth == 0:
                return found.start()
        # A tag may have begun at the end.
        self._place = max(self._place, len(text) - len(self._closing) + 1)
        return None


def _children(text: str, before: str) -> Iterator[tuple[str, str]]:
    """The name and the text of each tag that stands in no other one."""
    tag = regex.compile(regex.escape(before) + r"<(?P<close>/?)(?P<name>[^<>/]{1,256})>")
    place, depth, opened, begin = 0, 0, "", 0
    while (found := tag.search(text, place)) is not None:
        place = found.end()
        if not found["close"]:
            if depth == 0:
                opened, begin = found["name"], found.end()
            depth += found["name"] == opened
        elif depth and found["name"] == opened:
            depth -= 1
            if depth == 0:
                yield opened, text[begin : found.start()]
