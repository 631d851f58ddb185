"""Step 3 writes invocations with named parameters in a section of marks.

Format: the chat template of stepfun-ai/step3.
"""

from __future__ import annotations

from .calls_grammar import Section
from .tagged_calls import TaggedFormat

CALLS, CALLS_END = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool_call_begin｜>", "<｜tool_call_end｜>", "<｜tool_sep｜>"

FORMATS = (
    TaggedFormat(
        name="step3",
        section=Section(CALLS, "\n", "", CALLS_END),
        before=f'{CALL}function{SEPARATOR}<steptml:invoke name="NAME">\n',
        opening='<steptml:parameter name="KEY">',
        closing="</steptml:parameter>\n",
        after=f"</steptml:invoke>{CALL_END}\n",
        head=rf'\s{{0,8}}{CALL}function{SEPARATOR}\s{{0,8}}<steptml:invoke name="NAME">',
        key=r'\s{0,8}<steptml:parameter name="KEY">',
        value_end="</steptml:parameter>",
        follows=rf"\s{{0,8}}</steptml:invoke>\s{{0,8}}{CALL_END}",
        end=rf"\s{{0,8}}</steptml:invoke>\s{{0,8}}{CALL_END}\s{{0,8}}{CALLS_END}",
        found_by=lambda template: "steptml:" in template,
        marks=(CALLS, CALLS_END, CALL, CALL_END, SEPARATOR),
    ),
)
