"""Hermes, Qwen2.5 and Qwen3 write JSON in `<tool_call>` tags.

Format: the chat templates of NousResearch's Hermes 2 Pro and of Qwen2.5-Instruct.
"""

from __future__ import annotations

import regex

from .calls_grammar import Section
from .json_calls import OBJECT_END, OBJECT_HEAD, JsonFormat

OPENING, CLOSING = "<tool_call>", "</tool_call>"


_CALL = regex.compile(OPENING + r"""(?:\\n|\s)*\{\\?["'](?:name|arguments)\\?["']""")


HERMES = JsonFormat(
    name="hermes",
    aliases=("qwen", "qwen25", "qwen3", "ernie45", "mimo", "granite4"),
    section=Section(OPENING, "\n", f"\n{CLOSING}\n{OPENING}\n", f"\n{CLOSING}"),
    before='{"name": "NAME", "arguments": ',
    after="}",
    head=OBJECT_HEAD,
    follows=rf"{OBJECT_END}\s{{0,20}}{CLOSING}\s{{0,20}}{OPENING}",
    end=rf"{OBJECT_END}\s{{0,20}}{CLOSING}",
    found_by=lambda template: _CALL.search(template) is not None,
    marks=(OPENING, CLOSING),
)
FORMATS = (HERMES,)
