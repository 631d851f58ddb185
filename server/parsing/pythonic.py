"""Llama 3.2, 4 and other models answer with a list of calls in Python.

Format: the prompt format of Llama 3.2 and 4 (https://www.llama.com/docs), in which
`<|python_start|>` and `<|python_end|>` may stand around the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import regex

from .calls_grammar import Section
from .literal_calls import LiteralFormat
from .tool_calls import Tool
from .typed_values import read_python

START, END = "<|python_start|>", "<|python_end|>"


class Pythonic(LiteralFormat):
    """A `LiteralFormat` without a mark. Free text must not begin with a call of a tool."""

    def section_of(self, tools: Sequence[Tool]) -> Section:
        names = "|".join(str(regex.escape(tool.name)) for tool in tools).replace("/", "\\/")
        call = rf"\s*(<\|python_start\|>)?\s*\[\s*({names})\("
        return self.section._replace(free=rf"/(.|\n)*/ & ~/{call}(.|\n)*/")


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
    read=read_python,
    found_by=lambda template: (
        regex.search(r"\[\w{1,40}\(\w{1,40}=", template) is not None and START not in template
    ),
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
