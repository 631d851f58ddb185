"""Phi-4-mini writes a JSON array or object between `<|tool_call|>` and `<|/tool_call|>`.

Format: the chat template and model card of microsoft/Phi-4-mini-instruct.
"""

from __future__ import annotations

from dataclasses import replace

from .calls_grammar import Section
from .granite import CALLS, GRANITE
from .json_calls import OBJECT_END

CALLS_END = "<|/tool_call|>"

FORMATS = (
    replace(
        GRANITE,
        name="phi4_mini",
        aliases=("phi4_mini_json",),
        section=Section(CALLS, "[", ", ", f"]{CALLS_END}"),
        follows=rf"{OBJECT_END}\s{{0,20}}(?:,|<\|/tool_call\|>\s{{0,8}}<\|tool_call\|>)",
        end=rf"{OBJECT_END}\s{{0,20}}\]?\s{{0,8}}<\|/tool_call\|>",
        found_by=lambda template: CALLS_END in template or "<|tool|>" in template,
        marks=(CALLS, CALLS_END),
    ),
)
