"""xLAM answers with a JSON array of calls.

Format: the chat template of Salesforce/Llama-xLAM-2-8b-fc-r.
"""

from __future__ import annotations

from .calls_grammar import Section
from .json_calls import OBJECT_END, OBJECT_HEAD, JsonFormat

_CALL_BEGINS = r'\s*\[\s*\{\s*"name"'

FORMATS = (
    JsonFormat(
        name="xlam",
        section=Section("", "[", ", ", "]", free=rf"/(.|\n)*/ & ~/{_CALL_BEGINS}(.|\n)*/"),
        before='{"name": "NAME", "arguments": ',
        after="}",
        head=rf"\s{{0,8}}\[?{OBJECT_HEAD}",
        follows=rf"{OBJECT_END}\s{{0,20}},",
        end=rf"{OBJECT_END}\s{{0,20}}\]",
        found_by=lambda template: '[{"name": ' in template.replace('\\"', '"'),
        marks=(),
    ),
)
