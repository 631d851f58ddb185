"""Models of the answers of Anthropic's endpoints, for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal

from ..core.answers import Answer

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "model_context_window_exceeded",
]


class MessagesError(Answer):
    type: str
    message: str


class MessagesErrorAnswer(Answer):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: MessagesError
    request_id: str


class InputTokens(Answer):
    input_tokens: int


class TextContent(Answer):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingContent(Answer):
    type: Literal["thinking"]
    thinking: str
    signature: str


class DirectCaller(Answer):
    type: Literal["direct"]


class ToolUseContent(Answer):
    """`caller` is always the model itself."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller


Content = TextContent | ThinkingContent | ToolUseContent


class MessageTokensDetails(Answer):
    thinking_tokens: int


class CacheCreation(Answer):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class MessageUsage(Answer):
    """Token counts.

    `input_tokens` excludes tokens found in the cache. `output_tokens_details` is set for models
    that think.
    """

    input_tokens: int
    cache_creation: CacheCreation
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageTokensDetails | None
    inference_geo: None
    server_tool_use: None
    service_tier: Literal["standard"]


class MessageAnswer(Answer):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class MessageStart(Answer):
    type: Literal["message_start"]
    message: MessageAnswer


class Ping(Answer):
    type: Literal["ping"]


class ContentBlockStart(Answer):
    type: Literal["content_block_start"]
    index: int
    content_block: Content


class TextDelta(Answer):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Answer):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(Answer):
    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(Answer):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(Answer):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(Answer):
    type: Literal["content_block_stop"]
    index: int


class StopDelta(Answer):
    stop_reason: StopReason
    stop_sequence: str | None
    stop_details: None
    container: None


class MessageDelta(Answer):
    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Answer):
    type: Literal["message_stop"]


StreamEvent = (
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | MessagesErrorAnswer
)


class MessagesModel(Answer):
    """`max_input_tokens` and `max_tokens` are set for language models."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: None


class MessagesModels(Answer):
    data: list[MessagesModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
