"""Command R7B and Command A write a JSON array between two marks. Command R and R+ write the array
in a Markdown block.

Format: the chat templates of CohereLabs' c4ai-command-r7b-12-2024, c4ai-command-a-03-2025 and
c4ai-command-r-plus (`tool_use`).
"""

from __future__ import annotations

from .calls_grammar import Section
from .json_calls import OBJECT_END, JsonFormat

ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
_R_ACTION = "Action:\n```json\n"
_ID = r'(?:"tool_call_id"\s{0,5}:\s{0,5}"?\w{1,32}"?\s{0,5},\s{0,20})?'
_HEAD = (
    rf'\s{{0,20}}\[?\s{{0,20}}\{{\s{{0,20}}{_ID}"tool_name"\s{{0,5}}:\s{{0,5}}"NAME"\s{{0,5}},'
    r'\s{0,20}"parameters"\s{0,5}:\s{0,20}(?=\{)'
)


FORMATS = (
    JsonFormat(
        name="cohere_command",
        aliases=("cohere_command3", "cohere_command4"),
        section=Section(ACTION, "[\n    ", ",\n    ", f"\n]{ACTION_END}"),
        before='{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ',
        after="}",
        head=_HEAD,
        follows=rf"{OBJECT_END}\s{{0,20}},",
        end=rf"{OBJECT_END}\s{{0,20}}\]\s{{0,20}}<\|END_ACTION\|>",
        found_by=lambda template: ACTION in template,
        marks=(ACTION, ACTION_END),
        in_objects=False,
    ),
    JsonFormat(
        name="command_r",
        section=Section(_R_ACTION, "[\n    ", ",\n    ", "\n]\n```"),
        before='{\n        "tool_name": "NAME",\n        "parameters": ',
        after="\n    }",
        head=_HEAD,
        follows=rf"{OBJECT_END}\s{{0,20}},",
        end=rf"{OBJECT_END}\s{{0,20}}\]\s{{0,20}}```",
        found_by=lambda template: "directly-answer" in template,
        marks=(),
        in_objects=False,
    ),
)
