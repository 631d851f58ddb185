"""GLM 4.5 to 4.7 write the name, then keys and values in tags. 4.7 has no line ends between them.

Format: the chat templates of zai-org/GLM-4.5, GLM-4.6 and GLM-4.7.
"""

from __future__ import annotations

from dataclasses import replace

from .calls_grammar import Section
from .tagged_calls import TaggedFormat

GLM45 = TaggedFormat(
    name="glm45",
    aliases=("glm4_moe", "poolside_v1"),
    section=Section("<tool_call>", "", "\n</tool_call>\n<tool_call>", "\n</tool_call>"),
    before="NAME",
    opening="\n<arg_key>KEY</arg_key>\n<arg_value>",
    closing="</arg_value>",
    after="",
    head=r"\s{0,8}NAME(?=\s|<)",
    key=r"\s{0,8}<arg_key>KEY</arg_key>\s{0,8}<arg_value>",
    value_end="</arg_value>",
    follows=r"\s{0,8}</tool_call>\s{0,8}<tool_call>",
    end=r"\s{0,8}</tool_call>",
    found_by=lambda template: "<arg_key>" in template and "</arg_key>\n" in _plain(template),
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
FORMATS = (
    GLM45,
    replace(
        GLM45,
        name="glm47",
        aliases=("glm47_moe",),
        section=Section("<tool_call>", "", "</tool_call><tool_call>", "</tool_call>"),
        opening="<arg_key>KEY</arg_key><arg_value>",
        found_by=lambda template: (
            "<arg_key>" in template and "</arg_key>\n" not in _plain(template)
        ),
    ),
)


def _plain(template: str) -> str:
    return template.replace("\\n", "\n")
