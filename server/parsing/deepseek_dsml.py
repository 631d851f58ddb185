"""DeepSeek V3.2 and V4 write invocations with named parameters and say which are strings.

Format: the chat templates of DeepSeek-V3.2 and DeepSeek-V4.
"""

from __future__ import annotations

from dataclasses import replace

from .calls_grammar import Section
from .tagged_calls import TaggedFormat

DSML = "｜DSML｜"
CALLS, CALLS_END = f"<{DSML}function_calls>", f"</{DSML}function_calls>"
_V4_CALLS, _V4_CALLS_END = f"<{DSML}tool_calls>", f"</{DSML}tool_calls>"
_NO_STRINGS = ("integer", "number", "boolean", "null", "array", "object")

V32 = TaggedFormat(
    name="deepseek_v32",
    aliases=("deepseekv32",),
    section=Section(CALLS, "\n", "", CALLS_END),
    before=f'<{DSML}invoke name="NAME">\n',
    opening=f'<{DSML}parameter name="KEY" string="TYPE">',
    closing=f"</{DSML}parameter>\n",
    after=f"</{DSML}invoke>\n",
    head=rf'\s{{0,8}}<{DSML}invoke name="NAME">',
    key=rf'\s{{0,8}}<{DSML}parameter name="KEY"(?: string="(?P<type>true|false)")?>',
    value_end=f"</{DSML}parameter>",
    follows=rf"\s{{0,8}}</{DSML}invoke>",
    end=rf"\s{{0,8}}</{DSML}invoke>\s{{0,8}}{CALLS_END}",
    found_by=lambda template: DSML in template and "function_calls" in template,
    marks=(DSML,),
    types={"string": "true", **dict.fromkeys(_NO_STRINGS, "false")},
)
FORMATS = (
    V32,
    replace(
        V32,
        name="deepseek_v4",
        aliases=("deepseekv4", "deepseek_v41"),
        section=Section(_V4_CALLS, "\n", "", _V4_CALLS_END),
        end=rf"\s{{0,8}}</{DSML}invoke>\s{{0,8}}{_V4_CALLS_END}",
        found_by=lambda template: DSML in template and "function_calls" not in template,
    ),
)
