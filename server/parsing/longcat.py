"""LongCat writes Hermes' JSON in other tags.

Format: the chat template of meituan-longcat/LongCat-Flash-Chat.
"""

from __future__ import annotations

from dataclasses import replace

from .calls_grammar import Section
from .hermes import HERMES
from .json_calls import OBJECT_END

CALL, CALL_END = "<longcat_tool_call>", "</longcat_tool_call>"

FORMATS = (
    replace(
        HERMES,
        name="longcat",
        aliases=(),
        section=Section(CALL, "\n", f"\n{CALL_END}\n{CALL}\n", f"\n{CALL_END}"),
        follows=rf"{OBJECT_END}\s{{0,20}}{CALL_END}\s{{0,20}}{CALL}",
        end=rf"{OBJECT_END}\s{{0,20}}{CALL_END}",
        found_by=lambda template: CALL in template,
        marks=(CALL, CALL_END),
    ),
)
