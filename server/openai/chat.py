"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ...runtime.tokenizer.output_processor import RequestOutput
from ...runtime.tokenizer.tokenizer import Tokenizer
from ..core.answers import BODY_ERRORS, Answer, ErrorAnswer, answers
from ..http.body import JsonRequest, JsonRoute
from ..parsing.events import Arguments, CallBegins, Event, Text, Thought
from ..serving.collector import Collector
from ..serving.sse import EventStream
from ..serving.state import Serving, ServingDep, json_response
from .chunks import (
    ChunkWriter,
    CompletionTokensDetails,
    GenerationAnswer,
    UsageAnswer,
    head,
    usage_of,
)
from .conversation import AnswerReader, ChatFinishReason, Conversation, begin
from .generation import best
from .logprobs import ChatLogprobs, PromptLogprobs, TokenTrail, prompt_logprobs
from .requests import ChatCompletionRequest

router = APIRouter(route_class=JsonRoute)


class CalledFunction(Answer):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCallAnswer(Answer, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Answer, kw_only=True):
    """`content` is null if the message has only calls. Thoughts are sent under two names."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: Sequence[None] = ()
    # "reasoning_content" is DeepSeek's and SGLang's name, "reasoning" is vLLM's.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallAnswer] | UnsetType = UNSET


class ChatChoice(Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletion(GenerationAnswer, kw_only=True):
    """`prompt_logprobs` is set if the request asks for it, and `metadata` if the completion is
    stored.
    """

    object: Literal["chat.completion"] = "chat.completion"
    choices: Sequence[ChatChoice]
    usage: UsageAnswer
    service_tier: Literal["default"] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CalledFunctionPiece(Answer, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallPiece(Answer, kw_only=True):
    """The first piece of a call has its id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunctionPiece


