"""Qwen3-Coder, Qwen3.5 and Seed-OSS write a function and its parameters in tags.

Format: the chat templates of Qwen/Qwen3-Coder-30B-A3B-Instruct and
ByteDance-Seed/Seed-OSS-36B-Instruct.
"""

from __future__ import annotations

from dataclasses import replace

from .calls_grammar import Section
from .tagged_calls import TaggedFormat

FUNCTION = "<function="

QWEN3_CODER = TaggedFormat(
    name="qwen3_coder",
    aliases=("qwen3_xml", "qwen3coder", "step3p5", "nemotron_v3"),
    section=Section("<tool_call>", "\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    before=f"{FUNCTION}NAME>\n",
    opening="<parameter=KEY>\n",
    closing="\n</parameter>\n",
    after="</function>",
    head=r"\s{0,8}<function=NAME>",
    key=r"\s{0,8}<parameter=KEY>",
    value_end="</parameter>",
    follows=r"\s{0,8}</function>(?:\s{0,8}</tool_call>)?(?:\s{0,8}<tool_call>)?",
    end=r"\s{0,8}</function>(?:\s{0,8}</tool_call>)?",
    bare=FUNCTION,
    found_by=lambda template: "<tool_call>" in template and FUNCTION in template,
    marks=("<tool_call>", "</tool_call>"),
    in_lines=True,
)
FORMATS = (
    QWEN3_CODER,
    replace(
        QWEN3_CODER,
        name="seed_oss",
        aliases=(),
        section=Section(
            "<seed:tool_call>",
            "\n",
            "\n</seed:tool_call>\n<seed:tool_call>\n",
            "\n</seed:tool_call>",
        ),
        opening="<parameter=KEY>",
        closing="</parameter>\n",
        follows=r"\s{0,8}</function>(?:\s{0,8}</seed:tool_call>)?(?:\s{0,8}<seed:tool_call>)?",
        end=r"\s{0,8}</function>(?:\s{0,8}</seed:tool_call>)?",
        found_by=lambda template: "<seed:tool_call>" in template,
        marks=("<seed:tool_call>", "</seed:tool_call>"),
        in_lines=False,
    ),
)
