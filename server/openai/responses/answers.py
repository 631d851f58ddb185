"""Models of the answers of `/v1/responses`, for `/openapi.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from ...core.answers import Answer
from ..answers import ChosenLogprob

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: Sequence[ChosenLogprob] = ()


class InputText(Answer):
    type: Literal["input_text"]
    text: str


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class InputMessage(Answer):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["user", "system", "developer"]
    content: list[InputText]


class ReasoningItem(Answer):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[None]
    content: list[ReasoningText]


class FunctionCallItem(Answer):
    """`arguments` is JSON text."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(Answer):
    id: str
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class FunctionCallOutputItem(Answer):
    id: str
    type: Literal["function_call_output"]
    status: ItemStatus
    call_id: str
    output: str


class CustomCallOutputItem(FunctionCallOutputItem):
    type: Literal["custom_tool_call_output"]  # type: ignore[assignment]


class OtherItem(BaseModel):
    """An item of a tool that is not a function, as the client sent it."""

    model_config = ConfigDict(extra="allow")

    id: str
    type: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class ResponseError(Answer):
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class InputTokensDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


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
    summary: None


class ResponseText(Answer):
    format: dict[str, Any]
    verbosity: Literal["medium"]


class ResponseTool(Answer):
    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, Any]
    strict: bool


class ResponseCustomTool(Answer):
    type: Literal["custom"]
    name: str
    description: str | None
    format: dict[str, Any]


class ResponseNamespace(Answer):
    type: Literal["namespace"]
    name: str
    description: str
    tools: list[ResponseTool | ResponseCustomTool]


class ResponseAnswer(Answer):
    """A response. If `store`, it can be retrieved by its id."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Status
    background: bool
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
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: ResponseText
    tool_choice: str | dict[str, Any]
    tools: list[ResponseTool | ResponseCustomTool | ResponseNamespace]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputTokenCount(Answer):
    object: Literal["response.input_tokens"]
    input_tokens: int


class InputItems(Answer):
    """A page of input items."""

    object: Literal["list"]
    data: list[
        InputMessage | OutputItem | FunctionCallOutputItem | CustomCallOutputItem | OtherItem
    ]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseEvent(BaseModel):
    """One event of a stream. Its other members depend on the type."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
