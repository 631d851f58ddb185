"""Llama 3.1, 3.2 and 4 answer with a JSON object, which `<|python_tag|>` may precede.

Semicolons separate several objects.

Format: the chat templates of meta-llama/Llama-3.1-8B-Instruct and Llama-3.2-3B-Instruct.
"""

from __future__ import annotations

from .calls_grammar import Section
from .json_calls import OBJECT_END, OBJECT_HEAD, JsonFormat

PYTHON_TAG = "<|python_tag|>"
_START, _END = "<|python_start|>", "<|python_end|>"  # Llama 4 writes these before or around calls.
_TAGS = r"\s{0,8}(?:<\|python_tag\|>)?(?:<\|python_start\|>)?(?:<\|python_end\|>)?"
_CALL_BEGINS = r'\s*(<\|python_tag\|>|\{\s*"(name|type)")'


def _has_tools(template: str) -> bool:
    plain = template.replace('\\"', '"')
    return "<|start_header_id|>" in plain and '"parameters"' in plain


FORMATS = (
    JsonFormat(
        name="llama3_json",
        aliases=("llama3", "llama4_json"),
        section=Section(
            "", "", "; ", "", lead=PYTHON_TAG, free=rf"/(.|\n)*/ & ~/{_CALL_BEGINS}(.|\n)*/"
        ),
        before='{"name": "NAME", "parameters": ',
        after="}",
        head=_TAGS + OBJECT_HEAD,
        follows=rf"{OBJECT_END}\s{{0,20}};?",
        end=rf"{OBJECT_END}\s{{0,8}}(?:<\|python_end\|>)?",
        found_by=_has_tools,
        marks=(PYTHON_TAG, _START, _END),
    ),
)
