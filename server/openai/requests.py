"""Models of the requests of the OpenAI endpoints.

Names and meanings are those of https://platform.openai.com/docs/api-reference. Parameters beyond
OpenAI's, such as `top_k`, are named as in vLLM and SGLang.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic_core
from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ...runtime.tokenizer.image_marks import IMAGE
from ..core.cache_hints import CacheHints
from ..core.limits import MAX_MESSAGES
from ..core.parameters import CHAT, COMPLETIONS, Others
from ..core.schemas import (
    AdapterName,
    Count,
    IdLists,
    Metadata,
    Priority,
    Prompts,
    Refuses,
    Samples,
    SamplingFields,
    Seed,
    ServiceTier,
    Texts,
    Unsupported,
    WireModel,
    disagreement,
    only,
)
from ..serving.structured import OpenAIStructuredFields
from .content import Content, Prediction
from .tools import ToolFields


class StreamOptions(WireModel):
    """`include_usage` adds a last chunk with the usage.

    `continuous_usage_stats` adds the usage up to now to every chunk.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(SamplingFields, OpenAIStructuredFields, CacheHints):
    """The parameters that completions and chat completions share."""

    others: ClassVar[Others] = COMPLETIONS

    model: str | None = None
    best_of: Annotated[
        Samples | None,
        Field(description="samples per prompt, of which the n likeliest on average are returned"),
    ] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Count | None = None
    seed: Seed | None = None
    min_tokens: Count = 0
    include_stop_str_in_output: bool = False
    priority: Priority = 0
    prediction: Prediction | None = None

    lora_path: AdapterName = None
    use_beam_search: Unsupported = None
    bad_words: Annotated[Any, only(remedy="give their tokens a logit_bias of -100")] = None
    allowed_token_ids: Unsupported = None
    logits_processors: Unsupported = None
    vllm_xargs: Annotated[
        dict[str, str | int | float | bool | list[Any]],
        Field(max_length=64, description="arguments for the classes of --logits-processors"),
    ] = Field(default_factory=dict)
    custom_logit_processor: Unsupported = None
    stop_regex: Unsupported = None
    no_stop_trim: Annotated[Any, only(remedy="send include_stop_str_in_output instead")] = None
    truncate_prompt_tokens: Annotated[Any, only(remedy="shorten the prompt")] = None
    prompt_logprobs: Annotated[
        Count | None,
        Field(description="number of most likely tokens at each position of the prompt"),
    ] = None
    return_token_ids: Unsupported = None
    return_tokens_as_token_ids: Unsupported = None
    return_hidden_states: Unsupported = None
    moderation: Unsupported = None

    @model_validator(mode="after")
    def _samples_and_stream_agree(self) -> Self:
        if self.best_of is not None and self.best_of < self.n:
            raise disagreement("best_of", "best_of must not be smaller than n")
        if self.stream and self.samples > self.n:
            raise disagreement(
                "best_of", "best_of larger than n cannot be streamed; leave out stream or best_of"
            )
        if self.stream_options is not None and not self.stream:
            raise disagreement("stream_options", "stream_options needs stream to be true")
        if self.prompt_logprobs is not None and self.stream:
            raise disagreement(
                "prompt_logprobs", "prompt_logprobs cannot be streamed; leave out stream"
            )
        return self

    @property
    def samples(self) -> int:
        """Number of sequences that are sampled for each prompt."""
        return self.best_of or self.n


class CompletionRequest(GenerationBody):
    """Body of `POST /v1/completions`."""

    prompt: Prompts
    max_tokens: Count = 16
    echo: bool = False
    logprobs: Count | None = None
    prompt_embeds: Unsupported = None
    suffix: Annotated[str, Field(description="text that follows the completion")] = ""
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _suffix_is_not_echoed(self) -> Self:
        if self.suffix and self.echo:
            raise disagreement("suffix", "suffix and echo exclude each other")
        return self


