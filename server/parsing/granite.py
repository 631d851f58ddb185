"""Granite 3 writes `<|tool_call|>` and a JSON array. Granite 4 uses Hermes' format.

Format: the chat template of ibm-granite/granite-3.3-8b-instruct.
"""

from __future__ import annotations

from .calls_grammar import Section
from .json_calls import OBJECT_END, OBJECT_HEAD, JsonFormat

CALLS = "<|tool_call|>"

GRANITE = JsonFormat(
    name="granite",
    section=Section(CALLS, "[", ", ", "]"),
    before='{"name": "NAME", "arguments": ',
    after="}",
    head=rf"\s{{0,8}}\[?{OBJECT_HEAD}",
    follows=rf"{OBJECT_END}\s{{0,20}},",
    end=rf"{OBJECT_END}\s{{0,20}}\]",
    found_by=lambda template: CALLS in template and "<|/tool_call|>" not in template,
    marks=(CALLS,),
)
FORMATS = (GRANITE,)
