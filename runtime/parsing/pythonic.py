"""Llama 3.2 and 4, and others: an answer that is a list of calls in Python.

Format: the prompt format of Llama 3.2 and 4 (https://www.llama.com/docs), in which
`<|python_start|>` and `<|python_end|>` may stand around the list.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import regex

from .calls_grammar import Section
from .literal_calls import LiteralFormat
from .tool_calls import Tool

START, END = "<|python_start|>", "<|python_end|>"
_DEEPEST = 64


class Pythonic(LiteralFormat):
    """A `ToolCallFormat`."""

    def section_of(self, tools: Sequence[Tool]) -> Section:
        names = "|".join(str(regex.escape(tool.name)) for tool in tools).replace("/", "\\/")
        call = rf"\s*(<\|python_start\|>)?\s*\[\s*({names})\("
        return self.section._replace(free=rf"/(.|\n)*/ & ~/{call}(.|\n)*/")


def _read(source: str) -> Any:
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


def _is_told(template: str) -> bool:
    return regex.search(r"\[\w{1,40}\(\w{1,40}=", template) is not None


PYTHONIC = Pythonic(
    name="pythonic",
    section=Section("", "[", ", ", "]"),
    before="NAME(",
    equals="=",
    comma=", ",
    after=")",
    head=r"\s{0,8}(?:<\|python_start\|>\s{0,8})?\[\s{0,20}",
    call=r"NAME\(",
    follows=r"\s{0,20},?\s{0,20}\)\s{0,20},\s{0,20}",
    end=r"\s{0,20},?\s{0,20}\)\s{0,20},?\s{0,20}\]",
    tail=r"\s{0,8}<\|python_end\|>",
    delimiter="",
    quotes="\"'",
    words={"boolean": '("True" | "False")', "null": '"None"'},
    read=_read,
    found_by=lambda template: _is_told(template) and START not in template,
    marks=(START, END),
)
FORMATS = (
    PYTHONIC,
    replace(
        PYTHONIC,
        name="llama4_pythonic",
        aliases=("llama4",),
        section=Section("", "[", ", ", "]", lead=START),
        found_by=lambda template: START in template,
    ),
)
