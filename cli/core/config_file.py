"""`--config FILE`: a YAML file whose keys are flags, with the line number of each key.

Values stay texts, because a flag parses them as it parses a command line: `4k`, `off` and
`10.0.0.1:29500` mean the same in both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

MOST_BYTES = 2**20
_MOST_DEPTH = 8  # A list of models has depth 3.
_NOTHING = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping, its value, and its place (`FILE:LINE`).

    The value is a text, None for YAML's null, a list of texts, or a list of mappings.
    """

    key: str
    value: str | list[str] | list[Mapping] | None
    where: str


@dataclass(frozen=True, slots=True)
class Mapping:
    """The entries of a mapping in order, and where it begins. Keys have `_` and are unique."""

    entries: tuple[Entry, ...]
    where: str


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader that refuses aliases, which can expand without bound, and deep nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        problem = ""
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            problem = "anchors and aliases are not supported; write the value out"
        if self.depth == _MOST_DEPTH:
            problem = f"lists and mappings are nested more than {_MOST_DEPTH} deep"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_config_file(path: str) -> Mapping:
    """Read a file. Raises `ValueError` with file and line if it is not YAML or has aliases.

    The content must be a mapping of keys to values, lists of values or lists of mappings.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError("--config: the path contains a null character") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"--config {path} is larger than {MOST_BYTES >> 20} MiB; is it a model?")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"--config {path} is not text in UTF-8") from None
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError:
        raise ValueError(f"--config {path} has characters that YAML does not allow") from None
    if node is None:
        return Mapping((), f"{path}:1")
    return _mapping(node, path)


def _mapping(node: Any, path: str) -> Mapping:
    where = _where(node, path)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{where}: expected keys and values, such as `port: 8000`")
    entries: dict[str, Entry] = {}
    for key_node, value in node.value:
        where_key = _where(key_node, path)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"{where_key}: a key must be the name of a flag, such as `port`")
        key = key_node.value.removeprefix("--").replace("-", "_")
        if key in entries:
            raise ValueError(
                f"{where_key}: {key} is given twice; it is also at {entries[key].where}"
            )
        entries[key] = Entry(key, _value(value, key, path), where_key)
    return Mapping(tuple(entries.values()), where)


def _value(node: Any, key: str, path: str) -> str | list[str] | list[Mapping] | None:
    if isinstance(node, yaml.ScalarNode):
        if re.search("[\ud800-\udfff]", node.value):
            raise ValueError(f"{_where(node, path)}: {key} contains half of a surrogate pair")
        return None if node.style is None and node.value in _NOTHING else str(node.value)
    if isinstance(node, yaml.SequenceNode):
        if all(isinstance(item, yaml.ScalarNode) for item in node.value):
            return [str(item.value) for item in node.value]
        return [_mapping(item, path) for item in node.value]
    raise ValueError(f"{_where(node, path)}: {key} takes a value or a list, not keys of its own")


def _where(node: Any, path: str) -> str:
    return f"{path}:{node.start_mark.line + 1}"
