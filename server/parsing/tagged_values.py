"""Values with a tag for each member of an object and for each `item` of a list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import regex

from .typed_values import kinds_of, read_value, resolved

_ITEM = "item"
_DEEPEST = 64  # Maximum depth of nested tags.


def read_tags(text: str, before: str, schema: Any, root: Mapping[str, Any], depth: int = 0) -> str:
    """Return a value as JSON. `before` is the beginning of each tag, such as `]<]minimax[>[`.

    Text without tags is read by its schema, a part of `root`.
    """
    children = list(_children(text, before)) if depth < _DEEPEST else []
    if not children:
        return read_value(text, kinds_of(schema, root) or frozenset(("string",)))
    found = resolved(schema, root)
    if all(name == _ITEM for name, _ in children):
        kind = found.get("items", {})
        items = [read_tags(content, before, kind, root, depth + 1) for _, content in children]
        return f"[{', '.join(items)}]"
    properties = found.get("properties")
    known = properties if isinstance(properties, dict) else {}
    members = [
        f"{json.dumps(name, ensure_ascii=False)}: "
        + read_tags(content, before, known.get(name, {}), root, depth + 1)
        for name, content in dict(children).items()
    ]
    return f"{{{', '.join(members)}}}"


class TagsEnd:
    """Finds the closing tag of a value in a growing text, which begins after the opening tag.

    Tags of the same name may be nested.
    """

    def __init__(self, opening: str, closing: str) -> None:
        self._tag = regex.compile(f"{regex.escape(opening)}|{regex.escape(closing)}")
        self._closing = closing
        self._place, self._depth = 0, 1

    def find(self, text: str) -> int | None:
        """Return the size of the value, or None if more text is needed."""
        while (found := self._tag.search(text, self._place)) is not None:
            self._place = found.end()
            self._depth += -1 if found[0] == self._closing else 1
            if self._depth == 0:
                return int(found.start())
        # A tag may begin at the end of the text.
        self._place = max(self._place, len(text) - len(self._closing) + 1)
        return None


def _children(text: str, before: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each outermost tag."""
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
