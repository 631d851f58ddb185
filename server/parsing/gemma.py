"""FunctionGemma and Gemma 4 write `call:NAME{key:value}` between two marks. Strings have marks,
too.

Format: https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices and the chat
template of google/gemma-4-31B-it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import regex

from .calls_grammar import Section
from .events import read_json
from .literal_calls import LiteralFormat

_BARE_KEY = regex.compile(r"(?<=[{,])\s*([\w.$\[\]-]+(?: [\w.$\[\]-]+)*)\s*(?=:)")


def _read(delimiter: str, source: str) -> Any:
    parts = source.split(delimiter)
    for index, part in enumerate(parts):
        parts[index] = json.dumps(part) if index % 2 else _BARE_KEY.sub(r'"\1"', part)
    return read_json("".join(parts))


FUNCTION_GEMMA = LiteralFormat(
    name="functiongemma",
    aliases=("function_gemma",),
    section=Section(
        "<start_function_call>",
        "",
        "<end_function_call><start_function_call>",
        "<end_function_call>",
    ),
    before="call:NAME{",
    equals=":",
    comma=",",
    after="}",
    head=r"\s{0,8}",
    call=r"call:NAME\{",
    follows=r"\s{0,8}\}\s{0,8}<end_function_call>\s{0,8}<start_function_call>\s{0,8}",
    end=r"\s{0,8}\}\s{0,8}<end_function_call>",
    tail=r"<start_function_response>",
    delimiter="<escape>",
    quotes='"',
    words={},
    read=partial(_read, "<escape>"),
    found_by=lambda template: "<start_function_call>" in template,
    marks=("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
)
FORMATS = (
    FUNCTION_GEMMA,
    replace(
        FUNCTION_GEMMA,
        name="gemma4",
        aliases=(),
        section=Section("<|tool_call>", "", "<tool_call|><|tool_call>", "<tool_call|>"),
        follows=r"\s{0,8}\}\s{0,8}<tool_call\|>\s{0,8}<\|tool_call>\s{0,8}",
        end=r"\s{0,8}\}\s{0,8}<tool_call\|>",
        tail=r"<\|tool_response>",
        delimiter='<|"|>',
        read=partial(_read, '<|"|>'),
        found_by=lambda template: "<|tool_call>" in template,
        marks=("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    ),
)
