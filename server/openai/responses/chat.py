"""Translates a request of the Responses API into a chat."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from ...core.errors import InvalidRequest, from_validation
from ...serving.state import Serving
from ..conversation import Conversation, begin
from ..requests import ChatCompletionRequest
from .input_parts import image_names
from .items import Item, messages_of
from .other_calls import plain_items
from .requests import ResponsesRequest, TextFormat
from .tools import PromptTool, ToolChoice

# Parameters that have the same name in chats.
_SAME = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "seed",
    "ignore_eos",
    "cache_salt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "priority",
    "chat_template_kwargs",
    "parallel_tool_calls",
)
# Names of chats in error messages, and the names that replace them.
_RENAMED = (
    (re.compile(r"(?<!these )\bmessages\b(\[\d+\][.\w]*)?"), "input"),
    (re.compile(r"\bmax_completion_tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"(?<=\])\.function\b"), ""),
)


def chat_of(body: ResponsesRequest, items: Sequence[Item]) -> ChatCompletionRequest:
    """Return the chat with `items` as its messages. Raise `InvalidRequest`."""
    fields: dict[str, Any] = {
        name: getattr(body, name) for name in _SAME if name in body.model_fields_set
    }
    plain = plain_items(items, body.prompt_tools)
    _check_calls(plain)
    fields["messages"] = messages_of(plain, body.instructions, image_names(body.input))
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["reasoning_effort"] = body.reasoning.effort
    fields["response_format"] = _response_format(body.text.format)
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    tools = _allowed(body.prompt_tools, body.tool_choice)
    if tools:
        fields["tools"] = [{"type": "function", "function": tool.function()} for tool in tools]
    if tools or body.tool_choice.type != "none":
        fields["tool_choice"] = _choice(tools, body.tool_choice)
    with wire_names():
        try:
            return ChatCompletionRequest.model_validate(fields)
        except ValidationError as error:
            raise from_validation(error.errors()) from None


async def begin_within(
    serving: Serving, body: ResponsesRequest, items: Sequence[Item], response_id: str, *, size: int
) -> Conversation:
    """Return the conversation of a request. Raise the errors of `begin`.

    If `truncation` is "auto", only the last turns that fit are used, and all messages of the system
    and the developer. Turns fit if they leave room for `max_output_tokens`, or for a quarter of the
    context. `size` is the size of the request's body in bytes.
    """

    async def begun(kept: Sequence[Item]) -> Conversation | None:
        try:
            with wire_names():
                found = await begin(serving, chat_of(body, kept), response_id, size=size)
        except InvalidRequest as error:
            if body.truncation != "auto" or error.code != "context_length_exceeded":
                raise
            too_long.append(error)
            return None
        if found.requests[0].params.max_new_tokens >= least:
            return found
        cramped.append(found)
        return None

    wanted = body.max_output_tokens if body.truncation == "auto" else None
    least = min(wanted or 0, serving.limits.context_length // 4)
    cramped: list[Conversation] = []
    too_long: list[InvalidRequest] = []
    if (found := await begun(items)) is not None:
        return found
    turns = [place for place, item in enumerate(items) if place and item.get("role") == "user"]
    first, end = 0, len(turns)
    while first < end:
        middle = (first + end) // 2
        if (fitting := await begun(_from(items, turns[middle]))) is not None:
            found, end = fitting, middle
        else:
            first = middle + 1
    if found is None and not cramped:
        raise too_long[-1]
    return found or cramped[-1]


def _from(items: Sequence[Item], place: int) -> list[Item]:
    instructions = [item for item in items[:place] if item.get("role") in ("system", "developer")]
    return [*instructions, *items[place:]]


def _check_calls(items: Sequence[Item]) -> None:
    """Raise `InvalidRequest` for an output whose call is missing."""
    calls: set[str] = set()
    for item in items:
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        elif item["type"] == "function_call_output" and item["call_id"] not in calls:
            raise InvalidRequest(
                f"input: no function_call before it has the call_id {item['call_id']!r:.100} of a "
                "function_call_output; send the call, too.",
                param="input",
                code="unknown_call_id",
            )


@contextlib.contextmanager
def wire_names() -> Iterator[None]:
    """In errors raised in the block, replace names of chats by names of the Responses API."""
    try:
        yield
    except InvalidRequest as error:
        error.message = _renamed(error.message)
        error.param = error.param and _renamed(error.param)
        raise


def _renamed(text: str) -> str:
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return text


def _response_format(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    schema = {
        "name": form.name,
        "description": form.description,
        "schema": form.schema_,
        "strict": form.strict,
    }
    return {"type": form.type, "json_schema": schema}


def _allowed(tools: Sequence[PromptTool], choice: ToolChoice) -> Sequence[PromptTool]:
    """Return the tools of the prompt: with `allowed_tools` or an MCP server, only these.

    Raise `InvalidRequest` if the MCP server has no such tool.
    """
    if choice.type == "mcp":
        found = [tool for tool in tools if tool.is_of_server(choice.server_label, choice.name)]
        if not found:
            raise InvalidRequest(
                f"tool_choice: the MCP server {choice.server_label!r:.80} gave no tool "
                f"{choice.name or 'at all'!r:.80} that may be called; choose auto, or see its "
                "mcp_list_tools.",
                param="tool_choice",
                code="invalid_value",
            )
        return tools if choice.name else found
    if choice.type != "allowed_tools":
        return tools
    return [tool for tool in tools if any(one.means(tool) for one in choice.tools)]


def _choice(tools: Sequence[PromptTool], choice: ToolChoice) -> Any:
    match choice.type:
        case "function" | "custom":
            name = choice.name or ""
            named = [tool.function_name for tool in tools if tool.is_named(name, choice.namespace)]
            return {"type": "function", "function": {"name": named[0] if named else name}}
        case "mcp" if choice.name:
            label = choice.server_label
            named = [tool.function_name for tool in tools if tool.is_of_server(label, choice.name)]
            return {"type": "function", "function": {"name": named[0]}}
        case "mcp":
            return "required"
        case "allowed_tools":
            return choice.mode
    return choice.type
