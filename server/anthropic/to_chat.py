"""Translates Anthropic's requests into chat completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from ..core.errors import InvalidRequest, from_validation
from ..media.parts import ImagePart
from ..openai.requests import ChatCompletionRequest, ChatOptions
from .requests import (
    CountTokensRequest,
    ImageBlock,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

Options = TypeVar("Options", bound=ChatOptions)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Anthropic's names for members of chat completions.
_NAMES = {
    "function.parameters": "input_schema",
    "function.": "",
    "stop:": "stop_sequences:",
    "tool_choice.function": "tool_choice",
}


def chat_options(body: CountTokensRequest) -> ChatOptions:
    """Return the parameters of the prompt. Raise `InvalidRequest`."""
    return _validated(ChatOptions, _options(body))


def chat_request(body: MessagesRequest) -> ChatCompletionRequest:
    """Return the chat of a request. Raise `InvalidRequest`."""
    form = body.output_config.format or body.output_format
    members: dict[str, Any] = {
        **_options(body),
        "model": body.model,
        "stream": body.stream,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
    }
    for name in ("temperature", "top_p", "top_k", "cache_salt"):
        if name in body.model_fields_set:
            members[name] = getattr(body, name)
    if form is not None:
        members["response_format"] = {
            "type": "json_schema",
            "json_schema": {"schema": form.schema_},
        }
    return _validated(ChatCompletionRequest, members)


def _options(body: CountTokensRequest) -> dict[str, Any]:
    messages = _messages(body)
    final = messages[-1]
    if "tool_calls" in final:
        raise InvalidRequest(
            "messages: the last message calls tools; send their tool_result blocks, too.",
            param="messages",
            code="invalid_value",
        )
    # The text of the last message is the beginning of the answer.
    begun = final["role"] == "assistant"
    template: dict[str, Any] = {"enable_thinking": body.thinks, "thinking": body.thinks}
    if (effort := body.output_config.effort) is not None:
        template["reasoning_effort"] = "high" if effort == "max" else effort
    thinking = body.thinking
    is_bounded = thinking is not None and thinking.type == "enabled"
    options: dict[str, Any] = {
        "max_thinking_tokens": thinking.budget_tokens if thinking and is_bounded else None,
        "messages": messages,
        "continue_final_message": begun,
        "add_generation_prompt": not begun,
        "chat_template_kwargs": template,
        "tools": [
            {
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                }
            }
            for tool in body.prompt_tools
        ],
    }
    if (choice := body.tool_choice) is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        options["tool_choice"] = named if choice.type == "tool" else _CHOICES[choice.type]
        options["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return options


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the messages of the chat.

    Results of tools become messages. Consecutive turns of one role become one message.
    """
    turns = [_Turn("system", parts=[block.text for block in body.system])] if body.system else []
    called: dict[str, str] = {}
    for index, message in enumerate(body.messages):
        own = _Turn(message.role)
        for place, block in enumerate(message.content):
            match block:
                case TextBlock():
                    own.parts.append(block.text)
                case ImageBlock():
                    own.parts.append(block.part(f"messages[{index}].content[{place}]"))
                case ThinkingBlock():
                    own.thoughts.append(block.thinking)
                case ToolUseBlock():
                    called[block.id] = block.name
                    function = {"name": block.name, "arguments": block.input}
                    own.calls.append({"id": block.id, "function": function})
                case ToolResultBlock():
                    param = f"messages[{index}].content[{place}]"
                    if block.tool_use_id not in called:
                        param += ".tool_use_id"
                        raise InvalidRequest(
                            f"{param}: no tool_use block before it has this id.",
                            param=param,
                            code="invalid_value",
                        )
                    turns.append(_result(block, called[block.tool_use_id], param))
        if turns and turns[-1].role == own.role:
            turns[-1].add(own)
        elif own.parts or not turns or turns[-1].role != "tool":
            turns.append(own)
    return [turn.message() for turn in turns]


@dataclass(slots=True)
class _Turn:
    """A future message of a chat. `about` are members of tool results."""

    role: str
    parts: list[str | ImagePart] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    def add(self, more: _Turn) -> None:
        # Separate two messages by a line end, however the chat template joins parts of a message.
        for part in more.parts[:1]:
            _append(self.parts, part)
        self.parts += more.parts[1:]
        self.thoughts += more.thoughts
        self.calls += more.calls

    def message(self) -> dict[str, Any]:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else part for part in self.parts
        ]
        found: dict[str, Any] = {"role": self.role, "content": content, **self.about}
        if self.thoughts:
            found["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            found["tool_calls"] = self.calls
        return found


def _append(parts: list[str | ImagePart], part: str | ImagePart) -> None:
    """Append a part. A text after a text is joined to it by a line end."""
    last = parts[-1] if parts else None
    if isinstance(part, str) and isinstance(last, str):
        parts[-1] = f"{last}\n{part}"
    else:
        parts.append(part)


def _result(block: ToolResultBlock, name: str, param: str) -> _Turn:
    parts: list[str | ImagePart] = []
    for place, each in enumerate(block.content):
        if isinstance(each, TextBlock):
            _append(parts, each.text)
        else:
            _append(parts, each.part(f"{param}.content[{place}]"))
    if block.is_error:
        # Chat templates have no member for errors.
        first = parts.pop(0) if parts and isinstance(parts[0], str) else ""
        parts.insert(0, f"Error: {first}")
    return _Turn("tool", parts, about={"tool_call_id": block.tool_use_id, "name": name})


def _validated(kind: type[Options], members: dict[str, Any]) -> Options:
    try:
        return kind.model_validate(members)
    except ValidationError as invalid:
        error = from_validation(invalid.errors())
    message, param = error.message, error.param or ""
    for name, own in _NAMES.items():
        message, param = message.replace(name, own), param.replace(name, own)
    raise InvalidRequest(message, param=param or None, code=error.code)
