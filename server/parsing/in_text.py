"""Tools, calls and results as text, for chat templates that do not read them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ...runtime.tokenizer.chat_messages import arguments_of
from .tool_calls import Call, Tool, ToolCallFormat

Message = dict[str, Any]
_EXAMPLE = Call("NAME", {"KEY": "VALUE"})


def tools_in_text(
    form: ToolCallFormat, messages: Sequence[Message], tools: Sequence[Tool]
) -> list[Message]:
    """Return the messages with a system message that describes the tools and the format of
    calls.
    """
    listed = [json.dumps(tool.described()["function"], ensure_ascii=False) for tool in tools]
    introduction = (
        "You may call functions. To call one, write\n\n"
        f"{form.written([_EXAMPLE])}\n\n"
        "Its result comes in the next message. The functions, one a line, with JSON schemas of "
        "their arguments:\n" + "\n".join(listed)
    )
    begin = 0
    while begin < len(messages) and messages[begin]["role"] == "system":
        begin += 1
    told = {"role": "system", "content": introduction}
    return [*messages[:begin], told, *messages[begin:]]


def turns_in_text(form: ToolCallFormat, messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls as content and results as messages of the user.

    Raise `ValueError` or `RecursionError` for arguments that JSON cannot write.
    """
    found = []
    for message in messages:
        if message["role"] == "tool":
            content = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": content}
        elif message.get("tool_calls"):
            calls = []
            for function in (call["function"] for call in message["tool_calls"]):
                arguments = function["arguments"]
                if isinstance(arguments, str):
                    arguments = arguments_of(arguments)
                calls.append(Call(function["name"], arguments))
            parts = (message.get("content"), form.written(calls))
            message = {name: value for name, value in message.items() if name != "tool_calls"}
            message["content"] = "\n".join([part for part in parts if part])
        found.append(message)
    return found