class FunctionCall(WireModel):
    """`arguments` is JSON in a string, or an object."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any] = "{}"


class ToolCall(WireModel):
    """A call that an assistant made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call for a chat template, with `arguments` as an object.

        Text that is not a JSON object stays text.
        """
        arguments: Any = self.function.arguments
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):
                found = pydantic_core.from_json(arguments or "{}")
                arguments = found if isinstance(found, dict) else arguments
        call = {
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }
        return call if self.id is None else {"id": self.id, **call}


def _of_assistant(value: Any, info: ValidationInfo) -> Any:
    if value and info.data.get("role", "assistant") != "assistant":
        raise PydanticCustomError(
            "not_by_assistant", "only messages of the role assistant may have this; leave it out"
        )
    return value


class ChatMessage(WireModel):
    """One message. `developer` is OpenAI's newer name for `system`.

    `content` may be missing only if the message has another member with text or calls.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    name: str | None = None
    refusal: Annotated[
        str | None,
        Field(description="text with which an assistant refused"),
        AfterValidator(_of_assistant),
    ] = None
    tool_calls: Annotated[
        list[ToolCall], FailFast(), Field(max_length=MAX_MESSAGES), AfterValidator(_of_assistant)
    ] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: Annotated[
        str | None, Field(description="thoughts of an assistant"), AfterValidator(_of_assistant)
    ] = None
    reasoning: Annotated[str | None, AfterValidator(_of_assistant)] = None
    function_call: Annotated[Any, only(remedy="send tool_calls, its newer form")] = None
    audio: Unsupported = None
    content: Annotated[Content, Field(validate_default=True)] = None  # type: ignore[assignment]

    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template, with `IMAGE` for each image. A refusal is part of
        the assistant's text.
        """
        parts = [self.content] if isinstance(self.content, str) else self.content
        parts = [part for part in (*parts, self.refusal) if part]
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": [
                {"type": "text", "text": part} if isinstance(part, str) else IMAGE for part in parts
            ],
        }
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        message.update({name: value for name, value in optional.items() if value is not None})
        return (
            {**message, "tool_calls": [call.for_template() for call in self.tool_calls]}
            if self.tool_calls
            else message
        )


Messages = Annotated[list[ChatMessage], FailFast(), Field(max_length=MAX_MESSAGES)]


class ChatOptions(ToolFields):
    """Parameters of how messages become a prompt."""

    messages: Messages = Field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    functions: Annotated[Any, only(remedy="send tools, its newer form")] = None
    function_call: Annotated[
        Any, only("none", "auto", remedy="send tool_choice, its newer form")
    ] = None
    documents: Unsupported = None
    chat_template: Unsupported = None

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise disagreement(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            )
        return self

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template besides messages and tools.

        Templates have several names for the switch of thinking.
        """
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        thinks = self.reasoning_effort != "none"
        kwargs: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
        if thinks:
            kwargs["reasoning_effort"] = self.reasoning_effort
        return {**kwargs, **self.chat_template_kwargs}


def _no_search(value: Any) -> Any:
    # An empty object asks for a search, too.
    if value is not None:
        raise PydanticCustomError(
            "unsupported_parameter", "this server has no search; leave it out"
        )
    return value


class ChatCompletionRequest(GenerationBody, ChatOptions):
    """Body of `POST /v1/chat/completions`."""

    others: ClassVar[Others] = CHAT

    messages: Annotated[Messages, Field(min_length=1)]
    store: Annotated[
        bool, Field(description="store the completion, for GET /v1/chat/completions/{id}")
    ] = False
    metadata: Metadata = Field(default_factory=dict)
    service_tier: ServiceTier | None = None
    max_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Count = 0
    audio: Unsupported = None
    modalities: Annotated[Any, only(["text"])] = None
    separate_reasoning: Annotated[
        bool, Field(description="false: content includes the thoughts as the model writes them")
    ] = True
    include_reasoning: Annotated[
        bool, Field(description="false: the answer leaves out thoughts")
    ] = True
    max_thinking_tokens: Annotated[
        Count | None, Field(description="maximum number of thought tokens; 0: no thought")
    ] = None
    thinking_token_budget: Annotated[
        Count | None, Field(description="vLLM's name of max_thinking_tokens")
    ] = None
    web_search_options: Annotated[Any, Refuses(_no_search)] = None
    echo: Annotated[Any, only(remedy="it is for /v1/completions")] = None
    suffix: Unsupported = None
    add_special_tokens: Annotated[
        bool, Field(description="add special tokens besides those of the chat template")
    ] = False

    @property
    def thinking_budget(self) -> tuple[str, int] | None:
        """The parameter that bounds the thought, and its value."""
        for name in ("max_thinking_tokens", "thinking_token_budget"):
            if (budget := getattr(self, name)) is not None:
                return name, budget
        return None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise disagreement("top_logprobs", "top_logprobs needs logprobs to be true")
        return self


class TokenizeRequest(ChatOptions):
    """Body of `POST /v1/tokenize`: `prompt`, `messages` as in a chat, or llama.cpp's `content`.

    A chat template adds its own special tokens.
    """

    model: str | None = None
    prompt: Texts | None = None
    add_special_tokens: bool | None = None
    content: Annotated[str | None, Field(description="llama.cpp's name of prompt")] = None
    add_special: Annotated[bool, Field(description="add special tokens to content")] = False
    parse_special: Annotated[
        bool, Field(description="false: content must not contain the text of a special token")
    ] = True
    with_pieces: Annotated[bool, Field(description="objects of token id and text, for content")] = (
        False
    )

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        inputs = (self.prompt is not None, bool(self.messages), self.content is not None)
        if sum(inputs) != 1:
            raise disagreement("prompt", "send one of prompt, messages and content")
        if self.with_pieces and self.content is None:
            raise disagreement("with_pieces", "with_pieces needs content")
        return self


class DetokenizeRequest(WireModel):
    """Body of `POST /v1/detokenize`."""

    model: str | None = None
    tokens: IdLists
    skip_special_tokens: bool = True
