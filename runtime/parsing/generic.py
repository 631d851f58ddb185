"""For models whose chat templates know no tools: what they are told is text, and what they answer
is held to Hermes' format by the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .hermes import CLOSING, HERMES, OPENING
from .json_calls import JsonFormat
from .tool_calls import Tool

_INTRODUCTION = f"""You may call functions. To call one, write

{OPENING}
{{"name": NAME, "arguments": OBJECT}}
{CLOSING}

Its result comes in the next message. The functions, one a line, with JSON schemas of their
arguments:
"""


class Generic(JsonFormat):
    """A `ToolCallFormat`."""

    in_template = False

    def told(self, messages: Sequence[dict[str, Any]], tools: Sequence[Tool]) -> list[Any]:
        listed = "\n".join(json.dumps(tool.described()["function"]) for tool in tools)
        told = [_as_text(message) for message in messages]
        if not tools:
            return told
        introduction = _INTRODUCTION + listed
        if told and told[0]["role"] == "system":
            content = f"{told[0]['content']}\n\n{introduction}"
            return [{**told[0], "content": content}, *told[1:]]
        return [{"role": "system", "content": introduction}, *told]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what the template does not know."""
    if message["role"] == "tool":
        return {
            "role": "user",
            "content": f"<tool_response>\n{message['content']}\n</tool_response>",
        }
    calls = [
        f"{OPENING}\n{json.dumps(call['function'])}\n{CLOSING}"
        for call in message.get("tool_calls", ())
    ]
    content = "\n".join([part for part in (message["content"], *calls) if part])
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": content}


FORMATS = (
    Generic(
        **{**vars(HERMES), "name": "generic", "aliases": (), "found_by": lambda template: False}
    ),
)
