"""Input items: their wire models, their stored form, and their messages in a chat."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

import msgspec
import pydantic_core
from msgspec import UNSET, UnsetType
from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from ...core.answers import Answer
from ...core.schemas import WireModel
from ..logprobs import ChosenLogprob
from .input_parts import InputPart, chat_parts, kept_parts, length, stored_parts
from .mcp_items import McpApprovalRequestItem, McpCallItem, McpListToolsItem
from .summary import read_summary
from .texts import Output, Parts, Text

Item = dict[str, Any]  # A `ContextItem` as decoded JSON.
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": (),
    "compaction": ("encrypted_content",),
    "item_reference": ("id",),
}
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "cto",
    "reasoning": "rs",
    "compaction": "cmp",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "item_reference": "ref",
}
# Items of tools of OpenAI's models and servers, and items that clients store beside them.
_OTHERS = re.compile(
    "(web_search|file_search|code_interpreter|image_generation|mcp|tool_search)_call"
    "|(local_shell|shell|apply_patch)_call(_output)?|tool_search_output|program(_output)?"
    "|mcp_list_tools|mcp_approval_(request|response)|additional_tools|ghost_snapshot|agent_message"
)


def _known(kind: str) -> str:
    if kind in ("compaction_summary", "context_compaction"):
        raise _foreign_compaction()
    if kind not in _NEEDED and not _OTHERS.fullmatch(kind):
        raise PydanticCustomError(
            "unsupported_item",
            "this server has no tools that make items of this type; send {known}",
            {"known": " or ".join(_NEEDED)},
        )
    return kind


def _foreign_compaction() -> PydanticCustomError:
    return PydanticCustomError(
        "unsupported_item",
        "only the server that made a compaction can read it; send the messages themselves",
    )


class OutputText(Answer, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Sequence[None] = ()
    logprobs: Sequence[ChosenLogprob | msgspec.Raw] | UnsetType = UNSET


class ReasoningText(Answer, kw_only=True):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputMessage(Answer, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class InputMessage(Answer, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    status: ItemStatus
    role: Literal["user", "system", "developer"]
    content: list[InputPart]


class ReasoningItem(Answer, kw_only=True):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: Sequence[None] = ()
    content: list[ReasoningText]


class CompactionItem(Answer, kw_only=True):
    """A summary, in the form of `summary.pack_summary`."""

    id: str
    type: Literal["compaction"] = "compaction"
    encrypted_content: str


class FunctionCallItem(Answer, kw_only=True):
    """`arguments` is JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str


class CustomCallItem(Answer, kw_only=True):
    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str


class FunctionCallOutputItem(Answer, kw_only=True):
    id: str
    type: Literal["function_call_output"] = "function_call_output"
    status: ItemStatus
    call_id: str
    output: str | list[InputPart]


class CustomCallOutputItem(FunctionCallOutputItem, kw_only=True):
    type: Literal["custom_tool_call_output"] = "custom_tool_call_output"  # type: ignore[assignment]


class OtherItem(Answer):
    """An item of a tool that is not a function, as the client sent it."""

    is_open = True

    id: str
    type: str


OutputItem = (
    OutputMessage
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | McpListToolsItem
    | McpCallItem
    | McpApprovalRequestItem
)
ContextItem = (
    InputMessage
    | OutputItem
    | CompactionItem
    | FunctionCallOutputItem
    | CustomCallOutputItem
    | OtherItem
)


