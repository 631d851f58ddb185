"""Models of the requests of Ollama's API.

Names and meanings are those of https://docs.ollama.com/api.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AliasChoices,
    FailFast,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..config.media import MOST_IMAGES
from ..core.limits import MAX_MESSAGES
from ..core.parameters import OLLAMA, OLLAMA_OPTIONS, Others
from ..core.schemas import Count, Integer, Seed, Stops, Texts, WireModel, disagreement, only
from ..media.parts import bad_part
from ..openai.requests import ToolCall
from ..openai.tools import MAX_TOOLS, ToolDefinition

LEVELS = ("low", "medium", "high", "max")
_NO_TEMPLATE = only(
    remedy="send raw: true and the whole prompt, or start the server with --chat-template FILE"
)
_NO_CONTEXT = only(remedy="send the conversation to /api/chat")


def parse_format(value: Any) -> str | dict[str, Any]:
    """Return "" for free text, "json", or a JSON schema."""
    if value in ("", "json") or isinstance(value, dict):
        found: str | dict[str, Any] = value
        return found
    raise PydanticCustomError("format", 'Input should be "json" or a JSON schema')


def parse_think(value: Any) -> bool | str:
    """Return whether to think, or a level of thinking."""
    if isinstance(value, bool) or value in LEVELS:
        found: bool | str = value
        return found
    raise PydanticCustomError(
        "think",
        "Input should be true, false, {levels}",
        {"levels": " or ".join(f'"{level}"' for level in LEVELS)},
    )


Format = Annotated[
    Any,
    PlainValidator(parse_format),
    WithJsonSchema({"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}),
]
Think = Annotated[
    Any,
    PlainValidator(parse_think),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"enum": [*LEVELS]}]}),
]
Images = Annotated[
    list[Annotated[str, Field(min_length=1)]],
    FailFast(),
    Field(max_length=MOST_IMAGES, description="images in base64"),
]
ModelName = Annotated[str, Field(min_length=1)]


class OllamaOptions(WireModel):
    """How to sample. Options that are not set have the model's own values."""

    others: ClassVar[Others] = OLLAMA_OPTIONS

    num_predict: Annotated[
        Integer | None,
        Field(ge=-(2**31), lt=2**31, description="0 or less: as much as the context holds"),
    ] = None
    temperature: float | None = None
    top_k: Annotated[Integer | None, Field(ge=-1, lt=2**31, description="0: all tokens")] = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[Seed | None, Field(description="-1: a random one")] = None
    stop: Stops = Field(default_factory=list)


class OllamaBody(WireModel):
    """The parameters that chats and generations share."""

    others: ClassVar[Others] = OLLAMA

    model: ModelName
    stream: bool = True
    format: Format = ""
    think: Think | None = None
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    logprobs: bool = False
    top_logprobs: Count = 0

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise disagreement("top_logprobs", "top_logprobs needs logprobs to be true")
        return self


class OllamaMessage(WireModel):
    """One message. `tool_name` names the function whose result a message of a tool is."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[ToolCall], FailFast(), Field(max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Images = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_images_of_a_user(self) -> Self:
        if self.images and self.role not in ("user", "tool"):
            raise bad_part(
                ("images",),
                f"a message of the role {self.role} holds no images; move them to a message of the "
                "user",
            )
        return self


class OllamaChatRequest(OllamaBody):
    """Body of `POST /api/chat`. Without messages the model is loaded."""

    messages: Annotated[list[OllamaMessage], FailFast(), Field(max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tools: Annotated[list[ToolDefinition], FailFast(), Field(max_length=MAX_TOOLS)] = Field(
        default_factory=list
    )


class OllamaGenerateRequest(OllamaBody):
    """Body of `POST /api/generate`. Without a prompt the model is loaded."""

    prompt: str = ""
    suffix: Annotated[str, Field(description="text that follows the answer")] = ""
    system: str = ""
    raw: Annotated[bool, Field(description="true: the prompt is used without a template")] = False
    images: Images = Field(default_factory=list)
    template: Annotated[Any, _NO_TEMPLATE] = None
    context: Annotated[Any, _NO_CONTEXT] = None

    @model_validator(mode="after")
    def _only_a_template_has_parts(self) -> Self:
        given = (name for name in ("system", "think", "images") if getattr(self, name))
        if self.is_plain and (named := next(given, None)) is not None:
            raise disagreement(
                named, "it needs the chat template, which raw and suffix do without; leave it out"
            )
        return self

    @property
    def is_plain(self) -> bool:
        """Whether the prompt is used without the chat template."""
        return self.raw or bool(self.suffix)


class ShowRequest(WireModel):
    """Body of `POST /api/show`. `name` is an older name of `model`."""

    others: ClassVar[Others] = OLLAMA

    model: Annotated[ModelName, Field(validation_alias=AliasChoices("model", "name"))]


class EmbedRequest(WireModel):
    """Body of `POST /api/embed`. Without a text the model is loaded."""

    others: ClassVar[Others] = OLLAMA

    model: ModelName
    input: Texts
    truncate: Annotated[bool, Field(description="false: texts that are too long are refused")] = (
        True
    )
    dimensions: Annotated[Integer, Field(ge=1)] | None = None
    options: OllamaOptions = Field(default_factory=OllamaOptions)


class OldEmbeddingsRequest(WireModel):
    """Body of `POST /api/embeddings`, the older form of `/api/embed`."""

    others: ClassVar[Others] = OLLAMA

    model: ModelName
    prompt: str = ""
    options: OllamaOptions = Field(default_factory=OllamaOptions)
