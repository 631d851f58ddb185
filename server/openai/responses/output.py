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
from .mcp_items import (
    McpApprovalRequestItem,
    McpCallItem,
    McpListToolsItem,
    McpProtocolError,
    McpToolError,
)
from .mcp_tools import McpFunction
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

    Attributes:
        pending: Calls of MCP tools that are complete and have no result yet.
    """

    def __init__(
        self, key: str, tools: Mapping[str, PromptTool], tokens: TokenTrail | None = None
    ) -> None:
        self.items: list[OutputItem] = []
        self.pending: list[McpCallItem] = []
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
            case Arguments(text) if isinstance(
                self.items[-1], CustomCallItem | McpApprovalRequestItem
            ):
                self._pieces.append(text)
            case Arguments(text) if isinstance(self.items[-1], McpCallItem):
                yield self._delta("mcp_call_arguments", text)
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
            case McpCallItem():
                item.arguments = text
                yield self._event("mcp_call_arguments.done", arguments=text)
                if status == "completed":
                    self.pending.append(item)
                    return
                item.status = status
            case McpApprovalRequestItem():
                item.arguments = text
                yield self._of_item("added")
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

    def next_turn(self, tools: Mapping[str, PromptTool], tokens: TokenTrail | None) -> None:
        """Take the tools and the log-probabilities of another turn of the model."""
        self._tools, self._tokens = tools, tokens

    def add_listed(self, item: McpListToolsItem) -> Iterator[ResponseEvent]:
        """Add the tools of an MCP server."""
        item.id = self._id("mcp_list_tools")
        self.items.append(item)
        yield self._of_item("added")
        yield self._event("mcp_list_tools.in_progress")
        yield self._event(f"mcp_list_tools.{'completed' if item.error is None else 'failed'}")
        yield self._of_item("done")

    def begin_mcp_call(
        self, label: str, name: str, approval_request_id: str | None = None
    ) -> Iterator[ResponseEvent]:
        """Begin a call of an MCP tool."""
        yield from self.close()
        call = McpCallItem(
            id=self._id("mcp_call"),
            server_label=label,
            name=name,
            arguments="",
            approval_request_id=approval_request_id,
        )
        self.items.append(call)
        self._is_open, self._pieces, self._logprobs = True, [], []
        yield self._of_item("added")
        yield self._event("mcp_call.in_progress")

    def approved_call(self, request: Mapping[str, Any]) -> Iterator[ResponseEvent]:
        """Add a call that a client has approved. It is pending."""
        yield from self.begin_mcp_call(request["server_label"], request["name"], request["id"])
        yield self._delta("mcp_call_arguments", request["arguments"])
        yield from self.close()

    def give_up(self) -> None:
        """Mark the pending calls as incomplete, because the response ends."""
        for call in self.pending:
            call.status = "incomplete"
        self.pending.clear()

    def end_mcp_call(
        self, call: McpCallItem, output: str | None, error: McpProtocolError | McpToolError | None
    ) -> Iterator[ResponseEvent]:
        """End a pending call."""
        self.pending.remove(call)
        call.output, call.error = output, error
        call.status = "completed" if error is None else "failed"
        index = next(place for place, item in enumerate(self.items) if item is call)
        yield ResponseEvent(
            type=f"response.mcp_call.{call.status}", item_id=call.id, output_index=index
        )
        yield ResponseEvent(type="response.output_item.done", output_index=index, item=copy(call))

    def _begin_call(self, tool: PromptTool) -> Iterator[ResponseEvent]:
        if isinstance(tool.tool, McpFunction):
            if not tool.tool.needs_approval:
                yield from self.begin_mcp_call(tool.tool.server_label, tool.tool.name)
                return
            yield from self.close()
            self._is_open, self._pieces, self._logprobs = True, [], []
            self.items.append(
                McpApprovalRequestItem(
                    id=self._id("mcp_approval_request"),
                    server_label=tool.tool.server_label,
                    name=tool.tool.name,
                    arguments="",
                )
            )
            return
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
