"""Functionary 3.1 writes JSON in tags with the function's name.

Format: the chat template of meetkai/functionary-medium-v3.1.
"""

from __future__ import annotations

from .calls_grammar import Section
from .json_calls import JsonFormat

CALL, CALL_END = "<function=", "</function>"

FORMATS = (
    JsonFormat(
        name="functionary_v3_1",
        aliases=("functionary",),
        section=Section(CALL, "", f"{CALL_END}{CALL}", CALL_END),
        before="NAME>",
        after="",
        head=r"NAME>\s{0,20}(?=\{)",
        follows=rf"\s{{0,20}}{CALL_END}\s{{0,8}}{CALL}",
        end=rf"\s{{0,20}}{CALL_END}",
        found_by=lambda template: "<function=example_function_name>" in template,
        marks=(CALL, CALL_END),
        in_objects=False,
    ),
)
