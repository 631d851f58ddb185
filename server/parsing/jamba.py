"""Jamba, Apriel and Hunyuan A13B write a JSON array in `<tool_calls>` tags, MiniMax M1 one object
per line.

Format: the chat templates of ai21labs/AI21-Jamba-1.5-Mini, ServiceNow-AI/Apriel-1.5-15b-Thinker,
tencent/Hunyuan-A13B-Instruct and MiniMaxAI/MiniMax-M1-80k.
"""

from __future__ import annotations

from dataclasses import replace

import regex

from .calls_grammar import Section
from .granite import GRANITE
from .json_calls import OBJECT_END, OBJECT_HEAD

CALLS, CALLS_END = "<tool_calls>", "</tool_calls>"
_LINES = regex.compile(CALLS + r"(?:\\n|\s)*\{")

JAMBA = replace(
    GRANITE,
    name="jamba",
    aliases=("apriel", "hunyuan_a13b"),
    section=Section(CALLS, "[", ", ", f"]{CALLS_END}"),
    end=rf"{OBJECT_END}\s{{0,20}}\]\s{{0,20}}{CALLS_END}",
    found_by=lambda template: CALLS in template and _LINES.search(template) is None,
    marks=(CALLS, CALLS_END),
)
FORMATS = (
    JAMBA,
    replace(
        JAMBA,
        name="minimax_m1",
        aliases=("minimax",),
        section=Section(CALLS, "\n", "\n", f"\n{CALLS_END}"),
        head=OBJECT_HEAD,
        follows=OBJECT_END,
        end=rf"{OBJECT_END}\s{{0,20}}{CALLS_END}",
        found_by=lambda template: _LINES.search(template) is not None,
    ),
)
