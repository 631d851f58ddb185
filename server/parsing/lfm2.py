"""LFM2, LFM2.5 and OLMo 3 write calls in Python between two marks.

Format: the chat templates and model cards of LiquidAI/LFM2-1.2B, LiquidAI/LFM2.5-1.2B-Instruct and
allenai/Olmo-3-7B-Instruct.
"""

from __future__ import annotations

from .calls_grammar import Section
from .literal_calls import LiteralFormat
from .pythonic import PYTHONIC

CALLS, CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"
_OLMO_CALLS, _OLMO_CALLS_END = "<function_calls>", "</function_calls>"

LFM2 = {
    **vars(PYTHONIC),
    "name": "lfm2",
    "section": Section(CALLS, "[", ", ", f"]{CALLS_END}"),
    "head": r"\s{0,8}\[?\s{0,20}",
    "tail": r"\s{0,8}<\|tool_call_end\|>",
    "found_by": lambda template: CALLS in template or "List of tools: " in template,
    "marks": (CALLS, CALLS_END),
}
FORMATS = (
    LiteralFormat(**LFM2),
    LiteralFormat(
        **{
            **LFM2,
            "name": "olmo3",
            "section": Section(_OLMO_CALLS, "\n", "\n", f"\n{_OLMO_CALLS_END}"),
            "follows": r"\s{0,20},?\s{0,20}\)\s{0,20},?\s{0,20}",
            "end": r"\s{0,20},?\s{0,20}\)\s{0,20},?\s{0,20}\]?",
            "tail": rf"\s{{0,20}}{_OLMO_CALLS_END}",
            "found_by": lambda template: _OLMO_CALLS in template,
            "marks": (_OLMO_CALLS, _OLMO_CALLS_END),
        }
    ),
)
