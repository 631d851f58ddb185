"""The body of `POST /v1/responses` as it comes over the wire.

Names and meanings are those of https://platform.openai.com/docs/api-reference/responses; parameters
beyond OpenAI's are named as for chats.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    FailFast,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ...limits import MAX_MESSAGES
from ...schemas import (
    Count,
    Integer,
    Priority,
    Seed,
    Stops,
    Unsupported,
    WireModel,
    disagreement,
    only,
)
from ..tools import MAX_TOOLS, FunctionDefinition
from .items import InputItem

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
"""What `include` may name. All but log-probabilities belong to what never occurs here."""
_LOGPROBS = "message.output_text.logprobs"
MAX_TOP_LOGPROBS = 20


def _functions_alone(value: Any) -> Any:
    """A tool, or the choice of one."""
    if isinstance(value, dict) and value.get("type", "function") != "function":
        raise PydanticCustomError(
            "unsupported_tool",
            "this server runs no tools of its own; declare a function (type function) and run it "
            "in the client",
        )
    return value


_FUNCTIONS = BeforeValidator(_functions_alone)


class FunctionTool(FunctionDefinition):
    """A function that the client runs."""

    type: Literal["function"] = "function"

    def shown(self) -> dict[str, Any]:
        """The tool as a response repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description or None,
            "parameters": self.parameters,
            "strict": self.strict,
        }


class AllowedTool(WireModel):
    type: Literal["function"] = "function"
    name: str


_WORDS = ("none", "auto", "required")


class ToolChoice(WireModel):
    """A word, which comes as the type; a function by its `name`; or some of the tools, of which
    none, or one by its `mode`, must be called.
    """

    type: Literal["none", "auto", "required", "function", "allowed_tools"] = "auto"
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[Annotated[AllowedTool, _FUNCTIONS]], Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.type == "function" and self.name is None:
            raise disagreement("tool_choice", "tool_choice of the type function needs a name")
        if self.type == "allowed_tools" and not self.tools:
            raise disagreement("tool_choice", "tool_choice of the type allowed_tools needs tools")
        return self

    def shown(self) -> Any:
        """The choice as a response repeats it."""
        if self.type in _WORDS:
            return self.type
        if self.type == "function":
            return {"type": "function", "name": self.name}
        tools = [{"type": "function", "name": tool.name} for tool in self.tools]
        return {"type": "allowed_tools", "mode": self.mode, "tools": tools}


def _word_as_choice(value: Any) -> Any:
    if isinstance(value, str):
        if value not in _WORDS:
            raise PydanticCustomError(
                "tool_choice",
                'Input should be "none", "auto", "required", {{"type": "function", "name": NAME}} '
                'or {{"type": "allowed_tools", "mode": MODE, "tools": [...]}}',
            )
        return {"type": value}
    is_some = isinstance(value, dict) and value.get("type") == "allowed_tools"
    return value if is_some else _functions_alone(value)


class TextFormat(WireModel):
    """`schema`: of the type `json_schema`."""

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

    def shown(self) -> dict[str, Any]:
        """The format as a response repeats it."""
        return self.model_dump(by_alias=True, exclude_none=True)


class TextOptions(WireModel):
    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Annotated[Any, only("medium", remedy="ask for it in the input")] = None


class Reasoning(WireModel):
    """`summary` is taken without effect: thoughts are told whole."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(WireModel):
    """`include_obfuscation` is taken without effect: nothing is padded."""

    include_obfuscation: bool = False


Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[str, Field(max_length=512)],
    ],
    Field(max_length=16),
]

Label = Annotated[str, Field(max_length=512)]
"""What a response repeats, and means nothing here."""


def _one_message(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(WireModel):
    """Body of `POST /v1/responses`."""

    model: str | None = None
    input: Annotated[
        list[InputItem],
        FailFast(),
        BeforeValidator(_one_message, json_schema_input_type=str | list[InputItem]),
        Field(min_length=1, max_length=MAX_MESSAGES),
    ]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    include: list[Includable] = Field(default_factory=list)
    metadata: Metadata = Field(default_factory=dict)

    max_output_tokens: Annotated[Integer, Field(ge=1, lt=2**31)] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: Reasoning = Field(default_factory=Reasoning)

    tools: Annotated[
        list[Annotated[FunctionTool, _FUNCTIONS]], FailFast(), Field(max_length=MAX_TOOLS)
    ] = Field(default_factory=list)
    tool_choice: Annotated[
        ToolChoice, BeforeValidator(_word_as_choice, json_schema_input_type=str | ToolChoice)
    ] = Field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[
        Count | None, Field(description="of tools that the server runs: without effect")
    ] = None

    top_k: Annotated[Integer, Field(ge=-1, lt=2**31)] = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: Stops = Field(default_factory=list)
    seed: Seed | None = None
    ignore_eos: bool = False
    priority: Priority = 0
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    user: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Annotated[str | None, Field(description="there is one: without effect")] = None

    truncation: Annotated[
        Literal["auto", "disabled"],
        Field(description="auto: where all turns do not fit, the first ones are left out"),
    ] = "disabled"
    conversation: Annotated[Any, only(remedy="send previous_response_id instead")] = None
    prompt: Annotated[Any, only(remedy="send its text in instructions and input")] = None
    context_management: Unsupported = None
    moderation: Unsupported = None

    @model_validator(mode="after")
    def _members_agree(self) -> Self:
        if self.background and not self.store:
            raise disagreement("background", "background needs store to be true")
        if self.stream_options is not None and not self.stream:
            raise disagreement("stream_options", "stream_options needs stream to be true")
        if not {tool.name for tool in self.tool_choice.tools} <= {one.name for one in self.tools}:
            raise disagreement("tool_choice", "tool_choice names a tool that is not in tools")
        return self

    @property
    def logprobs(self) -> bool:
        """Whether log-probabilities are to be told."""
        return _LOGPROBS in self.include or self.top_logprobs > 0
