"""Models of the answers of the OpenAI endpoints, for `/openapi.json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..core.answers import Answer

FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


class PromptTokensDetails(Answer):
    cached_tokens: int


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionTokensDetails(Answer):
    reasoning_tokens: int


class ChatUsageAnswer(UsageAnswer):
    """`completion_tokens_details` is set for models that think."""

    completion_tokens_details: CompletionTokensDetails | None = None


class TokenLogprobAnswer(Answer):
    """`token` has U+FFFD for a part of a character. `bytes` are the exact bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprobAnswer):
    top_logprobs: list[TokenLogprobAnswer]


class ChatLogprobs(Answer):
    content: list[ChosenLogprob]
    refusal: None


class CalledFunction(Answer):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Answer):
    """`content` is null if the message has only calls. Thoughts are sent under two names."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[None]
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallAnswer] = ()


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class CalledFunctionPiece(Answer):
    name: str = ""
    arguments: str


class ToolCallPiece(Answer):
    """The first piece of a call has its id, type and name."""

    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunctionPiece


class ChatDelta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[ToolCallPiece] = ()


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class _Head(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str


class PromptLogprob(Answer):
    """`rank` 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


# By token id, at each position of the prompt.
PromptLogprobs = Sequence[dict[str, PromptLogprob] | None]


class ChatCompletion(_Head):
    """`prompt_logprobs` is set if the request asks for it."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: ChatUsageAnswer
    prompt_logprobs: PromptLogprobs = ()


class ChatCompletionChunk(_Head):
    """`usage` is set if `stream_options` asks for it."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: ChatUsageAnswer | None = None


class CompletionLogprobsAnswer(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _TextPiece(Answer):
    index: int
    text: str
    logprobs: CompletionLogprobsAnswer | None


class CompletionChoice(_TextPiece):
    """`prompt_logprobs` is set if the request asks for it."""

    finish_reason: FinishReason
    prompt_logprobs: PromptLogprobs = ()


class CompletionChunkChoice(_TextPiece):
    finish_reason: FinishReason | None


class Completion(_Head):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: UsageAnswer


class CompletionChunk(_Head):
    """`usage` is set if `stream_options` asks for it."""

    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]
    usage: UsageAnswer | None = None


class ModelCard(Answer):
    """`max_model_len` is set for language models."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int = 0


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Answer):
    """`tokens` and `count` hold one entry per prompt if the prompt is a list."""

    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizedText(Answer):
    """The text under the names of vLLM and SGLang. Both are lists if `tokens` is a list of
    lists.
    """

    text: str | list[str]
    prompt: str | list[str]


class AddedToken(Answer):
    content: str
    special: bool


class TokenizerInfo(Answer):
    """`added_tokens_decoder` maps token ids to added tokens."""

    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    model_max_length: int
    vocab_size: int
    added_tokens_decoder: dict[str, AddedToken]