class InputItem(WireModel):
    """One item of any type.

    `encrypted_content` of thoughts is ignored. The text of a thought is in `content` or `summary`.
    """

    type: Annotated[str | None, Field(description="message", max_length=64)] = None
    id: Annotated[str | None, Field(max_length=128)] = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: Annotated[str | None, Field(min_length=1, max_length=128)] = None
    name: Annotated[str | None, Field(min_length=1)] = None
    namespace: Annotated[str | None, Field(min_length=1)] = None
    arguments: str | None = None
    input: str | None = None
    output: Output | None = None
    summary: Text | None = None
    encrypted_content: str | None = None
    members: SkipJsonSchema[dict[str, Any]] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _keep_all_of_others(cls, data: Any) -> Any:
        """Set `members` to all members of an item of another kind."""
        if not isinstance(data, dict):
            return data
        kind = data.get("type")
        if isinstance(kind, str) and _OTHERS.fullmatch(kind):
            about = {name: data.get(name) for name in ("type", "id", "call_id")}
            return {**about, "members": data}
        return {name: value for name, value in data.items() if name != "members"}

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        for member in _NEEDED.get(_known(self.kind), ()):
            if getattr(self, member) is None:
                raise PydanticCustomError(
                    "missing_member",
                    "an item of the type {kind} needs {member}",
                    {"kind": self.kind, "member": member},
                )
        if self.kind == "compaction" and read_summary(self.encrypted_content or "") is None:
            raise _foreign_compaction()
        return self

    @property
    def kind(self) -> str:
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.id is not None else "message"

    def kept(self, item_id: str) -> Item:
        """Return the item in the API's format. `item_id` is used if the item has no id."""
        about: dict[str, Any] = {"id": self.id or item_id, "status": "completed"}
        parts = self.content or []
        texts = [part for part in parts if isinstance(part, str)]
        item: Answer
        match self.kind:
            case "message" if self.role == "assistant":
                item = OutputMessage(**about, content=[OutputText(text=text) for text in texts])
            case "message":
                item = InputMessage(**about, **self._given("role"), content=kept_parts(parts))
            case "function_call":
                call = self._given("call_id", "name", "namespace", "arguments")
                item = FunctionCallItem(**about, **call)
            case "custom_tool_call":
                call = self._given("call_id", "name", "namespace", "input")
                item = CustomCallItem(id=about["id"], **call)
            case "function_call_output":
                item = FunctionCallOutputItem(**about, **self._output)
            case "custom_tool_call_output":
                item = CustomCallOutputItem(**about, **self._output)
            case "reasoning":
                thought = ReasoningText(text="\n".join(texts) or self.summary or "")
                item = ReasoningItem(**about, content=[thought])
            case "compaction":
                item = CompactionItem(id=about["id"], **self._given("encrypted_content"))
            case "item_reference":
                return {"type": self.kind, "id": self.id}
            case _:
                return {**self.members, "id": about["id"]}
        kept: Item = msgspec.to_builtins(item)
        return kept

    @property
    def _output(self) -> dict[str, Any]:
        given = self._given("call_id", "output")
        if isinstance(self.output, list):
            given["output"] = kept_parts(self.output)
        return given

    def _given(self, *names: str) -> dict[str, Any]:
        """Return the members that the client sent."""
        members = {name: getattr(self, name) for name in names}
        return {name: value for name, value in members.items() if value is not None}


def input_message(item: Item) -> InputMessage:
    """Return the message of a client in its stored form."""
    content = stored_parts(item["content"])
    return InputMessage(id=item["id"], status=item["status"], role=item["role"], content=content)


ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})[0-9a-f]{4}")  # Ids that `item_id` makes.


def item_id(kind: str, key: str, number: int) -> str:
    """Return the id of an item.

    `key` is the end of the response's id. `number` is the number of the item in the response.
    """
    return f"{_PREFIXES.get(kind, 'item')}_{key}{number:04x}"


def messages_of(
    items: Iterable[Item], instructions: str | None, names: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Return a chat's messages. An assistant's thoughts, texts and calls of one turn are one
    message.

    `names` has the parameters of images by their addresses. Other images are from earlier turns.
    """
    parts_of = partial(chat_parts, names=names or {})
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    thought = ""
    for item in items:
        match item["type"]:
            case "reasoning":
                thought = _texts(item)
                continue
            case "function_call_output":
                content = item["output"]
                if isinstance(content, list):
                    content = parts_of(content)
                messages.append(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": content}
                )
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _turn(messages, thought, begins=bool(thought))["tool_calls"].append(call)
            case _ if item["role"] == "assistant":
                begins = bool(thought) or _has_text(messages)
                _turn(messages, thought, begins=begins)["content"] = parts_of(item["content"])
            case _:
                messages.append({"role": item["role"], "content": parts_of(item["content"])})
        thought = ""
    return messages


def characters(items: Iterable[Item]) -> int:
    """Return the total length of the items' texts and of the addresses of their images."""
    return sum(
        len(item.get("arguments", ""))
        + len(item.get("input", ""))
        + length(item.get("output", ""))
        + len(item.get("encrypted_content", ""))
        + length(item.get("content", ()))
        if item["type"] in _NEEDED
        else len(pydantic_core.to_json(item))
        for item in items
    )


def _texts(item: Item) -> str:
    return "\n".join(part.get("text", part.get("refusal", "")) for part in item["content"])


def _has_text(messages: list[dict[str, Any]]) -> bool:
    return bool(messages and messages[-1]["content"])


def _turn(messages: list[dict[str, Any]], thought: str, *, begins: bool) -> dict[str, Any]:
    """Return the assistant's message to add to: a new one if `begins` or if there is none."""
    if begins or not messages or messages[-1]["role"] != "assistant":
        message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": []}
        messages.append({**message, "reasoning_content": thought} if thought else message)
    return messages[-1]
