"""`--config FILE`: YAML whose keys are flags, read with the line of each.

Values are kept as they are written, for a flag reads them as it reads a command line's: `4k`, `off`
and `10.0.0.1:29500` mean the same in both, whatever YAML makes of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml

MOST_BYTES = 2**20
_MOST_DEPTH = 8
"""A list of models is three deep."""
_NOTHING = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping, and where it stands (`FILE:LINE`).

    `value`: a text, None for YAML's null, a list of texts, or a list of mappings.
    """

    key: str
    value: str | list[str] | list[Mapping] | None
    where: str


@dataclass(frozen=True, slots=True)
class Mapping:
    """Entries in their order, and where the mapping begins. Keys are with `_`, and differ."""

    entries: tuple[Entry, ...]
    where: str


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Without aliases, by which a small file says much, and without depth that exhausts a stack."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        problem = ""
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            problem = "anchors and aliases are not read; write the value out"
        if self.depth == _MOST_DEPTH:
            problem = "too many lists and mappings lie within each other"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_config_file(path: str) -> Mapping:
    """What a file says. Raises `ValueError` with file and line for what is no YAML, for aliases,
    and for anything but a mapping of keys to values, lists of values and lists of mappings.
    """
    text = _text(path)
    try:
        node = _compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        raise ValueError(f"{path}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError:
        raise ValueError(f"--config {path} holds characters that no YAML may have") from None
    if node is None:
        return Mapping((), f"{path}:1")
    return _mapping(node, path)


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--config {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ValueError("--config: a path has no null character") from None
    if len(content) > MOST_BYTES:
        raise ValueError(f"--config {path} is larger than {MOST_BYTES >> 20} MiB; is it a model?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"--config {path} is not text in UTF-8") from None


def _compose(text: str) -> Any:
    """The node of the only document; None where there is none."""
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _mapping(node: Any, path: str) -> Mapping:
    where = _where(node, path)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{where}: expected keys and values, such as `port: 8000`")
    entries: dict[str, Entry] = {}
    for key_node, value in node.value:
        where_key = _where(key_node, path)
        if not isinstance(key_node, yaml.ScalarNode):
            raise ValueError(f"{where_key}: a key is the name of a flag, such as `port`")
        key = key_node.value.removeprefix("--").replace("-", "_")
        if key in entries:
            raise ValueError(f"{where_key}: {key} is given twice; {entries[key].where} has it too")
        entries[key] = Entry(key, _value(value, key, path), where_key)
    return Mapping(tuple(entries.values()), where)


def _value(node: Any, key: str, path: str) -> str | list[str] | list[Mapping] | None:
    if isinstance(node, yaml.ScalarNode):
        if re.search("[\ud800-\udfff]", node.value):
            raise ValueError(f"{_where(node, path)}: {key} has half of a character")
        return None if node.style is None and node.value in _NOTHING else str(node.value)
    if isinstance(node, yaml.SequenceNode):
        if all(isinstance(item, yaml.ScalarNode) for item in node.value):
            return [str(item.value) for item in node.value]
        return [_mapping(item, path) for item in node.value]
    raise ValueError(f"{_where(node, path)}: {key} takes a value or a list, not keys of its own")


def _where(node: Any, path: str) -> str:
    return f"{path}:{node.start_mark.line + 1}"
