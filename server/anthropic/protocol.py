"""The requests of Anthropic's Messages API as they come over the wire.

Names and meanings are those of https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from ..limits import MAX_MESSAGES
from ..openai.tools import MAX_TOOLS
from ..schemas import Integer, Unsupported, WireModel, disagreement

_BY_ROLE = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
_MEDIA = ("image", "document", "search_result")


def parse_blocks(value: Any) -> Any:
    """Content blocks; a string is a block of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError(
            "content_type", "Input should be a string or a list of content blocks"
        )
    for index, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in _MEDIA:
            message = "block {index}: this model does not support {kind} input; send text"
            raise PydanticCustomError(
                "unsupported_content", message, {"index": index, "kind": kind}
            )
    return value


class TextBlock(WireModel):
    type: Literal["text"]
    text: str


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: str
    name: Annotated[str, Field(min_length=1)]
    input: dict[str, Any]


class ThinkingBlock(WireModel):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(WireModel):
    """A thought that only its author can read."""

    type: Literal["redacted_thinking"]


Texts = Annotated[
    list[TextBlock],
    FailFast(),
    BeforeValidator(parse_blocks, json_schema_input_type=str | list[TextBlock]),
]


def text_of(blocks: list[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks)


class ToolResultBlock(WireModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field(default_factory=list)
    is_error: bool = False


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class Message(WireModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        FailFast(),
        BeforeValidator(parse_blocks, json_schema_input_type=str | list[Block]),
    ]

    @model_validator(mode="after")
    def _blocks_are_of_the_role(self) -> Self:
        for block in self.content:
            if block.type not in _BY_ROLE[self.role]:
                raise PydanticCustomError(
                    "block_type",
                    "a message of the role {role} has no blocks of the type {kind}",
                    {"role": self.role, "kind": block.type},
                )
        return self


class MessagesTool(WireModel):
    """A tool that the client runs. Anthropic's own have other types."""

    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False


class MessagesToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise disagreement("tool_choice.name", "a tool_choice of the type tool needs a name")
        return self


class Thinking(WireModel):
    """`adaptive`: the model thinks as long as it likes."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[Integer, Field(ge=1, lt=2**31)] | None = None


class OutputFormat(WireModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WireModel):
    """`effort` is told to the chat template."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(WireModel):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = Field(default_factory=list)
    tools: Annotated[list[MessagesTool], FailFast(), Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    mcp_servers: Unsupported = None

    @property
    def thinks(self) -> bool:
        """Whether the model is asked to."""
        return self.thinking is not None and self.thinking.type != "disabled"


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`. `output_format` is an older place of `output_config.format`."""

    max_tokens: Annotated[Integer, Field(ge=1, lt=2**31)]
    stream: bool = False
    stop_sequences: list[str] = Field(default_factory=list)
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=0, lt=2**31, description="0: all tokens")] = 0
    output_format: OutputFormat | None = None
    container: Unsupported = None

    @model_validator(mode="after")
    def _budget_is_given_and_fits(self) -> Self:
        if self.thinking is not None and self.thinking.type == "enabled":
            budget = self.thinking.budget_tokens
            if budget is None:
                raise disagreement(
                    "thinking.budget_tokens", "thinking that is enabled needs budget_tokens"
                )
            if budget >= self.max_tokens:
                raise disagreement(
                    "thinking.budget_tokens", "budget_tokens must be less than max_tokens"
                )
        return self
