"""Turns a model's text, thoughts and calls into output items and the events of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pydantic_core

from ...parsing.events import Arguments, CallBegins, Event, Text, Thought
from ..logprobs import TokenTrail
from .items import Item, item_id
from .tools import CUSTOM_INPUT, CustomTool, ToldTool

_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


class OutputItems:
    """The items of one response. The last item may still be open.

    Args:
        key: The end of the response's id.
        tools: Tools by the names under which the model calls them.
        tokens: Finds the log-probabilities of texts, if they are requested.
    """

    def __init__(
        self, key: str, tools: Mapping[str, ToldTool], tokens: TokenTrail | None = None
    ) -> None:
        self.items: list[Item] = []
        self._key = key
        self._tools = tools
        self._tokens = tokens
        self._is_open = False
        self._pieces: list[str] = []
        self._logprobs: list[msgspec.Raw] = []

    def push(self, event: Event) -> Iterator[dict[str, Any]]:
        """Yield the events of the stream in their order, without sequence numbers."""
        logprobs = self._tokens.read(event) if self._tokens else []
        match event:
            case Text(text):
                yield from self._continue("message", role="assistant")
                self._logprobs += logprobs
                yield self._delta("response.output_text.delta", text, logprobs=logprobs)
            case Thought(text):
                yield from self._continue("reasoning", summary=[])
                yield self._delta("response.reasoning_text.delta", text)
            case CallBegins(name):
                yield from self._begin_call(self._tools[name])
            case Arguments(text) if self.items[-1]["type"] == "custom_tool_call":
                self._pieces.append(text)
            case Arguments(text):
                yield self._delta("response.function_call_arguments.delta", text)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """End the open item, if there is one, with the status `status`."""
        if not self._is_open:
            return
        self._is_open, item, text = False, self.items[-1], "".join(self._pieces)
        if item["type"] == "function_call":
            item |= {"arguments": text, "status": status}
            yield self._event("response.function_call_arguments.done", arguments=text)
        elif item["type"] == "custom_tool_call":
            item["input"] = text = _custom_input(text)
            yield self._event("response.custom_tool_call_input.delta", delta=text)
            yield self._event("response.custom_tool_call_input.done", input=text)
        else:
            kind = _PARTS[item["type"]]
            part = self._part(kind, text)
            item |= {"content": [part], "status": status}
            logprobs = {"logprobs": self._logprobs} if kind == "output_text" else {}
            yield self._event(f"response.{kind}.done", content_index=0, text=text, **logprobs)
            yield self._event("response.content_part.done", content_index=0, part=part)
        yield self._of_item("response.output_item.done")

    def empty_message(self) -> Iterator[dict[str, Any]]:
        """Begin a message without text, for a model that generates nothing."""
        yield from self._begin("message", role="assistant")

    def _continue(self, kind: str, **members: Any) -> Iterator[dict[str, Any]]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._begin(kind, **members)

    def _begin_call(self, tool: ToldTool) -> Iterator[dict[str, Any]]:
        members: Item = {"call_id": f"call_{secrets.token_hex(12)}", "name": tool.tool.name}
        if tool.namespace is not None:
            members["namespace"] = tool.namespace
        if isinstance(tool.tool, CustomTool):
            yield from self._begin("custom_tool_call", **members, input="")
        else:
            yield from self._begin("function_call", **members, arguments="")

    def _begin(self, kind: str, **members: Any) -> Iterator[dict[str, Any]]:
        yield from self.close()
        item = {
            "id": item_id(kind, self._key, len(self.items)),
            "type": kind,
            "status": "in_progress",
            **members,
        }
        if kind in _PARTS:
            item["content"] = []
        if kind == "custom_tool_call":
            del item["status"]
        self.items.append(item)
        self._is_open, self._pieces, self._logprobs = True, [], []
        yield self._of_item("response.output_item.added")
        if kind in _PARTS:
            part = self._part(_PARTS[kind], "")
            yield self._event("response.content_part.added", content_index=0, part=part)

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": kind, "text": text}
        if kind == "output_text":
            part |= {"annotations": [], "logprobs": self._logprobs}
        return part

    def _delta(self, kind: str, text: str, **members: Any) -> dict[str, Any]:
        self._pieces.append(text)
        if self.items[-1]["type"] in _PARTS:
            members["content_index"] = 0
        return self._event(kind, delta=text, **members)

    def _event(self, kind: str, **members: Any) -> dict[str, Any]:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[index]["id"], "output_index": index, **members}

    def _of_item(self, kind: str) -> dict[str, Any]:
        item = dict(self.items[-1])
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}


def _custom_input(arguments: str) -> str:
    """Return the text of a custom tool's call. If the call is cut off, return the text up to
    there.
    """
    try:
        found = pydantic_core.from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return ""
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else ""
