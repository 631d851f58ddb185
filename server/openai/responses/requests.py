"""Model of the body of `POST /v1/responses`.

Names and meanings are those of https://platform.openai.com/docs/api-reference/responses. Parameters
beyond OpenAI's are named as for chats.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    PrivateAttr,
    model_validator,
)

from ...core.cache_hints import CacheHints, Label
from ...core.limits import MAX_MESSAGES
from ...core.parameters import RESPONSES, Others
from ...core.schemas import (
    CacheSalt,
    Count,
    Integer,
    Metadata,
    Priority,
    Seed,
    ServiceTier,
    Stops,
    Unsupported,
    WireModel,
    disagreement,
    only,
)
from ..tools import MAX_TOOLS
from .items import InputItem
from .mcp_tools import McpTool
from .tools import (
    DeclaredTool,
    HostedTool,
    PromptTool,
    ToolChoice,
    prompt_tools_of,
    word_as_choice,
)

# Values of `include`. All but log-probabilities belong to items that this server does not make.
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
_LOGPROBS = "message.output_text.logprobs"
MAX_TOP_LOGPROBS = 20


class TextFormat(WireModel):
    """`schema` is for the type `json_schema`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and (self.schema_ is None or self.name is None):
            raise disagreement("text.format", "the type json_schema needs a name and a schema")
        return self

    def as_answer(self) -> dict[str, Any]:
        """Return the format as a response repeats it."""
        return self.model_dump(by_alias=True, exclude_none=True)


class TextOptions(WireModel):
    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Annotated[Any, Field(description="a hint, ignored")] = None


class Reasoning(WireModel):
    """`summary` is ignored: the answer contains the whole thoughts."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(WireModel):
    """`include_obfuscation` is ignored: events are not padded."""

    include_obfuscation: bool = False


class ConversationParam(WireModel):
    """A conversation by its id."""

    id: str


def _conversation_id(value: Any) -> Any:
    return value.get("id", value) if isinstance(value, dict) else value


def one_message(value: Any) -> Any:
    """Return a text as the message of a user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(CacheHints):
    """Body of `POST /v1/responses`."""

    others: ClassVar[Others] = RESPONSES

    model: str | None = None
    input: Annotated[
        list[InputItem],
        FailFast(),
        BeforeValidator(one_message, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    include: list[Includable] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)

    max_output_tokens: Annotated[Integer, Field(ge=1, lt=2**31)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)

    tools: Annotated[list[DeclaredTool], FailFast(), Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )
    tool_choice: Annotated[
        ToolChoice, BeforeValidator(word_as_choice, json_schema_input_type=str | ToolChoice)
    ] = Field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[Count | None, Field(description="limit of calls of MCP tools")] = None

    top_k: Annotated[Integer, Field(ge=-1, lt=2**31)] = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Stops = Field(default_factory=list)
    seed: Seed | None = None
    ignore_eos: bool = False
    cache_salt: CacheSalt = None
    priority: Priority = 0
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    user: Label = None
    safety_identifier: Label = None
    service_tier: ServiceTier | None = None

    truncation: Annotated[
        Literal["auto", "disabled"],
        Field(description="auto: if the turns do not fit, the first turns are left out"),
    ] = "disabled"
    conversation: Annotated[
        str | None,
        BeforeValidator(_conversation_id, json_schema_input_type=str | ConversationParam | None),
        Field(description="a conversation that the response continues, and is added to"),
    ] = None
    prompt: Annotated[Any, only(remedy="send its text in instructions and input")] = None
    context_management: Unsupported = None
    moderation: Unsupported = None

    @model_validator(mode="after")
    def _members_agree(self) -> Self:
        if self.background and not self.store:
            raise disagreement("background", "background needs store to be true")
        if self.conversation is not None and self.previous_response_id is not None:
            raise disagreement(
                "conversation", "conversation and previous_response_id exclude each other"
            )
        if self.stream_options is not None and not self.stream:
            raise disagreement("stream_options", "stream_options needs stream to be true")
        if sum(len(getattr(tool, "tools", "1")) for tool in self.tools) > MAX_TOOLS:
            raise disagreement("tools", "all namespaces together have too many tools; send 128")
        choice = self.tool_choice
        if choice.type == "allowed_tools" and not all(
            tool.is_hosted or tool.is_among(self.prompt_tools) for tool in choice.tools
        ):
            raise disagreement("tool_choice", "tool_choice names a tool that is not in tools")
        if not choice.labels <= {tool.server_label for tool in self.mcp_tools}:
            raise disagreement(
                "tool_choice", "tool_choice names an MCP server whose server_label is not in tools"
            )
        if self.model is None:
            raise disagreement(
                "model", "name the model; /v1/models lists the models of this server"
            )
        return self

    # Functions of MCP servers, which are known after the servers have listed them.
    _mcp_functions: list[PromptTool] = PrivateAttr(default_factory=list)

    @cached_property
    def _declared(self) -> list[PromptTool]:
        return prompt_tools_of(self.tools)

    @property
    def prompt_tools(self) -> list[PromptTool]:
        """The tools that the prompt describes to the model."""
        return [*self._declared, *self._mcp_functions]

    @property
    def mcp_tools(self) -> list[McpTool]:
        """The MCP servers of the request."""
        return [tool for tool in self.tools if isinstance(tool, McpTool)]

    def for_turn(self, functions: Sequence[PromptTool], **changes: Any) -> ResponsesRequest:
        """Return the request with these functions of MCP servers and other changed members."""
        turn = self.model_copy(update=changes)
        turn._mcp_functions = list(functions)
        return turn

    @property
    def left_out(self) -> list[str]:
        """Types of the tools that the prompt leaves out."""
        return sorted({tool.type for tool in self.tools if isinstance(tool, HostedTool)})

    @property
    def logprobs(self) -> bool:
        """Whether the answer contains log-probabilities."""
        return _LOGPROBS in self.include or self.top_logprobs > 0
