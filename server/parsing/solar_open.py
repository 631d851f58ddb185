"""Solar Open writes calls with an id, a name and JSON after marks.

Format: the chat template of upstage/Solar-Open-100B.
"""

from __future__ import annotations

from .calls_grammar import Section
from .json_calls import JsonFormat

CALLS = "<|tool_calls|>"
CALL, NAME, ARGUMENTS, CALL_END = (
    "<|tool_call:begin|>",
    "<|tool_call:name|>",
    "<|tool_call:args|>",
    "<|tool_call:end|>",
)


FORMATS = (
    JsonFormat(
        name="solar_open",
        section=Section(CALLS, "", "", ""),
        before=f"{CALL}ID{NAME}NAME{ARGUMENTS}",
        after=CALL_END,
        head=(
            r"\s{0,8}<\|tool_call:begin\|>[^<>\s]{0,64}<\|tool_call:name\|>NAME"
            r"<\|tool_call:args\|>\s{0,20}(?=\{)"
        ),
        follows=r"\s{0,20}<\|tool_call:end\|>",
        end=r"\s{0,20}<\|tool_call:end\|>\s{0,8}(?:<\|calls\|>)?",
        found_by=lambda template: CALL in template and NAME in template,
        marks=(CALLS, CALL, NAME, ARGUMENTS, CALL_END),
        in_objects=False,
    ),
)
