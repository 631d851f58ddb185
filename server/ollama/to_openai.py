"""Translates Ollama's requests into chat completions and completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from ..core.errors import InvalidRequest, from_validation
from ..media.parts import image_of
from ..openai.conversation import reasoning_of
from ..openai.requests import ChatCompletionRequest, CompletionRequest
from ..serving.state import Serving
from .requests import OllamaBody, OllamaChatRequest, OllamaGenerateRequest, OllamaOptions

_UNLIMITED = 2**31 - 1  # The context is the limit.
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
)
# Ollama's names for parameters of completions.
_NAMES = {
    "response_format.json_schema": "format",
    "response_format": "format",
    "repetition_penalty": "repeat_penalty",
}


@contextmanager
def ollama_names() -> Iterator[None]:
    """Raise errors of completions as `InvalidRequest` with Ollama's names of parameters."""
    try:
        yield
    except (ValidationError, InvalidRequest) as invalid:
        error = (
            invalid if isinstance(invalid, InvalidRequest) else from_validation(invalid.errors())
        )
        for name, own in _NAMES.items():
            error.message = error.message.replace(name, own)
        raise error from None


def chat_request(serving: Serving, body: OllamaChatRequest) -> ChatCompletionRequest:
    """Return the chat of a request. Raise `InvalidRequest`."""
    messages = [
        {
            "role": message.role,
            "content": _content(message.content, message.images, f"messages[{index}].images"),
            "reasoning_content": message.thinking or None,
            "tool_calls": message.tool_calls,
            "name": message.tool_name,
            "tool_call_id": message.tool_call_id,
        }
        for index, message in enumerate(body.messages)
    ]
    return _chat(serving, body, messages, tools=body.tools)


def prompt_chat(serving: Serving, body: OllamaGenerateRequest) -> ChatCompletionRequest:
    """Return the chat of a prompt. Raise `InvalidRequest`."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    content = _content(body.prompt, body.images, "images")
    return _chat(serving, body, [*system, {"role": "user", "content": content}])


def _content(text: str, images: Sequence[str], param: str) -> str | list[Any]:
    """Return the content of a message. Images come before the text, as Ollama places them."""
    if not images:
        return text
    parts = [image_of(image, f"{param}[{place}]") for place, image in enumerate(images)]
    return [*parts, {"type": "text", "text": text}]


def _chat(
    serving: Serving, body: OllamaBody, messages: list[dict[str, Any]], **members: Any
) -> ChatCompletionRequest:
    if body.think and reasoning_of(serving) is None:
        raise InvalidRequest(
            f"think: the model {body.model!r:.200} does not think; leave it out, or send false.",
            param="think",
            code="unsupported_parameter",
        )
    if body.think is True:
        # Templates have several names for the switch of thinking.
        members["chat_template_kwargs"] = {"enable_thinking": True, "thinking": True}
    elif body.think is not None:
        effort = body.think or "none"
        members["reasoning_effort"] = "high" if effort == "max" else effort
    return ChatCompletionRequest.model_validate(
        {
            "messages": messages,
            "logprobs": body.logprobs,
            "top_logprobs": body.top_logprobs,
            **_generation(body),
            **members,
        }
    )


def completion_request(serving: Serving, body: OllamaGenerateRequest) -> CompletionRequest:
    """Return the completion of a prompt that is used without the chat template. Raise
    `InvalidRequest`.
    """
    return CompletionRequest.model_validate(
        {
            "prompt": body.prompt,
            "suffix": body.suffix,
            "logprobs": body.top_logprobs if body.logprobs else None,
            "max_tokens": serving.default_max_tokens,
            **_generation(body),
        }
    )


def _generation(body: OllamaBody) -> dict[str, Any]:
    """Return the members that chats and completions share."""
    members: dict[str, Any] = {
        "model": body.model,
        "stream": body.stream,
        **_sampling(body.options),
    }
    if body.format == "json":
        members["response_format"] = {"type": "json_object"}
    elif body.format:
        schema = {"schema": body.format}
        members["response_format"] = {"type": "json_schema", "json_schema": schema}
    return members


def _sampling(options: OllamaOptions) -> dict[str, Any]:
    members = {name: getattr(options, name) for name in _SAMPLING}
    members["repetition_penalty"] = options.repeat_penalty
    members["seed"] = None if options.seed == -1 else options.seed
    if (most := options.num_predict) is not None:
        members["max_tokens"] = most if most > 0 else _UNLIMITED
    # A member that is set to its default would replace the model's own value.
    return {name: value for name, value in members.items() if value is not None}
