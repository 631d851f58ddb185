"""Kimi K3 writes a section of numbered calls. Arguments have their types.

Format: the chat template of moonshotai/Kimi-K3.
"""

from __future__ import annotations

from .calls_grammar import Section
from .tagged_calls import TaggedFormat

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
CALLS, CALLS_END = f"{OPEN}tools{SEPARATOR}", f"{CLOSE}tools{SEPARATOR}"

FORMATS = (
    TaggedFormat(
        name="kimi_k3",
        section=Section(CALLS, "", "", CALLS_END),
        before=f'{OPEN}call tool="NAME" index="NUMBER"{SEPARATOR}',
        opening=f'{OPEN}argument key="KEY" type="TYPE"{SEPARATOR}',
        closing=f"{CLOSE}argument{SEPARATOR}",
        after=f"{CLOSE}call{SEPARATOR}",
        head=r'\s{0,8}<\|open\|>call tool="NAME"(?: index="\d{1,5}")?<\|sep\|>',
        key=r'\s{0,8}<\|open\|>argument key="KEY"(?: type="(?P<type>\w{1,20})")?<\|sep\|>',
        value_end=f"{CLOSE}argument{SEPARATOR}",
        follows=r"\s{0,8}<\|close\|>call<\|sep\|>",
        end=r"\s{0,8}<\|close\|>call<\|sep\|>\s{0,8}<\|close\|>tools<\|sep\|>",
        found_by=lambda template: OPEN in template and CLOSE in template,
        marks=(OPEN, CLOSE, SEPARATOR),
        types={
            "string": "string",
            "integer": "number",
            "number": "number",
            "boolean": "boolean",
            "null": "null",
            "array": "array",
            "object": "object",
        },
    ),
)
