"""MiniCPM 5 writes a function and its parameters in XML.

Format: the chat template of openbmb/MiniCPM5-1B.
"""

from __future__ import annotations

from .calls_grammar import Section
from .tagged_calls import TaggedFormat

CALL, CALL_END = '<function name="', "</function>"

FORMATS = (
    TaggedFormat(
        name="minicpm5",
        aliases=("minicpm5_xml", "minicpm5xml"),
        section=Section(CALL, "", f"{CALL_END}\n{CALL}", CALL_END),
        before='NAME">',
        opening='<param name="KEY">',
        closing="</param>",
        after="",
        head='NAME">',
        key=r'\s{0,8}<param name="KEY">',
        value_end="</param>",
        follows=rf"\s{{0,8}}{CALL_END}\s{{0,8}}{CALL}",
        end=rf"\s{{0,8}}{CALL_END}",
        found_by=lambda template: CALL in template and "<param name=" in template,
        marks=(CALL, CALL_END),
        quotes=("<![CDATA[", "]]>"),
    ),
)
