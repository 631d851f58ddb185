"""The answer of `/v1/responses`: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

import secrets
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from ...core.answers import Answer
from .items import OutputItem
from .mcp_tools import ResponseMcpTool
from .tools import ResponseCustomTool, ResponseNamespace, ResponseTool

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
LIVE = ("queued", "in_progress")  # States of a response that has not ended.
RESPONSE_ID = "resp_"


class ResponseError(Answer):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    """`image_tokens` is set for input with images."""

    cached_tokens: int
    cache_write_tokens: int = 0
    image_tokens: int | UnsetType = UNSET


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReasoning(Answer):
    effort: str | None
    summary: None = None


class ResponseText(Answer):
    format: dict[str, Any]
    verbosity: Literal["medium"] = "medium"


class ConversationId(Answer):
    id: str


class ResponseAnswer(Answer, kw_only=True):
    """A response. If `store`, it can be retrieved by its id."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
    conversation: ConversationId | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    frequency_penalty: float
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool | ResponseCustomTool | ResponseNamespace | ResponseMcpTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


def new_id() -> str:
    """Return an id that cannot be guessed, because the id gives access to the response."""
    return RESPONSE_ID + secrets.token_hex(16)
