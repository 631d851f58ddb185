"""DeepSeek V3 and R1 write arguments in a Markdown block, V3.1 writes them after the name.

Format: the chat templates of DeepSeek-V3-0324, DeepSeek-R1-0528 and DeepSeek-V3.1.
"""

from __future__ import annotations

from dataclasses import replace

from .calls_grammar import Section
from .json_calls import JsonFormat

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

V3 = JsonFormat(
    name="deepseek_v3",
    aliases=("deepseekv3", "deepseek_r1"),
    section=Section(CALLS, "", "\n", CALLS_END),
    before=f"{CALL}function{SEPARATOR}NAME\n```json\n",
    after=f"\n```{CALL_END}",
    head=rf"\s{{0,8}}{CALL}(?:function)?{SEPARATOR}NAME\s{{0,8}}```(?:json)?\s{{0,20}}(?=\{{)",
    follows=rf"\s{{0,20}}```\s{{0,8}}{CALL_END}",
    end=rf"\s{{0,20}}```\s{{0,8}}{CALL_END}\s{{0,8}}{CALLS_END}",
    found_by=lambda template: CALLS in template and "```json" in template,
    marks=(CALLS, CALLS_END, CALL, CALL_END, SEPARATOR),
    in_objects=False,
)
FORMATS = (
    V3,
    replace(
        V3,
        name="deepseek_v31",
        aliases=("deepseekv31",),
        section=Section(CALLS, "", "", CALLS_END),
        before=f"{CALL}NAME{SEPARATOR}",
        after=CALL_END,
        head=rf"\s{{0,8}}{CALL}NAME{SEPARATOR}\s{{0,20}}(?=\{{)",
        follows=rf"\s{{0,20}}{CALL_END}",
        end=rf"\s{{0,20}}{CALL_END}\s{{0,8}}{CALLS_END}",
        found_by=lambda template: CALLS in template and "```json" not in template,
    ),
)
