"""Turns a model's text, thoughts and calls into output items and the events of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import msgspec
import pydantic_core
from msgspec import UNSET, UnsetType

from ...core.answers import Answer
from ...parsing.events import Arguments, CallBegins, Event, Text, Thought
from ..logprobs import ChosenLogprob, TokenTrail
from .items import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    item_id,
)
from .response import ResponseAnswer
from .tools import CUSTOM_INPUT, CustomTool, PromptTool


class ResponseEvent(Answer, kw_only=True):
    """One event of a stream. The type says which members it has."""

    type: str
    response: ResponseAnswer | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    logprobs: Sequence[ChosenLogprob | msgspec.Raw] | UnsetType = UNSET
    sequence_number: int = 0


class OutputItems:
    """The items of one response. The last item may still be open.

    Args:
        key: The end of the response's id.
        tools: Tools by the names under which the model calls them.
        tokens: Finds the log-probabilities of texts, if they are requested.
    """

    def __init__(
        self, key: str, tools: Mapping[str, PromptTool], tokens: TokenTrail | None = None
    ) -> None:
        self.items: list[OutputItem] = []
        self._key = key
        self._tools = tools
        self._tokens = tokens
        self._is_open = False
        self._pieces: list[str] = []
        self._logprobs: list[msgspec.Raw] = []

    def push(self, event: Event) -> Iterator[ResponseEvent]:
        """Yield the events of the stream in their order, without sequence numbers."""
        logprobs = self._tokens.read(event) if self._tokens else []
        match event:
            case Text(text):
                if not (self._is_open and isinstance(self.items[-1], OutputMessage)):
                    yield from self.begin_message()
                self._logprobs += logprobs
                yield self._delta("output_text", text, logprobs=logprobs, content_index=0)
            case Thought(text):
                if not (self._is_open and isinstance(self.items[-1], ReasoningItem)):
                    thought_id = self._id("reasoning")
                    yield from self._begin(
                        ReasoningItem(id=thought_id, status="in_progress", content=[])
                    )
                yield self._delta("reasoning_text", text, content_index=0)
            case CallBegins(name):
                yield from self._begin_call(self._tools[name])
            case Arguments(text) if isinstance(self.items[-1], CustomCallItem):
                self._pieces.append(text)
            case Arguments(text):
                yield self._delta("function_call_arguments", text)

    def close(self, status: ItemStatus = "completed") -> Iterator[ResponseEvent]:
        """End the open item, if there is one, with the status `status`."""
        if not self._is_open:
            return
        self._is_open, text = False, "".join(self._pieces)
        match item := self.items[-1]:
            case FunctionCallItem():
                item.arguments, item.status = text, status
                yield self._event("function_call_arguments.done", arguments=text)
            case CustomCallItem():
                item.input = text = _custom_input(text)
                yield self._event("custom_tool_call_input.delta", delta=text)
                yield self._event("custom_tool_call_input.done", input=text)
            case OutputMessage():
                content = OutputText(text=text, logprobs=self._logprobs)
                item.content, item.status = [content], status
                yield self._event(
                    "output_text.done", content_index=0, text=text, logprobs=self._logprobs
                )
                yield self._event("content_part.done", content_index=0, part=content)
            case ReasoningItem():
                thought = ReasoningText(text=text)
                item.content, item.status = [thought], status
                yield self._event("reasoning_text.done", content_index=0, text=text)
                yield self._event("content_part.done", content_index=0, part=thought)
        yield self._of_item("done")

    def begin_message(self) -> Iterator[ResponseEvent]:
        """Begin a message without text."""
        message = OutputMessage(id=self._id("message"), status="in_progress", content=[])
        yield from self._begin(message)

    def _begin_call(self, tool: PromptTool) -> Iterator[ResponseEvent]:
        members: dict[str, Any] = {
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": tool.tool.name,
            "namespace": UNSET if tool.namespace is None else tool.namespace,
        }
        if isinstance(tool.tool, CustomTool):
            yield from self._begin(
                CustomCallItem(id=self._id("custom_tool_call"), **members, input="")
            )
        else:
            call_id = self._id("function_call")
            yield from self._begin(
                FunctionCallItem(id=call_id, status="in_progress", **members, arguments="")
            )

    def _id(self, kind: str) -> str:
        return item_id(kind, self._key, len(self.items))

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        yield from self.close()
        self.items.append(item)
        self._is_open, self._pieces, self._logprobs = True, [], []
        yield self._of_item("added")
        match item:
            case OutputMessage():
                part = OutputText(text="", logprobs=[])
                yield self._event("content_part.added", content_index=0, part=part)
            case ReasoningItem():
                thought = ReasoningText(text="")
                yield self._event("content_part.added", content_index=0, part=thought)

    def _delta(self, kind: str, text: str, **members: Any) -> ResponseEvent:
        self._pieces.append(text)
        return self._event(f"{kind}.delta", delta=text, **members)

    def _event(self, kind: str, **members: Any) -> ResponseEvent:
        return ResponseEvent(
            type=f"response.{kind}",
            item_id=self.items[-1].id,
            output_index=len(self.items) - 1,
            **members,
        )

    def _of_item(self, kind: str) -> ResponseEvent:
        return ResponseEvent(
            type=f"response.output_item.{kind}",
            output_index=len(self.items) - 1,
            item=copy(self.items[-1]),
        )


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
