"""GigaChat 3 writes one JSON object, in its own turn or after `<|function_call|>`.

Format: the chat templates of ai-sage/GigaChat3-10B-A1.8B and GigaChat3.1-10B-A1.8B.
"""

from __future__ import annotations

from dataclasses import replace

from .calls_grammar import Section
from .json_calls import OBJECT_END, OBJECT_HEAD, JsonFormat

CALL, SEPARATOR = "<|function_call|>", "<|message_sep|>"
_TURN = f"{SEPARATOR}\n\nfunction call<|role_sep|>\n"

GIGACHAT3 = JsonFormat(
    name="gigachat3",
    section=Section(_TURN, "", _TURN, ""),
    before='{"name": "NAME", "arguments": ',
    after="}",
    head=OBJECT_HEAD,
    follows=rf"{OBJECT_END}\s{{0,8}}<\|message_sep\|>\s{{0,8}}function call<\|role_sep\|>",
    end=OBJECT_END,
    found_by=lambda template: "function call<|role_sep|>" in template,
    marks=(SEPARATOR, "<|role_sep|>"),
)
FORMATS = (
    GIGACHAT3,
    replace(
        GIGACHAT3,
        name="gigachat31",
        aliases=("gigachat35",),
        section=Section(CALL, "", CALL, ""),
        follows=rf"{OBJECT_END}\s{{0,8}}<\|function_call\|>",
        found_by=lambda template: CALL in template,
        marks=(CALL,),
    ),
)
