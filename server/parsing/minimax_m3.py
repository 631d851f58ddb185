"""MiniMax M3 writes invocations. Each argument has a tag with its name, and each tag a mark.

Format: the chat template of MiniMaxAI/MiniMax-M3.
"""

from __future__ import annotations

from .calls_grammar import Section
from .tagged_calls import TaggedFormat

MARK = "]<]minimax[>["
CALLS, CALLS_END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
_MARK = r"\]<\]minimax\[>\["

FORMATS = (
    TaggedFormat(
        name="minimax_m3",
        aliases=("minimax-m3",),
        section=Section(CALLS, "\n", "", CALLS_END),
        before=f'{MARK}<invoke name="NAME">',
        opening=f"{MARK}<KEY>",
        closing=f"{MARK}</KEY>",
        after=f"{MARK}</invoke>\n",
        head=rf'\s{{0,8}}{_MARK}<invoke name="NAME">',
        key=rf"\s{{0,8}}{_MARK}<(?!/)KEY>",
        value_end=f"{MARK}</KEY>",
        follows=rf"\s{{0,8}}{_MARK}</invoke>",
        end=rf"\s{{0,8}}{_MARK}</invoke>\s{{0,8}}{_MARK}</tool_call>",
        found_by=lambda template: MARK in template,
        marks=(MARK, "<tool_call>", "</tool_call>"),
        tags=MARK,
    ),
)
