"""Apertus writes a JSON array between two marks. Each object has one member, the tool's name.

Format: the chat template of swiss-ai/Apertus-8B-Instruct-2509.
"""

from __future__ import annotations

from .calls_grammar import Section
from .json_calls import JsonFormat

CALLS, CALLS_END = "<|tools_prefix|>", "<|tools_suffix|>"

FORMATS = (
    JsonFormat(
        name="apertus",
        section=Section(CALLS, "[", ", ", f"]{CALLS_END}"),
        before='{"NAME": ',
        after="}",
        head=r'\s{0,20}\[?\s{0,20}\{\s{0,20}"NAME"\s{0,5}:\s{0,20}(?=\{)',
        follows=r"\s{0,20}\}\s{0,20},",
        end=r"\s{0,20}\}\s{0,20}\]\s{0,20}<\|tools_suffix\|>",
        found_by=lambda template: CALLS in template,
        marks=(CALLS, CALLS_END),
        in_objects=False,
    ),
)
