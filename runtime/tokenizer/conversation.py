"""A conversation as the chat template itself writes it, calls and their results included.

prompt = conversation_text(tokenizer.templates, messages)
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial

import regex

from .chat_messages import in_order, joined, linked, native_calls
from .chat_template import ChatTemplateError, ChatTemplates
from .template_reads import Message, TemplateReads, template_reads


def conversation_text(
    templates: ChatTemplates,
    messages: Sequence[Message],
    write: Callable[..., str] | None = None,
) -> str:
    """Return the prompt of messages in OpenAI's format. `write` is called as `templates.render`.

    Raise `ValueError` for messages that the template cannot render.
    """
    reads = template_reads(templates, tools=False)
    apply = partial(write or templates.render, tools=[] if reads.empty_tools else None)
    plain = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise ValueError(f"messages[{index}] has no role; give system, user, assistant or tool")
        parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise ValueError(
                f"messages[{index}].content has a part that is not text; send only text"
            )
        role = "system" if role == "developer" else role
        plain.append({**message, "role": role, "content": parts})
    told = linked(joined(plain, reads), reads)
    if not has_calls(told):
        return apply(in_order(told, reads))
    if (text := calls_by_template(apply, told, reads)) is None:
        raise ChatTemplateError(
            "the chat template does not read tool calls and their results; leave them out of the "
            "messages, or send the conversation to a server, which tells them as text"
        )
    return text


def has_calls(messages: Sequence[Message]) -> bool:
    """Whether messages have calls of tools or results of calls."""
    return any(message.get("tool_calls") or message["role"] == "tool" for message in messages)


def calls_by_template(
    apply: Callable[[Sequence[Message]], str], messages: Sequence[Message], reads: TemplateReads
) -> str | None:
    """Return the prompt with calls as the template writes them. None if the template refuses the
    messages or leaves a call out.
    """
    if not reads.calls:
        return None
    marks = _Marks(native_calls(messages, reads))
    try:
        text = apply(in_order(marks.messages, reads))
    except ChatTemplateError:
        return None
    return marks.named(text) if marks.are_in(text) else None


class _Marks:
    """Messages whose calls have unique names, so that a rendering shows whether it has all
    calls.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._key = uuid.uuid4().hex
        self._names: list[str] = []
        ids: dict[str, str] = {}
        self.messages: list[Message] = []
        for message in messages:
            if message.get("tool_calls"):
                calls = []
                for call in message["tool_calls"]:
                    mark = f"{self._key}x{len(self._names)}x"
                    self._names.append(call["function"]["name"])
                    ids[call["id"]] = mark
                    calls.append({**call, "function": {**call["function"], "name": mark}})
                message = {**message, "tool_calls": calls}
            elif message["role"] == "tool" and message.get("tool_call_id") in ids:
                message = {**message, "name": ids[message["tool_call_id"]]}
            self.messages.append(message)

    def are_in(self, text: str) -> bool:
        found = {match[1] for match in regex.finditer(rf"{self._key}x(\d+)x", text)}
        return len(found) == len(self._names)

    def named(self, text: str) -> str:
        """Return the text with the original names."""
        return str(
            regex.sub(rf"{self._key}x(\d+)x", lambda match: self._names[int(match[1])], text)
        )
