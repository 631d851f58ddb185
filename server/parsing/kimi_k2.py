"""Kimi K2 writes a section of calls. A call has its function's name and its number in the chat.

Format: the chat template and the tool-call guide of moonshotai/Kimi-K2-Instruct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .calls_grammar import Section
from .json_calls import JsonFormat
from .tool_calls import Tool

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)


class KimiK2(JsonFormat):
    """A `JsonFormat` with numbered calls."""

    def for_template(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Any]:
        """Give calls the ids that the model learned."""
        ids: dict[str, str] = {}
        numbered = []
        for message in messages:
            calls = []
            for call in message.get("tool_calls", ()):
                number = f"functions.{call['function']['name']}:{len(ids)}"
                ids[call.get("id", number)] = number
                calls.append({**call, "id": number})
            message = {**message, "tool_calls": calls} if calls else dict(message)
            if "tool_call_id" in message:
                message["tool_call_id"] = ids.get(message["tool_call_id"], message["tool_call_id"])
            numbered.append(message)
        return numbered


FORMATS = (
    KimiK2(
        name="kimi_k2",
        section=Section(CALLS, "", "", CALLS_END),
        before=f"{CALL}functions.NAME:NUMBER{ARGUMENTS}",
        after=CALL_END,
        head=(
            r"\s{0,8}<\|tool_call_begin\|>\s{0,4}(?:functions\.)?NAME(?::\d{1,5})?\s{0,4}"
            r"<\|tool_call_argument_begin\|>\s{0,20}(?=\{)"
        ),
        follows=r"\s{0,20}<\|tool_call_end\|>",
        end=r"\s{0,20}<\|tool_call_end\|>\s{0,8}<\|tool_calls_section_end\|>",
        found_by=lambda template: CALLS in template,
        marks=(CALLS, CALLS_END, CALL, ARGUMENTS, CALL_END),
        in_objects=False,
    ),
)