class ChatDelta(Answer, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None


class ChatCompletionChunk(GenerationAnswer, kw_only=True):
    """`usage` is set if `stream_options` asks for it."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: Sequence[ChatChunkChoice]
    usage: UsageAnswer | UnsetType | None = UNSET
    service_tier: Literal["default"] | UnsetType = UNSET


class KeepsChats(Protocol):
    """Stores chat completions. `app.state.chats` is one."""

    def keeper(self, body: ChatCompletionRequest) -> Callable[[ChatCompletion], None] | None: ...


@router.post(
    "/v1/chat/completions",
    responses=answers(ChatCompletion, stream=ChatCompletionChunk | ErrorAnswer, errors=BODY_ERRORS),
)
async def create_chat_completion(
    body: ChatCompletionRequest, request: JsonRequest, serving: ServingDep
) -> Response:
    """Answer a conversation."""
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    tier: Literal["default"] | UnsetType = UNSET if body.service_tier is None else "default"
    chats: KeepsChats = request.app.state.chats
    keep = chats.keeper(body) if body.store else None
    conversation = await begin(serving, body, request_id, size=request.size)
    requests = conversation.requests
    if body.stream:
        start = ChatCompletionChunk(
            **head(serving, request_id, requests[0]), choices=[], service_tier=tier
        )
        chunks = (
            _ChatChunks(serving, start, conversation, body)
            if keep is None
            else _StoredChunks(serving, start, conversation, body, keep)
        )
        return EventStream(Collector(serving, requests), chunks, serving)

    def write(outputs: list[RequestOutput]) -> tuple[ChatCompletion, Response]:
        completion = _completion(serving, body, conversation, request_id, outputs)
        completion.service_tier = tier
        return completion, json_response(completion)

    with Collector(serving, requests) as collector:
        completion, response = await collector.written(write)
    if keep is not None:
        keep(completion)
    return response


def _completion(
    serving: Serving,
    body: ChatCompletionRequest,
    conversation: Conversation,
    request_id: str,
    outputs: list[RequestOutput],
) -> ChatCompletion:
    """Return the answer of a request that does not stream."""
    tokenizer = serving.engine.tokenizer
    tokens = sum([output.completion_tokens for output in outputs])
    return ChatCompletion(
        **head(serving, request_id, conversation.requests[0]),
        choices=[
            _choice(body, index, output, reader, TokenTrail(tokenizer, conversation.requests[0]))
            for index, (output, reader) in enumerate(
                zip(best(outputs, body.samples, body.n), conversation.readers, strict=False)
            )
        ],
        usage=chat_usage(conversation, tokenizer, body.samples, tokens),
        metadata=body.metadata if body.store else UNSET,
        prompt_logprobs=prompt_logprobs(
            tokenizer, outputs[0].prompt_logprobs, body.prompt_logprobs
        ),
    )


def chat_usage(
    conversation: Conversation, tokenizer: Tokenizer, samples: int, completion_tokens: int
) -> UsageAnswer:
    """Return `usage`. For models that think it includes the number of thought tokens."""
    usage = usage_of(conversation.requests, samples, completion_tokens)
    if conversation.thinking is not None:
        thoughts = conversation.reasoning_tokens(tokenizer)
        details = usage.completion_tokens_details or CompletionTokensDetails()
        details.reasoning_tokens = thoughts
        usage.completion_tokens_details = details
    return usage


def _choice(
    body: ChatCompletionRequest,
    index: int,
    output: RequestOutput,
    reader: AnswerReader,
    trail: TokenTrail,
) -> ChatChoice:
    events = reader.push(output)
    logprobs = None
    if body.logprobs:
        trail.push(output.logprobs or ())
        entries = [entry for event in events for entry in trail.read(event)]
        logprobs = ChatLogprobs(entries + trail.rest())
    message = _message(events, with_thoughts=body.include_reasoning)
    return ChatChoice(index, message, logprobs, reader.reason(output))


def _message(
    events: Sequence[Event], *, with_thoughts: bool, call_ids: Iterable[str] = ()
) -> AssistantMessage:
    """Return the message of a whole answer. Calls without one of `call_ids` get a new id."""
    ids = iter(call_ids)
    texts, thoughts = [], []
    calls: list[ToolCallAnswer] = []
    for event in events:
        match event:
            case Text(text):
                texts.append(text)
            case Thought(text):
                thoughts.append(text)
            case CallBegins(name):
                call_id = next(ids, None) or _call_id()
                calls.append(ToolCallAnswer(id=call_id, function=CalledFunction(name, "")))
            case Arguments(text):
                calls[-1].function.arguments += text
    content, thought = "".join(texts), "".join(thoughts)
    message = AssistantMessage(content=content)
    if thought and with_thoughts:
        message.reasoning_content = message.reasoning = thought
    if calls:
        message.content, message.tool_calls = content or None, calls
    return message


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class _ChatChunks(ChunkWriter):
    """Chunks of a streamed chat completion.

    Each choice begins with a chunk with the role. Chunks with thoughts, text and calls follow, and
    a chunk with the finish reason ends the choice.
    """

    def __init__(
        self,
        serving: Serving,
        start: ChatCompletionChunk,
        conversation: Conversation,
        body: ChatCompletionRequest,
    ) -> None:
        requests = conversation.requests
        super().__init__(serving, start, requests, body, is_plain=conversation.is_plain)
        self._conversation = conversation
        self._thoughts = body.include_reasoning
        self._calls = [0] * len(requests)
        self._trails = (
            [TokenTrail(serving.engine.tokenizer, request) for request in requests]
            if body.logprobs
            else None
        )

    def opening(self, index: int) -> Answer:
        return ChatChunkChoice(index, ChatDelta(role="assistant", content=""))

    def text_choice(self, index: int, text: str) -> Answer:
        return ChatChunkChoice(index, ChatDelta(content=text))

    def choices(self, index: int, output: RequestOutput) -> Sequence[Answer]:
        reader = self._conversation.readers[index]
        trail = self._trails[index] if self._trails is not None else None
        if trail is not None:
            trail.push(output.logprobs or ())
        choices = []
        for event in reader.push(output):
            entries = trail.read(event) if trail is not None else []
            if self._thoughts or not isinstance(event, Thought):
                logprobs = ChatLogprobs(entries) if entries else None
                choices.append(ChatChunkChoice(index, self._delta(index, event), logprobs))
        if output.finish_reason is not None:
            rest = trail.rest() if trail is not None else []
            logprobs = ChatLogprobs(rest) if rest else None
            choices.append(ChatChunkChoice(index, ChatDelta(), logprobs, reader.reason(output)))
        return choices

    def _delta(self, index: int, event: Event) -> ChatDelta:
        match event:
            case Text(text):
                return ChatDelta(content=text)
            case Thought(text):
                return ChatDelta(reasoning_content=text, reasoning=text)
            case CallBegins(name):
                piece = ToolCallPiece(
                    index=self._calls[index],
                    id=_call_id(),
                    type="function",
                    function=CalledFunctionPiece(name=name, arguments=""),
                )
                self._calls[index] += 1
            case Arguments(text):
                function = CalledFunctionPiece(arguments=text)
                piece = ToolCallPiece(index=self._calls[index] - 1, function=function)
        return ChatDelta(tool_calls=[piece])

    def usage(self) -> UsageAnswer:
        return chat_usage(self._conversation, self._tokenizer, self._samples, self.sent_tokens)


class _Recorder(AnswerReader):
    """An `AnswerReader` that keeps the events and the reason of one sequence."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.events: list[Event] = []
        self.finished: ChatFinishReason | None = None

    def push(self, output: RequestOutput) -> list[Event]:
        events = self._reader.push(output)
        self.events += events
        return events

    def reason(self, output: RequestOutput) -> ChatFinishReason | None:
        self.finished = self._reader.reason(output)
        return self.finished


class _StoredChunks(_ChatChunks):
    """Chunks of a completion that is stored at the end of the stream.

    Log-probabilities are not stored, because those of a long stream would fill the memory.
    """

    def __init__(
        self,
        serving: Serving,
        start: ChatCompletionChunk,
        conversation: Conversation,
        body: ChatCompletionRequest,
        keep: Callable[[ChatCompletion], None],
    ) -> None:
        self._recorders = [_Recorder(reader) for reader in conversation.readers]
        recorded = conversation._replace(readers=[*self._recorders], is_plain=False)
        super().__init__(serving, start, recorded, body)
        self._keep, self._metadata = keep, body.metadata
        self._call_ids: list[list[str]] = [[] for _ in self._recorders]

    def _delta(self, index: int, event: Event) -> ChatDelta:
        delta = super()._delta(index, event)
        for piece in delta.tool_calls or ():
            if isinstance(piece.id, str):
                self._call_ids[index].append(piece.id)
        return delta

    def end(self) -> bytes:
        start = self._start
        choices = [
            ChatChoice(
                index,
                _message(one.events, with_thoughts=self._thoughts, call_ids=ids),
                None,
                one.finished,
            )
            for index, (one, ids) in enumerate(zip(self._recorders, self._call_ids, strict=True))
        ]
        completion = ChatCompletion(
            id=start.id,
            created=start.created,
            model=start.model,
            system_fingerprint=start.system_fingerprint,
            choices=choices,
            usage=self.usage(),
            metadata=self._metadata,
        )
        self._keep(completion)
        return super().end()
