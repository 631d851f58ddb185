"""Reads a `quantization_config`, which may hold anything.

Types are checked, and patterns of names are matched in bounded time.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any, TypeVar

import regex

T = TypeVar("T")
_MOST_PATTERNS = 1000
_LONGEST_PATTERN = 1000
_MOST_REPEATS = 1000
_COUNTS = re.compile(r"\{(\d*),?(\d*)\}")
_SPACED = re.compile(r"\{(?s:.*)[\s#]|[\s#](?s:.*)\{")
_SECONDS = 1.0  # Time that all matches of one file may take together.
EXPRESSION = "re:"  # Prefix of a pattern that is a regular expression.
_TYPES = {
    int: "a whole number",
    str: "a text",
    bool: "true or false",
    dict: "an object",
    list: "a list",
}


def setting(config: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    """Return the value of `name`, or `default` if it is missing or null.

    Raises `ValueError` if it has another type, or is missing and has no default.
    """
    value = config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(
            f"quantization_config: {name} must be {_TYPES[kind]}, got {repr(value)[:80]}; download "
            "the model again"
        )
    return value


def names(config: Mapping[str, Any], name: str) -> list[str]:
    """Return a list of names of layers, empty if it is missing."""
    listed = setting(config, name, list, [])
    for value in listed:
        if not isinstance(value, str):
            raise ValueError(
                f"quantization_config: {name} must list names of layers, got {repr(value)[:80]}; "
                "download the model again"
            )
    return listed


class Patterns:
    """The patterns of one file. Their number and the time of all matches are bounded."""

    def __init__(self) -> None:
        self._number, self._left = 0, _SECONDS

    def matcher(self, patterns: Iterable[str], *, parts: bool = False) -> Callable[[str], bool]:
        """Return a function that says whether the name of a layer matches one of `patterns`.

        A pattern is a name, or begins with "re:" and matches from the beginning of a name
        (compressed-tensors' utils/match.py). If `parts` is set, a pattern may also be consecutive
        parts of a name: "mlp" matches "layers.0.mlp.gate" (transformers' `modules_to_not_convert`).
        Raises `ValueError` for invalid patterns, and for those that take too long.
        """
        plain = frozenset(patterns)
        expressions = [
            self._compiled(pattern) for pattern in patterns if pattern.startswith(EXPRESSION)
        ]

        def matches(name: str) -> bool:
            pieces = name.split(".") if parts else []
            ends = range(1, len(pieces) + 1)
            if name in plain or any(
                ".".join(pieces[begin:end]) in plain for end in ends for begin in range(end)
            ):
                return True
            began = time.monotonic()
            try:
                # A timeout of 0 would mean none.
                timeout = max(self._left, 1e-9)
                return any(item.match(name, timeout=timeout) for item in expressions)
            except TimeoutError:
                raise ValueError(
                    "quantization_config: its patterns take too long to match; list the layers by "
                    "name"
                ) from None
            finally:
                self._left -= time.monotonic() - began

        return matches

    def _compiled(self, pattern: str) -> Any:
        self._number += 1
        if len(pattern) > _LONGEST_PATTERN or self._number > _MOST_PATTERNS:
            raise ValueError(
                f"quantization_config: more than {_MOST_PATTERNS} patterns, or one of more than "
                f"{_LONGEST_PATTERN} characters; list the layers by name"
            )
        try:
            return _compiled(pattern.removeprefix(EXPRESSION))
        except (ValueError, re.error, regex.error, RecursionError, OverflowError) as error:
            raise ValueError(
                f"quantization_config: {pattern[:80]!r} is no valid pattern ({error}); download "
                "the model again"
            ) from None


def _compiled(pattern: str) -> Any:
    """Compile a pattern that Python's `re` accepts, which quantisers use.

    `regex` also accepts recursive patterns, which run until memory is exhausted, and expands
    counted repeats. Both are refused.
    """
    if _SPACED.search(pattern):
        # In verbose patterns `regex` reads "{3 0}" as 30.
        raise ValueError("has counted repeats beside spaces or comments")
    counts = [int(count) for found in _COUNTS.findall(pattern) for count in found if count]
    if prod(max(1, count) for count in counts) > _MOST_REPEATS:
        raise ValueError(f"repeats more than {_MOST_REPEATS} times")
    with warnings.catch_warnings(action="ignore"):
        re.compile(pattern)
        return regex.compile(pattern)
