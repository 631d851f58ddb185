"""Models of the requests of Anthropic's Messages API.

Names and meanings are those of https://docs.anthropic.com/en/api/messages.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, FailFast, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ..core.errors import UNION_TAG
from ..core.limits import MAX_MESSAGES
from ..core.parameters import MESSAGES, Others
from ..core.schemas import CacheSalt, Integer, Unsupported, WireModel, disagreement, type_of
from ..media.parts import ImagePart, bad_part
from ..openai.tools import MAX_TOOLS

_BY_ROLE = {
    "system": ("text",),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
_MEDIA = ("document", "search_result")
# Types of tools that Anthropic's servers run, or that Anthropic's models have learned.
_SERVER_TOOL = (
    r"^(web_search|web_fetch|code_execution|bash|text_editor|computer|memory|advisor|mcp_toolset"
    r"|tool_search_tool_(regex|bm25))(_\d{8})?$"
)
# Types of blocks that Anthropic's servers make.
_SERVER_BLOCK = r"^((server|mcp)_tool_use|[a-z_]+_tool_result|container_upload|compaction)$"


def parse_blocks(value: Any) -> Any:
    """Return content blocks. A string becomes one block of text."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError(
            "content_type", "Input should be a string or a list of content blocks"
        )
    for index, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in _MEDIA:
            message = "block {index}: {kind} input is not supported; send text or images"
            raise PydanticCustomError(
                "unsupported_content", message, {"index": index, "kind": kind}
            )
    return value


def parse_result_blocks(value: Any) -> Any:
    """Return the content blocks of a tool's result. Blocks without text are replaced by a note."""
    return parse_blocks([_seen(block) for block in value] if isinstance(value, list) else value)


def _seen(block: Any) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "tool_reference":
        return {"type": "text", "text": str(block.get("tool_name"))}
    source = block.get("source") if kind == "image" else None
    if kind in _MEDIA or (isinstance(source, dict) and source.get("type") == "file"):
        return {"type": "text", "text": f"({kind}: this model reads only text)"}
    return block


class CacheControl(WireModel):
    """Marks the end of a prefix that later requests will begin with."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Cacheable(WireModel):
    """A tool or block with which a marked prefix may end."""

    cache_control: CacheControl | None = None


class TextBlock(Cacheable):
    type: Literal["text"]
    text: str


class ImageSource(WireModel):
    """An image in base64, or its address."""

    type: Literal["base64", "url"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"] | None = None
    data: str = ""
    url: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        member = "data" if self.type == "base64" else "url"
        if not getattr(self, member):
            raise disagreement(member, f"a source of the type {self.type} needs {member}")
        return self


class ImageBlock(Cacheable):
    type: Literal["image"]
    source: ImageSource

    def part(self, param: str) -> ImagePart:
        """Return the image for a chat. `param` is the parameter of this block."""
        return ImagePart(self.source.url, self.source.data, param=f"{param}.source")


class ToolUseBlock(Cacheable):
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


ResultBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(Cacheable):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[
        list[ResultBlock],
        FailFast(),
        BeforeValidator(parse_result_blocks, json_schema_input_type=str | list[dict[str, Any]]),
    ] = Field(default_factory=list)
    is_error: bool = False


class ServerBlock(WireModel):
    """A block from Anthropic's servers, which the prompt leaves out."""

    type: Annotated[str, Field(pattern=_SERVER_BLOCK)]


def _block_type(value: Any) -> str:
    kind = type_of(value)
    is_server = isinstance(kind, str) and re.match(_SERVER_BLOCK, kind)
    return UNION_TAG + ("server" if is_server else str(kind))


Block = Annotated[
    Annotated[TextBlock, Tag(UNION_TAG + "text")]
    | Annotated[ImageBlock, Tag(UNION_TAG + "image")]
    | Annotated[ToolUseBlock, Tag(UNION_TAG + "tool_use")]
    | Annotated[ToolResultBlock, Tag(UNION_TAG + "tool_result")]
    | Annotated[ThinkingBlock, Tag(UNION_TAG + "thinking")]
    | Annotated[RedactedThinkingBlock, Tag(UNION_TAG + "redacted_thinking")]
    | Annotated[ServerBlock, Tag(UNION_TAG + "server")],
    Discriminator(_block_type),
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
        for index, block in enumerate(self.content):
            if block.type not in _BY_ROLE[self.role] and not isinstance(block, ServerBlock):
                raise bad_part(
                    ("content", index),
                    f"a message of the role {self.role} has no blocks of the type {block.type}; "
                    "move it to a message of the user",
                )
        return self


class MessagesTool(Cacheable):
    """A tool that the client runs."""

    type: Literal["custom"] = "custom"
    name: str
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool = False


class ServerTool(WireModel):
    """A tool of Anthropic's servers, which the prompt leaves out."""

    type: Annotated[str, Field(pattern=_SERVER_TOOL)]


def _tool_type(value: Any) -> str:
    kind = type_of(value)
    is_server = isinstance(kind, str) and re.match(_SERVER_TOOL, kind)
    return UNION_TAG + ("server" if is_server else "custom")


DeclaredTool = Annotated[
    Annotated[MessagesTool, Tag(UNION_TAG + "custom")]
    | Annotated[ServerTool, Tag(UNION_TAG + "server")],
    Discriminator(_tool_type),
]


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
    """With `adaptive` the length of the thought is not limited."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[Integer, Field(ge=1, lt=2**31)] | None = None


class OutputFormat(WireModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(WireModel):
    """`effort` is passed to the chat template."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(WireModel):
    """Body of `POST /v1/messages/count_tokens`."""

    others: ClassVar[Others] = MESSAGES

    model: str | None = None
    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = Field(default_factory=list)
    tools: Annotated[list[DeclaredTool], FailFast(), Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    mcp_servers: Unsupported = None

    @property
    def prompt_tools(self) -> list[MessagesTool]:
        """The tools that the prompt describes to the model."""
        return [tool for tool in self.tools if isinstance(tool, MessagesTool)]

    @property
    def left_out(self) -> list[str]:
        """Types of the tools and blocks that the prompt leaves out."""
        tools = {tool.type for tool in self.tools if isinstance(tool, ServerTool)}
        blocks = (block for message in self.messages for block in message.content)
        return sorted(tools | {block.type for block in blocks if isinstance(block, ServerBlock)})

    @property
    def thinks(self) -> bool:
        """Whether the request enables thinking."""
        return self.thinking is not None and self.thinking.type != "disabled"


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`. `output_format` is an older name of `output_config.format`."""

    max_tokens: Annotated[Integer, Field(ge=1, lt=2**31)]
    stream: bool = False
    stop_sequences: list[str] = Field(default_factory=list)
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=0, lt=2**31, description="0: all tokens")] = 0
    cache_salt: CacheSalt = None
    cache_control: Annotated[
        CacheControl | None, Field(description="marks the whole prompt, as after its last block")
    ] = None
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
