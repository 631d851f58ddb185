"""Hermes, Qwen2.5 and Qwen3: JSON in `<tool_call>` tags.

Format: the chat templates of NousResearch's Hermes 2 Pro and of Qwen2.5-Instruct.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .events import Parser
from .marked_json import MarkedJsonParser, marked_json_grammar
from .tool_calls import Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes:
    """A `ToolCallFormat`."""

    name = "hermes"
    in_template = True
    marks = (OPENING, CLOSING)

    def matches(self, template: str) -> bool:
        return OPENING in template and '"arguments"' in template.replace('\\"', '"')

    def parser(self, names: Collection[str]) -> Parser:
        return MarkedJsonParser(OPENING, CLOSING, names)

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        required: bool,
        parallel: bool,
        content: Mapping[str, Any] | None = None,
    ) -> str:
        return marked_json_grammar(
            OPENING + "\n",
            "\n" + CLOSING,
            tools,
            required=required,
            parallel=parallel,
            content=content,
        )

    def told(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Any]:
        return list(messages)


FORMAT = Hermes()
