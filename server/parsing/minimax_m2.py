"""MiniMax M2 writes invocations with named parameters between two marks.

Format: the chat template and tool-calling guide of MiniMaxAI/MiniMax-M2.
"""

from __future__ import annotations

from .calls_grammar import Section
from .tagged_calls import TaggedFormat

CALLS, CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"

FORMATS = (
    TaggedFormat(
        name="minimax_m2",
        aliases=("minimax-m2",),
        section=Section(CALLS, "\n", "", CALLS_END),
        before='<invoke name="NAME">\n',
        opening='<parameter name="KEY">',
        closing="</parameter>\n",
        after="</invoke>\n",
        head=r'\s{0,8}<invoke name="NAME">',
        key=r'\s{0,8}<parameter name="KEY">',
        value_end="</parameter>",
        follows=r"\s{0,8}</invoke>",
        end=rf"\s{{0,8}}</invoke>\s{{0,8}}{CALLS_END}",
        found_by=lambda template: CALLS in template,
        marks=(CALLS, CALLS_END),
    ),
)
